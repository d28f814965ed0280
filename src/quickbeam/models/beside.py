"""What stands beside the residual stream of some models, on the native kernels.

Experts beside a dense feed-forward, and per-layer inputs (Gemma 4).
"""

from __future__ import annotations

from typing import Any

from quickbeam.models.compiler import Compiler
from quickbeam.models.experts import add_experts
from quickbeam.models.native import operations
from quickbeam.models.native.program import Buffer
from quickbeam.models.native.quantised import Weight
from quickbeam.models.stack import Beside, PerLayerInput, PerLayerInputs


def add_beside(c: Compiler, of: Beside) -> Buffer:
    """Add experts to what the dense feed-forward made, and return the buffer of the sum."""
    both = c.buffer("both", c.width, True)
    c.norm(of.dense_after, c.made, both)
    c.norm(of.before, c.x, c.normed)
    c.norm(of.router, c.x, c.beside)
    add_experts(c, of.experts, c.normed, c.made, c.beside)
    c.norm(of.after, c.made, both, add=1.0)
    return both


def add_per_layer_inputs(c: Compiler, of: PerLayerInputs, table: Weight) -> None:
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


def add_per_layer_input(c: Compiler, of: PerLayerInput, i: int) -> None:
    """Add what layer `i` does with its own to the residual stream."""
    assert c.stack.per_layer is not None
    width, all_widths = c.stack.per_layer.width, c.stack.per_layer.width * len(c.stack.layers)
    gate, gated = c.buffer("gate", width, True), c.buffer("gated", width)
    inputs = c.buffer("inputs", all_widths, True)
    c.program.copy(c.x, c.normed)
    c.product(of.gate, c.normed, gate)
    how: dict[str, Any] = {"of": i * width, "activation": of.activation}
    operations.gate(c.program, inputs, gate, gated, 1, width, **how)
    c.product(of.out, gated, c.made)
    c.norm(of.after, c.made, c.x, add=1.0)
