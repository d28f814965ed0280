"""Whether drafting is worth its time under one load: steps with drafts against steps without."""

from __future__ import annotations

import math


class Comparison:
    """Measures, now and then, steps with drafts against steps without, a few of either in turn.

    A tree costs more than its rows and calls. It is planned, grown, verified and learned from, one
    sequence after the other. With many sequences a node is worth little more than its row, and then
    this can outweigh what trees gain. So prices alone don't decide whether trees are grown.

    The two kinds of steps take turns because a machine's speed changes within seconds. After a
    comparison the faster kind goes on. As long as it stays the faster one, each such rest is twice
    as long as the one before. It is longer still where the slower kind lost much, so that comparing
    loses no more than a share `LOST` of the time in the long run. Where drafting is clearly faster
    by what is known anyway, nothing is compared.

    `faster`: whether drafting was the faster kind in the last comparison. At first it is a guess.
    Where the guess is no, nothing is drafted for `UNTRIED` steps. `concluded`: whether a comparison
    has come to its end.
    """

    CLEAR = 1.2  # how many times as fast as plain decoding drafting has to be for that
    TURNS = 4  # how many turns each kind has in a comparison
    # Measured steps of a turn: with drafts so many of single sequences, because their tokens vary.
    # Without drafts each gives one token, so a few are enough.
    DRAFTED, PLAIN = 32, 2
    REST = 16  # steps before the first comparison, at most; after it, as many as that took
    EARLY = 64  # the same counted in steps of single sequences: with many, a few steps say enough
    UNTRIED = 64  # steps before the first comparison where the guess is that drafting loses
    LONGEST = 16  # how many times as long a rest becomes
    LOST = 0.02  # the share of the time that the slower kind's steps may lose

    def __init__(self, faster: bool = True) -> None:
        self.drafts = self.faster = faster  # `drafts`: whether the next step is to draft
        self.concluded = False
        self._turns = 0  # turns left of a comparison, 0 in a rest
        # steps left of the turn or of the rest; None before the first step
        self._steps: int | None = None
        self._changed = False  # whether the next step is the first of a turn
        self._longer = 1
        self._taken = {True: 0, False: 0}  # steps of each kind in the comparison so far
        # for each kind: tokens of a sequence, and seconds by those that a plain step should take
        self._tokens, self._seconds = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}

    def observe(
        self, sequences: int, tokens: int, seconds: float, plain: float, recent: float
    ) -> None:
        """Record a step of `sequences` sequences. It emitted `tokens` in all and took `seconds`.

        `plain`: the seconds it should take without drafts. `recent`: tokens a second of recent
        steps, by those of plain decoding.
        """
        if self._steps is None:
            early = max(1, min(self.REST, self.EARLY // sequences))
            self._steps = early if self.faster else self.UNTRIED
        # The first step of a turn is left out: it also reads what the drafter missed in the last.
        if self._turns and not self._changed:
            self._tokens[self.drafts] += tokens / sequences
            self._seconds[self.drafts] += seconds / plain
        self._taken[self.drafts] += 1
        self._changed = False
        self._steps -= 1
        if self._steps > 0:
            return
        if self._turns:
            self._turns -= 1
            if not self._turns:
                self._conclude()
                return
        elif self.drafts and recent > self.CLEAR:
            self._steps = self.REST
            return
        else:
            self._turns, self._taken = 2 * self.TURNS, {True: 0, False: 0}
            for sums in (self._tokens, self._seconds):
                sums.update({kind: value / 2 for kind, value in sums.items()})
        self.drafts, self._changed = not self.drafts, True
        self._steps = 1 + (max(1, self.DRAFTED // sequences) if self.drafts else self.PLAIN)

    def _conclude(self) -> None:
        """Go on with the faster kind."""
        speed = {kind: self._tokens[kind] / self._seconds[kind] for kind in (True, False)}
        faster = speed[True] >= speed[False]
        self._longer = min(2 * self._longer, self.LONGEST) if faster == self.faster else 1
        self.drafts = self.faster = faster
        self.concluded = True
        self._steps = sum(self._taken.values()) * self._longer
        if speed[faster]:  # else every answer failed
            lost = self._taken[not faster] * (1 - speed[not faster] / speed[faster])
            self._steps = max(self._steps, math.ceil(lost / self.LOST))
