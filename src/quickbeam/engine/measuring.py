"""Measures what passes of a model cost, and keeps it for later processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from importlib.metadata import version
from statistics import median

import torch

from quickbeam.cache import cache_folder
from quickbeam.engine.cost import CostModel
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
FEW = 8  # nodes of the pass that shows whether what was kept is right
STEEPER = 1.25  # so many times what that pass takes now, by one row's, is not


def measure(model: Model, limit: int) -> CostModel:
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
    seconds = {nodes: at for (nodes, context, many), at in medians.items() if many == 1 > context}
    least = math.inf
    for width in sorted(seconds, reverse=True):  # a pass never takes longer than a wider one
        least = seconds[width] = min(least, seconds[width])
    measured = CostModel(seconds)
    for (width, context, many), at in medians.items():
        if context:
            measured.per_token[width] = max(0.0, at - seconds[width]) / context
        elif many > 1:
            measured.per_sequence = max(0.0, at - measured.alone(many)) / (many - 1)
    return measured


def measure_or_read(model: Model, limit: int) -> CostModel:
    """Return what was measured of such passes in an earlier process; else `measure` and keep.

    It is kept in the cache folder by machine, threads, model, number format and version. What a
    busy machine measured would keep drafts away for good, and so is measured again once a pass
    of a few nodes takes clearly less. Small models are measured in no time, and those whose
    weights are read in every pass by few passes.
    """
    if model.weight_bytes < LARGE or model.streamed is not None or not model.exact:
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
        if not too_steep(measured, model):
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


def too_steep(cost: CostModel, model: Model) -> bool:
    """Whether a few nodes cost clearly less now, by what a row does, than was measured.

    They never cost less than one, so a curve that is not steep is believed without a pass.
    """
    if cost.alone(FEW) <= STEEPER * cost.alone(1):
        return False
    _time(model, 1, 0, 1)  # not counted, since the first pass of all may be slow
    now = _time(model, FEW, 0, 1) / _time(model, 1, 0, 1)
    return cost.alone(FEW) > STEEPER * now * cost.alone(1)


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
