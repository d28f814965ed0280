"""Keys and values of every certain token, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class LayerShape(NamedTuple):
    """What one attention layer keeps a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVStore:
    """One sequence's keys and values, layers of a kind in one tensor `[layers, kv_heads, capacity, dim]`, grown in blocks.

    Tokens have an *order*: committed tokens 0 to `length - 1` (their positions), then the nodes of the tree being verified. `rows`
    says where an order lives. With `pairwise` neighbours change places (order 0 lives in row 1, order 1 in row 0): bfloat16 products
    add each pair of rows last-first, so this is the layout in which they add strictly in order (see `attention.attend_grouped`).
    """

    def __init__(
        self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, *, pairwise: bool = False, block: int = 256
    ) -> None:
        self.shapes = list(shapes)
        self.pairwise = pairwise
        self.block = block
        self.length = 0
        self.capacity = 0
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            groups.setdefault(shape, []).append(layer)
        self._groups = [(layers, shape) for shape, layers in groups.items()]
        self._tensors = [
            (
                torch.zeros(len(layers), shape.kv_heads, 0, shape.key_dim, dtype=dtype, device=device),
                torch.zeros(len(layers), shape.kv_heads, 0, shape.value_dim, dtype=dtype, device=device),
            )
            for layers, shape in self._groups
        ]
        self.key: list[torch.Tensor] = []  # by layer, [kv_heads, capacity, key_dim]: views
        self.value: list[torch.Tensor] = []
        self.device = device
        self._bind()

    def _bind(self) -> None:
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for (layers, _), (keys, values) in zip(self._groups, self._tensors, strict=True):
            views |= {layer: (keys[i], values[i]) for i, layer in enumerate(layers)}
        self.key = [views[layer][0] for layer in range(len(self.shapes))]
        self.value = [views[layer][1] for layer in range(len(self.shapes))]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` orders, keeping what is there."""
        if tokens <= self.capacity:
            return
        capacity = -(-tokens // self.block) * self.block
        grown = []
        for pair in self._tensors:
            wider = tuple(old.new_zeros(*old.shape[:2], capacity, old.shape[3]) for old in pair)
            for new, old in zip(wider, pair, strict=True):
                new[:, :, : self.capacity] = old
            grown.append((wider[0], wider[1]))
        self._tensors = grown
        self.capacity = capacity
        self._bind()

    def rows(self, orders: Sequence[int] | range) -> torch.Tensor:
        """Rows of the given orders, `[n]` int64 on the store's device."""
        places = torch.tensor(list(orders), dtype=torch.int64)
        return (places ^ 1 if self.pairwise else places).to(self.device)

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put `key`, `value` (`[kv_heads, n, dim]`) into `rows` of a layer."""
        self.key[layer].index_copy_(1, rows, key)
        self.value[layer].index_copy_(1, rows, value)

    def commit(self, path: Sequence[int]) -> None:
        """Make the nodes of `path` (tree indices, increasing, the root 0 first) certain; the rest of the tree is forgotten."""
        start = self.length
        moved = [(start + node, start + depth) for depth, node in enumerate(path) if node != depth]
        if moved:
            source, target = self.rows([a for a, _ in moved]), self.rows([b for _, b in moved])
            for pair in self._tensors:
                for tensor in pair:
                    tensor.index_copy_(2, target, tensor.index_select(2, source))
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate a store of {self.length} tokens to {length}")
        self.length = length
