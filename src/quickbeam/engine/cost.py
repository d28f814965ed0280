"""Measured seconds: of a pass by its rows and contexts, of a drafter's call by its sequences."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable
from typing import NamedTuple


class CostModel:
    """Seconds of passes of the target and of a drafter's calls: measured at first, then followed.

    - `passes`: seconds of a pass, by rows, with nothing before its trees.
    - `per_token`: by a tree's nodes, the seconds that each token before it adds. Every node reads
      all these tokens, so a wide tree costs more in a long context.

    What lies between the measured sizes is interpolated. Calls belong to a `drafter`, by any name.

    Raises `ValueError` if no pass was measured.
    """

    FADE = 0.1  # the share of a difference that one observation corrects
    MOST = 0.5  # the same where nothing like it was observed for long
    COMMON = 0.05  # the same of all other sizes: the machine's speed may have changed
    LARGEST = 4.0  # a time that differs by a larger factor counts as different by this factor
    CALL = 0.4  # share of a plain pass that a call is guessed to take before one was timed
    READ = 0.1  # share of a call that reading a token takes, about
    FURTHER_CALL = 0.15  # share of a call that each further sequence adds before that was seen

    def __init__(self, passes: dict[int, float], per_token: dict[int, float] | None = None) -> None:
        if not passes:
            raise ValueError("no cost was measured")
        per_token = per_token or {1: 0.0}
        self.passes = {rows: passes[rows] for rows in sorted(passes)}
        self.per_token = {nodes: per_token[nodes] for nodes in sorted(per_token)}
        # by size, how many passes of about as many rows there were: a fading count
        self._seen = dict.fromkeys(self.passes, 1 / self.FADE)
        self._calls: dict[Hashable, dict[int, float]] = {}  # by drafter and number of sequences

    def of_pass(self, rows: int) -> float:
        """Return the expected seconds of a pass of `rows` rows with nothing before its trees."""
        return _interpolate(self.passes, rows)

    def of_context(self, nodes: int, tokens: int) -> float:
        """Return the seconds that `tokens` tokens before a tree of `nodes` nodes add to a pass."""
        return tokens * _interpolate(self.per_token, nodes)

    def of_call(self, drafter: Hashable, sequences: int = 1) -> float:
        """Return the expected seconds of a call for so many sequences.

        Where no call for this number was timed, the time follows from that for the nearest number.
        """
        times = self._calls.get(drafter) or {1: self.CALL * self.of_pass(1)}
        nearest = min(times, key=lambda count: abs(math.log(count / sequences)))
        wanted_factor = 1 + self.FURTHER_CALL * (sequences - 1)
        nearest_factor = 1 + self.FURTHER_CALL * (nearest - 1)
        return times[nearest] * wanted_factor / nearest_factor

    def knows_call(self, drafter: Hashable) -> bool:
        """Whether a call of this drafter was timed."""
        return bool(self._calls.get(drafter))

    def of_reading(self, drafter: Hashable, tokens: int) -> float:
        """Return about how many seconds a drafter takes to read `tokens` tokens."""
        return tokens * self.READ * self.of_call(drafter)

    def observe_pass(self, rows: int, seconds: float, context: float = 0.0) -> None:
        """Record that a pass took `seconds`, of which `context` are expected for the contexts.

        The sizes nearest to `rows` take most of the correction. A size takes more of it the longer
        ago it was seen. What contexts add takes more of it the larger its share of the time. A part
        of the correction goes to all sizes: otherwise what was in use while the machine was busy
        would seem slow afterwards.
        """
        expected = self.of_pass(rows) + context
        ratio = self._ratio(seconds, expected)
        near = _neighbours(self.passes, rows)
        for size in self.passes:
            share = 0.0
            if size == near.high:
                share = near.part
            elif size == near.low:
                share = 1 - near.part
            self._seen[size] = (1 - self.FADE) * self._seen[size] + share
            recent = min(self.MOST, share / self._seen[size])
            self.passes[size] *= math.pow(ratio, max(self.COMMON, recent))
        correction = self.COMMON + (self.FADE - self.COMMON) * context / expected
        for nodes in self.per_token:
            self.per_token[nodes] *= math.pow(ratio, correction)

    def observe_call(self, drafter: Hashable, sequences: int, seconds: float) -> None:
        """Record that a call took `seconds`. The first one does not count: it may pack weights."""
        if drafter not in self._calls:
            self._calls[drafter] = {}
            return
        times = self._calls[drafter]
        before = times.setdefault(sequences, seconds)
        times[sequences] = before * self._ratio(seconds, before) ** self.FADE

    def _ratio(self, seconds: float, expected: float) -> float:
        ratio = seconds / expected
        return min(self.LARGEST, max(1 / self.LARGEST, ratio))


def _interpolate(table: dict[int, float], size: int) -> float:
    """Return the value of `table` at `size`: between its keys in line, beyond in proportion."""
    near = _neighbours(table, size)
    between = table[near.low] * (1 - near.part) + table[near.high] * near.part
    return between * max(1.0, size / near.high)


class Neighbours(NamedTuple):
    """The two sizes of a table around a size, and how far from `low` to `high` it lies (0 to 1)."""

    low: int
    high: int
    part: float


def _neighbours(table: dict[int, float], size: int) -> Neighbours:
    """Return the keys of `table` around `size`; beyond its ends the last key, twice."""
    keys = list(table)
    i = bisect_left(keys, size)
    if i == 0 or i == len(keys):
        nearest = keys[0] if i == 0 else keys[-1]
        return Neighbours(nearest, nearest, 1.0)
    low = keys[i - 1]
    high = keys[i]
    return Neighbours(low, high, (size - low) / (high - low))
