# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, misc"
"""Random words as one Triton kernel, in place of the 70 operations of `noise.philox`."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from quickbeam.models.torch.noise import DrawnRows

BLOCK = 256  # chunks or tokens for which a program computes the four words


@triton.jit(
    do_not_specialize=["rows", "count", "purpose"],
    do_not_specialize_on_alignment=["first", "key0", "key1", "choice", "position", "words"],
)
def philox_words(
    first, key0, key1, choice, position, words, rows, count, purpose, BLOCK: tl.constexpr
):
    """Compute the words `[4, rows, count]` of chunks or tokens `first` `[rows, count]`, all int64.

    `key0`, `key1`, `choice`, `position`: `[rows]`. Grid: rows, blocks of BLOCK columns.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < count
    at = row * count + column
    zeros = tl.zeros((BLOCK,), dtype=tl.uint32)
    a, b, c, d = tl.random.philox_impl(
        tl.load(first + at, mask=inside, other=0).to(tl.uint32),
        tl.load(position + row).to(tl.uint32) + zeros,
        tl.load(choice + row).to(tl.uint32) + zeros,
        zeros + purpose.to(tl.uint32),
        tl.load(key0 + row).to(tl.uint32),
        tl.load(key1 + row).to(tl.uint32),
    )
    size = rows * count
    tl.store(words + at, a.to(tl.int64), mask=inside)
    tl.store(words + size + at, b.to(tl.int64), mask=inside)
    tl.store(words + 2 * size + at, c.to(tl.int64), mask=inside)
    tl.store(words + 3 * size + at, d.to(tl.int64), mask=inside)


def philox(rows: DrawnRows, first: torch.Tensor, purpose: int) -> tuple[torch.Tensor, ...]:
    """Compute the same as `noise.philox`."""
    count, width = first.shape
    words = torch.empty(4, count, width, dtype=torch.int64, device=first.device)
    # Triton starts kernels on the current device
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        philox_words[count, triton.cdiv(width, BLOCK)](
            first.contiguous(),
            rows.key0,
            rows.key1,
            rows.choice.contiguous(),
            rows.position,
            words,
            count,
            width,
            purpose,
            BLOCK=BLOCK,
        )
    return words.unbind()
