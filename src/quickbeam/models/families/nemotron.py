"""Nemotron (Minitron): layer norms of 1 + weight, squared ReLU without a gate."""

from __future__ import annotations

from dataclasses import replace

from quickbeam.models.families.reading import Config, attention, decoder, layer_norm, plain
from quickbeam.models.stack import Layer, Norm, Stack


def nemotron(c: Config) -> Stack:
    def norm(name: str) -> Norm:
        return replace(layer_norm(name, c.norm_eps), plus_one=True)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        return Layer(
            attention(c, i, c.attention_bias),
            plain(c, f"{at}.mlp.up_proj", f"{at}.mlp.down_proj", c.mlp_bias),
            norm(f"{at}.input_layernorm"),
            norm(f"{at}.post_attention_layernorm"),
        )

    return decoder(c, layer, norm=norm("model.norm"))
