"""Packed weights of the native kernels as a linear layer."""

from __future__ import annotations

import torch
from torch import nn

from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import Packed, plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import AnyPacked


class NativeLinear(nn.Module):
    """A packed product as a module: `[..., in]` to `[..., out]`.

    Both are bfloat16, or float32 for float32 weights.

    A row's bits don't depend on the other rows. `forward` raises `ValueError` for another dtype or
    width.
    """

    def __init__(self, found: Kernels, packed: AnyPacked) -> None:
        super().__init__()
        self.packed, self.in_features, self.out_features = packed, packed.inputs, packed.outputs
        self._program, self._dtype = Program(found), torch.bfloat16
        if isinstance(packed, Packed):
            self._dtype = packed.dtype
        wide = self._dtype is torch.float32
        source, target = (
            self._program.given("x", packed.inputs, wide),
            self._program.given("y", packed.outputs, wide),
        )
        self._program.linear(packed, source, target)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a product of {x.dtype} {list(x.shape)}: must be {self._dtype} [..., "
                f"{self.in_features}]"
            )
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        if rows := x.numel() // self.in_features:
            self._program.run(plain_rows(rows), {"x": x, "y": out})
        return out
