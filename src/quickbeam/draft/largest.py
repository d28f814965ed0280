"""The largest of a row of logits, which say what the target nearly chose."""

from __future__ import annotations

import math
from ctypes import c_float, c_int64

import numpy as np
import numpy.typing as npt
import torch

from quickbeam.target.native.library import kernels

GAPS = (6.0, 10.0, 16.0)  # distances below the largest logit, tried in this order
MANY = 2048  # with more tokens than this near the largest logit, sorting only these is no gain


def largest(logits: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    """Return the tokens of the `count` largest of the logits `[vocab]`, and these logits.

    The largest comes first, and of equal ones the smallest token. Tokens whose logit is NaN or
    -inf are left out. On a CPU the row is read once, by the native kernels where they run;
    otherwise only the tokens near the largest logit are sorted.
    """
    count = min(count, len(logits))
    if logits.device.type != "cpu" or logits.dtype is not torch.float32:
        top = logits.float().nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf).topk(count)
        return _finite(top.indices.tolist(), top.values.tolist())
    if (found := kernels()) is None:
        return largest_by_sorting(logits.numpy(), count)
    # C's arrays: behind a pass of the target caches are cold, and tensors would take twice as long
    tokens, values = (c_int64 * count)(), (c_float * count)()
    row = logits.contiguous()
    kept = found.ranked(row.data_ptr(), len(row), count, tokens, values)
    return tokens[:kept], values[:kept]


def largest_by_sorting(row: npt.NDArray[np.float32], count: int) -> tuple[list[int], list[float]]:
    """Return what `largest` does, where the native kernels don't run."""
    row = np.where(np.isnan(row), np.float32(-math.inf), row)
    near = np.arange(len(row))
    for gap in GAPS:
        close = (row > row.max(initial=-math.inf) - gap).nonzero()[0]
        if count <= len(close) <= MANY:
            near = close
            break
    order = near[(-row[near]).argsort(kind="stable")[:count]]
    return _finite(order.tolist(), row[order].tolist())


def _finite(tokens: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    kept = sum(value > -math.inf for value in values)
    return tokens[:kept], values[:kept]
