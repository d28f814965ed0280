"""EAGLE-2's tree (2406.16858, §4): expand the likeliest nodes of each layer, then keep the
likeliest of all."""

from __future__ import annotations

from quickbeam.draft.base import Context, Drafter
from quickbeam.errors import InvalidInput
from quickbeam.trees.base import Grown, Growth
from quickbeam.trees.best_first import Search
from quickbeam.trees.drafted import DraftedPolicy


class Eagle2(DraftedPolicy):
    """Expansion: each node of a layer has its likeliest tokens as candidates, and the `width`
    candidates whose paths are likeliest are the next layer, `depth` layers at most. Reranking: the
    tree is the likeliest candidates of all layers.

    What is kept depends on the tokens themselves, so they are deterministic proposals, never draws.
    10 and 7 are the defaults of EAGLE-2's code. A candidate that reranking has no place for any
    more is not expanded. Nodes stand in order of worth.

    Raises `InvalidInput` for a width or a depth below 1.
    """

    draws = False

    def __init__(self, drafter: Drafter, width: int = 10, depth: int = 7) -> None:
        if width < 1 or depth < 1:
            raise InvalidInput(f"width={width}, depth={depth}: must be at least 1 each")
        super().__init__(drafter)
        self.width, self.depth = width, depth

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        search = Search(self, context, budget - 1)
        layer = [search.root] if budget > 1 else []
        for depth in range(1, 1 + min(self.depth, max_depth)):
            if not layer:
                break
            yield from search.expand(layer, self.width)
            layer = [one for one in search.best if one.depth == depth][: self.width]
        return Grown(search.tree())
