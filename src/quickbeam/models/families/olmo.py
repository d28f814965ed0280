"""OLMo 2 and 3: norms after attention and feed-forward, queries and keys normed over all heads.
OLMoE: norms before them, and experts."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    attention,
    before,
    decoder,
    experts,
    gated,
    head_norms,
    rms,
    tensors,
)
from quickbeam.models.stack import Layer, Rotary, Routing, Stack


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
            rotary=Rotary(kind),
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


def olmoe(c: Config) -> Stack:
    c.must("clip_qkv")

    def layer(i: int) -> Layer:
        norms = head_norms(c, i, ("q_norm", "k_norm"))
        routing = Routing(
            tensors(f"model.layers.{i}.mlp.gate"),
            c.num_experts_per_tok,
            renormalised=bool(c.norm_topk_prob),
        )
        mixer = attention(c, i, c.attention_bias, norms=norms, norm_all=True, window=None)
        return before(c, i, mixer, experts(c, i, routing, c.num_experts))

    return decoder(c, layer)
