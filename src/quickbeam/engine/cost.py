"""Measured seconds: of a pass by its rows and contexts, of a drafter call by its sequences."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from statistics import median


class CostModel:
    """Seconds of passes of the target and of a drafter's calls: measured, then followed.

    - `seconds`: of a pass, by rows, with nothing before its trees; other rows are interpolated.
    - `per_token`: by a tree's nodes, the seconds that each token before it adds. Every node reads
      all these tokens, so a wide tree costs more in a long context.
    - `per_sequence`: the seconds that a row adds if it belongs to another sequence than the tree.

    Calls belong to a `drafter`, by any name. Raises `ValueError` if no pass was measured.
    """

    RATE = 0.05  # the share of a difference that one pass corrects
    COMMON = 0.5  # the share of a correction that all widths get: the machine's speed has changed
    CALLS = 8  # how many recent calls give the median
    CALL = 0.4  # share of a plain pass that a call is guessed to take before one was timed
    MORE = 0.15  # share of a call that each further sequence adds before that was seen
    LEAST = 0.5  # share of a call's seconds that is not reading, at least

    def __init__(
        self,
        seconds: dict[int, float],
        per_token: dict[int, float] | None = None,
        per_sequence: float = 0.0,
    ) -> None:
        if not seconds:
            raise ValueError("no cost was measured")
        self.per_sequence = per_sequence
        self.seconds = dict(sorted(seconds.items()))
        self.per_token = dict(sorted((per_token or {1: 0.0}).items()))
        self._calls: dict[Hashable, dict[int, deque[float]]] = {}
        self._reads: dict[Hashable, deque[float]] = {}  # by drafter: seconds a token

    # passes

    def alone(self, rows: int, sequences: int = 1) -> float:
        """Return the expected time of a pass of `rows` rows with nothing before its trees."""
        return interpolate(self.seconds, rows) + self.per_sequence * (sequences - 1)

    def reading(self, nodes: int, context: int) -> float:
        """Return the seconds that `context` tokens before a tree of `nodes` nodes add."""
        return context * interpolate(self.per_token, nodes)

    def observe(self, rows: int, seconds: float, reading: float = 0.0, sequences: int = 1) -> None:
        """Record that a pass over trees of `sequences` sequences took `seconds`.

        `reading` of these seconds are expected for the tokens before the trees. Of two measured
        widths the nearer one takes more of the correction, so that the slope between them is
        corrected, too; what tokens before a tree add takes more of it the larger their share. A
        part goes to all: otherwise what was in use while the machine was busy would seem slow
        afterwards, and not be used again.
        """
        expected = self.alone(rows, sequences) + reading
        ratio = min(2.0, max(0.5, seconds / expected))
        low, high, part = _bracket(self.seconds, rows)
        shares = {low: 1 - part, high: part} if part else {low: 1.0}
        # the interpolated time changes by RATE of the difference, however it is divided
        whole = sum(share * self.seconds[width] for width, share in shares.items())
        moved = sum(share**2 * self.seconds[width] for width, share in shares.items())
        change = self.RATE * (ratio - 1)
        for width in self.seconds:
            own = shares.get(width, 0.0) * whole / moved
            self.seconds[width] *= 1 + change * (self.COMMON + (1 - self.COMMON) * own)
        of_reading = change * (self.COMMON + (1 - self.COMMON) * reading / expected)
        self.per_token = {n: at * (1 + of_reading) for n, at in self.per_token.items()}
        self.per_sequence *= 1 + change * self.COMMON

    # drafter calls

    def call(self, drafter: Hashable, sequences: int = 1) -> float:
        """Return the expected seconds of a call for `sequences` sequences: a median.

        If none of as many was timed, it follows from those of the nearest number.
        """
        seen = self._calls.get(drafter)
        if not seen:
            return self.CALL * self.alone(1) * (1 + self.MORE * (sequences - 1))
        near = min(seen, key=lambda count: abs(math.log(count / sequences)))
        more = (1 + self.MORE * (sequences - 1)) / (1 + self.MORE * (near - 1))
        return median(seen[near]) * more

    def observe_call(
        self, drafter: Hashable, sequences: int, seconds: float, unread: int = 0
    ) -> None:
        """Record that a call for `sequences` sequences took `seconds`.

        The drafter first read `unread` tokens in it. Their time is left out, since they have to be
        read once, whichever call does it. The first call does not count: it may pack weights.
        """
        if drafter not in self._calls:
            self._calls[drafter] = {}
            return
        seconds = max(self.LEAST * seconds, seconds - self.read(drafter, unread))
        self._calls[drafter].setdefault(sequences, deque(maxlen=self.CALLS)).append(seconds)

    def read(self, drafter: Hashable, tokens: int) -> float:
        """Return the expected seconds in which a drafter reads `tokens` tokens: by a median."""
        if seen := self._reads.get(drafter):
            return tokens * median(seen)
        return tokens * self.CALL * self.alone(64) / 64

    def observe_read(self, drafter: Hashable, tokens: int, seconds: float) -> None:
        """Record that a drafter read `tokens` tokens, apart from any call, in `seconds`."""
        self._reads.setdefault(drafter, deque(maxlen=self.CALLS)).append(seconds / tokens)


def interpolate(table: dict[int, float], nodes: int) -> float:
    """Return the value of `table` at `nodes`, interpolated between its keys.

    Beyond the widest key it grows in proportion, or as fast as it grew last where that is faster.
    """
    low, high, part = _bracket(table, nodes)
    value = table[low] * (1 - part) + table[high] * part
    if nodes <= high or len(table) < 2:
        return value * max(1.0, nodes / high)
    below = list(table)[-2]
    return value + (nodes - high) * max(value / high, (table[high] - table[below]) / (high - below))


def _bracket(table: dict[int, float], nodes: int) -> tuple[int, int, float]:
    """Return the keys of `table` around `nodes`, and how far between them it lies (0 to 1)."""
    widths = list(table)
    i = bisect_left(widths, nodes)
    if i == len(widths):
        return widths[-1], widths[-1], 0.0
    if i == 0 or widths[i] == nodes:
        return widths[i], widths[i], 0.0
    return widths[i - 1], widths[i], (nodes - widths[i - 1]) / (widths[i] - widths[i - 1])
