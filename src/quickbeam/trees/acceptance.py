"""Estimated acceptance rates: how likely a child is accepted, which differs from the probability
that the drafter gives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right


class Chances(ABC):
    """DySpec's estimate of the probability that a child is accepted, and of the worth of a slot
    whose token is not drawn yet.

    `place` is the rank of a child among its siblings, from 0. `probability` is the child's: for a
    drawn one, under the distribution that it was drawn from (earlier siblings struck out,
    renormalised); for a deterministic one, as `trees/perturbed.py` gives it. `LIFT`: no estimate
    exceeds this multiple of a deterministic child's probability.
    """

    LIFT = 1.0

    @abstractmethod
    def child(self, place: int, probability: float) -> float:
        """The probability that a child is accepted, given that its parent is; for a drawn child,
        given also that its earlier siblings are rejected."""

    @abstractmethod
    def slot(self, place: int, peak: float) -> float:
        """The worth of a slot before its token is known: expected accepted tokens, in any unit.
        `peak`: the largest probability of the distribution that the token will be drawn from."""

    def observe(self, place: int, probability: float, accepted: bool) -> None:  # noqa: B027 (most have nothing to do)
        """Verification reached a child: record whether it was accepted."""


class Printed(Chances):
    """The paper's assumption (2410.11744, Alg. 1): a child is accepted with the probability that it
    was drawn with, and a slot is worth the probability that it is reached."""

    def child(self, place: int, probability: float) -> float:
        return probability

    def slot(self, place: int, peak: float) -> float:
        return 1.0


class Measured(Chances):
    """Acceptance rates of drawn children, by rank and probability, corrected by what verification
    accepted.

    A drawn token is accepted with min(1, target / draft probability), so rare tokens of a flat
    distribution are accepted about as often as its likely ones. And where the first child was
    rejected, the rest of the target's distribution lies where the drafter gives little: the second
    child is accepted about half as often as a first one of the same probability, the third a third
    as often. `usual` puts that into a formula, fitted on our own questions at temperatures 0.6 and
    1; each cell of `EDGES` and ranks is corrected by observed acceptance. Before the token is
    drawn, the largest probability of the distribution stands for the token's.
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
        """The formula, before any correction."""
        return (0.28 + 0.35 * probability + 0.3 * probability**4) / (place + 1)

    def child(self, place: int, probability: float) -> float:
        cell = self._cell(place, probability)
        return min(
            0.99, self.usual(place, probability) * self._accepted[cell] / self._expected[cell]
        )

    def slot(self, place: int, peak: float) -> float:
        return self.child(place, peak)

    def observe(self, place: int, probability: float, accepted: bool) -> None:
        cell, keep = self._cell(place, probability), 1 - 1 / self.MEMORY
        self._accepted[cell] = keep * self._accepted[cell] + accepted
        self._expected[cell] = keep * self._expected[cell] + self.usual(place, probability)

    def _cell(self, place: int, probability: float) -> int:
        return min(place, self.PLACES - 1) * (len(self.EDGES) + 1) + bisect_right(
            self.EDGES, probability
        )


class Likeliest(Measured):
    """Acceptance rates of deterministic children, ranked by the drafter's probability and the noise
    of their place (`trees/perturbed.py`).

    Drafters are underconfident in their first choice: on our own questions, first children of
    probability 0.37 were accepted in 0.55 of the cases at temperature 0, 0.52 at 0.6 and 0.42 at 1;
    later children about as often as their probability says. Corrected by observed acceptance as
    `Measured` is.
    """

    LIFT = 1.4

    @staticmethod
    def usual(place: int, probability: float) -> float:
        return probability if place else 1 - (1 - probability) ** Likeliest.LIFT
