"""Pages of keys and values, and states, as the native kernels have them (`native/attention.h`,
`native/recurrent.h`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.models.base import ImageRows
from quickbeam.models.cache.kv import Page, Pool, SequenceCache, SequenceStates
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import KVShape, RowList
from quickbeam.tree import TokenTree


class StateShape(NamedTuple):
    """How many float32 elements a sequence's state has, and the inputs of one node (`Nodes`)."""

    state: int
    inputs: int


class PagePool(Pool):
    """Pages for all sequences of a model, and states, which are flat float32 tensors.

    A page holds all layers in one piece of memory, so nothing is copied when a sequence grows.
    `offsets`: where each layer begins in a page, in elements. `dtype`: bfloat16 or float32.
    `states`: what recurrent layers keep of a sequence; None where there are none. `recurrences`: an
    array of `library.Recurrence`, of all such layers; whoever makes the program sets it.
    """

    recurrences: Any = None

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
        offsets = accumulate(shape.elements * self.page for shape in self.shapes)
        *self.offsets, self._page_elements = [0, *offsets]
        self.page_bytes = dtype.itemsize * self._page_elements
        self.layers = np.array(
            [(*shape, offset) for shape, offset in zip(self.shapes, self.offsets, strict=True)],
            dtype=np.int64,
        )
        self.state_shape = states
        if states is not None:
            self.set_state_size(4 * states.state)
            self.zeros = self.make_state()  # of an empty sequence

    def new(self) -> PagedStore:
        return PagedStore(self)

    def make(self) -> Page:
        return Page(torch.zeros(self._page_elements, dtype=self.dtype))

    def make_state(self) -> torch.Tensor:
        assert self.state_shape is not None
        return torch.zeros(self.state_shape.state)

    def copy(self, source: Page, target: Page) -> None:
        target.data.copy_(source.data)


class PagedStore(SequenceCache):
    """One sequence's pages, the table in which the kernels find them, and its states if the model
    has recurrent layers."""

    pool: PagePool

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._table = (ctypes.c_void_p * 0)()
        self._states: NativeStates | None = None if pool.state_shape is None else NativeStates(pool)

    @property
    def table(self) -> int:
        """The address of the table of the pages' addresses; `reserve` may change it."""
        return ctypes.addressof(self._table)

    def bind(self) -> None:
        self._table = (ctypes.c_void_p * len(self.pages))(
            *[page.data.data_ptr() for page in self.pages]
        )

    def add_chain(
        self,
        rows: RowList,
        tokens: Sequence[int],
        wanted: Sequence[int] | range,
        images: Sequence[ImageRows] = (),
    ) -> None:
        """Add rows of tokens that follow the committed ones; each sees all before it, and itself.

        `wanted`: which of these rows the head computes logits of. `images`: in place of some
        tokens' embeddings; rows of those that are `whole` see all of theirs. Raises `OutOfPages`.
        """
        start, n = self.length, len(tokens)
        self.reserve(start + n)
        seen: list[int] | range = range(start + 1, start + n + 1)
        for image in images:
            rows.embedded[len(rows) + image.first] = image.rows.float()
            if image.token is not None:
                tokens = [*tokens]
                tokens[image.first : image.end] = [image.token] * len(image.rows)
            if image.whole:
                seen = [*seen]
                seen[image.first : image.end] = [start + image.end] * len(image.rows)
        slots = range(start, start + n)
        rows.add(
            self.table,
            tokens,
            self._rotary(rows, slots),
            slots,
            seen,
            [()] * n,
            wanted,
            0 if self._states is None else self._states.chain(start, n),
        )

    def _rotary(self, rows: RowList, indices: Sequence[int] | range) -> Sequence[int] | range:
        """Return the rotary positions of the next rows, by their indices in the text."""
        if self.positions is None:
            return indices
        positions = list[int]()
        for row, axes in enumerate(self.positions.at(indices), len(rows)):
            positions.append(axes[0])
            if axes != (axes[0],) * 3:
                rows.axes[row] = axes
        return positions

    def add_block(self, rows: RowList, count: int) -> None:
        """Add `count` rows behind the committed tokens that may see one another.

        Where a layer is bidirectional, each sees all of them. Raises `OutOfPages`.
        """
        start = self.length
        self.reserve(start + count)
        slots = range(start, start + count)
        positions = self._rotary(rows, slots)
        seen = range(start + 1, start + count + 1)
        rows.add(self.table, [0] * count, positions, slots, seen, [()] * count, ())

    def add_tree(self, rows: RowList, tree: TokenTree, base: int = 0) -> None:
        """Add rows of a draft tree's nodes from `base` on, all with logits.

        The root follows the committed tokens. Raises `OutOfPages`.
        """
        start, n = self.length, len(tree)
        self.reserve(start + n)
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parent):
            paths.append([*paths[parent], start + node] if parent >= 0 else [start + node])
        positions = self._rotary(rows, [start + depth for depth in tree.depth[base:]])
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
        pool, count = self.pool, len(source)
        slots = ctypes.c_int64 * count
        pool.kernels.move(
            self.table,
            pool.layers.ctypes.data,
            len(pool.layers),
            slots(*source),
            slots(*target),
            count,
            pool.dtype is torch.float32,
        )


class NativeStates(SequenceStates):
    """The states of one sequence that the native kernels run.

    The inputs of a tree's nodes are workspace, as the rows of a pass are, and are not counted by
    the pool.
    """

    _pool: PagePool

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._boundary: Page | None = None  # a state to write, behind the last full page of tokens
        assert pool.state_shape is not None
        self._inputs = torch.empty(0, pool.state_shape.inputs)
        self._nodes, self._parents = library.Nodes(), array("q")
        self._chain = False  # whether the last pass wrote the state behind all its nodes

    def _lacks_boundary(self, length: int, tokens: int) -> bool:
        """Whether tokens from `length` to `tokens` fill a page whose state has no memory yet."""
        page = self._pool.page
        crosses = self._pool.snapshots and tokens // page > length // page
        return crosses and self._boundary is None

    def missing(self, length: int, tokens: int) -> int:
        missing = super().missing(length, tokens)
        if self._lacks_boundary(length, tokens):
            missing += self._pool.state_pages
        return missing

    def reserve(self, length: int, tokens: int) -> None:
        super().reserve(length, tokens)
        if self._lacks_boundary(length, tokens):
            self._boundary = self._pool.allocate_state()

    def chain(self, length: int, count: int) -> int:
        """Prepare a pass over `count` tokens of a text. Returns the address of its `Nodes`."""
        return self._prepare(None, None, 0, count, True, self._count_before_boundary(length, count))

    def tree(self, tree: TokenTree, base: int) -> int:
        """Prepare a pass over a tree's nodes from `base` on. Returns the address of its `Nodes`."""
        count = len(tree)
        if len(self._inputs) < count:
            inputs = torch.empty(count + count // 2, self._inputs.shape[1])
            inputs[:base] = self._inputs[:base]
            self._inputs = inputs
        self._parents = array("q", tree.parent)
        parents, _ = self._parents.buffer_info()
        chain = all(parent == node - 1 for node, parent in enumerate(tree.parent))
        return self._prepare(self._inputs.data_ptr(), parents, base, count, chain, 0)

    def _prepare(
        self,
        inputs: int | None,
        parents: int | None,
        base: int,
        count: int,
        chain: bool,
        before_boundary: int,
    ) -> int:
        """Fill in `Nodes` and return its address.

        `inputs` and `parents`: addresses. `chain`: the pass writes the state behind all nodes.
        `before_boundary`: how many of them come before the page boundary, behind which it writes a
        state too; 0 for none.
        """
        state = self._pool.zeros if self._state is None else self._state.data
        assert self._next is not None
        self._chain = chain
        nodes = self._nodes
        nodes.state = state.data_ptr()
        nodes.next = self._next.data.data_ptr() if chain else None
        nodes.boundary = None
        if before_boundary and self._boundary is not None:
            nodes.boundary = self._boundary.data.data_ptr()
        nodes.boundary_node = before_boundary - 1
        nodes.inputs = inputs
        nodes.parent = parents
        nodes.base = base
        nodes.nodes = count
        return ctypes.addressof(nodes)

    def _count_before_boundary(self, length: int, count: int) -> int:
        """Return how many of `count` tokens behind `length` come before the last page boundary.

        0 where that is before or after all of them.
        """
        before = (length + count) // self._pool.page * self._pool.page - length
        return before if self._pool.snapshots and 0 < before < count else 0

    def commit(self, path: Sequence[int], length: int) -> None:
        """Make the state behind the nodes of `path`. `length`: without them.

        Raises `ValueError` for a part of a text that was no tree.
        """
        count, nodes = len(path), self._nodes
        commits_all = self._chain and count == nodes.nodes
        before_boundary = self._count_before_boundary(length, count)
        if not commits_all and not nodes.inputs:
            raise ValueError(f"the pass ran {nodes.nodes} tokens of a text: commit all of them")
        assert self._next is not None
        if not commits_all or (before_boundary and not nodes.boundary):
            state = nodes.state
            if before_boundary:
                assert self._boundary is not None
                state = self._fold(state, path[:before_boundary], self._boundary)
            self._fold(state, path[before_boundary:], self._next)
        if before_boundary:
            assert self._boundary is not None
            self._retain(length + before_boundary, self._boundary)
            self._boundary = None
        self._step(length + count)
        nodes.inputs = nodes.nodes = 0  # what was run is spent
        self._chain = False

    def _fold(self, state: int, path: Sequence[int], target: Page) -> int:
        """Write the state behind the nodes of `path`, and return its address.

        `state`: the address of that before them.
        """
        nodes, pool = array("q", path), self._pool
        address = int(target.data.data_ptr())
        pool.kernels.fold(
            pool.recurrences,
            len(pool.recurrences),
            state,
            self._nodes.inputs,
            nodes.buffer_info()[0],
            len(nodes),
            address,
        )
        return address

    def release(self) -> None:
        boundary, self._boundary = self._boundary, None
        self._release(boundary)
        super().release()
        self._inputs = torch.empty(0, self._inputs.shape[1])
