# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, misc"
"""The recurrence of linear attention as one Triton kernel, in place of operations for each row."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from quickbeam.models.torch.rows import PassRows
from quickbeam.models.torch.states import SCRATCH

COLUMNS = 32  # columns of a head's matrix that a program holds, at most


@triton.jit
def recur_rows(
    query,
    key,
    value,
    rate,
    decay,
    bounds,
    read,
    written,
    states,
    out,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    DELTA: tl.constexpr,
    SCRATCH: tl.constexpr,
):
    """Run the rows of a sequence, `bounds[i]` to `bounds[i + 1]` (excluded), one after the other.

    The other arguments are those of `recurrence.recur`. A program holds V columns of a head's
    matrix. It loads them where a row doesn't read what the row before it wrote. Grid: sequences,
    heads, blocks of V columns.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * V + tl.arange(0, V)
    element = tl.arange(0, K)
    in_key = element < KEY_DIM
    in_value = column < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    place = head * KEY_DIM * VALUE_DIM + element[:, None] * VALUE_DIM + column[None, :]
    size = HEADS * KEY_DIM * VALUE_DIM

    matrix = tl.zeros((K, V), dtype=tl.float32)
    held = tl.load(bounds) - 1  # the slot whose state `matrix` is; none yet
    for row in range(tl.load(bounds + sequence), tl.load(bounds + sequence + 1)):
        slot = tl.load(read + row)
        if slot != held:
            matrix = tl.load(states + slot * size + place, mask=inside, other=0.0)
        row_head = row * HEADS + head
        k = tl.load(key + row_head * KEY_DIM + element, mask=in_key, other=0.0)
        q = tl.load(query + row_head * KEY_DIM + element, mask=in_key, other=0.0)
        update = tl.load(value + row_head * VALUE_DIM + column, mask=in_value, other=0.0)
        matrix = matrix * tl.load(decay + row_head)
        if DELTA:
            update = update - tl.sum(matrix * k[:, None], 0)
        update = update * tl.load(rate + row_head)
        matrix = matrix + k[:, None] * update[None, :]
        result = tl.sum(matrix * q[:, None], 0)
        tl.store(out + row_head * VALUE_DIM + column, result, mask=in_value)
        held = tl.load(written + row)
        if held != SCRATCH:
            tl.store(states + held * size + place, matrix, mask=inside)
            tl.debug_barrier()  # a later row may load it


def recur(
    states: torch.Tensor,
    rows: PassRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rate: torch.Tensor,
    decay: torch.Tensor,
    delta: bool,
) -> torch.Tensor:
    """Compute the same as `recurrence.recur`. Rows of padding are not run: their results are 0."""
    heads, key_dim, value_dim = states.shape[1:]
    out = torch.zeros(len(query), heads, value_dim, device=query.device)
    sequences = len(rows.bounds) - 1
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    # Triton starts kernels on the current device
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        recur_rows[sequences, heads, triton.cdiv(value_dim, columns)](
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            rate.contiguous(),
            decay.contiguous(),
            rows.bounds,
            rows.state_read,
            rows.state_written,
            states,
            out,
            HEADS=heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            K=triton.next_power_of_2(key_dim),
            V=columns,
            DELTA=delta,
            SCRATCH=SCRATCH,
        )
    return out
