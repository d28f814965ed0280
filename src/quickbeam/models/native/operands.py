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


class Rows:
    """The rows of one call: tokens of several sequences side by side.

    `tokens`, `positions`, `orders`, `prefix`: one number per row, see attention.h. `paths`: for
    each row the orders of the draft tree's nodes that it sees, itself last. An empty path is that
    of a row that sees only the orders below its prefix. `spans`: for each sequence its number of
    rows and the address of its page table. `wanted`: the rows for which the head is computed.
    `nodes`: for each sequence the address of its `library.Nodes`, of models with recurrent layers.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        orders: Sequence[int] | range = (),
        prefix: Sequence[int] = (),
        paths: Sequence[Sequence[int]] = (),
        spans: Sequence[tuple[int, int]] = (),
        wanted: Sequence[int] | range = (),
        nodes: Sequence[int] = (),
    ) -> None:
        self.rows, n, self.tokens = len(tokens), len(tokens), tokens
        ends, flat = [0], list[int]()
        for path in paths:
            flat += path
            ends.append(len(flat))
        if not paths:
            ends = [0] * (n + 1)
        numbers = [
            *tokens,
            *positions,
            *(orders or [0] * n),
            *(prefix or [0] * n),
            *ends,
            *flat,
            *wanted,
        ]
        self._numbers = array("q", numbers)
        first = 0
        self._spans = (library.Span * max(1, len(spans)))()
        for span, (rows, pages) in zip(self._spans, spans, strict=False):
            span.row, span.rows, span.pages, first = first, rows, pages, first + rows
        for span, at in zip(self._spans, nodes, strict=False):
            span.nodes = at
        at, _ = self._numbers.buffer_info()
        starts = [at + 8 * k for k in (0, n, 2 * n, 3 * n, 4 * n, 5 * n + 1, 5 * n + 1 + len(flat))]
        self.batch = library.Batch(
            n, len(spans), len(wanted), ctypes.addressof(self._spans), *starts, None, None
        )


class RowList:
    """Collects the rows of a call, sequence by sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self._orders: list[int] = []
        self._prefix: list[int] = []
        self._paths: list[Sequence[int]] = []
        self._spans: list[tuple[int, int]] = []
        self._nodes: list[int] = []
        self.wanted: list[int] = []

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

        The other arguments are as in `Rows`; `wanted` counts from the sequence's first row.
        `nodes`: the address of the sequence's `library.Nodes`.
        """
        first = len(self.tokens)
        self.tokens += tokens
        self.positions += positions
        self._orders += orders
        self._prefix += prefix
        self._paths += paths
        self._spans.append((len(tokens), table))
        self._nodes.append(nodes)
        self.wanted += [first + row for row in wanted]

    def rows(self) -> Rows:
        """Return all rows that were added."""
        return Rows(
            self.tokens,
            self.positions,
            self._orders,
            self._prefix,
            self._paths,
            self._spans,
            self.wanted,
            self._nodes,
        )


@functools.lru_cache(maxsize=256)
def plain_rows(n: int) -> Rows:
    """Return `n` rows of no sequence, for operations that use no tokens, positions or pages."""
    return Rows([0] * n, [0] * n)
