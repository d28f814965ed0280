"""Weights that a finished program reads from a file in every pass, as far as memory lacks them.

The program is cut into groups of operations, each with a part of the weights. A group waits for its
part, which is read while those before it compute. Every number is the same as with all weights in
memory. Of experts, only those are read that a row has chosen.
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
from quickbeam.models.weights.packed_file import ALIGNED, WeightFile
from quickbeam.models.weights.packing import PackedWeights
from quickbeam.models.weights.parameters import Parameters

BUFFERS = 4  # for reading; fewer, but at least 2, where memory is short
PIECE = 16 << 20  # bytes of a buffer; more only for larger experts
PARTS = 16  # fewest groups of a small model, as far as its weights can be cut


@dataclass(frozen=True)
class WeightPart:
    """Bytes of the weights, from `first` to `last` (excluded), that operation `op` reads.

    `expert`: whose, of experts; `up` of the bytes are its first weight.
    """

    first: int
    last: int
    op: int
    expert: int = -1
    up: int = 0


@dataclass(eq=False)
class WeightGroup:
    """Parts that follow one another in the file, and are read at once.

    `routes`: the number of the operation that chooses experts, where they are parts of experts.
    """

    routes: int | None = None
    parts: list[WeightPart] = field(default_factory=list)

    @property
    def extent(self) -> Extent:
        return _extent(self.parts[0].first, self.parts[-1].last)


def _extent(first: int, last: int) -> Extent:
    """Return the extent of the file around bytes `first` to `last` (excluded) of the weights."""
    return Extent((1 + first // ALIGNED) * ALIGNED, (1 + -(-last // ALIGNED)) * ALIGNED)


class ProgramSplitter:
    """Cuts the operations of a program where one group's parts take more than `piece` bytes.

    `begin`: the address that stands for the first byte of the weights, of which there are `size`.
    """

    def __init__(self, kernels: Kernels, begin: int, size: int, piece: int) -> None:
        self._kernels, self._begin, self._size, self._piece = kernels, begin, size, piece
        self.ops, self.groups = list[Op](), [WeightGroup()]

    def add(self, op: Op) -> None:
        """Append an operation, in parts if it reads weights."""
        if op.kind == library.LINEAR and 0 <= op.weight - self._begin < self._size:
            self._linear(op)
        elif op.kind == library.EXPERTS:
            self._experts(op)
        else:
            self.ops.append(op)

    def _room(self, first: int, routes: int | None = None) -> int:
        """Return how many bytes the current group, or a new one, can take from byte `first` on."""
        group = self.groups[-1]
        if group.parts and (group.parts[-1].last, group.routes) != (first, routes):
            self.groups.append(WeightGroup())
            group = self.groups[-1]
        group.routes = routes
        begin = group.parts[0].first if group.parts else first
        return begin // ALIGNED * ALIGNED + self._piece - first

    def _linear(self, op: Op) -> None:
        step = 2 if op.epilogue == library.GATED else 1
        blocks = -(-op.outputs // step // BLOCK) * step
        block, done = self._kernels.block_bytes(op.format, op.inputs), 0
        while done < blocks:
            first = op.weight - self._begin + done * block
            count = min(self._room(first) // (block * step) * step, blocks - done)
            if not count:
                self.groups.append(WeightGroup())
                continue
            part = WeightPart(first, first + count * block, len(self.ops))
            self.groups[-1].parts.append(part)
            self.ops.append(op if count == blocks else _columns(op, done, count, step))
            done += count

    def _experts(self, op: Op) -> None:
        choosing = Op.from_buffer_copy(op)
        choosing.last_expert = 0
        self.ops.append(choosing)
        routes, of = len(self.ops) - 1, Experts.from_address(op.experts)
        block = self._kernels.block_bytes
        for number in range(count := of.count + (of.shared > 0)):
            wide, up_format, down_format = of.inner, op.format, of.down_format
            if number == of.count:
                wide, up_format, down_format = of.shared, of.shared_up, of.shared_down
            up = 2 * -(-wide // BLOCK) * block(up_format, op.inputs)
            size = up + -(-op.outputs // BLOCK) * block(down_format, wide)
            first = _table(op)[number].up - self._begin
            if self._room(first, routes) < size:
                self.groups.append(WeightGroup(routes))
            group = self.groups[-1]
            if not group.parts:
                self.ops.append(Op.from_buffer_copy(op))
                self.ops[-1].first_expert = number
            self.ops[-1].last_expert = number + 1
            group.parts.append(WeightPart(first, first + size, len(self.ops) - 1, number, up))
        assert count


def _columns(op: Op, done: int, count: int, step: int) -> Op:
    """Return the operation for `count` blocks of its weight alone, from block `done` on."""
    part, column = Op.from_buffer_copy(op), done // step * BLOCK
    part.outputs = step * min(op.outputs // step - column, count // step * BLOCK)
    part.target_offset += column
    if op.bias:
        part.bias = op.bias + 4 * done * BLOCK
    if op.epilogue == library.BEST:  # which looks at all of them
        part.epilogue = library.STORE
    return part


def _table(op: Op) -> Any:
    """Return the addresses of the weights of an operation's experts."""
    of = Experts.from_address(op.experts)
    return (Expert * (of.count + 1)).from_address(of.expert)


def _spread(groups: Sequence[WeightGroup], room: int, piece: int) -> Iterator[WeightGroup]:
    """Yield those that stay in memory, first of those that every pass reads: spread evenly over the
    pass, so that reading goes on while they compute."""
    for chosen in (False, True):
        some = [one for one in groups if (one.routes is not None) == chosen]
        count = min(len(some), room // piece)
        for i, one in enumerate(some):
            if (i + 1) * count // len(some) > i * count // len(some):
                yield one
        room -= count * piece


class WeightsOnDisk(Streamed):
    """The weights of a program, in a file.

    Part of `memory` serves as buffers for reading: 2 to `BUFFERS`. The rest holds groups that are
    read only once. Each of them saves its reading in every pass.
    """

    source = "disk"

    def __init__(self, file: WeightFile, packed: PackedWeights, memory: int) -> None:
        self._packed = packed
        file.write(packed.size, packed.pieces, "packing weights, once")
        assert file.path is not None
        self._file = File(file.path)
        packed.memory, packed.filled = reserved(packed.size), True
        self._piece = piece(packed)
        room = memory - packed.small
        self._buffers = max(2, min(BUFFERS, room // self._piece // 4))
        self._room = room - self._buffers * self._piece
        self._program: Program | None = None
        self._held: list[torch.Tensor] = []
        self._groups: list[WeightGroup] = []  # those that are read in every pass
        self._ring: Ring | None = None
        self._done = self._rows = 0  # operations that a pass has run, and its rows

    def _attach(self, program: Program) -> None:
        """Have a program's operations read the weights from here."""
        self.close()
        self._ring, self._held, begin = None, [], self._packed.memory.data_ptr()
        groups = ProgramSplitter(program.kernels, begin, self._packed.size, self._piece)
        for op in program.ops:
            groups.add(op)
        program.ops[:], self._program = groups.ops, program
        held = list(_spread(groups.groups, self._room, self._piece))
        for group in held:
            extent = group.extent
            self._held.append(aligned(extent.last - extent.first))
            self._file.read(extent.first, self._held[-1])
            self._place(group, self._held[-1])
        self._groups = [one for one in groups.groups if one not in held]
        extents = [one.extent for one in self._groups]
        if extents:
            self._ring = Ring(self._file, extents, self._buffers, self._wanted)

    def run(
        self,
        program: Program,
        rows: RowList,
        given: dict[str, torch.Tensor],
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Run a pass of `program`, whose operations it changes. The others are as of `Program.run`.

        Raises `QuickbeamError`, which names the file, if it can't be read.
        """
        if self._program is not program:
            self._attach(program)
        call = program.prepare(rows, given, angles)
        self._done, self._rows = 0, len(rows)

        def run_to(last: int) -> None:
            call(self._done, last)
            self._done = last

        if self._ring is not None:
            self._ring.begin()
            for group in self._groups:
                run_to(group.parts[0].op)
                self._place(group, self._ring.take())
                run_to(group.parts[-1].op + 1)
                self._ring.release()
            self._ring.end()
        run_to(len(program.ops))

    def _place(self, group: WeightGroup, memory: torch.Tensor) -> None:
        """Tell the operations of a group where the bytes of its extent are."""
        assert self._program is not None
        begin = memory.data_ptr() - (group.extent.first - ALIGNED)
        for part in group.parts:
            if part.expert < 0:
                self._program.set(part.op, weight=begin + part.first)
                continue
            expert = _table(self._program.ops[part.op])[part.expert]
            expert.up, expert.down = begin + part.first, begin + part.first + part.up

    def _wanted(self, number: int, turn: int) -> list[Extent] | None:
        """Return what a pass reads of a group; None if no row has chosen its experts yet."""
        group = self._groups[number]
        if group.routes is None:
            return [group.extent]
        if self._ring is None or turn > self._ring.round or self._done <= group.routes:
            return None
        chosen, wanted = self._chosen(group.routes), list[list[WeightPart]]()
        for part in group.parts:
            if part.expert not in chosen:
                continue
            if wanted and wanted[-1][-1].last == part.first:
                wanted[-1].append(part)
            else:
                wanted.append([part])
        return [_extent(parts[0].first, parts[-1].last) for parts in wanted]

    def _chosen(self, routes: int) -> set[int]:
        """Return the experts that the rows of this pass need: chosen ones, and that of all rows."""
        assert self._program is not None
        op = self._program.ops[routes]
        of = Experts.from_address(op.experts)
        numbers = ctypes.c_int32 * (2 * self._rows * of.top)
        pairs = numbers.from_address(self._program.address(op.value))
        return {*pairs[::2], of.count}

    def close(self) -> None:
        """Stop reading ahead until the next pass."""
        if self._ring is not None:
            self._ring.close()

    def head(self) -> Any:
        """Return a copy of the packed head."""
        head = self._packed.head_range
        extent, begin = _extent(head.first, head.last), head.first % ALIGNED
        room = aligned(extent.last - extent.first)
        self._file.read(extent.first, room)
        return self._packed.head(room[begin : begin + head.last - head.first])

    def record(self) -> dict[str, Any]:
        extents, ring = [one.extent for one in self._groups], self._ring
        return {
            "streamed_bytes": sum(one.last - one.first for one in extents),  # with all experts
            "read_bytes": 0 if ring is None else ring.bytes,
            "resident_bytes": sum(held.numel() for held in self._held),
            "buffer_bytes": 0 if ring is None else ring.size,
            "bytes_per_second": None if ring is None else ring.rate,
            "waited_seconds": None if ring is None else ring.waited,
            "peak_bytes": peak_bytes(),
        }


def piece(packed: PackedWeights) -> int:
    """Return the bytes of a buffer."""
    size = max(min(PIECE, packed.size // PARTS), packed.unit + ALIGNED)
    return -(-size // ALIGNED) * ALIGNED


def limit(parameters: Parameters, stack: Stack, name: str, memory: int) -> int | None:
    """Return `memory` where the weights of a model take more, None where they fit.

    `name`: the format of the weights. Raises `InvalidInput`, which names the least, if they don't
    fit and `memory` is too small to read them while computing.
    """
    kernels = library.kernels()
    assert kernels is not None  # or `refuse_memory` would have raised
    packed, like = PackedWeights(parameters, stack, kernels, name), parameters.like(stack.embedding)
    table = torch.Size(parameters.shape(stack.embedding)).numel() * parameters.dtype.itemsize
    if isinstance(like, BlockRows):
        table = like.data.nbytes
    if memory >= packed.small + packed.size + table:
        return None
    least = packed.small + 2 * piece(packed)
    if memory < least:
        raise InvalidInput(
            f"memory={memory}: this model needs at least {-(-least // 10**6)}MB to be read while "
            "computing"
        )
    return memory
