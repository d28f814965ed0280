"""Attention of a pass's rows over pages of keys and values: the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.parts import soft_cap
from quickbeam.models.torch.rows import PassRows

BLOCK = 64  # rows whose keys are gathered at a time


@dataclass(frozen=True)
class AttentionParams:
    """The parameters of a layer's attention.

    `index`: the layer whose keys and values are read. `scaling`: the factor of scores. `window`:
    tokens of the sliding window; None for none. `softcap`: the bound of scores; None for none.
    `causal`: rows see no keys of later positions, whatever the pass says.
    """

    index: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = False


def write(
    pool: RowPool, rows: PassRows, layer: int, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write the rows' keys and values `[n, kv_heads, dim]` of a layer to the pool."""
    pool.key[layer].index_copy_(0, rows.written, key.to(pool.dtype))
    pool.value[layer].index_copy_(0, rows.written, value.to(pool.dtype))


def attend(
    pool: RowPool,
    rows: PassRows,
    params: AttentionParams,
    query: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(query @ key.T * scaling) @ value, `[n, heads * value_dim]` float32.

    Each row reads the keys and values in the pool that it sees. `query`: `[n, heads, key_dim]`.
    `sinks`: for each head a logit without a value, `[heads]` (2508.10925).
    """
    visible = rows.visible(params.window, params.causal)
    results = list[torch.Tensor]()
    for block, slots in _blocks(rows):
        key = pool.key[params.index][slots].float()
        value = pool.value[params.index][slots].float()
        block_visible = visible[block, : slots.shape[-1]]
        results.append(_attend(query[block], key, value, block_visible, params, sinks))
    return torch.cat(results)


def _blocks(rows: PassRows) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of rows that attend together, and the rows of the pool that they read.

    The latter are `[n, K]`, or `[K]` where all rows are of one text and read the same.
    """
    first = 0
    for text in [*rows.texts, range(len(rows.positions), len(rows.positions))]:
        for start in range(first, text.start, BLOCK):
            stop = min(text.start, start + BLOCK)
            yield slice(start, stop), rows.keys[start:stop]
        for start in range(text.start, text.stop, BLOCK):
            stop = min(text.stop, start + BLOCK)
            yield slice(start, stop), rows.keys[stop - 1]
        first = text.stop


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    params: AttentionParams,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with keys and values, `[n, K, kv_heads, dim]`, or `[K, kv_heads, dim]` for all rows.

    `visible`: `[n, K]`.
    """
    kv_heads = key.shape[-2]
    rows = "n" if key.dim() == 4 else ""  # whether keys and values have a dimension of rows
    grouped = torch.unflatten(query.float(), 1, (kv_heads, -1))  # [n, kv_heads, group, dim]
    score = torch.einsum(f"nhgd,{rows}khd->nhgk", grouped, key) * params.scaling
    score = soft_cap(score, params.softcap)
    score = score.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        sink_score = sinks.float().view(1, kv_heads, -1, 1).expand(len(score), -1, -1, -1)
        score = torch.cat([score, sink_score], -1)
    weight = score.softmax(-1)[..., : visible.shape[-1]]  # [n, kv_heads, group, K]
    return torch.einsum(f"nhgk,{rows}khd->nhgd", weight, value).flatten(1)
