"""Passes that are put together from the kernels' operations.

`tests/reference.py` says what each operation computes, `operands.py` what it works on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels, Op
from quickbeam.models.native.operands import KVShape, RowList
from quickbeam.models.native.quantised import BlockRows, Packed, SplitPacked, Weight


def in_float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the numbers as operations read them, one after the other in float32."""
    return None if tensor is None else tensor.detach().float().contiguous()


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` numbers, float32 or bfloat16.

    `index`: the number by which operations name the buffer.
    """

    index: int
    width: int
    float32: bool = False


class Program:
    """A list of operations that run in one call.

    Buffers made by `buffer` belong to the program and grow to the rows of a call. For buffers made
    by `given`, the caller passes tensors in each call. The methods named after an operation append
    it to the list. In them, `of` is the first column of the source and `column` the first column of
    the target; `fields` are further ones of `Op`.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.ops: list[Op] = []
        self._table: Any = None
        self._widths: list[tuple[int, torch.dtype] | None] = []
        self._owned = dict[int, torch.Tensor]()
        self._names, self._shared = dict[str, int](), dict[str, int]()  # given, and named ones
        self._capacity = 0
        self._keep: list[Any] = []  # what operations hold addresses of

    def buffer(self, width: int, float32: bool = False, name: str = "") -> Buffer:
        """Make a buffer of rows that operations pass on to later ones.

        Buffers of the same `name`, which are of one format, lie in the same memory.
        """
        index, dtype = self._shared.get(name), torch.float32 if float32 else torch.bfloat16
        if index is None:
            self._widths.append((width, dtype))
            index = len(self._widths) - 1
            if name:
                self._shared[name] = index
        elif (held := self._widths[index]) is not None:
            assert held[1] is dtype, f"buffer {name!r} is of two formats"
            self._widths[index] = max(width, held[0]), dtype
        return Buffer(index, width, float32)

    def given(self, name: str, width: int, float32: bool = False) -> Buffer:
        """Make a buffer whose rows each call brings along under this name."""
        self._names[name] = len(self._widths)
        self._widths.append(None)
        return Buffer(self._names[name], width, float32)

    def add(
        self, kind: int, source: Buffer | None = None, target: Buffer | None = None, **fields: Any
    ) -> None:
        """Append an operation. `fields`: of `Op`; those that are None are left out.

        In place of a tensor or a structure its address is taken, and it is kept; in place of a
        buffer its number; in place of the name of an activation that one's."""
        op = Op(kind=kind, source=-1, target=-1, best=-1, key=-1, value=-1, scaling=1.0)
        if source is not None:
            op.source, op.source_stride, op.source_float = astuple(source)
        if target is not None:
            op.target, op.target_stride, op.target_float = astuple(target)
        for name, value in fields.items():
            assert hasattr(op, name), name
            if isinstance(value, Buffer):
                value = value.index
            elif isinstance(value, str):
                value = library.ACTIVATIONS.index(value)
            elif isinstance(value, torch.Tensor):
                self._keep.append(value)
                value = value.data_ptr()
            elif isinstance(value, ctypes.Structure):
                self._keep.append(value)
                value = ctypes.addressof(value)
            if value is not None:
                setattr(op, name, value)
        self.ops.append(op)
        self._table = None

    def embed(self, weight: Weight, target: Buffer, scale: float = 1.0, add: bool = False) -> None:
        """Write the tokens' rows of `weight` (`[vocab, d]` bfloat16 or blocks) to the target.

        A float32 target gets them times `scale`; a bfloat16 one gets them as they are. `weight` may
        be float32 where the target is. `add`: add those of the tokens' positions.
        """
        stored: dict[str, Any] = {"weight": weight}
        if isinstance(weight, BlockRows):
            stored = {"weight": weight.data, "format": library.FORMATS[weight.name].number}
        elif weight.dtype is torch.float32:
            stored["source_float"] = True
        epilogue = library.ADD if add else library.STORE
        stored |= {"inputs": weight.shape[1], "scaling": scale, "epilogue": epilogue}
        self.add(library.EMBED, None, target, **stored)

    def norm(
        self,
        source: Buffer,
        target: Buffer,
        weight: torch.Tensor | None,
        epsilon: float,
        *,
        bias: torch.Tensor | None = None,
        centred: bool = False,
        width: int | None = None,
        of: int = 0,
        column: int = 0,
        gather: bool = False,
        add: float | None = None,
    ) -> None:
        """RMS norm of `width` columns of the source (all if None), with `weight` `[width]` or none.

        `centred`: a layer norm. `gather`: only of the wanted rows. `add`: times this, added to a
        float32 target.
        """
        self.add(
            library.NORM,
            source,
            target,
            weight=in_float32(weight),
            bias=in_float32(bias),
            centred=centred,
            inputs=width or source.width,
            epsilon=epsilon,
            source_offset=of,
            target_offset=column,
            wanted=int(gather),
            epilogue=library.STORE if add is None else library.ADD,
            scaling=add,
        )

    def linear(
        self,
        packed: Packed | SplitPacked,
        source: Buffer,
        target: Buffer,
        epilogue: int = library.STORE,
        *,
        of: int = 0,
        column: int = 0,
        gathered: bool = False,
        **fields: Any,
    ) -> None:
        """A product with a weight, and an epilogue.

        The epilogue is `STORE`, `ADD` (to a float32 target), `GATED` (`activation` of the gate
        times `scaling`, times the rest), `ACTIVATE` or `BEST` (the result is stored, and the column
        of each row's largest number goes to the buffer `best`, int64). All but `GATED` take the
        result times `scaling`, and bent to stay below `softcap`. `fields`: these four, as needed.

        The source is float32 for float32 weights, else bfloat16. `gathered`: the source holds only
        the wanted rows, in their order. Weights of several formats are multiplied one after the
        other; they take no `best`.
        """
        assert packed.gated == (epilogue == library.GATED)
        if isinstance(packed, SplitPacked):
            if packed.gated:
                gates, rest = (self.buffer(part.outputs, True) for part in packed.parts)
                for part, made in zip(packed.parts, (gates, rest), strict=True):
                    self.linear(part, source, made)
                self.gate(rest, gates, target, 1, rest.width, **fields)
                return
            how: dict[str, Any] = {"of": of, "gathered": gathered, **fields}
            for part in packed.parts:
                self.linear(part, source, target, epilogue, column=column, **how)
                column += part.outputs
            return
        wanted = 2 * int(gathered)
        if packed.order is not None:
            source, of = self._reordered(packed.order, source, of, wanted), 0
        fields |= {"source_offset": of, "target_offset": column, "wanted": wanted}
        self._product(library.LINEAR, packed, source, target, epilogue=epilogue, **fields)

    def chosen(self, packed: Packed, source: Buffer, target: Buffer) -> None:
        """A product with only those blocks of outputs that the call names (`blocks` of `run`).

        Their results stand side by side in the target, whose `target_stride` has to be `set` first.
        The weight's outputs are a multiple of `BLOCK`.
        """
        if packed.order is not None:
            source = self._reordered(packed.order, source)
        self._product(library.CHOSEN, packed, source, target)

    def _product(
        self, kind: int, packed: Packed, source: Buffer, target: Buffer, **fields: Any
    ) -> None:
        fields |= {"inputs": packed.inputs, "outputs": packed.outputs, "format": packed.format}
        self.add(kind, source, target, weight=packed.data, bias=packed.bias, **fields)

    def _reordered(
        self, order: torch.Tensor, source: Buffer, of: int = 0, wanted: int = 0
    ) -> Buffer:
        """Return a buffer of the bfloat16 source's columns `of + order[i]`."""
        target = self.buffer(len(order))
        fields = {"weight": order, "inputs": len(order), "source_offset": of, "wanted": wanted}
        self.add(library.REORDER, source, target, **fields)
        return target

    def gate(
        self,
        source: Buffer,
        gates: Buffer,
        target: Buffer,
        groups: int,
        width: int,
        *,
        of: int = 0,
        gates_of: int = 0,
        weight: torch.Tensor | None = None,
        one: bool = False,
        **fields: Any,
    ) -> None:
        """Write `activation(gates * scaling) * source` to the target.

        There are `groups` of `width` columns. `weight`: of an RMS norm of each group with
        `epsilon`, before the gates or with `norm_last` after them; `[width]`, or `[groups *
        width]`. `gates_of`: the first column of the gates, float32. `one`: each group has one gate.
        """
        self.add(
            library.GATE,
            source,
            target,
            key=gates,
            key_stride=gates.width,
            key_head=gates_of,
            heads=groups,
            inputs=width,
            outputs=1 if one else width,
            source_offset=of,
            weight=in_float32(weight),
            norm_stride=0 if weight is None or weight.numel() == width else width,
            **fields,
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
        *,
        rotary: int | None = None,
        query_scale: int | None = None,
        **fields: Any,
    ) -> None:
        """Take apart queries, keys and values that stand side by side in the source.

        Queries and keys are normed if there are `norms` (of a head's width, or of all heads'), then
        rotary angles are applied to them; with `norm_last` the other way round. Queries go to
        `query`, keys and values to their pages; both are in the query's format. `offset`: of the
        layer in a page, in numbers. `rotary`: how many dimensions turn, all if None. `query_scale`:
        the column of the cosines that holds a factor of the queries.

        `fields`: `centred`, layer norms. `angles`, where the layer's angles begin in the rows of
        `run`'s. `interleaved`, dimensions 2i and 2i + 1 turn together. `value_norm`, values are
        normed, without a weight. A source may have no values (`values_are_keys`), or queries alone:
        `shape` is another's (`borrowed`).
        """
        query_norm, key_norm = (None, None) if norms is None else map(in_float32, norms)
        own = query_norm is not None and query_norm.numel() > shape.key_dim
        self.add(
            library.HEADS,
            source,
            query,
            heads=heads,
            **shape.fields(offset),
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=epsilon,
            norm_stride=shape.key_dim if own else 0,
            rotary=shape.key_dim if rotary is None else rotary,
            query_scale=0 if query_scale is None else query_scale + 1,
            **fields,
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
        bidirectional: bool = False,
    ) -> None:
        """Attention of every row over what it sees.

        It follows `heads` or `latent` of the same layer. `window`: how many of the last tokens
        count, None for all. `softcap`: None for none. `sinks`: `[heads]`. `bidirectional`: rows of
        a sequence see one another, and have no paths; windows begin where they do without that.
        """
        how: dict[str, Any] = {"heads": heads, "scaling": scaling, "window": window}
        how |= {"softcap": softcap, "sinks": in_float32(sinks), "bidirectional": bidirectional}
        self.add(library.ATTEND, query, target, **how, **shape.fields(offset))

    def copy(
        self,
        source: Buffer,
        target: Buffer,
        *,
        column: int = 0,
        add: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Copy the source, times `scale`, to the target, or `add` it to what the target holds."""
        epilogue = library.ADD if add else library.STORE
        how = {"inputs": source.width, "target_offset": column, "epilogue": epilogue}
        self.add(library.COPY, source, target, **how, scaling=scale)

    def run(self, *call: Any, **more: Any) -> None:
        """Run all operations. The arguments are those of `prepare`."""
        self.prepare(*call, **more)(0, len(self.ops))

    def prepare(
        self,
        rows: RowList,
        given: Mapping[str, torch.Tensor] | None = None,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        blocks: Any = None,
    ) -> Callable[[int, int], None]:
        """Prepare a run whose operations are called some at a time.

        `given`: a tensor for each buffer of that kind, by name. `angles`: cosine and sine by
        position, `[positions, columns]` float32 each. `blocks`: int64 numpy array for `chosen`.
        Returns a function that takes the first of the operations to run and the one after the last.
        """
        if self._table is None or len(rows) > self._capacity:
            self._prepare(len(rows))
        for name, tensor in (given or {}).items():
            self._table[self._names[name]] = tensor.data_ptr()
        if angles is not None:
            rows.batch.cosine, rows.batch.sine = angles[0].data_ptr(), angles[1].data_ptr()
            rows.batch.angle_stride = angles[0].shape[1]
        call = library.Call(rows.batch, ctypes.addressof(self._table))
        if blocks is not None:
            call.block, call.blocks = blocks.ctypes.data, len(blocks)
        at, size = ctypes.addressof(self._list), ctypes.sizeof(Op)
        kernels, threads = self.kernels, torch.get_num_threads()

        def some(first: int, last: int) -> None:
            if last > first:
                kernels.run(at + first * size, last - first, ctypes.byref(call), threads)

        return some

    def address(self, buffer: int) -> int:
        """Return where a buffer's rows of the last call are, by the buffer's number."""
        return int(self._table[buffer])

    def set(self, operation: int, **fields: int) -> None:
        """Change an operation's fields, as strides that depend on the rows, for the next calls."""
        for name, value in fields.items():
            setattr(self.ops[operation], name, value)
            if self._table is not None:
                setattr(self._list[operation], name, value)

    def _prepare(self, rows: int) -> None:
        self._capacity = max(self._capacity, -(-rows // 16) * 16)
        self._table = (ctypes.c_void_p * len(self._widths))()
        for i, made in enumerate(self._widths):
            if made is None:
                continue
            width, dtype = made
            if i not in self._owned or self._owned[i].numel() < self._capacity * width:
                self._owned[i] = torch.zeros(self._capacity * width, dtype=dtype)
            self._table[i] = self._owned[i].data_ptr()
        self._list = (Op * len(self.ops))(*self.ops)
