"""The cost of a pass of the target and of a drafter's call: measured seconds."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from statistics import median

import torch

from quickbeam.models.batch import Batch, Draft
from quickbeam.models.model import Model
from quickbeam.tree import TokenTree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WIDER = (192, 256, 384, 512)  # for passes so expensive that trees of these sizes can be worth it
DEAR = (1, 64, 128, 256, 512)  # the numbers of nodes for which such a pass is timed, once each
STEEP = 1.5  # timing stops after a pass that takes more than this many times the narrowest
FAR = 1024  # tokens before a tree when its cost is measured a second time
FAR_WIDTHS = (1, 8, 32)  # the numbers of nodes for which that is done
MANY = 8  # how many sequences side by side are measured
PATIENCE = 2.0  # seconds of measuring after which the remaining, wider passes are skipped


class CostModel:
    """Seconds of one pass of the target, by its number of rows and the tokens before each tree.

    They are measured once, then corrected with every pass.

    - `seconds`: by rows, with nothing before the trees.
    - `per_token`: by a tree's nodes, the seconds that each token before it adds. Every node reads
      all these tokens, so a wide tree costs more in a long context.
    - `per_sequence`: the seconds that a row adds if it belongs to another sequence and not to the
      same tree.
    - `beside`: the part of `per_token` that remains when many sequences are read side by side and
      all threads are busy.

    `seconds` and `per_token` are interpolated. Beyond the widest measured width they grow in
    proportion, or by the last slope where that is steeper.

    Raises `ValueError` if no cost was measured.
    """

    RATE = 0.05  # the share of a difference that one pass corrects
    COMMON = 0.5  # the share of a correction that all widths get: the machine's speed has changed

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
        self._token_of: dict[int, float] = {}  # by nodes: `per_token`, which never changes

    @classmethod
    def measure(cls, model: Model, limit: int, repeats: int = 3) -> CostModel:
        """Measure a model's passes.

        It times trees of growing width, none wider than `limit` nodes, with nothing before them and
        with `FAR` tokens before them. It also times the roots of `MANY` sequences. Which tokens
        they hold does not matter. The pool's limit is lifted meanwhile.
        """
        far = min(FAR, (model.context_length or FAR) // 2)
        seconds: dict[int, float] = {}
        behind: dict[int, float] = {}
        # not counted, since the first pass of all may be slow
        _time(model, TokenTree(0), 0, 0)
        began = time.perf_counter()
        for width in (w for w in WIDTHS if w <= limit):
            tree = _bushy(model, width)
            seconds[width] = _time(model, tree, 0, repeats)
            if width in FAR_WIDTHS:
                behind[width] = _time(model, tree, far, repeats)
            if time.perf_counter() - began > PATIENCE and len(seconds) > 1:
                break
        least = math.inf
        for width in reversed(seconds):  # a pass never takes longer than a wider one
            least = seconds[width] = min(least, seconds[width])
        per_token = {
            width: max(0.0, after - seconds[width]) / far for width, after in behind.items()
        }
        found = cls(seconds, per_token)
        if time.perf_counter() - began <= PATIENCE:
            near, after = (
                _time(model, TokenTree(0), context, repeats, MANY) for context in (0, far)
            )
            found._per_sequence = max(0.0, near - found.alone(MANY)) / (MANY - 1)
            if per_token[1] > 0:
                found._beside = min(1.0, max(0.0, after - near) / (MANY * far * per_token[1]))
        return found

    @classmethod
    def of_few_passes(cls, model: Model, limit: int) -> CostModel:
        """Measure a model whose passes take seconds, because its weights come from disk.

        It times one pass for each of a few widths, and stops after one that took clearly longer
        than the narrowest. The tokens before a tree are left out: the passes that follow correct
        for them.
        """
        seconds: dict[int, float] = {}
        # not counted, since the first pass begins with nothing read
        _time(model, TokenTree(0), 0, 0)
        for width in (w for w in DEAR if w <= limit):
            seconds[width] = _time(model, _bushy(model, width), 0, 0)
            if seconds[width] > STEEP * seconds[1]:
                break
        return cls(seconds)

    def seconds(self, rows: int, context: int = 0) -> float:
        """Return the expected time of a pass over one tree.

        The tree has `rows` nodes and `context` tokens before it.
        """
        return self.alone(rows) + self.reading(rows, context)

    def alone(self, rows: int, sequences: int = 1) -> float:
        """Return the expected time of a pass with nothing before its trees.

        The pass has `rows` rows, of `sequences` sequences.
        """
        return interpolate(self._seconds, rows) + self._per_sequence * (sequences - 1)

    def reading(self, nodes: int, context: int, sequences: int = 1) -> float:
        """Return the seconds that `context` tokens before a tree of `nodes` nodes add.

        The pass runs over `sequences` trees.
        """
        token = self._token_of.get(nodes)
        if token is None:
            token = self._token_of[nodes] = interpolate(self._per_token, nodes)
        return context * token * float(self._beside ** (1 - 1 / sequences))

    def observe(self, rows: int, seconds: float, reading: float = 0.0, sequences: int = 1) -> None:
        """Record that a pass over trees of `sequences` sequences took `seconds`.

        `reading` of these seconds are expected for the tokens before the trees. A single slow pass
        (the machine was busy) changes little. Between two measured widths, the nearer one takes
        more of the correction, so that passes of different widths also correct the slope between
        them, which is what a node costs.

        A part of the correction goes to all widths. Otherwise those that were in use while the
        machine was busy would seem dear afterwards, and not be used again.
        """
        ratio = min(2.0, max(0.5, seconds / (self.alone(rows, sequences) + reading)))
        low, high, part = _bracket(self._seconds, rows)
        shares = {low: 1 - part, high: part} if part else {low: 1.0}
        # the interpolated time changes by RATE of the difference, however it is divided
        whole = sum(share * self._seconds[width] for width, share in shares.items())
        moved = sum(share**2 * self._seconds[width] for width, share in shares.items())
        change = self.RATE * (ratio - 1)
        for width in self._seconds:
            own = shares.get(width, 0.0) * whole / moved
            self._seconds[width] *= 1 + change * (self.COMMON + (1 - self.COMMON) * own)


class CallCost:
    """Seconds of one call of the drafter and of growing from it, by how many sequences it serves.

    `plain`: seconds of a plain pass of the target.
    """

    CALLS = 16  # how many recent calls are kept
    ENOUGH = 4  # this many calls are enough for an estimate for the same number of sequences,
    DOUBTED = 2  # how many of them are kept where they are doubted
    ALIKE = 1.5  # or for up to this many times more or fewer
    LEAST = 0.5  # share of a call's seconds that is not reading, at least
    GUESS = 0.25  # share of a plain pass that a call is taken to cost before one was seen
    # Share of a call for one sequence that each further sequence is taken to add before that was
    # seen.
    MORE = 0.15

    def __init__(self, plain: float) -> None:
        self._plain = plain
        self._seen: dict[int, deque[float]] = {}
        self._low: dict[int, float] = {}  # the lower quartile of each of these
        self.row = 0.0  # seconds that each token adds that the drafter has to read first

    def seconds(self, sequences: int) -> float:
        """Return the expected seconds of a call for `sequences` sequences.

        It is the lower quartile of recent calls for about as many sequences, if there were
        `ENOUGH`. Otherwise it is the least that calls for other numbers of sequences suggest.
        Before any call was timed, it is a share `GUESS` of a plain pass.

        Some calls are slow (new shapes, a busy machine), so the estimate is a low one. An estimate
        that is too low gets corrected, since the call is then made and timed. One that is too high
        never would be.
        """
        if len(self._seen.get(sequences, ())) >= self.ENOUGH:
            return self._low[sequences]
        if not self._seen:
            return self.GUESS * self._plain * self._more(sequences)
        found = {
            count: low * self._more(sequences) / self._more(count)
            for count, low in self._low.items()
        }
        near = min(found, key=lambda count: abs(math.log(count / sequences)))
        if len(self._seen[near]) >= self.ENOUGH and max(near, sequences) <= self.ALIKE * min(
            near, sequences
        ):
            return found[near]
        return min(found.values())

    def _more(self, sequences: int) -> float:
        return 1 + self.MORE * (sequences - 1)

    def observe(self, sequences: int, seconds: float, tokens: int = 0) -> None:
        """Record that a call for `sequences` sequences took `seconds`.

        The drafter first read `tokens` tokens in it. Their time is left out: they have to be read
        once, whichever call does it. With it, calls would seem dearer the fewer are made.
        """
        seconds = max(self.LEAST * seconds, seconds - tokens * self.row)
        self._seen.setdefault(sequences, deque(maxlen=self.CALLS)).append(seconds)
        self._weigh(sequences)

    def _weigh(self, sequences: int) -> None:
        seen = self._seen[sequences]
        self._low[sequences] = sorted(seen)[len(seen) // 4]

    def doubt(self) -> None:
        """Forget all but the last few calls, so that one cheap call outweighs them.

        To be called before a call that is made although none seemed worth its time for a while.
        Those before it may have been slow because the machine was busy then.
        """
        for sequences, seen in self._seen.items():
            while len(seen) > self.DOUBTED:
                seen.popleft()
            self._weigh(sequences)

    def read(self, tokens: int, seconds: float) -> None:
        """Record that the drafter read `tokens` tokens, apart from any call, in `seconds`."""
        self.row = seconds / tokens


@torch.inference_mode()
def _time(model: Model, tree: TokenTree, context: int, repeats: int, sequences: int = 1) -> float:
    """Return the seconds of a pass over `tree` behind `context` tokens, in each of `sequences`
    sequences.

    It is the median of `repeats` passes after a first one. If `repeats` is 0, it is the first.
    """
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
    """Return the value of `table` at `nodes`, interpolated between its keys.

    Beyond the widest key it grows in proportion, or as fast as it grew last where that is faster.
    """
    low, high, part = _bracket(table, nodes)
    found = table[low] * (1 - part) + table[high] * part
    if nodes <= high or len(table) < 2:
        return found * max(1.0, nodes / high)
    below = list(table)[-2]
    return found + (nodes - high) * max(found / high, (table[high] - table[below]) / (high - below))


def _bracket(table: dict[int, float], nodes: int) -> tuple[int, int, float]:
    """Return the keys of `table` around `nodes`, and how far between them it lies (0 to 1)."""
    widths = list(table)
    i = bisect_left(widths, nodes)
    if i == len(widths):
        return widths[-1], widths[-1], 0.0
    if i == 0 or widths[i] == nodes:
        return widths[i], widths[i], 0.0
    return widths[i - 1], widths[i], (nodes - widths[i - 1]) / (widths[i] - widths[i - 1])
