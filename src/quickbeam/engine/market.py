"""Prices of nodes and calls, by what passes and calls take and how many tokens came of late."""

from __future__ import annotations

from dataclasses import replace

from quickbeam.draft.prices import Prices
from quickbeam.engine.budget import WIDTHS, CostModel


class Market:
    """Makes `Prices` from the `cost` of a pass, and from what calls took and tokens came of late. `overhead`: seconds of a step beside.

    Every `TRIAL`-th step is a trial: where drafting was not worth its price, it may be by now.
    """

    MEMORY = 64  # steps after which an observation has lost most of its weight
    HOLD = 8  # steps that prices are kept for
    TRIAL = 64
    GUESS = 0.25

    def __init__(self, cost: CostModel, limit: int, overhead: float = 0.001) -> None:
        self.cost, self.limit = cost, limit
        self._widths = [width for width in WIDTHS if width <= limit]
        self._seconds, self._tokens = cost.seconds(1) + overhead, 1.0  # fading sums, at first of one plain step
        self._calls, self._calling = 0.0, 0.0
        self._steps = 0
        self._prices: Prices | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._tokens / self._seconds

    def prices(self, context: int) -> Prices:
        """Behind `context` tokens. A call costs `GUESS` passes until one was seen."""
        if self._prices is None or self._steps % self.HOLD == 0:
            passes = [self.rate * self.cost.seconds(width, context) for width in self._widths]
            call = self._calling / self._calls if self._calls else self.GUESS * self.cost.seconds(1)
            self._prices = Prices(self._widths, passes, self.rate * call)
        self._steps += 1
        return replace(self._prices, trial=True) if self._steps % self.TRIAL == 0 else self._prices

    def observe(self, tokens: int, seconds: float, calls: int, drafting: float) -> None:
        """A step emitted `tokens` and took `seconds`, `drafting` of them with `calls` of the drafter."""
        keep = 1 - 1 / self.MEMORY
        self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds
        if calls:
            slow = self._calls > 0 and drafting / calls > 2 * self._calling / self._calls  # the machine was busy
            self._calling = keep * self._calling + (2 * calls * self._calling / self._calls if slow else drafting)
            self._calls = keep * self._calls + calls
