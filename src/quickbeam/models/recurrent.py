"""Recurrent layers of a `Stack`, compiled: their packed weights and their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quickbeam.models.native import library
from quickbeam.models.native.library import Recurrence
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.stack import Linear, Recurrent, ShortConv, Stack
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
        program.recur(self.recurrences[0], source, target)


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


def compile_recurrent(of: Recurrent, place: Place, parameter: Parameter) -> CompiledConv:
    """Pack a recurrent layer's weights with `place`."""
    return CompiledConv(of, place, parameter)


def _sizes(of: Recurrent) -> list[tuple[int, int]]:
    """Return the numbers of the state, and of a node's inputs, of each of its recurrences."""
    return [((of.taps - 1) * of.channels, of.channels)]


def state_shape(stack: Stack) -> StateShape | None:
    """Return what the recurrent layers keep of a sequence; None where there are none."""
    sizes = [size for of in stack.recurrents for size in _sizes(of)]
    return StateShape(sum(s for s, _ in sizes), sum(i for _, i in sizes)) if sizes else None


def place_states(layers: Sequence[CompiledConv], stack: Stack) -> Any:
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
