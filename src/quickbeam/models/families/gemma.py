"""Gemma 1, 2 and 3, text: embeddings times the root of their width, norms of 1 + weight."""

from __future__ import annotations

from typing import Any

import torch

from quickbeam.models.families.reading import Config, attention, decoder, gated, head_norms, rms
from quickbeam.models.stack import Layer, Rotary, Stack


def _norm(c: Config, i: int, name: str) -> Any:
    return rms(c, f"model.layers.{i}.{name}", plus_one=True)


def _stack(c: Config, layer: Any, **more: Any) -> Stack:
    c.must("use_bidirectional_attention", False)
    # transformers rounds the factor to the model's number format
    scale = torch.tensor(c.hidden_size**0.5).to(c.number_format).item()
    return decoder(c, layer, scale=scale, norm=rms(c, "model.norm", plus_one=True), **more)


def gemma(c: Config) -> Stack:
    def layer(i: int) -> Layer:
        norms = _norm(c, i, "input_layernorm"), _norm(c, i, "post_attention_layernorm")
        return Layer(attention(c, i, c.attention_bias), gated(c, i), *norms)

    return _stack(c, layer)


def _four_norms(c: Config, i: int, **changes: Any) -> Layer:
    mixer = attention(
        c,
        i,
        c.attention_bias,
        scaling=c.query_pre_attn_scalar**-0.5,
        softcap=c.attn_logit_softcapping,
        **changes,
    )
    return Layer(
        mixer,
        gated(c, i, act=c.hidden_activation),
        _norm(c, i, "input_layernorm"),
        _norm(c, i, "pre_feedforward_layernorm"),
        _norm(c, i, "post_attention_layernorm"),
        _norm(c, i, "post_feedforward_layernorm"),
    )


def gemma2(c: Config) -> Stack:
    """Norms before and after, softcaps, a window in every other layer."""
    return _stack(c, lambda i: _four_norms(c, i), softcap=c.final_logit_softcapping)


def gemma3(c: Config) -> Stack:
    """Norms of queries and keys, and angles of their own for the layers with a window."""
    for name in ("_sliding_window_pattern", "sliding_window_pattern"):
        c.get(name)  # `layer_types` follows from it

    def layer(i: int) -> Layer:
        kind, norms = c.layer_types[i], head_norms(c, i, ("q_norm", "k_norm"), plus_one=True)
        rotary = Rotary(kind)
        return _four_norms(c, i, norms=norms, rotary=rotary, kind=kind)

    return _stack(c, layer, softcap=c.final_logit_softcapping)
