"""The parts of layers: products, norms and activations, and the reader that makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.models.native import library
from quickbeam.models.native.quantised import Weight, dense_rows
from quickbeam.models.stack import Linear, Name, Norm
from quickbeam.models.torch.packed_weight import PackedProduct, PackedWeight
from quickbeam.models.weights.parameters import Parameters, norm_weight, rows_of

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return `cap * tanh(x / cap)`, or `x` where there is no cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def constant(tensor: torch.Tensor) -> Any:
    """Return a parameter that is not trained; a tensor with gradients stays as it is."""
    return tensor if tensor.requires_grad else nn.Parameter(tensor, requires_grad=False)


class Product(nn.Module):
    """`weight @ x + bias`: `[..., inputs]` in any format to `[..., outputs]` float32.

    `weight`: `[outputs, inputs]`. The product is computed in its number format. `bias`:
    `[outputs]`. `multiply` is the function that computes the product; it may be replaced.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight: torch.Tensor = constant(weight)
        self.bias: torch.Tensor | None = None if bias is None else constant(bias)
        self.multiply: Callable[..., torch.Tensor] = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x.to(self.weight.dtype), self.weight, self.bias).float()


class NormLayer(nn.Module):
    """An RMS norm or a layer norm over the last dimension, `[..., d]` to `[..., d]` float32.

    A weight of several heads goes over the last two dimensions. It is without the norm's `factor`.
    """

    def __init__(self, norm: Norm, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.epsilon = norm.epsilon
        self.centred = norm.centred
        self.factor = norm.factor
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.epsilon)
        if self.weight is not None:
            of_heads = self.weight.numel() > x.shape[-1]
            x = x * (self.weight.view(x.shape[-2:]) if of_heads else self.weight)
        if self.factor != 1:  # after the weight, as transformers has it
            x = x * self.factor
        return x if self.bias is None else x + self.bias


def dense(weight: Weight) -> torch.Tensor:
    """Return a weight as a plain tensor; it may be in blocks of few bits."""
    if isinstance(weight, torch.Tensor):
        return weight
    kernels = library.kernels()
    assert kernels is not None
    return dense_rows(kernels, weight)


class Reader:
    """Makes the parts of layers from a model's `parameters`.

    The parts are on `device`, and products are in `dtype`. `packed`: weights of 4 bits stay packed.
    """

    def __init__(
        self,
        parameters: Parameters,
        device: torch.device,
        dtype: torch.dtype,
        packed: bool = False,
    ) -> None:
        self._parameters = parameters
        self._device = device
        self._dtype = dtype
        self._packed = packed

    def table(self, name: Name) -> Any:
        """Return a whole parameter in the products' format."""
        return constant(self._read(name, self._dtype))

    def vector(self, name: Name) -> Any:
        """Return a whole parameter in float32."""
        return constant(self._read(name, torch.float32))

    def optional_vector(self, name: Name | None) -> Any:
        """Return a whole parameter in float32; None where there is none."""
        return None if name is None else self.vector(name)

    def product(self, linear: Linear) -> Product | PackedProduct:
        """Return a product, whose weight stays packed where it can."""
        weights = [rows_of(rows, self._parameters(rows.name)) for rows in linear.weights]
        packed = PackedWeight.of(weights) if self._packed else None
        if packed is None:
            return self.dense_product(linear)
        bias = self._bias(linear, self._dtype)
        return PackedProduct(packed.to(self._device), bias, self._dtype)

    def dense_product(self, linear: Linear, dtype: torch.dtype | None = None) -> Product:
        """Return a product whose weight is widened, in `dtype` if one is given."""
        dtype = self._dtype if dtype is None else dtype
        weights = [dense(rows_of(rows, self._parameters(rows.name))) for rows in linear.weights]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Product(weight.to(self._device, dtype), self._bias(linear, dtype))

    def _bias(self, linear: Linear, dtype: torch.dtype) -> torch.Tensor | None:
        biases = [rows_of(rows, self._parameters(rows.name)) for rows in linear.biases]
        return torch.cat(biases).to(self._device, dtype) if biases else None

    def norm(self, norm: Norm | None) -> nn.Module:
        """Return a norm; where there is none, a module that changes nothing."""
        if norm is None:
            return nn.Identity()
        weight = norm_weight(replace(norm, factor=1.0), self._parameters)
        parameter = None if weight is None else constant(weight.to(self._device))
        return NormLayer(norm, parameter, self.optional_vector(norm.bias))

    def _read(self, name: Name, dtype: torch.dtype) -> torch.Tensor:
        return dense(self._parameters(name)).to(self._device, dtype)
