"""A feature drafter's passes over a text, each over its own outputs of the pass before.

So it drafts. This is the training-time test of EAGLE-3 (2503.01840, §3.2).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.models.torch.network import LayerStack

CPU_ROWS, DEVICE_ROWS = 64, 4096  # of a text whose attention is computed at once


class UnrolledAttention:
    """The attention of training-time test.

    A row sees the keys of the first pass for all rows up to it. Of each later pass it sees only its
    own key. So rows are taken some at a time: most keys of the later passes are then left out.
    `window`: how many of the last positions a row sees, None for all.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `[b, n, query heads * size]` of `[b, n, heads, size]`, and keep key and value."""
        dtype = value.dtype
        self._keys.append(key.to(dtype).transpose(1, 2))
        self._values.append(value.transpose(1, 2))
        query = query.to(dtype).transpose(1, 2)
        n = query.shape[2]
        size = CPU_ROWS if query.device.type == "cpu" else DEVICE_ROWS
        parts = list[torch.Tensor]()
        for begin in range(0, n, size):
            rows = slice(begin, min(begin + size, n))
            part = F.scaled_dot_product_attention(
                query[:, :, rows],
                _seen_by(self._keys, rows),
                _seen_by(self._values, rows),
                self._visible(rows, query.device),
                enable_gqa=True,
            )
            parts.append(part)
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)

    def _visible(self, rows: slice, device: torch.device) -> torch.Tensor:
        """Return which of the keys of `_seen_by` each of these rows sees, `[rows, keys]` bool."""
        passes = len(self._keys)
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        window = self._window or rows.stop + passes
        visible = list[torch.Tensor]()
        for number in range(passes):
            # in the pass before the last, keys stand one position further back, and so on
            oldest = row + passes - number - window
            first = rows.start if number else 0
            key = torch.arange(first, rows.stop, device=device)
            latest = key == row if number else key <= row
            visible.append(latest & (key >= oldest))
        return torch.cat(visible, 1)


def _seen_by(passes: list[torch.Tensor], rows: slice) -> torch.Tensor:
    """Return keys or values, those of the first pass up to these rows and theirs of all others."""
    first, *later = passes
    return torch.cat([first[:, :, : rows.stop], *(part[:, :, rows] for part in later)], 2)


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
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Run `depths` passes, and yield the hidden states that each reads, and its outputs.

    `tokens`: `[b, n]`. `hidden`: the target's hidden states after them, `[b, n, L * d]` or wider,
    of which the network reads the first ones. `layers`: the network's, in PyTorch; None makes them.

    In pass k, row i drafts the token at i + k + 2. It reads its hidden state and the embedding of
    the token at i + k + 1. Hidden states of the first pass are the target's up to i, those of
    another are the outputs of the pass before. Both tensors are `[b, n, d]`.
    """
    config = network.config
    layers = layers or network.layers_in_torch()
    attention = UnrolledAttention(config.window)
    embedded = network.embedding(tokens).float()
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    hidden = layers.fuse(hidden[..., : len(config.layers) * config.target_size].float())
    for depth in range(depths):
        following = moved_forward(embedded, depth + 1)
        drafted_positions = (positions + depth).expand(len(tokens), -1)
        out = network(hidden, following, drafted_positions, attention, layers)
        yield hidden, out
        hidden = out
