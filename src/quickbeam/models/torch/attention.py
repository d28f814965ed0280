"""Attention: queries, keys and values of rows, their angles, and what rows read of the pages."""

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

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, `[n, rotary_dim / 2]` each


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: on CUDA, where Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attention_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the function that does what `attend` does on a device: Triton's kernels, or itself."""
    if not runs_triton(device):
        return attend
    from quickbeam.models.torch import fused_attention

    return fused_attention.attend


class PassInputs(NamedTuple):
    """What all layers read besides the residual stream.

    `angles`: of the rows, of all kinds. `attend`: as `paged_attention.attend`.
    """

    rows: PassRows
    pool: RowPool
    angles: Mapping[Rotary, Angles]
    attend: Callable[..., torch.Tensor]


def apply_rotary(x: torch.Tensor, angles: Angles, interleaved: bool) -> torch.Tensor:
    """Rotate the first dimensions of each head of `x` `[n, heads, head_dim]` by `angles`.

    Dimensions i and i + half are a pair, or if `interleaved` 2i and 2i + 1 (2104.09864, 3.4.2).
    """
    cosine, sine = (part[:, None] for part in angles)
    rotary_dim = 2 * cosine.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated.chunk(2, -1)
    pairs = a * cosine - b * sine, b * cosine + a * sine
    rotated = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([rotated, rest], -1)


class LatentProjections(nn.Module):
    """Queries, keys and values by way of small vectors (`stack.Latent`; 2405.04434, 2.1)."""

    def __init__(self, latent: Latent, attention: Attention, reader: Reader) -> None:
        super().__init__()
        self.rank, self.heads = latent.rank, attention.heads
        self.rotary_dim, self.value_dim = attention.rotary_dim, latent.value_dim
        self.norm, self.up = reader.norm(latent.norm), reader.product(latent.up)
        # where queries have no small vectors, they are what they are
        self.query_norm: nn.Module = nn.Identity()
        self.query_up: nn.Module = nn.Identity()
        if latent.query is not None:
            self.query_norm = reader.norm(latent.query[0])
            self.query_up = reader.product(latent.query[1])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values `[n, heads, ...]`; rotated dimensions come first."""
        n = len(x)
        queries = x.shape[-1] - self.rank - self.rotary_dim
        query, small, rotated_key = torch.split(x, [queries, self.rank, self.rotary_dim], -1)
        query = self.query_up(self.query_norm(query))
        # a head's rotated dimensions are its last ones as stored
        query = query.reshape(n, self.heads, -1).roll(self.rotary_dim, -1)
        rest = self.up(self.norm(small)).view(n, self.heads, -1)
        plain = rest.shape[-1] - self.value_dim
        plain_key, value = torch.split(rest, [plain, self.value_dim], -1)
        rotated_key = rotated_key[:, None].expand(-1, self.heads, -1)
        return query, torch.cat([rotated_key, plain_key], -1), value


class AttentionLayer(nn.Module):
    """The attention of layer `index` (`stack.Attention`): `[n, d]` to `[n, d]`."""

    def __init__(self, attention: Attention, index: int, reader: Reader) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.out = reader.product(attention.qkv), reader.product(attention.out)
        query_norm, key_norm = attention.norms or (None, None)
        self.query_norm, self.key_norm = reader.norm(query_norm), reader.norm(key_norm)
        epsilon = 0.0 if query_norm is None else query_norm.epsilon
        self.value_norm = reader.norm(Norm((), epsilon) if attention.value_norm else None)
        self.latent: LatentProjections | None = None
        if attention.latent is not None:
            self.latent = LatentProjections(attention.latent, attention, reader)
        source = index if attention.source is None else attention.source
        self.sinks = reader.optional_vector(attention.sinks)
        self.params = AttentionParams(
            source, attention.scaling, attention.window, attention.softcap
        )

    def forward(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        attention, rows, pool = self.attention, inputs.rows, inputs.pool
        projected = self.qkv(x)
        query, key, value = (self._heads if self.latent is None else self.latent)(projected)
        query = self._position(query, self.query_norm, inputs)
        if attention.query_scale is not None:
            query = query * query_factors(attention.query_scale, rows.positions)[:, None, None]
        if key is not None:
            key = self._position(key, self.key_norm, inputs)
            write(pool, rows, self.params.index, key, self.value_norm(value))
        mixed = inputs.attend(pool, rows, self.params, query, self.sinks)
        if attention.gated:
            gates = attention.heads if attention.one_gate else attention.heads * attention.head_dim
            gate = projected[:, -gates:].sigmoid()
            mixed = mixed * gate.repeat_interleave(mixed.shape[-1] // gates, -1)
        result: torch.Tensor = self.out(mixed) * attention.factor
        return result

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

    def _position(self, x: torch.Tensor, norm: nn.Module, inputs: PassInputs) -> torch.Tensor:
        """Return queries or keys `[n, heads, head_dim]` normed and rotated."""
        attention = self.attention
        if attention.norm_all:
            x = norm(x.flatten(1)).view(x.shape)
        elif not attention.norm_last:
            x = norm(x)
        if attention.rotary is not None:
            x = apply_rotary(x, inputs.angles[attention.rotary], attention.rotary.interleaved)
        if attention.norm_last and not attention.norm_all:
            x = norm(x)
        return x
