"""Phi-1 and Phi-2 (attention and feed-forward side by side), Phi-3 and Phi-4, and Phi-MoE."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    activation,
    attention,
    before,
    decoder,
    experts,
    halves,
    layer_norm,
    plain,
    tensors,
)
from quickbeam.models.stack import FeedForward, Layer, Routing, Stack


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


def phimoe(c: Config) -> Stack:
    """Layer norms, and two experts whose weights don't add up to 1."""
    c.must("num_experts_per_tok", 2)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        routing = Routing(
            tensors(f"{at}.mlp.router"), 2, "mixer", jitter=float(c.router_jitter_noise)
        )
        return Layer(
            attention(c, i, c.attention_bias, window=c.get("sliding_window")),
            experts(c, i, routing, c.num_local_experts),
            layer_norm(f"{at}.input_layernorm", c.rms_norm_eps),
            layer_norm(f"{at}.post_attention_layernorm", c.rms_norm_eps),
        )

    norm = layer_norm("model.norm", c.rms_norm_eps)
    return decoder(c, layer, norm=norm, head=tensors("lm_head", bias=c.lm_head_bias))
