"""Estimated acceptance rates of children.

How often a child is accepted differs from the probability that the drafter gives it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right


class Chances(ABC):
    """Estimates how likely a child is accepted, and what a slot is worth before its token is drawn.

    `place` is the rank of a child among its siblings, from 0. `probability` is the child's. For a
    drawn child it is the probability under the distribution that it was drawn from (without earlier
    siblings, renormalised). For a deterministic proposal it is what `methods/perturbed.py` gives.
    `LIFT`: no estimate for a deterministic proposal exceeds this multiple of its probability.
    """

    LIFT = 1.0

    @abstractmethod
    def child(self, place: int, probability: float) -> float:
        """Return the probability that a child is accepted, given that its parent is accepted.

        For a drawn child it is also given that its earlier siblings are rejected.
        """

    @abstractmethod
    def slot(self, place: int, peak: float) -> float:
        """Return the worth of a slot before its token is known: expected accepted tokens, in any
        unit.

        `peak` is the largest probability of the distribution that the token will be drawn from.
        """

    def observe(self, place: int, probability: float, accepted: bool) -> None:  # noqa: B027 (most have nothing to do)
        """Record whether a child that verification reached was accepted."""


class Printed(Chances):
    """The paper's assumption (DySpec, 2410.11744, Alg. 1).

    A child is accepted with the probability that it was drawn with. A slot is worth the probability
    that it is reached.
    """

    def child(self, place: int, probability: float) -> float:
        return probability

    def slot(self, place: int, peak: float) -> float:
        return 1.0


class Measured(Chances):
    """Acceptance rates of drawn children, by rank and probability, corrected by past acceptance.

    A drawn token is accepted with min(1, target / draft probability). So rare tokens of a flat
    distribution are accepted about as often as its likely ones. Where the first child was rejected,
    the rest of the target's distribution lies where the drafter gives little. So the second child
    is accepted about half as often as a first one of the same probability, and the third a third as
    often.

    `usual` is a formula for this, fitted on our own questions at temperatures 0.6 and 1. Each cell
    (a range of probabilities between `EDGES`, and a rank) is corrected by observed acceptance.
    Before a token is drawn, the largest probability of the distribution stands for the token's.
    """

    EDGES = (0.1, 0.3, 0.6, 0.9)  # bounds between the ranges of probabilities
    PLACES = 4  # ranks that are told apart; the last stands for all further ones
    TRUST = 8.0  # how many accepted children the formula counts for in each cell
    MEMORY = 512  # observations of a cell after which one has lost most of its weight

    def __init__(self) -> None:
        cells = (len(self.EDGES) + 1) * self.PLACES
        self._accepted, self._expected = [self.TRUST] * cells, [self.TRUST] * cells

    @staticmethod
    def usual(place: int, probability: float) -> float:
        """Return the acceptance rate by the formula, before any correction."""
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
    """Acceptance rates of deterministic proposals, by rank and probability.

    Both come from the drafter's distribution and the noise of the place (`methods/perturbed.py`).

    Drafters are underconfident in their first choice. On our own questions, first children of
    probability 0.37 were accepted in 0.55 of the cases at temperature 0, in 0.52 at 0.6 and in 0.42
    at 1. Later children were accepted about as often as their probability says. Observed acceptance
    corrects the formula as in `Measured`.
    """

    LIFT = 1.4

    @staticmethod
    def usual(place: int, probability: float) -> float:
        return probability if place else 1 - (1 - probability) ** Likeliest.LIFT
