"""LFM2: short convolutions, and attention in some layers."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, NotDescribed, attention, decoder, tensors
from quickbeam.models.stack import FeedForward, Layer, Norm, ShortConv, Stack


def lfm2(c: Config) -> Stack:
    for name in ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"):
        c.get(name)  # the sizes of the feed-forward
    c.get("full_attn_idxs")  # `layer_types` follows from it

    def norm(module: str) -> Norm:
        return Norm((f"{module}.weight",), c.norm_eps)

    def layer(i: int) -> Layer:
        at, kind = f"model.layers.{i}", c.layer_types[i]
        if kind not in ("conv", "full_attention"):
            raise NotDescribed(f"a layer of kind {kind}")
        fed = FeedForward(
            tensors(f"{at}.feed_forward.w1", f"{at}.feed_forward.w3"),
            tensors(f"{at}.feed_forward.w2"),
            "silu",
            True,
        )
        norms = norm(f"{at}.operator_norm"), norm(f"{at}.ffn_norm")
        if kind == "conv":
            return Layer(None, fed, *norms, recurrent=conv(c, f"{at}.conv"))
        of = f"{at}.self_attn"
        heads = norm(f"{of}.q_layernorm"), norm(f"{of}.k_layernorm")
        return Layer(attention(c, i, out=tensors(f"{of}.out_proj"), norms=heads), fed, *norms)

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
