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
    """What attention needs to know of one layer besides its keys and values.

    `index`: the number of the layer whose keys and values are read. `scaling`: the factor of its
    scores. `window`: tokens of its sliding window, `softcap`: the cap of its scores; None for none.
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
    """Return what the rows read: `[n, heads, key_dim]` to `[n, heads * value_dim]` float32.

    `sinks`: a logit of each head that no value belongs to, `[heads]` (2508.10925).
    """
    key, value = pool.key[params.index], pool.value[params.index]
    visible = rows.visible(params.window, params.causal)
    results = []
    for block, keys in _blocks(rows):
        seen = visible[block, : keys.shape[-1]]
        own = key[keys].float(), value[keys].float()
        results.append(_attend(query[block], *own, seen, params, sinks))
    return torch.cat(results)


def _blocks(rows: PassRows) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield which rows attend together, and which rows of the pool they read.

    These are `[n, K]`, or `[K]` for all rows of a text alike.
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
    rows = "n" if key.dim() == 4 else ""
    grouped = torch.unflatten(query.float(), 1, (kv_heads, -1))  # [n, kv_heads, group, dim]
    score = torch.einsum(f"nhgd,{rows}khd->nhgk", grouped, key) * params.scaling
    score = soft_cap(score, params.softcap)
    score = score.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        of_heads = sinks.float().view(1, kv_heads, -1, 1).expand(len(score), -1, -1, -1)
        score = torch.cat([score, of_heads], -1)
    weight = score.softmax(-1)[..., : visible.shape[-1]]
    return torch.einsum(f"nhgk,{rows}khd->nhgd", weight, value).flatten(1)
