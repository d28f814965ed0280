"""What the kernels' operations work on: packed weights, and the rows of a call."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quickbeam.models.memory import room_for_weights
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels

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


class Packed:
    """A weight `[outputs, inputs]` in the kernels' layout, and its bias in float32.

    The layout is `[blocks][inputs / 2][16][2]` bfloat16, or `[blocks][inputs][16]` float32 with
    `dtype` float32. `weights`: one, or several that are
    stacked one below the other.

    `gated`: `weights` are two of the same shape, the gates and what the gates multiply. Blocks of
    16 outputs of the two alternate, gates first. `place`: the memory to use, a piece of a larger
    tensor with `size` numbers; None allocates it. `filled`: `place` holds the packed weight
    already. Raises `ValueError` for an odd number of inputs in bfloat16.
    """

    order = None  # of its inputs: their own

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        place: torch.Tensor | None = None,
        filled: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.inputs, self.dtype = weights[0].shape[1], dtype
        if self.inputs % 2 and dtype is torch.bfloat16:
            raise ValueError(f"{self.inputs} inputs: must be even")
        self.gated, self.outputs = gated, sum(len(weight) for weight in weights)
        self.format = library.FORMATS.index(str(dtype).removeprefix("torch."))
        self._kernels, block = kernels, self.inputs * BLOCK
        rows, together = (len(weights[0]), len(weights)) if gated else (self.outputs, 1)
        self.blocks = -(-rows // BLOCK) * together
        self.data = room_for_weights(self.blocks * block, dtype) if place is None else place
        parts = (
            list(weights) if gated or len(weights) == 1 or filled else [torch.cat(list(weights))]
        )
        for i, part in enumerate([] if filled else parts):
            part = part.detach().to(dtype).contiguous()
            if dtype is torch.float32:
                whole = torch.zeros(-(-rows // BLOCK) * BLOCK, self.inputs)
                whole[:rows] = part
                to = self.data.view(-1, together, self.inputs, BLOCK)[:, i]
                to.copy_(whole.view(-1, BLOCK, self.inputs).transpose(1, 2))
                continue
            kernels.pack(
                part.data_ptr(),
                rows,
                self.inputs,
                self.inputs,
                self.data.data_ptr() + 2 * i * block,
                block * together,
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
        """Return how many numbers these weights take when packed."""
        rows = (
            [len(weight) for weight in weights]
            if gated
            else [sum(len(weight) for weight in weights)]
        )
        return sum(-(-n // BLOCK) * BLOCK for n in rows) * weights[0].shape[1]

    def rows(self) -> torch.Tensor:
        """Return the weight as it came, `[outputs, inputs]`. Not for gated weights."""
        if self.dtype is torch.float32:
            blocks = self.data.view(self.blocks, self.inputs, BLOCK).transpose(1, 2)
            return blocks.reshape(-1, self.inputs)[: self.outputs].clone()
        weight = torch.empty(self.outputs, self.inputs, dtype=torch.bfloat16)
        self._kernels.unpack(
            self.data.data_ptr(), self.outputs, self.inputs, self.inputs * BLOCK, weight.data_ptr()
        )
        return weight


def gated_bias(bias: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Order the bias of a gated weight by blocks, as the weight is.

    `bias`: `[2 * rows]`, the gates' first. Returns `[blocks / 2, 2, 16]` float32, padded with
    zeros.
    """
    both = torch.zeros(2, blocks * BLOCK // 2)
    both[:, :rows] = bias.detach().float().view(2, rows)
    return both.view(2, -1, BLOCK).transpose(0, 1).contiguous()


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
