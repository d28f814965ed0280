"""Phi-1 and Phi-2 (attention and feed-forward side by side), Phi-3 and Phi-4."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    activation,
    attention,
    before,
    decoder,
    halves,
    layer_norm,
    plain,
    tensors,
)
from quickbeam.models.stack import FeedForward, Layer, Stack


def phi(c: Config) -> Stack:
    c.must("qk_layernorm", False)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        out = tensors(f"{at}.self_attn.dense", bias=True)
        return Layer(
            attention(c, i, True, out=out),
            plain(c, f"{at}.mlp.fc1", f"{at}.mlp.fc2", True),
            layer_norm(f"{at}.input_layernorm", c.layer_norm_eps),
            None,
            parallel=True,
        )

    norm = layer_norm("model.final_layernorm", c.layer_norm_eps)
    return decoder(c, layer, norm=norm, head=tensors("lm_head", bias=True))


def phi3(c: Config) -> Stack:
    """Queries, keys and values in one weight; gate and rest in one; a window in every layer."""

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        qkv = tensors(f"{at}.self_attn.qkv_proj")
        fed = FeedForward(
            halves(f"{at}.mlp.gate_up_proj"),
            tensors(f"{at}.mlp.down_proj"),
            activation(c.hidden_act),
            True,
        )
        return before(c, i, attention(c, i, qkv=qkv, window=c.get("sliding_window")), fed)

    return decoder(c, layer)
