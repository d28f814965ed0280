"""Prices of nodes and calls, by what passes and calls take and how many tokens came of late."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from quickbeam.draft.prices import Prices
from quickbeam.engine.budget import WIDTHS, CostModel


class Market:
    """Makes `Prices` from the `cost` of a pass, and from what calls took and tokens came of late. `overhead`: seconds of a step beside.

    The first steps are trials, and now and then another one, on which no more than a share `TRIAL` of the time goes: where drafting was not
    worth its price, it may be by now.
    """

    MEMORY = 64  # steps after which an observation has lost most of its weight
    HOLD = 8  # steps that prices are kept for
    FIRST, REST, TRIAL = 4, 32, 0.02  # how many trials at first, and at least so many steps between later ones
    CALLS = 16  # steps with calls that tell what a call costs
    GUESS = 0.25  # of a plain pass, before one was seen

    def __init__(self, cost: CostModel, limit: int, overhead: float = 0.001) -> None:
        self.cost, self.limit = cost, limit
        self._widths = [width for width in WIDTHS if width <= limit]
        self._seconds, self._tokens = cost.seconds(1) + overhead, 1.0  # fading sums, at first of one plain step
        self._calls: deque[float] = deque(maxlen=self.CALLS)  # seconds of one
        self._steps = self._tried = 0
        self._prices: Prices | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._tokens / self._seconds

    @property
    def call(self) -> float:
        """Seconds of a call: the lower quartile of late. Some are slow (new shapes, a busy machine), and what looks cheap gets tried."""
        return sorted(self._calls)[len(self._calls) // 4] if self._calls else self.GUESS * self.cost.seconds(1)

    def prices(self, context: int) -> Prices:
        """Behind `context` tokens."""
        if self._prices is None or self._steps % self.HOLD == 0:
            passes = [self.rate * self.cost.seconds(width, context) for width in self._widths]
            self._prices = Prices(self._widths, passes, self.rate * self.call)
        self._steps += 1
        rest = max(self.REST, self.call / self.cost.seconds(1) / self.TRIAL)
        if self._steps > self.FIRST and self._steps - self._tried < rest:
            return self._prices
        self._tried = self._steps
        return replace(self._prices, trial=True)

    def observe(self, tokens: int, seconds: float, calls: int = 0, drafting: float = 0.0) -> None:
        """A step emitted `tokens` and took `seconds`, `drafting` of them with `calls` of the drafter; none are told of where a call did
        more than usual, as an answer's first does, which reads the prompt."""
        keep = 1 - 1 / self.MEMORY
        self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds
        if calls:
            self._calls.append(drafting / calls)
