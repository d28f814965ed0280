"""DeepSeek-V2 and V3, GLM-4.7 Flash: latent attention, dense layers first, then experts beside
shared ones. Youtu-LLM: latent attention alone."""

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
    tensors,
)
from quickbeam.models.stack import Attention, Latent, Layer, Norm, Rotary, Routing, Stack

SMALL_EPSILON = 1e-6  # of the norms of small vectors, whatever the configuration says


def deepseek_v3(c: Config) -> Stack:
    interleaved = bool(c.rope_interleave)
    return decoder(c, lambda i: layer_of(c, i, attention(c, i, interleaved), dense_first(c, i)))


def glm4_moe_lite(c: Config) -> Stack:
    """GLM-4.7 Flash: `mlp_layer_types` names the dense layers."""
    c.ignore("first_k_dense_replace", partial_rotary_factor=1.0)
    if (share := c.rope_parameters.get("partial_rotary_factor", 1.0)) != 1:
        raise NotDescribed(f"partial_rotary_factor={share!r}")
    interleaved = bool(c.rope_interleave)

    def layer(i: int) -> Layer:
        dense = c.mlp_layer_types[i] == "dense"
        fed = gated(c, i) if dense else sigmoid_experts(c, i)
        return layer_of(c, i, attention(c, i, interleaved), fed)

    return decoder(c, layer)


def youtu(c: Config) -> Stack:
    """Youtu-LLM: no experts."""
    c.ignore("embedding_initializer_range")  # of training
    interleaved = bool(c.rope_interleave)
    return decoder(c, lambda i: layer_of(c, i, attention(c, i, interleaved), gated(c, i)))


def deepseek_v2(c: Config) -> Stack:
    """Weights of experts are their softmax, not renormalised."""
    c.must("scoring_func", "softmax")
    c.must("topk_method", "greedy", "group_limited_greedy")
    c.ignore("norm_topk_prob n_group topk_group")  # the first is not heeded
    c.ignore("n_shared_experts")  # side by side, as one
    grouped = c.get("topk_method") == "group_limited_greedy"

    def layer(i: int) -> Layer:
        mixer = attention(c, i, True)
        if i < c.first_k_dense_replace:
            return layer_of(c, i, mixer, gated(c, i, c.mlp_bias))
        routing = Routing(
            tensors(f"model.layers.{i}.mlp.gate"),
            c.num_experts_per_tok,
            groups=int(c.get("n_group", 1)) if grouped else 1,
            top_groups=int(c.get("topk_group", 1)) if grouped else 1,
            factor=float(c.routed_scaling_factor),
        )
        shared = gated(c, i, c.mlp_bias, name="mlp.shared_experts")
        return layer_of(c, i, mixer, experts(c, i, routing, c.n_routed_experts, shared=shared))

    return decoder(c, layer)


def attention(c: Config, i: int, interleaved: bool) -> Attention:
    """Return the latent attention of layer `i`."""
    c.must("moe_layer_freq", 1)
    c.ignore("qk_head_dim head_dim num_key_value_heads rope_theta rope_scaling")  # of others
    c.ignore("aux_loss_alpha seq_aux ep_size")  # of training
    at, bias = f"model.layers.{i}.self_attn", bool(c.attention_bias)
    dim, rotary_dim = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_rope_head_dim
    first, query = f"{at}.q_proj", None
    if c.get("q_lora_rank") is not None:
        first = f"{at}.q_a_proj"
        query = small(f"{at}.q_a_layernorm"), tensors(f"{at}.q_b_proj")
    elif bias:
        raise NotDescribed("attention_bias without q_lora_rank")
    norm, up = small(f"{at}.kv_a_layernorm"), tensors(f"{at}.kv_b_proj")
    latent = Latent(c.kv_lora_rank, c.v_head_dim, norm, up, query)
    return Attention(
        tensors(first, f"{at}.kv_a_proj_with_mqa", bias=bias),
        tensors(f"{at}.o_proj", bias=bias),
        heads=c.num_attention_heads,
        kv_heads=c.num_attention_heads,
        head_dim=dim,
        scaling=scaling(c, dim),
        rotary=Rotary(interleaved=interleaved),
        rotary_dim=rotary_dim,
        latent=latent,
    )


def small(module: str) -> Norm:
    return Norm((f"{module}.weight",), SMALL_EPSILON)


def scaling(c: Config, dim: int) -> float:
    """Return the factor of scores: that of YaRN is in it."""
    rope, scale = c.rope_parameters, float(dim**-0.5)
    wide, factor = rope.get("mscale_all_dim", 0), rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not wide or factor <= 1:
        return scale
    return scale * float(0.1 * wide * math.log(factor) + 1) ** 2
