"""LFM2 and 3: short convolutions, attention in some layers, and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quickbeam.models.families.reading import (
    Config,
    NotDescribed,
    attention,
    decoder,
    experts,
    tensors,
)
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Norm,
    Rotary,
    Routing,
    ShortConv,
    Stack,
)


def lfm2(c: Config) -> Stack:
    for name in ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"):
        c.get(name)  # the sizes of the feed-forward
    c.get("full_attn_idxs")  # `layer_types` follows from it
    return _stack(c, dense, Rotary())


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

    return _stack(c, feed_forward, Rotary())


def lfm3(c: Config) -> Stack:
    """Norms before and after, windows, angles by the kind of layer, and a gate for each head."""
    c.must("use_attention_gate", True)
    after = bool(c.use_sandwich_norm)

    def norm(module: str) -> Norm:
        return Norm((f"{module}.weight",), c.norm_eps)

    def layer(i: int) -> Layer:
        at, kind = f"model.layers.{i}", c.layer_types[i]
        norms: dict[str, Any] = {
            "attention_before": norm(f"{at}.operator_norm"),
            "feed_forward_before": norm(f"{at}.ffn_norm"),
        }
        if after:
            norms["attention_after"] = norm(f"{at}.post_operator_norm")
            norms["feed_forward_after"] = norm(f"{at}.post_ffn_norm")
        if kind == "conv":
            mixer = conv(c, f"{at}.conv")
            return Layer(None, dense(i), **norms, recurrent=mixer)
        of = f"{at}.self_attn"
        qkv = tensors(*(f"{of}.{name}_proj" for name in "qkvg"))
        if c.attention_bias:
            raise NotDescribed("attention_bias=True")
        heads = norm(f"{of}.q_norm"), norm(f"{of}.k_norm")
        how = {"rotary": Rotary(kind), "kind": kind, "gated": True, "one_gate": True}
        return Layer(attention(c, i, qkv=qkv, norms=heads, **how), dense(i), **norms)

    return decoder(c, layer, norm=norm("model.embedding_norm"))


def _stack(
    c: Config, feed_forward: Callable[[int], FeedForward | Experts], rotary: Rotary
) -> Stack:

    def norm(module: str) -> Norm:
        return Norm((f"{module}.weight",), c.norm_eps)

    def layer(i: int) -> Layer:
        at, kind = f"model.layers.{i}", c.layer_types[i]
        if kind not in ("conv", "full_attention"):
            raise NotDescribed(f"a layer of kind {kind}")
        fed = feed_forward(i)
        norms = norm(f"{at}.operator_norm"), norm(f"{at}.ffn_norm")
        if kind == "conv":
            return Layer(None, fed, *norms, recurrent=conv(c, f"{at}.conv"))
        of = f"{at}.self_attn"
        heads = norm(f"{of}.q_layernorm"), norm(f"{of}.k_layernorm")
        mixer = attention(c, i, out=tensors(f"{of}.out_proj"), norms=heads, rotary=rotary)
        return Layer(mixer, fed, *norms)

    return decoder(c, layer, norm=norm("model.embedding_norm"))


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
