"""The parts of a `CompiledStack`'s layer: packed weights, and other numbers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quickbeam.models.experts import CompiledExperts
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.recurrent import compile_recurrent
from quickbeam.models.stack import Experts, FeedForward, Layer, Linear, Norm
from quickbeam.models.stack_tensors import norm_weight


class CompiledNorm:
    """A norm's numbers in float32."""

    def __init__(self, norm: Norm, parameter: Callable[[str], torch.Tensor]) -> None:
        self.weight = norm_weight(norm, parameter)
        self.bias = None if norm.bias is None else parameter(norm.bias).detach().float().clone()
        self.epsilon, self.centred = norm.epsilon, norm.centred

    def add(self, program: Program, source: Buffer, target: Buffer, **more: Any) -> None:
        """Add the norm to a program. `more`: as of `Program.norm`."""
        program.norm(
            source,
            target,
            self.weight,
            self.epsilon,
            bias=self.bias,
            centred=self.centred,
            **more,
        )


class CompiledFeedForward:
    """A feed-forward's packed weights. `inner`: how many numbers a row has inside."""

    scores = routes = 0

    def __init__(self, of: FeedForward, place: Callable[[Linear, bool], Any]) -> None:
        self.of, self.up, self.down = of, place(of.up, of.gated), place(of.down, False)
        self.inner: int = self.down.inputs


class CompiledLayer:
    """One layer's packed weights, and its other numbers in float32.

    `place` packs a `Linear`; `experts` makes a feed-forward of experts.
    """

    def __init__(
        self,
        layer: Layer,
        place: Callable[[Linear, bool], Any],
        parameter: Callable[[str], torch.Tensor],
        experts: Callable[[Experts], CompiledExperts] | None = None,
    ) -> None:
        self.layer, mixer, fed = layer, layer.attention, layer.feed_forward
        if mixer is not None:
            self.qkv, self.out = place(mixer.qkv, False), place(mixer.out, False)
        self.recurrent = (
            None
            if layer.recurrent is None
            else compile_recurrent(layer.recurrent, place, parameter)
        )
        self.fed: CompiledFeedForward | CompiledExperts
        if isinstance(fed, FeedForward):
            self.fed = CompiledFeedForward(fed, place)
        else:
            assert experts is not None  # models of experts are not streamed
            self.fed = experts(fed)

        def norm(of: Norm | None) -> CompiledNorm | None:
            return None if of is None else CompiledNorm(of, parameter)

        self.attention_before, self.attention_after = (
            norm(layer.attention_before),
            norm(layer.attention_after),
        )
        self.fed_before, self.fed_after = (
            norm(layer.feed_forward_before),
            norm(layer.feed_forward_after),
        )
        norms = None if mixer is None else mixer.norms
        self.norms = None if norms is None else [CompiledNorm(n, parameter) for n in norms]
        sinks = None if mixer is None else mixer.sinks
        self.sinks = None if sinks is None else parameter(sinks).detach().float()
