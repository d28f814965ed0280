"""Pages of keys and values as rows of PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quickbeam.models.base import inference
from quickbeam.models.cache.kv import Page, Pool, SequenceCache
from quickbeam.models.native.operands import KVShape
from quickbeam.models.torch.states import State, TorchStates

FIRST_BYTES = 2**30  # of keys and values that are made at once on CUDA


def to_device(numbers: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers of the host to the device; on CUDA, without waiting for it."""
    tensor = torch.as_tensor(numbers)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class RowPool(Pool):
    """Pages that are rows of two tensors a layer, for keys and for values.

    `key[i]`, `value[i]`: of layer i, `[rows, kv_heads, dim]`. Layers of one shape are parts of one
    tensor `[layers, rows, kv_heads, dim]`, so that rows are moved for all of them at once. Page 0
    belongs to no sequence: row 0 is what a row reads in place of keys that it doesn't see, and the
    last row is where rows that belong to no sequence write. `zeros`: the state of an empty
    sequence. `generation` changes when the tensors are replaced by larger ones.
    """

    page = 64

    def __init__(
        self,
        shapes: Sequence[KVShape],
        dtype: torch.dtype,
        device: torch.device,
        zeros: State | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.device, self.zeros = dtype, device, zeros or {}
        numbers = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        self.page_bytes = self.page * dtype.itemsize * numbers
        self._shapes, self._made, self.generation = list(shapes), 1, 0
        self._stacked = [
            torch.zeros(count, self.page, heads, dim, dtype=dtype, device=device)
            for (heads, dim), count in self._kinds().items()
        ]
        self._divide()
        if zeros:
            kept = [one for state in zeros.values() for one in state if one is not None]
            self.set_state_size(sum(one.nbytes for one in kept))

    def _kinds(self) -> dict[tuple[int, int], int]:
        """Return how many tensors of `[rows, heads, dim]` there are, by heads and dim."""
        kinds = dict[tuple[int, int], int]()
        for heads, *dims in self._shapes:
            for dim in dims:
                kinds[heads, dim] = kinds.get((heads, dim), 0) + 1
        return kinds

    def _divide(self) -> None:
        """Set `key` and `value` to the parts of the stacked tensors."""
        parts = {
            kind: iter(stacked) for kind, stacked in zip(self._kinds(), self._stacked, strict=True)
        }
        pairs = [
            (next(parts[heads, key_dim]), next(parts[heads, value_dim]))
            for heads, key_dim, value_dim in self._shapes
        ]
        self.key = [key for key, _ in pairs]
        self.value = [value for _, value in pairs]

    def make_state(self) -> State:
        return {}

    def new(self) -> RowStore:
        return RowStore(self)

    @property
    def rows(self) -> int:
        """How many rows the tensors have."""
        return self._stacked[0].shape[1]

    @inference
    def make(self) -> Page:
        rows = (self._made + 1) * self.page
        if rows > self.rows:
            more = max(rows, self._grown() * self.page) - self.rows
            self._stacked = [
                torch.cat([old, old.new_zeros(len(old), more, *old.shape[2:])], 1)
                for old in self._stacked
            ]
            self._divide()
            self.generation += 1
        self._made += 1
        return Page(self._made - 1)

    def _grown(self) -> int:
        """Return how many pages the tensors should have next.

        They grow by half at least, since everything is copied. On CUDA growth also makes all graphs
        useless, so they begin large there, but not larger than the limit.
        """
        pages = self.rows // self.page * 3 // 2
        if self.device.type == "cuda":
            pages = max(pages, FIRST_BYTES // self.page_bytes)
            if self.limit is not None:
                pages = min(pages, 1 + self.limit)  # page 0 belongs to no sequence
        return pages

    @inference
    def copy(self, source: Page, target: Page) -> None:
        for stacked in self._stacked:
            pages = torch.unflatten(stacked, 1, (-1, self.page))
            pages[:, target.data] = pages[:, source.data]

    @inference
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the rows `source` to the rows `target`, of all layers."""
        both = to_device(np.concatenate([source, target]), self.device)
        read, written = both[: len(source)], both[len(source) :]
        for stacked in self._stacked:
            stacked.index_copy_(1, written, stacked.index_select(1, read))


class RowStore(SequenceCache):
    """One sequence's pages of a `RowPool`."""

    pool: RowPool

    def __init__(self, pool: RowPool) -> None:
        super().__init__(pool)
        self.page_numbers = np.zeros(0, np.int64)
        self._states: TorchStates | None = TorchStates(pool, pool.zeros) if pool.zeros else None

    @property
    def states(self) -> TorchStates:
        """Those of recurrent layers, which the model must have."""
        assert self._states is not None
        return self._states

    def bind(self) -> None:
        self.page_numbers = np.array([page.data for page in self.pages], np.int64)

    def rows(self, orders: np.ndarray) -> np.ndarray:
        """Return the rows of the pool in which these orders live."""
        rows: np.ndarray = self.page_numbers[orders // self.page] * self.page + orders % self.page
        return rows

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.pool.move(*(self.rows(np.array(orders, np.int64)) for orders in (source, target)))
