"""Which way of drafting is the fastest under one load: steps of each, measured."""

from __future__ import annotations

from collections.abc import Mapping

# The modes of a step: roots alone; trees without a drafter's calls; trees for which it is asked.
PLAIN, UNASKED, ASKED = "plain", "unasked", "asked"


class Comparison:
    """Measures the modes of a step, and goes on with the fastest.

    A tree costs more than its rows and calls: it is planned, grown, verified and learned from. So
    steps are compared as a whole, by fading sums of tokens and seconds. Both are counted by those
    of plain decoding, so that the machine's speed cancels out.

    Now and then comes a turn of another mode, so seldom that the tokens it loses are no more than a
    share `LOST` of all, and ever more seldom as long as it changes nothing. Plain decoding is not
    tried where the fastest mode is clearly faster.

    `guess`: for each possible mode its speed, by that of plain decoding. `explored`: whether what a
    call brings is known from other loads.
    """

    # after so many tokens of plain decoding, and steps, an observation has lost most of its weight
    MEMORY, STEPS = 256.0, 64.0
    TRUST = 24.0  # how many of them a guess counts for
    TURN, PLAIN_TURN = 12, 2  # measured steps of a turn, divided among the sequences side by side
    REST = 32.0  # the least time between turns, in steps of plain decoding
    LOST, CLEAR = 0.01, 1.2
    LONGEST = 16  # how many times as long a rest becomes, for either reason
    SLOW = 2.5  # a step counts for no more than so many usual ones: the machine was busy
    BEGIN = 8.0  # how many steps earlier texts count for in the next one that runs alone
    FIRST = 4  # so many of the first steps explore what a call brings, where it costs little

    def __init__(self, guess: Mapping[str, float], explored: bool = False) -> None:
        self._tokens = {mode: speed * self.TRUST for mode, speed in guess.items()}
        self._seconds = dict.fromkeys(guess, self.TRUST)
        self._steps = dict.fromkeys(guess, self.TRUST)
        self.mode = self.best = max(guess, key=self.speed)
        self._rest = dict.fromkeys(guess, self.REST)  # until the next turn of each mode
        self._longer = dict.fromkeys(guess, 1)
        self._left, self._lost = 0, 0.0  # of a turn: steps, and tokens lost so far
        self._changed = False  # whether the next step is the first of a mode
        # steps with calls; time since the last of them
        self._asked, self._silent = self.FIRST * explored, 0.0

    def speed(self, mode: str) -> float:
        """Return the speed of a mode, by that of plain decoding."""
        return self._tokens[mode] / self._seconds[mode]

    def begin_text(self) -> None:
        """Begin a text that runs alone: its speed is its own, and earlier ones count for little."""
        for mode, steps in self._steps.items():
            for sums in (self._tokens, self._seconds, self._steps):
                sums[mode] *= min(1.0, self.BEGIN / steps)

    def explores(self, call: float, reading: float) -> bool:
        """Whether the first call of this step is made, whatever it seems to bring.

        `call` and `reading` are the seconds of a call and of what the drafter has to read before
        it, by those of a plain step. What is unread grows with the pause, so it makes no pause
        longer than 8 `REST`. A turn of asking begins with a call.
        """
        if self.mode != ASKED:
            return False
        pause = max(self.REST, call / self.LOST)
        pause = max(pause, min(8 * self.REST, (call + reading) / self.LOST))
        begins = self._changed and self.mode != self.best
        first = self._asked < self.FIRST and call + reading < 1
        return begins or first or self._silent >= pause

    def observe(self, tokens: float, seconds: float, sequences: int, asked: bool) -> None:
        """Record a step: `tokens` a sequence, in `seconds` by those of a plain step."""
        self._asked, self._silent = self._asked + asked, 0.0 if asked else self._silent + seconds
        # The first step of a mode is left out: it also reads what the drafter missed.
        if not self._changed:
            seconds = min(seconds, self.SLOW * self._seconds[self.mode] / self._steps[self.mode])
            keep = max((1 - 1 / self.MEMORY) ** sequences, 1 - 1 / self.STEPS)
            sums = (self._tokens, tokens), (self._seconds, seconds), (self._steps, 1.0)
            for sum_of, new in sums:
                sum_of[self.mode] = keep * sum_of[self.mode] + sequences * new
        self._rest = {mode: rest - seconds for mode, rest in self._rest.items()}
        before = self.mode
        if self._left:
            self._left -= 1
            self._lost += seconds * self.speed(self.best) - tokens
            if self._left:
                self._changed = False
                return
            rest = min(max(1.0, self._lost / self.LOST / self.REST), self.LONGEST)
            self._rest[before] = self.REST * rest * self._longer[before]
            self._longer[before] = min(2 * self._longer[before], self.LONGEST)
        self._choose(sequences)
        self._changed = self.mode != before

    def _choose(self, sequences: int) -> None:
        fastest = max(self._tokens, key=self.speed)
        if fastest != self.best:
            self.best, self._longer = fastest, dict.fromkeys(self._longer, 1)
        skipped = {self.best} | ({PLAIN} if self.speed(self.best) > self.CLEAR else set())
        due = [mode for mode, rest in self._rest.items() if rest <= 0 and mode not in skipped]
        self.mode = min(due, key=self._rest.__getitem__) if due else self.best
        if due:
            turn = self.PLAIN_TURN if self.mode == PLAIN else self.TURN // sequences
            self._left, self._lost = 1 + max(1, turn), 0.0
