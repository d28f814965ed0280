"""What all policies that grow from a drafter share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quickbeam.draft.base import Context, Drafter
from quickbeam.grow.base import TreePolicy
from quickbeam.grow.draws import Draws, drawn, ranked
from quickbeam.tree import TokenTree


class DraftedPolicy(TreePolicy):
    """Grows from one drafter: its likeliest tokens as certain proposals at temperature 0, draws from its laws above.

    `calls` and `rows` count the drafter's calls and the laws they gave, over all trees.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.sources = (drafter,)
        self.calls = 0
        self.rows = 0

    def laws(self, context: Context, tree: TokenTree, nodes: Sequence[int]) -> torch.Tensor:
        """`[len(nodes), vocab]`: one call of the drafter."""
        self.calls += 1
        self.rows += len(nodes)
        return self.drafter.laws(context, tree, nodes)

    def ask(self, context: Context, tree: TokenTree, nodes: Sequence[int], count: int) -> list[Draws]:
        """The children that each of `nodes` may get: `count` of them at temperature 0, any number above (`count`: about how many)."""
        laws = self.laws(context, tree, nodes)
        return drawn(laws, context.generator, count) if context.temperature > 0 else ranked(laws, count)

    def add(self, tree: TokenTree, node: int, draws: Draws, i: int) -> int | None:
        """Fill slot i of `node`; the new node, or `None` where the law gives no further token."""
        draw = draws.draw(i)
        if draw is None:
            return None
        token, probability = draw
        return tree.add(node, token, self.drafter.name, tree.value[node] * probability, draws.law)
