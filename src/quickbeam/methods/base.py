"""The contract of a tree policy: it spends a budget of nodes on candidates from sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from quickbeam.drafters.base import Context, DraftProbs, DraftRequest, Source
from quickbeam.tree import TokenTree


def _nothing(tree: TokenTree, path: Sequence[int]) -> None:
    """Learn nothing, as most policies do."""


class Grown(NamedTuple):
    """A draft tree, with what its policy learns from it.

    - `learn(tree, path)` is called after verification. `tree` is the verified tree, which may be
      only the first nodes of the grown one. `path` is the accepted nodes, the root first.
    - `accepted_per_expected`: accepted tokens for each token that `tree.value` leads one to
      expect. None if the
      values are no expectations.
    """

    tree: TokenTree
    learn: Callable[[TokenTree, Sequence[int]], None] = _nothing
    accepted_per_expected: float | None = None


# The generator of a growing tree. It yields requests to the drafter. It is sent distributions, or
# None where the call is not worth its time. It returns the tree.
Growth = Generator[DraftRequest, DraftProbs | None, Grown]


class TreePolicy(ABC):
    """Grows draft trees from the sources it was made with.

    All sequences share what a policy learns. What belongs to one tree is kept in the generator that
    grows it.

    - `sources`: the sources of its candidates.
    - `nested`: whether the first m nodes of a tree are what a budget of m would have grown, or
      nearly. For drawn nodes, they have the same distribution.
    - `priced`: whether it uses the marginal costs of `Context.marginal_cost` where they are given
      (unless
      it draws children). The budget is then only an upper bound.
    """

    sources: Sequence[Source] = ()
    nested = True
    priced = False

    def situation(self, context: Context) -> int:
        """Return a rough class of how many tokens the next tree will give, from 0 (few) to 4.

        Budgets are learned separately for each class (`engine/budget.py`).
        """
        return 0

    @abstractmethod
    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        """Grow a tree rooted at `context.ids[-1]`.

        It has at most `budget` nodes, the root included, none deeper than `max_depth`. Nodes are
        added in order of worth where the policy has such an order.
        """


class Undrafted(TreePolicy):
    """A tree policy that asks no drafter. Subclasses define `tree`."""

    @abstractmethod
    def tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        """Return the tree that `grow` is to end with."""

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        yield from ()
        return Grown(self.tree(context, budget, max_depth))


class NoDraft(Undrafted):
    """Plain decoding: the tree is the root alone."""

    def tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        return TokenTree(context.ids[-1])


def grown(growth: Growth, answer: Callable[[list[DraftRequest]], list[DraftProbs]]) -> Grown:
    """Run one growth to its end, with `answer` as the drafter's."""
    distributions: DraftProbs | None = None
    while True:
        try:
            request = growth.send(distributions)  # a generator has to be sent None first
        except StopIteration as end:
            result: Grown = end.value
            return result
        (distributions,) = answer([request])
