"""Mistral and Ministral 3: every layer has the window, if there is one."""

from __future__ import annotations

from typing import Any

from quickbeam.models.families.reading import Config, attention, before, decoder, gated
from quickbeam.models.stack import QueryScale, Stack


def mistral(c: Config, **changes: Any) -> Stack:
    changes["window"] = c.get("sliding_window")
    return decoder(c, lambda i: before(c, i, attention(c, i, **changes), gated(c, i)))


def ministral3(c: Config) -> Stack:
    """Queries grow with the logarithm of their position."""
    rope = c.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return mistral(c, query_scale=QueryScale(beta, length) if beta else None)
