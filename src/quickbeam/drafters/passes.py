"""Passes of a drafter's stack, by the native kernels and by PyTorch's operators.

Both have the same methods. `fuse` turns a target's hidden states into what rows read. `run` runs
rows, `write_keys` computes of rows the keys and values alone. `logits` is the head, from rows `[n,
d]` to `[n, draft vocabulary]`, and `pool` makes the caches of sequences.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from quickbeam.drafters.folder import embed_scale
from quickbeam.drafters.network import EMBEDDING, DrafterNetwork
from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.models.base import Batch, Model
from quickbeam.models.compiled import CompiledStack, NativeLinear, ScaledEmbedding, kv_shapes
from quickbeam.models.compiled_layer import add_queries_and_keys
from quickbeam.models.hidden_input import add_fusion
from quickbeam.models.native.library import Kernels, kernels
from quickbeam.models.native.operands import RowList, plain_rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import (
    BFLOAT16,
    FLOAT32,
    INT8,
    WHOLE,
    BlockRows,
    Packed,
    Packer,
)
from quickbeam.models.native_model import list_rows
from quickbeam.models.pages import PagePool
from quickbeam.models.stack import Stack
from quickbeam.models.stack_tensors import Parameters, names
from quickbeam.models.torch.attention import PassInputs, attention_on
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import list_pass, uncommitted

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Of a pass, `[rows, d]` each: the residual stream behind the last layer, and behind its norm."""


class TorchPasses:
    """A `network` on any device: the reference."""

    def __init__(self, network: DrafterNetwork, model: Model) -> None:
        self.network, self.layers = network, network.layers_in_torch()
        assert network.stack.hidden_input is not None
        self._reads_tokens = network.stack.hidden_input.reads_tokens
        self.pool = RowPool(kv_shapes(network.stack), model.dtype, model.device)
        self._attend = attention_on(model.device)
        self.logits = network.head

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[n, width]` float32 of a target's hidden states `[n, aux_layers * d]`."""
        return self.layers.fuse(hidden)

    def run(self, batch: Batch, states: torch.Tensor) -> Outputs:
        """Run rows, which read `states` `[rows, width]`."""
        inputs = self._inputs(batch)
        stream = self.layers.drafter_stream(self._embedded(batch), states, inputs)
        dtype = self.pool.dtype
        return stream.to(dtype), self.layers.norm(stream).to(dtype)

    def write_keys(self, batch: Batch, states: torch.Tensor) -> None:
        """Write keys and values of rows that read `states`. They are not committed yet."""
        inputs, source = self._inputs(batch), states
        blocks: Any = self.layers.blocks
        if self._reads_tokens:
            assert self.layers.hidden_input is not None
            x, joined = self.layers.hidden_input(self._embedded(batch), states)
            source = blocks[0].attention_before(x) if joined is None else joined
        for block in blocks:
            key, value = block.attention.key_value(source, inputs.angles)
            inputs.write(block.attention.params, key, value)

    def _embedded(self, batch: Batch) -> torch.Tensor | None:
        if not self._reads_tokens:
            return None
        tokens = torch.tensor(batch.tokens, device=self.pool.device)
        embedded: torch.Tensor = self.network.embedding(tokens)
        return embedded

    def _inputs(self, batch: Batch) -> PassInputs:
        listed = list_pass([*map(uncommitted, batch.parts)], self.pool)
        rows = listed.to(self.pool.device)
        return PassInputs(rows, self.pool, self.layers.angles_at(rows.positions), self._attend)


class NativePasses:
    """A drafter's `stack` in the native kernels.

    `pool`: of its keys and values; that of a target whose layers it reads. `head`: the module that
    scores tokens. `weights`: the format of its weights. None: 8 bits, as a wrong draft costs only
    its time; bfloat16 where a number is not finite, and float32 beside a target in float32.
    """

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        pool: PagePool,
        head: Any,
        weights: str | None = None,
    ) -> None:
        self.pool, self._head = pool, head
        weights = FLOAT32 if pool.dtype is torch.float32 else weights
        self._head_weights = weights
        if weights is None:
            wanted = names(stack) - {stack.embedding, ""}
            weights = INT8 if all(_is_finite(parameters(name)) for name in wanted) else BFLOAT16
        self._compiled = CompiledDrafter(parameters, stack, pool, weights)

    @cached_property
    def logits(self) -> NativeLinear:
        """The whole head, packed where it is needed: shortlists have rows of their own."""
        return packed_head(self.pool.kernels, self._head, self._head_weights)

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `TorchPasses.fuse`."""
        return self._compiled.fuse(hidden)

    def run(self, batch: Batch, states: torch.Tensor) -> Outputs:
        """See `TorchPasses.run`."""
        return self.run_rows(list_rows(batch), states)

    def run_rows(self, rows: RowList, states: torch.Tensor) -> Outputs:
        """Run rows that are listed."""
        self._compiled(rows, states.float().contiguous())
        stream, normed = self._compiled.hidden.chunk(2, -1)
        return stream, normed

    def write_keys(self, batch: Batch, states: torch.Tensor) -> None:
        """See `TorchPasses.write_keys`."""
        self._compiled.write_keys(list_rows(batch), states.float().contiguous())


class CompiledDrafter(CompiledStack):
    """A drafter's stack as programs of the kernels. Passes give both of `Outputs` in `hidden`."""

    def __init__(self, parameters: Parameters, stack: Stack, pages: PagePool, name: str) -> None:
        super().__init__(parameters, stack, pages, name)
        last = len(stack.layers)
        self.watch([last, last + 1])
        self._fusion = self._make_fusion() if stack.fusion is not None else None
        self._keys = self._make_keys() if stack.attentions[0].source is None else None

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._fusion is None:
            return hidden.float()
        fused = torch.empty(len(hidden), self._width)
        rows = plain_rows(len(hidden))
        self._fusion.run(rows, {"hidden": hidden.contiguous(), "fused": fused})
        return fused

    def write_keys(self, rows: RowList, states: torch.Tensor) -> None:
        assert self._keys is not None
        self._keys.run(rows, {"states": states}, self._angles.up_to(max(rows.positions)))

    def _make_fusion(self) -> Program:
        c, fusion = self._new_compiler(), self.stack.fusion
        assert fusion is not None
        inputs = self._packed(fusion.linear).inputs
        hidden = c.program.given("hidden", inputs, self._float32)
        add_fusion(c, fusion, hidden, c.program.given("fused", self._width, True))
        return c.program

    def _make_keys(self) -> Program:
        """Return the program of rows whose keys and values are all that is wanted.

        Rows without tokens are what all layers make keys and values of.
        """
        c = self._new_compiler()
        source, hidden_input = self._add_input(c), self.stack.hidden_input
        layers = self.stack.layers
        if source is None and hidden_input is not None and hidden_input.reads_tokens:
            c.norm(layers[0].attention_before, c.x, c.normed)
        elif source is None:
            c.program.copy(c.x, c.normed)
        for i, layer in enumerate(layers):
            assert layer.attention is not None
            add_queries_and_keys(c, layer.attention, i, source or c.normed)
        return c.program


def passes_of(
    network: DrafterNetwork, model: Model, native: bool = True, weights: str | None = None
) -> NativePasses | TorchPasses:
    """Return the passes of a network beside `model`: native ones if the kernels can run it.

    `native`: whether they may. `weights`: their format (`NativePasses`).
    """
    kernels = network_kernels(model, network) if native else None
    if kernels is None:
        return TorchPasses(network, model)
    parameters, stack = network.parameters_of_stack(model.dtype), network.stack
    if stack.embedding:
        stack = replace(stack, scale=embed_scale(network.embedding))
        table = network.embedding.weight
        parameters.given |= {
            EMBEDDING: table.detach() if isinstance(table, torch.Tensor) else table
        }
    pool = PagePool(kv_shapes(stack), kernels)
    return NativePasses(parameters, stack, pool, network.head, weights)


def network_kernels(model: Model, network: DrafterNetwork) -> Kernels | None:
    """Return the native kernels if they can run a `network` beside `model`.

    Widths have to be even. They read the target's embedding, but not that of other classes, which
    may do something else with their rows.
    """
    config = network.config
    sizes = config.hidden_size, config.intermediate_size, config.head_dim, config.target_size
    reads_table = type(network.embedding) in (nn.Embedding, ScaledEmbedding)
    fits = all(size % 2 == 0 for size in sizes) and (reads_table or not network.stack.embedding)
    on_cpu = model.device.type == "cpu" and model.dtype is torch.bfloat16
    return kernels() if fits and on_cpu else None


def packed_head(kernels: Kernels, head: Any, weights: str | None = None) -> NativeLinear:
    """Return a head, packed. If the target keeps it quantised, its own rows are used.

    `weights`: its format; None: 8 bits, bfloat16 where a number is not finite.
    """
    if not isinstance(head, NativeLinear):
        packed = pack(kernels, head.weight, head.bias, weights)
    elif head.packed.name in WHOLE:
        packed = pack(kernels, head.packed.rows(), head.packed.bias, weights)
    else:
        packed = head.packed
    return NativeLinear(kernels, packed, logits=True)


def pack(
    kernels: Kernels,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    weights: str | None = None,
) -> Packed:
    """Return a packed weight. `weights`: as of `packed_head`."""
    packed: Packed = Packer(kernels, weights or rows_format(weight)).pack([weight], bias)
    return packed


def _is_finite(weight: Any) -> bool:
    return isinstance(weight, BlockRows) or bool(weight.isfinite().all())
