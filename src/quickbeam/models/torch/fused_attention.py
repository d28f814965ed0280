# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, misc"
"""Attention over pages of keys and values as two Triton kernels (`paged_attention.attend`).

Keys are read in chunks that begin at fixed positions. A program reads one chunk and has its own
maximum (flash-decoding). Then the chunks of a row are joined, first to last. So a row's bits depend
on the keys that it sees and their positions, and on nothing else in the pass.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from quickbeam.models.torch.paged_attention import AttentionParams
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import PassRows

BLOCK = 64  # keys that are multiplied at a time, at most
BLOCK_BYTES = 2**16  # of keys and values that are multiplied at a time, at most
SUMS_BYTES = 2**28  # of the sums of the rows that attend at a time, at most
CHUNK = 512  # keys that a program reads
LEAST = 16  # rows and columns of a product, at least
# A kernel is compiled once a model, not anew for some sizes of a pass: neither for integers that
# are 1 or divide by 16, nor for tensors that begin at a multiple of 16 bytes.
INTEGERS = ["window", "pages_width", "path_width", "chunks"]
TENSORS = [
    "sums",
    "maxima",
    "weights",
    "pages",
    "path",
    "sequence",
    "committed",
    "seen",
    "positions",
]


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=TENSORS)
def attend_chunk(
    query,
    key,
    value,
    sums,
    maxima,
    weights,
    pages,
    path,
    sequence,
    committed,
    seen,
    positions,
    scaling,
    softcap,
    window,
    pages_width,
    path_width,
    chunks,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Attend with the heads of one row that share keys, over one chunk of positions.

    Writes, for each row, head and chunk, with the sums over the keys j that the row sees:

        maxima  = max_j score_j                           [n, heads, chunks]
        weights = sum_j exp(score_j - maxima)             [n, heads, chunks]
        sums    = sum_j exp(score_j - maxima) * value_j   [n, heads, chunks, VALUE_DIM]

    `query`: `[n, heads, KEY_DIM]`, where heads are `KV_HEADS * GROUP`. `key`, `value`:
    `[rows, KV_HEADS, dim]`. Nothing is written for chunks behind all that a row sees, which padded
    passes have many of. `window` and `softcap` are 0 where there are none. Grid: rows, heads of
    keys, chunks.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    in_pages = tl.load(committed + row)
    position = tl.load(positions + row)
    end = tl.load(seen + row)
    group = tl.where(chunk * CHUNK < end, GROUP, 0)
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    begin = tl.maximum(chunk * CHUNK, first // BLOCK * BLOCK)
    stop = tl.minimum(end, (chunk + 1) * CHUNK)

    head = tl.arange(0, G)
    key_column = tl.arange(0, K)
    value_column = tl.arange(0, V)
    heads = (row * KV_HEADS + kv_head) * GROUP + head
    is_head = head < group
    q = tl.load(
        query + heads[:, None] * KEY_DIM + key_column[None, :],
        mask=is_head[:, None] & (key_column < KEY_DIM)[None, :],
        other=0.0,
    )
    table = pages + tl.load(sequence + row) * pages_width
    total = tl.zeros((G, V), dtype=tl.float32)
    largest = tl.full((G,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((G,), dtype=tl.float32)
    for at in range(begin, stop, BLOCK):
        j = at + tl.arange(0, BLOCK)
        visible = (j >= first) & (j < stop)
        page = tl.load(table + j // PAGE, mask=visible & (j < in_pages), other=0)
        on_path = tl.load(
            path + row * path_width + j - in_pages, mask=visible & (j >= in_pages), other=0
        )
        slot = tl.where(j < in_pages, page * PAGE + j % PAGE, on_path)
        slot = (slot * KV_HEADS + kv_head)[:, None]
        k = tl.load(
            key + slot * KEY_DIM + key_column[None, :],
            mask=visible[:, None] & (key_column < KEY_DIM)[None, :],
            other=0.0,
        )
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if softcap > 0:
            score = (2 * tl.sigmoid(2 * score / softcap) - 1) * softcap
        score = tl.where(visible[None, :], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        # of blocks before the first key that is seen, nothing counts
        base = tl.where(new == float("-inf"), 0.0, new)
        exp_score = tl.exp(score - base[:, None])
        rescale = tl.exp(largest - base)
        v = tl.load(
            value + slot * VALUE_DIM + value_column[None, :],
            mask=visible[:, None] & (value_column < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * rescale[:, None]
        total = tl.dot(exp_score.to(v.dtype), v, total, input_precision="ieee")
        weight = weight * rescale + tl.sum(exp_score, 1)
        largest = new
    index = heads * chunks + chunk
    tl.store(
        sums + index[:, None] * VALUE_DIM + value_column[None, :],
        total,
        mask=is_head[:, None] & (value_column < VALUE_DIM)[None, :],
    )
    tl.store(maxima + index, largest, mask=is_head)
    tl.store(weights + index, weight, mask=is_head)


@triton.jit(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=["sums", "maxima", "weights", "sinks", "out", "seen"],
)
def join_chunks(
    sums,
    maxima,
    weights,
    sinks,
    out,
    seen,
    chunks,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Join the chunks of one row and head, first to last, and `sinks` `[HEADS]` after them.

    `out`: `[n, HEADS, VALUE_DIM]` float32. Grid: rows, heads.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, V)
    first = (row * HEADS + head) * chunks
    total = tl.zeros((V,), dtype=tl.float32)
    largest = float("-inf")
    weight = 0.0
    for chunk in range(0, tl.cdiv(tl.load(seen + row), CHUNK)):
        maximum = tl.load(maxima + first + chunk)
        new = tl.maximum(largest, maximum)
        base = tl.where(new == float("-inf"), 0.0, new)
        rescale = tl.exp(largest - base)
        chunk_scale = tl.exp(maximum - base)
        chunk_sum = tl.load(
            sums + (first + chunk) * VALUE_DIM + column, mask=column < VALUE_DIM, other=0.0
        )
        total = total * rescale + chunk_sum * chunk_scale
        weight = weight * rescale + tl.load(weights + first + chunk) * chunk_scale
        largest = new
    if HAS_SINKS:
        sink = tl.load(sinks + head)
        new = tl.maximum(largest, sink)
        rescale = tl.exp(largest - new)
        total = total * rescale
        weight = weight * rescale + tl.exp(sink - new)
    # a row of padding sees nothing
    total = total / tl.where(weight > 0, weight, 1.0)
    tl.store(out + (row * HEADS + head) * VALUE_DIM + column, total, mask=column < VALUE_DIM)


def keys_in_block(key_dim: int, value_dim: int, itemsize: int) -> int:
    """Return how many keys are multiplied at a time.

    `key_dim`, `value_dim`: padded dimensions of a head. These keys and values, queries and scores
    must fit in a multiprocessor's shared memory: 99 KiB on GPUs of compute capability 8.6, 163 KiB
    on those of 8.0. The number depends on the model alone, as a row's sums do.
    """
    block = BLOCK
    while block > LEAST and block * (key_dim + value_dim) * itemsize > BLOCK_BYTES:
        block //= 2
    return block


def padded(size: int) -> int:
    """Return to how many rows or columns of a product `size` of them are padded."""
    return max(LEAST, int(triton.next_power_of_2(size)))


def attend(
    pool: RowPool,
    rows: PassRows,
    params: AttentionParams,
    query: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `paged_attention.attend`, for pages in the products' format.

    Only some of the rows attend at a time where many rows stand behind long texts. This bounds the
    memory for sums.
    """
    key = pool.key[params.index]
    value = pool.value[params.index]
    n, heads, key_dim = query.shape
    kv_heads = key.shape[1]
    value_dim = value.shape[2]
    chunks = triton.cdiv(rows.pages.shape[1] * rows.page, CHUNK)
    query = query.to(key.dtype).contiguous()
    most = max(1, min(n, SUMS_BYTES // (4 * heads * chunks * value_dim)))
    sums = torch.empty(most, heads, chunks, value_dim, device=query.device)
    maxima, weights = torch.empty(2, most, heads, chunks, device=query.device).unbind()
    out = torch.empty(n, heads, value_dim, device=query.device)

    key_columns = padded(key_dim)
    value_columns = padded(value_dim)
    block = keys_in_block(key_columns, value_columns, key.itemsize)

    # Triton starts kernels on the current device
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        for first in range(0, n, most):
            part = slice(first, first + most)
            count = min(most, n - first)
            attend_chunk[count, kv_heads, chunks](
                query[part],
                key,
                value,
                sums,
                maxima,
                weights,
                rows.pages,
                rows.path[part],
                rows.sequence[part],
                rows.committed[part],
                rows.seen[part],
                rows.positions[part],
                params.scaling,
                params.softcap or 0.0,
                params.window or 0,
                rows.pages.shape[1],
                rows.path.shape[1],
                chunks,
                PAGE=rows.page,
                KV_HEADS=kv_heads,
                GROUP=heads // kv_heads,
                KEY_DIM=key_dim,
                VALUE_DIM=value_dim,
                G=padded(heads // kv_heads),
                K=key_columns,
                V=value_columns,
                BLOCK=block,
                CHUNK=CHUNK,
                CAUSAL=params.causal,
            )
            join_chunks[count, heads](
                sums,
                maxima,
                weights,
                sums if sinks is None else sinks,
                out[part],
                rows.seen[part],
                chunks,
                HEADS=heads,
                VALUE_DIM=value_dim,
                V=value_columns,
                CHUNK=CHUNK,
                HAS_SINKS=sinks is not None,
            )
    return out.flatten(1)
