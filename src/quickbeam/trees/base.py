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
    """A draft tree with what its policy learns from it. `learn(tree, path)` is called with the
    verified tree, which may be only its first nodes, and the accepted nodes, the root first.
    `truth`: accepted tokens for each token that `tree.value` expects; None where values are no
    expectations."""

    tree: TokenTree
    learn: Callable[[TokenTree, Sequence[int]], None] = _nothing
    truth: float | None = None


# It yields requests to the drafter and is sent distributions, or None where the call is not worth
# its time; it ends with a tree.
Growth = Generator[DraftRequest, Laws | None, Grown]


class TreePolicy(ABC):
    """Grows draft trees from the sources it was made with. What it learns is shared by all
    sequences; what belongs to one tree is kept in the generator that grows it.

    `nested`: the first m nodes of a tree are what a budget of m would have grown, or nearly (drawn
    nodes: have the same distribution). `priced`: it uses the marginal costs of `Context.prices`
    where they are given (unless it draws children), and the budget is only an upper bound.
    """

    sources: Sequence[Source] = ()
    nested = True
    priced = False

    def situation(self, context: Context) -> int:
        """A rough class of how many tokens the next tree will give, 0 (few) to 4: budgets are
        learned separately for each (`engine/budget.py`)."""
        return 0

    @abstractmethod
    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        """A tree rooted at `context.ids[-1]` of at most `budget` nodes, the root included, none
        deeper than `max_depth`.

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
