"""EXAONE 4: norms after, queries and keys normed by head; with windows, the layers without one have
no angles."""

from __future__ import annotations

from typing import Any

from quickbeam.models.families.reading import Config, attention, decoder, gated, head_norms, rms
from quickbeam.models.stack import Layer, Stack


def exaone4(c: Config) -> Stack:
    c.get("sliding_window_pattern")  # `layer_types` follows from it
    windows = c.get("sliding_window") is not None

    def layer(i: int) -> Layer:
        at, still = f"model.layers.{i}", windows and c.layer_types[i] != "sliding_attention"
        changes: dict[str, Any] = {"norms": head_norms(c, i, ("q_norm", "k_norm"))}
        return Layer(
            attention(c, i, **(changes | ({"rotary": None} if still else {}))),
            gated(c, i),
            None,
            None,
            rms(c, f"{at}.post_attention_layernorm"),
            rms(c, f"{at}.post_feedforward_layernorm"),
        )

    return decoder(c, layer)
