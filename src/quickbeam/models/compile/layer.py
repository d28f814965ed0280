"""The operations of a stack's layer: what mixes tokens, and a feed-forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quickbeam.models.compile.compiler import StackCompiler
from quickbeam.models.compile.experts import add_experts, add_parallel_experts, add_per_layer_input
from quickbeam.models.compile.recurrent import add_recurrent
from quickbeam.models.native import library
from quickbeam.models.native.operands import KVShape
from quickbeam.models.native.program import Buffer
from quickbeam.models.stack import Attention, Experts, Latent, Layer, Linear, Norm, Xielu


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
    """Add attention and recurrent layer, and the norms that read the stream before these."""
    attention, recurrent = layer.attention, layer.recurrent
    after = layer.attention_after
    if attention is None and recurrent is None:
        return
    if source is None:
        source = c.normalised
        c.norm(layer.attention_before, c.x, source)
    if layer.parallel and layer.feed_forward_before is not None:
        c.norm(layer.feed_forward_before, c.x, c.second_normalised)
    if attention is not None:
        conv = None if layer.convs is None else layer.convs[0]
        attended = _attend(c, attention, i, c.convolved(conv, source))
        c.add_to_stream(attention.out, attended, after, layer.residual * attention.factor, conv)
    if recurrent is not None:
        c.add_to_stream(
            recurrent.out, add_recurrent(c, recurrent), after, layer.residual * recurrent.factor
        )


def _attend(c: StackCompiler, attention: Attention, i: int, source: Buffer) -> Buffer:
    """Add the attention of layer `i` up to its last product, and return what that reads."""
    qkv, query = add_queries_and_keys(c, attention, i, source)
    kv_layer = i if attention.source is None else attention.source
    heads, head_dim = attention.heads, attention.head_dim
    attended = c.buffer("attended", heads * attention.value_dim, c.wide_pages)
    c.program.attend(
        query,
        attended,
        heads,
        c.pages.shapes[kv_layer],
        c.pages.offsets[kv_layer],
        attention.scaling,
        attention.window,
        attention.softcap,
        None if attention.sinks is None else c.parameters(attention.sinks),
        attention.bidirectional,
        attention.causal_images,
    )
    if attention.gated:
        c.program.gate(
            attended,
            qkv,
            attended,
            heads,
            head_dim,
            gates_column=(heads + 2 * attention.kv_heads) * head_dim,
            one_gate=attention.one_gate,
            activation="sigmoid",
        )
    if c.wide_pages == c.float32:
        return attended
    rounded = c.buffer("attended rows", attended.width)
    c.program.copy(attended, rounded)
    return rounded


def add_queries_and_keys(
    c: StackCompiler, attention: Attention, i: int, source: Buffer
) -> tuple[Buffer, Buffer]:
    """Add the queries of layer `i`, and its keys and values, which go to their pages.

    Returns the buffers of the first product's results, and of the queries.
    """
    kv_layer = i if attention.source is None else attention.source
    shape, offset = c.pages.shapes[kv_layer], c.pages.offsets[kv_layer]
    qkv = c.buffer("qkv", c.packed(attention.qkv).outputs, True)
    query = c.buffer("query", attention.heads * attention.head_dim, c.wide_pages)
    c.product(attention.qkv, source, qkv)
    if attention.latent is not None:
        _latent(c, attention, attention.latent, qkv, query, shape, offset)
    else:
        _heads(c, attention, qkv, query, shape, offset)
    return qkv, query


def _heads(
    c: StackCompiler,
    attention: Attention,
    qkv: Buffer,
    query: Buffer,
    shape: KVShape,
    offset: int,
) -> None:
    """Add norms and rotary angles of queries and keys, which go to `query` and to their pages."""
    norms = attention.norms
    if norms is not None and (attention.norm_all or norms[0].bias is not None):
        _norm_heads(c, attention, qkv)
        norms = None
    norm_weights = None
    if norms is not None:
        norm_weights = [_norm_weight(c, norm, attention.head_dim) for norm in norms]
    rotary = attention.rotary
    c.program.heads(
        qkv,
        query,
        attention.heads,
        shape,
        offset,
        norm_weights,
        0.0 if norms is None else norms[0].epsilon,
        centred=norms is not None and norms[0].centred,
        norm_last=attention.norm_last,
        rotary=0 if rotary is None else attention.rotary_dim,
        angles=0 if rotary is None else c.angles.columns[rotary],
        interleaved=rotary is not None and rotary.interleaved,
        query_scale=None if attention.query_scale is None else c.angles.end,
        value_norm=attention.value_norm,
        values_are_keys=attention.values_are_keys,
        borrowed=attention.source is not None,
    )


def _norm_heads(c: StackCompiler, attention: Attention, qkv: Buffer) -> None:
    """Add norms of queries and keys that the operation for heads can't do.

    It has no biases, and no norms of all heads together.
    """
    assert attention.norms is not None
    column = 0
    for norm, heads in zip(attention.norms, (attention.heads, attention.kv_heads), strict=True):
        end = column + heads * attention.head_dim
        width = end - column if attention.norm_all else attention.head_dim
        while column < end:
            c.norm(norm, qkv, qkv, width=width, source_column=column, column=column)
            column += width


def _norm_weight(c: StackCompiler, norm: Norm, width: int) -> torch.Tensor:
    weight = c.parameters.norm(norm)
    return torch.ones(width) if weight is None else weight


def _latent(
    c: StackCompiler,
    attention: Attention,
    latent: Latent,
    down: Buffer,
    query: Buffer,
    shape: KVShape,
    offset: int,
) -> None:
    """Add queries, keys and values of a latent attention; `down` is its first product's result."""
    assert attention.rotary is not None
    queries, kv_column = down, attention.heads * attention.head_dim
    if latent.query is not None:
        norm, up = latent.query
        queries, kv_column = _add_up_projection(c, norm, up, down, 0, "queries")
    # the keys' parts that are not rotated, and values
    keys_and_values, rotated_column = _add_up_projection(
        c, latent.norm, latent.up, down, kv_column, "keys and values"
    )
    c.program.latent(
        queries,
        query,
        keys_and_values,
        down,
        rotated_column,
        attention.heads,
        shape,
        offset,
        rotary=attention.rotary_dim,
        angles=c.angles.columns[attention.rotary],
        interleaved=attention.rotary.interleaved,
    )


def _add_up_projection(
    c: StackCompiler, norm: Norm, up: Linear, down: Buffer, column: int, name: str
) -> tuple[Buffer, int]:
    """Add a norm of a latent vector, which begins at `column`, and its up projection.

    Returns the buffer `name` of the results, and the column where the vector ends.
    """
    packed = c.packed(up)
    latent = c.buffer(f"latent {name}", packed.inputs)
    target = c.buffer(name, packed.outputs, True)
    c.norm(norm, down, latent, width=packed.inputs, source_column=column)
    c.product(up, latent, target)
    return target, column + packed.inputs


def _feed(c: StackCompiler, layer: Layer) -> None:
    """Add the feed-forward, and add its result to the residual stream."""
    feed_forward = layer.feed_forward
    after, factor = layer.feed_forward_after, layer.residual
    if feed_forward is None:
        return
    source = c.normalised
    if not layer.parallel:
        c.norm(layer.feed_forward_before, c.x, c.normalised)
    elif layer.feed_forward_before is not None:
        source = c.second_normalised
    if isinstance(feed_forward, Experts):
        add_experts(c, feed_forward, source, c.result)
        if after is None:
            c.program.copy(c.result, c.x, add=True, scale=factor)
        else:
            c.norm(after, c.result, c.x, add=factor)
        return
    conv = None if layer.convs is None else layer.convs[1]
    source = c.convolved(conv, source)
    inner = c.buffer("inner", c.packed(feed_forward.down).inputs)
    scaling = feed_forward.gate_scale
    curve: float | None = None
    if feed_forward.xielu is not None:
        scaling, curve = _xielu_factors(c, feed_forward.xielu)
    c.product(
        feed_forward.up,
        source,
        inner,
        library.GATED if feed_forward.gated else library.ACTIVATE,
        activation=feed_forward.activation,
        scaling=scaling,
        softcap=curve,
    )
    if layer.parallel_experts is None or after is None:
        c.add_to_stream(feed_forward.down, inner, after, factor * feed_forward.factor, conv)
        return
    c.product(feed_forward.down, inner, c.result)
    c.norm(after, add_parallel_experts(c, layer.parallel_experts), c.x, add=factor)


def _xielu_factors(c: StackCompiler, xielu: Xielu) -> tuple[float, float]:
    """Return a and c of xIELU (`stack.Xielu`)."""
    a = F.softplus(c.parameters(xielu.positive).float())
    curve = 0.5 + F.softplus(c.parameters(xielu.negative).float())
    return float(a), float(curve)
