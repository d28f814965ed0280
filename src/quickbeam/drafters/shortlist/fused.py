# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, misc"
"""The product with selected rows of a head as one Triton kernel.

It needs no gathered copy of the rows, and one launch for all sequences.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from quickbeam.errors import InvalidInput


@triton.jit(do_not_specialize=["n", "count"])  # compiled once, not anew for some sizes
def selected_logits(
    h,
    weight,
    selected,
    sequence,
    out,
    n,
    d,
    count,
    h_stride,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
):
    """Compute the logits of each row of `h` for the rows of `weight` of its sequence.

    `out[i, j] = h[i] · weight[selected[sequence[i], j]]`, and -inf where `selected` is -1.

    `h`: `[n, d]`. `weight`: `[vocab, d]`. `selected`: `[S, count]`. `sequence`: `[n]`. `out`:
    `[n, count]`. Grid: pieces of S columns, sequences, pieces of N of the rows of `h`.
    """
    column = tl.program_id(0) * S + tl.arange(0, S)
    number = tl.program_id(1).to(tl.int64)
    node = (tl.program_id(2) * N + tl.arange(0, N)).to(tl.int64)
    inside = node < n
    mine = inside & (tl.load(sequence + node, mask=inside, other=-1) == number)
    row = tl.load(selected + number * count + column, mask=column < count, other=-1)
    live = row >= 0
    total = tl.zeros((N, S), dtype=tl.float32)
    # a piece without rows or without columns reads nothing
    needed = tl.max(mine.to(tl.int32), 0) * tl.max(live.to(tl.int32), 0)
    for begin in range(0, d * needed, D):
        k = begin + tl.arange(0, D)
        x = tl.load(
            h + node[:, None] * h_stride + k[None, :],
            mask=mine[:, None] & (k < d)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + row[None, :] * d + k[:, None], mask=live[None, :] & (k < d)[:, None], other=0.0
        )
        total = tl.dot(x, w, total, input_precision="ieee")
    total = tl.where(live[None, :], total, float("-inf"))
    written = mine[:, None] & (column < count)[None, :]
    target = out + node[:, None] * count + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=written)


def selected_product(
    h: torch.Tensor, weight: torch.Tensor, selected: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """Compute the same as `torch_head.selected_product`.

    Raises `InvalidInput` for bfloat16 in Triton's interpreter, which multiplies bits as integers.
    """
    if weight.dtype is torch.bfloat16 and not weight.is_cuda:
        raise InvalidInput("Triton's interpreter can't multiply bfloat16: use float32")
    h = h.contiguous()
    n, d = h.shape
    sequences, count = selected.shape
    out = h.new_empty(n, count)
    if not out.numel():
        return out
    node_tile = min(64, max(16, triton.next_power_of_2(n)))
    row_tile = 64
    grid = (triton.cdiv(count, row_tile), sequences, triton.cdiv(n, node_tile))
    with torch.cuda.device(h.device) if h.is_cuda else nullcontext():
        selected_logits[grid](
            h,
            weight,
            selected.contiguous(),
            sequence.contiguous(),
            out,
            n,
            d,
            count,
            h.stride(0),
            N=node_tile,
            S=row_tile,
            D=64,
            enable_fp_fusion=True,
        )
    return out
