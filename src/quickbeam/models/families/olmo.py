"""OLMo 2 and 3: norms after attention and feed-forward, queries and keys normed over all heads."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    attention,
    decoder,
    gated,
    head_norms,
    rms,
)
from quickbeam.models.stack import Layer, Rotary, Stack


def olmo(c: Config) -> Stack:
    """OLMo 3 has windows, and angles by the kind of layer."""
    kinds = c.get("layer_types")

    def layer(i: int) -> Layer:
        at, kind = f"model.layers.{i}", kinds[i] if kinds else None
        mixer = attention(
            c,
            i,
            c.attention_bias,
            norms=head_norms(c, i, ("q_norm", "k_norm")),
            norm_all=True,
            rotary=Rotary("model.rotary_emb", kind),
            kind=kind,
        )
        return Layer(
            mixer,
            gated(c, i),
            None,
            None,
            rms(c, f"{at}.post_attention_layernorm"),
            rms(c, f"{at}.post_feedforward_layernorm"),
        )

    return decoder(c, layer)
