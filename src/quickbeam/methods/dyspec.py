"""DySpec (2410.11744): the tree is grown where acceptance is most likely.

The paper's hypothesis is that a token is accepted about as often as the drafter's probability says.
Three algorithms use it:

- Alg. 1 (`sampled_tree`) spends a budget of nodes on the slots that are most likely to be reached.
- Alg. 2 (`threshold_tree`) fills, layer by layer, all slots that are likely enough.
- App. D.1, the deterministic search for the likeliest paths (`methods/search.py`).

The first is for drawn children (residual rule): a slot is chosen by what is known before its token
is drawn, so sampling stays exact. The last is for deterministic proposals, those of coupled
sampling.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heapify, heappop, heappush, nsmallest

from quickbeam.drafters.base import Context, Drafter, DraftProbs, DraftRequest
from quickbeam.methods.acceptance import AcceptanceModel, CallYield, Estimate, as_printed, drafted
from quickbeam.methods.base import Grown, Growth, Method
from quickbeam.methods.children import ROUNDING, Children, add_child, ask
from quickbeam.methods.search import Search, best_first
from quickbeam.tree import TokenTree


def sampled_tree(
    drafter: Drafter, context: Context, budget: int, max_depth: int
) -> Generator[DraftRequest, DraftProbs | None, TokenTree]:
    """Grow a tree by Alg. 1. A slot is worth v, the probability that it is reached.

    As printed, the drafter is called once for each node. Here one call asks about all nodes with a
    slot among the best of the heap, as many as there are nodes left to add. A distribution that
    arrives early changes nothing of the tree, since it is not looked at before its turn.
    """
    tree, children = TokenTree(context.ids[-1]), dict[int, Children]()
    heap = [(-1.0, 0)] if max_depth > 0 else []  # of each slot: minus v, and the node it is below
    while heap and len(tree) < budget:
        v, node = heap[0]
        if node not in children:
            free = budget - len(tree)
            best = [one for _, one in nsmallest(free, heap) if one not in children]
            answer = yield from ask(context, tree, best, free)
            children.update(zip(best, answer, strict=True))
        heappop(heap)
        left = children[node].left
        new = add_child(tree, node, children[node], drafter)
        if new is None:
            continue
        share = min(1.0, tree.probability[new] / left)
        heappush(heap, (v * (1 - share), node))  # the sibling's
        tree.value[new] = -v * share
        if tree.depth[new] < max_depth:
            heappush(heap, (v * share, new))  # the first child's
    return tree


def threshold_tree(
    drafter: Drafter, context: Context, budget: int, max_depth: int, threshold: float
) -> Generator[DraftRequest, DraftProbs | None, TokenTree]:
    """Grow a tree by Alg. 2, with one call of the drafter a layer.

    A drawn slot is worth v, the probability that it is reached. A deterministic proposal is worth
    the product of probabilities down to its own token. If the budget ends within a layer, the best
    slots of the layer are filled and drawing stops.
    """
    tree, layer = TokenTree(context.ids[-1]), [0]
    for _ in range(max_depth):
        free = budget - len(tree)
        if not layer or free < 1:
            break
        least = [ROUNDING * threshold / tree.value[node] for node in layer]
        children = dict(
            zip(layer, (yield from ask(context, tree, layer, free, least)), strict=True)
        )
        heap = [(-tree.value[node] * children[node].left, node) for node in layer]
        heapify(heap)
        layer = []
        while heap and -heap[0][0] >= threshold and len(tree) < budget:
            node = heappop(heap)[1]
            new = add_child(tree, node, children[node], drafter)
            if new is None:
                continue
            heappush(heap, (-tree.value[node] * children[node].left, node))
            if tree.value[new] >= threshold:  # a node's slots are worth no more than the node
                layer.append(new)
    return tree


class DySpec(Method):
    """DySpec with a budget of nodes: Alg. 1 where children are drawn, else the search.

    In the search, acceptance rates are corrected by what was accepted (`AcceptanceModel`).
    `estimate` gives the evidence of a proposal: `as_printed` for the hypothesis alone.

    With `Context.marginal_cost` the search's tree also ends where the next likeliest path is
    expected to give fewer tokens than its node costs.
    """

    priced = True

    def __init__(self, drafter: Drafter, estimate: Estimate = drafted) -> None:
        self.drafter, self.sources, self.estimate = drafter, (drafter,), estimate
        self.model, self.calls = AcceptanceModel(), CallYield()

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        if context.draws:
            return Grown((yield from sampled_tree(self.drafter, context, budget, max_depth)))
        search = Search(self.drafter, context, budget - 1, max_depth, self.model, self.estimate)
        return (yield from best_first(search, self.calls))


def printed(drafter: Drafter) -> DySpec:
    """Return DySpec by its hypothesis alone."""
    return DySpec(drafter, as_printed)


class Threshold(Method):
    """DySpec with a threshold (Alg. 2). `threshold=None` takes 1 / budget."""

    def __init__(self, drafter: Drafter, threshold: float | None = None) -> None:
        self.drafter, self.sources, self.threshold = drafter, (drafter,), threshold

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        least = self.threshold or 1 / budget
        return Grown((yield from threshold_tree(self.drafter, context, budget, max_depth, least)))
