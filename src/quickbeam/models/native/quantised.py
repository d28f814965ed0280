"""Packed weights: weights in the kernels' layout (`formats.h`).

Their values are as they come, quantised here, or in few bits as a file's blocks hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.memory import memory_for_weights
from quickbeam.models.native.grids import grid_of
from quickbeam.models.native.library import FORMATS, Kernels
from quickbeam.models.native.operands import BLOCK

GROUP = 32  # inputs that are quantised together
BFLOAT16, INT8, INT4, FLOAT32 = tuple(FORMATS)[:4]
EXACT_FORMATS = {BFLOAT16: torch.bfloat16, FLOAT32: torch.float32}  # they keep every bit
NOT_FINITE = (
    "the weights hold numbers that are not finite (NaN or infinite) and can't be "
    "quantised: leave weights out"
)


@dataclass(frozen=True)
class BlockRows:
    """Rows of a weight in few bits, as blocks of a file.

    `data`: `[..., rows, bytes]` uint8. `name`: a format with blocks. `input_order`: which input
    each stored element is for, `[inputs]` int32; None: the first is for the first.
    """

    data: torch.Tensor
    name: str
    input_order: torch.Tensor | None = None

    @property
    def shape(self) -> list[int]:
        """The shape of the weight, `[..., rows, inputs]`."""
        block_format = FORMATS[self.name]
        *outer, row_bytes = self.data.shape
        return [*outer, row_bytes // block_format.bytes * block_format.inputs]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> BlockRows:
        return replace(self, data=self.data[index])


Weight = torch.Tensor | BlockRows


def with_data(weight: Weight, data: torch.Tensor) -> Weight:
    """Return a weight of the same format with other elements or bytes."""
    return replace(weight, data=data) if isinstance(weight, BlockRows) else data


def concatenated(weights: Sequence[Weight]) -> Weight:
    """Return weights of one format one below the other."""
    return with_data(weights[0], torch.cat([weight.data for weight in weights]))


def input_order_of(weight: Weight) -> torch.Tensor | None:
    """Return the order in which a weight's inputs are stored; None for the model's."""
    return weight.input_order if isinstance(weight, BlockRows) else None


class Packed:
    """A weight `[outputs, inputs]` in the kernels' layout (`formats.h`), and its bias in float32.

    `weights`: one, or several that are stacked one below the other. Dense ones get the format
    `name`; or all are `BlockRows` of that format and of one `input_order`, whose bits are kept.
    `dtype`: that of the rows it is multiplied with.

    `gated`: `weights` are two of the same shape, the gate and the up projection. Blocks of 16
    outputs of the two alternate, gate first. `memory`: where to pack, `[size]` uint8; None
    allocates it. It holds `weights` already that have no memory themselves (on the device `meta`).

    Raises `ValueError` for an odd number of inputs in bfloat16, and `InvalidInput` for weights to
    quantise that are not finite.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        name: str = BFLOAT16,
        gated: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.inputs = weights[0].shape[1]
        self.outputs = sum(len(weight) for weight in weights)
        if self.inputs % 2 and name == BFLOAT16:
            raise ValueError(f"{self.inputs} inputs: must be even")
        self.name, self.gated = name, gated
        self.format = FORMATS[name].number
        self.input_order = input_order_of(weights[0])
        self.dtype = EXACT_FORMATS.get(name, torch.bfloat16)
        self._kernels = kernels
        self._block_bytes = int(kernels.block_bytes(self.format, self.inputs))
        rows = len(weights[0]) if gated else self.outputs
        alternating = 2 if gated else 1
        blocks = -(-rows // BLOCK) * alternating
        if memory is None:
            memory = memory_for_weights(blocks * self._block_bytes)
        self.data = memory
        if not weights[0].data.is_meta:
            parts = weights if gated or len(weights) == 1 else [concatenated(weights)]
            for i, part in enumerate(parts):
                self._pack(part, i, alternating)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        if gated and self.bias is not None:  # in blocks, as the weight is
            padded = torch.zeros(2, blocks * BLOCK // 2)
            padded[:, :rows] = self.bias.view(2, rows)
            self.bias = padded.view(2, -1, BLOCK).transpose(0, 1).contiguous()

    def _pack(self, part: Weight, first: int, step: int) -> None:
        """Pack a weight into the blocks `first`, `first + step`, `first + 2 * step`, …"""
        kernels = self._kernels
        rows, inputs = len(part), self.inputs
        address = self.data.data_ptr() + first * self._block_bytes
        stride = step * self._block_bytes
        if isinstance(part, BlockRows):
            data, grid = part.data.contiguous(), grid_of(part.name)
            kernels.repack(
                self.format,
                None if grid is None else grid.data_ptr(),
                data.data_ptr(),
                rows,
                inputs,
                data.shape[1],
                address,
                stride,
            )
            return
        part = part.detach().to(self.dtype).contiguous()
        if self.name == FLOAT32:
            padded = torch.zeros(-(-rows // BLOCK) * BLOCK, inputs)
            padded[:rows] = part
            blocks = self.data.view(torch.float32).view(-1, step, inputs, BLOCK)[:, first]
            blocks.copy_(padded.view(-1, BLOCK, inputs).transpose(1, 2))
        elif self.name == BFLOAT16:  # its stride is counted in elements
            kernels.pack(part.data_ptr(), rows, inputs, inputs, address, stride // 2)
        else:
            finite = kernels.quantise(
                self.format, part.data_ptr(), rows, inputs, inputs, address, stride
            )
            if not finite:
                raise InvalidInput(NOT_FINITE)

    def touch(self) -> None:
        """Have threads touch the pages of new memory that they will read in products.

        They come to lie in the threads' memory nodes (`Kernels.nodes`).
        """
        step_bytes = self._block_bytes * (2 if self.gated else 1)
        self._kernels.touch(
            self.data.data_ptr(),
            len(self.data) // step_bytes,
            step_bytes,
            self._kernels.nodes,
            torch.get_num_threads(),
        )

    def dense(self) -> torch.Tensor:
        """Return the values that blocks of few bits stand for, `[outputs, inputs]` float32.

        Not for gated weights.
        """
        weight = torch.empty(self.outputs, self.inputs)
        self._kernels.dense(
            self.format,
            self.data.data_ptr(),
            self.outputs,
            self.inputs,
            self._block_bytes,
            weight.data_ptr(),
        )
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order.long(), weight)

    def rows(self) -> torch.Tensor:
        """Return the weight as it came, `[outputs, inputs]`, or of few bits, in bfloat16.

        Not for gated weights.
        """
        if self.name not in EXACT_FORMATS:
            return self.dense().to(torch.bfloat16)
        data = self.data.view(self.dtype)
        if self.name == FLOAT32:
            blocks = data.view(-1, self.inputs, BLOCK).transpose(1, 2)
            return blocks.reshape(-1, self.inputs)[: self.outputs].clone()
        weight = torch.empty(self.outputs, self.inputs, dtype=self.dtype)
        self._kernels.unpack(
            data.data_ptr(),
            self.outputs,
            self.inputs,
            self._block_bytes // 2,  # in elements
            weight.data_ptr(),
        )
        return weight


def dense_rows(kernels: Kernels, weight: BlockRows) -> torch.Tensor:
    """Return the values that a file's blocks stand for, `[..., rows, inputs]` float32."""
    rows = replace(weight, data=weight.data.reshape(-1, weight.data.shape[-1]))
    return Packed(kernels, [rows], name=weight.name).dense().view(weight.shape)


class SplitPacked(NamedTuple):
    """Weights of several formats that are read by one product: each has its own.

    `gated`: two, the gate and the up projection.
    """

    parts: tuple[Packed, ...]
    gated: bool

    def touch(self) -> None:
        """Do the same as `Packed.touch`."""
        for part in self.parts:
            part.touch()

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)


class Packer(NamedTuple):
    """Packs a model's weights. `name`: the format that dense ones get; `BlockRows` keep theirs."""

    kernels: Kernels
    name: str

    def _format_of(self, weight: Weight) -> str:
        return weight.name if isinstance(weight, BlockRows) else self.name

    def have_one_layout(self, weights: Sequence[Weight]) -> bool:
        """Whether all weights get one format, and store their inputs in one order."""
        if len({self._format_of(weight) for weight in weights}) > 1:
            return False
        first, *others = [input_order_of(weight) for weight in weights]
        if first is None:
            return all(other is None for other in others)
        return all(other is not None and torch.equal(other, first) for other in others)

    def size(self, weights: Sequence[Weight], gated: bool = False) -> int:
        """Return how many bytes these weights take."""
        if not self.have_one_layout(weights):
            return sum(self.size([weight]) for weight in weights)
        number = FORMATS[self._format_of(weights[0])].number
        block_bytes = int(self.kernels.block_bytes(number, weights[0].shape[1]))
        rows = [len(weight) for weight in weights]
        if not gated:
            rows = [sum(rows)]
        return sum(-(-count // BLOCK) for count in rows) * block_bytes

    def pack(
        self,
        weights: Sequence[Weight],
        bias: torch.Tensor | None = None,
        gated: bool = False,
        memory: torch.Tensor | None = None,
    ) -> Any:
        """Pack weights: as `Packed`, whose arguments and errors these are, or as `SplitPacked`."""
        if self.have_one_layout(weights):
            name = self._format_of(weights[0])
            return Packed(self.kernels, weights, bias, name=name, gated=gated, memory=memory)
        parts = list[Packed]()
        row = offset = 0
        for weight in weights:
            last, end = row + len(weight), offset + self.size([weight])
            part_bias = None if bias is None else bias[row:last]
            part_memory = None if memory is None else memory[offset:end]
            parts.append(self.pack([weight], part_bias, memory=part_memory))
            row, offset = last, end
        return SplitPacked(tuple(parts), gated)
