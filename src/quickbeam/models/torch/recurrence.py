"""The recurrence of linear attention over a pass's rows: the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quickbeam.models.torch.attention import runs_triton
from quickbeam.models.torch.rows import PassRows


def recurrence_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the `recur` of a device: a Triton kernel where these run, else the reference."""
    if not runs_triton(device):
        return recur
    from quickbeam.models.torch import fused_recurrence

    return fused_recurrence.recur


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
    """Return the results `[n, heads, value_dim]` of a pass's rows, and write their states.

    A row takes the same operations whatever the pass, one row after the other. `states`: of all
    slots, `[slots, heads, key_dim, value_dim]`. `query`, `key`: `[n, heads, key_dim]`. `value`:
    `[n, heads, value_dim]`. `rate`, `decay`: `[n, heads]`. `delta`: the rule is the delta rule
    (`recurrent.LinearAttentionLayer`). All are float32.
    """
    results = list[torch.Tensor]()
    for row in range(len(query)):
        this = slice(row, row + 1)
        matrix = states.index_select(0, rows.state_read[this]) * decay[this, :, None, None]
        update = value[this]
        if delta:
            update = update - (matrix * key[this, ..., None]).sum(2)
        update = update * rate[this, :, None]
        matrix = matrix + key[this, ..., None] * update[:, :, None]
        results.append((matrix * query[this, ..., None]).sum(2))
        states.index_copy_(0, rows.state_written[this], matrix)
    return torch.cat(results)
