"""The largest numbers of a row: what the target nearly chose, or what a drafter finds likeliest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float, c_int64

import numpy as np
import numpy.typing as npt
import torch

from quickbeam.models.native.library import Kernels, settled

GAPS = (6.0, 10.0, 16.0)  # distances below the largest logit, tried in this order
MANY = 2048  # with more tokens than this near the largest logit, sorting only these is no gain


def largest(logits: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    """Return the tokens of the `count` largest of the logits `[vocab]`, and these logits.

    The largest comes first, and of equal ones the smallest token. Tokens whose logit is NaN or
    -inf are left out. On a CPU the row is read once, by the native kernels where they run;
    otherwise only the tokens near the largest logit are sorted.
    """
    count = min(count, logits.shape[0])
    if logits.device.type != "cpu" or logits.dtype is not torch.float32:
        top = logits.float().nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf).topk(count)
        return _finite(top.indices.tolist(), top.values.tolist())
    if (found := settled()) is None:
        return largest_by_sorting(logits.numpy(), count)
    logits = logits.contiguous()
    return _ranked(found, logits.data_ptr(), logits.shape[0], None, count, -math.inf)


def ranked(
    kernels: Kernels,
    rows: torch.Tensor,
    count: int,
    floors: Sequence[float],
    tokens: torch.Tensor | None = None,
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of the `count` largest numbers of each row, and these numbers.

    `rows`: `[m, s]` float32 on a CPU. Only numbers above the row's floor count, rounded to float32.
    The largest comes first, and of equal ones the first column. NaN is left out. `tokens`: the
    token of each column `[s]` int64; None means that column i is token i.
    """
    rows, tokens = rows.contiguous(), None if tokens is None else tokens.contiguous()
    at, size, names = rows.data_ptr(), rows.shape[1], None if tokens is None else tokens.data_ptr()
    return [
        _ranked(kernels, at + 4 * size * i, size, names, count, floor)
        for i, floor in enumerate(floors)
    ]


def _ranked(
    kernels: Kernels, row: int, size: int, names: int | None, count: int, floor: float
) -> tuple[list[int], list[float]]:
    """Do what `ranked` does for a row of `size` numbers, at the addresses `row` and `names`."""
    # C's arrays: behind a pass of the target caches are cold, and tensors would take twice as long
    tokens, values = (c_int64 * count)(), (c_float * count)()
    kept = kernels.ranked(row, size, names, count, floor, tokens, values)
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
