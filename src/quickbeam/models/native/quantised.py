"""Weights in the kernels' layout (`formats.h`): as they come, quantised here, or of few bits as a
file has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.memory import room_for_weights
from quickbeam.models.native.library import FORMATS, Kernels
from quickbeam.models.native.operands import BLOCK

GROUP = 32  # inputs that are quantised together
BFLOAT16, INT8, INT4, FLOAT32 = tuple(FORMATS)[:4]
WHOLE = {BFLOAT16: torch.bfloat16, FLOAT32: torch.float32}  # formats that keep every bit
NOT_FINITE = (
    "the weights hold numbers that are not finite (NaN or infinite) and can't be "
    "quantised: leave weights out"
)


@dataclass(frozen=True)
class BlockRows:
    """Rows of a weight as blocks of a file.

    `data`: `[..., rows, bytes]` uint8. `name`: a format with blocks. `order`: which input each
    number is for, `[inputs]` int32; None: the first is for the first.
    """

    data: torch.Tensor
    name: str
    order: torch.Tensor | None = None

    @property
    def shape(self) -> list[int]:
        """That of the weight, `[..., rows, inputs]`."""
        of = FORMATS[self.name]
        return [*self.data.shape[:-1], self.data.shape[-1] // of.bytes * of.inputs]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, which: Any) -> BlockRows:
        return replace(self, data=self.data[which])


Weight = torch.Tensor | BlockRows


def with_data(weight: Weight, data: torch.Tensor) -> Weight:
    """Return a weight of the same format with other numbers or bytes."""
    return replace(weight, data=data) if isinstance(weight, BlockRows) else data


def below(weights: Sequence[Weight]) -> Weight:
    """Return weights of one format one below the other."""
    return with_data(weights[0], torch.cat([one.data for one in weights]))


def order_of(weight: Weight) -> torch.Tensor | None:
    """Return the order of a weight's inputs, None where they are in their own."""
    return weight.order if isinstance(weight, BlockRows) else None


class Packed:
    """A weight `[outputs, inputs]` in the kernels' layout (`formats.h`), and its bias in float32.

    `weights`: one, or several that are stacked one below the other. Dense ones get the format
    `name`; or all are `BlockRows` of that format and of one order (`order`), whose bits are kept.
    `dtype`: that of the rows it is multiplied with.

    `gated`: `weights` are two of the same shape, the gates and what the gates multiply. Blocks of
    16 outputs of the two alternate, gates first. `place`: the memory to use, `[size]` uint8; None
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
        place: torch.Tensor | None = None,
    ) -> None:
        self.inputs, self.outputs = weights[0].shape[1], sum(map(len, weights))
        if self.inputs % 2 and name == BFLOAT16:
            raise ValueError(f"{self.inputs} inputs: must be even")
        self.name, self.gated, self._kernels = name, gated, kernels
        self.format, self.order = FORMATS[name].number, order_of(weights[0])
        self.dtype = WHOLE.get(name, torch.bfloat16)
        self._block = kernels.block_bytes(self.format, self.inputs)
        rows, together = (len(weights[0]), len(weights)) if gated else (self.outputs, 1)
        blocks = -(-rows // BLOCK) * together
        self.data = room_for_weights(blocks * self._block) if place is None else place
        if not weights[0].data.is_meta:
            parts = weights if gated or len(weights) == 1 else [below(weights)]
            for i, part in enumerate(parts):
                self._put(part, i, together)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        if gated and self.bias is not None:  # in blocks, as the weight is
            both = torch.zeros(2, blocks * BLOCK // 2)
            both[:, :rows] = self.bias.view(2, rows)
            self.bias = both.view(2, -1, BLOCK).transpose(0, 1).contiguous()

    def _put(self, part: Weight, i: int, together: int) -> None:
        """Write a weight to blocks i, i + `together`, …"""
        of, kernels = (len(part), self.inputs), self._kernels
        at = self.data.data_ptr() + i * self._block, self._block * together
        if isinstance(part, BlockRows):
            data = part.data.contiguous()
            kernels.repack(self.format, data.data_ptr(), *of, data.shape[1], *at)
            return
        part = part.detach().to(self.dtype).contiguous()
        if self.name == FLOAT32:
            whole = torch.zeros(-(-of[0] // BLOCK) * BLOCK, self.inputs)
            whole[: of[0]] = part
            to = self.data.view(torch.float32).view(-1, together, self.inputs, BLOCK)[:, i]
            to.copy_(whole.view(-1, BLOCK, self.inputs).transpose(1, 2))
        elif self.name == BFLOAT16:  # counts its stride in numbers
            kernels.pack(part.data_ptr(), *of, self.inputs, at[0], at[1] // 2)
        elif not kernels.quantise(self.format, part.data_ptr(), *of, self.inputs, *at):
            raise InvalidInput(NOT_FINITE)

    def dense(self) -> torch.Tensor:
        """Return the numbers that blocks of few bits stand for, `[outputs, inputs]` float32.

        Not for gated weights.
        """
        weight, of = torch.empty(self.outputs, self.inputs), (self.outputs, self.inputs)
        at = self.data.data_ptr(), *of, self._block, weight.data_ptr()
        self._kernels.dense(self.format, *at)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def rows(self) -> torch.Tensor:
        """Return the weight as it came, `[outputs, inputs]`, or of few bits, in bfloat16.

        Not for gated weights.
        """
        if self.name not in WHOLE:
            return self.dense().to(torch.bfloat16)
        data = self.data.view(self.dtype)
        if self.name == FLOAT32:
            blocks = data.view(-1, self.inputs, BLOCK).transpose(1, 2)
            return blocks.reshape(-1, self.inputs)[: self.outputs].clone()
        weight, block = torch.empty(self.outputs, self.inputs, dtype=self.dtype), self._block // 2
        at = data.data_ptr(), self.outputs, self.inputs, block, weight.data_ptr()
        self._kernels.unpack(*at)
        return weight


def dense_rows(kernels: Kernels, weight: BlockRows) -> torch.Tensor:
    """Return the numbers that a file's blocks stand for, `[..., rows, inputs]` float32."""
    rows = replace(weight, data=weight.data.reshape(-1, weight.data.shape[-1]))
    return Packed(kernels, [rows], name=weight.name).dense().view(weight.shape)


class SplitPacked(NamedTuple):
    """Weights of several formats that are read by one product: each has its own.

    `gated`: two, the gates' and what the gates multiply.
    """

    parts: tuple[Packed, ...]
    gated: bool

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

    def _named(self, weight: Weight) -> str:
        return weight.name if isinstance(weight, BlockRows) else self.name

    def together(self, weights: Sequence[Weight]) -> bool:
        """Whether all weights get one format, and read their inputs in one order."""
        first, *rest = map(order_of, weights)
        return len({self._named(weight) for weight in weights}) == 1 and all(
            one is first or (one is not None and first is not None and torch.equal(one, first))
            for one in rest
        )

    def size(self, weights: Sequence[Weight], gated: bool = False) -> int:
        """Return how many bytes these weights take."""
        if not self.together(weights):
            return sum(self.size([weight]) for weight in weights)
        rows, name = list(map(len, weights)), self._named(weights[0])
        block = self.kernels.block_bytes(FORMATS[name].number, weights[0].shape[1])
        return sum(-(-n // BLOCK) for n in (rows if gated else [sum(rows)])) * int(block)

    def pack(
        self,
        weights: Sequence[Weight],
        bias: torch.Tensor | None = None,
        gated: bool = False,
        place: torch.Tensor | None = None,
    ) -> Any:
        """Pack weights: as `Packed`, whose arguments and errors these are, or as `SplitPacked`."""
        if self.together(weights):
            name = self._named(weights[0])
            return Packed(self.kernels, weights, bias, name=name, gated=gated, place=place)
        parts, column, used = [], 0, 0
        for weight in weights:
            of = None if bias is None else bias[column : column + len(weight)]
            size = self.size([weight])
            room = None if place is None else place[used : used + size]
            parts.append(self.pack([weight], of, False, room))
            column, used = column + len(weight), used + size
        return SplitPacked(tuple(parts), gated)
