"""Passes that are put together from the kernels' operations.

`tests/reference.py` says what each operation computes, `operands.py` what it works on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.models.native import library
from quickbeam.models.native.grids import grid_of
from quickbeam.models.native.library import Kernels, Op
from quickbeam.models.native.operands import KVShape, RowList
from quickbeam.models.native.quantised import BlockRows, Packed, SplitPacked, Weight

ROW_STEP = 16  # buffers grow by so many rows


def in_float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the elements as operations read them, one after the other in float32."""
    return None if tensor is None else tensor.detach().float().contiguous()


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` elements, float32 or bfloat16.

    `index`: the number by which operations name the buffer.
    """

    index: int
    width: int
    float32: bool = False


class BufferFormat(NamedTuple):
    """What a buffer's row needs: `width` elements of `dtype`."""

    width: int
    dtype: torch.dtype


class Program:
    """A list of operations that run in one call.

    Buffers made by `buffer` belong to the program and grow to the rows of a call. For buffers made
    by `external`, each call brings tensors.

    Each method named after an operation appends it to the list. In these methods, `source_column`
    is the first column of the source and `column` the first column of the target.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.ops: list[Op] = []
        self._formats: list[BufferFormat | None] = []  # by index; None: a call brings the tensor
        self._tensors = dict[int, torch.Tensor]()  # the program's own, by index
        self._index_of_external = dict[str, int]()
        self._index_of_shared = dict[str, int]()
        self._capacity = 0  # rows of the program's own tensors
        self._addresses: Any = None  # of all buffers, by index
        self._op_array: Any = None
        self._referenced: list[Any] = []  # what operations hold addresses of

    def buffer(self, width: int, float32: bool = False, name: str = "") -> Buffer:
        """Make a buffer of rows that operations pass on to later ones.

        Buffers of the same `name`, which are of one format, lie in the same memory.
        """
        dtype = torch.float32 if float32 else torch.bfloat16
        index = self._index_of_shared.get(name)
        if index is None:
            index = len(self._formats)
            self._formats.append(BufferFormat(width, dtype))
            if name:
                self._index_of_shared[name] = index
            return Buffer(index, width, float32)
        shared = self._formats[index]
        assert shared is not None
        assert shared.dtype is dtype, f"buffer {name!r} is of two formats"
        self._formats[index] = BufferFormat(max(width, shared.width), dtype)
        return Buffer(index, width, float32)

    def external(self, name: str, width: int, float32: bool = False) -> Buffer:
        """Make a buffer whose rows each call brings along under this name."""
        index = len(self._formats)
        self._index_of_external[name] = index
        self._formats.append(None)
        return Buffer(index, width, float32)

    def _append(
        self, kind: int, source: Buffer | None, target: Buffer | None, **fields: Any
    ) -> None:
        """Append an operation. `fields`: of `Op`; those that are None are left out.

        A tensor or a structure stands for its address, and is kept alive. A buffer stands for its
        index.
        """
        op = Op(kind=kind, source=-1, target=-1, best=-1, key=-1, value=-1, scaling=1.0)
        if source is not None:
            op.source = source.index
            op.source_stride = source.width
            op.source_float = source.float32
        if target is not None:
            op.target = target.index
            op.target_stride = target.width
            op.target_float = target.float32
        for name, value in fields.items():
            assert hasattr(op, name), name
            if value is not None:
                setattr(op, name, self._as_number(value))
        self.ops.append(op)
        self._addresses = None

    def _as_number(self, value: Any) -> Any:
        if isinstance(value, Buffer):
            return value.index
        if isinstance(value, torch.Tensor):
            self._referenced.append(value)
            return value.data_ptr()
        if isinstance(value, ctypes.Structure):
            self._referenced.append(value)
            return ctypes.addressof(value)
        return value

    # --- operations ---

    def embed(
        self,
        weight: Weight,
        target: Buffer,
        scale: float = 1.0,
        add: bool = False,
        given: Buffer | None = None,
    ) -> None:
        """Write the tokens' rows of `weight` (`[vocab, d]` bfloat16 or blocks) to the target.

        A float32 target gets them times `scale`; a bfloat16 one gets them as they are. `weight` may
        be float32 where the target is. `add`: add those of the tokens' positions. `given`: int64,
        the addresses of float32 rows that a float32 target gets in place of the tokens' rows, 0 for
        none; a call without any brings an empty tensor.
        """
        in_blocks = isinstance(weight, BlockRows)
        self._append(
            library.EMBED,
            given,
            target,
            weight=weight.data,
            format=library.FORMATS[weight.name].number if isinstance(weight, BlockRows) else None,
            grid=grid_of(weight.name) if isinstance(weight, BlockRows) else None,
            source_float=None if in_blocks else weight.data.dtype is torch.float32,
            inputs=weight.shape[1],
            scaling=scale,
            epilogue=library.ADD if add else library.STORE,
        )

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
        source_column: int = 0,
        column: int = 0,
        gather: bool = False,
        add: float | None = None,
    ) -> None:
        """RMS norm of `width` columns of the source (all if None), with `weight` `[width]` or none.

        `centred`: a layer norm. `gather`: only of the wanted rows. `add`: the result times this is
        added to a float32 target.
        """
        self._append(
            library.NORM,
            source,
            target,
            weight=in_float32(weight),
            bias=in_float32(bias),
            centred=centred,
            inputs=width or source.width,
            epsilon=epsilon,
            source_offset=source_column,
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
        source_column: int = 0,
        column: int = 0,
        gathered: bool = False,
        activation: str | None = None,
        scaling: float = 1.0,
        softcap: float | None = None,
        best: Buffer | None = None,
    ) -> None:
        """A product with a weight, and an epilogue.

        The epilogue is `STORE`, `ADD` (to a float32 target), `GATED` (`activation` of the gate
        times `scaling`, times the up projection), `ACTIVATE` or `BEST` (the result is stored, and
        the column of each row's largest element goes to the buffer `best`, int64). All but `GATED`
        take the result times `scaling`, and soft-capped by `softcap`. For the activation `xielu`,
        these are its factors a and c (`stack.Xielu`).

        The source is float32 for float32 weights, else bfloat16. `gathered`: the source holds only
        the wanted rows, one after the other. Weights of several formats are multiplied one after
        the other; they take no `best`.
        """
        assert packed.gated == (epilogue == library.GATED)
        if isinstance(packed, SplitPacked) and packed.gated:
            gate, up = packed.parts
            gates, ups = self.buffer(gate.outputs, True), self.buffer(up.outputs, True)
            self.linear(gate, source, gates)
            self.linear(up, source, ups)
            self.gate(
                ups, gates, target, 1, ups.width, activation=activation or "silu", scaling=scaling
            )
            return
        if isinstance(packed, SplitPacked):
            for part in packed.parts:
                self.linear(
                    part,
                    source,
                    target,
                    epilogue,
                    source_column=source_column,
                    column=column,
                    gathered=gathered,
                    activation=activation,
                    scaling=scaling,
                    softcap=softcap,
                )
                column += part.outputs
            return
        wanted = 2 * int(gathered)
        if packed.input_order is not None:
            source = self._reordered(packed.input_order, source, source_column, wanted)
            source_column = 0
        self._product(
            library.LINEAR,
            packed,
            source,
            target,
            epilogue=epilogue,
            source_offset=source_column,
            target_offset=column,
            wanted=wanted,
            activation=_activation(activation),
            scaling=scaling,
            softcap=softcap,
            best=best,
        )

    def selected_blocks(self, packed: Packed, source: Buffer, target: Buffer) -> None:
        """A product with only those blocks of outputs that the call names (`blocks` of `run`).

        Their results stand side by side in the target, whose `target_stride` has to be `set` first.
        The weight's outputs are a multiple of `BLOCK`.
        """
        if packed.input_order is not None:
            source = self._reordered(packed.input_order, source)
        self._product(library.SELECTED, packed, source, target)

    def _product(
        self, kind: int, packed: Packed, source: Buffer, target: Buffer, **fields: Any
    ) -> None:
        self._append(
            kind,
            source,
            target,
            weight=packed.data,
            bias=packed.bias,
            inputs=packed.inputs,
            outputs=packed.outputs,
            format=packed.format,
            **fields,
        )

    def _reordered(
        self, input_order: torch.Tensor, source: Buffer, source_column: int = 0, wanted: int = 0
    ) -> Buffer:
        """Return a buffer of the bfloat16 source's columns `source_column + input_order[i]`."""
        target = self.buffer(len(input_order))
        self._append(
            library.REORDER,
            source,
            target,
            weight=input_order,
            inputs=len(input_order),
            source_offset=source_column,
            wanted=wanted,
        )
        return target

    def gate(
        self,
        source: Buffer,
        gates: Buffer,
        target: Buffer,
        groups: int,
        width: int,
        *,
        source_column: int = 0,
        gates_column: int = 0,
        one_gate: bool = False,
        activation: str = "silu",
        scaling: float = 1.0,
        weight: torch.Tensor | None = None,
        epsilon: float = 0.0,
        norm_last: bool = False,
    ) -> None:
        """Write `activation(gates * scaling) * source` to the target.

        There are `groups` of `width` columns. `weight`: of an RMS norm of each group with
        `epsilon`, before the gates or with `norm_last` after them; `[width]`, or `[groups *
        width]`. `gates_column`: the first column of the gates, float32. `one_gate`: each group has
        one gate.
        """
        self._append(
            library.GATE,
            source,
            target,
            key=gates,
            key_stride=gates.width,
            key_head=gates_column,
            heads=groups,
            inputs=width,
            outputs=1 if one_gate else width,
            source_offset=source_column,
            activation=_activation(activation),
            scaling=scaling,
            weight=in_float32(weight),
            norm_stride=0 if weight is None or weight.numel() == width else width,
            epsilon=epsilon,
            norm_last=norm_last,
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
        centred: bool = False,
        norm_last: bool = False,
        rotary: int | None = None,
        angles: int = 0,
        interleaved: bool = False,
        query_scale: int | None = None,
        value_norm: bool = False,
        values_are_keys: bool = False,
        borrowed: bool = False,
    ) -> None:
        """Take apart queries, keys and values that stand side by side in the source.

        Queries and keys are normed if there are `norms` (of a head's width, or of all heads'), then
        rotary angles are applied to them; with `norm_last` the other way round. `centred`: they are
        layer norms. Queries go to `query`, keys and values to their pages; both are in the query's
        format. `offset`: of the layer in a page, in elements. `rotary`: how many dimensions are
        rotated, all if None. `angles`: where the layer's angles begin in the rows of `run`'s.
        `interleaved`: dimensions 2i and 2i + 1 are rotated together. `query_scale`: the column of
        the cosines that holds a factor of the queries.

        `value_norm`: values are normed, without a weight. A source may have no values
        (`values_are_keys`), or queries alone: `shape` is another layer's (`borrowed`).
        """
        query_norm = key_norm = None
        if norms is not None:
            query_norm, key_norm = in_float32(norms[0]), in_float32(norms[1])
        norm_of_each_head = query_norm is not None and query_norm.numel() > shape.key_dim
        self._append(
            library.HEADS,
            source,
            query,
            heads=heads,
            **shape.fields(offset),
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=epsilon,
            norm_stride=shape.key_dim if norm_of_each_head else 0,
            centred=centred,
            norm_last=norm_last,
            rotary=shape.key_dim if rotary is None else rotary,
            angles=angles,
            interleaved=interleaved,
            query_scale=0 if query_scale is None else query_scale + 1,
            value_norm=value_norm,
            values_are_keys=values_are_keys,
            borrowed=borrowed,
        )

    def latent(
        self,
        queries: Buffer,
        query: Buffer,
        keys_and_values: Buffer,
        shared_keys: Buffer,
        shared_column: int,
        heads: int,
        shape: KVShape,
        offset: int,
        *,
        rotary: int = 0,
        angles: int = 0,
        interleaved: bool = False,
    ) -> None:
        """Apply rotary angles to the queries of a latent attention, and write its pages.

        `queries`: of all heads; they go to `query`. `keys_and_values`: of each head, the part of
        its key that is not rotated, then its value. `shared_keys`: from `shared_column` on, the
        rotated part of all heads' keys. `rotary`: how many dimensions that part has. `offset`,
        `angles`, `interleaved`: as of `heads`.
        """
        self._append(
            library.LATENT,
            queries,
            query,
            key=keys_and_values,
            key_stride=keys_and_values.width,
            value=shared_keys,
            value_stride=shared_keys.width,
            value_head=shared_column,
            heads=heads,
            **shape.fields(offset),
            rotary=rotary,
            angles=angles,
            interleaved=interleaved,
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
        causal: bool = False,
    ) -> None:
        """Attention of every row over what it sees.

        It follows `heads` or `latent` of the same layer. `window`: how many of the last tokens
        count, None for all. `softcap`: None for none. `sinks`: `[heads]`. `bidirectional`: rows of
        a sequence see one another, and have no paths; windows begin where they do without that.
        `causal`: rows of an image see none behind themselves, whatever their prefix.
        """
        self._append(
            library.ATTEND,
            query,
            target,
            heads=heads,
            **shape.fields(offset),
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=in_float32(sinks),
            bidirectional=bidirectional,
            causal=causal,
        )

    def experts(
        self,
        experts: library.Experts,
        source: Buffer,
        target: Buffer,
        scores: Buffer,
        routes: Buffer,
        inner: Buffer,
        *,
        up_format: int,
        activation: str,
        limit: float = 0.0,
        slope: float = 1.0,
    ) -> None:
        """Select each row's experts by its `scores`, and write the sum of what they compute.

        The target is float32. `routes`: a buffer for two numbers of each of a row's experts.
        `inner`: a buffer for what their down projections read, side by side. `up_format`: the
        format of their up projections. `limit` and `slope`: of the activation `clamped`.
        """
        self._append(
            library.EXPERTS,
            source,
            target,
            inputs=source.width,
            outputs=target.width,
            format=up_format,
            key=scores,
            value=routes,
            best=inner,
            experts=experts,
            first_expert=-1,
            last_expert=experts.count + 1,
            activation=_activation(activation),
            softcap=limit,
            scaling=slope,
        )

    def recur(self, recurrence: library.Recurrence, source: Buffer, target: Buffer) -> None:
        """One recurrence of a recurrent layer, along each sequence's rows."""
        self._append(library.RECUR, source, target, weight=recurrence)

    def convolve(
        self,
        source: Buffer,
        target: Buffer,
        base: torch.Tensor,
        coefficients: Buffer,
        coefficients_column: int,
        *,
        group: int,
        block: int,
        add: bool,
    ) -> None:
        """Causal convolutions of the rows of each block of `block` rows.

        The coefficients of a column are those of `base` `[taps, width]` float32 plus those that a
        row has for each `group` columns, from `coefficients_column` of a float32 buffer on. `add`:
        add the results to the target.
        """
        self._append(
            library.CONVOLVE,
            source,
            target,
            weight=base,
            key=coefficients,
            key_stride=coefficients.width,
            key_head=coefficients_column,
            inputs=source.width,
            heads=len(base),
            kv_heads=group,
            outputs=block,
            epilogue=library.ADD if add else library.STORE,
        )

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
        self._append(
            library.COPY,
            source,
            target,
            inputs=source.width,
            target_offset=column,
            epilogue=library.ADD if add else library.STORE,
            scaling=scale,
        )

    def add_rows(self, given: Buffer, target: Buffer, column: int) -> None:
        """Add a call's rows to those of the float32 target, from their element `column` on.

        `given`: their addresses, as of `embed`.
        """
        self._append(library.ADD_ROWS, given, target, inputs=target.width, source_offset=column)

    # --- calls ---

    def run(
        self,
        rows: RowList,
        tensors: Mapping[str, torch.Tensor] | None = None,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        blocks: np.ndarray | None = None,
    ) -> None:
        """Run all operations. The arguments are those of `prepare`."""
        run_operations = self.prepare(rows, tensors, angles, blocks)
        run_operations(0, len(self.ops))

    def prepare(
        self,
        rows: RowList,
        tensors: Mapping[str, torch.Tensor] | None = None,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        blocks: np.ndarray | None = None,
    ) -> Callable[[int, int], None]:
        """Prepare a run whose operations are called some at a time.

        `tensors`: one for each external buffer, by name. `angles`: cosine and sine by
        position, `[positions, columns]` float32 each. `blocks`: int64, for `selected_blocks`.
        Returns a function that takes the first of the operations to run and the one after the last.
        """
        if self._addresses is None or len(rows) > self._capacity:
            self._allocate(len(rows))
        for name, tensor in (tensors or {}).items():
            self._addresses[self._index_of_external[name]] = tensor.data_ptr()
        if angles is not None:
            cosine, sine = angles
            rows.batch.cosine = cosine.data_ptr()
            rows.batch.sine = sine.data_ptr()
            rows.batch.angle_stride = cosine.shape[1]
        call = library.Call(rows.batch, ctypes.addressof(self._addresses))
        if self.kernels.nodes is not None:
            call.nodes = ctypes.addressof(self.kernels.nodes)
        if blocks is not None:
            call.block = blocks.ctypes.data
            call.blocks = len(blocks)
        begin, size = ctypes.addressof(self._op_array), ctypes.sizeof(Op)
        kernels, threads = self.kernels, torch.get_num_threads()

        def run_operations(first: int, last: int) -> None:
            if last > first:
                kernels.run(begin + first * size, last - first, ctypes.byref(call), threads)

        return run_operations

    def address(self, buffer: int) -> int:
        """Return where a buffer's rows of the last call are, by the buffer's index."""
        return int(self._addresses[buffer])

    def set(self, operation: int, **fields: int) -> None:
        """Change an operation's fields, as strides that depend on the rows, for the next calls."""
        for name, value in fields.items():
            setattr(self.ops[operation], name, value)
            if self._addresses is not None:
                setattr(self._op_array[operation], name, value)

    def _allocate(self, rows: int) -> None:
        """Make the program's own tensors large enough, and the tables that the kernels read."""
        self._capacity = max(self._capacity, -(-rows // ROW_STEP) * ROW_STEP)
        self._addresses = (ctypes.c_void_p * len(self._formats))()
        for index, buffer_format in enumerate(self._formats):
            if buffer_format is None:
                continue
            size = self._capacity * buffer_format.width
            if index not in self._tensors or self._tensors[index].numel() < size:
                self._tensors[index] = torch.zeros(size, dtype=buffer_format.dtype)
            self._addresses[index] = self._tensors[index].data_ptr()
        self._op_array = (Op * len(self.ops))(*self.ops)


def _activation(name: str | None) -> int | None:
    return None if name is None else library.ACTIVATIONS.index(name)
