"""A feature drafter's passes over a text, each over its own outputs of the pass before.

So it drafts. This is the training-time test of EAGLE-3 (2503.01840, §3.2).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.models.torch.network import LayerStack
from quickbeam.models.torch.pages import to_device

CPU_ROWS, DEVICE_ROWS = 64, 4096  # of a text whose attention is computed at once
MULTIPLE = 32  # of the lengths of batches and contexts (`rounded_up`)


def rounded_up(size: int) -> int:
    """Return a size of tensors that comes again in other steps of a training.

    Where no two steps have the same sizes, PyTorch makes new kernels for each, and what steps free
    leaves the memory in pieces of all sizes, among which each allocation has to search.
    """
    return -(-size // MULTIPLE) * MULTIPLE


class UnrolledAttention:
    """The attention of training-time test.

    A row sees the keys of the first pass for all rows up to it. Of each later pass it sees only its
    own key. So rows are taken some at a time: most keys of the later passes are then left out.
    `rows`: `[b, m]` on the CPU, those that the later passes have. `window`: how many of the last
    positions a row sees, None for all.
    """

    def __init__(self, window: int | None, rows: torch.Tensor) -> None:
        self._window = window
        self._rows = rows
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `[b, n, query heads * size]` of `[b, n, heads, size]`, and keep key and value."""
        dtype = value.dtype
        self._keys.append(key.to(dtype).transpose(1, 2))
        self._values.append(value.transpose(1, 2))
        query = query.to(dtype).transpose(1, 2)
        n = query.shape[2]
        rows = torch.arange(n)[None] if len(self._keys) == 1 else self._rows
        size = CPU_ROWS if query.device.type == "cpu" else DEVICE_ROWS
        all_rows = self._keys[0].shape[2]
        parts = list[torch.Tensor]()
        for begin in range(0, n, size):
            part = slice(begin, min(begin + size, n))
            end = min(all_rows, rounded_up(int(rows[:, part].max()) + 1))
            attended = F.scaled_dot_product_attention(
                query[:, :, part],
                _seen_by(self._keys, part, end),
                _seen_by(self._values, part, end),
                self._visible(to_device(rows[:, part], query.device), end),
                enable_gqa=True,
            )
            parts.append(attended)
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)

    def _visible(self, rows: torch.Tensor, end: int) -> torch.Tensor:
        """Return which of the keys of `_seen_by` each of these rows sees, `[b, 1, rows, keys]`."""
        passes = len(self._keys)
        b, count = rows.shape
        row = rows[:, None, :, None]
        key = torch.arange(end, device=rows.device)
        window = self._window or end + passes
        visible = [(key <= row) & (key >= row + passes - window)]
        own = torch.eye(count, dtype=torch.bool, device=rows.device).expand(b, 1, -1, -1)
        for number in range(1, passes):
            # in the pass before the last, keys stand one position further back, and so on
            visible.append(own & (passes - number <= window))
        return torch.cat(visible, -1)


def _seen_by(passes: list[torch.Tensor], rows: slice, end: int) -> torch.Tensor:
    """Return keys or values: the first `end` of the first pass, and these rows' of all others."""
    first, *later = passes
    return torch.cat([first[:, :, :end], *(part[:, :, rows] for part in later)], 2)


def moved_forward(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return `[b, n, …]` whose row i is row i + count of `x`. The last `count` rows are zero."""
    if not count:
        return x
    return torch.cat([x[:, count:], x.new_zeros(x.shape[0], count, *x.shape[2:])], 1)


def unroll(
    network: EagleHead,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    depths: int,
    layers: LayerStack | None = None,
    rows: torch.Tensor | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Run `depths` passes, and yield the hidden states that each reads, and its outputs.

    `tokens`: `[b, n]`. `hidden`: the target's hidden states after them, `[b, n, L * d]` or wider,
    of which the network reads the first ones. `layers`: the network's, in PyTorch; None makes them.
    `rows`: `[b, m]` on the CPU, those that the passes after the first one run on; None for all.

    In pass k, row i drafts the token at i + k + 2. It reads its hidden state and the embedding of
    the token at i + k + 1. Hidden states of the first pass are the target's up to i, those of
    another are the outputs of the pass before. Both tensors are `[b, n, d]`, and `[b, m, d]` after
    the first pass.
    """
    config = network.config
    layers = layers or network.layers_in_torch()
    every_row = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    rows = every_row if rows is None else rows
    attention = UnrolledAttention(config.window, rows)
    conversations = torch.arange(len(tokens), device=tokens.device)
    later = conversations[:, None], to_device(rows, tokens.device)
    positions = to_device(every_row, tokens.device)
    hidden = layers.fuse(hidden[..., : len(config.layers) * config.target_size].float())
    embedded = network.embedding(tokens).float()
    for depth in range(depths):
        following = moved_forward(embedded, depth + 1)
        if depth:
            following = following[later]
        out = network(hidden, following, positions + depth, attention, layers)
        yield hidden, out
        if not depth:
            out, positions = out[later], positions[later]
        hidden = out
