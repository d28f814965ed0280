"""LFM2 and 3: short convolutions, attention in some layers, and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quickbeam.models.families.reading import (
    Config,
    Names,
    NotDescribed,
    attention,
    decoder,
    experts,
    layer_of,
    tensors,
)
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    Norm,
    Rotary,
    Routing,
    ShortConv,
    Stack,
)

BEFORE: Names = ("operator_norm", "ffn_norm")


def lfm2(c: Config) -> Stack:
    # the sizes of the feed-forward; `layer_types` follows from the last
    c.ignore("block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of full_attn_idxs")
    return _lfm2(c, dense)


def dense(i: int) -> FeedForward:
    at = f"model.layers.{i}.feed_forward"
    return FeedForward(tensors(f"{at}.w1", f"{at}.w3"), tensors(f"{at}.w2"), "silu", True)


def lfm2_moe(c: Config) -> Stack:
    """Dense layers first. Then experts chosen by their sigmoids plus a bias."""

    def feed_forward(i: int) -> FeedForward | Experts:
        if i < c.num_dense_layers:
            return dense(i)
        at = f"model.layers.{i}.feed_forward"
        routing = Routing(
            tensors(f"{at}.gate"),
            c.num_experts_per_tok,
            "sigmoid",
            f"{at}.expert_bias" if c.use_expert_bias else None,
            renormalised=bool(c.norm_topk_prob),
            plus=1e-6,
            factor=float(c.routed_scaling_factor),
        )
        return experts(c, i, routing, c.num_experts, "feed_forward", act="silu")

    return _lfm2(c, feed_forward)


def _lfm2(c: Config, feed_forward: Callable[[int], FeedForward | Experts]) -> Stack:
    c.ignore(
        "block_dim block_ff_dim block_mlp_init_scale block_norm_eps block_out_init_scale "
        "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads",
        block_use_swiglu=True,
        use_pos_enc=True,
    )

    def mixer(i: int, kind: str) -> Attention:
        if kind != "full_attention":
            raise NotDescribed(f"a layer of kind {kind}")
        at = f"model.layers.{i}.self_attn"
        norms = norm(c, f"{at}.q_layernorm"), norm(c, f"{at}.k_layernorm")
        return attention(c, i, out=tensors(f"{at}.out_proj"), norms=norms)

    return _stack(c, mixer, feed_forward, BEFORE)


def lfm3(c: Config) -> Stack:
    """Norms before and after, windows, angles by the kind of layer, and a gate for each head."""
    c.must("use_attention_gate", True)
    c.must("attention_bias", False)

    def mixer(i: int, kind: str) -> Attention:
        at = f"model.layers.{i}.self_attn"
        qkv = tensors(*(f"{at}.{name}_proj" for name in "qkvg"))
        norms = norm(c, f"{at}.q_norm"), norm(c, f"{at}.k_norm")
        turning: dict[str, Any] = {"rotary": Rotary(kind), "kind": kind}
        return attention(c, i, qkv=qkv, norms=norms, gated=True, one_gate=True, **turning)

    after: Names = ("post_operator_norm", "post_ffn_norm") if c.use_sandwich_norm else ()
    return _stack(c, mixer, dense, (*BEFORE, *after))


def norm(c: Config, module: str) -> Norm:
    return Norm((f"{module}.weight",), c.norm_eps)


def _stack(
    c: Config,
    mixer: Callable[[int, str], Attention],
    feed_forward: Callable[[int], FeedForward | Experts],
    names: Names,
) -> Stack:
    """`mixer`: makes the attention of a layer by its number and kind."""

    def layer(i: int) -> Layer:
        kind = c.layer_types[i]
        of = conv(c, f"model.layers.{i}.conv") if kind == "conv" else mixer(i, kind)
        return layer_of(c, i, of, feed_forward(i), names, lambda module: norm(c, module))

    return decoder(c, layer, norm=norm(c, "model.embedding_norm"))


def conv(c: Config, at: str) -> ShortConv:
    bias = bool(c.conv_bias)
    return ShortConv(
        tensors(f"{at}.in_proj", bias=bias),
        tensors(f"{at}.out_proj", bias=bias),
        f"{at}.conv.weight",
        f"{at}.conv.bias" if bias else None,
        c.hidden_size,
        c.conv_L_cache,
    )
