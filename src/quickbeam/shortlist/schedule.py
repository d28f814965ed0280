"""How many clusters a node may call for, by its depth."""

from __future__ import annotations

from dataclasses import dataclass

from quickbeam.errors import InvalidInput
from quickbeam.shortlist.layout import Layout

DEPTHS = 6  # of the usual tree, the root's included: each is one call of the drafter
SHARED = 2  # clusters of the union over a call's nodes below the root, as a multiple of one node's


@dataclass(frozen=True)
class Schedule:
    """A node at depth t (the root: 0) calls for `max(least, floor(most * decay ** t))` clusters: an
    early miss costs all that is below it.

    DynaSpec (2510.13847, §4.2) decays the number with depth; the formula is ours. Calls for nodes
    that all lie below `deepest` route nothing: they score what the call before them did. On a CPU
    routing costs as much as ten clusters, and with the tokens of the context beside it nothing was
    lost by doing it for the root alone.

    Raises `InvalidInput` unless `1 <= least <= most`, `0 < decay <= 1` and `deepest >= 0`.
    """

    most: int
    least: int
    decay: float = 0.7
    deepest: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InvalidInput(
                f"a schedule of {self.least} to {self.most} clusters: must be 1 <= least <= most"
            )
        if not 0 < self.decay <= 1:
            raise InvalidInput(f"a schedule with decay={self.decay}: must be above 0 and at most 1")
        if self.deepest < 0:
            raise InvalidInput(f"a schedule with deepest={self.deepest}: must be at least 0")

    def clusters(self, depth: int) -> int:
        """How many a node at `depth` calls for."""
        # 100 * 0.7 ** 2 is 48.99…
        return max(self.least, int(self.most * self.decay**depth + 1e-9))

    @staticmethod
    def fit(share: int, layout: Layout, decay: float = 0.7, deepest: int = 0) -> Schedule:
        """A schedule with which a call of the drafter scores about `share` tokens, those of the
        context not counted.

        The frequent block leaves room for c clusters. Where the root alone is routed (`deepest` 0),
        `most` is c. Otherwise `least` is c/3 at first; `most` is the largest number with which the
        mean over the calls of an assumed tree is at most c, and then `least` likewise. The assumed
        tree: one call a depth, the root alone in the first; in each later one that is routed
        several nodes that together call for twice what one of them does, but never for more than
        `most` (the limit of a `Shortlist` with this schedule). How many nodes a call has and how
        far they agree is the text's and the tree's affair: measure with `quickbeam bench
        vocabulary`.

        Raises `InvalidInput` where the layout has no clusters or `share` leaves no room for one.
        """
        if not layout.clusters:
            raise InvalidInput("this layout has no clusters to choose from: a schedule needs some")
        whole, smallest = len(layout.order), layout.frequent + layout.size
        if share < min(smallest, whole):
            raise InvalidInput(
                f"a shortlist of {share} tokens: must be at least {smallest} "
                f"({layout.frequent} frequent ones and a cluster of {layout.size})"
            )
        room = layout.clusters - max(0, whole - share) / layout.size
        most = least = max(1, int(room / 3))
        while (
            most < layout.clusters
            and Schedule(most + 1, least, decay, deepest).expected() <= room + 1e-9
        ):
            most += 1
        while least < most and Schedule(most, least + 1, decay, deepest).expected() <= room + 1e-9:
            least += 1
        return Schedule(most, least, decay, deepest)

    def expected(self) -> float:
        """Clusters a call in the mean over the calls of the tree that `fit` assumes."""
        routed = [self.most] + [
            min(self.most, SHARED * self.clusters(depth)) for depth in range(1, self.deepest + 1)
        ]
        below = routed[-1:] * DEPTHS
        return sum([*routed, *below][:DEPTHS]) / DEPTHS
