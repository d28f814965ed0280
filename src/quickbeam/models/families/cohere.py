"""Cohere 1 and 2: attention and feed-forward side by side behind one layer norm without bias."""

from __future__ import annotations

from typing import Any

from quickbeam.models.families.reading import Config, attention, decoder, gated, layer_norm
from quickbeam.models.stack import Layer, Rotary, Stack


def _stack(c: Config, changes: Any) -> Stack:
    turning = Rotary(interleaved=True)

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, **({"rotary": turning} | changes(i)))
        norm = layer_norm(f"model.layers.{i}.input_layernorm", c.layer_norm_eps, bias=False)
        return Layer(mixer, gated(c, i), norm, None, parallel=True)

    norm = layer_norm("model.norm", c.layer_norm_eps, bias=False)
    return decoder(c, layer, norm=norm, head_scale=c.logit_scale)


def cohere(c: Config) -> Stack:
    def changes(i: int) -> dict[str, Any]:
        if not c.use_qk_norm:
            return {}
        at = f"model.layers.{i}.self_attn"
        names = (f"{at}.q_norm", f"{at}.k_norm")
        return {"norms": tuple(layer_norm(name, c.layer_norm_eps, bias=False) for name in names)}

    return _stack(c, changes)


def cohere2(c: Config) -> Stack:
    """Layers without a window have no angles."""
    c.get("sliding_window_pattern")  # `layer_types` follows from it
    return _stack(c, lambda i: {} if c.layer_types[i] == "sliding_attention" else {"rotary": None})
