"""Whether a checkpoint's parameters have the shapes that its configuration says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quickbeam.errors import InvalidInput, refuse_incomplete
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native.quantised import BlockRows, order_of
from quickbeam.models.stack import (
    Attention,
    FeedForward,
    Linear,
    LinearAttention,
    Recurrent,
    ShortConv,
    Stack,
    Tensor,
)
from quickbeam.models.weights.parameters import experts, linears, rows_of


def refuse_shared_experts(stack: Stack, like: Callable[[str], Any]) -> None:
    """Raise `NotDescribed` for shared experts that the kernels' operation can't read.

    Their gates and what these let through are of one format, and inputs are in their own order.
    `like(name)`: a parameter, or something of its format.
    """
    for of in (one.shared for one in experts(stack) if one.shared is not None):
        up, down = ([like(one.name) for one in part.weights] for part in (of.up, of.down))
        formats = {one.name if isinstance(one, BlockRows) else "dense" for one in up}
        if len(formats) > 1:
            raise NotDescribed(f"a shared expert is of {' and '.join(sorted(formats))}")
        if any(order_of(one) is not None for one in up + down):
            raise NotDescribed("a shared expert is quantised with activation order")


def refuse_other_experts(stack: Stack, shape: Callable[[str], list[int]]) -> None:
    """Raise `InvalidInput` for another number of experts than a layer has.

    `shape(name)`: of a parameter.
    """
    for of in experts(stack):
        count, (first, *_) = len(of.chosen), of.chosen
        read = (*first.up.weights, *first.down.weights, *of.routing.logits.weights)
        shapes = {one.name: shape(one.name) for one in read}
        odd = [(name, own, [count, *own[1:]]) for name, own in shapes.items() if own[0] != count]
        refuse_incomplete([], odd)
        alone = {one: rows_of(one, torch.empty(shapes[one.name], device="meta")) for one in read}
        (down,), up = first.down.weights, first.up.weights
        if any(len(alone[one]) != alone[down].shape[1] for one in up):
            raise InvalidInput(
                f"{down.name} reads {alone[down].shape[1]} numbers of an expert, and {up[0].name} "
                f"gives {len(alone[up[0]])}: they are of two models"
            )


def check_shapes(
    stack: Stack, shape: Callable[[str], list[int]], wanted: Mapping[str, list[int]]
) -> None:
    """Raise `InvalidInput` for parameters of other shapes than `wanted`, or that do not fit.

    The latter are experts, biases, and norms of queries, keys and recurrences. `shape(name)`: of a
    parameter. `wanted`: shapes by name.
    """
    compared = [(name, shape(name), one) for name, one in wanted.items()]
    refuse_incomplete([], [one for one in compared if one[1] != one[2]])
    refuse_other_experts(stack, shape)

    def size(one: Tensor) -> int:
        return len(rows_of(one, torch.empty(shape(one.name), device="meta")))

    odd = []
    for linear, _ in linears(stack):
        for weight, bias in zip(linear.weights, linear.biases, strict=False):
            if size(weight) != size(bias):
                odd.append((bias.name, [size(bias)], [size(weight)]))
    for of in stack.attentions:
        for norm, heads in zip(of.norms or (), (of.heads, of.kv_heads), strict=False):
            sizes = [math.prod(shape(name)) for name in norm.weights]
            if sum(sizes) not in (0, of.head_dim, heads * of.head_dim):
                odd.append((norm.weights[0], sizes, [of.head_dim]))
    for one in stack.recurrents:
        if isinstance(one, LinearAttention) and one.norm is not None:
            inner = one.heads * one.value_dim
            sizes = [math.prod(shape(name)) for name in one.norm.weights]
            if sum(sizes) not in (inner // one.groups, inner):
                odd.append((one.norm.weights[0], sizes, [inner // one.groups]))
    refuse_incomplete([], odd)


def expected(stack: Stack, config: Any) -> dict[str, list[int]]:
    """Return the shapes that a configuration gives parameters of a stack, by name."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", None)
    if stack.recurrents or getattr(config, "use_double_wide_mlp", False):  # they adjust the size
        inner = None
    shapes: dict[str, list[int]] = {}

    def put(linear: Linear, rows: Sequence[int], inputs: int) -> None:
        for one, count in zip(linear.weights, rows, strict=False):
            shape = [count * one.parts, inputs]
            shapes[one.name] = shape[::-1] if one.transposed else shape

    for layer in stack.layers:
        if isinstance(of := layer.attention, Attention):
            sizes = [of.heads, of.kv_heads, of.kv_heads]
            apart = all(one.parts == 1 and one.cut is None for one in of.qkv.weights)
            if len(of.qkv.weights) == 3 and apart:
                put(of.qkv, [size * of.head_dim for size in sizes], width)
            put(of.out, [width], of.heads * of.value_dim)
        if (mixer := layer.recurrent) is not None:
            shapes |= _expected_recurrent(mixer, put, width)
        if isinstance(fed := layer.feed_forward, FeedForward) and isinstance(inner, int):
            put(fed.up, [inner, inner], width)
            put(fed.down, [width], inner)
        around = [layer.attention_before, layer.feed_forward_before]
        around += [layer.attention_after, layer.feed_forward_after]
        shapes |= {layer.scalar: [1]} if layer.scalar else {}
        shapes |= {name: [width] for norm in around if norm is not None for name in norm.weights}
        if (by := layer.per_layer) is not None and stack.per_layer is not None:
            put(by.gate, [stack.per_layer.width], width)
            put(by.out, [width], stack.per_layer.width)
    if (of_layers := stack.per_layer) is not None:
        every = len(stack.layers) * of_layers.width
        put(of_layers.projection, [every], width)
        shapes[of_layers.table] = [config.vocab_size_per_layer_input, every]
    shapes |= {name: [width] for name in stack.norm.weights}
    put(stack.head, [config.vocab_size], width)
    if stack.positions is not None:
        positions = getattr(config, "max_position_embeddings", 0) + stack.first_position
        shapes[stack.positions] = [positions, width]
    return shapes | {stack.embedding: [config.vocab_size, width]}


def _expected_recurrent(
    of: Recurrent, put: Callable[[Linear, Sequence[int], int], None], width: int
) -> dict[str, list[int]]:
    shapes = {of.weight: [of.channels, 1, of.taps]}
    shapes |= {of.bias: [of.channels]} if of.bias else {}
    if isinstance(of, ShortConv):
        put(of.into, [3 * of.channels], width)
        put(of.out, [width], of.channels)
        return shapes
    inner = of.heads * of.value_dim
    put(of.out, [width], inner)
    put(of.into, [of.channels, inner, of.heads, of.heads], width)
    for one in of.into.weights:  # a tensor's last cut is its end; rates and decays are parts of one
        if one.cut or one.parts > 1:
            rows = one.heads * one.cut[1] if one.cut else one.parts * of.heads
            shapes[one.name] = [rows, width]
    return shapes | {name: [of.heads] for name in (of.log_slope, of.shift, of.skip) if name}
