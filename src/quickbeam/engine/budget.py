"""One budget for all running sequences: the nodes of their trees and the calls of a drafter.

The aim is the most tokens a second. To maximise that ratio is to maximise
`tokens - rate * seconds`, where rate is the best ratio there is (Dinkelbach, 1967). So a node or a
call is added only if its expected tokens at the recent rate are worth more than its time
(`CostModel`). Whether drafting is worth its time with all its costs counted, and whether a drafter
is, is compared (`Comparison`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from quickbeam.drafters.base import MarginalCost
from quickbeam.engine.comparison import ASKED, PLAIN, UNASKED, Comparison
from quickbeam.engine.cost import FEW, STEEP, WIDER, WIDTHS, CostModel
from quickbeam.models.base import Model

MAX_NODES = 64  # the most nodes of a tree under the measured budget
MAX_NODES_SLOW = 512  # the same where a pass reads weights from disk
OVERHEAD = 0.001  # seconds of a step apart from passes and calls


class Budget:
    """Decides which calls of a drafter are made and how many nodes each tree has.

    `begin` opens a step, `observe` closes it. Each `setting` (a method and what its drafts depend
    on) has records of its own. `limit` is the most nodes of a tree.
    """

    DOUBT = 256  # the first step in which costs that allow no tree are doubted
    HOLD = 4  # how many steps a marginal cost is kept, if the pass stays about as wide
    ACCEPTED = 0.7  # a guess: how often a drafter's token is accepted

    def __init__(self, cost: CostModel, limit: int = MAX_NODES) -> None:
        self.cost, self.limit = cost, limit
        self._widths = [width for width in (*WIDTHS, *WIDER) if width <= limit]
        self._comparisons: dict[Hashable, dict[int, Comparison]] = {}  # by setting and load
        # the marginal cost of the last few steps: since which step, with how many rows beside
        self._held: tuple[int, int, MarginalCost | None] = 0, 0, None
        self._step, self._doubted = 0, 0
        self.begin()

    def begin(self, many: int = 1, tokens: int = 0, nodes: int = 1, prompts: int = 0) -> None:
        """Open a step of so many sequences.

        `tokens`: of all their texts. `nodes`: of all their last trees. `prompts`: rows of prompts
        that the same pass reads.
        """
        self._step, self._many = self._step + 1, many
        self._context = tokens // many
        self._beside = prompts + round(nodes * (1 - 1 / many))  # the pass without one tree
        reading = self._many * self.cost.reading(1, self._context)
        # seconds of this step without drafts and prompts
        self.plain = self.cost.alone(self._many, self._many) + reading + OVERHEAD

    def doubt(self, model: Model) -> None:
        """Measure passes anew where by what they take now they were measured on a busy machine.

        To be called where no tree is worth its time: nothing else would correct the costs of
        trees. It looks ever more seldom, and only where a few nodes are said to cost much.
        """
        if self._step < max(self.DOUBT, 2 * self._doubted):
            return
        if self.cost.alone(FEW) <= STEEP * self.cost.alone(1):
            return
        self._doubted = self._step
        if model.streamed is None and self.cost.too_steep(model):
            self.cost = CostModel.kept(model, self.limit)

    def comparison(self, setting: Hashable, modes: Sequence[str], drafter: Hashable) -> Comparison:
        """Return the comparison of a setting's modes under a load of about as many sequences.

        A new one begins with the speeds under the nearest load that is known, unless the costs give
        a worse guess for a larger load, or a better one for a smaller. What a call brings depends
        on no load, so only the first of a setting explores it at once.
        """
        bucket, known = _bucket(self._many), self._comparisons.setdefault(setting, {})
        if bucket not in known:
            guess = self._guess(modes, drafter)
            if known:
                near = min(known, key=lambda size: abs(size - bucket))
                better = min if near < bucket else max
                guess = {mode: better(guess[mode], known[near].speed(mode)) for mode in modes}
            known[bucket] = Comparison(guess, explored=bool(known))
        return known[bucket]

    def asks(self, setting: Hashable, sequences: int) -> bool:
        """Whether asking the drafter is the fastest mode under such a load, as far as is known."""
        known = self._comparisons.get(setting, {}).get(_bucket(max(1, sequences)))
        return known is None or known.best == ASKED

    def _guess(self, modes: Sequence[str], drafter: Hashable) -> dict[str, float]:
        """Return by mode the speed that costs lead one to expect, by that of plain decoding."""

        def speed(tokens: float, nodes: int, calls: int) -> float:
            rows = self.cost.alone(self._many * (1 + nodes), self._many)
            rows -= self.cost.alone(self._many, self._many)
            return tokens / (1 + (rows + calls * self.cost.call(drafter, self._many)) / self.plain)

        chain = [(1 - self.ACCEPTED ** (n + 1)) / (1 - self.ACCEPTED) for n in range(1, 5)]
        guess = {PLAIN: 1.0, UNASKED: speed(1.3, 2, 0)}
        guess[ASKED] = max(speed(tokens, n, n) for n, tokens in enumerate(chain, 1))
        return {mode: guess[mode] for mode in modes}

    def rate(self, comparison: Comparison) -> float:
        """Return tokens a second of recent steps, but at least those of plain decoding."""
        return max(1.0, comparison.speed(comparison.best)) * self._many / self.plain

    def marginal_cost(self, rate: float) -> MarginalCost:
        """Return what one more node of a tree costs at `rate`, the same for all trees of a step."""
        step, beside, cost = self._held
        old = self._step - step >= self.HOLD or abs(self._beside - beside) * 4 > beside
        if cost is None or old:
            alone, reading = self.cost.alone, self.cost.reading
            passes = [alone(self._beside + n) + reading(n, self._context) for n in self._widths]
            cost = MarginalCost.of_passes(self._widths, [rate * one for one in passes])
            self._held = self._step, self._beside, cost
        return cost

    def observe(self, comparison: Comparison, tokens: int, seconds: float, asked: bool) -> None:
        """Close a step. It emitted `tokens` in all and took `seconds`; `asked`: the drafter."""
        comparison.observe(tokens / self._many, seconds / self.plain, self._many, asked)


def worth_asking(
    gains: Sequence[float], seconds: Callable[[int], float], rate: float
) -> list[bool]:
    """Return which requests of a round to answer, all in one call.

    They are the set whose expected tokens (`gains`) most exceed the cost of the call at `rate`
    tokens a second. `seconds(n)` is the time of a call for n sequences. Requests of infinite gain
    are always answered.
    """
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    asked = sum(map(math.isinf, gains))
    count, best, total = asked, 0.0, 0.0
    base = seconds(asked) if asked else 0.0
    for n, i in enumerate(order[asked:], asked + 1):
        total += gains[i]
        profit = total - rate * (seconds(n) - base)
        if profit > best:
            best, count = profit, n
    answered = set(order[:count])
    return [i in answered for i in range(len(gains))]


def _bucket(sequences: int) -> int:
    """Return the class of a number of sequences; loads of one class count as alike.

    Up to 4 sequences each number is a class of its own. Beyond, classes go by half powers of two.
    """
    return sequences if sequences <= 4 else round(2 * math.log2(sequences)) + 1
