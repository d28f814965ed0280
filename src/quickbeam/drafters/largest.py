"""The largest numbers of a row: what the target nearly chose, or what a drafter finds likeliest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float, c_int64

import torch

from quickbeam.models.native.library import Kernels
from quickbeam.noise import Row


def largest(
    rows: torch.Tensor,
    count: int,
    min_values: Sequence[float] | None = None,
    tokens: torch.Tensor | None = None,
    kernels: Kernels | None = None,
) -> list[Row]:
    """Return the tokens of the `count` largest numbers of each row `[m, s]`, and these numbers.

    The largest comes first. NaN is left out.

    - `min_values`: for each row, what a number must exceed to count, rounded to float32; -inf by
      default.
    - `tokens`: the token of each column `[s]` int64; None means that column i is token i.
    - `kernels`: read float32 on a CPU; of equal numbers the first comes first. None: PyTorch does.
    """
    count = min(count, rows.shape[-1])
    min_values = min_values or [-math.inf] * len(rows)
    if kernels is None or rows.device.type != "cpu" or rows.dtype is not torch.float32:
        return largest_plain(rows, count, min_values, tokens)
    rows = rows.contiguous()
    names = None
    if tokens is not None:
        tokens = tokens.contiguous()
        names = tokens.data_ptr()
    address = rows.data_ptr()
    size = rows.shape[1]
    best = (c_int64 * count)()
    values = (c_float * count)()
    ranked = list[Row]()
    for min_value in min_values:
        kept = kernels.ranked(address, size, names, count, min_value, best, values)
        ranked.append((best[:kept], values[:kept]))
        address += rows.itemsize * size
    return ranked


def largest_plain(
    rows: torch.Tensor, count: int, min_values: Sequence[float], tokens: torch.Tensor | None = None
) -> list[Row]:
    """Return what `largest` does, by PyTorch's operators: the reference."""
    numbers = rows.float().nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf)
    top = numbers.topk(count)
    names = top.indices if tokens is None else tokens[top.indices]
    ranked = list[Row]()
    for row, values, min_value in zip(names.tolist(), top.values.tolist(), min_values, strict=True):
        kept = sum(value > min_value for value in values)
        ranked.append((row[:kept], values[:kept]))
    return ranked
