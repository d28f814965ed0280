"""DySpec (2410.11744): nodes are added where acceptance is most likely.

The hypothesis: a token is accepted about as often as its drafter's probability says. It is used by

- Alg. 1 (`sampled_tree`) spends a budget of nodes on the slots that are most likely to be reached.
- Alg. 2 (`threshold_tree`) fills, layer by layer, all slots that are likely enough.
- App. D.1, the deterministic search for the likeliest paths (`methods/search.py`).

The first is for drawn children (residual rule): a slot is chosen by what is known before its token
is drawn, so sampling stays exact. The last is for deterministic proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import zip_longest
from typing import NamedTuple

from quickbeam.drafters.base import Context, Drafter, DraftProbs, DraftRequest
from quickbeam.methods.acceptance import (
    AcceptanceModel,
    Estimate,
    drafted_features,
    drawn_features,
    printed_features,
)
from quickbeam.methods.base import Method, Proposal, ProposalSteps
from quickbeam.methods.children import ROUNDING, Children, add_child, ask
from quickbeam.methods.search import Search, best_first
from quickbeam.tree import TokenTree

# Stands for the largest probability of a distribution that the drafter was not asked for yet. On
# our own questions that is 0.67 at temperature 0.6, and 0.33 at 1.
PEAK = 0.6
Draw = tuple[int, float]  # the rank of a drawn child, and the probability it was drawn with


class Slot(NamedTuple):
    """An open slot of the heap: `node` may have one more child."""

    minus_worth: float
    v: float  # the probability that verification reaches it
    node: int
    answered: bool  # whether its worth comes from the drafter's answer, not from `PEAK`


def sampled_tree(
    drafter: Drafter,
    context: Context,
    budget: int,
    max_depth: int,
    rate: Callable[[int, float], float],
    worth: Callable[[int, float], float],
) -> Generator[DraftRequest, DraftProbs | None, tuple[TokenTree, dict[int, Draw]]]:
    """Build a tree by Alg. 1, and return it with the draw of each node.

    `rate(rank, probability)` is the acceptance rate of a child that was drawn with this
    probability, earlier siblings removed. As printed it is that probability. A slot counts with v,
    the probability that it is reached, times `worth(rank, peak)`, as printed 1. `peak` is the
    largest probability that its token may have: like v, it is known before the token is drawn.

    As printed, the drafter is called once for each node. Here one call asks about all nodes with a
    slot among the best of the heap, as many as there are nodes left to add. A distribution that
    arrives early changes nothing of the tree, since it is used only when its slot is the best.
    """
    tree = TokenTree(context.ids[-1])
    draws = dict[int, Draw]()
    children: dict[int, Children] = {}

    def slot(v: float, node: int) -> Slot:
        answered = node in children
        peak = children[node].peak if answered else PEAK
        rank = len(tree.children[node])
        return Slot(-v * worth(rank, peak), v, node, answered)

    heap = [slot(1.0, 0)] if max_depth > 0 else []
    while heap and len(tree) < budget:
        v = heap[0].v
        node = heap[0].node
        if node not in children:
            free = budget - len(tree)
            best = [entry.node for entry in sorted(heap)[:free] if entry.node not in children]
            answer = yield from ask(context, tree, best, free)
            children.update(zip(best, answer, strict=True))
        if not heap[0].answered:
            heapreplace(heap, slot(v, node))
            continue
        heappop(heap)
        left = children[node].left
        new = add_child(tree, node, children[node], drafter)
        if new is None:
            continue
        d = 1.0
        if not children[node].forced:
            rank = len(tree.children[node]) - 1
            probability = min(1.0, tree.probability[new] / left)
            draws[new] = rank, probability
            d = rate(rank, probability)
            heappush(heap, slot(v * (1 - d), node))  # the sibling's
        tree.value[new] = v * d
        if tree.depth[new] < max_depth:
            heappush(heap, slot(v * d, new))  # the first child's
    return tree, draws


def threshold_tree(
    drafter: Drafter, context: Context, budget: int, max_depth: int, threshold: float
) -> Generator[DraftRequest, DraftProbs | None, TokenTree]:
    """Build a tree by Alg. 2, with one call of the drafter a layer.

    A drawn slot is worth v, the probability that it is reached. A deterministic proposal is worth
    the product of probabilities down to its own token. If the budget ends within a layer, the best
    slots of the layer are filled and drawing stops.
    """
    tree = TokenTree(context.ids[-1])
    layer = [0]
    for _ in range(max_depth):
        free = budget - len(tree)
        if not layer or free < 1:
            break
        min_probs = [ROUNDING * threshold / tree.value[node] for node in layer]
        answer = yield from ask(context, tree, layer, free, min_probs)
        children = dict(zip(layer, answer, strict=True))
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

    The hypothesis makes trees of drawn children too wide. A rare draw is accepted often, by
    min(1, p / q), and its sibling, tried after a rejection, seldom. So rates are corrected by what
    was accepted (`AcceptanceModel`). `estimate` gives the features of a child of this rank and
    probability: `printed_features` for the hypothesis alone.

    With `Context.node_costs` the search's tree also ends where the next likeliest path is
    expected to give fewer tokens than its node costs.
    """

    uses_cost_model = True

    def __init__(self, drafter: Drafter, estimate: Estimate | None = None) -> None:
        self.drafter = drafter
        self.sources = (drafter,)
        self.model = AcceptanceModel()
        self._drafted = estimate or drafted_features
        self._drawn = estimate or drawn_features

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        if context.samples_children:
            return (yield from self._sampled(context, budget, max_depth))
        search = Search(self.drafter, context, budget - 1, max_depth, self.model, self._drafted)
        return (yield from best_first(search))

    def _sampled(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        worth = self._rate if self._drawn is drawn_features else _same_worth
        tree, draws = yield from sampled_tree(
            self.drafter, context, budget, max_depth, self._rate, worth
        )

        def learn(tree: TokenTree, path: Sequence[int]) -> None:
            # verification never reached the siblings after the accepted one: they don't count
            for node, accepted in zip_longest(path, path[1:]):
                for child in tree.children[node].values():
                    if child in draws:
                        rank, probability = draws[child]
                        features = self._drawn(rank, probability, None)
                        self.model.observe(features, child == accepted)
                    if child == accepted:
                        break

        return Proposal(tree, learn)

    def _rate(self, rank: int, probability: float) -> float:
        """Return the acceptance rate of a drawn child."""
        return self.model.rate(self._drawn(rank, probability, None))


def _same_worth(rank: int, peak: float) -> float:
    return 1.0


def printed(drafter: Drafter) -> DySpec:
    """Return DySpec by its hypothesis alone."""
    return DySpec(drafter, printed_features)


class Threshold(Method):
    """DySpec with a threshold (Alg. 2). `threshold=None` takes 1 / budget."""

    def __init__(self, drafter: Drafter, threshold: float | None = None) -> None:
        self.drafter = drafter
        self.sources = (drafter,)
        self.threshold = threshold

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        threshold = self.threshold or 1 / budget
        tree = yield from threshold_tree(self.drafter, context, budget, max_depth, threshold)
        return Proposal(tree)
