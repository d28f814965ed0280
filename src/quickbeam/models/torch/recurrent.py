"""Recurrent layers: short convolutions, the gated delta rule and Mamba-2, step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.models.stack import LinearAttention, Recurrent, ShortConv
from quickbeam.models.torch.attention import PassInputs
from quickbeam.models.torch.parts import Reader
from quickbeam.models.torch.states import LayerState, run_along_paths

LENGTH_EPSILON = 1e-6  # of the squared length of queries and keys of the delta rule


class CausalConvolution(nn.Module):
    """A convolution of each channel over a text's last `taps` tokens."""

    def __init__(self, recurrent: Recurrent, reader: Reader) -> None:
        super().__init__()
        self.taps, self.channels = recurrent.taps, recurrent.channels
        self.weight = reader.vector(recurrent.weight)
        self.bias = reader.optional_vector(recurrent.bias)

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results `[b, m, channels]`, and the last `taps - 1` tokens of each text.

        `x`: `[b, m, channels]`. `last`: the tokens before, `[b, channels, taps - 1]`.
        """
        text = torch.cat([last, x.transpose(1, 2)], -1)
        result = F.conv1d(text, self.weight, self.bias, groups=self.channels)
        return result.transpose(1, 2), text[..., text.shape[-1] - self.taps + 1 :]

    def zeros(self) -> torch.Tensor:
        """Return what comes before a text's first token."""
        return torch.zeros(self.channels, self.taps - 1, device=self.weight.device)


class ShortConvLayer(nn.Module):
    """A gated short convolution (`stack.ShortConv`): `[n, d]` to `[n, d]`."""

    def __init__(self, short: ShortConv, index: int, reader: Reader) -> None:
        super().__init__()
        self.index, self.factor = index, short.factor
        self.into, self.out = reader.product(short.into), reader.product(short.out)
        self.convolution = CausalConvolution(short, reader)

    def forward(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        gate, gate_out, value = self.into(x).chunk(3, -1)
        calls = inputs.rows.recurrent_calls
        convolved = run_along_paths(calls, self.index, self._convolve, gate * value)
        result: torch.Tensor = self.out(gate_out * convolved) * self.factor
        return result

    def _convolve(self, state: LayerState, x: torch.Tensor) -> tuple[torch.Tensor, LayerState]:
        result, last = self.convolution(x, state.conv)
        return result, LayerState(last, None)

    def zeros(self) -> LayerState:
        """Return the state of an empty text."""
        return LayerState(self.convolution.zeros(), None)


class LinearAttentionLayer(nn.Module):
    """A layer whose heads keep a matrix each (`stack.LinearAttention`): `[n, d]` to `[n, d]`."""

    def __init__(self, linear: LinearAttention, index: int, reader: Reader) -> None:
        super().__init__()
        self.linear, self.index = linear, index
        self.into, self.out = reader.product(linear.into), reader.product(linear.out)
        self.convolution = CausalConvolution(linear, reader)
        self.log_slope, self.shift = reader.vector(linear.log_slope), reader.vector(linear.shift)
        self.skip = reader.optional_vector(linear.skip)
        self.norm = reader.norm(linear.norm)

    def forward(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        linear = self.linear
        values = linear.heads * linear.value_dim
        rates = linear.heads if linear.delta else 0
        sizes = [linear.channels, values, rates, linear.heads]
        convolved, gate, rate, step = torch.split(self.into(x), sizes, -1)
        gate, step = gate * linear.gate_scale, step * linear.step_scale
        if not linear.delta:
            keys = linear.key_heads * linear.key_dim
            parts = torch.split(convolved, [values, keys, keys], -1)
            scaled = [part * scale for part, scale in zip(parts, linear.scales, strict=True)]
            convolved = torch.cat(scaled, -1)
        step = F.softplus(step + self.shift).clamp(linear.least, linear.most)
        # what a value is taken times before it is added to the state
        rate = rate.sigmoid() if linear.delta else step
        calls = inputs.rows.recurrent_calls
        rows = convolved, rate, (-self.log_slope.exp() * step).exp()
        mixed = run_along_paths(calls, self.index, self._recur, *rows)
        mixed = torch.unflatten(mixed, -1, (linear.groups, -1))
        gate = torch.unflatten(F.silu(gate), -1, (linear.groups, -1))
        mixed = self.norm(mixed * gate) if linear.norm_last else self.norm(mixed) * gate
        result: torch.Tensor = self.out(mixed.flatten(1)) * linear.factor
        return result

    def _recur(
        self, state: LayerState, x: torch.Tensor, rate: torch.Tensor, decay: torch.Tensor
    ) -> tuple[torch.Tensor, LayerState]:
        """Return `[b, m, heads * value_dim]`, and the states behind the last tokens.

        `x`: what is convolved, `[b, m, channels]`. `rate`, `decay`: `[b, m, heads]`.
        """
        convolved, last = self.convolution(x, state.conv)
        query, key, value = self._heads(F.silu(convolved))
        matrix, results = state.recurrent, []
        assert matrix is not None
        for i in range(x.shape[1]):
            matrix = matrix * decay[:, i, :, None, None]
            added = value[:, i]
            if self.linear.delta:
                added = added - torch.einsum("bhkv,bhk->bhv", matrix, key[:, i])
            added = added * rate[:, i, :, None]
            matrix = matrix + key[:, i, ..., None] * added[:, :, None]
            results.append(torch.einsum("bhkv,bhk->bhv", matrix, query[:, i]))
        result = torch.stack(results, 1)
        if self.skip is not None:
            result = result + self.skip[:, None] * value
        return result.flatten(2), LayerState(last, matrix)

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys `[b, m, heads, key_dim]` and values `[b, m, heads, value_dim]`."""
        linear = self.linear
        keys, values = linear.key_heads * linear.key_dim, linear.heads * linear.value_dim
        if linear.delta:
            query, key, value = torch.split(x, [keys, keys, values], -1)
        else:
            value, key, query = torch.split(x, [values, keys, keys], -1)
        query, key = (torch.unflatten(part, -1, (linear.key_heads, -1)) for part in (query, key))
        if linear.delta:
            query, key = (
                part * torch.rsqrt(part.square().sum(-1, keepdim=True) + LENGTH_EPSILON)
                for part in (query, key)
            )
            query = query / linear.key_dim**0.5
        served = linear.heads // linear.key_heads
        if linear.tiled:
            query, key = (part.repeat(1, 1, served, 1) for part in (query, key))
        else:
            query, key = (part.repeat_interleave(served, 2) for part in (query, key))
        return query, key, torch.unflatten(value, -1, (linear.heads, -1))

    def zeros(self) -> LayerState:
        """Return the state of an empty text."""
        linear, device = self.linear, self.shift.device
        sizes = linear.heads, linear.key_dim, linear.value_dim
        return LayerState(self.convolution.zeros(), torch.zeros(*sizes, device=device))


def recurrent_layer(recurrent: Recurrent, index: int, reader: Reader) -> nn.Module:
    """Return the module of layer `index`'s recurrence."""
    if isinstance(recurrent, ShortConv):
        return ShortConvLayer(recurrent, index, reader)
    return LinearAttentionLayer(recurrent, index, reader)
