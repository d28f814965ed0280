"""DDTree (2604.12989): the likeliest paths by the marginals of a block drafter.

A block drafter without a Markov head gives one distribution for each depth, whatever was drafted
before. So the tree takes no further call of the drafter.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from typing import NamedTuple

from quickbeam.drafters.base import GRAMMAR, Context, Drafter, DraftProbs, DraftRequest
from quickbeam.methods.base import Method, Proposal, ProposalSteps
from quickbeam.methods.children import likeliest_children
from quickbeam.noise import Row
from quickbeam.tree import TokenTree


class Candidate(NamedTuple):
    """An entry of the heap: the token of this rank after `parent`."""

    minus_value: float
    depth: int  # of the parent
    parent: int
    rank: int


class DDTree(Method):
    """Best-first search over the product of marginals.

    A popped node enters the tree. Its next sibling, of the next rank, and its likeliest child are
    pushed. Which nodes enter depends on the tokens themselves, so they are never draws.

    The marginal of a depth is the drafter's distribution after the likeliest path of that length.
    Of DFlash's drafters that is the paper's. For others, PCTree and DySpec use what was drafted.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.sources = (drafter,)

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        marginals = yield from self._marginals(context, budget - 1, max_depth)
        tree = TokenTree(context.ids[-1])
        heap = list[Candidate]()

        def row(node: int) -> Row:
            """Return the tokens that may follow a node, with their probabilities."""
            if (forced := context.forced(tree.tokens(node))) is not None:
                return [forced], [1.0]
            depth = tree.depth[node]
            return marginals[depth] if depth < len(marginals) else ([], [])

        def push(parent: int, rank: int) -> None:
            tokens, probabilities = row(parent)
            if rank < len(tokens) and tree.depth[parent] < max_depth:
                value = tree.value[parent] * probabilities[rank]
                heappush(heap, Candidate(-value, tree.depth[parent], parent, rank))

        push(0, 0)
        while heap and len(tree) < budget:
            best = heappop(heap)
            parent = best.parent
            rank = best.rank
            tokens, probabilities = row(parent)
            path = tree.tokens(parent)
            push(parent, rank + 1)
            # on other paths than the likeliest a grammar may ban the token
            if context.within(path, tokens[rank : rank + 1]):
                source = self.drafter.name if context.forced(path) is None else GRAMMAR
                node = tree.add(
                    parent,
                    tokens[rank],
                    source,
                    value=-best.minus_value,
                    probability=probabilities[rank],
                )
                push(node, 0)
        return Proposal(tree)

    def _marginals(
        self, context: Context, size: int, max_depth: int
    ) -> Generator[DraftRequest, DraftProbs | None, list[Row]]:
        """Return the likeliest tokens of each depth, at most `size`, with their probabilities."""
        path = TokenTree(context.ids[-1])
        node = 0
        rows = list[Row]()
        for depth in range(min(max_depth, size)):
            answer = yield DraftRequest(context, path, [node])
            assert answer is not None
            (row,) = likeliest_children(context, answer, [depth], size)
            if not row[0]:
                break
            rows.append(row)
            likeliest = row[0][0]
            node = path.add(node, likeliest, self.drafter.name)
        return rows
