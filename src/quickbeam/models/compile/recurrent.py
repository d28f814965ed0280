"""Recurrent layers of a `Stack`: their operations, and the sizes of their states."""

from __future__ import annotations

import torch

from quickbeam.models.compile.compiler import StackCompiler
from quickbeam.models.native import library
from quickbeam.models.native.operands import BLOCK
from quickbeam.models.native.pages import StateShape
from quickbeam.models.native.program import Buffer
from quickbeam.models.stack import LinearAttention, Recurrent, ShortConv, Stack


def add_recurrent(c: StackCompiler, of: Recurrent) -> Buffer:
    """Add a recurrent layer up to its last product, and return what that reads."""
    source = c.buffer("qkv", c.packed(of.into).outputs, True)
    target = c.buffer("recurred", c.packed(of.out).inputs)
    c.product(of.into, c.normed, source)
    if isinstance(of, ShortConv):
        b, conv, x = 0, of.channels, 2 * of.channels
        _convolution(c, of, source, target, column=x, gate=b, gate_out=conv)
    else:
        _matrices(c, of, source, target)
    return target


def _convolution(
    c: StackCompiler,
    of: Recurrent,
    source: Buffer,
    target: Buffer,
    scales: torch.Tensor | None = None,
    **fields: int,
) -> None:
    """Add a convolution, whose weight is taken times `scales` `[channels]`."""
    weight = c.parameters(of.weight).view(of.channels, of.taps).t().contiguous()
    made = c.recurrence(
        *_sizes(of)[0],
        kind=library.CONVOLUTION,
        channels=of.channels,
        taps=of.taps,
        weight=weight if scales is None else weight * scales,
        bias=None if of.bias is None else c.parameters(of.bias),
        **fields,
    )
    c.program.add(library.RECUR, source, target, weight=made)


def _matrices(c: StackCompiler, of: LinearAttention, source: Buffer, target: Buffer) -> None:
    """Add the recurrences of a convolution and of the heads, and gates and norm behind them."""
    keys, values = of.key_heads * of.key_dim, of.heads * of.value_dim
    mixed, scales = c.program.buffer(of.channels + 2 * of.heads, True), None
    if not of.delta:  # the convolution is linear, so that its weight takes the scales
        scales = torch.tensor(of.scales).repeat_interleave(torch.tensor([values, keys, keys]))
    _convolution(c, of, source, mixed, scales, gate=-1, gate_out=-1, activated=1)
    # where queries, keys and values begin in what is convolved
    query, key, value = (0, keys, 2 * keys) if of.delta else (values + keys, values, 0)
    # of the delta rule, keys, values and factors are a node's inputs; else all but the queries,
    # which stand between them
    kept = key if of.delta else 0
    rate = of.channels + values
    heads = c.recurrence(
        *_sizes(of)[1],
        kind=library.DELTA_RULE if of.delta else library.STATE_SPACE,
        heads=of.heads,
        key_heads=of.key_heads,
        alike=1 if of.tiled else of.heads // of.key_heads,
        key_dim=of.key_dim,
        value_dim=of.value_dim,
        query=query,
        key=key,
        value=value,
        factors=of.channels,
        kept=kept,
        kept_count=of.channels + 2 * of.heads - kept,
        rate=rate,
        decay=rate + (of.heads if of.delta else 0),
        slope=-c.parameters(of.log_slope).exp(),
        shift=c.parameters(of.shift),
        skip=None if of.skip is None else c.parameters(of.skip),
        least=of.least,
        most=of.most,
        step_scale=of.step_scale,
    )
    c.program.add(library.RECUR, source, mixed, weight=heads)
    c.program.gate(
        mixed,
        source,
        target,
        of.groups,
        values // of.groups,
        of=value,
        gates_of=of.channels,
        scaling=of.gate_scale,
        weight=None if of.norm is None else c.parameters.norm(of.norm),
        epsilon=0.0 if of.norm is None else of.norm.epsilon,
        norm_last=of.norm_last,
    )


def _sizes(of: Recurrent) -> list[tuple[int, int]]:
    """Return the numbers of the state, and of a node's inputs, of each of its recurrences."""
    convolved = (of.taps - 1) * of.channels, of.channels
    if isinstance(of, ShortConv):
        return [convolved]
    matrix = of.key_dim * -(-of.value_dim // BLOCK) * BLOCK
    queries = of.key_heads * of.key_dim if of.delta else 0
    return [convolved, (of.heads * matrix, of.channels + 2 * of.heads - queries)]


def state_shape(stack: Stack) -> StateShape | None:
    """Return what the recurrent layers keep of a sequence; None where there are none."""
    sizes = [size for of in stack.recurrents for size in _sizes(of)]
    return StateShape(sum(s for s, _ in sizes), sum(i for _, i in sizes)) if sizes else None
