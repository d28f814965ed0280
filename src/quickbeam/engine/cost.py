"""Measured seconds: of a pass by its rows and contexts, of a drafter's call by its sequences."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from quickbeam.noise import Array


class Table:
    """Seconds by size: between its `sizes` in line, beyond the last in proportion."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.sizes = sorted(seconds)
        self.seconds = [seconds[size] for size in self.sizes]

    def near(self, size: int) -> tuple[int, float]:
        """Return where in `sizes` the next size is, and how far `size` lies from the one before it.

        The distance is 1 at the next size itself, and before the first and beyond the last size.
        """
        sizes = self.sizes
        i = bisect_left(sizes, size)
        if i == 0 or i == len(sizes):
            return max(0, i - 1), 1.0
        low = sizes[i - 1]
        return i, (size - low) / (sizes[i] - low)

    def at(self, size: int) -> float:
        i, part = self.near(size)
        if part == 1:
            return self.seconds[i] * max(1.0, size / self.sizes[i])
        return self.seconds[i - 1] * (1 - part) + self.seconds[i] * part

    def parts(self, size: int) -> list[float]:
        """Return what each of `sizes` adds to the seconds of `size`: they sum to `at(size)`."""
        i, part = self.near(size)
        parts = [0.0] * len(self.sizes)
        if part == 1:
            parts[i] = self.at(size)
        else:
            parts[i - 1] = self.seconds[i - 1] * (1 - part)
            parts[i] = self.seconds[i] * part
        return parts


class Drift:
    """Follows numbers that drift, from noisy observations of weighted sums: a Kalman filter.

    The numbers are logarithms of seconds. Between two observations all drift alike, since the
    machine's speed may change, and each by itself, though near sizes similarly.

    `sizes`: of each number. Numbers are near whose sizes differ by a small factor.
    """

    ALIKE = 0.02  # standard deviation of the common drift from one observation to the next
    ALONE = 0.02  # the same of the drift of each number
    NEAR = 2.0  # doublings of the size over which drifts become independent
    NOISE = 0.07  # standard deviation of an observation
    OUTLIER = 3.0  # standard deviations; an error beyond them counts as if it were there
    FIRST = 4  # at first a number is as uncertain as after so many observations of others
    LONGEST = 64  # and never more than after so many

    def __init__(self, sizes: Sequence[int]) -> None:
        doublings = np.log2(np.array(sizes, np.float64))
        distances = np.abs(doublings[:, None] - doublings[None])
        alone = self.ALONE**2 * np.exp(-distances / self.NEAR)
        self._drift = self.ALIKE**2 + alone
        self._covariance = self.FIRST * self._drift

    def correct(self, weights: Array, error: float) -> list[float]:
        """Return by how much each number has to be corrected, `[n]`.

        `weights`: `[n]`, of the numbers in the sum. `error`: the observed sum less the expected.
        """
        covariance = self._covariance
        covariance *= 1 - 1 / self.LONGEST
        covariance += self._drift
        with_sum = covariance.dot(weights)
        variance = float(weights.dot(with_sum)) + self.NOISE**2
        gain = with_sum / variance
        covariance -= gain[:, None] * with_sum
        largest = self.OUTLIER * math.sqrt(variance)
        corrections: list[float] = (gain * max(-largest, min(largest, error))).tolist()
        return corrections


class CostModel:
    """Seconds of passes of the target and of a drafter's calls: measured at first, then followed.

    - `passes`: seconds of a pass, by rows, with nothing before its trees.
    - `per_token`: by a tree's nodes, the seconds that each token before it adds. Every node reads
      all these tokens, so a wide tree costs more in a long context.

    What lies between the measured sizes is interpolated. Calls belong to a `drafter`, by any name.

    Raises `ValueError` if no pass was measured.
    """

    FADE = 0.1  # the share of a difference that one timed call corrects
    LARGEST = 4.0  # a time that differs by a larger factor counts as different by this factor
    CALL = 0.4  # share of a plain pass that a call is guessed to take before one was timed
    CONTEXT = 1 << 16  # stands for contexts among the sizes that drift: it is near none
    READ = 0.1  # share of a call that reading a token takes, about
    FIRST_CALLS = 3  # of so many calls the fastest counts, as a busy machine only adds time
    FURTHER_CALL = 0.15  # share of a call that each further sequence adds before that was seen

    def __init__(
        self, passes: Mapping[int, float], per_token: Mapping[int, float] | None = None
    ) -> None:
        if not passes:
            raise ValueError("no cost was measured")
        self._passes = Table(passes)
        self._per_token = Table(per_token or {1: 0.0})
        self._drift = Drift([*self._passes.sizes, self.CONTEXT])
        self._calls: dict[Hashable, dict[int, float]] = {}  # by drafter and number of sequences
        self._timed: dict[Hashable, int] = {}  # by drafter, how many calls were timed

    def of_pass(self, rows: int) -> float:
        """Return the expected seconds of a pass of `rows` rows with nothing before its trees."""
        return self._passes.at(rows)

    def of_context(self, nodes: int, tokens: int) -> float:
        """Return the seconds that `tokens` tokens before a tree of `nodes` nodes add to a pass."""
        return tokens * self._per_token.at(nodes)

    def of_trees(self, nodes: Sequence[int], other_rows: int, tokens: int) -> list[float]:
        """Return the expected seconds of passes with a tree, for each of its numbers of nodes.

        `other_rows`: how many other rows each pass has. `tokens`: how many tokens are before the
        tree.
        """
        pass_seconds = self._passes.at
        per_token = self._per_token.at
        return [pass_seconds(other_rows + count) + tokens * per_token(count) for count in nodes]

    def of_call(self, drafter: Hashable, sequences: int = 1) -> float:
        """Return the expected seconds of a call for so many sequences.

        Where no call for this number was timed, the time follows from that for the nearest number.
        """
        times = self._calls.get(drafter) or {1: self.CALL * self.of_pass(1)}
        if sequences in times:
            return times[sequences]
        nearest = min(times, key=lambda count: abs(math.log(count / sequences)))
        wanted_factor = 1 + self.FURTHER_CALL * (sequences - 1)
        nearest_factor = 1 + self.FURTHER_CALL * (nearest - 1)
        return times[nearest] * wanted_factor / nearest_factor

    def knows_call(self, drafter: Hashable) -> bool:
        """Whether enough calls of this drafter were timed for one slow call not to decide."""
        return self._timed.get(drafter, 0) >= self.FIRST_CALLS

    def of_reading(self, drafter: Hashable, tokens: int) -> float:
        """Return about how many seconds a drafter takes to read `tokens` tokens."""
        return tokens * self.READ * self.of_call(drafter)

    def observe_pass(self, rows: int, seconds: float, context: float = 0.0) -> None:
        """Record that a pass took `seconds`, of which `context` are expected for the contexts.

        What was expected is a sum, over measured sizes and contexts. Each part is corrected by its
        share, by how uncertain it is, and by what its time has in common with the others'
        (`Drift`).
        """
        passes = self._passes
        parts = [*passes.parts(rows), context]
        expected = sum(parts)
        error = math.log(self._ratio(seconds, expected))
        corrections = self._drift.correct(np.array(parts) / expected, error)
        *factors, context_factor = map(math.exp, corrections)
        passes.seconds = [
            size_seconds * factor
            for size_seconds, factor in zip(passes.seconds, factors, strict=True)
        ]
        self._per_token.seconds = [
            token_seconds * context_factor for token_seconds in self._per_token.seconds
        ]

    def observe_call(self, drafter: Hashable, sequences: int, seconds: float) -> None:
        """Record that a call took `seconds`. The first one does not count: it may pack weights."""
        if drafter not in self._calls:
            self._calls[drafter] = {}
            return
        times = self._calls[drafter]
        before = times.setdefault(sequences, seconds)
        if not self.knows_call(drafter):
            self._timed[drafter] = self._timed.get(drafter, 0) + 1
            times[sequences] = min(before, seconds)
            return
        times[sequences] = before * self._ratio(seconds, before) ** self.FADE

    def _ratio(self, seconds: float, expected: float) -> float:
        ratio = seconds / expected
        return min(self.LARGEST, max(1 / self.LARGEST, ratio))
