"""Recurrent layers of a `Stack`, compiled: their packed weights and their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quickbeam.models.native import library, operations
from quickbeam.models.native.library import Recurrence
from quickbeam.models.native.operands import BLOCK
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.stack import Linear, Matrices, Recurrent, ShortConv, Stack
from quickbeam.models.stack_tensors import norm_weight
from quickbeam.models.states import StateShape

Place = Callable[[Linear, bool], Any]
Parameter = Callable[[str], torch.Tensor]


class CompiledConv:
    """A `ShortConv`: the products before and after it, and its recurrence."""

    def __init__(self, of: ShortConv, place: Place, parameter: Parameter) -> None:
        self.into, self.out = place(of.into, False), place(of.out, False)
        b, c, x = 0, of.channels, 2 * of.channels
        self._weight, self._bias, recurrence = convolution(of, parameter)
        recurrence.column, recurrence.gate, recurrence.gate_out = x, b, c
        self.recurrences = [recurrence]

    def add(self, program: Program, source: Buffer, target: Buffer) -> None:
        """Add the recurrence to a program, behind the first product."""
        program.add(library.RECUR, source, target, weight=self.recurrences[0])


class CompiledMatrices:
    """A `Matrices`: products, the recurrences of its convolution and of its heads, and its norm."""

    def __init__(self, of: Matrices, place: Place, parameter: Parameter) -> None:
        self.of = of
        self.into, self.out = place(of.into, False), place(of.out, False)
        self._weight, self._bias, convolved = convolution(of, parameter)
        keys, values = of.key_heads * of.key_dim, of.heads * of.value_dim
        if not of.delta:  # the convolution is linear, so that its weight takes the scales
            sizes = torch.tensor([values, keys, keys])
            self._weight *= torch.tensor(of.scales).repeat_interleave(sizes)
        convolved.gate = convolved.gate_out = -1
        convolved.activated = 1
        self._slope = -parameter(of.log_slope).detach().float().exp()
        self._shift = parameter(of.shift).detach().float().contiguous()
        self._skip = None if of.skip is None else parameter(of.skip).detach().float().contiguous()
        self._norm = None if of.norm is None else norm_weight(of.norm, parameter)
        self.recurrences = [convolved, self._matrices()]

    @property
    def _columns(self) -> tuple[int, int, int]:
        """Where queries, keys and values begin in what is convolved."""
        of = self.of
        keys, values = of.key_heads * of.key_dim, of.heads * of.value_dim
        return (0, keys, 2 * keys) if of.delta else (values + keys, values, 0)

    def _matrices(self) -> Recurrence:
        of, (query, key, value) = self.of, self._columns
        values, rates = of.heads * of.value_dim, of.heads if of.delta else 0
        # of the delta rule, keys, values and factors are a node's inputs; else all but the queries,
        # which stand between them
        kept = key if of.delta else 0
        return Recurrence(
            kind=library.DELTA_RULE if of.delta else library.STATE_SPACE,
            heads=of.heads,
            key_heads=of.key_heads,
            key_dim=of.key_dim,
            value_dim=of.value_dim,
            query=query,
            key=key,
            value=value,
            factors=of.channels,
            kept=kept,
            kept_count=of.channels + 2 * of.heads - kept,
            rate=of.channels + values,
            decay=of.channels + values + rates,
            slope=self._slope.data_ptr(),
            shift=self._shift.data_ptr(),
            skip=None if self._skip is None else self._skip.data_ptr(),
            least=of.least,
            most=of.most,
            step_scale=of.step_scale,
        )

    def add(self, program: Program, source: Buffer, target: Buffer) -> None:
        """Add the recurrences to a program, behind the first product."""
        of, values = self.of, self.of.heads * self.of.value_dim
        mixed = program.buffer(of.channels + 2 * of.heads, True)
        for recurrence in self.recurrences:
            program.add(library.RECUR, source, mixed, weight=recurrence)
        operations.gate(
            program,
            mixed,
            source,
            target,
            of.groups,
            values // of.groups,
            of=self._columns[2],
            gates_of=of.channels,
            scaling=of.gate_scale,
            weight=self._norm,
            epsilon=0.0 if of.norm is None else of.norm.epsilon,
            norm_last=of.norm_last,
        )


Compiled = CompiledConv | CompiledMatrices


def convolution(
    of: Recurrent, parameter: Parameter
) -> tuple[torch.Tensor, torch.Tensor | None, Recurrence]:
    """Return weight and bias of a convolution, and its recurrence, which holds their addresses."""
    weight = parameter(of.weight).detach().float().view(of.channels, of.taps).t().contiguous()
    bias = None if of.bias is None else parameter(of.bias).detach().float().contiguous()
    recurrence = Recurrence(
        kind=library.CONVOLUTION,
        channels=of.channels,
        taps=of.taps,
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )
    return weight, bias, recurrence


def compile_recurrent(of: Recurrent, place: Place, parameter: Parameter) -> Compiled:
    """Pack a recurrent layer's weights with `place`."""
    if isinstance(of, ShortConv):
        return CompiledConv(of, place, parameter)
    return CompiledMatrices(of, place, parameter)


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


def place_states(layers: Sequence[Compiled], stack: Stack) -> Any:
    """Say where each recurrence's numbers are in a state, and in a node's inputs.

    Returns an array of them all.
    """
    sizes = [size for of in stack.recurrents for size in _sizes(of)]
    every = [recurrence for layer in layers for recurrence in layer.recurrences]
    state, inputs = 0, sum(i for _, i in sizes)
    begin = 0
    for recurrence, (more, of_node) in zip(every, sizes, strict=True):
        recurrence.state, recurrence.input, recurrence.inputs = state, begin, inputs
        state, begin = state + more, begin + of_node
    return (Recurrence * len(every))(*every)
