"""How many clusters a node of the draft tree may choose, by its depth."""

from __future__ import annotations

from dataclasses import dataclass

from quickbeam.errors import InvalidInput
from quickbeam.shortlist.layout import Layout

DEPTHS = 6  # depths of the assumed tree, the root's included: each is one call of the drafter
# The nodes of a call below the root are assumed to choose this many times as many different
# clusters as one of them alone.
SHARED = 2


@dataclass(frozen=True)
class Schedule:
    """How many clusters each node chooses: `max(least, floor(most * decay ** t))` at depth t.

    The root has depth 0. Early nodes get more clusters, as an early miss costs all that is below
    it. DynaSpec (2510.13847, §4.2) decays the number with depth; the formula is ours.

    If all nodes of a call are deeper than `deepest`, the router is not asked, and the call scores
    what the call before it did. On a CPU routing costs as much as scoring ten clusters. With the
    tokens of the context in the shortlist, nothing was lost by routing for the root alone.

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
        """Return how many clusters a node at `depth` chooses."""
        # in floating point 100 * 0.7 ** 2 is 48.99…, hence the small addend
        return max(self.least, int(self.most * self.decay**depth + 1e-9))

    @staticmethod
    def fit(share: int, layout: Layout, decay: float = 0.7, deepest: int = 0) -> Schedule:
        """Return a schedule with which a call of the drafter scores about `share` tokens.

        The tokens of the context are not counted.

        Beside the frequent block there is room for c clusters. Where the root alone is routed
        (`deepest` 0), `most` is c. Otherwise `least` begins as c/3. Then `most` becomes the largest
        number with which the mean over the calls of an assumed tree is at most c, and after that
        `least` likewise.

        The assumed tree takes one call for each depth. The first call is for the root alone. In
        each later call that is routed, several nodes together choose twice as many clusters as one
        of them, but never more than `most` (the limit of a `Shortlist` with this schedule). How
        many nodes a call really has, and how far they agree, depends on the text and the tree:
        measure it with `quickbeam bench vocabulary`.

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
        """Return the mean number of clusters a call, over the calls of `fit`'s assumed tree."""
        routed = [self.most] + [
            min(self.most, SHARED * self.clusters(depth)) for depth in range(1, self.deepest + 1)
        ]
        below = routed[-1:] * DEPTHS
        return sum([*routed, *below][:DEPTHS]) / DEPTHS
