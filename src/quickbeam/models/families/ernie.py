"""ERNIE 4.5 of experts: neighbouring dimensions turn together."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    attention,
    before,
    decoder,
    experts,
    gated,
    tensors,
)
from quickbeam.models.stack import Layer, Rotary, Routing, Stack


def ernie4_5_moe(c: Config) -> Stack:
    """Experts are chosen by their softmax plus a correction, and weighted without it."""
    c.must("use_rmsnorm", True)
    c.must("moe_gate", "topk")
    for name in ("moe_capacity", "moe_use_aux_free"):
        c.get(name)  # of training

    def layer(i: int) -> Layer:
        at, bias = f"model.layers.{i}", bool(c.use_bias)
        mixer = attention(c, i, bias, rotary=Rotary(interleaved=True))
        first, last, each = (c.moe_layer_start_index, c.moe_layer_end_index, c.moe_layer_interval)
        if not first <= i <= last or (i + 1) % each:
            return before(c, i, mixer, gated(c, i, bias))
        routing = Routing(
            tensors(f"{at}.mlp.gate"),
            c.moe_k,
            correction=f"{at}.mlp.gate.moe_statics.e_score_correction_bias",
            renormalised=True,
            least=float(c.moe_norm_min),
        )
        shared = None
        if c.moe_num_shared_experts:
            shared = gated(c, i, bias, name="mlp.shared_experts")
        return before(c, i, mixer, experts(c, i, routing, c.moe_num_experts, shared=shared))

    return decoder(c, layer)
