"""One budget for all running sequences: the nodes of their trees and the calls of a drafter.

The aim is the most tokens a second. To maximise that ratio is to maximise
`tokens - rate * seconds`, where rate is the best ratio there is (Dinkelbach, 1967). So a node or a
call is added only if its expected tokens at the recent rate are worth more than its time
(`CostModel`). Whether drafting and a drafter are worth their time is compared (`Comparison`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from quickbeam.drafters.base import MarginalCost
from quickbeam.engine.cost import CostModel
from quickbeam.engine.measuring import FEW, STEEP, WIDTHS, measure_or_read, overrated
from quickbeam.models.base import Model

MAX_NODES = 64  # the most nodes of a tree under the measured budget
MAX_NODES_SLOW = 512  # the same where a pass reads weights from disk
WIDER = (192, 256, 384, 512)  # for passes so slow that trees of these sizes can be worth it
OVERHEAD = 0.001  # seconds of a step apart from passes and calls
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
        # steps with calls, `FIRST` of them where it is explored; time since the last of them
        self._asked, self._silent = self.FIRST if explored else 0, 0.0

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
        pending = [mode for mode, rest in self._rest.items() if rest <= 0 and mode not in skipped]
        self.mode = min(pending, key=self._rest.__getitem__) if pending else self.best
        if pending:
            turn = self.PLAIN_TURN if self.mode == PLAIN else self.TURN // sequences
            self._left, self._lost = 1 + max(1, turn), 0.0


class Budget:
    """Decides which calls of a drafter are made and how many nodes each tree has.

    `begin` opens a step, `observe` closes it. Each `setting` (a method and what its drafts depend
    on) has records of its own. `limit` is the most nodes of a tree.
    """

    RECHECK = 256  # the first step in which costs that allow no tree are checked
    HOLD = 4  # how many steps a marginal cost is kept, if the pass stays about as wide
    ACCEPTED = 0.7  # a guess: how often a drafter's token is accepted

    def __init__(self, cost: CostModel, limit: int = MAX_NODES) -> None:
        self.cost, self.limit = cost, limit
        self._widths = [width for width in (*WIDTHS, *WIDER) if width <= limit]
        self._comparisons: dict[Hashable, dict[int, Comparison]] = {}  # by setting and load
        # the marginal cost of the last few steps: since which step, with how many rows beside
        self._held: tuple[int, int, MarginalCost | None] = 0, 0, None
        self._step, self._rechecked = 0, 0
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

    def recheck_costs(self, model: Model) -> None:
        """Measure passes anew where by what they take now they were measured on a busy machine.

        To be called where no tree is worth its time: nothing else would correct the costs of
        trees. It looks ever more seldom, and only where a few nodes seem to cost much.
        """
        if self._step < max(self.RECHECK, 2 * self._rechecked):
            return
        if self.cost.alone(FEW) <= STEEP * self.cost.alone(1):
            return
        self._rechecked = self._step
        if model.streamed is None and overrated(self.cost, model):
            self.cost = measure_or_read(model, self.limit)

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
            costs = [rate * seconds for seconds in passes]
            cost = MarginalCost.of_passes(self._widths, costs)
            if not self._beside and self.cost.seconds.keys() >= {*self._widths}:
                cost = replace(cost, passes=dict(zip(self._widths, costs, strict=True)))
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
