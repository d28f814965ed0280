"""Attention layers: projections, norms and rotary positions around `paged_attention.attend`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from quickbeam.models.stack import Attention, Latent, Norm, Rotary
from quickbeam.models.torch.paged_attention import AttentionParams, attend, write
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.parts import Reader
from quickbeam.models.torch.rows import PassRows
from quickbeam.models.weights.parameters import query_factors

CosSin = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, `[n, rotary_dim / 2]` each
# queries, keys and values, `[n, heads, dim]` each; keys and values are None for another layer's
Heads = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: on CUDA, where Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attention_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the `attend` of a device: Triton's kernels where they run, else the reference."""
    if not runs_triton(device):
        return attend
    from quickbeam.models.torch import fused_attention

    return fused_attention.attend


class PassInputs(NamedTuple):
    """What all layers read besides the residual stream.

    `angles`: those of the rows, for each kind of rotary positions in the model. `attend`: has the
    signature of `paged_attention.attend`.
    """

    rows: PassRows
    pool: RowPool
    angles: Mapping[Rotary, CosSin]
    attend: Callable[..., torch.Tensor]

    def write(self, params: AttentionParams, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the rows' keys and values of a layer to the pool."""
        write(self.pool, self.rows, params.index, key, value)

    def attention(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write keys and values `[n, kv_heads, dim]`, if there are any, and let queries read."""
        if key is not None and value is not None:
            self.write(params, key, value)
        return self.attend(self.pool, self.rows, params, query, sinks)


def apply_rotary(x: torch.Tensor, angles: CosSin, interleaved: bool) -> torch.Tensor:
    """Rotate the first dimensions of each head of `x` `[n, heads, head_dim]` by `angles`.

    Dimensions i and i + half are a pair, or if `interleaved` 2i and 2i + 1 (2104.09864, 3.4.2).
    """
    cosine = angles[0][:, None]  # [n, 1, rotary_dim / 2]
    sine = angles[1][:, None]
    rotary_dim = 2 * cosine.shape[-1]
    rotary = x[..., :rotary_dim]
    unrotated = x[..., rotary_dim:]
    if interleaved:
        first = rotary[..., 0::2]
        second = rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, -1)
    rotated_first = first * cosine - second * sine
    rotated_second = second * cosine + first * sine
    if interleaved:
        rotated = torch.stack([rotated_first, rotated_second], -1).flatten(-2)
    else:
        rotated = torch.cat([rotated_first, rotated_second], -1)
    return torch.cat([rotated, unrotated], -1)


class LatentProjections(nn.Module):
    """Queries, keys and values from latent vectors (`stack.Latent`; 2405.04434, 2.1)."""

    def __init__(self, latent: Latent, attention: Attention, reader: Reader) -> None:
        super().__init__()
        self.rank = latent.rank
        self.heads = attention.heads
        self.rotary_dim = attention.rotary_dim
        self.value_dim = latent.value_dim
        self.norm = reader.norm(latent.norm)
        self.up = reader.product(latent.up)
        # some models project queries without a latent vector
        self.query_norm: nn.Module = nn.Identity()
        self.query_up: nn.Module = nn.Identity()
        if latent.query is not None:
            self.query_norm = reader.norm(latent.query[0])
            self.query_up = reader.product(latent.query[1])

    def forward(self, x: torch.Tensor) -> Heads:
        """Return queries, keys and values, whose rotary dimensions come first.

        `x`: `[n, queries + rank + rotary_dim]`.
        """
        n = len(x)
        queries = x.shape[-1] - self.rank - self.rotary_dim
        query, latent, rotary_key = torch.split(x, [queries, self.rank, self.rotary_dim], -1)

        query = self.query_up(self.query_norm(query)).reshape(n, self.heads, -1)
        # the checkpoint has a head's rotary dimensions last
        query = query.roll(self.rotary_dim, -1)

        key_value = self.up(self.norm(latent)).view(n, self.heads, -1)
        unrotated = key_value.shape[-1] - self.value_dim
        unrotated_key, value = torch.split(key_value, [unrotated, self.value_dim], -1)
        # all heads share the rotary part of the key
        rotary_key = rotary_key[:, None].expand(-1, self.heads, -1)
        key = torch.cat([rotary_key, unrotated_key], -1)
        return query, key, value


class AttentionLayer(nn.Module):
    """The attention of layer `index` (`stack.Attention`): `[n, d]` to `[n, d]`."""

    def __init__(self, attention: Attention, index: int, reader: Reader) -> None:
        super().__init__()
        self.attention = attention
        self.qkv = reader.product(attention.qkv)
        self.out = reader.product(attention.out)
        query_norm, key_norm = attention.norms or (None, None)
        self.query_norm = reader.norm(query_norm)
        self.key_norm = reader.norm(key_norm)
        epsilon = 0.0 if query_norm is None else query_norm.epsilon
        self.value_norm = reader.norm(Norm((), epsilon) if attention.value_norm else None)
        self.latent: LatentProjections | None = None
        if attention.latent is not None:
            self.latent = LatentProjections(attention.latent, attention, reader)
        source = index if attention.source is None else attention.source
        self.sinks = reader.optional_vector(attention.sinks)
        self.params = AttentionParams(
            source,
            attention.scaling,
            attention.window,
            attention.softcap,
            causal=not attention.bidirectional,
        )

    def forward(self, x: torch.Tensor, inputs: Any) -> torch.Tensor:
        """`inputs`: `PassInputs`, or others with the same `angles`, `rows` and `attention`."""
        attention, projected = self.attention, self.qkv(x)
        query, key, value = self._apart(projected)
        query = self._position(query, self.query_norm, inputs.angles)
        if attention.query_scale is not None:
            factors = query_factors(attention.query_scale, inputs.rows.positions)
            query = query * factors[:, None, None]
        if key is not None:
            key = self._position(key, self.key_norm, inputs.angles)
            value = self.value_norm(value)
        mixed = inputs.attention(self.params, query, key, value, self.sinks)
        if attention.gated:
            # a gate for each head, or for each of its dimensions
            gates = attention.heads if attention.one_gate else attention.heads * attention.head_dim
            gate = projected[:, -gates:].sigmoid()
            mixed = mixed * gate.repeat_interleave(mixed.shape[-1] // gates, -1)
        result: torch.Tensor = self.out(mixed) * attention.factor
        return result

    def key_value(
        self, x: torch.Tensor, angles: Mapping[Rotary, CosSin]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, rotated, and values of what attention reads: `[n, kv_heads, dim]` each."""
        _, key, value = self._apart(self.qkv(x))
        return self._position(key, self.key_norm, angles), self.value_norm(value)

    def _apart(self, projected: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        return (self._heads if self.latent is None else self.latent)(projected)

    def _heads(self, projected: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        """Return queries, keys and values, `[n, heads, head_dim]`; None for another layer's."""
        attention, head_dim = self.attention, self.attention.head_dim
        first_key = attention.heads * head_dim
        keys = attention.kv_heads * head_dim
        query = torch.unflatten(projected[:, :first_key], -1, (attention.heads, head_dim))
        if attention.source is not None:
            return query, None, None
        first_value = first_key if attention.values_are_keys else first_key + keys
        key = torch.unflatten(projected[:, first_key : first_key + keys], -1, (-1, head_dim))
        value = torch.unflatten(projected[:, first_value : first_value + keys], -1, (-1, head_dim))
        return query, key, value

    def _position(
        self, x: torch.Tensor, norm: nn.Module, angles: Mapping[Rotary, CosSin]
    ) -> torch.Tensor:
        """Return queries or keys `[n, heads, head_dim]` normed and rotated."""
        attention = self.attention
        if attention.norm_all:
            x = norm(x.flatten(1)).view(x.shape)
        elif not attention.norm_last:
            x = norm(x)
        if attention.rotary is not None:
            x = apply_rotary(x, angles[attention.rotary], attention.rotary.interleaved)
        if attention.norm_last and not attention.norm_all:
            x = norm(x)
        return x
