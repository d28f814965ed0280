"""What all policies that grow from a drafter share."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from quickbeam.draft.base import Context, Drafter, DraftRequest, Laws
from quickbeam.tree import TokenTree
from quickbeam.trees.base import TreePolicy
from quickbeam.trees.draws import Draws, drawn, ranked


class DraftedPolicy(TreePolicy):
    """Grows from one drafter: its likeliest tokens as certain proposals at temperature 0, draws from its laws above."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.sources = (drafter,)

    def situation(self, context: Context) -> int:
        return 3  # a drafter is right about 3 times in 4, wherever it is

    def ask(
        self, context: Context, tree: TokenTree, nodes: Sequence[int], count: int, least: Sequence[float] | None = None
    ) -> Generator[DraftRequest, Laws | None, list[Draws]]:
        """The children that each of `nodes` may get: any number above temperature 0. At temperature 0 `count` of them; `least`: for each
        node, the probability down to which they are wanted."""
        laws = yield DraftRequest(context, tree, nodes)
        assert laws is not None
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
