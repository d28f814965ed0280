"""Recurrent layers: short convolutions, the gated delta rule and Mamba-2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.models.stack import LinearAttention, Recurrent, ShortConv
from quickbeam.models.torch.attention import PassInputs
from quickbeam.models.torch.parts import Reader
from quickbeam.models.torch.recurrence import recurrence_on
from quickbeam.models.torch.rows import PassRows

LENGTH_EPSILON = 1e-6  # of the squared length of queries and keys of the delta rule


class CausalConvolution(nn.Module):
    """A convolution of each channel over a text's last `taps` tokens (its kernel size)."""

    def __init__(self, recurrent: Recurrent, reader: Reader) -> None:
        super().__init__()
        self.weight = reader.vector(recurrent.weight)
        self.bias = reader.optional_vector(recurrent.bias)

    def forward(self, x: torch.Tensor, rows: PassRows, conv: torch.Tensor) -> torch.Tensor:
        """Return results for the rows `x`, `[n, channels]` both, and write their last tokens.

        `conv`: those of all slots (`LayerStates`).
        """
        window = torch.cat([tokens_before(x, rows.history, conv), x[:, None]], 1)
        conv.index_copy_(0, rows.state_written, window[:, 1:])
        taps = self.weight[:, 0].T  # [taps, channels]
        result: torch.Tensor = window[:, 0] * taps[0]
        for i in range(1, len(taps)):
            result = result + window[:, i] * taps[i]
        if self.bias is not None:
            result = result + self.bias
        return result


def tokens_before(x: torch.Tensor, history: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """Return the tokens before each row, the oldest first, `[n, history, channels]`.

    They are rows of the pass, `x` `[n, channels]`, or tokens of `conv` (`ListedStates.history`).
    """
    in_pass = x[history.clamp(min=0)]
    in_states = conv.flatten(0, 1)[(-1 - history).clamp(min=0)]
    return torch.where(history[..., None] >= 0, in_pass, in_states)


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
        conv = inputs.pool.states.layers[self.index].conv
        convolved = self.convolution(gate * value, inputs.rows, conv)
        result: torch.Tensor = self.out(out_gate * convolved) * self.factor
        return result


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

        states = inputs.pool.states.layers[self.index]
        assert states.matrix is not None
        convolved = self.convolution(qkv, inputs.rows, states.conv)
        query, key, value = self._heads(F.silu(convolved))
        recur = recurrence_on(x.device)
        mixed = recur(
            states.matrix, inputs.rows, query, key, value, rate, decay, delta=linear.delta
        )
        if self.skip is not None:
            mixed = mixed + self.skip[:, None] * value
        mixed = mixed.flatten(1)
        mixed = torch.unflatten(mixed, -1, (linear.groups, -1))
        gate = torch.unflatten(F.silu(gate), -1, (linear.groups, -1))
        mixed = self.norm(mixed * gate) if linear.norm_last else self.norm(mixed) * gate
        result: torch.Tensor = self.out(mixed.flatten(1)) * linear.factor
        return result

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys `[n, heads, key_dim]` and values `[n, heads, value_dim]`."""
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
        """Repeat `[n, key_heads, key_dim]` for all heads of values."""
        group = self.linear.heads // self.linear.key_heads
        if self.linear.tiled:
            return x.repeat(1, group, 1)
        return x.repeat_interleave(group, 1)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Return `x` divided by its length over the last dimension."""
    squared_length = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squared_length + LENGTH_EPSILON)


def recurrent_layer(recurrent: Recurrent, index: int, reader: Reader) -> nn.Module:
    """Return the module of layer `index`'s recurrence."""
    if isinstance(recurrent, ShortConv):
        return ShortConvLayer(recurrent, index, reader)
    return LinearAttentionLayer(recurrent, index, reader)
