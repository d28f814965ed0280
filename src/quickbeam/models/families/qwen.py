"""Qwen2, Qwen2.5, Qwen3, Qwen3-Next and Qwen3.5, dense and of experts; and Mellum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from quickbeam.models.families.reading import (
    Config,
    NotDescribed,
    attention,
    decoder,
    experts,
    gated,
    head_norms,
    layer_of,
    linear,
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
    ParameterRows,
    Rotary,
    Routing,
    Stack,
)


def qwen2(config: Config) -> Stack:
    config.ignore("use_sliding_window")  # `layer_types` follows from it

    def layer(i: int) -> Layer:
        mixer = attention(config, i, bias=True, out_bias=False)
        return layer_of(config, i, mixer, gated(config, i))

    return decoder(config, layer)


def qwen3(config: Config) -> Stack:
    """Queries and keys are normed by head."""
    config.ignore("use_sliding_window")

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.attention_bias, norms=head_norms(config, i))
        return layer_of(config, i, mixer, gated(config, i))

    return decoder(config, layer)


def qwen2_moe(config: Config) -> Stack:
    """A shared expert, times the sigmoid of a gate."""
    config.ignore("use_sliding_window")

    def layer(i: int) -> Layer:
        mixer = attention(config, i, config.qkv_bias, out_bias=False)
        return layer_of(config, i, mixer, _sparse(config, i, shared=True))

    return decoder(config, layer)


def qwen3_moe(config: Config, renormalised: bool | None = None) -> Stack:
    """`renormalised`: None where the configuration says it."""
    config.ignore("use_sliding_window")  # `sliding_window` follows from it
    window = config.get("sliding_window")

    def layer(i: int) -> Layer:
        norms = head_norms(config, i)
        mixer = attention(config, i, config.attention_bias, norms=norms, window=window)
        return layer_of(config, i, mixer, _sparse(config, i, renormalised=renormalised))

    return decoder(config, layer)


def qwen3_vl(config: Config) -> Stack:
    return replace(qwen3(config), deepstack=config.get("_deepstack", 0))


def qwen3_vl_moe(config: Config) -> Stack:
    """The weights of the active experts add up to 1."""
    config.ignore(norm_topk_prob=True)
    stack = qwen3_moe(config, renormalised=True)
    return replace(stack, deepstack=config.get("_deepstack", 0))


def mellum(config: Config) -> Stack:
    """Windows, and angles by the kind of layer. `mlp_layer_types` names the dense layers."""
    config.ignore("mtp_layer_types mtp_mlp_layer_types")

    def layer(i: int) -> Layer:
        rotary, norms = Rotary(config.layer_types[i]), head_norms(config, i)
        mixer = attention(config, i, config.attention_bias, rotary=rotary, norms=norms)
        dense = config.mlp_layer_types[i] == "dense"
        return layer_of(config, i, mixer, gated(config, i) if dense else _experts(config, i))

    return decoder(config, layer)


def qwen3_5(config: Config) -> Stack:
    return _hybrid(config, lambda i: gated(config, i), separate=True)


def qwen3_5_moe(config: Config) -> Stack:
    def mixture(i: int) -> Experts:
        return _experts(config, i, shared=True, renormalised=True)

    return _hybrid(config, mixture, separate=True)


def qwen3_next(config: Config) -> Stack:
    return _hybrid(config, lambda i: _sparse(config, i, shared=True), separate=False)


def _sparse(
    config: Config, i: int, shared: bool = False, renormalised: bool | None = None
) -> FeedForward | Experts:
    """Return the feed-forward of layer `i`: experts in each `decoder_sparse_step`-th layer.

    The other arguments are those of `_experts`.
    """
    dense = i in config.mlp_only_layers or not config.num_experts
    if dense or (i + 1) % config.decoder_sparse_step:
        return gated(config, i)
    return _experts(config, i, shared, renormalised)


def _experts(
    config: Config, i: int, shared: bool = False, renormalised: bool | None = None
) -> Experts:
    """`shared`: whether there is a shared expert. `renormalised`: whether the weights of a row's
    experts add up to 1; None where the configuration says it."""
    if renormalised is None:
        renormalised = bool(config.norm_topk_prob)
    prefix = f"model.layers.{i}.mlp"
    logits = linear(f"{prefix}.gate")
    routing = Routing(logits, config.num_experts_per_tok, renormalised=renormalised)
    if not shared:
        return experts(config, i, routing, config.num_experts)
    return experts(
        config,
        i,
        routing,
        config.num_experts,
        shared=gated(config, i, name="mlp.shared_expert"),
        shared_gate=linear(f"{prefix}.shared_expert_gate"),
    )


def _hybrid(
    config: Config, feed_forward: Callable[[int], FeedForward | Experts], separate: bool
) -> Stack:
    """Gated delta rule in most layers, gated attention in the others.

    `separate`: as of `_delta_rule`.
    """
    config.ignore("full_attention_interval")  # `layer_types` follows from it
    config.ignore("mtp_num_hidden_layers mtp_use_dedicated_embeddings")
    config.ignore(attn_output_gate=True, mamba_ssm_dtype="float32")
    norm = rms_norms(config.rms_norm_eps, plus_one=True)

    def mixer(i: int) -> Attention | LinearAttention:
        kind = config.layer_types[i]
        if kind == "linear_attention":
            return _delta_rule(config, f"model.layers.{i}.linear_attn", separate)
        if kind != "full_attention":
            raise NotDescribed(f"a layer of kind {kind}")
        return _gated_attention(config, i)

    def layer(i: int) -> Layer:
        return layer_of(config, i, mixer(i), feed_forward(i), norm=norm)

    return decoder(config, layer, norm("model.norm"))


def _gated_attention(config: Config, i: int) -> Attention:
    """Each head's rows of `q_proj` are its query and its gate."""
    prefix, heads = f"model.layers.{i}.self_attn", config.num_attention_heads

    def rows(kind: str) -> tuple[ParameterRows, ...]:
        query, gate = (ParameterRows(f"{prefix}.q_proj.{kind}", part, 2, heads) for part in (0, 1))
        return (
            query,
            ParameterRows(f"{prefix}.k_proj.{kind}"),
            ParameterRows(f"{prefix}.v_proj.{kind}"),
            gate,
        )

    bias, norm = config.attention_bias, rms_norms(config.rms_norm_eps, plus_one=True)
    qkv = Linear(rows("weight"), rows("bias") if bias else ())
    norms = head_norms(config, i, norm=norm)
    return attention(config, i, bias, qkv=qkv, norms=norms, gated=True)


def _delta_rule(config: Config, prefix: str, separate: bool) -> LinearAttention:
    """`separate`: the projections are tensors of their own, not interleaved by key head."""
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    if config.hidden_act != "silu" or key_dim % 4:
        raise NotDescribed(
            f"a gated delta rule with {config.hidden_act} and keys of {key_dim} numbers"
        )
    # of each key head the rates of its heads, then their decays
    rates, decays = (ParameterRows(f"{prefix}.in_proj_ba.weight", k, 2, key_heads) for k in (0, 1))
    if separate:
        into = stacked(prefix, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    elif config.get("gates_apart"):  # in .gguf files
        into = Linear((*stacked(prefix, "in_proj_qkv", "in_proj_z").weights, rates, decays))
    else:  # of each key head its query, its key, and the values and gates of its heads
        values = heads // key_heads * value_dim
        bounds = (0, key_dim, 2 * key_dim, 2 * key_dim + values, 2 * key_dim + 2 * values)
        name = f"{prefix}.in_proj_qkvz.weight"
        cuts = (ParameterRows(name, heads=key_heads, cut=cut) for cut in pairwise(bounds))
        into = Linear((*cuts, rates, decays))
    return LinearAttention(
        into=into,
        out=linear(f"{prefix}.out_proj"),
        weight=f"{prefix}.conv1d.weight",
        bias=None,
        taps=config.linear_conv_kernel_dim,
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        log_slope=f"{prefix}.A_log",
        shift=f"{prefix}.dt_bias",
        delta=True,
        norm=rms_norms(config.rms_norm_eps)(f"{prefix}.norm"),
        groups=heads,
        tiled=bool(config.get("value_heads_tiled")),  # in .gguf files
    )
