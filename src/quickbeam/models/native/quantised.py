"""Weights of few bits in the kernels' layout (`formats.h`): quantised here, or as a file has them.

`Packer` packs weights of any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.memory import room_for_weights
from quickbeam.models.native import library
from quickbeam.models.native.formats import FORMATS
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK, Packed, gated_bias

GROUP = 32  # inputs that are quantised together
BFLOAT16, INT8, INT4, FLOAT32 = library.FORMATS[:4]
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


def order_of(weight: Weight) -> torch.Tensor | None:
    """Return the order of a weight's inputs, None where they are in their own."""
    return weight.order if isinstance(weight, BlockRows) else None


class QuantisedPacked:
    """A weight `[outputs, inputs]` in blocks of few bits, and its bias in float32.

    `weights`: dense, which are quantised to `name` (`int8` or `int4`), or all `BlockRows` of that
    format and of one order (`order`), whose bits are kept. The other arguments are those of
    `Packed`, but `place` counts bytes. Raises `InvalidInput` for weights to quantise that are not
    finite.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        name: str,
        gated: bool = False,
        place: torch.Tensor | None = None,
        filled: bool = False,
    ) -> None:
        self.inputs, self.gated, self.outputs = (
            weights[0].shape[1],
            gated,
            sum(len(weight) for weight in weights),
        )
        self.name, self.format, self._kernels = name, library.FORMATS.index(name), kernels
        self.order = order_of(weights[0])
        self._block = kernels.block_bytes(self.format, self.inputs)
        rows, together = (len(weights[0]), len(weights)) if gated else (self.outputs, 1)
        self.blocks = -(-rows // BLOCK) * together
        self.data = (
            room_for_weights(self.blocks * self._block, torch.uint8) if place is None else place
        )
        parts = list(weights) if gated or len(weights) == 1 or filled else [_stacked(weights)]
        for i, part in enumerate([] if filled else parts):
            self._put(part, self.data.data_ptr() + i * self._block, self._block * together)
        self.bias = (
            None
            if bias is None
            else gated_bias(bias, rows, self.blocks)
            if gated
            else bias.detach().float().contiguous()
        )

    def _put(self, part: Weight, to: int, stride: int) -> None:
        of, kernels = (len(part), self.inputs), self._kernels
        if isinstance(part, BlockRows):
            data = part.data.contiguous()
            kernels.repack(self.format, data.data_ptr(), *of, data.shape[1], to, stride)
            return
        part = part.detach().to(torch.bfloat16).contiguous()
        if not kernels.quantise(self.format, part.data_ptr(), *of, self.inputs, to, stride):
            raise InvalidInput(NOT_FINITE)

    @staticmethod
    def size(kernels: Kernels, weights: Sequence[Weight], name: str, gated: bool = False) -> int:
        """Return how many bytes these weights take when packed."""
        rows = (
            [len(weight) for weight in weights]
            if gated
            else [sum(len(weight) for weight in weights)]
        )
        block: int = kernels.block_bytes(library.FORMATS.index(name), weights[0].shape[1])
        return sum(-(-n // BLOCK) for n in rows) * block

    def dense(self) -> torch.Tensor:
        """Return the numbers that the blocks stand for, `[outputs, inputs]` float32.

        Not for gated weights.
        """
        weight = torch.empty(self.outputs, self.inputs)
        self._kernels.dense(
            self.format,
            self.data.data_ptr(),
            self.outputs,
            self.inputs,
            self._block,
            weight.data_ptr(),
        )
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def rows(self) -> torch.Tensor:
        """Return these numbers rounded to bfloat16. Not for gated weights."""
        return self.dense().to(torch.bfloat16)


def _stacked(weights: Sequence[Weight]) -> Weight:
    """Return weights of one format one below the other."""
    first, *_ = weights
    if isinstance(first, BlockRows):
        data = [one.data for one in weights if isinstance(one, BlockRows)]
        return replace(first, data=torch.cat(data))
    return torch.cat([one for one in weights if isinstance(one, torch.Tensor)])


def dense_rows(kernels: Kernels, weight: BlockRows) -> torch.Tensor:
    """Return the numbers that a file's blocks stand for, `[..., rows, inputs]` float32."""
    rows = replace(weight, data=weight.data.reshape(-1, weight.data.shape[-1]))
    return QuantisedPacked(kernels, [rows], name=weight.name).dense().view(weight.shape)


class SplitPacked(NamedTuple):
    """Weights of several formats that are read by one product: each has its own.

    `gated`: two, the gates' and what the gates multiply.
    """

    parts: tuple[Packed | QuantisedPacked, ...]
    gated: bool

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)


AnyPacked = Packed | QuantisedPacked


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
        name = self._named(weights[0])
        if name in WHOLE:
            dense = [one for one in weights if isinstance(one, torch.Tensor)]
            return Packed.size(dense, gated) * WHOLE[name].itemsize
        return QuantisedPacked.size(self.kernels, weights, name, gated)

    def pack(
        self,
        weights: Sequence[Weight],
        bias: torch.Tensor | None = None,
        gated: bool = False,
        place: torch.Tensor | None = None,
        filled: bool = False,
    ) -> AnyPacked:
        """Pack weights that get one format. The arguments are those of `Packed`.

        `place`: `[size]` uint8. Raises as `Packed` and `QuantisedPacked` do.
        """
        name = self._named(weights[0])
        how = {"gated": gated, "filled": filled}
        if name in WHOLE:
            dtype = WHOLE[name]
            room = None if place is None else place.view(dtype)
            dense = [one for one in weights if isinstance(one, torch.Tensor)]
            return Packed(self.kernels, dense, bias, **how, place=room, dtype=dtype)
        return QuantisedPacked(self.kernels, weights, bias, **how, name=name, place=place)

    def pack_apart(
        self,
        weights: Sequence[Weight],
        bias: torch.Tensor | None = None,
        gated: bool = False,
        place: torch.Tensor | None = None,
        filled: bool = False,
    ) -> AnyPacked | SplitPacked:
        """Pack weights that may get several formats. As `pack` otherwise."""
        if self.together(weights):
            return self.pack(weights, bias, gated, place, filled)
        parts, column, used = [], 0, 0
        for weight in weights:
            of = None if bias is None else bias[column : column + len(weight)]
            size = self.size([weight])
            room = None if place is None else place[used : used + size]
            parts.append(self.pack([weight], of, False, room, filled))
            column, used = column + len(weight), used + size
        return SplitPacked(tuple(parts), gated)
