"""What the kernels' operations work on: shapes, and the rows of a call."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from quickbeam.models.native import library

BLOCK = 16  # outputs in a block of a packed weight


class KVShape(NamedTuple):
    """The shape of what one layer keeps of a token. `key_dim` is even."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """How many elements a token takes in a page. Values are padded to whole blocks."""
        return self.kv_heads * (self.key_dim + -(-self.value_dim // BLOCK) * BLOCK)

    def fields(self, offset: int) -> dict[str, int]:
        """Return the fields of operations on keys and values that lie at `offset` in a page."""
        return {
            "kv_heads": self.kv_heads,
            "head_dim": self.key_dim,
            "value_dim": self.value_dim,
            "offset": offset,
        }


class RowList:
    """The rows of one call: tokens of several sequences side by side.

    `wanted`: the rows for which the head is computed. `embedded`: rows float32 in place of the
    embeddings of n tokens, by the first one's row (`ImageRows.rows`). `axes`: by row, the positions
    of rows that have three.
    """

    def __init__(self) -> None:
        self.tokens, self.positions = list[int](), list[int]()
        self.wanted = list[int]()
        self.embedded = dict[int, torch.Tensor]()
        self.axes = dict[int, tuple[int, int, int]]()
        self._slots, self._prefix = list[int](), list[int]()
        self._paths = list[int]()  # of all rows, one after the other
        self._path_ends = [0]  # where the path of each row ends in `_paths`
        self._spans = list[library.Span]()

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        table: int,
        tokens: Sequence[int],
        positions: Sequence[int] | range,
        slots: Sequence[int] | range,
        prefix: Sequence[int] | range,
        paths: Sequence[Sequence[int]],
        wanted: Sequence[int] | range,
        nodes: int = 0,
    ) -> None:
        """Add rows of the sequence whose page table is at the address `table`.

        `tokens`, `positions`, `slots`, `prefix`: one number per row. attention.h explains them, and
        calls a KV slot an order. `paths`: for each row the slots of the draft tree's nodes that it
        sees, itself last. An empty path is that of a row that sees only the slots below its prefix.
        `wanted` counts from the sequence's first row. `nodes`: the address of the sequence's
        `library.Nodes`, of models with recurrent layers.
        """
        first = len(self.tokens)
        self.tokens += tokens
        self.positions += positions
        self._slots += slots
        self._prefix += prefix
        for path in paths:
            self._paths += path
            self._path_ends.append(len(self._paths))
        self._spans.append(library.Span(first, len(tokens), table, nodes))
        self.wanted += [first + row for row in wanted]

    @functools.cached_property
    def embedded_addresses(self) -> torch.Tensor:
        """The address of each row in `embedded`, `[rows]` int64, 0 for none; empty if none has."""
        if not self.embedded:
            return torch.empty(0, dtype=torch.int64)
        addresses = torch.zeros(len(self), dtype=torch.int64)
        for first, rows in self.embedded.items():
            row_bytes = rows.stride(0) * rows.itemsize
            offsets = torch.arange(len(rows)) * row_bytes
            addresses[first : first + len(rows)] = rows.data_ptr() + offsets
        return addresses

    @functools.cached_property
    def batch(self) -> library.Batch:
        """All rows that were added, as the kernels read them."""
        lists = [
            self.tokens,
            self.positions,
            self._slots,
            self._prefix,
            self._path_ends,
            self._paths,
            self.wanted,
        ]
        self._elements = array("q", list(chain.from_iterable(lists)))
        address, _ = self._elements.buffer_info()
        addresses = list[int]()
        for values in lists:
            addresses.append(address)
            address += self._elements.itemsize * len(values)
        self._span_table = (library.Span * len(self._spans))(*self._spans)
        return library.Batch(
            len(self.tokens),
            len(self._spans),
            len(self.wanted),
            ctypes.addressof(self._span_table),
            *addresses,
            None,
            None,
        )


@functools.lru_cache(maxsize=256)
def plain_rows(n: int, wanted: Sequence[int] = ()) -> RowList:
    """Return `n` rows of no sequence, for operations that use no tokens, positions or pages."""
    rows, zeros = RowList(), [0] * n
    rows.add(0, zeros, zeros, zeros, zeros, [()] * n, wanted)
    return rows
