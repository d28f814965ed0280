"""The packed weights of a `Stack`: one after the other, in the order in which a pass reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quickbeam.models.memory import memory_for_weights
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK
from quickbeam.models.native.quantised import BlockRows, Packer, Weight
from quickbeam.models.stack import Linear, ParameterRows, Stack
from quickbeam.models.weights.formats import head_format
from quickbeam.models.weights.parameters import Parameters, experts, linears, names, rows_of

CHUNK = 4 << 20  # bytes of a weight that are packed at once, about: few enough to stay in the cache


class PackedRange(NamedTuple):
    """Where one packed weight is: from byte `first` to `last` (excluded) of all."""

    linear: Linear
    gated: bool
    packer: Packer
    first: int
    last: int


class PackedWeights:
    """The packed weights of a stack, in the format `name`.

    Called with a `Linear`, it returns its weight packed. `memory`: the bytes of all, uint8, to be
    set before. `is_packed`: whether it holds them already; else each weight is packed into it when
    it is first asked for. `size`: how many bytes these are. `block_formats`: the formats of those
    weights that stay as a file's blocks have them.
    """

    memory: torch.Tensor

    def __init__(self, parameters: Parameters, stack: Stack, kernels: Kernels, name: str) -> None:
        self._parameters, self._stack = parameters, stack
        self.is_packed = False
        self.size = 0
        self.block_formats = set[str]()
        self._packer = Packer(kernels, name)
        head_packer = Packer(kernels, head_format(name))
        self._ranges = dict[int, PackedRange]()  # by `id` of the `Linear`
        self._packed = dict[int, Any]()  # by `id` of the `Linear`
        for linear, gated in linears(stack):
            packer = head_packer if linear is stack.head else self._packer
            weights = self._without_memory(linear)
            end = self.size + packer.size(weights, gated)
            self._ranges[id(linear)] = PackedRange(linear, gated, packer, self.size, end)
            self.size = end
            for weight in weights:
                if isinstance(weight, BlockRows):
                    self.block_formats.add(weight.name)

    def __call__(self, linear: Linear) -> Any:
        if id(linear) not in self._packed:
            self._packed[id(linear)] = self._pack(self._ranges[id(linear)])
        return self._packed[id(linear)]

    def spread_memory(self) -> torch.Tensor | None:
        """Return new memory for all weights, each part of which is near the threads that read it.

        None where the machine has one memory node, so that any memory is.
        """
        if self._packer.kernels.nodes is None:
            return None
        memory = memory_for_weights(self.size)
        for packed_range in self._ranges.values():
            weights = self._without_memory(packed_range.linear)
            part = memory[packed_range.first : packed_range.last]
            packed_range.packer.pack(weights, None, packed_range.gated, part).touch()
        return memory

    def _pack(self, packed_range: PackedRange) -> Any:
        """Return a weight whose bytes are in `memory`, where they are written if need be."""
        packer = packed_range.packer
        if not self.is_packed:
            begin = packed_range.first
            for weights, gated in self._parts(packed_range):
                end = begin + packer.size(weights, gated)
                packer.pack(weights, None, gated, self.memory[begin:end])
                begin = end
        return self._packed_in(packed_range, self.memory[packed_range.first : packed_range.last])

    def head(self, memory: torch.Tensor) -> Any:
        """Return the packed head, whose bytes are in `memory`."""
        return self._packed_in(self.head_range, memory)

    def _packed_in(self, packed_range: PackedRange, memory: torch.Tensor) -> Any:
        """Return a packed weight, whose bytes are in `memory`."""
        linear = packed_range.linear
        weights, bias = self._without_memory(linear), self._bias(linear)
        return packed_range.packer.pack(weights, bias, packed_range.gated, memory)

    @property
    def layer_size(self) -> int:
        """The bytes of all but the head."""
        head = self.head_range
        return self.size - (head.last - head.first)

    @property
    def head_range(self) -> PackedRange:
        """Where the head is."""
        return self._ranges[id(self._stack.head)]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield all packed bytes in pieces, without ever holding more than one of them."""
        for packed_range in self._ranges.values():
            for weights, gated in self._parts(packed_range):
                yield packed_range.packer.pack(weights, None, gated).data

    @property
    def indivisible_size(self) -> int:
        """The bytes of the largest part that can't be divided: two blocks, or an expert."""
        sizes = list[int]()
        for packed_range in self._ranges.values():
            size = packed_range.last - packed_range.first
            sizes.append(2 * size // self._block_count(packed_range))
        for layer_experts in experts(self._stack):
            for expert in (layer_experts.all[0], layer_experts.all[-1]):
                up_size = self._packer.size(self._without_memory(expert.up), expert.gated)
                down_size = self._packer.size(self._without_memory(expert.down))
                sizes.append(up_size + down_size)
        return max(sizes)

    @property
    def resident_size(self) -> int:
        """Bytes of all that always stays in memory: norms, biases, routers, positions."""
        packed = set[str]()
        for packed_range in self._ranges.values():
            packed.update(rows.name for rows in packed_range.linear.weights)
        # of the embeddings' tables a pass reads single rows
        tables = {self._stack.embedding}
        if self._stack.per_layer is not None:
            tables.add(self._stack.per_layer.table)
        resident = names(self._stack) - packed - tables
        elements = sum(math.prod(self._parameters.shape(name)) for name in resident)
        return elements * self._parameters.dtype.itemsize

    def _block_count(self, packed_range: PackedRange) -> int:
        rows = [len(weight) for weight in self._without_memory(packed_range.linear)]
        if not packed_range.gated:
            rows = [sum(rows)]
        return sum(-(-count // BLOCK) for count in rows)

    def _without_memory(self, linear: Linear) -> list[Weight]:
        """Return the weights of a product, in shape and format alone."""
        return [rows_of(rows, self._parameters.like(rows.name)) for rows in linear.weights]

    def _bias(self, linear: Linear) -> torch.Tensor | None:
        biases = [self._read(rows) for rows in linear.biases]
        return torch.cat(biases) if biases else None

    def _read(self, rows: ParameterRows) -> Any:
        """Return rows of a parameter; of an expert alone where it holds several."""
        if rows.expert is None:
            return rows_of(rows, self._parameters(rows.name))
        expert = self._parameters.rows(rows.name, rows.expert, rows.expert + 1)
        return rows_of(replace(rows, expert=0), expert)

    def _parts(self, packed_range: PackedRange) -> Iterator[tuple[list[Any], bool]]:
        """Yield weights in parts whose packed blocks follow one another.

        With each comes whether it is gated.
        """
        weights, gated = packed_range.linear.weights, packed_range.gated
        without_memory = self._without_memory(packed_range.linear)
        if not packed_range.packer.have_one_layout(without_memory):
            for rows in weights:
                yield [self._read(rows)], False
            return
        fills_blocks = all(len(weight) % BLOCK == 0 for weight in without_memory[:-1])
        divisible = (gated or fills_blocks) and all(rows.plain for rows in weights)
        if not divisible:
            yield [self._read(rows) for rows in weights], gated
            return
        inputs = self._parameters.shape(weights[0].name)[1]
        step = max(1, CHUNK // (4 * inputs * BLOCK)) * BLOCK
        together = [weights] if gated else [(rows,) for rows in weights]
        for group in together:
            count = self._parameters.shape(group[0].name)[0] // group[0].parts
            for first in range(0, count, step):
                last = min(first + step, count)
                yield [self._read_plain(rows, count, first, last) for rows in group], gated

    def _read_plain(self, rows: ParameterRows, count: int, first: int, last: int) -> Any:
        """Return rows `first` to `last` (excluded) of a part of `count` rows of a parameter."""
        begin = rows.part * count
        return self._parameters.rows(rows.name, begin + first, begin + last)
