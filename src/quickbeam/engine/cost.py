"""What a pass of the target and a call of a drafter cost: seconds, measured."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from statistics import median

import torch

from quickbeam.target.batch import Batch, Draft
from quickbeam.target.model import Model
from quickbeam.tree import TokenTree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WIDER = (192, 256, 384, 512)  # where a pass is so dear that trees of so many nodes can be worth it
DEAR = (1, 64, 128, 256, 512)  # numbers of nodes of which one pass each is timed there,
STEEP = 1.5  # as long as it takes no longer than so many times the narrowest
FAR = 1024  # tokens before a tree at which its cost is measured a second time,
FAR_WIDTHS = (1, 8, 32)  # for these numbers of nodes
MANY = 8  # sequences whose cost side by side is measured
PATIENCE = 2.0  # seconds of measuring after which the remaining, wider passes are left out


class CostModel:
    """Seconds of one pass of the target, by its number of rows and the tokens before each tree:
    measured once, then corrected with every pass.

    `seconds`: by rows, with nothing before the trees. `per_token`: by a tree's nodes, what each
    token before it adds; every node reads them all, so a wide tree costs more in a long context.
    Both are interpolated. Beyond the widest measured width they grow in proportion, or by the last
    slope where that is steeper. `per_sequence`: what a row adds when it belongs to another sequence
    and not to the same tree. `beside`: the part of `per_token` that remains when many sequences are
    read side by side and all threads are busy.
    """

    RATE = 0.05  # of a difference that one pass corrects

    def __init__(
        self,
        seconds: dict[int, float],
        per_token: dict[int, float] | None = None,
        per_sequence: float = 0.0,
        beside: float = 1.0,
    ) -> None:
        if not seconds:
            raise ValueError("no cost was measured")
        self._per_sequence, self._beside = per_sequence, beside
        self._seconds = dict(sorted(seconds.items()))
        self._per_token = dict(sorted((per_token or {1: 0.0}).items()))

    @classmethod
    def measure(cls, model: Model, limit: int, repeats: int = 3) -> CostModel:
        """Time trees of growing width, none wider than `limit` nodes, behind nothing and behind
        `FAR` tokens, and the roots of `MANY` sequences. Which tokens they hold does not matter. The
        pool's limit is lifted meanwhile."""
        far = min(FAR, (model.context_length or FAR) // 2)
        seconds: dict[int, float] = {}
        per_token: dict[int, float] = {}
        began = time.perf_counter()
        for width in (w for w in WIDTHS if w <= limit):
            tree = _bushy(model, width)
            seconds[width] = _time(model, tree, 0, repeats)
            if width in FAR_WIDTHS:
                per_token[width] = max(0.0, _time(model, tree, far, repeats) - seconds[width]) / far
            if time.perf_counter() - began > PATIENCE and len(seconds) > 1:
                break
        found = cls(seconds, per_token)
        if time.perf_counter() - began <= PATIENCE:
            near, behind = (
                _time(model, TokenTree(0), context, repeats, MANY) for context in (0, far)
            )
            found._per_sequence = max(0.0, near - found.alone(MANY)) / (MANY - 1)
            if per_token[1] > 0:
                found._beside = min(1.0, max(0.0, behind - near) / (MANY * far * per_token[1]))
        return found

    @classmethod
    def of_few_passes(cls, model: Model, limit: int) -> CostModel:
        """The same for a model whose passes take seconds, as its weights come from disk: a pass for
        each of a few widths, and none that follows one that took clearly longer than the narrowest.
        What stands before a tree is left out: passes that are run correct that."""
        seconds: dict[int, float] = {}
        _time(model, TokenTree(0), 0, 0)  # the first begins with nothing read
        for width in (w for w in DEAR if w <= limit):
            seconds[width] = _time(model, _bushy(model, width), 0, 0)
            if seconds[width] > STEEP * seconds[1]:
                break
        return cls(seconds)

    def seconds(self, rows: int, context: int = 0) -> float:
        """Expected time of a pass over one tree of `rows` nodes behind `context` tokens."""
        return self.alone(rows) + self.reading(rows, context)

    def alone(self, rows: int, sequences: int = 1) -> float:
        """Of a pass over `rows` rows of so many sequences, nothing before them."""
        return interpolate(self._seconds, rows) + self._per_sequence * (sequences - 1)

    def reading(self, nodes: int, context: int, sequences: int = 1) -> float:
        """What `context` tokens before a tree of `nodes` nodes add, in a pass over `sequences`
        trees."""
        return (
            context
            * interpolate(self._per_token, nodes)
            * float(self._beside ** (1 - 1 / sequences))
        )

    def observe(self, rows: int, seconds: float, reading: float = 0.0, sequences: int = 1) -> None:
        """Record that a pass over trees of `sequences` sequences took `seconds`, of which `reading`
        are expected for the tokens before the trees. A single slow pass (the machine was busy)
        changes little."""
        ratio = min(2.0, max(0.5, seconds / (self.alone(rows, sequences) + reading)))
        for width in set(_bracket(self._seconds, rows)[:2]):
            self._seconds[width] *= 1 + self.RATE * (ratio - 1)


class CallCost:
    """Seconds of one call of the drafter and what growing from it takes, by how many sequences it
    serves."""

    CALLS = 16  # recent calls that tell what one costs
    ENOUGH = 4  # calls that tell what one for so many sequences costs,
    ALIKE = 1.5  # or for so many times as many
    GUESS = 0.25  # of a plain pass, before one was seen
    # of a call for one, what each further sequence is taken to add before that was seen
    MORE = 0.15

    def __init__(self, plain: float) -> None:
        self._plain = plain
        self._seen: dict[int, deque[float]] = {}
        self.row = 0.0  # seconds that each token adds which the drafter has to read first

    def seconds(self, sequences: int) -> float:
        """The lower quartile of recent calls for about as many sequences, where there were
        `ENOUGH`; otherwise the least that calls for other numbers of sequences suggest. Some calls
        are slow (new shapes, a busy machine). An estimate that is too low gets corrected, because
        the call is then made and timed; one that is too high never would be."""
        if not self._seen:
            return self.GUESS * self._plain * self._more(sequences)
        found = {
            count: sorted(seen)[len(seen) // 4] * self._more(sequences) / self._more(count)
            for count, seen in self._seen.items()
        }
        near = min(found, key=lambda count: abs(math.log(count / sequences)))
        if len(self._seen[near]) >= self.ENOUGH and max(near, sequences) <= self.ALIKE * min(
            near, sequences
        ):
            return found[near]
        return min(found.values())

    def _more(self, sequences: int) -> float:
        return 1 + self.MORE * (sequences - 1)

    def observe(self, sequences: int, seconds: float) -> None:
        """Record that a call for `sequences` sequences took `seconds`."""
        self._seen.setdefault(sequences, deque(maxlen=self.CALLS)).append(seconds)

    def observe_reading(self, sequences: int, tokens: int, seconds: float) -> None:
        """The same of a call before which so many tokens had to be read."""
        self.row = max(0.0, seconds - self.seconds(sequences)) / tokens


@torch.inference_mode()
def _time(model: Model, tree: TokenTree, context: int, repeats: int, sequences: int = 1) -> float:
    """Seconds of a pass over `tree`, behind `context` tokens, in each of so many sequences: the
    median of `repeats`, after a first one, or with none the first."""
    caches = [model.pool.new()]
    times: list[float] = []
    with model.pool.unbounded():
        try:
            caches[0].reserve(context + len(tree) + 2)
            caches[0].length = context
            for _ in range(sequences - 1):
                caches.append(caches[0].fork())
            for _ in range(1 + repeats):
                start = time.perf_counter()
                model.forward(Batch([Draft(cache, tree) for cache in caches]))[0].logits[
                    0, 0
                ].item()
                times.append(time.perf_counter() - start)
        finally:
            for cache in caches:
                cache.release()
    return median(times[1:] or times)


def _bushy(model: Model, nodes: int) -> TokenTree:
    tree = TokenTree(0)
    for node in range(1, nodes):
        tree.add((node - 1) // 2, node % model.vocab_size, "probe")
    return tree


def interpolate(table: dict[int, float], nodes: int) -> float:
    """Between the numbers of `table`; beyond the widest in proportion, or as fast as they grew last
    where that is faster."""
    low, high, part = _bracket(table, nodes)
    found = table[low] * (1 - part) + table[high] * part
    if nodes <= high or len(table) < 2:
        return found * max(1.0, nodes / high)
    below = list(table)[-2]
    return found + (nodes - high) * max(found / high, (table[high] - table[below]) / (high - below))


def _bracket(table: dict[int, float], nodes: int) -> tuple[int, int, float]:
    """The keys of `table` around `nodes`, and how far between them it lies."""
    widths = list(table)
    i = bisect_left(widths, nodes)
    if i == len(widths):
        return widths[-1], widths[-1], 0.0
    if i == 0 or widths[i] == nodes:
        return widths[i], widths[i], 0.0
    return widths[i - 1], widths[i], (nodes - widths[i - 1]) / (widths[i] - widths[i - 1])
