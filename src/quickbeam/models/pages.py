"""Pages of keys and values in the native kernels' layout (`native/attention.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from quickbeam.models.kv import Page
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import KVShape, RowList
from quickbeam.models.states import NativePool, StatefulCache, States, StateShape
from quickbeam.tree import TokenTree


class PagePool(NativePool):
    """Pages for all sequences of a model.

    A page holds all layers in one piece of memory, so nothing is copied when a sequence grows.
    `offsets`: where each layer begins in a page, in numbers. `dtype`: bfloat16 or float32.
    `states`: what recurrent layers keep of a sequence; None where there are none.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        kernels: Kernels,
        limit: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        states: StateShape | None = None,
    ) -> None:
        super().__init__(limit)
        self.dtype = dtype
        self.shapes = [KVShape(*shape) for shape in shapes]
        self.kernels, self.page = kernels, kernels.page
        *self.offsets, self._numbers = [
            0,
            *accumulate(shape.numbers * self.page for shape in self.shapes),
        ]
        self.page_bytes = dtype.itemsize * self._numbers
        self.layers = np.array(
            [(*shape, offset) for shape, offset in zip(self.shapes, self.offsets, strict=True)],
            dtype=np.int64,
        )
        self.layers_at = self.layers.ctypes.data
        if states is not None:
            self.shape_states(states)

    def new(self) -> PagedStore:
        return PagedStore(self)

    def make(self) -> Page:
        return Page(torch.zeros(self._numbers, dtype=self.dtype))

    def copy(self, source: Page, target: Page) -> None:
        target.data.copy_(source.data)


class PagedStore(StatefulCache):
    """One sequence's pages, the table in which the kernels find them, and its states if the model
    has recurrent layers."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self.pool, self.shapes, self.offsets = pool, pool.shapes, pool.offsets
        self.device, self.kernels = torch.device("cpu"), pool.kernels
        self._table = (ctypes.c_void_p * 0)()
        self._states: States | None = None if pool.state_shape is None else States(pool)

    @property
    def table(self) -> int:
        """The address of the table of the pages' addresses; `reserve` may change it."""
        return ctypes.addressof(self._table)

    def bind(self) -> None:
        self._table = (ctypes.c_void_p * len(self._pages))(
            *[page.data.data_ptr() for page in self._pages]
        )

    def add_chain(
        self, rows: RowList, tokens: Sequence[int], wanted: Sequence[int] | range
    ) -> None:
        """Add rows of tokens that follow the committed ones; each sees all before it, and itself.

        `wanted`: which of these rows the head computes logits of. Raises `NoRoom`.
        """
        start, n = self.length, len(tokens)
        self.reserve(start + n)
        places = range(start, start + n)
        rows.add(
            self.table,
            tokens,
            places,
            places,
            range(start + 1, start + n + 1),
            [()] * n,
            wanted,
            0 if self._states is None else self._states.chain(start, n),
        )

    def add_tree(self, rows: RowList, tree: TokenTree, base: int = 0) -> None:
        """Add rows of a draft tree's nodes from `base` on, all with logits.

        The root follows the committed tokens. Raises `NoRoom`.
        """
        start, n = self.length, len(tree)
        self.reserve(start + n)
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parent):
            paths.append([*paths[parent], start + node] if parent >= 0 else [start + node])
        positions = [start + depth for depth in tree.depth[base:]]
        count = n - base
        rows.add(
            self.table,
            tree.token[base:],
            positions,
            range(start + base, start + n),
            [start] * count,
            paths[base:],
            range(count),
            0 if self._states is None else self._states.tree(tree, base),
        )

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        count, pool = len(source), self.pool
        array = ctypes.c_int64 * count
        self.kernels.move(
            self.table,
            pool.layers_at,
            len(pool.layers),
            array(*source),
            array(*target),
            count,
            pool.dtype is torch.float32,
        )

    def read(self, layer: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of the first `count` orders, as plain tensors.

        They are `[kv_heads, count, dim]` each. None counts all committed tokens.
        """
        shape, count = self.shapes[layer], self.length if count is None else count
        dtype = self.pool.dtype
        key = torch.empty(shape.kv_heads, count, shape.key_dim, dtype=dtype)
        value = torch.empty(shape.kv_heads, count, shape.value_dim, dtype=dtype)
        self.kernels.read(
            self.table,
            self.pool.layers[layer].ctypes.data,
            count,
            key.data_ptr(),
            value.data_ptr(),
            dtype is torch.float32,
        )
        return key, value
