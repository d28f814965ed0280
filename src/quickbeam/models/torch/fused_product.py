# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, misc"
"""Products as Triton kernels whose tiles depend on the weight alone.

A program computes 16 rows, and adds over the inputs in one order. No sum is divided among programs
(split-K), and no kernel is selected by measuring. So a row's bits don't depend on the number of
rows, on its position or on its neighbours. `x @ weight.T` is the reference.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

ROWS = 16  # of a tile
PROGRAMS = 128  # that a row of tiles should have at least, as GPUs have so many multiprocessors
DEPTH = 64  # inputs that are multiplied at a time
# A kernel is compiled once a weight, not anew for some numbers of rows or for tensors that begin at
# a multiple of 16 bytes.
INTEGERS = ["n"]
TENSORS = ["x", "out"]


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=TENSORS)
def multiply_tile(
    x,
    weight,
    out,
    n,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply some rows of `x` `[n, INPUTS]` by some of `weight` `[OUTPUTS, INPUTS]`.

    `out`: `[n, OUTPUTS]` float32. Grid: tiles of rows, tiles of outputs.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, INPUTS, DEPTH):
        k = first + tl.arange(0, DEPTH)
        a = tl.load(
            x + row[:, None] * INPUTS + k[None, :],
            mask=(row < n)[:, None] & (k < INPUTS)[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + column[:, None] * INPUTS + k[None, :],
            mask=(column < OUTPUTS)[:, None] & (k < INPUTS)[None, :],
            other=0.0,
        )
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    tl.store(
        out + row[:, None] * OUTPUTS + column[None, :],
        total,
        mask=(row < n)[:, None] & (column < OUTPUTS)[None, :],
    )


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=TENSORS)
def multiply_packed_tile(
    x,
    values,
    scales,
    zeros,
    out,
    n,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply some rows of `x` `[n, INPUTS]` by some of a packed weight (`PackedWeight`).

    `out`: `[n, OUTPUTS]` float32. Grid: tiles of rows, tiles of outputs.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row = row < n
    is_column = column < OUTPUTS
    byte = tl.arange(0, GROUP // 2)
    # the low half of a byte is of this input, and the high half of the input 16 further on
    low_input = byte // 16 * 32 + byte % 16
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for group in range(0, INPUTS // GROUP):
        at = x + row[:, None] * INPUTS + (group * GROUP + low_input)[None, :]
        low_x = tl.load(at, mask=is_row[:, None], other=0.0)
        high_x = tl.load(at + 16, mask=is_row[:, None], other=0.0)
        index = column * (INPUTS // GROUP) + group
        scale = tl.load(scales + index, mask=is_column, other=0.0)[:, None]
        zero = tl.load(zeros + index, mask=is_column, other=0).to(tl.float32)[:, None]
        packed = tl.load(
            values + index[:, None] * (GROUP // 2) + byte[None, :],
            mask=is_column[:, None],
            other=0,
        )
        low = (((packed & 15).to(tl.float32) - zero) * scale).to(low_x.dtype)
        high = (((packed >> 4).to(tl.float32) - zero) * scale).to(low_x.dtype)
        total = tl.dot(low_x, tl.trans(low), total, input_precision="ieee")
        total = tl.dot(high_x, tl.trans(high), total, input_precision="ieee")
    tl.store(
        out + row[:, None] * OUTPUTS + column[None, :],
        total,
        mask=is_row[:, None] & is_column[None, :],
    )


def columns_of(outputs: int) -> int:
    """Return how many outputs a tile has."""
    return min(64, max(16, int(triton.next_power_of_2(outputs // PROGRAMS))))


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ weight.T + bias` `[n, outputs]` float32, for `x` `[n, inputs]`.

    `weight`: `[outputs, inputs]`, in the number format of `x`, as `bias` `[outputs]` is.
    """
    n = len(x)
    outputs, inputs = weight.shape
    columns = columns_of(outputs)
    out = torch.empty(n, outputs, device=x.device)
    with _current(x):
        multiply_tile[triton.cdiv(n, ROWS), triton.cdiv(outputs, columns)](
            x.contiguous(),
            weight,
            out,
            n,
            INPUTS=inputs,
            OUTPUTS=outputs,
            ROWS=ROWS,
            COLUMNS=columns,
            DEPTH=DEPTH,
        )
    return out if bias is None else out + bias.float()


def multiply_packed(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Return the product `[n, outputs]` float32 of `x` `[n, inputs]` and a packed weight.

    The weight (`PackedWeight`) is rounded to the number format of `x`.
    """
    n = len(x)
    outputs, half = values.shape
    columns = columns_of(outputs)
    out = torch.empty(n, outputs, device=x.device)
    with _current(x):
        multiply_packed_tile[triton.cdiv(n, ROWS), triton.cdiv(outputs, columns)](
            x.contiguous(),
            values,
            scales,
            zeros,
            out,
            n,
            INPUTS=2 * half,
            OUTPUTS=outputs,
            GROUP=2 * half // scales.shape[1],
            ROWS=ROWS,
            COLUMNS=columns,
        )
    return out


def _current(x: torch.Tensor):
    """Return a context in which the device of `x` is the current one, where kernels are started."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
