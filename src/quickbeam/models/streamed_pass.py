"""A pass of the native kernels whose weights are partly read from a file.

Each operation waits for its part of the weights. Afterwards the memory of that part is free for the
next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from quickbeam.models.native import library
from quickbeam.models.native.operands import BLOCK, PackedPart, Rows, gated_bias
from quickbeam.models.native.program import Program
from quickbeam.models.packed_file import ALIGNED, Part, Plan, WeightShape
from quickbeam.models.weight_stream import WeightStream


class Source(NamedTuple):
    """Where a model's weights are read from.

    `memory`: bytes that the weights may take. `small`: how many of them norms and biases take,
    which are always in memory.
    """

    path: Path
    plan: Plan
    memory: int
    small: int

    @property
    def least(self) -> int:
        """The smallest `memory` that works, in bytes."""
        return self.small + 2 * self.plan.piece

    @property
    def whole(self) -> int:
        """The bytes that the model takes if nothing is read from disk in a pass."""
        return self.small + self.plan.bytes + self.plan.embedding_bytes


class Weight:
    """A weight in the file, the counterpart of a `Packed` one in memory.

    `number`: its place in the plan. `bias`: `[outputs]`, or None.
    """

    def __init__(self, number: int, bias: torch.Tensor | None, shape: WeightShape) -> None:
        self.number, self.shape = number, shape
        self.inputs, self.outputs, self.gated = shape.inputs, shape.rows * shape.step, shape.gated
        self.format = library.FORMATS.index(shape.name)
        if bias is not None:
            bias = (
                gated_bias(bias, shape.rows, shape.blocks)
                if shape.gated
                else bias.detach().float().contiguous()
            )
        self.bias = bias


def part_of(weight: Weight, part: Part) -> PackedPart:
    """Describe some blocks of a weight for an operation."""
    step, rows = weight.shape.step, weight.shape.rows
    column = part.first // step * BLOCK
    outputs = (min(rows, (part.first + part.blocks) // step * BLOCK) - column) * step
    bias = weight.bias
    if bias is not None:
        bias = (bias[part.first // step :] if weight.gated else bias[column:]).contiguous()
    return PackedPart(weight.inputs, outputs, weight.gated, weight.format, bias, column)


class Use(NamedTuple):
    """An operation reads a weight in a segment.

    `operation`, `segment`: their numbers. `offset`: bytes from the segment's beginning.
    """

    operation: int
    segment: int
    offset: int


class StreamedPass:
    """A program whose weights are partly on disk.

    `uses`: in the order of the operations. `resident`: the segments in memory, by number.
    `buffers`: how many segments the buffers for reading hold.
    """

    def __init__(
        self,
        program: Program,
        uses: Sequence[Use],
        source: Source,
        resident: dict[int, torch.Tensor],
        buffers: int,
    ) -> None:
        # of each step: first operation, the one after the last, segment, its uses
        self._program, self._steps = program, list[tuple[int, int, int, list[Use]]]()
        for use in uses:
            if use.segment in resident:
                program.set(use.operation, weight=resident[use.segment].data_ptr() + use.offset)
            elif self._steps and self._steps[-1][2] == use.segment:
                first, _, segment, used = self._steps[-1]
                self._steps[-1] = first, use.operation + 1, segment, [*used, use]
            else:
                self._steps.append((use.operation, use.operation + 1, use.segment, [use]))
        segments = [source.plan.segments[segment] for _, _, segment, _ in self._steps]
        self.stream: WeightStream | None = None
        if segments:
            self.stream = WeightStream(
                source.path, [(ALIGNED + one.offset, one.size) for one in segments], buffers
            )

    def run(
        self, rows: Rows, given: dict[str, torch.Tensor], angles: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Run a pass. Raises `QuickbeamError`, which names the file, if it can't be read.

        The arguments are those of `Program.run`.
        """
        program, stream, done = self._program, self.stream, 0
        call = program.prepare(rows, given, angles)
        if stream is not None:
            stream.begin()
            for number, (first, last, _, uses) in enumerate(self._steps):
                call(done, first)
                address = stream.take(number)
                for use in uses:
                    program.set(use.operation, weight=address + use.offset)
                call(first, last)
                stream.release()
                done = last
        call(done, program.operations)
        if stream is not None:
            stream.end()
