"""Mamba-2 and attention: Granite 4 H, Bamba, Nemotron-H and Falcon-H1."""

from __future__ import annotations

import math
from dataclasses import replace

from quickbeam.models.families.llama import granite_experts, granite_shared
from quickbeam.models.families.reading import (
    Config,
    NormNames,
    NotDescribed,
    attention,
    decoder,
    gated,
    layer_of,
    linear,
    plain,
    rms_norms,
    stacked,
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
    Rotary,
    Stack,
)

BEFORE = NormNames("input_layernorm", "pre_ff_layernorm")
MIXER_ALONE = NormNames("norm", None)
FEED_FORWARD_ALONE = NormNames(None, "norm")
# of training: what steps begin with
STEPS = "time_step_floor time_step_limit time_step_max time_step_min time_step_rank"


def granite_hybrid(config: Config) -> Stack:
    """Granite with Mamba-2 in most layers, and a feed-forward of all tokens, with experts or
    without."""
    config.ignore("num_experts_per_tok rope_parameters shared_intermediate_size")
    config.ignore(normalization_function="rmsnorm")
    rotary = Rotary() if config.get("position_embedding_type") == "rope" else None

    def mixer(i: int) -> Attention | LinearAttention:
        if config.layer_types[i] == "linear_attention":
            return _usual_mamba2(config, i, has_norm=True)
        scaling = config.attention_multiplier
        return attention(config, i, config.attention_bias, rotary=rotary, scaling=scaling)

    def feed_forward(i: int) -> FeedForward | Experts:
        shared = granite_shared(config, i)
        return granite_experts(config, i, shared) if config.num_local_experts else shared

    def layer(i: int) -> Layer:
        residual = config.residual_multiplier
        return layer_of(config, i, mixer(i), feed_forward(i), residual=residual)

    scale, head_scale = config.embedding_multiplier, 1 / config.logits_scaling
    return decoder(config, layer, scale=scale, head_scale=head_scale)


def bamba(config: Config) -> Stack:
    config.ignore(f"z_loss_coefficient attn_rotary_emb {STEPS}")

    def mixer(i: int) -> Attention | LinearAttention:
        if i in (config.get("attn_layer_indices") or ()):
            return attention(config, i, config.attention_bias)
        return _usual_mamba2(config, i, has_norm=True)

    def layer(i: int) -> Layer:
        feed_forward = gated(config, i, config.mlp_bias, name="feed_forward")
        return layer_of(config, i, mixer(i), feed_forward, BEFORE)

    return decoder(config, layer, rms_norms(config.rms_norm_eps)("model.final_layernorm"))


def falcon_h1(config: Config) -> Stack:
    """Attention and Mamba-2 in each layer, which read the same, and many factors."""
    config.ignore(f"mamba_d_ssm attn_layer_indices mlp_expansion_factor {STEPS}")
    config.ignore(mamba_use_mlp=True)
    attention_in, ssm_in = config.attention_in_multiplier, config.ssm_in_multiplier
    if (config.attention_bias and attention_in != 1) or (config.mamba_proj_bias and ssm_in != 1):
        raise NotDescribed("a factor before a product with a bias")
    # of gates, values, keys, queries and steps
    factors = [ssm_in * factor for factor in config.ssm_multipliers]
    if len(factors) != 5:
        raise NotDescribed(f"{len(factors)} ssm_multipliers")
    gate_scale, down_scale = config.mlp_multipliers

    def mamba(i: int) -> LinearAttention:
        prefix = f"model.layers.{i}.mamba"
        return replace(
            _usual_mamba2(config, i, has_norm=config.mamba_rms_norm),
            out=linear(f"{prefix}.out_proj", bias=bool(config.projectors_bias)),
            norm_last=not config.mamba_norm_before_gate,
            gate_scale=factors[0],
            scales=(factors[1], factors[2], factors[3]),
            step_scale=factors[4],
            factor=config.ssm_out_multiplier,
        )

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias, window=None)
        mixer = replace(
            mixer,
            scaling=mixer.scaling * attention_in**2 * config.key_multiplier,
            factor=config.attention_out_multiplier * attention_in,
        )
        feed_forward = gated(config, i, config.mlp_bias, name="feed_forward")
        feed_forward = replace(feed_forward, gate_scale=gate_scale, factor=down_scale)
        return layer_of(config, i, mixer, feed_forward, BEFORE, recurrent=mamba(i))

    return decoder(
        config,
        layer,
        rms_norms(config.rms_norm_eps)("model.final_layernorm"),
        scale=config.embedding_multiplier,
        head_scale=config.lm_head_multiplier,
    )


def nemotron_h(config: Config) -> Stack:
    """Each layer is Mamba-2, attention without angles, or a feed-forward."""
    config.ignore(  # of experts
        "n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group "
        "moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
        "moe_shared_expert_overlap routed_scaling_factor norm_topk_prob"
    )
    config.ignore("mtp_layers_block_type expand chunk_size mamba_proj_bias use_mamba_kernels")
    config.ignore(f"mamba_ssm_cache_dtype residual_in_fp32 rescale_prenorm_residual {STEPS}")
    config.ignore("attention_head_dim hybrid_override_pattern num_query_groups rms_norm_eps")
    config.ignore("attention_bias sliding_window")  # its attention heeds neither
    config.must("mamba_hidden_act", "silu", "swish")
    config.must("num_nextn_predict_layers", 0)
    norm = rms_norms(config.layer_norm_epsilon)

    def mamba(prefix: str) -> LinearAttention:
        return mamba2(
            prefix,
            heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            groups=config.n_groups,
            state=config.ssm_state_size,
            taps=config.conv_kernel,
            bias=bool(config.use_bias),
            conv_bias=config.use_conv_bias,
            norm=norm(f"{prefix}.norm"),
            least=config.time_step_min,
        )

    def layer(i: int) -> Layer:
        prefix, kind = f"model.layers.{i}.mixer", config.layers_block_type[i]
        if kind == "linear_attention":
            return layer_of(config, i, mamba(prefix), None, MIXER_ALONE, norm)
        if kind == "full_attention":
            qkv, out = stacked(prefix, "q_proj", "k_proj", "v_proj"), linear(f"{prefix}.o_proj")
            mixer = attention(config, i, rotary=None, window=None, qkv=qkv, out=out)
            return layer_of(config, i, mixer, None, MIXER_ALONE, norm)
        if kind != "mlp":
            raise NotDescribed(f"a layer of kind {kind}")
        feed_forward = plain(config, prefix, config.mlp_bias, act=config.mlp_hidden_act)
        return layer_of(config, i, None, feed_forward, FEED_FORWARD_ALONE, norm)

    return decoder(config, layer, norm("model.norm_f"), embedding="model.embeddings.weight")


def _usual_mamba2(config: Config, i: int, has_norm: bool) -> LinearAttention:
    """Return Mamba-2 of layer `i`, by the names that most configurations have."""
    config.ignore("mamba_expand mamba_chunk_size")  # sizes follow; kernels
    config.must("hidden_act", "silu", "swish")
    prefix = f"model.layers.{i}.mamba"
    least, most = config.time_step_limit
    return mamba2(
        prefix,
        heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        groups=config.mamba_n_groups,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
        bias=bool(config.mamba_proj_bias),
        conv_bias=config.mamba_conv_bias,
        norm=rms_norms(config.rms_norm_eps)(f"{prefix}.norm") if has_norm else None,
        least=least,
        most=most,
    )


def mamba2(
    prefix: str,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    taps: int,
    bias: bool,
    conv_bias: bool,
    norm: Norm | None,
    least: float,
    most: float = math.inf,
) -> LinearAttention:
    """Return Mamba-2 of the module `prefix`.

    `groups`: of B and C, which have `state` dimensions each. `bias`: of the projections. The rows
    of `in_proj` are those of gates, of what is convolved, and of steps.
    """
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    if state % 4:
        raise NotDescribed(f"a state of {state} numbers")
    convolved = (inner, inner + channels)
    steps = (inner + channels, inner + channels + heads)

    def rows(kind: str) -> tuple[ParameterRows, ...]:
        return tuple(
            ParameterRows(f"{prefix}.in_proj.{kind}", cut=cut)
            for cut in (convolved, (0, inner), steps)
        )

    return LinearAttention(
        into=Linear(rows("weight"), rows("bias") if bias else ()),
        out=linear(f"{prefix}.out_proj", bias=bias),
        weight=f"{prefix}.conv1d.weight",
        bias=f"{prefix}.conv1d.bias" if conv_bias else None,
        taps=taps,
        heads=heads,
        key_heads=groups,
        key_dim=state,
        value_dim=head_dim,
        log_slope=f"{prefix}.A_log",
        shift=f"{prefix}.dt_bias",
        delta=False,
        norm=norm,
        groups=groups,
        norm_last=True,
        skip=f"{prefix}.D",
        least=least,
        most=most,
    )
