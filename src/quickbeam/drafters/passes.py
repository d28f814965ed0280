"""Passes of a drafter's stack, by the native kernels and by PyTorch's operators.

Both have the same methods. `run` runs rows, `write_keys` computes of rows the keys and values
alone, and `pool` makes the caches of sequences. A pass in PyTorch scores tokens, too. The native
kernels score them in calls of their own: `logits` is the head, from rows `[n, d]` to
`[n, draft vocabulary]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.folder import embed_scale
from quickbeam.drafters.network import EMBEDDING, DrafterNetwork
from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.drafters.shortlist.shortlist import Shortlist, ShortlistState, require_tokens
from quickbeam.models.base import Batch, Block, Model
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
from quickbeam.models.torch.network import Embedding, LayerStack
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import ListedRows, PassRows, list_pass, uncommitted
from quickbeam.models.weights.parameters import Parameters, names


class ScoredRows(NamedTuple):
    """The w wanted rows of a pass, as its head has scored them. All tensors are on the device.

    - `feature`: what the head read, `[w, d]`.
    - `logits`: `[w, s]`.
    - `token`: of each row, `[w]`.
    - `sequence`: the index of each row's sequence, `[w]`.
    - `columns`: of each sequence, the token of each column, -1 where a column doesn't count,
      `[S, s]`. None: column i is token i.
    """

    feature: torch.Tensor
    logits: torch.Tensor
    token: torch.Tensor
    sequence: torch.Tensor
    columns: torch.Tensor | None


Finish = Callable[[ScoredRows], Sequence[torch.Tensor]]


class Head(NamedTuple):
    """What a pass scores after its wanted rows.

    - `normed`: whether the head reads the normed stream.
    - `shortlist`: what is scored of the target's vocabulary; None: all that the head has.
    - `tokens`: of the columns of a head of its own, `[s]`; None: column i is token i.
    - `finish`: what a pass in PyTorch makes of the logits. It reads nothing from the device.
    - `inputs`: of the rows' tokens `[n]`, what the rows read, `[n, width]`; None: they read states
      that are given.
    """

    normed: bool
    shortlist: Shortlist | None
    tokens: torch.Tensor | None
    finish: Finish
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None


class Outputs(NamedTuple):
    """What a pass gives.

    - `stream`, `normed`: the residual stream behind the last layer, and behind its norm,
      `[rows, d]` each.
    - `scores`: the router's of the wanted rows, `[wanted, clusters]`; None without a router. The
      native kernels give them alone, and score tokens in calls of their own.
    - `columns`: with a shortlist, of each part the token of each column; 0 where a column doesn't
      count. `finished`: what `Head.finish` returned. A pass in PyTorch gives both, with padding.
    """

    stream: torch.Tensor
    normed: torch.Tensor
    scores: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    finished: Sequence[torch.Tensor] = ()


class TorchPasses:
    """A drafter's `layers` on any device: the reference.

    On CUDA each pass is one graph, with the head in it. A router runs in it beside the layers, on a
    second stream. `embedding`: from tokens to what rows read. `head`: from rows to logits. `model`:
    the target. `pool`: of keys and values; None makes one.
    """

    def __init__(
        self,
        layers: LayerStack,
        embedding: Any,
        head: Any,
        model: Model,
        pool: RowPool | None = None,
    ) -> None:
        self.layers = layers
        self.embedding = embedding
        self.head = head
        assert layers.stack.hidden_input is not None
        self._reads_tokens = layers.stack.hidden_input.reads_tokens
        if pool is None:
            pool = RowPool(kv_shapes(layers.stack), model.dtype, model.device)
        self.pool = pool
        self._attend = attention_on(model.device)
        self._running = Passes(self._compute, self.pool)
        self._writing = Passes(self._compute_keys, self.pool)
        self._side = SideStream(model.device) if self._running.padding() else None
        self.vocab_size = model.vocab_size

    def run(
        self,
        batch: Batch,
        hidden: torch.Tensor | None,
        head: Head,
        scorers: Sequence[ShortlistState | None],
        fuse: bool = False,
    ) -> Outputs:
        """Run rows, which read the states `hidden` `[rows, width]`, and score the wanted ones.

        With `fuse`, these states are made of the target's hidden states `[rows, aux_layers * d]`.
        `hidden` is None where `head` makes the states. `scorers`: what is scored for each part.
        Raises `ValueError` where that is nothing.
        """
        listed = self._listed(batch)
        context = self._contexts(head, scorers)
        if hidden is None:
            hidden = torch.empty(0, 0, device=self.pool.device)
        results = self._running.run(listed, [hidden, context], (fuse, head))
        stream, normed, columns, *finished = results
        return Outputs(
            stream[: batch.rows],
            normed[: batch.rows],
            columns=None if head.shortlist is None else columns,
            finished=finished,
        )

    def write_keys(self, batch: Batch, hidden: torch.Tensor, fuse: bool = False) -> None:
        """Write keys and values of rows that read `hidden`. They are not committed yet."""
        self._writing.run(self._listed(batch), [hidden], (fuse,))

    def _contexts(self, head: Head, scorers: Sequence[ShortlistState | None]) -> torch.Tensor:
        """Return the tokens of each part's context, `[parts, m]`, -1 for padding.

        Where sizes of passes are rounded up, m is the most that a context may have, or 0.
        """
        none = torch.empty(0, dtype=torch.int64, device=self.pool.device)
        tokens = [none if scorer is None else scorer.context_tokens for scorer in scorers]
        longest = max(map(len, tokens))
        if shortlist := head.shortlist:
            always = shortlist.layout.frequent + shortlist.chosen
            require_tokens(always + min(map(len, tokens)))
            if longest and self._running.padding():
                assert shortlist.window is not None
                longest = shortlist.window
        return torch.stack([F.pad(row, (0, longest - len(row)), value=-1) for row in tokens])

    # Nothing below reads from the device or depends on its numbers: they are parts of graphs.

    def _compute(
        self,
        rows: PassRows,
        hidden: torch.Tensor,
        context: torch.Tensor,
        fuse: bool,
        head: Head,
    ) -> Sequence[torch.Tensor]:
        if head.inputs is not None:
            hidden = head.inputs(rows.tokens)
        states = self.layers.fuse(hidden) if fuse else hidden.float()
        embedded = self._embedded(rows)
        columns = None if head.tokens is None else head.tokens.expand(len(rows.pages), -1)
        if head.shortlist is not None:
            with nullcontext() if self._side is None else self._side.fork():
                columns = self._columns(head.shortlist, rows, states, embedded, context)
        stream = self.layers.drafter_stream(embedded, states, self._inputs(rows))
        normed = self.layers.norm(stream)
        if head.shortlist is not None and self._side is not None:
            self._side.join()
        stream = stream.to(self.pool.dtype)
        normed = normed.to(self.pool.dtype)
        feature = (normed if head.normed else stream)[rows.wanted]
        sequence = rows.sequence[rows.wanted]
        scored = ScoredRows(
            feature=feature,
            logits=self._logits(head, feature, columns, sequence),
            token=rows.tokens[rows.wanted],
            sequence=sequence,
            columns=columns,
        )
        tokens = sequence.new_empty(0)
        if head.shortlist is not None and columns is not None:
            tokens = columns.clamp(min=0)
        return stream, normed, tokens, *head.finish(scored)

    def _columns(
        self,
        shortlist: Shortlist,
        rows: PassRows,
        states: torch.Tensor,
        embedded: torch.Tensor | None,
        context: torch.Tensor,
    ) -> torch.Tensor:
        """Return `ScoredRows.columns` of a shortlist, whose router chooses clusters."""
        count = len(rows.pages)
        clusters = rows.pages.new_empty(count, 0)
        if shortlist.route is not None:
            assert embedded is not None
            wanted = rows.wanted
            scores = shortlist.route(states[wanted], embedded[wanted])
            number = torch.arange(count, device=wanted.device)
            owned = (rows.sequence[wanted] == number[:, None]) & (wanted >= 0)
            clusters = shortlist.choose(scores, owned.float())
        assert shortlist.in_torch is not None
        return shortlist.in_torch.columns(clusters, context[:count])

    def _logits(
        self,
        head: Head,
        feature: torch.Tensor,
        columns: torch.Tensor | None,
        sequence: torch.Tensor,
    ) -> torch.Tensor:
        if head.shortlist is not None:
            assert head.shortlist.in_torch is not None and columns is not None
            return head.shortlist.in_torch.logits(feature, columns, sequence)
        logits: torch.Tensor = self.head(feature)
        return logits if head.tokens is not None else logits[:, : self.vocab_size]

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
        embedded: torch.Tensor = self.embedding(rows.tokens)
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

    def score_all(self, feature: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole head, of rows `[n, d]`."""
        logits: torch.Tensor = self.logits(feature)
        return logits

    def run(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        head: Head | None = None,
        scorers: Sequence[ShortlistState | None] = (),
        fuse: bool = False,
    ) -> Outputs:
        """See `TorchPasses.run`. The pass scores nothing but the clusters of a router."""
        states = self._states(hidden, fuse)
        outputs = self.run_rows(list_rows(batch), states)
        if head is None or head.shortlist is None or head.shortlist.route is None:
            return outputs
        wanted, tokens = batch.wanted, torch.tensor(batch.tokens)
        embedded = self._compiled.embedding(tokens[wanted])
        return outputs._replace(scores=head.shortlist.route(states[wanted], embedded))

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
    network: DrafterNetwork,
    model: Model,
    kernels: Kernels | None,
    weights: str | None = None,
    pool: PagePool | RowPool | None = None,
) -> NativePasses | TorchPasses:
    """Return the passes of a network beside `model`: native ones if `kernels` can run it.

    `weights`: their format (`NativePasses`). `pool`: of the keys and values of a network of the
    same shape; None makes one.
    """
    if kernels is None or not _fits_kernels(network, model):
        assert not isinstance(pool, PagePool)
        layers = network.layers_in_torch()
        return TorchPasses(layers, network.embedding, network.head, model, pool)
    assert not isinstance(pool, RowPool)
    parameters = network.parameters_of_stack(model.dtype)
    stack = network.stack
    if stack.embedding:
        stack = replace(stack, scale=embed_scale(network.embedding))
        table = network.embedding.weight
        parameters.given |= {
            EMBEDDING: table.detach() if isinstance(table, torch.Tensor) else table
        }
    pool = pool or PagePool(kv_shapes(stack), kernels)
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
