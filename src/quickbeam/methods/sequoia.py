"""Sequoia's tree (2402.12374, §3.1): the best static shape, found by dynamic programming.

The shape is the best for given acceptance rates of a first child, a second child and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from quickbeam.drafters.base import GRAMMAR, Context, Drafter
from quickbeam.methods.base import Method, Proposal, ProposalSteps
from quickbeam.methods.children import add_child, ask
from quickbeam.tree import TokenTree

Shape = list[list[int]]  # the children of each node, numbered layer by layer from the root

# Acceptance rates of the i-th child if nothing was measured. The first is accepted 6 times in 10.
# That all of the first k are rejected then falls as a power of k, as Sequoia's analysis assumes.
GENERIC = (0.6, *(0.4 * ((k - 1) ** -0.5 - k**-0.5) for k in range(2, 9)))


class Shapes:
    """The best shapes of up to `nodes` nodes, by dynamic programming.

    `acceptance` is the probability that a reached node's i-th child is accepted. A node is reached
    with the product of these along its path. F is the sum of that over all nodes: a step's tokens.

    A tree of depth at most d whose root has b children is made of two: such a tree with b - 1
    children, and the b-th child's tree of depth at most d - 1. So the best F with n nodes is

        T(n, d, b) = max over m of
            T(n - m, d, b - 1) + acceptance[b] * max over b' of T(m, d - 1, b')
    """

    def __init__(self, acceptance: Sequence[float], nodes: int) -> None:
        # F of the best tree, by depth, then by nodes, the root included
        self._best = [np.ones(nodes + 1)]
        self._width = [np.zeros(nodes + 1, dtype=int)]  # how many children that tree's root has
        # by depth, by child, by nodes shared among the children up to it: the nodes it gets
        self._share: list[list[np.ndarray]] = [[]]
        size = np.arange(nodes + 1)
        # by nodes shared, then by those of the child: the nodes that its earlier siblings get
        remaining = size[:, None] - size[None, :]
        possible = (remaining >= 0) & (size[None, :] > 0)
        while len(self._best) < nodes:
            tables = [np.zeros(nodes + 1)]
            shares = list[np.ndarray]()
            for rate in acceptance:
                siblings = tables[-1][remaining]
                subtree = self._best[-1][None, :]
                value = np.where(possible, siblings + rate * subtree, -np.inf)
                shares.append(value.argmax(1))
                tables.append(value.max(1))
            # by number of the root's children, then by nodes below the root, 1 at least
            below = np.stack(tables)[:, 1:-1]
            best = 1 + below.max(0)
            width = below.argmax(0)
            # without nodes, and for the root alone
            self._best.append(np.concatenate(([1.0, 1.0], best)))
            self._width.append(np.concatenate(([0, 0], width)))
            self._share.append(shares)
            if np.array_equal(self._best[-1], self._best[-2]):  # deeper trees are no better
                break

    def shape(self, nodes: int, depth: int) -> Shape:
        """Return the shape of the best tree of at most `nodes` nodes and at most `depth`."""
        children: Shape = [[]]
        # nodes and depth of each node's subtree; subtrees are added in the loop
        subtrees = [(nodes, min(depth, len(self._best) - 1))]
        for node, (size, max_depth) in enumerate(subtrees):
            left = size - 1
            shares = list[int]()
            for b in range(self._width[max_depth][size], 0, -1):
                share = int(self._share[max_depth][b - 1][left])
                shares.append(share)
                left -= share
            for share in reversed(shares):
                children[node].append(len(subtrees))
                children.append([])
                subtrees.append((share, max_depth - 1))
        return children


class Sequoia(Method):
    """Fill the best shape of the budget, layer by layer, whatever the drafter's distributions say.

    There is one call of the drafter a layer. `acceptance` is the probability that a reached node's
    i-th child is accepted, measured beforehand as in the paper. Without it, a generic vector is
    corrected by what verification accepts. The shape is computed again each time the number of
    observations has doubled. It depends on earlier answers; the output's distribution does not.
    """

    TRUST = 16  # how many observed nodes the generic vector counts for

    def __init__(self, drafter: Drafter, acceptance: Sequence[float] | None = None) -> None:
        self.drafter = drafter
        self.sources = (drafter,)
        self.acceptance = tuple(acceptance or GENERIC)
        self._learns = acceptance is None
        self._accepted = [self.TRUST * rate for rate in self.acceptance]
        self._tried = [float(self.TRUST)] * len(self.acceptance)
        # number of tried first children at which the shape is computed again
        self._recompute_at = 2 * self.TRUST
        self._shapes: Shapes | None = None
        self._nodes = 0

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        if self._shapes is None or budget > self._nodes:
            self._shapes = Shapes(self.acceptance, budget)
            self._nodes = budget
        shape = self._shapes.shape(budget, max_depth)
        tree = TokenTree(context.ids[-1])
        nodes = {0: 0}  # the tree's node for each filled node of the shape
        layer = [0]
        while parents := [parent for parent in layer if parent in nodes and shape[parent]]:
            widest = max(len(shape[parent]) for parent in parents)
            answer = yield from ask(context, tree, [nodes[parent] for parent in parents], widest)
            for parent, children in zip(parents, answer, strict=True):
                for child in shape[parent]:
                    node = add_child(tree, nodes[parent], children, self.drafter)
                    if node is None:
                        break
                    nodes[child] = node
            layer = [child for parent in parents for child in shape[parent]]
        return Proposal(tree, self._verified)

    def _verified(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Count which children were tried and which were accepted."""
        if not self._learns:
            return
        for node, accepted in zip_longest(path, path[1:]):
            for i, child in enumerate(tree.children[node].values()):
                if tree.source[child] == GRAMMAR:
                    continue
                self._tried[i] += 1
                self._accepted[i] += child == accepted
        if self._tried[0] >= self._recompute_at:
            self._recompute_at *= 2
            pairs = zip(self._accepted, self._tried, strict=True)
            self.acceptance = tuple(accepted / tried for accepted, tried in pairs)
            self._shapes = None
