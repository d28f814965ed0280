"""Measures what passes of a model cost, and keeps it for later processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from importlib.metadata import version

import torch

from quickbeam.engine.cost import CostModel
from quickbeam.hub.cache import cache_folder
from quickbeam.machine import cpu_name, usable_cores
from quickbeam.models.base import Batch, Draft, Model
from quickbeam.tree import TokenTree

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SLOW = (1, 64, 128, 256, 512)  # the numbers of nodes for which such a pass is timed, once each
STEEP = 1.5  # a pass is steep that takes more than this many times the narrowest
FAR = 1024  # tokens before a tree when its cost is measured a second time
FAR_WIDTHS = (1, 8, 32)  # the numbers of nodes for which that is done
MANY = 8  # how many sequences side by side are measured
ROUNDS = 4
LARGE = 2**24  # bytes of weights from which on what was measured is kept
PATIENCE = 2.0  # seconds of measuring after which the remaining passes are skipped
# nodes of the passes that show whether what was kept is right: alone, and behind a long text
FEW, SOME = 8, 16
STEEPER = 1.25  # so many times what such a pass takes now, by one row's, is not


def measure(model: Model, limit: int) -> CostModel:
    """Measure passes over trees of at most `limit` nodes.

    It times trees of growing width with nothing before them, some with `FAR` tokens before
    them, and the roots of `MANY` sequences, in rounds, of which it takes the least: a busy
    machine only adds time. The pool's limit is lifted meanwhile. Where weights are read in
    every pass, which takes seconds, one pass for each of a few widths is enough: those that
    follow correct the rest.
    """
    slow, far = model.streamed is not None, _far(model)
    plans = [(width, 0, 1) for width in (SLOW if slow else WIDTHS) if width <= limit]
    if not slow:
        plans += [(width, far, 1) for width in FAR_WIDTHS if width <= limit]
        plans = [*sorted(plans), (1, 0, MANY)]
    times: dict[tuple[int, int, int], list[float]] = {}
    # not counted, since the first pass of all may be slow, and on a GPU the first one of each size
    for plan in plans if model.device.type == "cuda" and not slow else plans[:1]:
        _time(model, *plan)
    began = time.perf_counter()
    for plan in plans * (1 if slow else ROUNDS):
        times.setdefault(plan, []).append(_time(model, *plan))
        if slow and times[plan][0] > STEEP * times[1, 0, 1][0]:
            break
        if not slow and time.perf_counter() - began > PATIENCE and len(times) > 3:
            break
    fastest = {plan: min(seen) for plan, seen in times.items()}
    seconds = {nodes: at for (nodes, context, many), at in fastest.items() if many == 1 > context}
    least = math.inf
    for width in sorted(seconds, reverse=True):  # a pass never takes longer than a wider one
        least = seconds[width] = min(least, seconds[width])
    measured = CostModel(seconds)
    for (width, context, many), at in fastest.items():
        if context:
            measured.per_token[width] = max(0.0, at - seconds[width]) / context
        elif many > 1:
            measured.per_sequence = max(0.0, at - measured.alone(many)) / (many - 1)
    return measured


def measure_or_read(model: Model, limit: int) -> CostModel:
    """Return what was measured of such passes in an earlier process; else `measure` and keep.

    It is kept in the cache folder by machine, threads, model, number format and version. What a
    busy machine measured would keep drafts away for good, and so is measured again once passes
    take clearly less (`overrated`). Small models are measured in no time, and those whose
    weights are read in every pass by few passes.
    """
    on_the_cpu = model.exact and model.device.type == "cpu"
    if model.weight_bytes < LARGE or model.streamed is not None or not on_the_cpu:
        return measure(model, limit)
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
        measured = CostModel(passes, tokens, float(stored[2]))
        if not overrated(measured, model):
            return measured
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        pass
    measured = measure(model, limit)
    record = [measured.seconds, measured.per_token, measured.per_sequence]
    with suppress(OSError):  # a cache that can't be written: measured again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps(record), encoding="utf-8")
        os.replace(part, path)
    return measured


def overrated(cost: CostModel, model: Model) -> bool:
    """Whether some passes cost clearly less now, by what one row takes, than was measured.

    They never cost less than one row, so a cost close to that is believed without a pass.
    """
    one, some, far = cost.alone(1), min(SOME, max(cost.seconds)), _far(model)
    known = {(FEW, 0): cost.alone(FEW), (some, far): cost.alone(some) + cost.reading(some, far)}
    doubted = {plan: seconds for plan, seconds in known.items() if seconds > STEEPER * one}
    if not doubted:
        return False
    _time(model, 1, 0, 1)  # not counted, since the first pass of all may be slow
    now = min(_time(model, 1, 0, 1) for _ in range(2))
    return any(
        seconds / one > STEEPER * _time(model, nodes, context, 1) / now
        for (nodes, context), seconds in doubted.items()
    )


def _far(model: Model) -> int:
    """Return how many tokens come before a tree where a long text is measured."""
    return min(FAR, (model.context_length or FAR) // 2)


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
