"""What the kernels' operations run on: packed weights, and the rows of a call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quickbeam.target.native import library
from quickbeam.target.native.library import Kernels

BLOCK = 16  # outputs a block of a packed weight


class KVShape(NamedTuple):
    """What one layer keeps of a token. Dimensions of keys are even."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """In a page, a token."""
        return self.kv_heads * (self.key_dim + -(-self.value_dim // BLOCK) * BLOCK)


class Packed:
    """A weight `[outputs, inputs]` in the kernels' layout, `[blocks][inputs / 2][16][2]` bfloat16,
    and its bias in float32.

    `gated`: two weights of the same shape, blocks of 16 outputs in turn: gates, then what they let
    through. `place`: where to put it, a piece of a larger tensor of `size` numbers; its own where
    None. `filled`: it holds the weight already. Raises `ValueError` for an odd number of inputs.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        place: torch.Tensor | None = None,
        filled: bool = False,
    ) -> None:
        self.inputs = weights[0].shape[1]
        if self.inputs % 2:
            raise ValueError(f"{self.inputs} inputs: must be even")
        self.gated, self.outputs, self.format = gated, sum(len(weight) for weight in weights), 0
        self._kernels, block = kernels, self.inputs * BLOCK
        if gated or len(weights) == 1:
            parts, rows = list(weights), len(weights[0])
        else:
            parts, rows = [torch.cat(list(weights))], self.outputs
        self.blocks = -(-rows // BLOCK) * len(parts)
        self.data = (
            torch.empty(self.blocks * block, dtype=torch.bfloat16) if place is None else place
        )
        for i, part in enumerate([] if filled else parts):
            part = part.detach().to(torch.bfloat16).contiguous()
            kernels.pack(
                part.data_ptr(),
                rows,
                self.inputs,
                self.inputs,
                self.data.data_ptr() + 2 * i * block,
                block * len(parts),
            )
        self.bias = (
            None
            if bias is None
            else gated_bias(bias, rows, self.blocks)
            if gated
            else bias.detach().float().contiguous()
        )

    @staticmethod
    def size(weights: Sequence[torch.Tensor], gated: bool = False) -> int:
        """Numbers that these take."""
        rows = (
            [len(weight) for weight in weights]
            if gated
            else [sum(len(weight) for weight in weights)]
        )
        return sum(-(-n // BLOCK) * BLOCK for n in rows) * weights[0].shape[1]

    def rows(self) -> torch.Tensor:
        """`[outputs, inputs]` bfloat16, as it came; not for gated ones."""
        weight = torch.empty(self.outputs, self.inputs, dtype=torch.bfloat16)
        self._kernels.unpack(
            self.data.data_ptr(), self.outputs, self.inputs, self.inputs * BLOCK, weight.data_ptr()
        )
        return weight


def gated_bias(bias: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """By block, as gated weights are."""
    both = torch.zeros(2, blocks * BLOCK // 2)
    both[:, :rows] = bias.detach().float().view(2, rows)
    return both.view(2, -1, BLOCK).transpose(0, 1).contiguous()


class PackedPart(NamedTuple):
    """Some blocks of a packed weight that comes with each call (`Program.set`). `column`: the first
    of its outputs."""

    inputs: int
    outputs: int
    gated: bool
    format: int
    bias: torch.Tensor | None
    column: int
    data: None = None


class Rows:
    """The rows of one call: tokens of several sequences side by side.

    `tokens`, `positions`, `orders`, `prefix`: by row, see attention.h; `paths`: by row, the orders
    of the draft tree that it sees, itself last; none for a row that sees the orders below its
    prefix alone. `spans`: (rows, address of the page table) of each sequence. `wanted`: the rows
    that a head is asked about.
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
        self._numbers = np.array(numbers, dtype=np.int64)
        first = 0
        self._spans = (library.Span * max(1, len(spans)))()
        for span, (rows, pages) in zip(self._spans, spans, strict=False):
            span.row, span.rows, span.pages, first = first, rows, pages, first + rows
        at = self._numbers.ctypes.data
        starts = [at + 8 * k for k in (0, n, 2 * n, 3 * n, 4 * n, 5 * n + 1, 5 * n + 1 + len(flat))]
        self.batch = library.Batch(
            n, len(spans), len(wanted), ctypes.addressof(self._spans), *starts, None, None
        )


class RowList:
    """Rows of a call in the making, sequence by sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self._orders: list[int] = []
        self._prefix: list[int] = []
        self._paths: list[Sequence[int]] = []
        self._spans: list[tuple[int, int]] = []
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
    ) -> None:
        """Rows of the sequence whose pages are listed at `table`; the rest as in `Rows`, `wanted`
        counted from its first row."""
        first = len(self.tokens)
        self.tokens += tokens
        self.positions += positions
        self._orders += orders
        self._prefix += prefix
        self._paths += paths
        self._spans.append((len(tokens), table))
        self.wanted += [first + row for row in wanted]

    def rows(self) -> Rows:
        """All of them."""
        return Rows(
            self.tokens,
            self.positions,
            self._orders,
            self._prefix,
            self._paths,
            self._spans,
            self.wanted,
        )


@functools.lru_cache(maxsize=256)
def plain_rows(n: int) -> Rows:
    """Rows of no sequence, for operations that look at numbers alone."""
    return Rows([0] * n, [0] * n)
