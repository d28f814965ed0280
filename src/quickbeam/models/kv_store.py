"""Keys and values for PyTorch's operators on a CPU: each sequence has tensors of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quickbeam.models.kv_cache import LayerShape, Pool, SequenceCache


class KVPool(Pool):
    """A pool of `KVStore`s. The tensors belong to the stores; the pool only counts pages.

    `block`: a store's capacity is a multiple of so many orders. `pairwise`: see `KVStore`. `limit`:
    see `Pool`.
    """

    page = 64
    shares = False

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pairwise: bool = False,
        block: int = 256,
        limit: int | None = None,
    ) -> None:
        super().__init__(limit)
        self.shapes, self.dtype, self.device, self.pairwise, self.block = (
            list(shapes),
            dtype,
            device,
            pairwise,
            block,
        )
        self.page_bytes = (
            self.page
            * dtype.itemsize
            * sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        )

    def new(self) -> KVStore:
        return KVStore(self)

    def keep(self, chunk: Any) -> None:
        self.take(self._pages(chunk))

    def drop(self, chunk: Any) -> None:
        self.give(self._pages(chunk))

    def idle(self, chunk: Any) -> bool:
        return True  # a shared chunk is a copy

    def _pages(self, chunk: Any) -> int:
        return -(-int(chunk[0][0].shape[2]) // self.page)


class KVStore(SequenceCache):
    """One sequence's keys and values.

    All layers of the same shape share one tensor for keys and one for values,
    `[layers, kv_heads, capacity, dim]`. A tensor that must grow grows by a quarter at least.

    `rows` says in which row an order lives. With `pairwise`, neighbours change places: order 0
    lives in row 1, order 1 in row 0. bfloat16 products add each pair of rows last-first, so this is
    the layout in which they add strictly in order (see `attention.attend_grouped`).
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.shapes, self.device, self.pairwise = (
            pool,
            pool.shapes,
            pool.device,
            pool.pairwise,
        )
        self.length = self.capacity = self._pages = 0
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            groups.setdefault(shape, []).append(layer)
        self._groups = [(layers, shape) for shape, layers in groups.items()]
        self._tensors = [
            (
                torch.zeros(
                    len(layers),
                    shape.kv_heads,
                    0,
                    shape.key_dim,
                    dtype=pool.dtype,
                    device=pool.device,
                ),
                torch.zeros(
                    len(layers),
                    shape.kv_heads,
                    0,
                    shape.value_dim,
                    dtype=pool.dtype,
                    device=pool.device,
                ),
            )
            for layers, shape in self._groups
        ]
        self.key: list[torch.Tensor] = []  # by layer: views [kv_heads, capacity, key_dim]
        self.value: list[torch.Tensor] = []
        self._bind()

    def _bind(self) -> None:
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for (layers, _), (keys, values) in zip(self._groups, self._tensors, strict=True):
            views |= {layer: (keys[i], values[i]) for i, layer in enumerate(layers)}
        self.key = [views[layer][0] for layer in range(len(self.shapes))]
        self.value = [views[layer][1] for layer in range(len(self.shapes))]

    def missing(self, tokens: int) -> int:
        return max(0, -(-tokens // self.pool.page) - self._pages)

    def reserve(self, tokens: int) -> None:
        if missing := self.missing(tokens):
            self.pool.take(missing)
            self._pages += missing
        if tokens <= self.capacity:
            return
        capacity = -(-max(tokens, self.capacity * 5 // 4) // self.pool.block) * self.pool.block
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
        """Return the rows of the given orders, `[n]` int64 on the store's device."""
        places = torch.tensor(list(orders), dtype=torch.int64)
        return (places ^ 1 if self.pairwise else places).to(self.device)

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write `key` and `value` (`[kv_heads, n, dim]`) to `rows` of a layer."""
        self.key[layer].index_copy_(1, rows, key)
        self.value[layer].index_copy_(1, rows, value)

    def commit(self, path: Sequence[int]) -> None:
        start = self.length
        moved = [(start + node, start + depth) for depth, node in enumerate(path) if node != depth]
        if moved:
            source, target = self.rows([a for a, _ in moved]), self.rows([b for _, b in moved])
            for pair in self._tensors:
                for tensor in pair:
                    tensor.index_copy_(2, target, tensor.index_select(2, source))
        self.length = start + len(path)

    def share(self, chunk: int, tokens: int) -> Any:
        """Return copies. `tokens` is even, so that pairs of rows stay together."""
        return [
            tuple(tensor[:, :, chunk * tokens : (chunk + 1) * tokens].clone() for tensor in pair)
            for pair in self._tensors
        ]

    def adopt(self, chunks: Sequence[Any], tokens: int) -> None:
        self.reserve(len(chunks) * tokens + 1)
        for i, chunk in enumerate(chunks):
            for pair, held in zip(self._tensors, chunk, strict=True):
                for tensor, part in zip(pair, held, strict=True):
                    tensor[:, :, i * tokens : (i + 1) * tokens] = part
        self.length = len(chunks) * tokens

    def fork(self) -> KVStore:
        other = KVStore(self.pool)
        even = self.length + self.length % 2
        other.reserve(max(even, 1))
        for ours, theirs in zip(self._tensors, other._tensors, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                b[:, :, :even] = a[:, :, :even]
        other.length = self.length
        return other

    def release(self) -> None:
        self.pool.give(self._pages)
        self._pages = self.length = self.capacity = 0
        self._tensors = [
            (keys[:, :, :0].clone(), values[:, :, :0].clone()) for keys, values in self._tensors
        ]
        self._bind()
