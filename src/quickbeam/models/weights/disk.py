"""Packed weights that a program reads from a file in every pass, as far as memory lacks them.

The program is cut into groups of operations, each with a part of the weights. A group waits for its
part, which is read while earlier groups compute. Every result has the bits that it has with all
weights in memory. Of experts, only active ones are read: those that a row has selected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.base import Streamed
from quickbeam.models.memory import peak_bytes, reserved
from quickbeam.models.native import library
from quickbeam.models.native.library import Expert, Experts, Kernels, Op
from quickbeam.models.native.operands import BLOCK, RowList
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BlockRows
from quickbeam.models.stack import Stack
from quickbeam.models.weights.file_reader import Extent, File, Ring, aligned
from quickbeam.models.weights.packed_file import ALIGNED, PackedFile
from quickbeam.models.weights.packing import PackedWeights
from quickbeam.models.weights.parameters import Parameters

BUFFERS = 4  # for reading; fewer, but at least 2, where memory is short
BUFFER_SIZE = 16 << 20  # bytes; more only for larger experts
MIN_GROUPS = 16  # of a small model, as far as its weights can be cut


@dataclass(frozen=True)
class WeightPart:
    """Bytes of the packed weights, from `first` to `last` (excluded), that operation `op` reads.

    `expert`: the index of the expert that they belong to, -1 for none; `up_size`: how many of them
    are its up projection.
    """

    first: int
    last: int
    op: int
    expert: int = -1
    up_size: int = 0


@dataclass(eq=False)
class WeightGroup:
    """Parts that follow one another in the file, and are read at once.

    `router`: the index of the operation that selects experts, where they are parts of experts.
    """

    router: int | None = None
    parts: list[WeightPart] = field(default_factory=list)

    @property
    def extent(self) -> Extent:
        return _extent(self.parts[0].first, self.parts[-1].last)


def _extent(first: int, last: int) -> Extent:
    """Return the extent of the file around these bytes of the packed weights."""
    return Extent((1 + first // ALIGNED) * ALIGNED, (1 + -(-last // ALIGNED)) * ALIGNED)


class ProgramSplitter:
    """Cuts the operations of a program where one group's parts take more than `buffer_size` bytes.

    `begin`: the address that stands for the first byte of the weights, of which there are `size`.
    """

    def __init__(self, kernels: Kernels, begin: int, size: int, buffer_size: int) -> None:
        self._kernels = kernels
        self._begin, self._size = begin, size
        self._buffer_size = buffer_size
        self.ops = list[Op]()
        self.groups = [WeightGroup()]

    def add(self, op: Op) -> None:
        """Append an operation, in parts if it reads weights."""
        if op.kind == library.LINEAR and 0 <= op.weight - self._begin < self._size:
            self._linear(op)
        elif op.kind == library.EXPERTS:
            self._experts(op)
        else:
            self.ops.append(op)

    def _capacity(self, first: int, router: int | None = None) -> int:
        """Return how many bytes the current group, or a new one, can take from byte `first` on."""
        group = self.groups[-1]
        if group.parts and (group.parts[-1].last, group.router) != (first, router):
            group = WeightGroup()
            self.groups.append(group)
        group.router = router
        begin = group.parts[0].first if group.parts else first
        return begin // ALIGNED * ALIGNED + self._buffer_size - first

    def _linear(self, op: Op) -> None:
        step = 2 if op.epilogue == library.GATED else 1
        blocks = -(-op.outputs // step // BLOCK) * step
        block_bytes = self._kernels.block_bytes(op.format, op.inputs)
        done = 0
        while done < blocks:
            first = op.weight - self._begin + done * block_bytes
            count = min(self._capacity(first) // (block_bytes * step) * step, blocks - done)
            if not count:
                self.groups.append(WeightGroup())
                continue
            part = WeightPart(first, first + count * block_bytes, len(self.ops))
            self.groups[-1].parts.append(part)
            self.ops.append(op if count == blocks else _columns(op, done, count, step))
            done += count

    def _experts(self, op: Op) -> None:
        router = len(self.ops)
        select = Op.from_buffer_copy(op)
        select.last_expert = 0
        self.ops.append(select)
        fields = Experts.from_address(op.experts)
        count = fields.count + (fields.shared > 0)
        assert count
        for expert in range(count):
            is_shared = expert == fields.count
            inner = fields.shared if is_shared else fields.inner
            up_format = fields.shared_up if is_shared else op.format
            down_format = fields.shared_down if is_shared else fields.down_format
            up_blocks = 2 * -(-inner // BLOCK)
            down_blocks = -(-op.outputs // BLOCK)
            up_size = up_blocks * self._kernels.block_bytes(up_format, op.inputs)
            size = up_size + down_blocks * self._kernels.block_bytes(down_format, inner)
            first = _expert_table(op)[expert].up - self._begin
            if self._capacity(first, router) < size:
                self.groups.append(WeightGroup(router))
            group = self.groups[-1]
            if not group.parts:
                self.ops.append(Op.from_buffer_copy(op))
                self.ops[-1].first_expert = expert
            self.ops[-1].last_expert = expert + 1
            part = WeightPart(first, first + size, len(self.ops) - 1, expert, up_size)
            group.parts.append(part)


def _columns(op: Op, done: int, count: int, step: int) -> Op:
    """Return the operation for `count` blocks of its weight alone, from block `done` on."""
    part = Op.from_buffer_copy(op)
    column = done // step * BLOCK
    part.outputs = step * min(op.outputs // step - column, count // step * BLOCK)
    part.target_offset += column
    if op.bias:
        part.bias = op.bias + 4 * done * BLOCK
    if op.epilogue == library.BEST:  # it compares all columns
        part.epilogue = library.STORE
    return part


def _expert_table(op: Op) -> Any:
    """Return the addresses of the weights of an operation's experts."""
    fields = Experts.from_address(op.experts)
    return (Expert * (fields.count + 1)).from_address(fields.expert)


def resident_groups(groups: Sequence[WeightGroup], count: int) -> Iterator[WeightGroup]:
    """Yield `count` groups that stay in memory, or all where there are fewer.

    Groups that every pass reads come before those of experts. They are spread evenly over the pass,
    so that reading goes on while they compute.
    """
    of_every_pass = [group for group in groups if group.router is None]
    of_experts = [group for group in groups if group.router is not None]
    for kind in (of_every_pass, of_experts):
        taken = min(len(kind), count)
        for i, group in enumerate(kind):
            if (i + 1) * taken // len(kind) > i * taken // len(kind):
                yield group
        count -= taken


class WeightsOnDisk(Streamed):
    """The packed weights of a program, in a file.

    Part of `memory` serves as buffers for reading: 2 to `BUFFERS`. Resident groups, which are read
    only once, take what is left. Each of them saves its reading in every pass.
    """

    source = "disk"

    def __init__(self, file: PackedFile, packed: PackedWeights, memory: int) -> None:
        self._packed = packed
        file.write(packed.size, packed.pieces, "packing weights, once")
        assert file.path is not None
        self._file = File(file.path)
        packed.memory = reserved(packed.size)
        packed.is_packed = True
        self._buffer_size = buffer_size(packed)
        buffers = (memory - packed.resident_size) // self._buffer_size
        self._buffers = max(2, min(BUFFERS, buffers // 4))
        self._resident_count = buffers - self._buffers
        self._program: Program | None = None
        self._resident: list[torch.Tensor] = []
        self._groups: list[WeightGroup] = []  # those that are read in every pass
        self._ring: Ring | None = None
        self._done = self._rows = 0  # operations that a pass has run, and its rows

    def _attach(self, program: Program) -> None:
        """Have a program's operations read the weights from here."""
        self.close()
        self._ring, self._resident = None, []
        splitter = ProgramSplitter(
            program.kernels,
            self._packed.memory.data_ptr(),
            self._packed.size,
            self._buffer_size,
        )
        for op in program.ops:
            splitter.add(op)
        program.ops[:] = splitter.ops
        self._program = program
        resident = list(resident_groups(splitter.groups, self._resident_count))
        for group in resident:
            extent = group.extent
            memory = aligned(extent.last - extent.first)
            self._file.read(extent.first, memory)
            self._resident.append(memory)
            self._set_addresses(group, memory)
        self._groups = [group for group in splitter.groups if group not in resident]
        extents = [group.extent for group in self._groups]
        if extents:
            self._ring = Ring(self._file, extents, self._buffers, self._extents_to_read)

    def run(
        self,
        program: Program,
        rows: RowList,
        tensors: dict[str, torch.Tensor],
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Run a pass of `program`, whose operations it changes.

        The other arguments are those of `Program.run`. Raises `QuickbeamError`, which names the
        file, if it can't be read.
        """
        if self._program is not program:
            self._attach(program)
        run_operations = program.prepare(rows, tensors, angles)
        self._done, self._rows = 0, len(rows)

        def run_to(last: int) -> None:
            run_operations(self._done, last)
            self._done = last

        if self._ring is not None:
            self._ring.begin()
            for group in self._groups:
                run_to(group.parts[0].op)
                self._set_addresses(group, self._ring.take())
                run_to(group.parts[-1].op + 1)
                self._ring.release()
            self._ring.end()
        run_to(len(program.ops))

    def _set_addresses(self, group: WeightGroup, memory: torch.Tensor) -> None:
        """Tell the operations of a group where the bytes of its extent are."""
        assert self._program is not None
        begin = memory.data_ptr() - (group.extent.first - ALIGNED)
        for part in group.parts:
            if part.expert < 0:
                self._program.set(part.op, weight=begin + part.first)
                continue
            expert = _expert_table(self._program.ops[part.op])[part.expert]
            expert.up = begin + part.first
            expert.down = begin + part.first + part.up_size

    def _extents_to_read(self, index: int, number: int) -> list[Extent] | None:
        """Return what pass `number` reads of a group; None if its experts are not selected yet."""
        group = self._groups[index]
        if group.router is None:
            return [group.extent]
        if self._ring is None or number > self._ring.round or self._done <= group.router:
            return None
        active, runs = self._active_experts(group.router), list[list[WeightPart]]()
        for part in group.parts:
            if part.expert not in active:
                continue
            if runs and runs[-1][-1].last == part.first:
                runs[-1].append(part)
            else:
                runs.append([part])
        return [_extent(parts[0].first, parts[-1].last) for parts in runs]

    def _active_experts(self, router: int) -> set[int]:
        """Return the experts that the rows of this pass need: selected ones, and the shared one."""
        assert self._program is not None
        op = self._program.ops[router]
        fields = Experts.from_address(op.experts)
        routes = ctypes.c_int32 * (2 * self._rows * fields.top)
        pairs = routes.from_address(self._program.address(op.value))
        return {*pairs[::2], fields.count}

    def close(self) -> None:
        """Stop reading ahead until the next pass."""
        if self._ring is not None:
            self._ring.close()

    def head(self) -> Any:
        """Return a copy of the packed head."""
        head = self._packed.head_range
        extent, begin = _extent(head.first, head.last), head.first % ALIGNED
        memory = aligned(extent.last - extent.first)
        self._file.read(extent.first, memory)
        return self._packed.head(memory[begin : begin + head.last - head.first])

    def record(self) -> dict[str, Any]:
        ring, extents = self._ring, [group.extent for group in self._groups]
        return {
            "streamed_bytes": sum(extent.last - extent.first for extent in extents),  # all experts
            "read_bytes": 0 if ring is None else ring.bytes,
            "resident_bytes": sum(memory.numel() for memory in self._resident),
            "buffer_bytes": 0 if ring is None else ring.size,
            "bytes_per_second": None if ring is None else ring.rate,
            "waited_seconds": None if ring is None else ring.waited,
            "peak_bytes": peak_bytes(),
        }


def buffer_size(packed: PackedWeights) -> int:
    """Return the bytes of a buffer."""
    size = min(BUFFER_SIZE, packed.size // MIN_GROUPS)
    size = max(size, packed.indivisible_size + ALIGNED)
    return -(-size // ALIGNED) * ALIGNED


def needed_limit(
    parameters: Parameters, stack: Stack, kernels: Kernels, name: str, memory: int
) -> int | None:
    """Return `memory` where the weights of a model take more, None where they fit.

    `name`: the format of the weights. Raises `InvalidInput`, which names the least, if they don't
    fit and `memory` is too small to read them while computing.
    """
    packed = PackedWeights(parameters, stack, kernels, name)
    embedding = parameters.like(stack.embedding)
    if isinstance(embedding, BlockRows):
        embedding_size = embedding.data.nbytes
    else:
        embedding_size = embedding.numel() * parameters.dtype.itemsize
    if memory >= packed.resident_size + packed.size + embedding_size:
        return None
    least = packed.resident_size + 2 * buffer_size(packed)
    if memory < least:
        raise InvalidInput(
            f"memory={memory}: this model needs at least {-(-least // 10**6)}MB to be read while "
            "computing"
        )
    return memory
