"""DySpec's threshold tree (2410.11744, Alg. 2).

Layer by layer, it fills every slot that is likely enough to be reached.
"""

from __future__ import annotations

from itertools import count

from quickbeam.drafters.base import Context, Drafter
from quickbeam.errors import InvalidInput
from quickbeam.methods.base import Grown, Growth
from quickbeam.methods.drafted import DraftedPolicy
from quickbeam.methods.draws import Draws
from quickbeam.methods.wide import ROUNDING
from quickbeam.tree import TokenTree


class Threshold(DraftedPolicy):
    """Fill all slots worth `threshold` or more, layer by layer, with one call of the drafter a
    layer.

    `threshold=None` takes 1 / budget. A drawn slot is worth the probability that it is reached. A
    deterministic proposal is worth the product of probabilities down to its own token. If the
    budget ends within a layer, the best slots of the layer are filled and drawing stops. Nodes come
    layer by layer, in order of worth.

    Raises `InvalidInput` for a threshold outside (0, 1].
    """

    def __init__(self, drafter: Drafter, threshold: float | None = None) -> None:
        if threshold is not None and not 0 < threshold <= 1:
            raise InvalidInput(
                f"threshold={threshold}: must be above 0 and at most 1, or None for 1 / budget"
            )
        super().__init__(drafter)
        self.threshold = threshold
        self.nested = threshold is not None

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        tree = TokenTree(context.ids[-1])
        least = self.threshold or 1 / budget
        layer, depth = [0], 0
        while layer and depth < max_depth and (free := budget - len(tree)) > 0:
            found = yield from self.ask(
                context, tree, layer, free, [ROUNDING * least / tree.value[node] for node in layer]
            )
            slots = [
                (-worth, node, i, draws)
                for node, draws in zip(layer, found, strict=True)
                for i, worth in enumerate(worths(draws, tree.value[node], least, free))
            ]
            slots.sort(key=lambda slot: slot[:3])
            nodes = [self.add(tree, node, draws, i) for _, node, i, draws in slots[:free]]
            # A node's slots are worth no more than the node.
            layer = [node for node in nodes if node is not None and tree.value[node] >= least]
            depth += 1
        return Grown(tree)


def worths(draws: Draws, reached: float, least: float, most: int) -> list[float]:
    """Return the worths of a node's slots that are `least` or more, `most` at most.

    `reached` is the probability that the node is reached.
    """
    found: list[float] = []
    for i in count():
        worth = reached * draws.worth(i)
        if i == most or worth < least or draws.draw(i) is None:
            break
        found.append(worth)
    return found
