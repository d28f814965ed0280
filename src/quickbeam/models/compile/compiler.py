"""What a stack's operations are added with: a program, its buffers, and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels, Recurrence
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import BFLOAT16, FLOAT32, Packer
from quickbeam.models.rotary import AngleTable
from quickbeam.models.stack import BlockConv, Linear, Norm, ParameterRows, Stack
from quickbeam.models.weights.parameters import norm_weight, rows_of

ReadParameter = Callable[[str], torch.Tensor]


class SmallParameters:
    """A model's parameters that are no packed weights. Each is read once, and kept.

    `read`: a function from a name to the parameter. `float32`: rows are float32.
    """

    def __init__(self, read: ReadParameter, kernels: Kernels, float32: bool) -> None:
        self._read = read
        self._packer = Packer(kernels, FLOAT32 if float32 else BFLOAT16)
        self._parameters = dict[str, torch.Tensor]()
        self._norms = dict[Norm, torch.Tensor | None]()
        self._packed = dict[Linear, Any]()

    def __call__(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter in float32, flat."""
        if name not in self._parameters:
            parameter = self._read(name).detach()
            copied = parameter.to(torch.float32, copy=True)
            self._parameters[name] = copied.flatten().contiguous()
        return self._parameters[name]

    def norm(self, norm: Norm) -> torch.Tensor | None:
        """Return a norm's weight in float32, flat; None for ones."""
        if norm not in self._norms:
            self._norms[norm] = norm_weight(norm, self._read)
        return self._norms[norm]

    def exact(self, linear: Linear) -> Any:
        """Return a packed weight that keeps every bit."""
        if linear not in self._packed:
            weights = [self._rows(rows) for rows in linear.weights]
            biases = [self._rows(rows) for rows in linear.biases]
            bias = torch.cat(biases) if biases else None
            self._packed[linear] = self._packer.pack(weights, bias)
        return self._packed[linear]

    def _rows(self, rows: ParameterRows) -> torch.Tensor:
        selected: torch.Tensor = rows_of(rows, self._read(rows.name))
        return selected


class RecurrenceSize(NamedTuple):
    """How many elements the state of a recurrence has, and the inputs of one node."""

    state: int
    inputs: int


class StackCompiler:
    """Adds operations to `program`. `packed(linear)` returns a packed weight.

    `float32`: the format of rows is float32, not bfloat16. `wide_pages`: that of pages is.

    Buffers: `x` is the residual stream, `normalised` what a layer reads. `second_normalised` is
    what a router reads, or a feed-forward that runs in parallel with attention. `result` is what a
    norm reads before it is added. `experts`: of all layers that have some. `recurrences`: of all
    recurrent layers.
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
        float32: bool,
    ) -> None:
        self.program, self.stack = program, stack
        self.packed, self.parameters = packed, parameters
        self.pages, self.angles = pages, angles
        self.width, self.float32 = width, float32
        self.wide_pages = pages.dtype is torch.float32
        self.x, self.result = self.buffer("x", width, True), self.buffer("result", width, True)
        self.normalised = self.buffer("normalised", width)
        self.second_normalised = self.buffer("second normalised", width)
        self.experts, self.recurrences = list[library.Experts](), list[Recurrence]()
        self._referenced = list[Any]()  # what structures hold addresses of
        self._state_size = self._input_size = 0  # of all recurrences so far

    def buffer(self, name: str, width: int, float32: bool | None = None) -> Buffer:
        """Return the buffer of this name, in the format of rows if `float32` is None."""
        return self.program.buffer(width, self.float32 if float32 is None else float32, name)

    def address(self, tensor: torch.Tensor | None) -> int | None:
        """Return where a tensor is, which stays alive as long as this; None for None."""
        if tensor is None:
            return None
        self._referenced.append(tensor)
        return tensor.data_ptr()

    def keep(self, structure: Any) -> None:
        """Keep alive what another structure holds the address of."""
        self._referenced.append(structure)

    def norm(
        self,
        norm: Norm | None,
        source: Buffer,
        target: Buffer,
        *,
        width: int | None = None,
        source_column: int = 0,
        column: int = 0,
        gather: bool = False,
        add: float | None = None,
    ) -> None:
        """Add a norm, or a copy of all columns where there is none.

        The arguments by name are those of `Program.norm`.
        """
        if norm is None:
            self.program.copy(source, target)
            return
        self.program.norm(
            source,
            target,
            self.parameters.norm(norm),
            norm.epsilon,
            bias=None if norm.bias is None else self.parameters(norm.bias),
            centred=norm.centred,
            width=width,
            source_column=source_column,
            column=column,
            gather=gather,
            add=add,
        )

    def product(
        self,
        linear: Linear,
        source: Buffer,
        target: Buffer,
        epilogue: int = library.STORE,
        *,
        activation: str | None = None,
        scaling: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Add a product. The arguments after `linear` are those of `Program.linear`."""
        packed = self.packed(linear)
        self.program.linear(
            packed,
            source,
            target,
            epilogue,
            activation=activation,
            scaling=scaling,
            softcap=softcap,
        )

    def convolved(self, conv: BlockConv | None, source: Buffer) -> Buffer:
        """Return what a sublayer reads of normed rows: behind a convolution if there is one."""
        if conv is None:
            return source
        self.product(conv.shared, source, self._coefficients(conv))
        target = self.buffer("convolved", source.width)
        self._convolve(conv, 0, source, target)
        return target

    def _coefficients(self, conv: BlockConv) -> Buffer:
        return self.buffer("shared", self.packed(conv.shared).outputs, True)

    def _convolve(self, conv: BlockConv, index: int, source: Buffer, target: Buffer) -> None:
        """Add convolution 0, of what a sublayer reads, or 1, of its result, to be added."""
        self.program.convolve(
            source,
            target,
            self.parameters(conv.base).view(2, conv.taps, -1)[index],
            self._coefficients(conv),
            index * conv.taps * (source.width // conv.group),
            group=conv.group,
            block=conv.block,
            add=index == 1,
        )

    def add_to_stream(
        self,
        linear: Linear,
        source: Buffer,
        after: Norm | None,
        factor: float,
        conv: BlockConv | None = None,
    ) -> None:
        """Add a product times `factor`, behind a norm if there is one, to the residual stream.

        `conv`: the product's convolution.
        """
        if conv is not None:
            self.product(linear, source, self.result)
            self._convolve(conv, 1, self.result, self.x)
        elif after is None:
            self.product(linear, source, self.x, library.ADD, scaling=factor)
        else:
            self.product(linear, source, self.result)
            self.norm(after, self.result, self.x, add=factor)

    def recur(
        self, recurrence: Recurrence, size: RecurrenceSize, source: Buffer, target: Buffer
    ) -> None:
        """Add a recurrence, whose state and inputs follow those of the ones before it."""
        assert self.pages.state_shape is not None
        recurrence.state = self._state_size
        recurrence.input = self._input_size
        recurrence.inputs = self.pages.state_shape.inputs
        self._state_size += size.state
        self._input_size += size.inputs
        self.recurrences.append(recurrence)
        self.program.recur(recurrence, source, target)
