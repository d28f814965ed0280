"""How likely a proposal is accepted, by what is known of it before it is verified.

How often a token is accepted differs from the probability that its source gives it. Each kind of
proposal has a formula for a first guess, and classes in which observed acceptance corrects it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

PROBABILITY_BOUNDS = (0.1, 0.3, 0.6, 0.9)  # bounds between the classes of a drafter's probabilities
CONFIDENCE_BOUNDS = (0.5, 0.8)  # bounds between the classes of a drafter's confidence
RANKS = 4  # ranks among siblings that are distinguished; the last stands for all further ones
# Drafters are underconfident in their first choice. On our own questions, first children of
# probability 0.37 were accepted in 0.55 of the cases at temperature 0, in 0.52 at 0.6 and in 0.42
# at 1. Later children were accepted about as often as their probability says.
LIFT = 1.4
# Acceptance rates of tokens that another source than the drafter proposes. `repeated`: after 1, 2
# and 3, 4 to 7, 8 to 15, 16 and more repeated tokens. `alternative`: likewise, of the token where
# the text went on differently after another occurrence. `remembered`: likewise, of another text;
# `predicted`: of the predicted one; `skeleton`: of a tool call's fixed parts.
# `guessed`: of ranks 1, 2 and 3, 4 to 7, …
REPEATED, REMEMBERED, PREDICTED = "repeated", "remembered", "predicted"
SKELETON = "skeleton"
ALTERNATIVE = "alternative"
GUESSED = "guessed"
RATES = {
    REPEATED: (0.25, 0.45, 0.65, 0.8, 0.9),
    ALTERNATIVE: (0.1, 0.1, 0.1, 0.07, 0.05),
    REMEMBERED: (0.25, 0.45, 0.65, 0.8, 0.9),
    PREDICTED: (0.5, 0.7, 0.8, 0.9, 0.95),
    SKELETON: (0.5, 0.7, 0.8, 0.9, 0.95),
    GUESSED: (0.04, 0.025, 0.015, 0.01, 0.005),
}
# by what the probability of a token that followed the last 1, 2 or 3 tokens elsewhere is multiplied
# at first, by its source
SUCCESSOR_RATES = {"recycling": (0.5, 0.8), "table": (0.3, 0.45, 0.55)}
# their odds are multiplied by this if the token is the drafter's first choice, and else divided
AGREEMENT_ODDS = 4.0

# What the drafter's answer says of a token that another source proposed: it was not asked; the
# token is its first choice; another token is.
NOT_ASKED = 0
FIRST_CHOICE = 1
OTHER_CHOICE = 2


class CandidateFeatures(NamedTuple):
    """What is known of a proposal: its class, and its acceptance rate before any correction."""

    group: tuple[str, int, int] | None  # None: never corrected
    prior: float

    def after_drafter(self, first_choice: bool) -> CandidateFeatures:
        """Return the features of a free candidate once the drafter's first choice is known.

        `first_choice`: whether it is this token.
        """
        assert self.group is not None
        kind, size, _ = self.group
        choice = FIRST_CHOICE if first_choice else OTHER_CHOICE
        odds = self.prior / (1 - self.prior)
        odds *= AGREEMENT_ODDS if first_choice else 1 / AGREEMENT_ODDS
        return CandidateFeatures((kind, size, choice), odds / (1 + odds))


FREE_FEATURES = {
    kind: [CandidateFeatures((kind, size, NOT_ASKED), rate) for size, rate in enumerate(rates)]
    for kind, rates in RATES.items()
}

Estimate = Callable[[int, float, float | None], CandidateFeatures]
"""Returns the features of a drafter's proposal.

Its arguments are the rank among its siblings, its probability, and how sure the drafter is there
(`DraftProbs.confidence`) or None.
"""


def printed_features(
    rank: int, probability: float, confidence: float | None = None
) -> CandidateFeatures:
    """Return DySpec's assumption: a child is accepted with its drafter's probability."""
    return CandidateFeatures(None, probability)


def drafted_features(
    rank: int, probability: float, confidence: float | None = None
) -> CandidateFeatures:
    """Return the features of a deterministic proposal of a drafter.

    `rank` counts its siblings, from 0. `probability`: see `methods/children.py`. `confidence`: see
    `DraftProbs`.
    """
    prior = probability if rank else 1 - (1 - probability) ** LIFT
    kind = (
        "drafted"
        if confidence is None
        else f"drafted {bisect_right(CONFIDENCE_BOUNDS, confidence)}"
    )
    return CandidateFeatures(
        (kind, min(rank, RANKS - 1), bisect_right(PROBABILITY_BOUNDS, probability)), prior
    )


def drawn_features(
    rank: int, probability: float, confidence: float | None = None
) -> CandidateFeatures:
    """Return the features of a drawn child, given that its earlier siblings are rejected.

    `probability` is that under the distribution it was drawn from, without earlier siblings,
    renormalised. A drawn token is accepted with min(1, target / draft probability). So rare tokens
    of a flat distribution are accepted about as often as its likely ones. Where the first child was
    rejected, the target's remaining distribution lies where the drafter gives little. So the
    second child is accepted about half as often as a first one of the same probability, and the
    third a third as often. The formula was fitted on our own questions at temperatures 0.6 and 1.
    """
    prior = (0.28 + 0.35 * probability + 0.3 * probability**4) / (rank + 1)
    return CandidateFeatures(
        ("drawn", min(rank, RANKS - 1), bisect_right(PROBABILITY_BOUNDS, probability)), prior
    )


def free_features(kind: str, number: int) -> CandidateFeatures:
    """Return the features of a token of a kind in `RATES`.

    `number`: for how many tokens the text has been repeating itself, or has agreed with another
    text, that the token continues; of a guess from the last logits, its rank among them, from 1.
    """
    of_kind = FREE_FEATURES[kind]
    return of_kind[min(max(number, 1).bit_length(), len(of_kind)) - 1]


def successor_features(source: str, known: int, rank: int, probability: float) -> CandidateFeatures:
    """Return the features of a token that followed the last tokens elsewhere.

    `source`: its name, one of `SUCCESSOR_RATES`. `known`: how many tokens it followed there. `rank`
    counts its siblings, from 0. `probability`: how likely it was there.
    """
    _, prior = drafted_features(rank, probability)
    kind = f"{source} {known} {min(rank, RANKS - 1)}"
    group = (kind, bisect_right(PROBABILITY_BOUNDS, probability), NOT_ASKED)
    return CandidateFeatures(group, SUCCESSOR_RATES[source][known - 1] * prior)


class AcceptanceModel:
    """Acceptance rates of proposals, and what a drafter's calls bring, by what was accepted."""

    TRUST = 8.0  # how many accepted tokens the first guess counts for in each class
    MEMORY = 512  # observations of a class after which one has lost most of its weight
    # the same of calls, in trees
    CALL_TRUST = 4.0
    CALL_MEMORY = 64
    ACCEPTED = 0.6  # accepted tokens for each node that is reached and was asked about, at first

    def __init__(self) -> None:
        self._accepted = self.ACCEPTED * self.CALL_TRUST
        self._asked = self.CALL_TRUST
        # by class: accepted tokens, and those that the formulas expected
        self._sums: dict[tuple[str, int, int] | None, tuple[float, float]] = {}

    def rate(self, features: CandidateFeatures) -> float:
        """Return the probability that a proposal is accepted, given that its parent is."""
        group, prior = features
        sums = self._sums.get(group)
        if sums is None:
            return prior
        accepted, expected = sums
        return min(0.99, prior * accepted / expected)

    def observe(self, features: CandidateFeatures, accepted: bool) -> None:
        """Record whether a proposal that verification reached was accepted."""
        group, prior = features
        if group is not None:
            accepted_sum, expected_sum = self._sums.get(group, (self.TRUST, self.TRUST))
            fade = 1 - 1 / self.MEMORY
            self._sums[group] = fade * accepted_sum + accepted, fade * expected_sum + prior

    @property
    def accepted_per_asked(self) -> float:
        """Accepted tokens for each node that is reached and was asked about."""
        return self._accepted / self._asked

    def observe_calls(self, accepted: int, asked: float) -> None:
        """Record a verified tree: `accepted` of the drafter's tokens.

        `asked`: the summed probability of being reached of the nodes that the drafter was asked
        about, in calls that cost something: of a block drafter, the first of a tree.
        """
        fade = 1 - 1 / self.CALL_MEMORY
        self._accepted = fade * self._accepted + accepted
        self._asked = fade * self._asked + asked
