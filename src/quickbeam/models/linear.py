"""Weights of the native kernels as PyTorch's modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BlockRows, Packed, Weight, dense_rows


class NativeLinear(nn.Module):
    """A packed product as a module: `[..., in]` to `[..., out]`.

    Both are bfloat16, or float32 for float32 weights.

    A row's bits don't depend on the other rows. `forward` raises `ValueError` for another dtype or
    width.
    """

    def __init__(self, found: Kernels, packed: Packed) -> None:
        super().__init__()
        self.packed, self.in_features, self.out_features = packed, packed.inputs, packed.outputs
        self._program, self._dtype = Program(found), packed.dtype
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


class BlockEmbedding(nn.Module):
    """Token ids `[...]` to rows of blocks, times `scale`, `[..., d]` bfloat16."""

    def __init__(self, kernels: Kernels, rows: BlockRows, scale: float) -> None:
        super().__init__()
        self._kernels, self._rows, self._scale = kernels, rows, scale
        self.num_embeddings, self.embedding_dim = rows.shape

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        chosen = self._rows[ids.flatten()]
        rows = dense_rows(self._kernels, chosen) * self._scale
        return rows.to(torch.bfloat16).view(*ids.shape, self.embedding_dim)


class ScaledEmbedding(nn.Embedding):
    """Rows times a factor."""

    scale = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


def embedding_of(kernels: Kernels, weight: Weight, scale: float) -> nn.Module:
    """Return the module from token ids `[...]` to what the first layer reads, `[..., d]`."""
    if isinstance(weight, BlockRows):
        return BlockEmbedding(kernels, weight, scale)
    kind: Any = nn.Embedding if scale == 1 else ScaledEmbedding
    found: nn.Embedding = kind.from_pretrained(weight)
    if isinstance(found, ScaledEmbedding):
        found.scale = scale
    return found
