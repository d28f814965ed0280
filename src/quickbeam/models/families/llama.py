"""Llama, SmolLM, Seed-OSS, Granite (dense and of experts), and SmolLM3."""

from __future__ import annotations

from collections.abc import Callable

from quickbeam.models.families.reading import (
    Config,
    attention,
    before,
    decoder,
    experts,
    gated,
    tensors,
)
from quickbeam.models.stack import Experts, FeedForward, Routing, Stack


def llama(c: Config) -> Stack:
    return decoder(
        c, lambda i: before(c, i, attention(c, i, c.attention_bias), gated(c, i, c.mlp_bias))
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
    return _granite(c, lambda i: gated(c, i, c.mlp_bias))


def granitemoe(c: Config) -> Stack:
    """Experts whose weights are a softmax of the chosen ones' logits."""

    def feed_forward(i: int) -> Experts:
        logits = tensors(f"model.layers.{i}.block_sparse_moe.router")
        routing = Routing(logits, c.num_experts_per_tok, "softmax_of_chosen")
        return experts(c, i, routing, c.num_local_experts, "block_sparse_moe")

    return _granite(c, feed_forward)


def _granite(c: Config, feed_forward: Callable[[int], FeedForward | Experts]) -> Stack:
    return decoder(
        c,
        lambda i: before(
            c,
            i,
            attention(c, i, c.attention_bias, scaling=c.attention_multiplier),
            feed_forward(i),
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
