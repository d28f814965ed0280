"""Weights of 4 bits that stay packed on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from quickbeam.models.native.library import FORMATS
from quickbeam.models.native.quantised import BlockRows, input_order_of

PACKED_FORMATS = {"w4g32", "w4g128"}  # of AWQ, GPTQ and compressed-tensors (`prequantised.py`)
HALF = 16  # inputs of low halves of bytes; the next 16 are of the high ones


class PackedWeight(NamedTuple):
    """A weight `[outputs, inputs]` whose numbers are `(q - zero) * scale`, q from 0 to 15.

    `values`: `[outputs, inputs / 2]` uint8. A byte is of two inputs that stand 16 apart, the first
    in the low half: of every 32 inputs, byte i is of inputs i and i + 16. `scales` float32, `zeros`
    uint8: `[outputs, groups]`, each of so many inputs. `order`: which input each number is for,
    `[inputs]` int64; None: the first is for the first.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Any]) -> PackedWeight | None:
        """Return weights one below the other; None where they can't be packed together.

        They are tensors, or `BlockRows`.
        """
        blocks = [weight for weight in weights if isinstance(weight, BlockRows)]
        names = {rows.name for rows in blocks}
        if len(blocks) < len(weights) or len(names) > 1 or not names <= PACKED_FORMATS:
            return None
        order, *others = map(input_order_of, blocks)
        if not all(same_order(order, other) for other in others):
            return None
        block = FORMATS[names.pop()].bytes
        data = torch.unflatten(torch.cat([rows.data for rows in blocks]), -1, (-1, block))
        scales = data[..., :4].contiguous().view(torch.float32).squeeze(-1)
        values = data[..., 5:].flatten(1).contiguous()
        zeros = data[..., 4].contiguous()
        return cls(values, scales, zeros, None if order is None else order.long())

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return 2 * self.values.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    def to(self, device: torch.device) -> PackedWeight:
        """Return it on a device."""
        order = None if self.order is None else self.order.to(device)
        values, scales = self.values.to(device), self.scales.to(device)
        return PackedWeight(values, scales, self.zeros.to(device), order)

    def dense(self) -> torch.Tensor:
        """Return the numbers, `[outputs, inputs]` float32, in the order of `values`."""
        bytes_of = torch.unflatten(self.values, -1, (-1, HALF))
        q = torch.stack([bytes_of & 15, bytes_of >> 4], -2).flatten(1)
        zeros = self.zeros.float().repeat_interleave(self.group, 1)
        return (q.float() - zeros) * self.scales.repeat_interleave(self.group, 1)


def same_order(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two weights read their inputs in one order."""
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


class PackedProduct(nn.Module):
    """A product as `Product`, by a weight of 4 bits: `[n, inputs]` to `[n, outputs]` float32.

    `dtype`: the number format in which it is computed, to which the weight's numbers are rounded.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.bias, self.dtype = bias, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from quickbeam.models.torch.fused_product import multiply_packed

        x = x.to(self.dtype)
        weight = self.weight
        if weight.order is not None:
            x = x[:, weight.order]
        result = multiply_packed(x, weight.values, weight.scales, weight.zeros)
        return result if self.bias is None else result + self.bias.float()
