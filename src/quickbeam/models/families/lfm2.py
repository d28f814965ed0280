"""LFM2 and 3: short convolutions, attention in some layers, and experts."""

from __future__ import annotations

from collections.abc import Callable

from quickbeam.models.families.reading import (
    Config,
    NormNames,
    NotDescribed,
    attention,
    decoder,
    experts,
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
    Rotary,
    Routing,
    ShortConv,
    Stack,
)

BEFORE = NormNames("operator_norm", "ffn_norm")


def lfm2(config: Config) -> Stack:
    # the sizes of the feed-forward; `layer_types` follows from the last
    config.ignore("block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of")
    config.ignore("full_attn_idxs")
    return _lfm2(config, dense)


def lfm2_moe(config: Config) -> Stack:
    """Dense layers first. Then experts selected by their sigmoids plus a bias."""

    def feed_forward(i: int) -> FeedForward | Experts:
        if i < config.num_dense_layers:
            return dense(i)
        prefix = f"model.layers.{i}.feed_forward"
        routing = Routing(
            logits=linear(f"{prefix}.gate"),
            top=config.num_experts_per_tok,
            scores="sigmoid",
            correction=f"{prefix}.expert_bias" if config.use_expert_bias else None,
            renormalised=bool(config.norm_topk_prob),
            plus=1e-6,
            factor=float(config.routed_scaling_factor),
        )
        return experts(config, i, routing, config.num_experts, "feed_forward", act="silu")

    return _lfm2(config, feed_forward)


def _lfm2(config: Config, feed_forward: Callable[[int], FeedForward | Experts]) -> Stack:
    config.ignore(
        "block_dim block_ff_dim block_mlp_init_scale block_norm_eps block_out_init_scale "
        "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads",
        block_use_swiglu=True,
        use_pos_enc=True,
    )
    norm = rms_norms(config.norm_eps)

    def mixer(i: int, kind: str) -> Attention:
        if kind != "full_attention":
            raise NotDescribed(f"a layer of kind {kind}")
        norms = head_norms(config, i, ("q_layernorm", "k_layernorm"), norm)
        out = linear(f"model.layers.{i}.self_attn.out_proj")
        return attention(config, i, out=out, norms=norms)

    return _with_convolutions(config, mixer, feed_forward, BEFORE)


def lfm3(config: Config) -> Stack:
    """Norms before and after, windows, angles by the kind of layer, and a gate for each head."""
    config.must("use_attention_gate", True)
    config.must("attention_bias", False)
    norm = rms_norms(config.norm_eps)

    def mixer(i: int, kind: str) -> Attention:
        prefix = f"model.layers.{i}.self_attn"
        return attention(
            config,
            i,
            rotary=Rotary(kind),
            qkv=stacked(prefix, "q_proj", "k_proj", "v_proj", "g_proj"),
            norms=head_norms(config, i, norm=norm),
            gated=True,
            one_gate=True,
        )

    names = BEFORE
    if config.use_sandwich_norm:
        names = NormNames(*BEFORE[:2], "post_operator_norm", "post_ffn_norm")
    return _with_convolutions(config, mixer, dense, names)


def dense(i: int) -> FeedForward:
    prefix = f"model.layers.{i}.feed_forward"
    return FeedForward(stacked(prefix, "w1", "w3"), linear(f"{prefix}.w2"), "silu", gated=True)


def _with_convolutions(
    config: Config,
    attention_of: Callable[[int, str], Attention],
    feed_forward: Callable[[int], FeedForward | Experts],
    names: NormNames,
) -> Stack:
    """`attention_of`: makes the attention of a layer by its number and kind. `feed_forward`: makes
    that of a layer by its number."""
    norm = rms_norms(config.norm_eps)

    def layer(i: int) -> Layer:
        kind = config.layer_types[i]
        mixer = convolution(config, i) if kind == "conv" else attention_of(i, kind)
        return layer_of(config, i, mixer, feed_forward(i), names, norm)

    return decoder(config, layer, norm("model.embedding_norm"))


def convolution(config: Config, i: int) -> ShortConv:
    prefix, bias = f"model.layers.{i}.conv", bool(config.conv_bias)
    return ShortConv(
        into=linear(f"{prefix}.in_proj", bias=bias),
        out=linear(f"{prefix}.out_proj", bias=bias),
        weight=f"{prefix}.conv.weight",
        bias=f"{prefix}.conv.bias" if bias else None,
        channels=config.hidden_size,
        taps=config.conv_L_cache,
    )
