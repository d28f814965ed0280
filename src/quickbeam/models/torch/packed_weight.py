"""Weights of 4 bits that stay packed on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from quickbeam.models.native.library import FORMATS
from quickbeam.models.native.quantised import BlockRows, Weight, input_order_of

PACKED_FORMATS = {"w4g32", "w4g128"}  # of AWQ, GPTQ and compressed-tensors (`prequantised.py`)
HALF = 16  # low halves of bytes hold 16 inputs, and high halves the next 16


class PackedWeight(NamedTuple):
    """A weight `[outputs, inputs]` whose elements are `(q - zero) * scale`, q from 0 to 15.

    `values`: `[outputs, inputs / 2]` uint8. Of every 32 inputs, byte i holds q of input i in its
    low half, and q of input i + 16 in its high half. `scales`: `[outputs, groups]` float32.
    `zeros`: `[outputs, groups]` uint8. `order`: the input of each column, `[inputs]` int64; None:
    columns are in the order of the inputs.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Weight]) -> PackedWeight | None:
        """Return weights one below the other; None where they can't be packed together."""
        blocks = [weight for weight in weights if isinstance(weight, BlockRows)]
        if len(blocks) < len(weights):
            return None
        name = blocks[0].name
        if name not in PACKED_FORMATS or any(rows.name != name for rows in blocks):
            return None
        order = input_order_of(blocks[0])
        if not all(same_order(order, input_order_of(rows)) for rows in blocks):
            return None
        # a block is its scale (4 bytes), its zero (1 byte) and its values
        data = torch.cat([rows.data for rows in blocks])
        data = torch.unflatten(data, -1, (-1, FORMATS[name].bytes))
        return cls(
            values=data[..., 5:].flatten(1).contiguous(),
            scales=data[..., :4].contiguous().view(torch.float32).squeeze(-1),
            zeros=data[..., 4].contiguous(),
            order=None if order is None else order.long(),
        )

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return 2 * self.values.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    def to(self, device: torch.device) -> PackedWeight:
        """Return this weight on a device."""
        return PackedWeight(
            values=self.values.to(device),
            scales=self.scales.to(device),
            zeros=self.zeros.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def dense(self) -> torch.Tensor:
        """Return the elements, `[outputs, inputs]` float32, columns in the order of `values`."""
        packed = torch.unflatten(self.values, -1, (-1, HALF))
        q = torch.stack([packed & 15, packed >> 4], -2).flatten(1)
        zeros = self.zeros.float().repeat_interleave(self.group, 1)
        scales = self.scales.repeat_interleave(self.group, 1)
        return (q.float() - zeros) * scales


def same_order(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two weights read their inputs in the same order."""
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


class PackedProduct(nn.Module):
    """A product as `Product`, by a weight of 4 bits: `[n, inputs]` to `[n, outputs]` float32.

    `dtype`: the number format of the product, to which the weight's elements are rounded.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from quickbeam.models.torch.fused_product import multiply_packed

        weight = self.weight
        x = x.to(self.dtype)
        if weight.order is not None:
            x = x[:, weight.order]
        result = multiply_packed(x, weight.values, weight.scales, weight.zeros)
        return result if self.bias is None else result + self.bias.float()
