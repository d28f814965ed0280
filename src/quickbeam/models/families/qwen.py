"""Qwen2, Qwen2.5 and Qwen3, dense."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    attention,
    before,
    decoder,
    gated,
    head_norms,
)
from quickbeam.models.stack import Stack


def qwen2(c: Config) -> Stack:
    c.get("use_sliding_window")  # `layer_types` follows from it
    return decoder(c, lambda i: before(c, i, attention(c, i, True, out_bias=False), gated(c, i)))


def qwen3(c: Config) -> Stack:
    """Queries and keys are normed by head."""
    c.get("use_sliding_window")

    def layer(i: int):  # type: ignore[no-untyped-def]
        norms = head_norms(c, i, ("q_norm", "k_norm"))
        return before(c, i, attention(c, i, c.attention_bias, norms=norms), gated(c, i))

    return decoder(c, layer)
