"""The contract of a method: it spends a budget of nodes on candidates from its sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from quickbeam.drafters.base import Context, DraftProbs, DraftRequest, Source
from quickbeam.tree import TokenTree


def _learn_nothing(tree: TokenTree, path: Sequence[int]) -> None:
    """Learn nothing, as most methods do."""


class Proposal(NamedTuple):
    """A draft tree, with what its method learns from it.

    - `learn(tree, path)` is called after verification. `tree` is the verified tree, which may be
      only the first nodes of the proposed one. `path` is the accepted nodes, the root first.
    """

    tree: TokenTree
    learn: Callable[[TokenTree, Sequence[int]], None] = _learn_nothing


# The steps of a method that proposes a tree. The generator yields requests to the drafter. It is
# sent distributions, or None where the call is not worth its time. It returns the proposal.
ProposalSteps = Generator[DraftRequest, DraftProbs | None, Proposal]


class Method(ABC):
    """Proposes draft trees from the sources it was made with.

    All sequences share what a method learns. What belongs to one tree is kept in its generator.

    - `sources`: the sources of its candidates.
    - `uses_cost_model`: whether it uses `Context.node_costs` where they are given, which is where
      no children are drawn. The budget is then only an upper bound.
    """

    sources: Sequence[Source] = ()
    uses_cost_model = False

    @abstractmethod
    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        """Propose a tree rooted at `context.ids[-1]`.

        It has at most `budget` nodes, the root included, none deeper than `max_depth`. Nodes are
        added in order of worth where the method has such an order.
        """


def without_calls(
    tree: TokenTree, learn: Callable[[TokenTree, Sequence[int]], None] = _learn_nothing
) -> ProposalSteps:
    """Return the steps to propose a tree that takes no call of a drafter."""
    yield from ()
    return Proposal(tree, learn)


class NoDraft(Method):
    """Plain decoding: the tree is the root alone."""

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        return without_calls(TokenTree(context.ids[-1]))
