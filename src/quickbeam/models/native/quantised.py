"""Weights of 8 or 4 bits in the kernels' layout (`quantised.h`).

`Packer` packs weights of any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.memory import room_for_weights
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK, Packed, gated_bias

GROUP = 32  # inputs that are quantised together
BFLOAT16, INT8, INT4, FLOAT32 = library.FORMATS
WHOLE = {BFLOAT16: torch.bfloat16, FLOAT32: torch.float32}  # formats that keep every bit
NOT_FINITE = (
    "the weights hold numbers that are not finite (NaN or infinite) and can't be "
    "quantised: leave weights out"
)


class QuantisedPacked:
    """A weight `[outputs, inputs]` in blocks of 8 or 4 bits, and its bias in float32.

    `quantised.h` describes the blocks. `name`: `int8` or `int4`. The other arguments are those of
    `Packed`, but `place` counts bytes. Raises `InvalidInput` for weights that are not finite.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[torch.Tensor],
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
        self.name, self.format = name, library.FORMATS.index(name)
        self._block = kernels.block_bytes(self.format, self.inputs)
        parts = list(weights) if gated or len(weights) == 1 else [torch.cat(list(weights))]
        rows = len(parts[0])
        self.blocks = -(-rows // BLOCK) * len(parts)
        self.data = (
            room_for_weights(self.blocks * self._block, torch.uint8) if place is None else place
        )
        for i, part in enumerate([] if filled else parts):
            part = part.detach().to(torch.bfloat16).contiguous()
            to, stride = self.data.data_ptr() + i * self._block, self._block * len(parts)
            if not kernels.quantise(
                self.format, part.data_ptr(), rows, self.inputs, self.inputs, to, stride
            ):
                raise InvalidInput(NOT_FINITE)
        self.bias = (
            None
            if bias is None
            else gated_bias(bias, rows, self.blocks)
            if gated
            else bias.detach().float().contiguous()
        )

    @staticmethod
    def size(
        kernels: Kernels, weights: Sequence[torch.Tensor], name: str, gated: bool = False
    ) -> int:
        """Return how many bytes these weights take when packed."""
        rows = (
            [len(weight) for weight in weights]
            if gated
            else [sum(len(weight) for weight in weights)]
        )
        block: int = kernels.block_bytes(library.FORMATS.index(name), weights[0].shape[1])
        return sum(-(-n // BLOCK) for n in rows) * block

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return values, scales and lowest values by output, in the order of the blocks.

        Values are whole numbers, `[blocks * 16, groups, 32]` int8. Scales are float32
        `[blocks * 16]` for `int8`, float16 `[blocks * 16, groups]` for `int4`. Lowest values are
        added to the scaled values of `int4`, in the shape of its scales; they are None for `int8`.
        """
        groups, blocks = -(-self.inputs // GROUP), self.data.view(self.blocks, self._block)
        if self.name == INT8:
            values = blocks[:, : groups * 512].reshape(self.blocks, groups, 8, BLOCK, 4).int() - 128
            scales = blocks[:, groups * 512 :].contiguous().view(torch.float32).flatten()
            return _by_output(values), scales, None
        pairs = blocks[:, : groups * 256].reshape(self.blocks, groups, 4, 1, BLOCK, 4)
        values = torch.cat([pairs & 15, pairs >> 4], 3).flatten(2, 3)
        halves = (
            blocks[:, groups * 256 :]
            .contiguous()
            .view(torch.float16)
            .view(self.blocks, groups, 2, BLOCK)
        )
        scales, lows = halves.permute(2, 0, 3, 1).reshape(2, -1, groups)
        return _by_output(values), scales, lows

    def rows(self) -> torch.Tensor:
        """Return the weight that the blocks stand for, `[outputs, inputs]` bfloat16.

        Not for gated weights.
        """
        values, scales, lows = self.parts()
        dense = values * scales.float().view(len(values), -1, 1)
        if lows is not None:
            dense += lows.float()[..., None]
        return dense.flatten(1)[: self.outputs, : self.inputs].to(torch.bfloat16)


def _by_output(values: torch.Tensor) -> torch.Tensor:
    """Reorder `[blocks, groups, fours, 16, 4]` to `[blocks * 16, groups, 32]` int8."""
    blocks, groups = values.shape[:2]
    return values.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK, groups, GROUP).to(torch.int8)


AnyPacked = Packed | QuantisedPacked


class Packer(NamedTuple):
    """Packs a model's weights in one format. `name`: of `library.FORMATS`."""

    kernels: Kernels
    name: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the memory that packed weights take."""
        return WHOLE.get(self.name, torch.uint8)

    def size(self, weights: Sequence[torch.Tensor], gated: bool = False) -> int:
        """Return how many numbers of that dtype these weights take."""
        if self.name in WHOLE:
            return Packed.size(weights, gated)
        return QuantisedPacked.size(self.kernels, weights, self.name, gated)

    def pack(
        self,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        gated: bool = False,
        place: torch.Tensor | None = None,
        filled: bool = False,
    ) -> AnyPacked:
        """Pack a weight. The arguments are those of `Packed`.

        Raises as `Packed` and `QuantisedPacked` do.
        """
        if self.name in WHOLE:
            return Packed(
                self.kernels,
                weights,
                bias,
                gated=gated,
                place=place,
                filled=filled,
                dtype=self.dtype,
            )
        return QuantisedPacked(
            self.kernels, weights, bias, name=self.name, gated=gated, place=place, filled=filled
        )
