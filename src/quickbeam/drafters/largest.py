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
    floors: Sequence[float] | None = None,
    tokens: torch.Tensor | None = None,
    kernels: Kernels | None = None,
) -> list[Row]:
    """Return the tokens of the `count` largest numbers of each row `[m, s]`, and these numbers.

    The largest comes first. NaN is left out. `floors`: for each row, what a number must exceed to
    count, rounded to float32; -inf by default. `tokens`: the token of each column `[s]` int64; None
    means that column i is token i.

    float32 on a CPU is read by the native `kernels`, if there are any; of equal numbers the first
    comes first.
    """
    count = min(count, rows.shape[-1])
    floors = floors or [-math.inf] * len(rows)
    if kernels is None or rows.device.type != "cpu" or rows.dtype is not torch.float32:
        return largest_plain(rows, count, floors, tokens)
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
    for floor in floors:
        kept = kernels.ranked(address, size, names, count, floor, best, values)
        ranked.append((best[:kept], values[:kept]))
        address += rows.itemsize * size
    return ranked


def largest_plain(
    rows: torch.Tensor, count: int, floors: Sequence[float], tokens: torch.Tensor | None = None
) -> list[Row]:
    """Return what `largest` does, by PyTorch's operators: the reference."""
    numbers = rows.float().nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf)
    top = numbers.topk(count)
    names = top.indices if tokens is None else tokens[top.indices]
    ranked = list[Row]()
    for row, values, floor in zip(names.tolist(), top.values.tolist(), floors, strict=True):
        kept = sum(value > floor for value in values)
        ranked.append((row[:kept], values[:kept]))
    return ranked
