"""Mamba-2 beside attention: Granite 4 H, Bamba, Nemotron-H and Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quickbeam.models.families.llama import granite_experts, granite_shared
from quickbeam.models.families.reading import (
    Config,
    Names,
    NotDescribed,
    activation,
    attention,
    decoder,
    gated,
    layer_of,
    rms,
    tensors,
)
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    Linear,
    LinearAttention,
    Norm,
    ParameterRows,
    Stack,
)

BEFORE: Names = ("input_layernorm", "pre_ff_layernorm")
# of training: what steps begin with
STEPS = "time_step_floor time_step_limit time_step_max time_step_min time_step_rank"


def mixer(at: str, sizes: tuple[int, int, int, int], biased: bool, **more: Any) -> LinearAttention:
    """Return Mamba-2. `sizes`: heads, their dimension, groups of B and C, and B's dimension.

    `in_proj` gives gates, what is convolved, and steps. `more`: other fields of `LinearAttention`.
    """
    heads, dim, groups, state = sizes
    inner, channels = heads * dim, heads * dim + 2 * groups * state
    if state % 4:
        raise NotDescribed(f"a state of {state} numbers")
    cuts = ((inner, inner + channels), (0, inner), (inner + channels, inner + channels + heads))

    def rows(kind: str) -> tuple[ParameterRows, ...]:
        return tuple(ParameterRows(f"{at}.in_proj.{kind}", cut=cut) for cut in cuts)

    fields: dict[str, Any] = {
        "into": Linear(rows("weight"), rows("bias") if biased else ()),
        "out": tensors(f"{at}.out_proj", bias=biased),
        "weight": f"{at}.conv1d.weight",
        "heads": heads,
        "key_heads": groups,
        "key_dim": state,
        "value_dim": dim,
        "log_slope": f"{at}.A_log",
        "shift": f"{at}.dt_bias",
        "delta": False,
        "groups": groups,
        "norm_last": True,
        "skip": f"{at}.D",
    }
    return LinearAttention(**(fields | more))


def _mamba(c: Config, at: str, **more: Any) -> LinearAttention:
    """Return Mamba-2 by the names that most configurations have."""
    c.ignore("mamba_expand mamba_chunk_size")  # sizes follow; kernels
    c.must("hidden_act", "silu", "swish")
    least, most = c.time_step_limit
    fields: dict[str, Any] = {
        "taps": c.mamba_d_conv,
        "bias": f"{at}.conv1d.bias" if c.mamba_conv_bias else None,
        "least": least,
        "most": most,
    }
    sizes = c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups, c.mamba_d_state
    return mixer(at, sizes, bool(c.mamba_proj_bias), **(fields | more))


def granite_hybrid(c: Config) -> Stack:
    """Granite with Mamba-2 in most layers, and experts beside a feed-forward of all tokens."""
    names = "num_experts_per_tok rope_parameters shared_intermediate_size"
    c.ignore(names, normalization_function="rmsnorm")
    turns = c.get("position_embedding_type") == "rope"

    def feed_forward(i: int) -> FeedForward | Experts:
        shared = granite_shared(c, i)
        return granite_experts(c, i, shared) if c.num_local_experts else shared

    def mixer(i: int) -> Attention | LinearAttention:
        if c.layer_types[i] == "linear_attention":
            at = f"model.layers.{i}.mamba"
            return _mamba(c, at, norm=rms(c, f"{at}.norm"))
        still: dict[str, Any] = {} if turns else {"rotary": None}
        return attention(c, i, c.attention_bias, scaling=c.attention_multiplier, **still)

    def layer(i: int) -> Layer:
        return layer_of(c, i, mixer(i), feed_forward(i), residual=c.residual_multiplier)

    return decoder(c, layer, scale=c.embedding_multiplier, head_scale=1 / c.logits_scaling)


def bamba(c: Config) -> Stack:
    c.ignore(f"z_loss_coefficient attn_rotary_emb {STEPS}")

    def layer(i: int) -> Layer:
        at, fed = f"model.layers.{i}.mamba", gated(c, i, c.mlp_bias, name="feed_forward")
        if i in (c.get("attn_layer_indices") or ()):
            return layer_of(c, i, attention(c, i, c.attention_bias), fed, BEFORE)
        return layer_of(c, i, _mamba(c, at, norm=rms(c, f"{at}.norm")), fed, BEFORE)

    return decoder(c, layer, norm=rms(c, "model.final_layernorm"))


def nemotron_h(c: Config) -> Stack:
    """Each layer is Mamba-2, attention without angles, or a feed-forward."""
    c.ignore(
        "n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group "
        "moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
        "moe_shared_expert_overlap routed_scaling_factor norm_topk_prob"  # of experts
    )
    c.ignore(f"mtp_layers_block_type expand chunk_size mamba_proj_bias use_mamba_kernels {STEPS}")
    c.ignore("mamba_ssm_cache_dtype residual_in_fp32 rescale_prenorm_residual")
    c.ignore("attention_head_dim hybrid_override_pattern num_query_groups rms_norm_eps")
    c.ignore("attention_bias sliding_window")  # its attention heeds neither
    c.must("mamba_hidden_act", "silu", "swish")
    c.must("num_nextn_predict_layers", 0)

    def norm(module: str) -> Norm:
        return Norm((f"{module}.weight",), c.layer_norm_epsilon)

    def mamba(at: str) -> LinearAttention:
        return mixer(
            at,
            (c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size),
            bool(c.use_bias),
            taps=c.conv_kernel,
            bias=f"{at}.conv1d.bias" if c.use_conv_bias else None,
            norm=norm(f"{at}.norm"),
            least=c.time_step_min,
        )

    def layer(i: int) -> Layer:
        at, kind = f"model.layers.{i}.mixer", c.layers_block_type[i]
        if kind == "linear_attention":
            return layer_of(c, i, mamba(at), None, ("norm", None), norm)
        if kind == "full_attention":
            qkv, out = tensors(*(f"{at}.{one}_proj" for one in "qkv")), tensors(f"{at}.o_proj")
            of = attention(c, i, window=None, qkv=qkv, out=out, rotary=None)
            return layer_of(c, i, of, None, ("norm", None), norm)
        if kind != "mlp":
            raise NotDescribed(f"a layer of kind {kind}")
        up, down = (tensors(f"{at}.{one}_proj", bias=c.mlp_bias) for one in ("up", "down"))
        fed = FeedForward(up, down, activation(c.mlp_hidden_act), False)
        return layer_of(c, i, None, fed, (None, "norm"), norm)

    return decoder(c, layer, embedding="model.embeddings.weight", norm=norm("model.norm_f"))


def falcon_h1(c: Config) -> Stack:
    """Attention beside Mamba-2 in each layer, and many factors."""
    c.ignore(f"mamba_d_ssm attn_layer_indices mlp_expansion_factor {STEPS}", mamba_use_mlp=True)
    attention_in, ssm_in = c.attention_in_multiplier, c.ssm_in_multiplier
    if (c.attention_bias and attention_in != 1) or (c.mamba_proj_bias and ssm_in != 1):
        raise NotDescribed("a factor before a product with a bias")
    gates, values, keys, queries, steps = (ssm_in * one for one in c.ssm_multipliers)
    up, down = c.mlp_multipliers

    def layer(i: int) -> Layer:
        at, bias = f"model.layers.{i}.mamba", c.attention_bias
        fed = gated(c, i, c.mlp_bias, name="feed_forward")
        of = attention(c, i, bias, window=None, factor=c.attention_out_multiplier * attention_in)
        mamba = _mamba(
            c,
            at,
            out=tensors(f"{at}.out_proj", bias=bool(c.projectors_bias)),
            norm=rms(c, f"{at}.norm") if c.mamba_rms_norm else None,
            norm_last=not c.mamba_norm_before_gate,
            gate_scale=gates,
            scales=(values, keys, queries),
            step_scale=steps,
            factor=c.ssm_out_multiplier,
        )
        scaled = replace(of, scaling=of.scaling * attention_in**2 * c.key_multiplier)
        fed = replace(fed, gate_scale=up, factor=down)
        return layer_of(c, i, scaled, fed, BEFORE, recurrent=mamba)

    return decoder(
        c,
        layer,
        norm=rms(c, "model.final_layernorm"),
        scale=c.embedding_multiplier,
        head_scale=c.lm_head_multiplier,
    )
