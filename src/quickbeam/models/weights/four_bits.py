"""The parameters of a model as a copy of it in 4 bits is made of them."""

from __future__ import annotations

from typing import Any

import torch

from quickbeam.models.native.library import FORMATS, Kernels
from quickbeam.models.native.quantised import BlockRows, Weight, dense_rows
from quickbeam.models.stack import Stack
from quickbeam.models.weights.parameters import Parameters, linears

# Blocks with more bits a weight are widened, so that they are quantised; others stay. `int4` has 5.
MOST_BITS = 6.0


def bits_of(name: str) -> float:
    """Return how many bits a weight of the format `name` takes."""
    block_format = FORMATS[name]
    return 8 * block_format.bytes / block_format.inputs


class FourBitParameters(Parameters):
    """The `parameters` of a model whose `stack` this is, for a copy of it in 4 bits.

    Weights in blocks of many bits are dense here. `embedding`: the model's table, which the copy
    shares. `widens`: whether there are such blocks.
    """

    def __init__(
        self, parameters: Parameters, stack: Stack, embedding: Weight, kernels: Kernels
    ) -> None:
        self.config = parameters.config
        self.dtype = parameters.dtype
        self._parameters = parameters
        self._kernels = kernels
        self._embedding_name = stack.embedding
        self._embedding = embedding
        weights = [rows for linear, _ in linears(stack) for rows in linear.weights]
        # a file's blocks are never transposed, dense weights are
        self._transposed = {rows.name for rows in weights if rows.transposed}
        self.widens = any(self._is_wide(parameters.like(rows.name)) for rows in weights)

    def _is_wide(self, weight: Weight) -> bool:
        return isinstance(weight, BlockRows) and bits_of(weight.name) > MOST_BITS

    def shape(self, name: str) -> list[int]:
        return self._parameters.shape(name)

    def like(self, name: str) -> Weight:
        weight = self._parameters.like(name)
        return super().like(name) if self._is_wide(weight) else weight

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        rows = self._parameters.rows(name, first, last)
        if not self._is_wide(rows):
            return rows
        dense = dense_rows(self._kernels, rows).to(torch.bfloat16)
        return dense.transpose(-1, -2) if name in self._transposed else dense

    def mapped(self, name: str) -> Any:
        if name == self._embedding_name:
            return self._embedding
        return self._parameters.mapped(name)

    def release(self, layers: str, layer: int | None) -> None:
        self._parameters.release(layers, layer)
