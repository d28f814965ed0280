"""Recurrent layers of a `Stack`: their operations, and the sizes of their states."""

from __future__ import annotations

import torch

from quickbeam.models.compile.compiler import RecurrenceSize, StackCompiler
from quickbeam.models.native import library
from quickbeam.models.native.library import Recurrence
from quickbeam.models.native.operands import BLOCK
from quickbeam.models.native.pages import StateShape
from quickbeam.models.native.program import Buffer
from quickbeam.models.stack import LinearAttention, Recurrent, ShortConv, Stack


def add_recurrent(c: StackCompiler, layer: Recurrent) -> Buffer:
    """Add a recurrent layer up to its last product, and return what that reads."""
    source = c.buffer("qkv", c.packed(layer.into).outputs, True)
    target = c.buffer("recurred", c.packed(layer.out).inputs)
    c.product(layer.into, c.normalised, source)
    if isinstance(layer, ShortConv):
        _add_short_conv(c, layer, source, target)
    else:
        _add_linear_attention(c, layer, source, target)
    return target


def _add_short_conv(c: StackCompiler, layer: ShortConv, source: Buffer, target: Buffer) -> None:
    """Add a convolution of b * x times c; the source holds b, c and x side by side."""
    convolution = Recurrence(
        kind=library.CONVOLUTION,
        channels=layer.channels,
        taps=layer.taps,
        weight=c.address(_taps(c, layer)),
        bias=c.address(None if layer.bias is None else c.parameters(layer.bias)),
        gate=0,
        gate_out=layer.channels,
        column=2 * layer.channels,
    )
    c.recur(convolution, convolution_size(layer), source, target)


def _taps(c: StackCompiler, layer: Recurrent) -> torch.Tensor:
    """Return a convolution's weight as `[taps, channels]`."""
    return c.parameters(layer.weight).view(layer.channels, layer.taps).t().contiguous()


def _add_linear_attention(
    c: StackCompiler, layer: LinearAttention, source: Buffer, target: Buffer
) -> None:
    """Add the convolution, the heads' recurrence, and gates and norm behind them."""
    keys, values = layer.key_heads * layer.key_dim, layer.heads * layer.value_dim
    mixed = c.program.buffer(layer.channels + 2 * layer.heads, True)

    # queries, keys and values behind a convolution
    weight = _taps(c, layer)
    if not layer.delta:  # the convolution is linear, so that its weight takes the scales
        sizes = torch.tensor([values, keys, keys])
        weight = weight * torch.tensor(layer.scales).repeat_interleave(sizes)
    convolution = Recurrence(
        kind=library.CONVOLUTION,
        channels=layer.channels,
        taps=layer.taps,
        weight=c.address(weight),
        bias=c.address(None if layer.bias is None else c.parameters(layer.bias)),
        gate=-1,
        gate_out=-1,
        activated=1,
    )
    c.recur(convolution, convolution_size(layer), source, mixed)

    # the heads' matrices: where queries, keys, values and a node's inputs begin
    if layer.delta:  # queries, keys, values; a node's inputs are all but the queries
        query = 0
        key = inputs_begin = keys
        value = 2 * keys
    else:  # values, keys, queries; the queries are among the inputs, as factors come behind them
        value = inputs_begin = 0
        key = values
        query = values + keys
    rate = layer.channels + values
    heads = Recurrence(
        kind=library.DELTA_RULE if layer.delta else library.STATE_SPACE,
        heads=layer.heads,
        key_heads=layer.key_heads,
        alike=1 if layer.tiled else layer.heads // layer.key_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        query=query,
        key=key,
        value=value,
        factors=layer.channels,
        kept=inputs_begin,
        kept_count=layer.channels + 2 * layer.heads - inputs_begin,
        rate=rate,
        decay=rate + (layer.heads if layer.delta else 0),
        slope=c.address(-c.parameters(layer.log_slope).exp()),
        shift=c.address(c.parameters(layer.shift)),
        skip=c.address(None if layer.skip is None else c.parameters(layer.skip)),
        least=layer.least,
        most=layer.most,
        step_scale=layer.step_scale,
    )
    c.recur(heads, matrices_size(layer), source, mixed)

    c.program.gate(
        mixed,
        source,
        target,
        layer.groups,
        values // layer.groups,
        source_column=value,
        gates_column=layer.channels,
        scaling=layer.gate_scale,
        weight=None if layer.norm is None else c.parameters.norm(layer.norm),
        epsilon=0.0 if layer.norm is None else layer.norm.epsilon,
        norm_last=layer.norm_last,
    )


def convolution_size(layer: Recurrent) -> RecurrenceSize:
    """Return the size of a layer's convolution: the state holds all taps but the last."""
    return RecurrenceSize(state=(layer.taps - 1) * layer.channels, inputs=layer.channels)


def matrices_size(layer: LinearAttention) -> RecurrenceSize:
    """Return the size of the heads' matrices, whose values are padded to whole blocks."""
    matrix = layer.key_dim * -(-layer.value_dim // BLOCK) * BLOCK
    queries = layer.key_heads * layer.key_dim if layer.delta else 0
    return RecurrenceSize(
        state=layer.heads * matrix, inputs=layer.channels + 2 * layer.heads - queries
    )


def state_shape(stack: Stack) -> StateShape | None:
    """Return what the recurrent layers keep of a sequence; None where there are none."""
    sizes = list[RecurrenceSize]()
    for layer in stack.recurrents:
        sizes.append(convolution_size(layer))
        if isinstance(layer, LinearAttention):
            sizes.append(matrices_size(layer))
    if not sizes:
        return None
    return StateShape(sum(size.state for size in sizes), sum(size.inputs for size in sizes))
