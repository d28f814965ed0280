"""The parts of a `CompiledStack`'s layer: packed weights, and other numbers in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quickbeam.models.beside import CompiledBeside, CompiledPerLayerInput
from quickbeam.models.compiled_norm import CompiledNorm
from quickbeam.models.experts import CompiledExperts
from quickbeam.models.native import operations
from quickbeam.models.native.operands import KVShape
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import AnyPacked
from quickbeam.models.recurrent import compile_recurrent
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Latent,
    Layer,
    Linear,
    Norm,
)


class CompiledFeedForward:
    """A feed-forward's packed weights. `inner`: how many numbers a row has inside."""

    scores = routes = 0

    def __init__(self, of: FeedForward, place: Callable[[Linear, bool], Any]) -> None:
        self.of, self.up, self.down = of, place(of.up, of.gated), place(of.down, False)
        self.inner: int = self.down.inputs


class CompiledLatent:
    """Queries, keys and values of a latent attention, behind its first product."""

    def __init__(
        self,
        of: Attention,
        latent: Latent,
        place: Callable[[Linear, bool], Any],
        parameter: Callable[[str], torch.Tensor],
    ) -> None:
        self._of, self._rank = of, latent.rank
        parts = [(CompiledNorm(n, parameter), place(up, False)) for n, up in latent.parts]
        self._query, (self._norm, self._up) = parts[0] if latent.query else None, parts[-1]

    def add(
        self,
        program: Program,
        buffers: dict[str, Buffer],
        shape: KVShape,
        offset: int,
        angles: int,
    ) -> None:
        """Add them to a program. What the product gives is in the buffer `qkv`."""
        of, small, query = self._of, buffers["qkv"], self._query
        before = of.heads * of.head_dim if query is None else query[1].inputs
        queries = small
        if query is not None:
            queries = self._product(program, buffers, *query, 0, "queries")
        rest = self._product(program, buffers, self._norm, self._up, before, "rest")
        assert of.rotary is not None
        operations.latent(
            program,
            queries,
            rest,
            small,
            buffers["query"],
            of.heads,
            shape,
            offset,
            turned=of.turned,
            column=before + self._rank,
            angles=angles,
            interleaved=of.rotary.interleaved,
        )

    @staticmethod
    def _product(
        program: Program,
        buffers: dict[str, Buffer],
        norm: CompiledNorm,
        up: AnyPacked,
        of: int,
        name: str,
    ) -> Buffer:
        """Add a norm of columns `of` on and the product behind it. Returns its results."""
        wide = buffers["query"].float32
        for key, width, float32 in ((f"{name} before", up.inputs, wide), (name, up.outputs, True)):
            if key not in buffers or buffers[key].width < width:
                buffers[key] = program.buffer(width, float32)
        normed, made = buffers[f"{name} before"], buffers[name]
        norm.add(program, buffers["qkv"], normed, width=up.inputs, of=of)
        program.linear(up, normed, made)
        return made


class CompiledLayer:
    """One layer's packed weights, and its other numbers in float32.

    `place` packs a `Linear`; `experts` makes a feed-forward of experts.
    """

    def __init__(
        self,
        layer: Layer,
        place: Callable[[Linear, bool], Any],
        parameter: Callable[[str], torch.Tensor],
        experts: Callable[[Experts], CompiledExperts],
    ) -> None:
        self.layer, mixer, fed = layer, layer.attention, layer.feed_forward
        self.latent: CompiledLatent | None = None
        if mixer is not None:  # in the order in which a pass reads them
            self.qkv = place(mixer.qkv, False)
            if mixer.latent is not None:
                self.latent = CompiledLatent(mixer, mixer.latent, place, parameter)
            self.out = place(mixer.out, False)
        self.recurrent = (
            None
            if layer.recurrent is None
            else compile_recurrent(layer.recurrent, place, parameter)
        )
        self.fed: CompiledFeedForward | CompiledExperts | None = None
        if isinstance(fed, FeedForward):
            self.fed = CompiledFeedForward(fed, place)
        elif fed is not None:
            self.fed = experts(fed)

        def norm(of: Norm | None) -> CompiledNorm | None:
            return None if of is None else CompiledNorm(of, parameter)

        self.beside: CompiledBeside | None = None
        if layer.beside is not None:
            assert experts is not None
            self.beside = CompiledBeside(layer.beside, experts(layer.beside.experts), parameter)
        self.per_layer: CompiledPerLayerInput | None = None
        if layer.per_layer is not None:
            after = CompiledNorm(layer.per_layer.after, parameter)
            self.per_layer = CompiledPerLayerInput(layer.per_layer, place, after)
        self.scalar = None if layer.scalar is None else float(parameter(layer.scalar))
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

    @property
    def experts(self) -> CompiledExperts | None:
        """The layer's experts, if it has any."""
        if self.beside is not None:
            return self.beside.experts
        return self.fed if isinstance(self.fed, CompiledExperts) else None

    def heads(
        self,
        program: Program,
        buffers: dict[str, Buffer],
        of: Attention,
        shape: KVShape,
        offset: int,
        angles: int,
        query_scale: int | None,
    ) -> None:
        """Add norms and angles of queries and keys. `query_scale`: as of `Program.heads`."""
        qkv = buffers["qkv"]
        if self.norms is not None and of.norm_all:
            first = 0
            for norm, heads in zip(self.norms, (of.heads, of.kv_heads), strict=True):
                width = heads * of.head_dim
                norm.add(program, qkv, qkv, width=width, of=first, column=first)
                first += width
        by_head = None if of.norm_all else self.norms
        program.heads(
            qkv,
            buffers["query"],
            of.heads,
            shape,
            offset,
            None if by_head is None else [_ones(norm.weight, of.head_dim) for norm in by_head],
            0.0 if by_head is None else by_head[0].epsilon,
            centred=by_head is not None and by_head[0].centred,
            norm_last=of.norm_last,
            rotary=0 if of.rotary is None else of.turned,
            angles=angles,
            interleaved=of.rotary is not None and of.rotary.interleaved,
            query_scale=query_scale,
            value_norm=of.value_norm,
            values_are_keys=of.values_are_keys,
            borrowed=of.source is not None,
        )


def experts_read(layers: Sequence[CompiledLayer]) -> float:
    """Return how many experts a layer read in the last pass, on average; 0 if none has any."""
    read = [layer.experts.read for layer in layers if layer.experts is not None]
    return sum(read) / len(read) if read else 0.0


def expert_bytes(layers: Sequence[CompiledLayer]) -> tuple[int, int]:
    """Return the bytes of one expert of each layer together, and of all that are chosen from."""
    of = [layer.experts for layer in layers if layer.experts is not None]
    return sum(one.bytes for one in of), sum(one.bytes * one.count for one in of)


def _ones(weight: torch.Tensor | None, width: int) -> torch.Tensor:
    return torch.ones(width) if weight is None else weight
