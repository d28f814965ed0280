"""Passes put together from the kernels' operations, and what they run on: packed weights, batches of rows, pages of keys and values.

`reference.py` says what each operation computes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.target.native import library
from quickbeam.target.native.library import Kernels, Op

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
    """A weight `[outputs, inputs]` in the kernels' layout, `[blocks][inputs / 2][16][2]` bfloat16, and its bias in float32.

    `gated`: two weights of the same shape, blocks of 16 outputs in turn: gates, then what they let through. `place`: where to put it, a
    piece of a larger tensor of `size` numbers; its own where None. Raises `ValueError` for an odd number of inputs.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        place: torch.Tensor | None = None,
    ) -> None:
        self.inputs = weights[0].shape[1]
        if self.inputs % 2:
            raise ValueError(f"{self.inputs} inputs: must be even")
        self.gated, self.outputs = gated, sum(len(weight) for weight in weights)
        self._kernels, block = kernels, self.inputs * BLOCK
        if gated or len(weights) == 1:
            parts, rows = list(weights), len(weights[0])
        else:
            parts, rows = [torch.cat(list(weights))], self.outputs
        self.blocks = -(-rows // BLOCK) * len(parts)
        self.data = torch.empty(self.blocks * block, dtype=torch.bfloat16) if place is None else place
        for i, part in enumerate(parts):
            part = part.detach().to(torch.bfloat16).contiguous()
            kernels.pack(part.data_ptr(), rows, self.inputs, self.inputs, self.data.data_ptr() + 2 * i * block, block * len(parts))
        self.bias: torch.Tensor | None = None
        if bias is not None:
            self.bias = bias.detach().float().contiguous()
            if gated:  # by block, as the weights are
                both = torch.zeros(2, self.blocks * BLOCK // 2)
                both[:, :rows] = self.bias.view(2, rows)
                self.bias = both.view(2, -1, BLOCK).transpose(0, 1).contiguous()

    @staticmethod
    def size(weights: Sequence[torch.Tensor], gated: bool = False) -> int:
        """Numbers that these take."""
        rows = [len(weight) for weight in weights] if gated else [sum(len(weight) for weight in weights)]
        return sum(-(-n // BLOCK) * BLOCK for n in rows) * weights[0].shape[1]

    def rows(self) -> torch.Tensor:
        """`[outputs, inputs]` bfloat16, as it came; not for gated ones."""
        weight = torch.empty(self.outputs, self.inputs, dtype=torch.bfloat16)
        self._kernels.unpack(self.data.data_ptr(), self.outputs, self.inputs, self.inputs * BLOCK, weight.data_ptr())
        return weight


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` numbers, float32 or bfloat16, by the number that operations know it by."""

    index: int
    width: int
    float32: bool = False


class Rows:
    """The rows of one call: tokens of several sequences side by side.

    `tokens`, `positions`, `orders`, `prefix`: by row, see attention.h; `paths`: by row, the orders of the draft tree that it sees, itself
    last; none for a row that sees the orders below its prefix alone. `spans`: (rows, address of the page table) of each sequence.
    `wanted`: the rows that a head is asked about.
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
        self.rows, n = len(tokens), len(tokens)
        ends, flat = [0], list[int]()
        for path in paths:
            flat += path
            ends.append(len(flat))
        if not paths:
            ends = [0] * (n + 1)
        numbers = [*tokens, *positions, *(orders or [0] * n), *(prefix or [0] * n), *ends, *flat, *wanted]
        self._numbers = np.array(numbers, dtype=np.int64)
        first = 0
        self._spans = (library.Span * max(1, len(spans)))()
        for span, (rows, pages) in zip(self._spans, spans, strict=False):
            span.row, span.rows, span.pages, first = first, rows, pages, first + rows
        at = self._numbers.ctypes.data
        starts = [at + 8 * k for k in (0, n, 2 * n, 3 * n, 4 * n, 5 * n + 1, 5 * n + 1 + len(flat))]
        self.batch = library.Batch(n, len(spans), len(wanted), ctypes.addressof(self._spans), *starts, None, None)


@functools.lru_cache(maxsize=256)
def plain_rows(n: int) -> Rows:
    """Rows of no sequence, for operations that look at numbers alone."""
    return Rows([0] * n, [0] * n)


class Program:
    """A list of operations, run in one call. Buffers made here grow to the rows of a call; `given` ones are named by the caller each
    time."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._ops: list[Op] = []
        self._table: Any = None
        self._widths: list[tuple[int, torch.dtype] | None] = []
        self._owned: list[torch.Tensor | None] = []
        self._names: dict[str, int] = {}
        self._capacity = 0
        self._keep: list[Any] = []  # what operations point to

    def buffer(self, width: int, float32: bool = False) -> Buffer:
        """Rows that live from operation to operation."""
        self._widths.append((width, torch.float32 if float32 else torch.bfloat16))
        self._owned.append(None)
        return Buffer(len(self._owned) - 1, width, float32)

    def given(self, name: str, width: int, float32: bool = False) -> Buffer:
        """Rows that each call brings along, by this name."""
        self._widths.append(None)
        self._owned.append(None)
        self._names[name] = len(self._owned) - 1
        return Buffer(len(self._owned) - 1, width, float32)

    def _add(self, kind: int, source: Buffer | None = None, target: Buffer | None = None, **fields: Any) -> None:
        op = Op(kind=kind, source=-1, target=-1, best=-1, key=-1, value=-1)
        if source is not None:
            op.source, op.source_float, op.source_stride = source.index, source.float32, source.width
        if target is not None:
            op.target, op.target_float, op.target_stride = target.index, target.float32, target.width
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                self._keep.append(value)
                value = value.data_ptr()
            setattr(op, name, value)
        self._ops.append(op)
        self._table = None

    def embed(self, weight: torch.Tensor, target: Buffer, column: int = 0, scale: float = 1.0) -> None:
        """Rows of `weight` (`[vocab, d]` bfloat16) of the tokens; `scale` where the target is float32."""
        self._add(library.EMBED, None, target, weight=weight, inputs=weight.shape[1], scaling=scale, target_offset=column)

    def norm(
        self,
        source: Buffer,
        target: Buffer,
        weight: torch.Tensor | None,
        epsilon: float,
        *,
        width: int | None = None,
        of: int = 0,
        column: int = 0,
        gather: bool = False,
    ) -> None:
        """RMS norm of columns `of` on of the source, to columns `column` on of the target; of the wanted rows with `gather`."""
        if weight is not None:
            weight = weight.detach().to(torch.bfloat16).contiguous()
        self._add(
            library.NORM,
            source,
            target,
            weight=weight,
            inputs=width or source.width,
            epsilon=epsilon,
            source_offset=of,
            target_offset=column,
            wanted=int(gather),
        )

    def linear(
        self,
        packed: Packed,
        source: Buffer,
        target: Buffer,
        epilogue: int = library.STORE,
        *,
        of: int = 0,
        column: int = 0,
        gathered: bool = False,
        best: Buffer | None = None,
    ) -> None:
        """A product, and what comes after it: `STORE`, `ADD` (to a float32 target), `GATED` (silu of the gate times the rest),
        `ACTIVATE` (silu)
        or `BEST` (stored, and the place of each row's largest in `best`, int64)."""
        self._keep.append(packed)
        self._add(
            library.LINEAR,
            source,
            target,
            weight=packed.data,
            bias=packed.bias,
            inputs=packed.inputs,
            outputs=packed.outputs,
            epilogue=epilogue,
            source_offset=of,
            target_offset=column,
            wanted=2 * int(gathered),
            best=-1 if best is None else best.index,
        )
        if packed.gated != (epilogue == library.GATED):
            raise ValueError("gated weights and the epilogue GATED go together")

    def chosen(self, packed: Packed, source: Buffer, target: Buffer) -> None:
        """A product with the blocks of outputs that the call names, side by side in the target (`set` its `target_stride` first).
        Outputs of the
        weight are a multiple of `BLOCK`."""
        self._keep.append(packed)
        self._add(library.CHOSEN, source, target, weight=packed.data, bias=packed.bias, inputs=packed.inputs, outputs=packed.outputs)

    def heads(
        self,
        source: Buffer,
        query: Buffer,
        heads: int,
        shape: KVShape,
        offset: int,
        norms: Sequence[torch.Tensor] | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Queries, keys and values side by side: norms of queries and keys where there are any, rotary angles, keys and values to their
        pages."""
        query_norm, key_norm = (None, None) if norms is None else (norm.detach().to(torch.bfloat16).contiguous() for norm in norms)
        self._add(
            library.HEADS,
            source,
            query,
            heads=heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.key_dim,
            value_dim=shape.value_dim,
            offset=offset,
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=epsilon,
        )

    def split(
        self, query: Buffer, key: Buffer, value: Buffer, target: Buffer, heads: int, shape: KVShape, offset: int, strides: Mapping[str, int]
    ) -> None:
        """The same for bfloat16 heads that come apart and turned; `strides`: `query_stride`, `key_stride`, `key_head`, `value_stride`,
        `value_head` in numbers."""
        self._add(
            library.SPLIT,
            query,
            target,
            key=key.index,
            value=value.index,
            heads=heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.key_dim,
            value_dim=shape.value_dim,
            offset=offset,
            **strides,
        )

    def attend(
        self,
        query: Buffer,
        target: Buffer,
        heads: int,
        shape: KVShape,
        offset: int,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attention of every row over what it sees, after `heads` or `split` of the same layer."""
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        self._add(
            library.ATTEND,
            query,
            target,
            heads=heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.key_dim,
            value_dim=shape.value_dim,
            offset=offset,
            scaling=scaling,
            window=window or 0,
            softcap=softcap or 0.0,
            sinks=sinks,
        )

    def copy(self, source: Buffer, target: Buffer, *, width: int | None = None, of: int = 0, column: int = 0, add: bool = False) -> None:
        """Columns of the source to columns of the target, added to what is there with `add`."""
        self._add(
            library.COPY,
            source,
            target,
            inputs=width or source.width,
            source_offset=of,
            target_offset=column,
            epilogue=library.ADD if add else library.STORE,
        )

    def run(
        self,
        rows: Rows,
        given: Mapping[str, torch.Tensor] | None = None,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        blocks: Any = None,
    ) -> None:
        """`angles`: cosine and sine by position, `[positions, half]` float32 each; `blocks`: int64 numpy array for `chosen`."""
        if self._table is None or rows.rows > self._capacity:
            self._prepare(rows.rows)
        for name, tensor in (given or {}).items():
            self._table[self._names[name]] = tensor.data_ptr()
        if angles is not None:
            rows.batch.cosine, rows.batch.sine = angles[0].data_ptr(), angles[1].data_ptr()
        call = library.Call(rows.batch, ctypes.addressof(self._table))
        if blocks is not None:
            call.block, call.blocks = blocks.ctypes.data, len(blocks)
        self.kernels.run(self._list, len(self._ops), ctypes.byref(call), torch.get_num_threads())

    def subset(self, kinds: Collection[int]) -> Program:
        """The operations of these kinds alone, on the same weights and on buffers of their own: what comes out means nothing, but it takes
        the time that they take."""
        part = Program(self.kernels)
        part._ops = [Op.from_buffer_copy(op) for op in self._ops if op.kind in kinds]
        part._widths, part._owned = list(self._widths), [None] * len(self._owned)
        part._names, part._keep = dict(self._names), list(self._keep)
        return part

    def set(self, operation: int, **fields: int) -> None:
        """Change an operation's fields for the next calls: strides that depend on the number of rows."""
        for name, value in fields.items():
            setattr(self._ops[operation], name, value)
            if self._table is not None:
                setattr(self._list[operation], name, value)

    def owned(self, buffer: Buffer, rows: int) -> torch.Tensor:
        """`[rows, width]`: what a buffer made here holds after a call; the next one writes over it."""
        tensor = self._owned[buffer.index]
        assert tensor is not None
        return tensor[: rows * buffer.width].view(rows, buffer.width)

    def _prepare(self, rows: int) -> None:
        self._capacity = max(self._capacity, -(-rows // 16) * 16)
        self._table = (ctypes.c_void_p * len(self._owned))()
        for i, made in enumerate(self._widths):
            if made is None:
                continue
            width, dtype = made
            held = self._owned[i]
            if held is None or held.numel() < self._capacity * width:
                held = self._owned[i] = torch.zeros(self._capacity * width, dtype=dtype)
            self._table[i] = held.data_ptr()
        self._list = (Op * len(self._ops))(*self._ops)
