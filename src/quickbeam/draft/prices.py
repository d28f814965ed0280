"""What the nodes of a tree and the calls of a drafter must promise, so that no time is spent that would give more elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Prices:
    """In tokens: what the time of something would give at the rate of late.

    `widths` and `passes`: a pass over so many nodes, the root included. `call`: one call of the drafter, and what growing from it takes.
    `trial`: the first call is to be made all the same, to see what came of it.
    To maximise tokens over seconds is to maximise tokens - rate * seconds, with the best rate there is (Dinkelbach, 1967): so whatever
    promises more than its price is worth having, and rates of late come to the best one.
    """

    widths: Sequence[int]
    passes: Sequence[float]
    call: float
    trial: bool = False

    @cached_property
    def _slopes(self) -> list[float]:
        """By nodes: along the lower convex hull of the passes. Steps in the cost, as of a kernel's tiles, are spread over their nodes."""
        hull: list[int] = []
        for i in range(len(self.widths)):
            while len(hull) > 1 and self._slope(hull[-2], i) <= self._slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(i)
        slopes = [0.0] * self.widths[-1]
        for a, b in pairwise(hull):
            slopes[self.widths[a] : self.widths[b]] = [max(0.0, self._slope(a, b))] * (self.widths[b] - self.widths[a])
        return slopes

    def _slope(self, a: int, b: int) -> float:
        return (self.passes[b] - self.passes[a]) / (self.widths[b] - self.widths[a])

    def node(self, nodes: int) -> float:
        """One more in a tree of `nodes` nodes. Never falls as trees grow; beyond the widest it is without bound."""
        return self._slopes[nodes] if nodes < len(self._slopes) else float("inf")
