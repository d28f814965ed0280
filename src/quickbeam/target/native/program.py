"""Passes put together from the kernels' operations. `reference.py` says what each operation
computes, `operands.py` what they run on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quickbeam.target.native import library
from quickbeam.target.native.library import Kernels, Op
from quickbeam.target.native.operands import KVShape, PackedPart, Rows
from quickbeam.target.native.quantised import AnyPacked


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` numbers, float32 or bfloat16, by the number that operations know it by."""

    index: int
    width: int
    float32: bool = False


class Program:
    """A list of operations, run in one call. Buffers made here grow to the rows of a call; `given`
    ones are named by the caller each time."""

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

    def _add(
        self, kind: int, source: Buffer | None = None, target: Buffer | None = None, **fields: Any
    ) -> None:
        op = Op(kind=kind, source=-1, target=-1, best=-1, key=-1, value=-1)
        if source is not None:
            op.source, op.source_float, op.source_stride = (
                source.index,
                source.float32,
                source.width,
            )
        if target is not None:
            op.target, op.target_float, op.target_stride = (
                target.index,
                target.float32,
                target.width,
            )
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                self._keep.append(value)
                value = value.data_ptr()
            setattr(op, name, value)
        self._ops.append(op)
        self._table = None

    def embed(
        self, weight: torch.Tensor, target: Buffer, column: int = 0, scale: float = 1.0
    ) -> None:
        """Rows of `weight` (`[vocab, d]` bfloat16) of the tokens; `scale` where the target is
        float32."""
        self._add(
            library.EMBED,
            None,
            target,
            weight=weight,
            inputs=weight.shape[1],
            scaling=scale,
            target_offset=column,
        )

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
        """RMS norm of columns `of` on of the source, to columns `column` on of the target; of the
        wanted rows with `gather`."""
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
        packed: AnyPacked | PackedPart,
        source: Buffer,
        target: Buffer,
        epilogue: int = library.STORE,
        *,
        of: int = 0,
        column: int = 0,
        gathered: bool = False,
        best: Buffer | None = None,
    ) -> None:
        """A product, and what comes after it: `STORE`, `ADD` (to a float32 target), `GATED` (silu
        of the gate times the rest), `ACTIVATE` (silu) or `BEST` (stored, and the place of each
        row's largest in `best`, int64)."""
        self._keep.append(packed)
        self._add(
            library.LINEAR,
            source,
            target,
            weight=packed.data,
            bias=packed.bias,
            inputs=packed.inputs,
            outputs=packed.outputs,
            format=packed.format,
            epilogue=epilogue,
            source_offset=of,
            target_offset=column,
            wanted=2 * int(gathered),
            best=-1 if best is None else best.index,
        )
        if packed.gated != (epilogue == library.GATED):
            raise ValueError("gated weights and the epilogue GATED go together")

    def chosen(self, packed: AnyPacked, source: Buffer, target: Buffer) -> None:
        """A product with the blocks of outputs that the call names, side by side in the target
        (`set` its `target_stride` first). Outputs of the weight are a multiple of `BLOCK`."""
        self._keep.append(packed)
        self._add(
            library.CHOSEN,
            source,
            target,
            weight=packed.data,
            bias=packed.bias,
            inputs=packed.inputs,
            outputs=packed.outputs,
            format=packed.format,
        )

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
        """Queries, keys and values side by side: norms of queries and keys where there are any,
        rotary angles, keys and values to their pages."""
        query_norm, key_norm = (
            (None, None)
            if norms is None
            else (norm.detach().to(torch.bfloat16).contiguous() for norm in norms)
        )
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
        self,
        query: Buffer,
        key: Buffer,
        value: Buffer,
        target: Buffer,
        heads: int,
        shape: KVShape,
        offset: int,
        strides: Mapping[str, int],
    ) -> None:
        """The same for bfloat16 heads that come apart and turned; `strides`: `query_stride`,
        `key_stride`, `key_head`, `value_stride`, `value_head` in numbers."""
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

    def copy(
        self,
        source: Buffer,
        target: Buffer,
        *,
        width: int | None = None,
        of: int = 0,
        column: int = 0,
        add: bool = False,
    ) -> None:
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
        """`angles`: cosine and sine by position, `[positions, half]` float32 each; `blocks`: int64
        numpy array for `chosen`."""
        self.prepare(rows, given, angles, blocks)(0, len(self._ops))

    def prepare(
        self,
        rows: Rows,
        given: Mapping[str, torch.Tensor] | None = None,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        blocks: Any = None,
    ) -> Callable[[int, int], None]:
        """What `run` does, some operations at a time: the result takes the first of them and the
        one after the last."""
        if self._table is None or rows.rows > self._capacity:
            self._prepare(rows.rows)
        for name, tensor in (given or {}).items():
            self._table[self._names[name]] = tensor.data_ptr()
        if angles is not None:
            rows.batch.cosine, rows.batch.sine = angles[0].data_ptr(), angles[1].data_ptr()
        call = library.Call(rows.batch, ctypes.addressof(self._table))
        if blocks is not None:
            call.block, call.blocks = blocks.ctypes.data, len(blocks)
        at, size = ctypes.addressof(self._list), ctypes.sizeof(Op)

        def some(first: int, last: int) -> None:
            if last > first:
                self.kernels.run(
                    at + first * size, last - first, ctypes.byref(call), torch.get_num_threads()
                )

        return some

    @property
    def operations(self) -> int:
        """How many there are."""
        return len(self._ops)

    def places(self, kinds: Collection[int]) -> dict[int, int]:
        """By the number of an operation of these kinds: its number in their `subset`."""
        kept = [i for i, op in enumerate(self._ops) if op.kind in kinds]
        return {operation: place for place, operation in enumerate(kept)}

    def subset(self, kinds: Collection[int]) -> Program:
        """The operations of these kinds alone, on the same weights and on buffers of their own:
        what comes out means nothing, but it takes the time that they take."""
        part = Program(self.kernels)
        part._ops = [Op.from_buffer_copy(op) for op in self._ops if op.kind in kinds]
        part._widths, part._owned = list(self._widths), [None] * len(self._owned)
        part._names, part._keep = dict(self._names), list(self._keep)
        return part

    def set(self, operation: int, **fields: int) -> None:
        """Change an operation's fields for the next calls: strides that depend on the number of
        rows."""
        for name, value in fields.items():
            setattr(self._ops[operation], name, value)
            if self._table is not None:
                setattr(self._list[operation], name, value)

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
