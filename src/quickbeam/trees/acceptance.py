"""How likely it is that a child is accepted, which is not how likely the drafter says its token is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right


class Chances(ABC):
    """What DySpec takes for the chance that a child is accepted, and for the worth of a place that no token was drawn for yet.

    `place` counts a node's children from 0. `probability` is the child's: of a draw under the law that it was drawn from, earlier siblings
    struck out, the rest renormalised; of a certain child as `trees/perturbed.py` gives it. `LIFT`: no chance is more than so many
    times the probability of a certain child.
    """

    LIFT = 1.0

    @abstractmethod
    def child(self, place: int, probability: float) -> float:
        """That a child is accepted, once its parent is; of a draw, once its earlier siblings are rejected, too."""

    @abstractmethod
    def slot(self, place: int, peak: float) -> float:
        """What is to be hoped for there before the token is known: accepted tokens, in any unit. `peak`: the largest probability of the law
        that it will be drawn from."""

    def observe(self, place: int, probability: float, accepted: bool) -> None:  # noqa: B027 (most have nothing to do)
        """A child had its turn."""


class Printed(Chances):
    """The paper's: a child is accepted as often as it is drawn, a slot is worth the probability that it is reached (2410.11744, Alg. 1)."""

    def child(self, place: int, probability: float) -> float:
        return probability

    def slot(self, place: int, peak: float) -> float:
        return 1.0


class Measured(Chances):
    """Of draws: by the child's place and its probability, from what was accepted so far.

    A draw is accepted with min(1, target / draft probability): rare ones of a flat law are accepted about as often as its likely ones.
    And where the first child was rejected, what is left of the target's law lies where the drafter does not look: the second child
    is accepted about half as often as a first one of its probability, the third a third as often. `usual` says that in a formula, made on
    our own questions at temperatures 0.6 and 1; each cell of `EDGES` and places corrects it by what came true. Before the token is drawn,
    the law's largest probability stands for the token's.
    """

    EDGES = (0.1, 0.3, 0.6, 0.9)  # of probabilities
    PLACES = 4  # told apart
    TRUST = 8.0  # accepted children that the formula counts for in each cell
    MEMORY = 512  # children of a cell after which an observation has lost most of its weight

    def __init__(self) -> None:
        cells = (len(self.EDGES) + 1) * self.PLACES
        self._accepted, self._expected = [self.TRUST] * cells, [self.TRUST] * cells

    @staticmethod
    def usual(place: int, probability: float) -> float:
        """Before anything was observed."""
        return (0.28 + 0.35 * probability + 0.3 * probability**4) / (place + 1)

    def child(self, place: int, probability: float) -> float:
        cell = self._cell(place, probability)
        return min(0.99, self.usual(place, probability) * self._accepted[cell] / self._expected[cell])

    def slot(self, place: int, peak: float) -> float:
        return self.child(place, peak)

    def observe(self, place: int, probability: float, accepted: bool) -> None:
        cell, keep = self._cell(place, probability), 1 - 1 / self.MEMORY
        self._accepted[cell] = keep * self._accepted[cell] + accepted
        self._expected[cell] = keep * self._expected[cell] + self.usual(place, probability)

    def _cell(self, place: int, probability: float) -> int:
        return min(place, self.PLACES - 1) * (len(self.EDGES) + 1) + bisect_right(self.EDGES, probability)


class Likeliest(Measured):
    """Of certain children, the likeliest by the drafter and the noise of their place (`trees/perturbed.py`).

    What the drafter says is spread wider than its errors are, so that the first child is right more often than it is likely. On our own
    questions one of 0.37 was right in 0.55 at temperature 0, 0.52 at 0.6 and 0.42 at 1; later children are right about as often as they are
    likely. Corrected as `Measured` is.
    """

    LIFT = 1.4

    @staticmethod
    def usual(place: int, probability: float) -> float:
        return probability if place else 1 - (1 - probability) ** Likeliest.LIFT
