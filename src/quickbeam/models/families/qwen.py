"""Qwen2, Qwen2.5 and Qwen3, dense and of experts."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    attention,
    before,
    decoder,
    experts,
    gated,
    head_norms,
    tensors,
)
from quickbeam.models.stack import Experts, FeedForward, Routing, Stack


def qwen2(c: Config) -> Stack:
    c.get("use_sliding_window")  # `layer_types` follows from it
    return decoder(c, lambda i: before(c, i, attention(c, i, True, out_bias=False), gated(c, i)))


def qwen3(c: Config) -> Stack:
    """Queries and keys are normed by head."""
    c.get("use_sliding_window")

    def layer(i: int):  # type: ignore[no-untyped-def]
        norms = head_norms(c, i, ("q_norm", "k_norm"))
        return before(c, i, attention(c, i, c.attention_bias, norms=norms), gated(c, i))

    return decoder(c, layer)


def _sparse(c: Config, i: int, shared: bool) -> FeedForward | Experts:
    """Return the feed-forward of layer `i`: of experts in every so many layers."""
    if i in c.mlp_only_layers or not c.num_experts or (i + 1) % c.decoder_sparse_step:
        return gated(c, i)
    at = f"model.layers.{i}.mlp"
    routing = Routing(
        tensors(f"{at}.gate"), c.num_experts_per_tok, renormalised=bool(c.norm_topk_prob)
    )
    if not shared:
        return experts(c, i, routing, c.num_experts)
    gate = tensors(f"{at}.shared_expert_gate")
    beside = gated(c, i, name="mlp.shared_expert")
    return experts(c, i, routing, c.num_experts, shared=beside, shared_gate=gate)


def qwen2_moe(c: Config) -> Stack:
    """A shared expert, times the sigmoid of a gate."""
    c.get("use_sliding_window")
    return decoder(
        c,
        lambda i: before(
            c, i, attention(c, i, c.qkv_bias, out_bias=False), _sparse(c, i, shared=True)
        ),
    )


def qwen3_moe(c: Config) -> Stack:
    c.get("use_sliding_window")  # `sliding_window` follows from it

    def layer(i: int):  # type: ignore[no-untyped-def]
        norms = head_norms(c, i, ("q_norm", "k_norm"))
        mixer = attention(c, i, c.attention_bias, norms=norms, window=c.get("sliding_window"))
        return before(c, i, mixer, _sparse(c, i, shared=False))

    return decoder(c, layer)
