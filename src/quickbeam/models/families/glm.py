"""GLM-4 (0414, and the 9B before it): neighbouring dimensions turn together, half of each head.
GLM-4.5 and later, Solar Open and dots.llm1: experts."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    BEFORE,
    Config,
    attention,
    decoder,
    experts,
    gated,
    head_norms,
    layer_of,
    tensors,
)
from quickbeam.models.stack import Experts, FeedForward, Layer, Rotary, Routing, Stack


def glm(c: Config, after: bool = False) -> Stack:
    names = (*BEFORE, *(("post_self_attn_layernorm", "post_mlp_layernorm") if after else ()))

    def layer(i: int) -> Layer:
        biased = c.get("attention_bias", c.model_type == "glm4v_text")
        mixer = attention(c, i, biased, out_bias=False, rotary=Rotary(interleaved=True))
        return layer_of(c, i, mixer, gated(c, i, fused=True), names)

    return decoder(c, layer)


def glm4(c: Config) -> Stack:
    """Norms before and after."""
    return glm(c, after=True)


def glm4_moe(c: Config) -> Stack:
    """Dense layers first. Then experts chosen by their sigmoids, and a shared one."""

    def layer(i: int) -> Layer:
        norms = head_norms(c, i) if c.use_qk_norm else None
        mixer = attention(c, i, c.attention_bias, out_bias=False, norms=norms)
        return layer_of(c, i, mixer, dense_first(c, i))

    return decoder(c, layer)


def solar_open(c: Config) -> Stack:
    """Experts in every layer."""

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, out_bias=False)
        return layer_of(c, i, mixer, sigmoid_experts(c, i))

    return decoder(c, layer)


def dots1(c: Config) -> Stack:
    """Queries and keys are normed by head; windows in some layers."""

    def layer(i: int) -> Layer:
        mixer = attention(c, i, c.attention_bias, norms=head_norms(c, i))
        return layer_of(c, i, mixer, dense_first(c, i))

    return decoder(c, layer)


def dense_first(c: Config, i: int) -> FeedForward | Experts:
    """Return a feed-forward, or from `first_k_dense_replace` on experts."""
    return gated(c, i) if i < c.first_k_dense_replace else sigmoid_experts(c, i)


def sigmoid_experts(c: Config, i: int) -> Experts:
    """Return experts chosen by their sigmoids, in groups, as of DeepSeek-V3, and a shared one."""
    c.must("scoring_func", "sigmoid")
    c.must("topk_method", "noaux_tc")
    gate = f"model.layers.{i}.mlp.gate"
    routing = Routing(
        tensors(gate),
        c.num_experts_per_tok,
        "sigmoid",
        f"{gate}.e_score_correction_bias",
        c.n_group,
        c.topk_group,
        2,
        renormalised=bool(c.norm_topk_prob),
        plus=1e-20,
        factor=float(c.routed_scaling_factor),
    )
    c.ignore("n_shared_experts")  # side by side, as one
    shared = gated(c, i, name="mlp.shared_experts")
    return experts(c, i, routing, c.n_routed_experts, shared=shared)
