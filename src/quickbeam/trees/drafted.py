"""What all policies that grow from a drafter share."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from quickbeam.draft.base import Context, Drafter, HeadUse, Laws
from quickbeam.tree import TokenTree
from quickbeam.trees.base import TreePolicy
from quickbeam.trees.draws import Draws, drawn, ranked


class DraftedPolicy(TreePolicy):
    """Grows from one drafter: its likeliest tokens as certain proposals at temperature 0, draws from its laws above.

    Over all trees, `calls` and `rows` count the drafter's calls and the laws they gave, and `seconds` is the time spent in them.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.sources = (drafter,)
        self.calls = 0
        self.rows = 0
        self.seconds = 0.0

    @property
    def head(self) -> HeadUse | None:
        return self.drafter.head

    def situation(self, context: Context) -> int:
        return 3  # a drafter is right about 3 times in 4, wherever it is

    def laws(self, context: Context, tree: TokenTree, nodes: Sequence[int]) -> Laws:
        """Of `len(nodes)` nodes: one call of the drafter."""
        began = perf_counter()
        laws = self.drafter.compact(context, tree, nodes)
        self.seconds += perf_counter() - began
        self.calls += 1
        self.rows += len(nodes)
        return laws

    def ask(self, context: Context, tree: TokenTree, nodes: Sequence[int], count: int, least: Sequence[float] | None = None) -> list[Draws]:
        """The children that each of `nodes` may get: any number above temperature 0. At temperature 0 `count` of them; `least`: for each
        node, the probability down to which they are wanted."""
        laws = self.laws(context, tree, nodes)
        if context.temperature > 0:
            return drawn(laws, context.generator)
        return ranked(laws, count, least)

    def add(self, tree: TokenTree, node: int, draws: Draws, i: int) -> int | None:
        """Fill slot i of `node`; the new node, or `None` where the law gives no further token."""
        draw = draws.draw(i)
        if draw is None:
            return None
        token, probability = draw
        return tree.add(node, token, self.drafter.name, tree.value[node] * probability, draws.law, probability)
