"""What a stack's operations are added with: a program, its buffers, weights and other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels, Recurrence
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16, FLOAT32, Packed, Packer
from quickbeam.models.rotary import AngleTable
from quickbeam.models.stack import BlockConv, Linear, Norm, Stack
from quickbeam.models.weights.parameters import norm_weight, rows_of

Parameter = Callable[[str], torch.Tensor]


class SmallParameters:
    """A model's parameters beside the large weights. Each is read once, and kept.

    `parameter(name)`: the whole of one. `wide`: rows are float32.
    """

    def __init__(self, parameter: Parameter, kernels: Kernels, wide: bool) -> None:
        self._parameter, self._read = parameter, dict[Any, Any]()
        self._packer = Packer(kernels, FLOAT32 if wide else BFLOAT16)

    def __call__(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter in float32, flat."""
        if name not in self._read:
            parameter = self._parameter(name).detach()
            self._read[name] = parameter.to(torch.float32, copy=True).flatten().contiguous()
        return self._read[name]  # type: ignore[no-any-return]

    def norm(self, of: Norm) -> torch.Tensor | None:
        """Return a norm's weight in float32, flat; None for ones."""
        if of not in self._read:
            self._read[of] = norm_weight(of, self._parameter)
        return self._read[of]  # type: ignore[no-any-return]

    def exact(self, of: Linear) -> Packed:
        """Return a packed weight that keeps every bit."""
        if of not in self._read:
            weights, biases = (
                [rows_of(one, self._parameter(one.name)) for one in parts]
                for parts in (of.weights, of.biases)
            )
            self._read[of] = self._packer.pack(weights, torch.cat(biases) if biases else None)
        return self._read[of]  # type: ignore[no-any-return]


class StackCompiler:
    """Adds operations to `program`. `packed(linear)` gives a large weight in the kernels' layout.

    Buffers: `x` is the residual stream, `normed` what a layer reads, `beside` what a feed-forward
    beside attention or a router reads, `made` what a norm reads before it is added. `experts`: of
    all layers that have some, with the bytes of one of them. `recurrences`: of all recurrent
    layers. `kept`: what these hold addresses of.
    """

    def __init__(
        self,
        program: Program,
        stack: Stack,
        packed: Callable[[Linear], Any],
        parameters: SmallParameters,
        pages: PagePool,
        angles: AngleTable,
        width: int,
    ) -> None:
        self.program, self.stack, self.packed, self.parameters = program, stack, packed, parameters
        self.pages, self.angles, self.width = pages, angles, width
        self.wide = pages.dtype is torch.float32
        self.x, self.made = self.buffer("x", width, True), self.buffer("made", width, True)
        self.normed, self.beside = self.buffer("normed", width), self.buffer("beside", width)
        self.experts, self.recurrences = list[tuple[library.Experts, int]](), list[Recurrence]()
        self.kept = list[Any]()
        self._state = self._input = 0  # numbers of a state and of a node's inputs, so far

    def buffer(self, name: str, width: int, float32: bool | None = None) -> Buffer:
        """Return the buffer of this name, in the format of rows if `float32` is None."""
        return self.program.buffer(width, self.wide if float32 is None else float32, name)

    def norm(self, norm: Norm | None, source: Buffer, target: Buffer, **more: Any) -> None:
        """Add a norm, or a copy where there is none. `more`: as of `Program.norm`."""
        if norm is None:
            self.program.copy(source, target)
            return
        bias = None if norm.bias is None else self.parameters(norm.bias)
        how = {"bias": bias, "centred": norm.centred, **more}
        self.program.norm(source, target, self.parameters.norm(norm), norm.epsilon, **how)

    def product(self, of: Linear, source: Buffer, target: Buffer, *how: int, **more: Any) -> None:
        """Add a product. `how`, `more`: the epilogue and what else `Program.linear` takes."""
        self.program.linear(self.packed(of), source, target, *how, **more)

    def convolved(self, conv: BlockConv | None, source: Buffer) -> Buffer:
        """Return what a sublayer reads of normed rows: behind a convolution if there is one."""
        if conv is None:
            return source
        shared = self.buffer("shared", self.packed(conv.shared).outputs, True)
        self.product(conv.shared, source, shared)
        target = self.buffer("convolved", source.width)
        self._convolve(conv, 0, source, target)
        return target

    def _convolve(self, conv: BlockConv, which: int, source: Buffer, target: Buffer) -> None:
        base = self.parameters(conv.base).view(2, conv.taps, -1)[which]
        shared = self.buffer("shared", self.packed(conv.shared).outputs, True)
        self.program.add(
            library.CONVOLVE,
            source,
            target,
            key=shared,
            key_stride=shared.width,
            key_head=which * conv.taps * (source.width // conv.group),
            weight=base,
            inputs=source.width,
            heads=conv.taps,
            kv_heads=conv.group,
            outputs=conv.block,
            epilogue=library.ADD if which == 1 else library.STORE,
        )

    def add(
        self,
        of: Linear,
        source: Buffer,
        after: Norm | None,
        factor: float,
        conv: BlockConv | None = None,
    ) -> None:
        """Add a product times `factor`, behind a norm if there is one, to the residual stream.

        `conv`: the product's convolution.
        """
        if conv is not None:
            self.product(of, source, self.made)
            self._convolve(conv, 1, self.made, self.x)
        elif after is None:
            self.product(of, source, self.x, library.ADD, scaling=factor)
        else:
            self.product(of, source, self.made)
            self.norm(after, self.made, self.x, add=factor)

    def recurrence(self, state: int, inputs: int, **fields: Any) -> Recurrence:
        """Return a recurrence with so many numbers of a state, and inputs of one node.

        `fields`: its others. In place of a tensor its address is taken.
        """
        assert self.pages.state_shape is not None
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                self.kept.append(value)
                fields[name] = value.data_ptr()
        offsets = {"state": self._state, "input": self._input}
        self._state, self._input = self._state + state, self._input + inputs
        made = Recurrence(**offsets, inputs=self.pages.state_shape.inputs, **fields)
        self.recurrences.append(made)
        return made
