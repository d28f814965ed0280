"""One budget for all running sequences.

It decides how many nodes each tree gets and which calls of a drafter are made.

The aim is the most tokens a second, a ratio of tokens to seconds. To maximise that ratio is to
maximise `tokens - rate * seconds`, where rate is the best ratio there is (Dinkelbach, 1967). So a
node or a call is added only if its expected tokens outweigh its time at the recent rate, in
whichever tree it is. Recent rates approach the best one. A sequence that runs alone goes by a rate
of its own: the tokens of a text are given, so each text is over soonest by its own best ratio.

The time of a pass is measured by its number of rows. The more sequences share a pass, the more does
a further row cost compared with what it costs alone. In a full batch little but the roots is worth
its time. Whether drafting is, all its costs counted, is measured (`Comparison`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from quickbeam.drafters.base import MarginalCost
from quickbeam.engine.comparison import Comparison
from quickbeam.engine.cost import WIDER, WIDTHS, CallCost, CostModel, interpolate

MOST = 64  # the most nodes of a tree under the measured budget
MOST_DEAR = 512  # the same where a pass reads weights from disk
OVERHEAD = 0.001  # seconds of a step apart from passes and calls


class NodePrices(MarginalCost):
    """The marginal cost of a node, in tokens, by the size of its tree.

    It is the slope of the lower convex hull of pass times. Where the time of a pass rises in steps
    (a kernel's tiles), a step is thus spread over its nodes. Beyond the widest measured tree a node
    costs infinitely much.

    `widths` are numbers of nodes, `passes` the cost in tokens of a pass for each of them.
    """

    def __init__(self, widths: Sequence[int], passes: Sequence[float], trial: bool = False) -> None:
        self.trial = trial
        hull: list[int] = []

        def slope(a: int, b: int) -> float:
            return (passes[b] - passes[a]) / (widths[b] - widths[a])

        for i in range(len(widths)):
            while len(hull) > 1 and slope(hull[-2], i) <= slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(i)
        self._slopes = [0.0] * widths[-1]
        for a, b in pairwise(hull):
            self._slopes[widths[a] : widths[b]] = [max(0.0, slope(a, b))] * (widths[b] - widths[a])

    def node(self, nodes: int) -> float:
        return self._slopes[nodes] if nodes < len(self._slopes) else float("inf")


class Expected:
    """Expected tokens of a step by the number of nodes of its tree.

    They are learned separately for each situation that a policy tells apart
    (`TreePolicy.situation`). If a tree's first m nodes are the tree of budget m
    (`TreePolicy.nested`), one step shows what each smaller tree would have emitted. For a tree of m
    nodes that is the number of accepted nodes among its first m. The root counts for the token that
    follows the path.
    """

    MEMORY = 64  # steps after which an observation has lost most of its weight
    TRUST = 3  # how many observed steps a guess from smaller budgets counts for

    def __init__(self, limit: int) -> None:
        self.budgets = [width for width in (*WIDTHS, *WIDER) if width <= limit]
        # by situation, for each budget: the mean of the observed tokens
        self._emitted: dict[int, list[float]] = {}
        self._count: dict[int, list[int]] = {}

    @staticmethod
    def prior(situation: int, nodes: int) -> float:
        """Return the tokens of a step before anything was observed.

        It assumes a chain whose tokens are accepted at a rate that grows with the situation. (A
        match of one token is right about 1 time in 4, a long one 9 times in 10.) It adds a little
        for every doubling of the nodes.
        """
        chance = (0.0, 0.25, 0.5, 0.75, 0.9)[min(situation, 4)]
        return 1 + sum(chance**i for i in range(1, nodes)) + 0.1 * math.log2(nodes)

    def tokens(self, situation: int) -> list[float]:
        """Return the expected tokens for each of `budgets`.

        Each is what was observed, mixed with a guess from the next smaller budget. If that budget
        was observed, the guess continues its growth: each further node adds nine tenths of what the
        node before it added. Otherwise the guess grows as the prior does.
        """
        emitted, count = self._records(situation)
        tokens = [1.0]
        for i in range(1, len(self.budgets)):
            more = self.budgets[i] - self.budgets[i - 1]
            if i > 1 and count[i - 1]:
                slope = (tokens[i - 1] - tokens[i - 2]) / (
                    self.budgets[i - 1] - self.budgets[i - 2]
                )
                growth = slope * 9 * (1 - 0.9**more)
            else:
                growth = self.prior(situation, self.budgets[i]) - self.prior(
                    situation, self.budgets[i - 1]
                )
            tokens.append(
                (count[i] * emitted[i] + self.TRUST * (tokens[i - 1] + growth))
                / (count[i] + self.TRUST)
            )
        return tokens

    def observe(
        self, situation: int, budget: int, path: Sequence[int], nested: bool = True
    ) -> None:
        """Learn from a step whose tree was grown with `budget` nodes.

        `path` is its accepted nodes, the root first. If not `nested` (see `TreePolicy`), the step
        says something about this budget alone.
        """
        emitted, count = self._records(situation)
        for i, width in enumerate(self.budgets):
            if width > budget:
                break
            if not nested and width < budget:
                continue
            count[i] = min(count[i] + 1, self.MEMORY)
            emitted[i] += (bisect_left(path, width) - emitted[i]) / count[i]

    def _records(self, situation: int) -> tuple[list[float], list[int]]:
        emitted = self._emitted.setdefault(situation, [0.0] * len(self.budgets))
        return emitted, self._count.setdefault(situation, [0] * len(self.budgets))


@dataclass
class Rate:
    """Tokens a second of one method under one load, or of one sequence alone, as fading sums.

    They begin with those of one step of plain decoding, or of recent steps (`begun`).

    Some steps are trials: the first call of the drafter is made whether or not it seems worth its
    time. Drafting that was not worth its cost may have become so. The first few steps are trials.
    Later one is a trial now and then, so that the calls take no more than a share `TRIAL` of the
    time. What the drafter has to read first counts, too, but it grows with the pause. So it makes
    no pause longer than `LONGEST` steps.
    """

    MEMORY = 64  # steps after which an observation has lost most of its weight
    BEGIN = 8  # how many steps the rate of earlier sequences counts for in a new one
    # how many steps at first are trials; the fewest steps between later trials; their share of time
    FIRST, REST, TRIAL = 4, 32, 0.02
    LONGEST = 256  # the most steps between trials for the sake of what is unread

    tokens: float
    seconds: float
    seen: float = 1.0  # steps that the sums hold, as they fade
    steps: int = 0
    tried: int = 0
    called: int = 0  # the last step in which a call was worth its time

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def trial(self, call: float, plain: float, reading: float = 0.0) -> bool:
        """Count the step that begins, and return whether it is a trial.

        `call` and `plain` are the seconds of a call and of a step without drafts. `reading` are the
        seconds of what the drafter has to read before the call.
        """
        self.steps += 1
        share = plain * self.TRIAL
        pause = max(self.REST, call / share, min(self.LONGEST, (call + reading) / share))
        if self.steps > self.FIRST and self.steps - self.tried < pause:
            return False
        self.tried = self.steps
        return True

    def worth_a_call(self) -> None:
        """Record that a call was made in this step because its tokens outweigh its time."""
        self.called = self.steps

    @property
    def drafts(self) -> bool:
        """Whether calls were worth their time recently, as far as is known."""
        return self.steps - self.called < self.REST

    def observe(self, tokens: int, seconds: float) -> None:
        keep = 1 - 1 / self.MEMORY
        self.tokens, self.seconds = keep * self.tokens + tokens, keep * self.seconds + seconds
        self.seen = keep * self.seen + 1

    def begun(self) -> Rate:
        """Return a rate for a new sequence. It begins with this one."""
        part = min(1.0, self.BEGIN / self.seen)
        return Rate(part * self.tokens, part * self.seconds, part * self.seen)


class Plan(NamedTuple):
    """What one sequence's next tree may cost.

    - `nodes`: the most nodes it may have, the root included.
    - `prices`: if given, the marginal cost that each node has to be worth.
    - `situation`: the class of `TreePolicy.situation`.
    """

    nodes: int
    prices: MarginalCost | None = None
    situation: int = 0
    measured: bool = False  # whether `Expected` chose `nodes`


@dataclass
class Load:
    """The sequences of one step, as far as the budget needs them.

    `contexts`: by sequence, the tokens before its tree. `nodes`: by sequence, the nodes of its last
    tree.
    """

    contexts: dict[Hashable, int]
    nodes: dict[Hashable, int] = field(default_factory=dict)
    prompts: int = 0  # rows of prompts that the same pass reads
    plain: float | None = None  # seconds of this step without drafts, once computed
    best: dict[Hashable, float] = field(default_factory=dict)  # by setting: `Budget.best_rate`
    # of the setting of all sequences, if it is one and their trees' sizes are not fixed
    comparison: Comparison | None = None

    @property
    def rows(self) -> int:
        return self.prompts + sum(self.nodes.get(one, 1) for one in self.contexts)


class Budget:
    """Decides which calls of a drafter are made and how many nodes each tree has.

    It converts measured time into the tokens that a node or a call must add. Each `setting` (a
    method and what its drafts depend on) has a record of its own. `limit` is the most nodes of a
    tree.
    """

    HOLD = 8  # how many steps a tree's prices are kept, if the rest of the pass stays about as wide
    # how many steps a number of nodes is kept, because choosing one takes a tenth of a millisecond
    CHOICE = 4
    NEAR = 2  # how many times as large a load may be from which a smaller one's guess comes
    # for this many trees of a size the least time counts, because the very first may be slow
    FIRST = 4

    def __init__(self, cost: CostModel, limit: int = MOST) -> None:
        self.cost, self.limit = cost, limit
        # compared with a pass of seconds, making prices takes no time
        self._hold = self.HOLD if limit <= MOST else 1
        self.calls: dict[Hashable, CallCost] = {}
        self._widths = [width for width in (*WIDTHS, *WIDER) if width <= limit]
        self._expected: dict[Hashable, Expected] = {}
        self._rates: dict[tuple[Hashable, int], Rate] = {}
        self._own: dict[Hashable, Rate] = {}  # by sequence, of its steps alone
        self._comparisons: dict[tuple[Hashable, int], Comparison] = {}
        # by sequence: steps left, rows of the rest of the pass, prices
        self._held: dict[Hashable, tuple[int, int, NodePrices]] = {}
        # by sequence and situation: nodes, steps left, rows of the rest of the pass
        self._chosen: dict[tuple[Hashable, int], tuple[int, int, int]] = {}
        # by setting and nodes: seconds of growing a tree, how often seen
        self._drafting: dict[tuple[Hashable, int], tuple[float, int]] = {}

    def plain(self, load: Load) -> float:
        """Return the seconds of a step without drafts. Prompts that it reads don't count."""
        if load.plain is None:
            many = max(1, len(load.contexts))
            reading = self.cost.reading(1, sum(load.contexts.values()), many)
            load.plain = self.cost.alone(many, many) + reading + OVERHEAD
        return load.plain

    def rate(self, setting: Hashable, load: Load) -> Rate:
        """Return the record of a method under a load of about as many sequences."""
        key = setting, _bucket(len(load.contexts))
        if key not in self._rates:
            found = Rate(float(len(load.contexts)), self.plain(load))
            if any(name == setting for name, _ in self._rates):
                found.steps = found.FIRST  # what a call brings is known from other loads
            self._rates[key] = found
        return self._rates[key]

    def best_rate(self, setting: Hashable, load: Load) -> float:
        """Return tokens a second: the recent rate, but at least that of plain decoding.

        It is the rate of this load, or a sequence's own if that runs alone. It stays the same for
        the whole step.
        """
        if setting not in load.best:
            found = self.rate(setting, load)
            if len(load.contexts) == 1:
                (one,) = load.contexts
                found = self._own.setdefault(one, found.begun())
            load.best[setting] = max(found.rate, len(load.contexts) / self.plain(load))
        return load.best[setting]

    def comparison(self, setting: Hashable, load: Load) -> Comparison:
        """Return the comparison of a method with plain decoding, under a load of about as many
        sequences.

        A new one begins with a guess from the loads that were compared. The more sequences, the
        less drafting gains, so the guess is no where drafting lost under the next smaller one, or
        under the next larger one if that is at most `NEAR` times as large.
        """
        bucket = _bucket(len(load.contexts))
        if (setting, bucket) not in self._comparisons:
            known = {
                size: one.faster
                for (name, size), one in self._comparisons.items()
                if name == setting and one.concluded
            }
            smaller = max((size for size in known if size < bucket), default=0)
            near = _bucket(self.NEAR * _sequences(bucket))
            larger = min((size for size in known if bucket < size <= near), default=0)
            self._comparisons[setting, bucket] = Comparison(
                known.get(smaller, True) and known.get(larger, True)
            )
        return self._comparisons[setting, bucket]

    def drafts(self, setting: Hashable, sequences: int) -> bool:
        """Whether drafting, and calls of a drafter, were worth their time recently.

        The record is that of a load of about as many `sequences` side by side. True if nothing is
        known.
        """
        key = setting, _bucket(max(1, sequences))
        rate, compared = self._rates.get(key), self._comparisons.get(key)
        return (rate is None or rate.drafts) and (compared is None or compared.faster)

    def call(self, setting: Hashable) -> CallCost:
        """Return the cost of a drafter's calls for this method."""
        if setting not in self.calls:
            self.calls[setting] = CallCost(self.cost.alone(1))
        return self.calls[setting]

    def prices(self, one: Hashable, setting: Hashable, load: Load, trial: bool = False) -> Plan:
        """Return the plan for a policy that uses marginal costs itself (`TreePolicy.priced`).

        `one` is the sequence. In a trial the tree may grow whatever the prices.
        """
        beside, rate = load.rows - load.nodes.get(one, 1), self.best_rate(setting, load)
        steps, rows, made = self._held.get(one, (0, 0, None))
        if made is None or steps <= 0 or abs(rows - beside) * 4 > rows:
            context, many = load.contexts[one], len(load.contexts)
            passes = [
                rate * (self.cost.alone(beside + width) + self.cost.reading(width, context, many))
                for width in self._widths
            ]
            steps, rows, made = self._hold, beside, NodePrices(self._widths, passes)
        self._held[one] = steps - 1, rows, made
        made.trial = trial
        # A node gives one token at most. In a full batch its row may cost more than that, and then
        # no tree is grown.
        return Plan(self.limit if trial or made.node(1) < 1.0 else 1, made)

    def nodes(self, one: Hashable, setting: Hashable, load: Load, situation: int) -> Plan:
        """Return the plan for any other policy: the number of nodes with the most tokens a second.

        With other sequences in the pass it is the number whose expected tokens most exceed the cost
        of the rows it adds. (Maximising the common rate instead would reward a tree for being too
        wide when the others are.)
        """
        beside = load.rows - load.nodes.get(one, 1)
        chosen, steps, rows = self._chosen.get((one, situation), (0, 0, 0))
        if steps <= 0 or abs(rows - beside) * 4 > rows:
            expected, rate, many = (
                self._expect(setting),
                self.best_rate(setting, load),
                len(load.contexts),
            )
            worth = []
            for width, tokens in zip(expected.budgets, expected.tokens(situation), strict=True):
                seconds = (
                    self.cost.alone(beside + width)
                    + self.cost.reading(width, load.contexts[one], many)
                    + self._growing(setting, width)
                )
                worth.append(
                    tokens / (seconds + OVERHEAD) if many == 1 else tokens - rate * seconds
                )
            chosen, steps, rows = expected.budgets[worth.index(max(worth))], self.CHOICE, beside
        self._chosen[one, situation] = chosen, steps - 1, rows
        return Plan(chosen, None, situation, measured=True)

    def worthwhile(self, gains: Sequence[float], call: CallCost, rate: float) -> list[bool]:
        """Return which requests of a round to answer, all in one call.

        They are the set whose expected tokens (`gains`) most exceed the cost of the call, at `rate`
        tokens a second. Requests of infinite gain are always answered.
        """
        if len(gains) == 1:  # the usual case; the search below would find the same
            return [math.isinf(gains[0]) or gains[0] > rate * call.seconds(1)]
        order = sorted(range(len(gains)), key=lambda i: -gains[i])
        asked = sum(map(math.isinf, gains))
        count, best, total = asked, 0.0, 0.0
        base = call.seconds(asked) if asked else 0.0
        for n, i in enumerate(order[asked:], asked + 1):
            total += gains[i]
            profit = total - rate * (call.seconds(n) - base)
            if profit > best:
                best, count = profit, n
        taken = set(order[:count])
        return [i in taken for i in range(len(gains))]

    def share(self, values: Sequence[Sequence[float]], rows: int, rate: float) -> list[int]:
        """Return how many nodes each tree keeps, not counting its root.

        `values`: for each tree, the expected tokens of its nodes, in order of worth. `rows`: the
        rows of the pass without these nodes. The next node goes to the tree where it has the
        largest value, as long as that exceeds the marginal cost of a row.
        """
        kept = [0] * len(values)
        waiting = sorted(
            ((value, tree) for tree, row in enumerate(values) for value in row),
            key=lambda pair: -pair[0],
        )
        prices = NodePrices(
            [max(1, width) for width in self._grid(rows)],
            [rate * self.cost.alone(width) for width in self._grid(rows)],
        )
        for value, tree in waiting:
            if value <= prices.node(rows + sum(kept)):
                break
            kept[tree] += 1
        return kept

    def _grid(self, rows: int) -> list[int]:
        """Return the widths from `rows` on at which a pass's cost is looked up."""
        widths = {*WIDTHS, *self._widths}
        return sorted(
            {
                rows,
                *(width for width in widths if width > rows),
                *(rows + width for width in widths),
            }
        )

    def grew(self, setting: Hashable, nodes: int, seconds: float) -> None:
        """Record how long it took to grow a tree with a drafter, if `Expected` chose its size.

        A single slow tree changes little.
        """
        key = setting, nodes
        known, count = self._drafting.get(key, (seconds, 0))
        after = (
            min(known, seconds)
            if count < self.FIRST
            else known + 0.05 * (min(seconds, 2 * known) - known)
        )
        self._drafting[key] = after, count + 1

    def _growing(self, setting: Hashable, nodes: int) -> float:
        """Return the expected seconds for growing a tree of `nodes` nodes.

        Between observed sizes they are interpolated. Beyond the largest they grow with the square
        root of the size. They are 0 if no size was observed.
        """
        table = {1: 0.0} | {
            size: seconds
            for (name, size), (seconds, _) in self._drafting.items()
            if name == setting
        }
        if nodes > max(table):
            return table[max(table)] * math.sqrt(nodes / max(table))
        return interpolate(dict(sorted(table.items())), nodes)

    def learn(self, setting: Hashable, plan: Plan, path: Sequence[int], nested: bool) -> None:
        """Record the accepted nodes of a tree whose size `Expected` chose."""
        self._expect(setting).observe(plan.situation, plan.nodes, path, nested)

    def observe(
        self, settings: Sequence[Hashable], load: Load, tokens: int, seconds: float
    ) -> None:
        """Record that a step of these methods emitted `tokens` in all and took `seconds`."""
        load.best.clear()
        for setting in set(settings):
            self.rate(setting, load).observe(tokens, seconds)
        many = len(load.contexts)
        if load.comparison is not None:
            plain = self.plain(load)
            recent = self.rate(settings[0], load).rate * plain / many
            load.comparison.observe(many, tokens, seconds, plain, recent)
        if many == 1:
            (one,) = load.contexts
            if one in self._own:
                self._own[one].observe(tokens, seconds)

    def forget(self, one: Hashable) -> None:
        """Forget a sequence that is over."""
        self._held.pop(one, None)
        self._own.pop(one, None)
        for key in [key for key in self._chosen if key[0] == one]:
            del self._chosen[key]

    def _expect(self, setting: Hashable) -> Expected:
        if setting not in self._expected:
            self._expected[setting] = Expected(self.limit)
        return self._expected[setting]


def _bucket(sequences: int) -> int:
    """Return the class of a number of sequences; loads of one class count as alike.

    Up to 4 sequences each number is a class of its own. Beyond, classes go by half powers of two.
    """
    return sequences if sequences <= 4 else round(2 * math.log2(sequences)) + 1


def _sequences(bucket: int) -> int:
    """Return about how many sequences the loads of a class (`_bucket`) have."""
    return bucket if bucket <= 4 else round(2 ** ((bucket - 1) / 2))
