"""DySpec's greedy tree (2410.11744, Alg. 1): always fill the slot that is most likely to be reached."""

from __future__ import annotations

from heapq import heappop, heappush

from quickbeam.draft.base import Context
from quickbeam.grow.drafted import DraftedPolicy
from quickbeam.grow.draws import Draws
from quickbeam.grow.search import Search
from quickbeam.tree import TokenTree

FRACTION = 0.2  # of the likeliest path's probability: best-first search asks for all paths down to this in one call

Slot = tuple[float, int, int]  # minus its worth, the node, which child


class Greedy(DraftedPolicy):
    """Above temperature 0, Alg. 1: a heap of open slots; the best one is filled, which opens its sibling's slot and its child's. A slot
    is worth the probability that it is reached, known before its token is. At temperature 0, best-first search (App. D.1): the tree
    is the likeliest paths, by the product of their probabilities. Nodes stand in order of worth.

    The paper calls the drafter once a node. Here it is asked for several nodes at once, about as often as the tree is deep; a law
    that comes early changes nothing of the tree, as filling a slot never raises the worth of another.

    - Alg. 1: when the best slot belongs to a node without a law, those nodes are asked for whose first slots are among the best of the
      heap, as many as there are nodes left to add. What lies below is out of reach.
    - Best-first: of the likeliest paths found so far, as many as fit the budget, those are asked for that have no law yet and are at
      least `FRACTION` as likely as the best of these, until all have one.
    """

    def grow(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        if budget < 2 or max_depth < 1:
            return TokenTree(context.ids[-1])
        return self._sampled(context, budget, max_depth) if context.temperature > 0 else self._best_first(context, budget - 1, max_depth)

    def _sampled(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        tree = TokenTree(context.ids[-1])
        draws: dict[int, Draws] = {}
        slots: list[Slot] = [(-1.0, 0, 0)]
        while slots and len(tree) < budget:
            _, node, i = slots[0]
            if node not in draws:
                free = budget - len(tree)
                due = [node for _, node, _ in sorted(slots)[:free] if node not in draws]
                draws.update(zip(due, self.ask(context, tree, due, free), strict=True))
            heappop(slots)
            new = self.add(tree, node, draws[node], i)
            if new is None:
                continue
            heappush(slots, (-tree.value[node] * draws[node].worth(i + 1), node, i + 1))
            if tree.depth[new] < max_depth:
                heappush(slots, (-tree.value[new], new, 0))
        return tree

    def _best_first(self, context: Context, size: int, max_depth: int) -> TokenTree:
        search = Search(self, context, size)
        due = [search.root]
        while due:
            search.expand(due)
            # Where all places are taken, nothing below the last can get one.
            due = [one for one in search.best[: size - 1] if one.number not in search.expanded and one.depth < max_depth]
            due = [one for one in due if one.cost <= FRACTION * due[0].cost]
        return search.tree()
