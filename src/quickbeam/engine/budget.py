"""How many nodes a tree should have: the number that gives most tokens a second, by what was measured."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median

from quickbeam.target.target import Target
from quickbeam.tree import TokenTree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
FAR = 1024  # tokens before a tree at which its cost is measured a second time,
FAR_WIDTHS = (1, 8, 32)  # for these numbers of nodes
PATIENCE = 2.0  # seconds of measuring after which the remaining, wider passes are left out


class CostModel:
    """Seconds of one target pass over a tree, by its number of nodes and the tokens before it: measured once, then followed.

    `seconds`: by nodes, with nothing before the tree. `per_token`: by nodes, what each token before it adds; every node reads them all, so
    long contexts make wide trees dearer. Both are interpolated, and grow in proportion beyond the widest, which overstates the cost.
    """

    RATE = 0.05  # of a difference that one pass corrects

    def __init__(self, seconds: dict[int, float], per_token: dict[int, float] | None = None) -> None:
        if not seconds:
            raise ValueError("no cost was measured")
        self._seconds = dict(sorted(seconds.items()))
        self._per_token = dict(sorted((per_token or {1: 0.0}).items()))

    @classmethod
    def measure(cls, target: Target, limit: int, repeats: int = 3) -> CostModel:
        """Time trees of growing width, none wider than `limit` nodes, behind nothing and behind `FAR` tokens. The tokens don't matter."""
        far = min(FAR, (target.context_length or FAR) // 2)
        seconds: dict[int, float] = {}
        per_token: dict[int, float] = {}
        began = time.perf_counter()
        for width in (w for w in WIDTHS if w <= limit):
            tree = TokenTree(0)
            for node in range(1, width):
                tree.add((node - 1) // 2, node % target.vocab_size, "probe")
            seconds[width] = _time(target, tree, 0, repeats)
            if width in FAR_WIDTHS:
                per_token[width] = max(0.0, _time(target, tree, far, repeats) - seconds[width]) / far
            if time.perf_counter() - began > PATIENCE and len(seconds) > 1:
                break
        return cls(seconds, per_token)

    def seconds(self, nodes: int, context: int = 0) -> float:
        """Expected time of a pass over `nodes` nodes behind `context` tokens."""
        return _interpolate(self._seconds, nodes) + context * _interpolate(self._per_token, nodes)

    def observe(self, nodes: int, context: int, seconds: float) -> None:
        """A pass took so long. A single slow one (the machine was busy) changes little."""
        ratio = min(2.0, max(0.5, seconds / self.seconds(nodes, context)))
        for width in set(_bracket(self._seconds, nodes)[:2]):
            self._seconds[width] *= 1 + self.RATE * (ratio - 1)


def _time(target: Target, tree: TokenTree, context: int, repeats: int) -> float:
    target.rehearse(tree, context)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.rehearse(tree, context)[0, 0].item()
        times.append(time.perf_counter() - start)
    return median(times)


def _interpolate(table: dict[int, float], nodes: int) -> float:
    low, high, part = _bracket(table, nodes)
    return (table[low] * (1 - part) + table[high] * part) * max(1.0, nodes / high)


def _bracket(table: dict[int, float], nodes: int) -> tuple[int, int, float]:
    """The keys of `table` around `nodes`, and how far between them it lies."""
    widths = list(table)
    i = bisect_left(widths, nodes)
    if i == len(widths):
        return widths[-1], widths[-1], 0.0
    if i == 0 or widths[i] == nodes:
        return widths[i], widths[i], 0.0
    return widths[i - 1], widths[i], (nodes - widths[i - 1]) / (widths[i] - widths[i - 1])


class DraftingCost:
    """Seconds that growing a tree takes with a drafter, by the budget, learned while text is decoded.

    What was not observed lies on a line between the budgets around it, and grows with the square root of the budget beyond the largest.
    Both are rather too low, as calls of the drafter grow fast at first and less and less: what looks cheap gets tried.
    """

    RATE = 0.05  # weight of a new observation
    FIRST = 4  # observations whose least is taken: the first of all may be slow

    def __init__(self) -> None:
        self._seconds = {1: 0.0}
        self._count: dict[int, int] = {}

    def seconds(self, budget: int) -> float:
        """Expected time for a tree of this budget; 0 before anything was observed."""
        widest = max(self._seconds)
        if budget > widest:
            return self._seconds[widest] * math.sqrt(budget / widest)
        return _interpolate(self._seconds, budget)

    def observe(self, budget: int, seconds: float) -> None:
        """Growing a tree took so long. A single slow one changes little."""
        count = self._count[budget] = self._count.get(budget, 0) + 1
        known = self._seconds.get(budget, seconds)
        after = min(known, seconds) if count <= self.FIRST else known + self.RATE * (min(seconds, 2 * known) - known)
        self._seconds = dict(sorted({**self._seconds, budget: after}.items()))


class AutoBudget:
    """Learns what budgets are worth while text is decoded, apart for each situation that the tree policy tells apart.

    Where a tree's first m nodes are the tree of budget m (`TreePolicy.nested`), each step tells for every m up to its budget what it would
    have emitted: the accepted nodes before m, the root counted for the token that follows the path. `choose` takes the m with the most
    tokens a second, by the `cost` of a pass, that of `drafting` with a drafter, and `overhead` seconds for the rest of a step.
    """

    MEMORY = 64  # steps after which an observation has lost most of its weight
    HOLD = 4  # steps that a choice is kept for: making one takes a tenth of a millisecond
    TRUST = 3  # steps that a guess from smaller budgets counts for against what was observed

    def __init__(self, cost: CostModel, limit: int, overhead: float = 0.001) -> None:
        self.cost = cost
        self.drafting = DraftingCost()
        self.overhead = overhead
        self.budgets = [width for width in WIDTHS if width <= limit]
        self._emitted: dict[int, list[float]] = {}  # by situation, for each budget: mean of what was observed
        self._count: dict[int, list[int]] = {}
        self._chosen: dict[int, tuple[int, int]] = {}  # by situation: the budget, and the steps it is kept for

    @staticmethod
    def prior(situation: int, nodes: int) -> float:
        """Tokens a step before anything was observed: a chain whose tokens hold with a chance that grows with the situation (a match of one
        token is right about 1 time in 4, a long one 9 times in 10), and a little for every doubling of guesses beside it."""
        chance = (0.0, 0.25, 0.5, 0.75, 0.9)[min(situation, 4)]
        return 1 + sum(chance**i for i in range(1, nodes)) + 0.1 * math.log2(nodes)

    def expected(self, situation: int) -> list[float]:
        """Tokens a step for each of `budgets`: what was observed, mixed with a guess from the next smaller budget. The guess is the prior's
        growth, or, where the smaller one was observed, nine tenths with each further node of what its last nodes added."""
        emitted, count = self._records(situation)
        tokens = [1.0]
        for i in range(1, len(self.budgets)):
            more = self.budgets[i] - self.budgets[i - 1]
            if i > 1 and count[i - 1]:
                slope = (tokens[i - 1] - tokens[i - 2]) / (self.budgets[i - 1] - self.budgets[i - 2])
                growth = slope * 9 * (1 - 0.9**more)
            else:
                growth = self.prior(situation, self.budgets[i]) - self.prior(situation, self.budgets[i - 1])
            tokens.append((count[i] * emitted[i] + self.TRUST * (tokens[i - 1] + growth)) / (count[i] + self.TRUST))
        return tokens

    def choose(self, situation: int = 0, context: int = 0) -> int:
        """The budget for the next tree, the root included, behind `context` tokens."""
        budget, steps = self._chosen.get(situation, (0, 0))
        if not steps:
            tokens = self.expected(situation)
            seconds = [self.cost.seconds(width, context) + self.drafting.seconds(width) + self.overhead for width in self.budgets]
            rates = [a / b for a, b in zip(tokens, seconds, strict=True)]
            budget, steps = self.budgets[rates.index(max(rates))], self.HOLD
        self._chosen[situation] = budget, steps - 1
        return budget

    def observe(self, situation: int, budget: int, path: Sequence[int], nested: bool = True) -> None:
        """Learn from a step: its tree was grown with `budget`, and the nodes of `path` (root first) were accepted. `nested`: see
        `TreePolicy`; otherwise it tells of this budget alone."""
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
