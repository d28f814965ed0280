"""Packed weights of the native kernels as a linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import AnyPacked


def bias_of(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """Return the bias `[out]` of linears fused by rows.

    A linear without one has zeros. None where no linear has a bias.
    """
    if all(linear.bias is None for linear in linears):
        return None
    given = next(linear.bias for linear in linears if linear.bias is not None)
    return torch.cat(
        [
            given.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


class NativeLinear(nn.Module):
    """A packed product as a module: `[..., in]` bfloat16 to `[..., out]` bfloat16.

    A row's bits don't depend on the other rows. `forward` raises `ValueError` for another dtype or
    width.
    """

    def __init__(self, found: Kernels, packed: AnyPacked) -> None:
        super().__init__()
        self.packed, self.in_features, self.out_features = packed, packed.inputs, packed.outputs
        self._program = Program(found)
        source, target = (
            self._program.given("x", packed.inputs),
            self._program.given("y", packed.outputs),
        )
        self._program.linear(packed, source, target)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a product of {x.dtype} {list(x.shape)}: must be bfloat16 [..., "
                f"{self.in_features}]"
            )
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        if rows := x.numel() // self.in_features:
            self._program.run(plain_rows(rows), {"x": x, "y": out})
        return out
