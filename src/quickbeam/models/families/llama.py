"""Llama, SmolLM, Seed-OSS, Granite, and SmolLM3."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, attention, before, decoder, gated
from quickbeam.models.stack import Stack


def llama(c: Config) -> Stack:
    return decoder(
        c,
        lambda i: before(c, i, attention(c, i, c.attention_bias), gated(c, i, c.mlp_bias)),
    )


def seed_oss(c: Config) -> Stack:
    """Llama with a bias of its own after the attention."""
    return decoder(
        c,
        lambda i: before(
            c, i, attention(c, i, c.attention_bias, c.attention_out_bias), gated(c, i, c.mlp_bias)
        ),
    )


def granite(c: Config) -> Stack:
    """Llama with four factors."""
    return decoder(
        c,
        lambda i: before(
            c,
            i,
            attention(c, i, c.attention_bias, scaling=c.attention_multiplier),
            gated(c, i, c.mlp_bias),
            residual=c.residual_multiplier,
        ),
        scale=c.embedding_multiplier,
        head_scale=1 / c.logits_scaling,
    )


def smollm3(c: Config) -> Stack:
    """Llama with layers without rotary angles, and with windows."""
    c.get("no_rope_layer_interval")  # `no_rope_layers` follows from it
    turns, windows = c.no_rope_layers, {} if c.get("use_sliding_window") else {"window": None}
    return decoder(
        c,
        lambda i: before(
            c,
            i,
            attention(c, i, c.attention_bias, **windows, **({} if turns[i] else {"rotary": None})),
            gated(c, i, c.mlp_bias),
        ),
    )
