"""Keys and values in pages of the native kernels' layout (`native/attention.h`): what `KVStore` is to PyTorch's operators."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from quickbeam.target.native.library import Kernels
from quickbeam.target.native.operands import KVShape, Rows


class PagedStore:
    """One sequence's keys and values. Tokens have an *order*, as in `KVStore`: committed tokens first, then the nodes of the tree in
    flight.

    A page holds `kernels.page` tokens of all layers in one piece of memory, so nothing is copied when a sequence grows.
    """

    def __init__(self, shapes: Sequence[KVShape], kernels: Kernels) -> None:
        self.shapes = [KVShape(*shape) for shape in shapes]
        self.device = torch.device("cpu")
        self.length = 0
        self.kernels, self.page = kernels, kernels.page
        *self.offsets, self._numbers = [0, *accumulate(shape.numbers * self.page for shape in self.shapes)]
        self._layers = np.array([(*shape, offset) for shape, offset in zip(self.shapes, self.offsets, strict=True)], dtype=np.int64)
        self._pages: list[torch.Tensor] = []
        self._table = (ctypes.c_void_p * 0)()

    @property
    def capacity(self) -> int:
        return len(self._pages) * self.page

    @property
    def table(self) -> int:
        """Address of the pages' addresses; another one after `reserve`."""
        return ctypes.addressof(self._table)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` orders, keeping what is there."""
        missing = -(-tokens // self.page) - len(self._pages)
        if missing > 0:
            self._pages += [torch.zeros(self._numbers, dtype=torch.bfloat16) for _ in range(missing)]
            self._table = (ctypes.c_void_p * len(self._pages))(*[page.data_ptr() for page in self._pages])

    def chain(self, tokens: Sequence[int], wanted: Sequence[int] | range) -> Rows:
        """Rows of tokens that follow the committed ones, each seeing all before it."""
        start, n = self.length, len(tokens)
        self.reserve(start + n)
        places = list(range(start, start + n))
        return Rows(tokens, places, places, [place + 1 for place in places], (), [(n, self.table)], wanted)

    def tree(self, tokens: Sequence[int], parents: Sequence[int], depths: Sequence[int], base: int = 0) -> Rows:
        """Rows of a draft tree's nodes from `base` on, the root first behind the committed tokens; `parents` and `depths` of all nodes."""
        start, n = self.length, len(tokens)
        self.reserve(start + n)
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*paths[parent], start + node] if parent >= 0 else [start + node])
        rows = n - base
        return Rows(
            tokens[base:],
            [start + depth for depth in depths[base:]],
            range(start + base, start + n),
            [start] * rows,
            paths[base:],
            [(rows, self.table)],
            range(rows),
        )

    def commit(self, path: Sequence[int]) -> None:
        """Make the nodes of `path` (tree indices, increasing, the root 0 first) certain; the rest of the tree is forgotten."""
        start = self.length
        moved = [(start + node, start + depth) for depth, node in enumerate(path) if node != depth]
        if moved:
            ends = np.array(moved, dtype=np.int64).T.copy()
            self.kernels.move(self.table, self._layers.ctypes.data, len(self.shapes), ends[0].ctypes.data, ends[1].ctypes.data, len(moved))
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate a store of {self.length} tokens to {length}")
        self.length = length

    def read(self, layer: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first orders of a layer, `[kv_heads, count, dim]` each, as plain tensors."""
        shape, count = self.shapes[layer], self.length if count is None else count
        key = torch.empty(shape.kv_heads, count, shape.key_dim, dtype=torch.bfloat16)
        value = torch.empty(shape.kv_heads, count, shape.value_dim, dtype=torch.bfloat16)
        self.kernels.read(self.table, self._layers[layer].ctypes.data, count, key.data_ptr(), value.data_ptr())
        return key, value
