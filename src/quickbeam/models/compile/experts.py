"""Feed-forwards of experts on the native kernels, and what stands beside the residual stream of
some models: experts beside a dense feed-forward, and per-layer inputs (Gemma 4)."""

from __future__ import annotations

import ctypes

import torch

from quickbeam.models.compile.compiler import StackCompiler
from quickbeam.models.native import library
from quickbeam.models.native.program import Buffer
from quickbeam.models.native.quantised import Weight
from quickbeam.models.stack import Experts, Linear, ParallelExperts, PerLayerInput, PerLayerInputs

# fields that `Routing` and the kernels' structure `Experts` have alike
ROUTING_FIELDS = (
    *("top", "groups", "top_groups", "best_of_group", "renormalised"),
    *("plus", "least", "factor", "jitter"),
)


def scoring(of: Experts) -> Linear:
    """Return the logits of the chosen ones, then that of the shared one's weight if it has one."""
    logits, gate = of.routing.logits, of.shared_gate
    if gate is None:
        return logits
    return Linear((*logits.weights, *gate.weights), (*logits.biases, *gate.biases))


def add_experts(
    c: StackCompiler, of: Experts, source: Buffer, target: Buffer, router: Buffer | None = None
) -> None:
    """Add a feed-forward of experts. `target`: float32, which it overwrites. `router`: what the
    router reads, the source if None."""
    routing, packed = of.routing, [(c.packed(one.up), c.packed(one.down)) for one in of.all]
    table = (library.Expert * len(packed))(
        *(
            library.Expert(*map(_address, (up.data, down.data, up.bias, down.bias)))
            for up, down in packed
        )
    )
    correction, scale = (
        None if name is None else c.parameters(name) for name in (routing.correction, routing.scale)
    )
    (up, down), inner = packed[0], packed[0][1].inputs
    shared = 0 if of.shared is None else packed[-1][1].inputs
    struct = library.Experts(
        expert=ctypes.addressof(table),
        correction=_address(correction),
        scale=_address(scale),
        count=len(of.chosen),
        inner=inner,
        shared=shared,
        gated=of.shared_gate is not None,
        down_format=down.format,
        shared_up=packed[-1][0].format,
        shared_down=packed[-1][1].format,
        scores=library.SCORES.index(routing.scores),
        **{name: getattr(routing, name) for name in ROUTING_FIELDS},
    )
    c.kept += [table, packed]
    c.experts.append((struct, up.data.nbytes + down.data.nbytes))
    exact, first = c.parameters.exact(scoring(of)), of.chosen[0]
    scores = c.buffer("scores", exact.outputs, True)
    c.program.linear(exact, source if router is None else router, scores)
    c.program.add(
        library.EXPERTS,
        source,
        target,
        inputs=source.width,
        outputs=target.width,
        format=up.format,
        key=scores,
        value=c.buffer("routes", 2 * routing.top, True),  # two numbers for each of its experts
        best=c.buffer("inner", routing.top * inner + shared),  # side by side what they make
        experts=struct,
        first_expert=-1,
        last_expert=struct.count + 1,
        activation=first.activation,
        softcap=first.limit,
        scaling=first.slope,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def add_parallel_experts(c: StackCompiler, of: ParallelExperts) -> Buffer:
    """Add experts to what the dense feed-forward made, and return the buffer of the sum."""
    both = c.buffer("both", c.width, True)
    c.norm(of.dense_after, c.made, both)
    c.norm(of.before, c.x, c.normed)
    c.norm(of.router, c.x, c.beside)
    add_experts(c, of.experts, c.normed, c.made, c.beside)
    c.norm(of.after, c.made, both, add=1.0)
    return both


def add_per_layer_inputs(c: StackCompiler, of: PerLayerInputs, table: Weight) -> None:
    """Make the inputs of all layers from the tokens' embeddings, which the buffer `x` holds.

    `table`: the parameter `of.table`, which stays where it is.
    """
    layers = len(c.stack.layers)
    made, inputs = (c.buffer(name, layers * of.width, True) for name in ("made for all", "inputs"))
    c.program.embed(table, inputs, scale=of.scale * of.mixed)
    c.program.copy(c.x, c.normed)
    c.product(of.projection, c.normed, made, scaling=of.factor)
    for i in range(layers):
        at = i * of.width
        c.norm(of.norm, made, inputs, width=of.width, of=at, column=at, add=of.mixed)


def add_per_layer_input(c: StackCompiler, of: PerLayerInput, i: int) -> None:
    """Add what layer `i` does with its own to the residual stream."""
    assert c.stack.per_layer is not None
    width, all_widths = c.stack.per_layer.width, c.stack.per_layer.width * len(c.stack.layers)
    gate, gated = c.buffer("gate", width, True), c.buffer("gated", width)
    inputs = c.buffer("inputs", all_widths, True)
    c.program.copy(c.x, c.normed)
    c.product(of.gate, c.normed, gate)
    c.program.gate(inputs, gate, gated, 1, width, of=i * width, activation=of.activation)
    c.product(of.out, gated, c.made)
    c.norm(of.after, c.made, c.x, add=1.0)
