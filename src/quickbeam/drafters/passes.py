"""Passes of a drafter's stack, by the native kernels and by PyTorch's operators.

Both have the same methods. `run` runs rows, `write_keys` computes of rows the keys and values
alone. `logits` is the head, from rows `[n, d]` to `[n, draft vocabulary]`, and `pool` makes the
caches of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from quickbeam.drafters.folder import embed_scale
from quickbeam.drafters.network import EMBEDDING, DrafterNetwork
from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.models.base import Batch, Block, Model, RankedRows
from quickbeam.models.compile.compiled_stack import (
    CompiledStack,
    NativeLinear,
    ScaledEmbedding,
    kv_shapes,
)
from quickbeam.models.compile.hidden_input import add_fusion
from quickbeam.models.compile.layer import add_queries_and_keys
from quickbeam.models.compile.native_model import list_rows
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import RowList, plain_rows
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import (
    BFLOAT16,
    EXACT_FORMATS,
    FLOAT32,
    INT8,
    BlockRows,
    Packed,
    Packer,
)
from quickbeam.models.stack import Stack
from quickbeam.models.torch.attention import PassInputs, attention_on
from quickbeam.models.torch.graphs import Passes, SideStream
from quickbeam.models.torch.likeliest import rank_tokens, rows_of
from quickbeam.models.torch.network import Embedding
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import ListedRows, PassRows, list_pass, uncommitted
from quickbeam.models.weights.parameters import Parameters, names

Route = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A router: of states `[n, width]` and embeddings `[n, d]` to scores `[n, clusters]` float32."""


class HeadInput(NamedTuple):
    """What the head reads where it runs in a pass.

    `normed`: it reads the normed stream. `tokens`: of its columns, `[s]`; None: column i is token
    i.
    """

    normed: bool
    tokens: torch.Tensor | None


class Outputs(NamedTuple):
    """What a pass gives.

    `stream`, `normed`: the residual stream behind the last layer, and behind its norm, `[rows, d]`
    each. `scores`: the router's of the wanted rows, `[wanted, clusters]`; None without a router.
    `ranked`: the distributions of the wanted rows; None where the head doesn't run in the pass.
    """

    stream: torch.Tensor
    normed: torch.Tensor
    scores: torch.Tensor | None = None
    ranked: RankedRows | None = None


class TorchPasses:
    """A `network` on any device: the reference.

    On CUDA each pass is one graph. A router runs in it beside the layers, on a second stream.
    """

    def __init__(self, network: DrafterNetwork, model: Model) -> None:
        self.network, self.layers = network, network.layers_in_torch()
        assert network.stack.hidden_input is not None
        self._reads_tokens = network.stack.hidden_input.reads_tokens
        self.pool = RowPool(kv_shapes(network.stack), model.dtype, model.device)
        self._attend = attention_on(model.device)
        self._running = Passes(self._compute, self.pool)
        self._writing = Passes(self._compute_keys, self.pool)
        self._side = SideStream(model.device) if self._running.padding() else None
        self.logits = network.head

    def run(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        route: Route | None = None,
        fuse: bool = False,
        head: HeadInput | None = None,
    ) -> Outputs:
        """Run rows, which read the states `hidden` `[rows, width]`.

        With `fuse`, these are made of the target's hidden states `[rows, aux_layers * d]`. `route`:
        a router, which reads of the wanted rows what the first layer does. `head`: let the head run
        in the pass, of which the host then gets the likeliest tokens.
        """
        results = self._running.run(self._listed(batch), [hidden], (route, fuse, head))
        stream, normed = (rows[: batch.rows] for rows in results[:2])
        scores, probs, likeliest = (rows[: len(batch.wanted)] for rows in results[2:])
        return Outputs(
            stream,
            normed,
            scores=None if route is None else scores,
            ranked=None if head is None else RankedRows(probs, rows_of(likeliest)),
        )

    def write_keys(self, batch: Batch, hidden: torch.Tensor, fuse: bool = False) -> None:
        """Write keys and values of rows that read `hidden`. They are not committed yet."""
        self._writing.run(self._listed(batch), [hidden], (fuse,))

    # Nothing below reads from the device or depends on its numbers: they are parts of graphs.

    def _compute(
        self,
        rows: PassRows,
        hidden: torch.Tensor,
        route: Route | None,
        fuse: bool,
        head: HeadInput | None,
    ) -> Sequence[torch.Tensor]:
        states = self.layers.fuse(hidden) if fuse else hidden.float()
        embedded = self._embedded(rows)
        scores = states.new_empty(0)
        if route is not None:
            assert embedded is not None
            with nullcontext() if self._side is None else self._side.fork():
                scores = route(states[rows.wanted], embedded[rows.wanted])
        stream = self.layers.drafter_stream(embedded, states, self._inputs(rows))
        normed = self.layers.norm(stream)
        if route is not None and self._side is not None:
            self._side.join()
        stream = stream.to(self.pool.dtype)
        normed = normed.to(self.pool.dtype)
        probs = states.new_empty(0)
        likeliest = states.new_empty(0, dtype=torch.int32)
        if head is not None:
            read = normed if head.normed else stream
            probs, likeliest = rank_tokens(self.logits(read[rows.wanted]), head.tokens)
        return stream, normed, scores, probs, likeliest

    def _compute_keys(
        self, rows: PassRows, hidden: torch.Tensor, fuse: bool
    ) -> Sequence[torch.Tensor]:
        states = self.layers.fuse(hidden) if fuse else hidden.float()
        inputs, source = self._inputs(rows), states
        blocks: Any = self.layers.blocks
        embedded = self._embedded(rows)
        if embedded is not None:
            assert self.layers.hidden_input is not None
            x, joined = self.layers.hidden_input(embedded, states)
            source = blocks[0].attention_before(x) if joined is None else joined
        for block in blocks:
            key, value = block.attention.key_value(source, inputs.angles)
            inputs.write(block.attention.params, key, value)
        return ()

    def _embedded(self, rows: PassRows) -> torch.Tensor | None:
        if not self._reads_tokens:
            return None
        embedded: torch.Tensor = self.network.embedding(rows.tokens)
        return embedded

    def _inputs(self, rows: PassRows) -> PassInputs:
        return PassInputs(rows, self.pool, self.layers.angles_at(rows.positions), self._attend)

    def _listed(self, batch: Batch) -> ListedRows:
        first = batch.parts[0]
        block = first.rows if isinstance(first, Block) else 1
        return list_pass(
            [uncommitted(part) for part in batch.parts],
            self.pool,
            batch.tokens,
            batch.wanted,
            padding=self._running.padding(block),
        )


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

    def run(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        route: Route | None = None,
        fuse: bool = False,
        head: HeadInput | None = None,
    ) -> Outputs:
        """See `TorchPasses.run`. The head never runs in the pass."""
        states = self._states(hidden, fuse)
        outputs = self.run_rows(list_rows(batch), states)
        if route is None:
            return outputs
        wanted, tokens = batch.wanted, torch.tensor(batch.tokens)
        embedded = self._compiled.embedding(tokens[wanted])
        return outputs._replace(scores=route(states[wanted], embedded))

    def run_rows(self, rows: RowList, states: torch.Tensor) -> Outputs:
        """Run rows that are listed."""
        self._compiled(rows, states.float().contiguous())
        stream, normed = self._compiled.hidden.chunk(2, -1)
        return Outputs(stream, normed)

    def write_keys(self, batch: Batch, hidden: torch.Tensor, fuse: bool = False) -> None:
        """See `TorchPasses.write_keys`."""
        self._compiled.write_keys(list_rows(batch), self._states(hidden, fuse))

    def _states(self, hidden: torch.Tensor, fuse: bool) -> torch.Tensor:
        return self._compiled.fuse(hidden) if fuse else hidden.float().contiguous()


class CompiledDrafter(CompiledStack):
    """A drafter's stack as programs of the kernels.

    Passes give stream and normed stream of `Outputs` side by side in `hidden`.
    """

    def __init__(self, parameters: Parameters, stack: Stack, pages: PagePool, name: str) -> None:
        super().__init__(parameters, stack, pages, name)
        last = len(stack.layers)
        self.set_aux_layers([last, last + 1])
        self._fusion = self._make_fusion() if stack.fusion is not None else None
        self._keys = self._make_keys() if stack.attentions[0].source is None else None

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._fusion is None:
            return hidden.float().contiguous()
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
        hidden = c.program.external("hidden", inputs, self._float32)
        add_fusion(c, fusion, hidden, c.program.external("fused", self._width, True))
        return c.program

    def _make_keys(self) -> Program:
        """Return the program of rows whose keys and values are all that is wanted.

        Rows without tokens are what all layers make keys and values of.
        """
        c = self._new_compiler()
        source, hidden_input = self._add_input(c), self.stack.hidden_input
        layers = self.stack.layers
        if source is None and hidden_input is not None and hidden_input.reads_tokens:
            c.norm(layers[0].attention_before, c.x, c.normalised)
        elif source is None:
            c.program.copy(c.x, c.normalised)
        for i, layer in enumerate(layers):
            assert layer.attention is not None
            add_queries_and_keys(c, layer.attention, i, source or c.normalised)
        return c.program


def passes_of(
    network: DrafterNetwork, model: Model, kernels: Kernels | None, weights: str | None = None
) -> NativePasses | TorchPasses:
    """Return the passes of a network beside `model`: native ones if `kernels` can run it.

    `weights`: their format (`NativePasses`).
    """
    if kernels is None or not _fits_kernels(network, model):
        return TorchPasses(network, model)
    parameters = network.parameters_of_stack(model.dtype)
    stack = network.stack
    if stack.embedding:
        stack = replace(stack, scale=embed_scale(network.embedding))
        table = network.embedding.weight
        parameters.given |= {
            EMBEDDING: table.detach() if isinstance(table, torch.Tensor) else table
        }
    pool = PagePool(kv_shapes(stack), kernels)
    return NativePasses(parameters, stack, pool, network.head, weights)


def _fits_kernels(network: DrafterNetwork, model: Model) -> bool:
    """Whether the native kernels can run a `network` beside `model`.

    Widths have to be even. The kernels read the rows of an embedding of a known class. Another
    class may do something else with its rows.
    """
    config = network.config
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim, config.target_size)
    is_even = all(size % 2 == 0 for size in sizes)
    known = type(network.embedding) in (nn.Embedding, ScaledEmbedding, Embedding)
    reads_embedding = known or not network.stack.embedding
    on_cpu = model.device.type == "cpu" and model.dtype is torch.bfloat16
    return is_even and reads_embedding and on_cpu


def packed_head(kernels: Kernels, head: Any, weights: str | None = None) -> NativeLinear:
    """Return a head, packed. If the target keeps it quantised, its own rows are used.

    `weights`: its format; None: 8 bits, bfloat16 where a number is not finite.
    """
    if not isinstance(head, NativeLinear):
        packed = pack(kernels, head.weight, head.bias, weights)
    elif head.packed.name in EXACT_FORMATS:
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
