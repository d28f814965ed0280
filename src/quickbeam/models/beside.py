"""What stands beside the residual stream of some models, on the native kernels.

Experts beside a dense feed-forward, and per-layer inputs (Gemma 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quickbeam.models.compiled_norm import CompiledNorm
from quickbeam.models.experts import CompiledExperts
from quickbeam.models.native import operations
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.parameters import Parameters
from quickbeam.models.stack import Beside, Linear, PerLayerInput, PerLayerInputs

Place = Callable[[Linear, bool], Any]


class CompiledBeside:
    """Experts that read the residual stream beside a dense feed-forward."""

    def __init__(
        self, of: Beside, experts: CompiledExperts, parameter: Callable[[str], Any]
    ) -> None:
        self.experts = experts
        self._norms = [
            CompiledNorm(norm, parameter)
            for norm in (of.dense_after, of.before, of.router, of.after)
        ]

    def add(self, program: Program, buffers: dict[str, Buffer]) -> Buffer:
        """Add them to what the dense one made, and return the buffer of the sum."""
        x, made, normed = buffers["x"], buffers["made"], buffers["normed"]
        router, both = buffers["beside"], buffers["both"]
        dense_after, before, of_router, after = self._norms
        dense_after.add(program, made, both)
        before.add(program, x, normed)
        of_router.add(program, x, router)
        self.experts.add(program, buffers, normed, made, router)
        after.add(program, made, both, add=1.0)
        return both


class CompiledPerLayerInputs:
    """The per-layer inputs of all `layers` layers: their table, which stays where it is, and the
    packed weight of the other part."""

    def __init__(
        self, of: PerLayerInputs, layers: int, place: Place, parameters: Parameters
    ) -> None:
        self._of, self._layers = of, layers
        self._table, self._projection = parameters.mapped(of.table), place(of.projection, False)
        self._norm = CompiledNorm(of.norm, parameters)

    def add(self, program: Program, buffers: dict[str, Buffer]) -> None:
        """Make them from the tokens' embeddings, which the buffer `x` holds."""
        of, columns = self._of, self._layers * self._of.width
        made, inputs = program.buffer(columns, True), program.buffer(columns, True)
        buffers["per layer"] = inputs
        for name, wide in (("gate", True), ("per layer gated", buffers["normed"].float32)):
            buffers[name] = program.buffer(of.width, wide)
        program.embed(self._table, inputs, scale=of.scale * of.mixed)
        program.copy(buffers["x"], buffers["normed"])
        program.linear(self._projection, buffers["normed"], made, scaling=of.factor)
        for i in range(self._layers):
            at = i * of.width
            self._norm.add(program, made, inputs, width=of.width, of=at, column=at, add=of.mixed)


class CompiledPerLayerInput:
    """What one layer does with its own."""

    def __init__(self, of: PerLayerInput, place: Place, norm: CompiledNorm) -> None:
        self._gate, self._out = place(of.gate, False), place(of.out, False)
        self._activation, self._after = of.activation, norm

    def add(self, program: Program, buffers: dict[str, Buffer], i: int) -> None:
        """Add it to the residual stream of layer `i`."""
        gate, gated, width = buffers["gate"], buffers["per layer gated"], buffers["gate"].width
        program.copy(buffers["x"], buffers["normed"])
        program.linear(self._gate, buffers["normed"], gate)
        operations.gate(
            program,
            buffers["per layer"],
            gate,
            gated,
            1,
            width,
            of=i * width,
            activation=self._activation,
        )
        program.linear(self._out, gated, buffers["made"])
        self._after.add(program, buffers["made"], buffers["x"], add=1.0)
