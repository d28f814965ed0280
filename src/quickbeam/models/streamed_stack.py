"""`CompiledStack` for models that are larger than the memory they may take.

Some of the weights stay in memory. The others are read from disk in every pass, each part while the
parts before it compute. Every number is the same as with all weights in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from quickbeam.models.compiled import CompiledStack
from quickbeam.models.compiled_layer import CompiledLayer
from quickbeam.models.formats import head_format
from quickbeam.models.linear import NativeLinear
from quickbeam.models.memory import peak_bytes, peak_memory
from quickbeam.models.native import library
from quickbeam.models.native.operands import Rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import AnyPacked, Packer
from quickbeam.models.packed_file import ALIGNED, EmbeddingRows, Part, WeightShape
from quickbeam.models.pages import PagePool
from quickbeam.models.parameters import Parameters
from quickbeam.models.stack import Linear, Stack
from quickbeam.models.stack_tensors import linears
from quickbeam.models.streamed_pass import Source, StreamedPass, Use, Weight, part_of
from quickbeam.models.weight_stream import File, WeightStream, aligned

BUFFERS = 4  # buffers of a segment each; fewer, but at least 2, where memory is short


class StreamedStack(CompiledStack):
    """`CompiledStack` with weights from a file, in bfloat16.

    Part of `source.memory` serves as buffers for reading: 2 to `BUFFERS` segments. The rest holds
    segments that are read only once. They are spread evenly over the pass, so that reading goes on
    while they compute. Each of them saves its reading in every pass. As a further buffer, the same
    memory would save reading only in passes before which a drafter takes long enough.
    """

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        pages: PagePool,
        source: Source,
    ) -> None:
        self._begin(parameters, stack, pages)
        self._source, self._rows = source, EmbeddingRows(source.path, source.plan)
        numbers = iter(range(len(source.plan.weights)))

        def place(linear: Linear, gated: bool) -> Any:
            number = next(numbers)
            return Weight(number, self._bias_of(linear), source.plan.weights[number])

        self.layers = [CompiledLayer(layer, place, self._parameter) for layer in stack.layers]
        self._output: Weight = place(stack.head, False)
        self.vocab = self._output.outputs
        self._parts: dict[int, list[tuple[int, Part]]] = {}
        for i, segment in enumerate(source.plan.segments):
            for part in segment.parts:
                self._parts.setdefault(part.weight, []).append((i, part))
        room = source.memory - source.small
        self._buffers = max(2, min(BUFFERS, room // source.plan.piece // 4))
        self._resident = self._hold(room - self._buffers * source.plan.piece)
        self._whole_pass: StreamedPass | None = None
        self._uses: list[Use] = []
        self._own: tuple[nn.Embedding, NativeLinear] | None = None

    def _hold(self, room: int) -> dict[int, torch.Tensor]:
        """Read as many segments as there is room for, in bytes. Returns them by number."""
        segments = self._source.plan.segments
        count = min(len(segments), max(0, room) // self._source.plan.piece)
        chosen = [
            i
            for i in range(len(segments))
            if (i + 1) * count // len(segments) > i * count // len(segments)
        ]
        file = File(self._source.path)
        memory, held, used = (
            aligned(sum(segments[i].size for i in chosen)),
            dict[int, torch.Tensor](),
            0,
        )
        for i in chosen:
            held[i] = memory[used : used + segments[i].size]
            file.read(ALIGNED + segments[i].offset, held[i].numpy().data)
            used += segments[i].size
        return held

    @staticmethod
    def shapes(parameters: Parameters, stack: Stack, name: str) -> list[WeightShape]:
        """Return the shapes of a model's weights in the order of a pass. `name`: their format."""
        found = list[WeightShape]()
        for linear, gated in linears(stack):
            parts = [(parameters.shape(one.name), one.parts) for one in linear.weights]
            rows = [shape[0] // count for shape, count in parts]
            found.append(WeightShape(parts[0][0][1], rows[0] if gated else sum(rows), gated, name))
        return [*found[:-1], found[-1]._replace(name=head_format(name))]

    # --- parts of CompiledStack's program ---

    @property
    def _width(self) -> int:
        return self._rows.width

    def _embed(self, program: Program, target: Buffer) -> None:
        embedded = program.given("embedded", self._rows.width)
        program.copy(embedded, target, scale=self.stack.scale)

    def _linear(
        self,
        program: Program,
        weight: Any,
        source: Buffer,
        target: Buffer,
        epilogue: int = library.STORE,
        **more: Any,
    ) -> None:
        for segment, part in self._parts[weight.number]:
            self._uses.append(Use(program.operations, segment, part.offset))
            some = part_of(weight, part)
            program.linear(some, source, target, epilogue, column=some.column, **more)

    def _project(self, program: Program, source: Buffer) -> None:
        logits = program.given("logits", self.vocab, True)
        self._linear(
            program,
            self._output,
            source,
            logits,
            gathered=True,
            scaling=self.stack.head_scale,
            softcap=self.stack.softcap,
        )

    # --- passes ---

    def watch(self, layers: Sequence[int]) -> None:
        super().watch(layers)
        self.close()
        self._whole_pass = None

    def _pass(self) -> StreamedPass:
        if self._whole_pass is None:
            self._uses = []
            self._whole_pass = StreamedPass(
                self._make(), self._uses, self._source, self._resident, self._buffers
            )
        return self._whole_pass

    def _results(self, rows: Rows) -> dict[str, torch.Tensor]:
        given = super()._results(rows) | {"embedded": self._rows.rows(rows.tokens)}
        del given["best"]
        return given

    def __call__(self, rows: Rows, last_position: int) -> torch.Tensor:
        given = self._results(rows)
        self._pass().run(rows, given, self._angles.up_to(last_position))
        self.hidden, self.best = given["hidden"], likeliest(given["logits"])
        return given["logits"]

    def part(self, kinds: Collection[int]) -> Callable[[Rows, int], None]:
        self._uses = []
        whole = self._make()
        program, kept = whole.subset(kinds), whole.places(kinds)
        uses = [
            use._replace(operation=kept[use.operation])
            for use in self._uses
            if use.operation in kept
        ]
        made = StreamedPass(program, uses, self._source, self._resident, self._buffers)

        def run(rows: Rows, last_position: int) -> None:
            made.run(rows, self._results(rows), self._angles.up_to(last_position))

        return run

    def close(self) -> None:
        """Stop reading ahead until the next pass."""
        if self._whole_pass is not None and self._whole_pass.stream is not None:
            self._whole_pass.stream.close()

    # --- figures and texts ---

    @property
    def weight_bytes(self) -> int:
        return self._source.plan.size

    @property
    def stream(self) -> WeightStream | None:
        """What reads the weights of a whole pass; None if memory holds them all."""
        return self._pass().stream

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay in memory."""
        return sum(held.numel() for held in self._resident.values())

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the weights that every pass reads from disk."""
        return 0 if self.stream is None else self.stream.bytes

    @property
    def in_words(self) -> str:
        """In words: how much of the weights every pass reads from disk, and how fast."""
        rate = 0.0 if self.stream is None else self.stream.rate / 1e9
        return (
            f"{self.streamed_bytes / 1e6:.0f} of {self.weight_bytes / 1e6:.0f} MB a pass from "
            f"disk at {rate:.2f} GB/s, {peak_memory()}"
        )

    def record(self) -> dict[str, float | int | None]:
        """The same in numbers: bytes, bytes per second, and seconds."""
        stream = self.stream
        return {
            "streamed_bytes": self.streamed_bytes,
            "resident_bytes": self.resident_bytes,
            "buffer_bytes": 0 if stream is None else stream.buffer_bytes,
            "bytes_per_second": None if stream is None else stream.rate,
            "waited_seconds": None if stream is None else stream.waited,
            "peak_bytes": peak_bytes(),
        }

    @property
    def shared_in_words(self) -> str:
        """In words: what a feature drafter's copies of the embedding and the head take."""
        return (
            f"they take {(self._source.plan.embedding_bytes + self._head_bytes) / 1e6:.0f} MB "
            "beside --memory"
        )

    # --- embedding and head for a feature drafter, copied to memory of their own ---

    @property
    def embedding(self) -> nn.Embedding:
        return self._shared[0]

    @property
    def head(self) -> NativeLinear:
        return self._shared[1]

    @property
    def _shared(self) -> tuple[nn.Embedding, NativeLinear]:
        if self._own is None:
            embedding = nn.Embedding(
                *self._source.plan.embedding, dtype=torch.bfloat16, device="meta"
            )
            rows = self._rows.all() * self.stack.scale
            embedding.weight = nn.Parameter(rows, requires_grad=False)
            self._own = embedding, NativeLinear(self._kernels, self._read_head())
        return self._own

    @property
    def _head_bytes(self) -> int:
        return self._output.shape.blocks * self._source.plan.blocks[self._output.number]

    def _read_head(self) -> AnyPacked:
        """Read the whole head from the file."""
        plan, file = self._source.plan, File(self._source.path)
        shape, block = self._output.shape, plan.blocks[self._output.number]
        data = torch.empty(self._head_bytes, dtype=torch.uint8)
        for i, part in self._parts[self._output.number]:
            segment, room = plan.segments[i], aligned(plan.segments[i].size)
            file.read(ALIGNED + segment.offset, room.numpy().data)
            data[part.first * block : (part.first + part.blocks) * block] = room[
                part.offset : part.offset + part.blocks * block
            ]
        packer = Packer(self._kernels, shape.name)
        weight = torch.empty(shape.rows, shape.inputs, device="meta")
        return packer.pack([weight], self._output.bias, place=data.view(packer.dtype), filled=True)


def likeliest(logits: torch.Tensor) -> list[int]:
    """Return the column of each row's largest number, the first of equal ones.

    `logits`: `[n, vocab]` on the CPU. It is -1 for a row with a NaN, or whose largest number is
    infinite.
    """
    if not len(logits):
        return []
    rows = logits.numpy()
    best = rows.argmax(1)  # the column of a NaN, if there is one
    return np.where(np.isfinite(rows[np.arange(len(rows)), best]), best, -1).tolist()  # type: ignore[no-any-return]
