"""The operations of a stack's layer: what mixes tokens, and a feed-forward."""

from __future__ import annotations

from typing import Any

import torch

from quickbeam.models.compile.compiler import StackCompiler
from quickbeam.models.compile.experts import add_experts, add_parallel_experts, add_per_layer_input
from quickbeam.models.compile.recurrent import add_recurrent
from quickbeam.models.native import library
from quickbeam.models.native.operands import KVShape
from quickbeam.models.native.program import Buffer
from quickbeam.models.stack import Attention, Experts, Latent, Layer, Linear, Norm


def add_layer(c: StackCompiler, layer: Layer, i: int, source: Buffer | None = None) -> None:
    """Add layer `i`, which reads the residual stream and adds to it.

    `source`: what its attention reads in place of the normed stream.
    """
    _mix(c, layer, i, source)
    _feed(c, layer)
    if layer.per_layer is not None:
        add_per_layer_input(c, layer.per_layer, i)
    if layer.scalar is not None:
        c.program.copy(c.x, c.x, scale=float(c.parameters(layer.scalar)))


def _mix(c: StackCompiler, layer: Layer, i: int, source: Buffer | None) -> None:
    """Add what mixes tokens, and what reads the residual stream before it is added."""
    attention, recurrent, after = layer.attention, layer.recurrent, layer.attention_after
    if attention is None and recurrent is None:
        return
    if source is None:
        source = c.normed
        c.norm(layer.attention_before, c.x, source)
    if layer.parallel and layer.feed_forward_before is not None:
        c.norm(layer.feed_forward_before, c.x, c.beside)
    if attention is not None:
        conv = None if layer.convs is None else layer.convs[0]
        attended = _attend(c, attention, i, c.convolved(conv, source))
        c.add(attention.out, attended, after, layer.residual * attention.factor, conv)
    if recurrent is not None:
        c.add(recurrent.out, add_recurrent(c, recurrent), after, layer.residual * recurrent.factor)


def _attend(c: StackCompiler, of: Attention, i: int, source: Buffer) -> Buffer:
    """Add a layer's attention to a source up to its last product, and return what that reads."""
    qkv, query = add_queries_and_keys(c, of, i, source)
    i = i if of.source is None else of.source
    shape, offset = c.pages.shapes[i], c.pages.offsets[i]
    attended = c.buffer("attended", of.heads * of.value_dim)
    scores = of.scaling, of.window, of.softcap
    sinks = None if of.sinks is None else c.parameters(of.sinks)
    c.program.attend(query, attended, of.heads, shape, offset, *scores, sinks, of.bidirectional)
    if of.gated:
        dim, at = of.head_dim, (of.heads + 2 * of.kv_heads) * of.head_dim
        how: dict[str, Any] = {"gates_of": at, "activation": "sigmoid", "one": of.one_gate}
        c.program.gate(attended, qkv, attended, of.heads, dim, **how)
    return attended


def add_queries_and_keys(
    c: StackCompiler, of: Attention, i: int, source: Buffer
) -> tuple[Buffer, Buffer]:
    """Add the queries of layer `i`, and its keys and values, which go to their pages.

    Returns the buffers of what its first product gives, and of the queries.
    """
    i = i if of.source is None else of.source
    shape, offset = c.pages.shapes[i], c.pages.offsets[i]
    qkv = c.buffer("qkv", c.packed(of.qkv).outputs, True)
    query = c.buffer("query", of.heads * of.head_dim)
    c.product(of.qkv, source, qkv)
    if of.latent is not None:
        _latent(c, of, of.latent, qkv, query, shape, offset)
    else:
        _heads(c, of, qkv, query, shape, offset)
    return qkv, query


def _heads(
    c: StackCompiler, of: Attention, qkv: Buffer, query: Buffer, shape: KVShape, offset: int
) -> None:
    """Add norms and angles of queries and keys.

    The operation for heads has no biases of norms, so such norms are operations before it.
    """
    norms = of.norms
    if norms is not None and (of.norm_all or norms[0].bias is not None):
        first = 0
        for norm, heads in zip(norms, (of.heads, of.kv_heads), strict=True):
            width = heads * of.head_dim if of.norm_all else of.head_dim
            last = first + heads * of.head_dim
            for column in range(first, last, width):
                c.norm(norm, qkv, qkv, width=width, of=column, column=column)
            first = last
        norms = None
    c.program.heads(
        qkv,
        query,
        of.heads,
        shape,
        offset,
        None if norms is None else [_weight(c, norm, of.head_dim) for norm in norms],
        0.0 if norms is None else norms[0].epsilon,
        centred=norms is not None and norms[0].centred,
        norm_last=of.norm_last,
        rotary=0 if of.rotary is None else of.rotary_dim,
        angles=0 if of.rotary is None else c.angles.columns[of.rotary],
        interleaved=of.rotary is not None and of.rotary.interleaved,
        query_scale=None if of.query_scale is None else c.angles.end,
        value_norm=of.value_norm,
        values_are_keys=of.values_are_keys,
        borrowed=of.source is not None,
    )


def _weight(c: StackCompiler, norm: Norm, width: int) -> torch.Tensor:
    weight = c.parameters.norm(norm)
    return torch.ones(width) if weight is None else weight


def _latent(
    c: StackCompiler,
    of: Attention,
    latent: Latent,
    small: Buffer,
    query: Buffer,
    shape: KVShape,
    offset: int,
) -> None:
    """Add queries, keys and values of a latent attention; `small` is what its product gave."""

    def product(norm: Norm, up: Linear, first: int, name: str) -> Buffer:
        """Add a norm of columns `first` on and the product behind it. Returns its results."""
        inputs, outputs = c.packed(up).inputs, c.packed(up).outputs
        normed, made = c.buffer(f"{name} before", inputs), c.buffer(name, outputs, True)
        c.norm(norm, small, normed, width=inputs, of=first)
        c.product(up, normed, made)
        return made

    assert of.rotary is not None
    before, queries = of.heads * of.head_dim, small
    if latent.query is not None:
        before = c.packed(latent.query[1]).inputs
        queries = product(*latent.query, 0, "queries")
    rest = product(latent.norm, latent.up, before, "rest")  # what doesn't turn of keys, and values
    c.program.add(
        library.LATENT,
        queries,
        query,
        key=rest,
        key_stride=rest.width,
        value=small,
        value_stride=small.width,
        value_head=before + latent.rank,  # from there on, what turns of all heads' keys
        heads=of.heads,
        **shape.fields(offset),
        rotary=of.rotary_dim,
        angles=c.angles.columns[of.rotary],
        interleaved=of.rotary.interleaved,
    )


def _feed(c: StackCompiler, layer: Layer) -> None:
    of, after, factor = layer.feed_forward, layer.feed_forward_after, layer.residual
    source = c.normed
    if of is None:
        return
    if not layer.parallel:
        c.norm(layer.feed_forward_before, c.x, c.normed)
    elif layer.feed_forward_before is not None:
        source = c.beside
    if isinstance(of, Experts):
        add_experts(c, of, source, c.made)
        if after is None:
            c.program.copy(c.made, c.x, add=True, scale=factor)
        else:
            c.norm(after, c.made, c.x, add=factor)
        return
    conv = None if layer.convs is None else layer.convs[1]
    source = c.convolved(conv, source)
    inner = c.buffer("inner", c.packed(of.down).inputs)
    epilogue = library.GATED if of.gated else library.ACTIVATE
    how = {"activation": of.activation, "scaling": of.gate_scale}
    c.product(of.up, source, inner, epilogue, **how)
    if layer.parallel_experts is None or after is None:
        c.add(of.down, inner, after, factor * of.factor, conv)
        return
    c.product(of.down, inner, c.made)
    c.norm(after, add_parallel_experts(c, layer.parallel_experts), c.x, add=factor)
