"""Measured seconds: of a pass by its rows and contexts, of a drafter call by its sequences."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from importlib.metadata import version
from statistics import median

import torch

from quickbeam.cache import cache_folder
from quickbeam.machine import cpu_name, usable_cores
from quickbeam.models.base import Batch, Draft, Model
from quickbeam.tree import TokenTree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WIDER = (192, 256, 384, 512)  # for passes so slow that trees of these sizes can be worth it
SLOW = (1, 64, 128, 256, 512)  # the numbers of nodes for which such a pass is timed, once each
STEEP = 1.5  # a pass is steep that takes more than this many times the narrowest
FAR = 1024  # tokens before a tree when its cost is measured a second time
FAR_WIDTHS = (1, 8, 32)  # the numbers of nodes for which that is done
MANY = 8  # how many sequences side by side are measured
ROUNDS = 4
LARGE = 2**24  # bytes of weights from which on what was measured is kept
PATIENCE = 2.0  # seconds of measuring after which the remaining passes are skipped
FEW = 8  # nodes of the pass that shows whether what was kept is right
STEEPER = 1.25  # so many times what that pass takes now, by one row's, is not


class CostModel:
    """Seconds of passes of the target and of a drafter's calls: measured, then followed.

    - `seconds`: of a pass, by rows, with nothing before its trees.
    - `per_token`: by a tree's nodes, the seconds that each token before it adds. Every node reads
      all these tokens, so a wide tree costs more in a long context.
    - `per_sequence`: the seconds that a row adds if it belongs to another sequence than the tree.

    Calls belong to a `drafter`, by any name. Raises `ValueError` if no pass was measured.
    """

    RATE = 0.05  # the share of a difference that one pass corrects
    COMMON = 0.5  # the share of a correction that all widths get: the machine's speed has changed
    CALLS = 8  # how many recent calls give the median
    CALL = 0.4  # share of a plain pass that a call is guessed to take before one was timed
    MORE = 0.15  # share of a call that each further sequence adds before that was seen
    LEAST = 0.5  # share of a call's seconds that is not reading, at least

    def __init__(
        self,
        seconds: dict[int, float],
        per_token: dict[int, float] | None = None,
        per_sequence: float = 0.0,
    ) -> None:
        if not seconds:
            raise ValueError("no cost was measured")
        self._per_sequence = per_sequence
        self._seconds = dict(sorted(seconds.items()))
        self._per_token = dict(sorted((per_token or {1: 0.0}).items()))
        self._calls: dict[Hashable, dict[int, deque[float]]] = {}
        self._reads: dict[Hashable, deque[float]] = {}  # by drafter: seconds a token

    @classmethod
    def measure(cls, model: Model, limit: int) -> CostModel:
        """Measure passes over trees of at most `limit` nodes.

        It times trees of growing width with nothing before them, some with `FAR` tokens before
        them, and the roots of `MANY` sequences, in rounds, of which it takes medians. The pool's
        limit is lifted meanwhile. Where weights are read in every pass, which takes seconds, one
        pass for each of a few widths is enough: those that follow correct the rest.
        """
        slow, far = model.streamed is not None, min(FAR, (model.context_length or FAR) // 2)
        plans = [(width, 0, 1) for width in (SLOW if slow else WIDTHS) if width <= limit]
        if not slow:
            plans += [(width, far, 1) for width in FAR_WIDTHS if width <= limit]
            plans = [*sorted(plans), (1, 0, MANY)]
        times: dict[tuple[int, int, int], list[float]] = {}
        _time(model, 1, 0, 1)  # not counted, since the first pass of all may be slow
        began = time.perf_counter()
        for plan in plans * (1 if slow else ROUNDS):
            times.setdefault(plan, []).append(_time(model, *plan))
            if slow and times[plan][0] > STEEP * times[1, 0, 1][0]:
                break
            if not slow and time.perf_counter() - began > PATIENCE and len(times) > 3:
                break
        # the first pass of a shape may be slow, too
        medians = {plan: median(seen[1:] or seen) for plan, seen in times.items()}
        seconds = {
            nodes: at for (nodes, context, many), at in medians.items() if many == 1 > context
        }
        least = math.inf
        for width in sorted(seconds, reverse=True):  # a pass never takes longer than a wider one
            least = seconds[width] = min(least, seconds[width])
        measured = cls(seconds)
        for (width, context, many), at in medians.items():
            if context:
                measured._per_token[width] = max(0.0, at - seconds[width]) / context
            elif many > 1:
                measured._per_sequence = max(0.0, at - measured.alone(many)) / (many - 1)
        return measured

    @classmethod
    def kept(cls, model: Model, limit: int) -> CostModel:
        """Return what was measured of such passes in an earlier process; else `measure` and keep.

        It is kept in the cache folder by machine, threads, model, number format and version. What a
        busy machine measured would keep drafts away for good, and so is measured again once a pass
        of a few nodes takes clearly less. Small models are measured in no time, and those whose
        weights are read in every pass by few passes.
        """
        if model.weight_bytes < LARGE or model.streamed is not None or not model.exact:
            return cls.measure(model, limit)
        what = [version("quickbeam"), cpu_name(), usable_cores(), torch.get_num_threads()]
        what += [model.describe(), str(model.dtype), model.weight_bytes, limit]
        config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
        digest = hashlib.sha256(f"{what} {config}".encode()).hexdigest()[:16]
        path = cache_folder() / "costs" / f"{digest}.json"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            passes, tokens = (
                {int(rows): float(at) for rows, at in table.items()} for table in stored[:2]
            )
            measured = cls(passes, tokens, float(stored[2]))
            if not measured.too_steep(model):
                return measured
        except (OSError, ValueError, TypeError, AttributeError, LookupError):
            pass
        measured = cls.measure(model, limit)
        record = [measured._seconds, measured._per_token, measured._per_sequence]
        with suppress(OSError):  # a cache that can't be written: measured again the next time
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(json.dumps(record), encoding="utf-8")
            os.replace(part, path)
        return measured

    def too_steep(self, model: Model) -> bool:
        """Whether a few nodes cost clearly less now, by what a row does, than was measured.

        They never cost less than one, so a curve that is not steep is believed without a pass.
        """
        if self.alone(FEW) <= STEEPER * self.alone(1):
            return False
        _time(model, 1, 0, 1)  # not counted, since the first pass of all may be slow
        now = _time(model, FEW, 0, 1) / _time(model, 1, 0, 1)
        return self.alone(FEW) > STEEPER * now * self.alone(1)

    # passes

    @property
    def widths(self) -> frozenset[int]:
        """The numbers of rows for which a pass was timed; others are interpolated."""
        return frozenset(self._seconds)

    def alone(self, rows: int, sequences: int = 1) -> float:
        """Return the expected time of a pass of `rows` rows with nothing before its trees."""
        return interpolate(self._seconds, rows) + self._per_sequence * (sequences - 1)

    def reading(self, nodes: int, context: int) -> float:
        """Return the seconds that `context` tokens before a tree of `nodes` nodes add."""
        return context * interpolate(self._per_token, nodes)

    def observe(self, rows: int, seconds: float, reading: float = 0.0, sequences: int = 1) -> None:
        """Record that a pass over trees of `sequences` sequences took `seconds`.

        `reading` of these seconds are expected for the tokens before the trees. Of two measured
        widths the nearer one takes more of the correction, so that the slope between them is
        corrected, too. A part goes to all widths: otherwise those that were in use while the
        machine was busy would seem slow afterwards, and not be used again.
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

    # drafter calls

    def call(self, drafter: Hashable, sequences: int = 1) -> float:
        """Return the expected seconds of a call for `sequences` sequences: a median.

        If none of as many was timed, it follows from those of the nearest number.
        """
        seen = self._calls.get(drafter)
        if not seen:
            return self.CALL * self.alone(1) * (1 + self.MORE * (sequences - 1))
        near = min(seen, key=lambda count: abs(math.log(count / sequences)))
        more = (1 + self.MORE * (sequences - 1)) / (1 + self.MORE * (near - 1))
        return median(seen[near]) * more

    def observe_call(
        self, drafter: Hashable, sequences: int, seconds: float, unread: int = 0
    ) -> None:
        """Record that a call for `sequences` sequences took `seconds`.

        The drafter first read `unread` tokens in it. Their time is left out, since they have to be
        read once, whichever call does it. The first call does not count: it may pack weights.
        """
        if drafter not in self._calls:
            self._calls[drafter] = {}
            return
        seconds = max(self.LEAST * seconds, seconds - self.read(drafter, unread))
        self._calls[drafter].setdefault(sequences, deque(maxlen=self.CALLS)).append(seconds)

    def read(self, drafter: Hashable, tokens: int) -> float:
        """Return the expected seconds in which a drafter reads `tokens` tokens: by a median."""
        if seen := self._reads.get(drafter):
            return tokens * median(seen)
        return tokens * self.CALL * self.alone(64) / 64

    def observe_read(self, drafter: Hashable, tokens: int, seconds: float) -> None:
        """Record that a drafter read `tokens` tokens, apart from any call, in `seconds`."""
        self._reads.setdefault(drafter, deque(maxlen=self.CALLS)).append(seconds / tokens)


@torch.inference_mode()
def _time(model: Model, nodes: int, context: int, sequences: int) -> float:
    """Return the seconds of a pass over `sequences` trees, each behind `context` tokens."""
    tree = TokenTree(0)
    for node in range(1, nodes):
        tree.add((node - 1) // 2, node % model.vocab_size, "probe")
    caches = [model.pool.new()]
    with model.pool.unbounded():
        try:
            caches[0].reserve(context + nodes + 2)
            caches[0].length = context
            for _ in range(sequences - 1):
                caches.append(caches[0].fork())
            start = time.perf_counter()
            passed = model.forward(Batch([Draft(cache, tree) for cache in caches]))
            passed[0].logits[0, 0].item()
            return time.perf_counter() - start
        finally:
            for cache in caches:
                cache.release()


def interpolate(table: dict[int, float], nodes: int) -> float:
    """Return the value of `table` at `nodes`, interpolated between its keys.

    Beyond the widest key it grows in proportion, or as fast as it grew last where that is faster.
    """
    low, high, part = _bracket(table, nodes)
    value = table[low] * (1 - part) + table[high] * part
    if nodes <= high or len(table) < 2:
        return value * max(1.0, nodes / high)
    below = list(table)[-2]
    return value + (nodes - high) * max(value / high, (table[high] - table[below]) / (high - below))


def _bracket(table: dict[int, float], nodes: int) -> tuple[int, int, float]:
    """Return the keys of `table` around `nodes`, and how far between them it lies (0 to 1)."""
    widths = list(table)
    i = bisect_left(widths, nodes)
    if i == len(widths):
        return widths[-1], widths[-1], 0.0
    if i == 0 or widths[i] == nodes:
        return widths[i], widths[i], 0.0
    return widths[i - 1], widths[i], (nodes - widths[i - 1]) / (widths[i] - widths[i - 1])
