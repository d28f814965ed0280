"""Operations of experts, alone or beside a dense feed-forward, and of Gemma 4: per-layer inputs."""

from __future__ import annotations

import ctypes

from quickbeam.models.compile.compiler import StackCompiler
from quickbeam.models.native import library
from quickbeam.models.native.program import Buffer
from quickbeam.models.native.quantised import Weight
from quickbeam.models.stack import Experts, Linear, ParallelExperts, PerLayerInput, PerLayerInputs


def scoring(experts: Experts) -> Linear:
    """Return the product of the router's logits, then that of the shared expert's if it has one."""
    logits, gate = experts.routing.logits, experts.shared_gate
    if gate is None:
        return logits
    return Linear((*logits.weights, *gate.weights), (*logits.biases, *gate.biases))


def add_experts(
    c: StackCompiler,
    experts: Experts,
    source: Buffer,
    target: Buffer,
    router: Buffer | None = None,
) -> None:
    """Add a feed-forward of experts.

    `target`: float32, which it overwrites. `router`: what the router reads, the source if None.
    """
    routing, first = experts.routing, experts.candidates[0]
    table = (library.Expert * len(experts.all))()
    for entry, expert in zip(table, experts.all, strict=True):
        up, down = c.packed(expert.up), c.packed(expert.down)
        entry.up = c.address(up.data)
        entry.down = c.address(down.data)
        entry.up_bias = c.address(up.bias)
        entry.down_bias = c.address(down.bias)
    c.keep(table)
    up, down = c.packed(first.up), c.packed(first.down)
    last_up, last_down = c.packed(experts.all[-1].up), c.packed(experts.all[-1].down)
    shared_inner = 0 if experts.shared is None else last_down.inputs
    correction, scale = routing.correction, routing.scale
    structure = library.Experts(
        expert=ctypes.addressof(table),
        correction=c.address(None if correction is None else c.parameters(correction)),
        scale=c.address(None if scale is None else c.parameters(scale)),
        count=len(experts.candidates),
        top=routing.top,
        inner=down.inputs,
        shared=shared_inner,
        groups=routing.groups,
        top_groups=routing.top_groups,
        best_of_group=routing.best_of_group,
        scores=library.SCORES.index(routing.scores),
        renormalised=routing.renormalised,
        gated=experts.shared_gate is not None,
        down_format=down.format,
        shared_up=last_up.format,
        shared_down=last_down.format,
        plus=routing.plus,
        least=routing.least,
        factor=routing.factor,
        jitter=routing.jitter,
    )
    c.experts.append(structure)
    exact = c.parameters.exact(scoring(experts))
    scores = c.buffer("scores", exact.outputs, True)
    c.program.linear(exact, source if router is None else router, scores)
    c.program.experts(
        structure,
        source,
        target,
        scores,
        c.buffer("routes", 2 * routing.top, True),
        c.buffer("inner", routing.top * down.inputs + shared_inner),
        up_format=up.format,
        activation=first.activation,
        limit=first.limit,
        slope=first.slope,
    )


def add_parallel_experts(c: StackCompiler, parallel: ParallelExperts) -> Buffer:
    """Add experts to the dense feed-forward's result, and return the buffer of the sum."""
    both = c.buffer("both", c.width, True)
    c.norm(parallel.dense_after, c.result, both)
    c.norm(parallel.before, c.x, c.normalised)
    c.norm(parallel.router, c.x, c.second_normalised)
    add_experts(c, parallel.experts, c.normalised, c.result, c.second_normalised)
    c.norm(parallel.after, c.result, both, add=1.0)
    return both


def _inputs_of_all_layers(c: StackCompiler, per_layer: PerLayerInputs) -> Buffer:
    return c.buffer("inputs", len(c.stack.layers) * per_layer.width, True)


def add_per_layer_inputs(c: StackCompiler, per_layer: PerLayerInputs, table: Weight) -> None:
    """Compute the inputs of all layers from the tokens' embeddings, which the buffer `x` holds.

    `table`: the parameter `per_layer.table`, of which single rows are read.
    """
    inputs = _inputs_of_all_layers(c, per_layer)
    projected = c.buffer("projected inputs", inputs.width, True)
    c.program.embed(table, inputs, scale=per_layer.scale * per_layer.mixed)
    c.program.copy(c.x, c.normalised)
    c.product(per_layer.projection, c.normalised, projected, scaling=per_layer.factor)
    width = per_layer.width
    for column in range(0, inputs.width, width):
        c.norm(
            per_layer.norm,
            projected,
            inputs,
            width=width,
            source_column=column,
            column=column,
            add=per_layer.mixed,
        )


def add_per_layer_input(c: StackCompiler, layer_input: PerLayerInput, i: int) -> None:
    """Add what layer `i` does with its input to the residual stream."""
    assert c.stack.per_layer is not None
    width = c.stack.per_layer.width
    gate, gated = c.buffer("gate", width, True), c.buffer("gated", width)
    c.program.copy(c.x, c.normalised)
    c.product(layer_input.gate, c.normalised, gate)
    c.program.gate(
        _inputs_of_all_layers(c, c.stack.per_layer),
        gate,
        gated,
        1,
        width,
        source_column=i * width,
        activation=layer_input.activation,
    )
    c.product(layer_input.out, gated, c.result)
    c.norm(layer_input.after, c.result, c.x, add=1.0)
