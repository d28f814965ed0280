"""Pages of keys and values as rows of PyTorch's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from quickbeam.models.base import inference
from quickbeam.models.cache.kv import Page, Pool, SequenceCache
from quickbeam.models.native.operands import KVShape
from quickbeam.models.torch.states import StateShape, StateSlots, TorchStates

FIRST_BYTES = 2**30  # of keys and values that are allocated at once on CUDA


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy an array of the host to the device; on CUDA, without waiting for the copy."""
    tensor = torch.as_tensor(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class RowPool(Pool):
    """Pages that are rows of two tensors a layer, for keys and for values.

    `key[i]`, `value[i]`: keys and values of layer i, `[rows, kv_heads, dim]`. Layers of one shape
    are views of one tensor `[layers, rows, kv_heads, dim]`, so that rows are moved for all of them
    at once. Page 0 belongs to no sequence. Its row 0 is read in place of keys that a row doesn't
    see, and rows of padding write to its last row. `states`: those of recurrent layers.
    """

    page = 64

    def __init__(
        self,
        shapes: Sequence[KVShape],
        dtype: torch.dtype,
        device: torch.device,
        states: Mapping[int, StateShape] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.device = device
        self.states = StateSlots(states, device)
        self._page_generation = 0
        elements = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        self.page_bytes = self.page * dtype.itemsize * elements
        self._shapes = list(shapes)
        self._page_count = 1

        # how many tensors there are of each shape `[rows, heads, dim]`
        counts = Counter[tuple[int, int]]()
        for shape in shapes:
            counts[shape.kv_heads, shape.key_dim] += 1
            counts[shape.kv_heads, shape.value_dim] += 1
        self._stacked = dict[tuple[int, int], torch.Tensor]()
        for (heads, dim), count in counts.items():
            size = (count, self.page, heads, dim)
            self._stacked[heads, dim] = torch.zeros(size, dtype=dtype, device=device)
        self._set_views()
        if states:
            self.set_state_size(self.states.slot_bytes)

    def _set_views(self) -> None:
        """Set `key` and `value` to views of the stacked tensors."""
        views = {shape: iter(stacked) for shape, stacked in self._stacked.items()}
        self.key = list[torch.Tensor]()
        self.value = list[torch.Tensor]()
        for shape in self._shapes:
            self.key.append(next(views[shape.kv_heads, shape.key_dim]))
            self.value.append(next(views[shape.kv_heads, shape.value_dim]))

    @property
    def generation(self) -> int:
        """A number that changes when tensors are replaced by larger ones."""
        return self._page_generation + self.states.generation

    def make_state(self) -> int:
        return self.states.allocate()

    def new(self) -> RowStore:
        return RowStore(self)

    @property
    def rows(self) -> int:
        """The rows of each tensor."""
        return len(self.key[0])

    @inference
    def make(self) -> Page:
        rows = (self._page_count + 1) * self.page
        if rows > self.rows:
            added = max(rows, self._next_capacity() * self.page) - self.rows
            for shape, stacked in self._stacked.items():
                zeros = stacked.new_zeros(len(stacked), added, *shape)
                self._stacked[shape] = torch.cat([stacked, zeros], 1)
            self._set_views()
            self._page_generation += 1
        self._page_count += 1
        return Page(self._page_count - 1)

    def _next_capacity(self) -> int:
        """Return how many pages the tensors should have next.

        The tensors grow by half at least, since everything is copied. On CUDA, graphs also have to
        be captured anew. So the tensors begin large on CUDA, but not larger than the limit.
        """
        pages = self.rows // self.page * 3 // 2
        if self.device.type == "cuda":
            pages = max(pages, FIRST_BYTES // self.page_bytes)
            if self.limit is not None:
                pages = min(pages, 1 + self.limit)  # page 0 belongs to no sequence
        return pages

    @inference
    def copy(self, source: Page, target: Page) -> None:
        for stacked in self._stacked.values():
            pages = torch.unflatten(stacked, 1, (-1, self.page))
            pages[:, target.data] = pages[:, source.data]

    @inference
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the rows `source` to the rows `target`, of all layers."""
        indices = to_device(np.concatenate([source, target]), self.device)
        source_rows = indices[: len(source)]
        target_rows = indices[len(source) :]
        for stacked in self._stacked.values():
            stacked.index_copy_(1, target_rows, stacked.index_select(1, source_rows))


class RowStore(SequenceCache):
    """One sequence's pages of a `RowPool`."""

    pool: RowPool

    def __init__(self, pool: RowPool) -> None:
        super().__init__(pool)
        self.page_numbers = np.zeros(0, np.int64)
        self._states: TorchStates | None = None
        if pool.states.layers:
            self._states = TorchStates(pool, pool.states)

    @property
    def states(self) -> TorchStates:
        """The states of recurrent layers, which the model must have."""
        assert self._states is not None
        return self._states

    def bind(self) -> None:
        self.page_numbers = np.array([page.data for page in self.pages], np.int64)

    def rows(self, orders: np.ndarray) -> np.ndarray:
        """Return the rows of the pool of tokens with these orders (`SequenceCache`)."""
        pages = self.page_numbers[orders // self.page]
        rows: np.ndarray = pages * self.page + orders % self.page
        return rows

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        source_rows = self.rows(np.array(source, np.int64))
        target_rows = self.rows(np.array(target, np.int64))
        self.pool.move(source_rows, target_rows)
