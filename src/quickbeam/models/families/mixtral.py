"""Mixtral: experts in every layer."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, attention, before, decoder, experts, tensors
from quickbeam.models.stack import Routing, Stack


def mixtral(c: Config) -> Stack:
    """The weights of the chosen experts add up to 1."""
    c.get("router_jitter_noise")  # of training

    def layer(i: int):  # type: ignore[no-untyped-def]
        logits = tensors(f"model.layers.{i}.mlp.gate")
        routing = Routing(logits, c.num_experts_per_tok, renormalised=True)
        mixer = attention(c, i, window=c.get("sliding_window"))
        return before(c, i, mixer, experts(c, i, routing, c.num_local_experts))

    return decoder(c, layer)
