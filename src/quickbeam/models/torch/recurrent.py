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
    """A convolution of each channel over a text's last `taps` tokens (its kernel size)."""

    def __init__(self, recurrent: Recurrent, reader: Reader) -> None:
        super().__init__()
        self.taps = recurrent.taps
        self.channels = recurrent.channels
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
        self.index = index
        self.factor = short.factor
        self.into = reader.product(short.into)
        self.out = reader.product(short.out)
        self.convolution = CausalConvolution(short, reader)

    def forward(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        gate, out_gate, value = self.into(x).chunk(3, -1)
        calls = inputs.rows.recurrent_calls
        convolved = run_along_paths(calls, self.index, self._convolve, gate * value)
        result: torch.Tensor = self.out(out_gate * convolved) * self.factor
        return result

    def _convolve(self, state: LayerState, x: torch.Tensor) -> tuple[torch.Tensor, LayerState]:
        result, last = self.convolution(x, state.conv)
        return result, LayerState(last, None)

    def zeros(self) -> LayerState:
        """Return the state of an empty text."""
        return LayerState(self.convolution.zeros(), None)


class LinearAttentionLayer(nn.Module):
    """A gated delta rule or Mamba-2 (`stack.LinearAttention`): `[n, d]` to `[n, d]`.

    Each head has a state S `[key_dim, value_dim]`. For each token t:

        decay_t  = exp(-exp(log_slope) * softplus(step_t + shift))
        update_t = rate_t * (value_t - (decay_t * S_(t-1))^T key_t)     delta rule
        update_t = rate_t * value_t                                     Mamba-2
        S_t      = decay_t * S_(t-1) + key_t update_t^T
        result_t = S_t^T query_t

    The rate is the sigmoid of a projection in the gated delta rule (2412.06464), and
    softplus(step_t + shift) in Mamba-2 (2405.21060).
    """

    def __init__(self, linear: LinearAttention, index: int, reader: Reader) -> None:
        super().__init__()
        self.linear = linear
        self.index = index
        self.into = reader.product(linear.into)
        self.out = reader.product(linear.out)
        self.convolution = CausalConvolution(linear, reader)
        self.log_slope = reader.vector(linear.log_slope)
        self.shift = reader.vector(linear.shift)
        self.skip = reader.optional_vector(linear.skip)
        self.norm = reader.norm(linear.norm)

    def forward(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        linear = self.linear
        values = linear.heads * linear.value_dim
        rates = linear.heads if linear.delta else 0
        sizes = [linear.channels, values, rates, linear.heads]
        qkv, gate, rate, step = torch.split(self.into(x), sizes, -1)
        gate = gate * linear.gate_scale
        step = step * linear.step_scale
        if not linear.delta:
            keys = linear.key_heads * linear.key_dim
            parts = torch.split(qkv, [values, keys, keys], -1)
            scaled = [part * scale for part, scale in zip(parts, linear.scales, strict=True)]
            qkv = torch.cat(scaled, -1)
        step = F.softplus(step + self.shift).clamp(linear.least, linear.most)
        rate = rate.sigmoid() if linear.delta else step  # [n, heads]
        decay = (-self.log_slope.exp() * step).exp()  # [n, heads]

        calls = inputs.rows.recurrent_calls
        mixed = run_along_paths(calls, self.index, self._recur, qkv, rate, decay)
        mixed = torch.unflatten(mixed, -1, (linear.groups, -1))
        gate = torch.unflatten(F.silu(gate), -1, (linear.groups, -1))
        mixed = self.norm(mixed * gate) if linear.norm_last else self.norm(mixed) * gate
        result: torch.Tensor = self.out(mixed.flatten(1)) * linear.factor
        return result

    def _recur(
        self, state: LayerState, x: torch.Tensor, rate: torch.Tensor, decay: torch.Tensor
    ) -> tuple[torch.Tensor, LayerState]:
        """Return `[b, m, heads * value_dim]`, and the states behind the last tokens.

        `x`: queries, keys and values before the convolution, `[b, m, channels]`. `rate`, `decay`:
        `[b, m, heads]`.
        """
        convolved, last = self.convolution(x, state.conv)
        query, key, value = self._heads(F.silu(convolved))
        matrix = state.recurrent  # [b, heads, key_dim, value_dim]
        assert matrix is not None
        results = list[torch.Tensor]()
        for t in range(x.shape[1]):
            matrix = matrix * decay[:, t, :, None, None]
            update = value[:, t]
            if self.linear.delta:
                update = update - torch.einsum("bhkv,bhk->bhv", matrix, key[:, t])
            update = update * rate[:, t, :, None]
            matrix = matrix + key[:, t, ..., None] * update[:, :, None]
            results.append(torch.einsum("bhkv,bhk->bhv", matrix, query[:, t]))
        result = torch.stack(results, 1)
        if self.skip is not None:
            result = result + self.skip[:, None] * value
        return result.flatten(2), LayerState(last, matrix)

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys `[b, m, heads, key_dim]` and values `[b, m, heads, value_dim]`."""
        linear = self.linear
        keys = linear.key_heads * linear.key_dim
        values = linear.heads * linear.value_dim
        if linear.delta:
            query, key, value = torch.split(x, [keys, keys, values], -1)
        else:
            value, key, query = torch.split(x, [values, keys, keys], -1)
        query = torch.unflatten(query, -1, (linear.key_heads, -1))
        key = torch.unflatten(key, -1, (linear.key_heads, -1))
        if linear.delta:
            query = unit_length(query) / linear.key_dim**0.5
            key = unit_length(key)
        query = self._repeat_heads(query)
        key = self._repeat_heads(key)
        value = torch.unflatten(value, -1, (linear.heads, -1))
        return query, key, value

    def _repeat_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat `[b, m, key_heads, key_dim]` for all heads of values."""
        group = self.linear.heads // self.linear.key_heads
        if self.linear.tiled:
            return x.repeat(1, 1, group, 1)
        return x.repeat_interleave(group, 2)

    def zeros(self) -> LayerState:
        """Return the state of an empty text."""
        linear = self.linear
        shape = (linear.heads, linear.key_dim, linear.value_dim)
        matrix = torch.zeros(shape, device=self.shift.device)
        return LayerState(self.convolution.zeros(), matrix)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Return `x` divided by its length over the last dimension."""
    squared_length = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squared_length + LENGTH_EPSILON)


def recurrent_layer(recurrent: Recurrent, index: int, reader: Reader) -> nn.Module:
    """Return the module of layer `index`'s recurrence."""
    if isinstance(recurrent, ShortConv):
        return ShortConvLayer(recurrent, index, reader)
    return LinearAttentionLayer(recurrent, index, reader)
