"""DeepSeek-V2 and V3, GLM-4.7 Flash: latent attention, dense layers first, then experts and shared
ones. Youtu-LLM: latent attention alone."""

from __future__ import annotations

import math

from quickbeam.models.families.glm import dense_first, sigmoid_experts
from quickbeam.models.families.reading import (
    Config,
    NotDescribed,
    decoder,
    experts,
    gated,
    layer_of,
    linear,
    rms_norms,
    stacked,
)
from quickbeam.models.stack import Attention, Latent, Layer, Rotary, Routing, Stack

LATENT_EPSILON = 1e-6  # of the norms of latent vectors, whatever the configuration says


def deepseek_v3(config: Config) -> Stack:
    interleaved = bool(config.rope_interleave)

    def layer(i: int) -> Layer:
        mixer = latent_attention(config, i, interleaved)
        return layer_of(config, i, mixer, dense_first(config, i))

    return decoder(config, layer)


def glm4_moe_lite(config: Config) -> Stack:
    """GLM-4.7 Flash: `mlp_layer_types` names the dense layers."""
    config.ignore("first_k_dense_replace", partial_rotary_factor=1.0)
    factor = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if factor != 1:
        raise NotDescribed(f"partial_rotary_factor={factor!r}")
    interleaved = bool(config.rope_interleave)

    def layer(i: int) -> Layer:
        dense = config.mlp_layer_types[i] == "dense"
        feed_forward = gated(config, i) if dense else sigmoid_experts(config, i)
        return layer_of(config, i, latent_attention(config, i, interleaved), feed_forward)

    return decoder(config, layer)


def youtu(config: Config) -> Stack:
    """Youtu-LLM: no experts."""
    config.ignore("embedding_initializer_range")  # of training
    interleaved = bool(config.rope_interleave)

    def layer(i: int) -> Layer:
        mixer = latent_attention(config, i, interleaved)
        return layer_of(config, i, mixer, gated(config, i))

    return decoder(config, layer)


def deepseek_v2(config: Config) -> Stack:
    """Weights of experts are their softmax, not renormalised."""
    config.must("scoring_func", "softmax")
    config.must("topk_method", "greedy", "group_limited_greedy")
    config.ignore("norm_topk_prob n_group topk_group")  # the first is not heeded
    config.ignore("n_shared_experts")  # side by side, as one
    grouped = config.get("topk_method") == "group_limited_greedy"

    def layer(i: int) -> Layer:
        mixer = latent_attention(config, i, interleaved=True)
        if i < config.first_k_dense_replace:
            return layer_of(config, i, mixer, gated(config, i, config.mlp_bias))
        routing = Routing(
            logits=linear(f"model.layers.{i}.mlp.gate"),
            top=config.num_experts_per_tok,
            groups=int(config.get("n_group", 1)) if grouped else 1,
            top_groups=int(config.get("topk_group", 1)) if grouped else 1,
            factor=float(config.routed_scaling_factor),
        )
        shared = gated(config, i, config.mlp_bias, name="mlp.shared_experts")
        mixture = experts(config, i, routing, config.n_routed_experts, shared=shared)
        return layer_of(config, i, mixer, mixture)

    return decoder(config, layer)


def latent_attention(config: Config, i: int, interleaved: bool) -> Attention:
    """Return the attention of layer `i`. `interleaved`: as of `Rotary`."""
    config.must("moe_layer_freq", 1)
    # they follow from others, or are of other models
    config.ignore("qk_head_dim head_dim num_key_value_heads rope_theta rope_scaling")
    config.ignore("aux_loss_alpha seq_aux ep_size")  # of training
    prefix, bias = f"model.layers.{i}.self_attn", bool(config.attention_bias)
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    norm = rms_norms(LATENT_EPSILON)
    first, query = "q_proj", None
    if config.get("q_lora_rank") is not None:
        first = "q_a_proj"
        query = norm(f"{prefix}.q_a_layernorm"), linear(f"{prefix}.q_b_proj")
    elif bias:
        raise NotDescribed("attention_bias without q_lora_rank")
    latent = Latent(
        rank=config.kv_lora_rank,
        value_dim=config.v_head_dim,
        norm=norm(f"{prefix}.kv_a_layernorm"),
        up=linear(f"{prefix}.kv_b_proj"),
        query=query,
    )
    return Attention(
        qkv=stacked(prefix, first, "kv_a_proj_with_mqa", bias=bias),
        out=linear(f"{prefix}.o_proj", bias=bias),
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        scaling=latent_scaling(config, head_dim),
        rotary=Rotary(interleaved=interleaved),
        rotary_dim=config.qk_rope_head_dim,
        latent=latent,
    )


def latent_scaling(config: Config, head_dim: int) -> float:
    """Return the factor of scores, which holds YaRN's."""
    rope, scale = config.rope_parameters, float(head_dim**-0.5)
    mscale, factor = rope.get("mscale_all_dim", 0), rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not mscale or factor <= 1:
        return scale
    return scale * float(0.1 * mscale * math.log(factor) + 1) ** 2
