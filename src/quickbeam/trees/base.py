"""The contract of a tree policy: spend a budget of nodes on candidates from sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from quickbeam.draft.base import Context, DraftRequest, Laws, Source
from quickbeam.tree import TokenTree


def _nothing(tree: TokenTree, path: Sequence[int]) -> None:
    """Most policies learn nothing."""


class Grown(NamedTuple):
    """A tree, and who wants to know what became of it: `learn(tree, path)` is told the accepted nodes of the tree that was verified, the
    root first. That tree may hold the first nodes only. `truth`: accepted tokens that come of each one that `tree.value` promises; None
    where values promise nothing."""

    tree: TokenTree
    learn: Callable[[TokenTree, Sequence[int]], None] = _nothing
    truth: float | None = None


# It yields what it wants to know of a drafter and is sent laws, or None where the answer is not worth its time; it ends with a tree.
Growth = Generator[DraftRequest, Laws | None, Grown]


class TreePolicy(ABC):
    """Grows draft trees from the sources it was made with. What it learns is shared by all sequences; what belongs to one tree is the
    growth's own.

    `nested`: the first m nodes of a tree are what a budget of m would have grown, or nearly (where nodes are drawn: have the same law).
    `priced`: unless it draws children it heeds `Context.prices` where they are given, and the budget only bounds it.
    """

    sources: Sequence[Source] = ()
    nested = True
    priced = False

    def situation(self, context: Context) -> int:
        """A rough class of how much the next tree promises, 0 (little) to 4: budgets are learned for each apart (`engine/budget.py`)."""
        return 0

    @abstractmethod
    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        """A tree rooted at `context.ids[-1]` of at most `budget` nodes, the root included, none deeper than `max_depth`.

        Nodes are added in order of worth where the policy has one.
        """


class Undrafted(TreePolicy):
    """A policy that asks no drafter."""

    @abstractmethod
    def tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        """What `grow` ends with."""

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        yield from ()
        return Grown(self.tree(context, budget, max_depth))


class NoDraft(Undrafted):
    """Plain decoding: the root alone."""

    def tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        return TokenTree(context.ids[-1])


def grown(growth: Growth, answer: Callable[[list[DraftRequest]], list[Laws]]) -> Grown:
    """Run one growth to its end by itself; `answer` is a drafter's."""
    laws: Laws | None = None
    while True:
        try:
            request = growth.send(laws)  # the first time None, as a generator wants it
        except StopIteration as end:
            result: Grown = end.value
            return result
        (laws,) = answer([request])
