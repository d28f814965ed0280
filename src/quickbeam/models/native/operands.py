"""What the kernels' operations work on: shapes, and the rows of a call."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from quickbeam.models.native import library

BLOCK = 16  # outputs in a block of a packed weight


class KVShape(NamedTuple):
    """The shape of what one layer keeps of a token. `key_dim` is even."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """How many numbers a token takes in a page. Values are padded to whole blocks."""
        return self.kv_heads * (self.key_dim + -(-self.value_dim // BLOCK) * BLOCK)

    def fields(self, offset: int) -> dict[str, int]:
        """Return the fields of operations on keys and values that lie at `offset` in a page."""
        kv_heads, dim, value_dim = self
        return {"kv_heads": kv_heads, "head_dim": dim, "value_dim": value_dim, "offset": offset}


class RowList:
    """The rows of one call: tokens of several sequences side by side.

    `wanted`: the rows for which the head is computed.
    """

    def __init__(self) -> None:
        self.tokens, self.positions, self.wanted = list[int](), list[int](), list[int]()
        self._orders, self._prefix = list[int](), list[int]()
        self._ends, self._nodes_seen = [0], list[int]()  # of paths: where each ends, all of them
        self._spans = list[library.Span]()

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        table: int,
        tokens: Sequence[int],
        positions: Sequence[int] | range,
        orders: Sequence[int] | range,
        prefix: Sequence[int] | range,
        paths: Sequence[Sequence[int]],
        wanted: Sequence[int] | range,
        nodes: int = 0,
    ) -> None:
        """Add rows of the sequence whose page table is at the address `table`.

        `tokens`, `positions`, `orders`, `prefix`: one number per row, see attention.h. `paths`: for
        each row the orders of the draft tree's nodes that it sees, itself last. An empty path is
        that of a row that sees only the orders below its prefix. `wanted` counts from the
        sequence's first row. `nodes`: the address of the sequence's `library.Nodes`, of models with
        recurrent layers.
        """
        first, ends, seen = len(self.tokens), self._ends, self._nodes_seen
        self.tokens += tokens
        self.positions += positions
        self._orders += orders
        self._prefix += prefix
        for path in paths:
            seen += path
            ends.append(len(seen))
        self._spans.append(library.Span(first, len(tokens), table, nodes))
        self.wanted += [first + row for row in wanted]

    @functools.cached_property
    def batch(self) -> library.Batch:
        """All rows that were added, as the kernels read them."""
        n, ends, seen = len(self.tokens), self._ends, self._nodes_seen
        parts = self.tokens + self.positions + self._orders + self._prefix + ends + seen
        self._numbers = array("q", parts + self.wanted)
        self._table = (library.Span * len(self._spans))(*self._spans)
        at, _ = self._numbers.buffer_info()
        starts = [at + 8 * k for k in (0, n, 2 * n, 3 * n, 4 * n, 5 * n + 1, 5 * n + 1 + len(seen))]
        counts = n, len(self._spans), len(self.wanted)
        return library.Batch(*counts, ctypes.addressof(self._table), *starts, None, None)


@functools.lru_cache(maxsize=256)
def plain_rows(n: int, wanted: Sequence[int] = ()) -> RowList:
    """Return `n` rows of no sequence, for operations that use no tokens, positions or pages."""
    rows, zeros = RowList(), [0] * n
    rows.add(0, zeros, zeros, zeros, zeros, [()] * n, wanted)
    return rows
