"""Whether a checkpoint's parameters have the shapes that its configuration says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quickbeam.errors import InvalidInput, refuse_incomplete
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native.quantised import BlockRows, input_order_of
from quickbeam.models.stack import (
    Attention,
    FeedForward,
    Linear,
    LinearAttention,
    Norm,
    ParameterRows,
    Recurrent,
    ShortConv,
    Stack,
)
from quickbeam.models.weights.parameters import experts, linears, rows_of


def refuse_shared_experts(stack: Stack, like: Callable[[str], Any]) -> None:
    """Raise `NotDescribed` for shared experts that the kernels' operation can't read.

    It needs gate and up projections of one format, and inputs without another order. `like(name)`:
    a parameter, or its shape and format alone.
    """
    for layer_experts in experts(stack):
        shared = layer_experts.shared
        if shared is None:
            continue
        formats = set[str]()
        for rows in shared.up.weights:
            weight = like(rows.name)
            formats.add(weight.name if isinstance(weight, BlockRows) else "dense")
        if len(formats) > 1:
            raise NotDescribed(f"a shared expert is of {' and '.join(sorted(formats))}")
        for rows in (*shared.up.weights, *shared.down.weights):
            if input_order_of(like(rows.name)) is not None:
                raise NotDescribed("a shared expert is quantised with activation order")


def refuse_other_experts(stack: Stack, shape: Callable[[str], list[int]]) -> None:
    """Raise `InvalidInput` for another number of experts than a layer has.

    `shape(name)`: of a parameter.
    """
    for layer_experts in experts(stack):
        count = len(layer_experts.candidates)
        first = layer_experts.candidates[0]
        router = layer_experts.routing.logits
        all_rows = (*first.up.weights, *first.down.weights, *router.weights)
        odd = []
        for name in {rows.name for rows in all_rows}:
            stored = shape(name)
            if stored[0] != count:
                odd.append((name, stored, [count, *stored[1:]]))
        refuse_incomplete([], odd)

        (down,) = first.down.weights
        inner = _shape_of_rows(down, shape)[1]
        for up in first.up.weights:
            outputs = _shape_of_rows(up, shape)[0]
            if outputs != inner:
                raise InvalidInput(
                    f"{down.name} reads {inner} numbers of an expert, and {up.name} gives "
                    f"{outputs}: they are of two models"
                )


def _shape_of_rows(rows: ParameterRows, shape: Callable[[str], list[int]]) -> list[int]:
    """Return the shape that rows of a parameter have. `shape(name)`: of a parameter."""
    return list(rows_of(rows, torch.empty(shape(rows.name), device="meta")).shape)


def check_shapes(
    stack: Stack, shape: Callable[[str], list[int]], wanted: Mapping[str, list[int]]
) -> None:
    """Raise `InvalidInput` for parameters of other shapes than `wanted`, or that do not fit.

    The latter are experts, biases, and norms of queries, keys and recurrences. `shape(name)`: of a
    parameter. `wanted`: shapes by name.
    """
    shapes = [(name, shape(name), wanted_shape) for name, wanted_shape in wanted.items()]
    refuse_incomplete([], [entry for entry in shapes if entry[1] != entry[2]])
    refuse_other_experts(stack, shape)

    odd = []
    for linear, _ in linears(stack):
        for weight, bias in zip(linear.weights, linear.biases, strict=False):
            size, *_ = _shape_of_rows(bias, shape)
            outputs, *_ = _shape_of_rows(weight, shape)
            if size != outputs:
                odd.append((bias.name, [size], [outputs]))

    def check_norm(norm: Norm, *accepted: int) -> None:
        """Expect one of the `accepted` sizes, of which the first is named in errors."""
        sizes = [math.prod(shape(name)) for name in norm.weights]
        if sizes and sum(sizes) not in accepted:
            odd.append((norm.weights[0], sizes, [accepted[0]]))

    for attention in stack.attentions:
        head_dim = attention.head_dim
        head_counts = (attention.heads, attention.kv_heads)
        for norm, heads in zip(attention.norms or (), head_counts, strict=False):
            check_norm(norm, head_dim, heads * head_dim)
    for recurrent in stack.recurrents:
        if isinstance(recurrent, LinearAttention) and recurrent.norm is not None:
            inner = recurrent.heads * recurrent.value_dim
            check_norm(recurrent.norm, inner // recurrent.groups, inner)
    refuse_incomplete([], odd)


def expected(stack: Stack, config: Any) -> dict[str, list[int]]:
    """Return the shapes that a configuration gives parameters of a stack, by name."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", None)
    if stack.recurrents or getattr(config, "use_double_wide_mlp", False):  # some adjust the size
        inner = None
    shapes: dict[str, list[int]] = {}

    def put(linear: Linear, rows: Sequence[int], inputs: int) -> None:
        for weight_rows, count in zip(linear.weights, rows, strict=False):
            shape = [count * weight_rows.parts, inputs]
            shapes[weight_rows.name] = shape[::-1] if weight_rows.transposed else shape

    for layer in stack.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        if attention is not None:
            if _has_three_weights(attention):
                heads = [attention.heads, attention.kv_heads, attention.kv_heads]
                put(attention.qkv, [count * attention.head_dim for count in heads], width)
            put(attention.out, [width], attention.heads * attention.value_dim)
        if layer.recurrent is not None:
            shapes |= _expected_recurrent(layer.recurrent, put, width)
        if isinstance(feed_forward, FeedForward) and isinstance(inner, int):
            put(feed_forward.up, [inner, inner], width)
            put(feed_forward.down, [width], inner)
        for norm in (
            layer.attention_before,
            layer.feed_forward_before,
            layer.attention_after,
            layer.feed_forward_after,
        ):
            if norm is not None:
                shapes |= {name: [width] for name in norm.weights}
        if layer.scalar is not None:
            shapes[layer.scalar] = [1]
        if layer.per_layer is not None and stack.per_layer is not None:
            put(layer.per_layer.gate, [stack.per_layer.width], width)
            put(layer.per_layer.out, [width], stack.per_layer.width)
    if stack.per_layer is not None:
        all_layers = len(stack.layers) * stack.per_layer.width
        put(stack.per_layer.projection, [all_layers], width)
        shapes[stack.per_layer.table] = [config.vocab_size_per_layer_input, all_layers]
    shapes |= {name: [width] for name in stack.norm.weights}
    put(stack.head, [config.vocab_size], width)
    if stack.positions is not None:
        positions = getattr(config, "max_position_embeddings", 0) + stack.first_position
        shapes[stack.positions] = [positions, width]
    return shapes | {stack.embedding: [config.vocab_size, width]}


def _has_three_weights(attention: Attention) -> bool:
    """Whether queries, keys and values are of a whole parameter each."""
    weights = attention.qkv.weights
    return len(weights) == 3 and all(rows.parts == 1 and rows.cut is None for rows in weights)


def _expected_recurrent(
    recurrent: Recurrent, put: Callable[[Linear, Sequence[int], int], None], width: int
) -> dict[str, list[int]]:
    channels = recurrent.channels
    shapes = {recurrent.weight: [channels, 1, recurrent.taps]}
    if recurrent.bias is not None:
        shapes[recurrent.bias] = [channels]
    if isinstance(recurrent, ShortConv):
        put(recurrent.into, [3 * channels], width)
        put(recurrent.out, [width], channels)
        return shapes
    heads = recurrent.heads
    inner = heads * recurrent.value_dim
    put(recurrent.out, [width], inner)
    put(recurrent.into, [channels, inner, heads, heads], width)
    for rows in recurrent.into.weights:
        if rows.cut is not None:  # the last cut ends where the parameter does
            shapes[rows.name] = [rows.heads * rows.cut[1], width]
        elif rows.parts > 1:  # rates and decays are parts of one parameter
            shapes[rows.name] = [rows.parts * heads, width]
    for name in (recurrent.log_slope, recurrent.shift, recurrent.skip):
        if name is not None:
            shapes[name] = [heads]
    return shapes
