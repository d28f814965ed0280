"""The packed weights of a `Stack`: one after the other, in the order in which a pass reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK
from quickbeam.models.native.quantised import BlockRows, Packer, Weight
from quickbeam.models.stack import Linear, Stack, Tensor
from quickbeam.models.weights.formats import head_format
from quickbeam.models.weights.parameters import Parameters, experts, linears, names, rows_of

CHUNK = 4 << 20  # bytes of a weight that are packed at once, about: few enough to stay in the cache


class WeightRange(NamedTuple):
    """Where one weight is: from byte `first` to `last` (excluded) of all."""

    linear: Linear
    gated: bool
    packer: Packer
    first: int
    last: int


class PackedWeights:
    """The weights of a stack in the format `name`, and what the layers get of them.

    Called for a weight, it returns it packed. `memory`: all of them, uint8, to be set before.
    `filled`: it holds them already; else each is packed into it when it is first asked for. `size`:
    its bytes. `stored`: the formats that weights keep as they come in blocks.
    """

    memory: torch.Tensor

    def __init__(self, parameters: Parameters, stack: Stack, kernels: Kernels, name: str) -> None:
        self._parameters, self._stack, self.filled = parameters, stack, False
        self._packers = Packer(kernels, name), Packer(kernels, head_format(name))
        self._ranges, self.size, self.stored = dict[int, WeightRange](), 0, set[str]()
        self._made = dict[int, Any]()  # by `id` of the `Linear`, as ranges are
        for linear, gated in linears(stack):
            packer = self._packers[linear is stack.head]
            end = self.size + self._bytes(linear, gated, packer)
            self._ranges[id(linear)] = WeightRange(linear, gated, packer, self.size, end)
            self.size = end
            blocks = [one for one in self._shapes(linear) if isinstance(one, BlockRows)]
            self.stored |= {one.name for one in blocks}

    def __call__(self, linear: Linear) -> Any:
        if id(linear) not in self._made:
            self._made[id(linear)] = self._pack(self._ranges[id(linear)])
        return self._made[id(linear)]

    def _pack(self, span: WeightRange) -> Any:
        linear, gated, packer, begin, last = span
        room = self.memory[begin:last]
        for some, together in () if self.filled else self._parts(span):
            end = begin + packer.size(some, together)
            packer.pack(some, None, together, self.memory[begin:end])
            begin = end
        return packer.pack(self._shapes(linear), self._bias(linear), gated, room)

    def head(self, memory: torch.Tensor) -> Any:
        """Return the packed head, whose bytes are in `memory`."""
        linear, _, packer, _, _ = self.head_range
        return packer.pack(self._shapes(linear), self._bias(linear), False, memory)

    @property
    def head_range(self) -> WeightRange:
        """Where the head is."""
        return self._ranges[id(self._stack.head)]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield all packed bytes in parts, without ever holding more than one of them."""
        for span in self._ranges.values():
            for some, together in self._parts(span):
                yield span.packer.pack(some, None, together).data

    @property
    def unit(self) -> int:
        """The bytes of the largest part that can't be divided: two blocks, or an expert."""
        blocks = [2 * (p.last - p.first) // self._blocks(p) for p in self._ranges.values()]
        several = [
            self._bytes(one.up, one.gated, self._packers[0])
            + self._bytes(one.down, False, self._packers[0])
            for of in experts(self._stack)
            for one in {of.all[0], of.all[-1]}
        ]
        return max([*blocks, *several])

    @property
    def small(self) -> int:
        """Bytes of all that always stays in memory: norms, biases, routers, positions."""
        large = {one.name for span in self._ranges.values() for one in span.linear.weights}
        tables = {self._stack.embedding, getattr(self._stack.per_layer, "table", "")}
        few = names(self._stack) - large - tables  # of which a pass reads single rows
        sizes = [torch.Size(self._parameters.shape(name)).numel() for name in few]
        return sum(sizes) * self._parameters.dtype.itemsize

    def _blocks(self, span: WeightRange) -> int:
        rows = [len(one) for one in self._shapes(span.linear)]
        return sum(-(-n // BLOCK) for n in (rows if span.gated else [sum(rows)]))

    def _bytes(self, linear: Linear, gated: bool, packer: Packer) -> int:
        return packer.size(self._shapes(linear), gated)

    def _shapes(self, linear: Linear) -> list[Weight]:
        """Return tensors without memory in the shapes of a weight's parts."""
        return [rows_of(one, self._parameters.like(one.name)) for one in linear.weights]

    def _bias(self, linear: Linear) -> torch.Tensor | None:
        parts = self._stored(linear.biases)
        return torch.cat(parts) if parts else None

    def _stored(self, parts: tuple[Tensor, ...]) -> list[Any]:
        return [self._rows(one) for one in parts]

    def _rows(self, one: Tensor) -> Any:
        if one.expert is None:
            return rows_of(one, self._parameters(one.name))
        alone = self._parameters.rows(one.name, one.expert, one.expert + 1)
        return rows_of(replace(one, expert=0), alone)

    def _parts(self, span: WeightRange) -> Iterator[tuple[list[Any], bool]]:
        """Yield rows in parts whose packed blocks follow one another, and whether each is gated."""
        linear, gated, packer, _, _ = span
        parts, like = linear.weights, self._shapes(linear)
        if not packer.together(like):
            yield from (([self._rows(one)], False) for one in parts)
            return
        whole = gated or not any(len(one) % BLOCK for one in like[:-1])
        if not whole or not all(one.plain for one in parts):
            yield self._stored(parts), gated
            return
        inputs = self._parameters.shape(parts[0].name)[1]
        step = max(1, CHUNK // (4 * inputs * BLOCK)) * BLOCK
        for together in [parts] if gated else [(one,) for one in parts]:
            count = self._parameters.shape(together[0].name)[0] // together[0].parts
            for first in range(0, count, step):
                last = min(first + step, count)
                begins = [one.part * count + first for one in together]
                named = zip(together, begins, strict=True)
                rows = self._parameters.rows
                yield [rows(one.name, at, at + last - first) for one, at in named], gated
