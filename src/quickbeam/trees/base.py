"""The contract of a tree policy: spend a budget of nodes on candidates from sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quickbeam.draft.base import Context, HeadUse, Source
from quickbeam.tree import TokenTree


class TreePolicy(ABC):
    """Grows one draft tree a step from the sources it was made with. It may learn from one sequence for the next.

    `calls`: of a drafter, over all trees; `seconds`: spent in them. `nested`: the first m nodes of a tree are what a budget of m would have
    grown, or nearly (where nodes are drawn: have the same law). `priced`: at temperature 0 it heeds `Context.prices` where they are given,
    and the budget only bounds it.
    """

    sources: Sequence[Source] = ()
    calls = 0
    seconds = 0.0
    nested = True
    priced = False

    @property
    def head(self) -> HeadUse | None:
        """What is counted of the drafter's head."""
        return None

    def verified(self, tree: TokenTree, path: Sequence[int]) -> None:  # noqa: B027 (most have nothing to do)
        """What became of the tree grown last: the accepted nodes, the root first."""

    def situation(self, context: Context) -> int:
        """A rough class of how much the next tree promises, 0 (little) to 4: budgets are learned for each apart (`engine/budget.py`)."""
        return 0

    @abstractmethod
    def grow(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        """A tree rooted at `context.ids[-1]` of at most `budget` nodes, the root included, none deeper than `max_depth`.

        Nodes are added in order of worth where the policy has one.
        """


class NoDraft(TreePolicy):
    """Plain decoding: the root alone."""

    def grow(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        return TokenTree(context.ids[-1])
