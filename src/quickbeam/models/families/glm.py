"""GLM-4 (0414, and the 9B before it): interleaved rotary dimensions, half of each head.
GLM-4.5 and later, Solar Open and dots.llm1: experts."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    BEFORE,
    Config,
    NormNames,
    attention,
    decoder,
    experts,
    gated,
    head_norms,
    layer_of,
    linear,
)
from quickbeam.models.stack import Experts, FeedForward, Layer, Rotary, Routing, Stack


def glm(config: Config, after: bool = False) -> Stack:
    """`after`: whether there are norms after attention and feed-forward, too."""
    names = BEFORE
    if after:
        names = NormNames(*BEFORE[:2], "post_self_attn_layernorm", "post_mlp_layernorm")
    bias = config.get("attention_bias", config.model_type == "glm4v_text")

    def layer(i: int) -> Layer:
        mixer = attention(config, i, bias, out_bias=False, rotary=Rotary(interleaved=True))
        return layer_of(config, i, mixer, gated(config, i, fused=True), names)

    return decoder(config, layer)


def glm4(config: Config) -> Stack:
    """Norms before and after."""
    return glm(config, after=True)


def glm4_moe(config: Config) -> Stack:
    """Dense layers first. Then experts selected by their sigmoids, and a shared one."""

    def layer(i: int) -> Layer:
        norms = head_norms(config, i) if config.use_qk_norm else None
        mixer = attention(config, i, config.attention_bias, out_bias=False, norms=norms)
        return layer_of(config, i, mixer, dense_first(config, i))

    return decoder(config, layer)


def solar_open(config: Config) -> Stack:
    """Experts in every layer."""

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias, out_bias=False)
        return layer_of(config, i, mixer, sigmoid_experts(config, i))

    return decoder(config, layer)


def dots1(config: Config) -> Stack:
    """Queries and keys are normed by head; windows in some layers."""

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias, norms=head_norms(config, i))
        return layer_of(config, i, mixer, dense_first(config, i))

    return decoder(config, layer)


def dense_first(config: Config, i: int) -> FeedForward | Experts:
    """Return a dense feed-forward, or from layer `first_k_dense_replace` on experts."""
    if i < config.first_k_dense_replace:
        return gated(config, i)
    return sigmoid_experts(config, i)


def sigmoid_experts(config: Config, i: int) -> Experts:
    """Return experts selected by their sigmoids, in groups, as of DeepSeek-V3, and a shared one."""
    config.must("scoring_func", "sigmoid")
    config.must("topk_method", "noaux_tc")
    gate = f"model.layers.{i}.mlp.gate"
    routing = Routing(
        logits=linear(gate),
        top=config.num_experts_per_tok,
        scores="sigmoid",
        correction=f"{gate}.e_score_correction_bias",
        groups=config.n_group,
        top_groups=config.topk_group,
        best_of_group=2,
        renormalised=bool(config.norm_topk_prob),
        plus=1e-20,
        factor=float(config.routed_scaling_factor),
    )
    config.ignore("n_shared_experts")  # side by side, as one
    shared = gated(config, i, name="mlp.shared_experts")
    return experts(config, i, routing, config.n_routed_experts, shared=shared)
