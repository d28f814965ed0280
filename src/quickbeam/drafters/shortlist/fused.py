# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, misc"
"""The head's product on chosen blocks of rows as one Triton kernel.

It needs no gathered copy of the rows, and one launch for all blocks.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from quickbeam.drafters.shortlist.layout import Layout, Scores
from quickbeam.errors import InvalidInput


@triton.jit(do_not_specialize=["n"])  # compiled once, not anew for some numbers of rows
def block_logits(
    h,
    weight,
    chosen,
    out,
    n,
    d,
    size,
    always,
    frequent,
    rows,
    h_stride,
    out_stride,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
):
    """Compute the logits of the chosen blocks of `weight`.

    `out[:, slot * size : (slot + 1) * size] = h · weight[rows of the slot's block]ᵀ`, and -inf
    where the block has no row.

    `h`: `[n, d]`. `weight`: `[rows, d]`. `chosen`: clusters; those below 0 are empty. The first
    `always` slots are the `frequent` rows, `size` at a time. Then follows one slot for each chosen
    cluster. Grid: slots, pieces of S of a block's rows, pieces of N of the rows of `h`.
    """
    slot = tl.program_id(0)
    cluster = tl.load(chosen + slot - always, mask=slot >= always, other=-1)
    fixed = slot < always
    first = tl.where(fixed, slot * size, frequent + cluster * size).to(tl.int64)
    end = tl.minimum(first + size, tl.where(fixed, frequent, rows))
    end = tl.where(fixed | (cluster >= 0), end, first)

    column = tl.program_id(1) * S + tl.arange(0, S)
    row = first + column
    live = (column < size) & (row < end)
    node = (tl.program_id(2) * N + tl.arange(0, N)).to(tl.int64)
    total = tl.zeros((N, S), dtype=tl.float32)
    # a piece without rows reads nothing
    reach = tl.where(first + tl.program_id(1) * S < end, d, 0)
    for begin in range(0, reach, D):
        k = begin + tl.arange(0, D)
        x = tl.load(
            h + node[:, None] * h_stride + k[None, :],
            mask=(node < n)[:, None] & (k < d)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + row[None, :] * d + k[:, None], mask=live[None, :] & (k < d)[:, None], other=0.0
        )
        total = tl.dot(x, w, total, input_precision="ieee")
    total = tl.where(live[None, :], total, float("-inf"))
    target = out + node[:, None] * out_stride + slot * size + column[None, :]
    written = (node < n)[:, None] & (column < size)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=written)


class FusedHead:
    """Scores the frequent block and up to `most` clusters with `block_logits`.

    The scores always have `(ceil(frequent / size) + most) * size` columns.

    Raises `InvalidInput` for bfloat16 in Triton's interpreter, which multiplies bits as integers.
    """

    def __init__(self, weight: torch.Tensor, layout: Layout, most: int) -> None:
        if weight.dtype is torch.bfloat16 and not weight.is_cuda:
            raise InvalidInput("Triton's interpreter can't multiply bfloat16: use float32")
        self.layout = layout
        self.most = most
        self.weight = weight[layout.order.to(weight.device)].contiguous()
        self.always = -(-layout.frequent // layout.size)
        # the tokens of each slot; the last slot is for padding and has none
        table = torch.zeros(self.always + layout.clusters + 1, layout.size, dtype=torch.int64)
        table.view(-1)[: layout.frequent] = layout.order[: layout.frequent]
        first = self.always * layout.size
        in_clusters = layout.order[layout.frequent :]
        table.view(-1)[first : first + len(in_clusters)] = in_clusters
        self.table = table.to(weight.device)
        self.fixed = torch.arange(self.always, device=weight.device)

    def __call__(self, h: torch.Tensor, clusters: torch.Tensor) -> Scores:
        layout = self.layout
        n = len(h)
        chosen = self.fixed.new_full((self.most,), -1)
        chosen[: len(clusters)] = clusters
        slots = torch.cat([self.fixed, torch.where(chosen < 0, -1, chosen + self.always)])
        out = h.new_empty(n, len(slots) * layout.size)
        if out.numel():
            self._launch(h.contiguous(), chosen, out, len(slots))
        return Scores(out, self.table[slots].flatten())

    def _launch(self, h: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor, slots: int) -> None:
        layout = self.layout
        n, d = h.shape
        node_tile = min(64, max(16, triton.next_power_of_2(n)))
        row_tile = min(64, max(16, triton.next_power_of_2(layout.size)))
        grid = (slots, triton.cdiv(layout.size, row_tile), triton.cdiv(n, node_tile))
        with torch.cuda.device(h.device) if h.is_cuda else nullcontext():
            block_logits[grid](
                h,
                self.weight,
                chosen,
                out,
                n,
                d,
                layout.size,
                self.always,
                layout.frequent,
                len(layout.order),
                h.stride(0),
                out.stride(0),
                N=node_tile,
                S=row_tile,
                D=64,
                enable_fp_fusion=True,
            )
