"""The block drafter at work: one pass of its network serves a whole tree (`block_model.py`)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.base import DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.feature import (
    FeatureDrafter,
    FeatureState,
    TorchPasses,
    choose_scorers,
    in_parts,
    score,
)
from quickbeam.drafters.folder import rope_parameters
from quickbeam.drafters.native import (
    CompiledDrafter,
    DrafterParameters,
    NativePacker,
    network_kernels,
)
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.models.base import Batch, Chain, Model, inference
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.models.compile.compiled_stack import NativeLinear, kv_shapes
from quickbeam.models.compile.native_model import list_rows
from quickbeam.models.families import FAMILIES
from quickbeam.models.families.reading import AROUND, Config, layer_of
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BFLOAT16, INT8, Packed
from quickbeam.models.stack import BlockConv, FeedForward, Layer, Linear, ParameterRows
from quickbeam.models.torch.graphs import Passes
from quickbeam.models.torch.rows import PassRows, UncommittedTokens, list_pass, uncommitted
from quickbeam.models.weights.checkpoint import ModelConfig
from quickbeam.tree import TokenTree

SEQUENCES = 256  # the most of a native pass
WITHIN = 10.0  # by how much a candidate's logit may be below that of the likeliest token


def follow(
    state: BlockState, places: Sequence[tuple[int, int]], markov: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the logits `[n, s]` of a state's candidates after n places, by W1 and W2.

    `places`: the depth of each, and its token.
    """
    depths, tokens = torch.tensor(places, device=state.scores.device).unbind(-1)
    before = F.embedding(tokens, markov[0]).float()
    if state.after is None:  # once a tree
        state.after = F.embedding(state.tokens, markov[1]).float()
    if state.gates is not None:
        before = before * state.gates.index_select(0, depths)
    return torch.addmm(state.scores.index_select(0, depths), before, state.after.T)


class TorchBlocks(TorchPasses):
    """A `BlockNetwork` on any device: the reference. On CUDA each pass is one graph."""

    def __init__(self, network: BlockNetwork, model: Model) -> None:
        config = network.config
        layers = [config.attention(i) for i in range(config.depth)]
        super().__init__(network, layers, model, 1.0 if config.gemma else None)
        self._markov = network.markov()
        self._reading = Passes(self._compute_reading, self.pool)
        self._running = Passes(self._compute_blocks, self.pool)

    def read(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Write keys and values of chains of tokens, which are not committed yet.

        `hidden`: the target's hidden states `[n, len(taps) * target_size]` of all rows.
        """
        parts = [uncommitted(part) for part in batch.parts]
        self._reading.run(list_pass(parts, self.pool, padding=self._reading.padding()), [hidden])

    def _compute_reading(self, rows: PassRows, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        fused = self.network.fuse(hidden)
        for i in range(self.network.config.depth):
            self.write(rows, i, *self.network.key_value(i, fused, rows.positions))
        return ()

    def run(self, caches: Sequence[Any], anchors: Sequence[int]) -> torch.Tensor:
        """Run a block behind each sequence's committed tokens.

        Returns the rows that draft, `[b, drafted, d]`.
        """
        config, size = self.network.config, self.network.config.block_size
        block = range(size)
        seen = [block] * size  # all of its block; less in causal layers
        blocks = [UncommittedTokens(cache, block, seen=seen) for cache in caches]
        tokens = [token for anchor in anchors for token in (anchor, *[0] * (size - 1))]
        listed = list_pass(blocks, self.pool, tokens, padding=self._running.padding(size))
        (rows,) = self._running.run(listed)
        return rows[: len(caches), size - config.drafted :]

    def _compute_blocks(self, rows: PassRows) -> Sequence[torch.Tensor]:
        """Return all rows of the blocks, `[b, block_size, d]`."""
        size = self.network.config.block_size

        def attend(i: int, query: torch.Tensor, *key_value: torch.Tensor) -> torch.Tensor:
            self.write(rows, i, *key_value)
            return self.attend(rows, i, query)

        return (self.network(rows.tokens[::size], rows.positions[::size], attend),)

    def candidates(
        self, logits: torch.Tensor, tokens: torch.Tensor | None, within: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns of `logits` `[drafted, s]` that are likely, and their tokens.

        In some row they are at most `within` below the largest, or NaN. `tokens`: see `HeadLogits`.
        """
        floors = logits.amax(-1, keepdim=True) - within
        columns = (~(logits < floors)).any(0).nonzero()[:, 0]
        names = columns if tokens is None else tokens.index_select(0, columns)
        return logits.index_select(1, columns), names

    def follow(self, state: BlockState, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the logits `[n, s]` of the state's candidates after n places.

        `places`: the depth of each, and its token.
        """
        return follow(state, places, self._markov)


class NativeBlocks:
    """A `BlockNetwork` in the native kernels, packed: its layers are Qwen3's or Gemma 4's.

    `name`: as of `NativePacker`.
    """

    def __init__(self, network: BlockNetwork, kernels: Kernels, name: str | None) -> None:
        self.config, self._head, self._embedded = network.config, network.head, network.embedded
        # what rows read: the mask's, then the anchors'
        self._inputs = torch.zeros(1 + SEQUENCES, self.config.hidden_size, dtype=torch.bfloat16)
        self._inputs[0] = network.mask()
        self._pack, self._markov = NativePacker(kernels, name), network.markov()
        fields = {"rope_parameters": rope_parameters(self.config.rope), "attention_bias": False}
        config: Any = ModelConfig(self.config.record() | fields | {"hidden_act": "silu"})
        reading = Config(config, torch.bfloat16)
        described = FAMILIES["qwen3"](reading)
        layers = list[Layer]()
        for i, layer in enumerate(described.layers):
            assert layer.attention is not None
            window, causal = self.config.attention(i)
            attention = replace(layer.attention, window=window, bidirectional=not causal)
            layers.append(replace(layer, attention=attention))
            if self.config.gemma:
                layers[i] = self._of_gemma(reading, layers[i], i)
            if self.config.conv_taps:
                convs = self._conv(i, "attention"), self._conv(i, "mlp")
                layers[i] = replace(layers[i], convs=convs)
        head = Linear((ParameterRows("model.fc.weight"),))
        stack = replace(described, layers=tuple(layers), head=head)
        own = {f"model.{name}": one for name, one in network.state_dict().items()}
        finite = all(bool(one.isfinite().all()) for one in own.values())
        given = own | {stack.embedding: self._inputs}
        parameters = DrafterParameters(config, torch.bfloat16, given)
        self.pool = PagePool(kv_shapes(stack), kernels)
        weights = name or (INT8 if finite else BFLOAT16)
        self._compiled = CompiledDrafter(parameters, stack, self.pool, weights)
        self._compiled.set_aux_layers([self.config.depth + 1])
        self._reading = self._make_reading(network, self._compiled.packed(stack.head))

    @cached_property
    def logits(self) -> NativeLinear:
        """The whole head, packed where it is needed: shortlists have rows of their own."""
        return self._pack.head(self._head)

    def read(self, batch: Batch, hidden: torch.Tensor) -> None:
        """See `TorchBlocks.read`."""
        listed, given = list_rows(batch), {"states": hidden.contiguous()}
        self._reading.run(listed, given, self._compiled.angles(max(listed.positions)))

    def run(self, caches: Sequence[Any], anchors: Sequence[int]) -> torch.Tensor:
        """See `TorchBlocks.run`."""
        if len(caches) > SEQUENCES:
            parts = (slice(SEQUENCES), slice(SEQUENCES, None))
            return torch.cat([self.run(caches[part], anchors[part]) for part in parts])
        config, size, listed = self.config, self.config.block_size, RowList()
        self._inputs[1 : 1 + len(anchors)] = self._embedded(torch.tensor(anchors))
        for i, cache in enumerate(caches):
            first = cache.length
            cache.reserve(first + size)
            places = range(first, first + size)
            seen = range(first + 1, first + size + 1)  # in a bidirectional layer all of the block
            tokens = [1 + i, *[0] * (size - 1)]
            listed.add(cache.table, tokens, places, places, seen, [()] * size, ())
        self._compiled(listed)
        return self._compiled.hidden.view(len(caches), size, -1)[:, size - config.drafted :]

    def candidates(
        self, logits: torch.Tensor, tokens: torch.Tensor | None, within: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TorchBlocks.candidates`."""
        (rows, count), names = logits.shape, torch.empty(logits.shape[1], dtype=torch.int64)
        kept, given = torch.empty(rows * count), None if tokens is None else tokens.data_ptr()
        call = logits.data_ptr(), rows, logits.stride(0), count, given, within
        n = self._pack.kernels.candidates(*call, names.data_ptr(), kept.data_ptr())
        return kept[: rows * n].view(rows, n), names[:n]

    def follow(self, state: BlockState, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """See `TorchBlocks.follow`."""
        scores, names, rank = state.scores, state.tokens.data_ptr(), self.config.markov_rank
        at, step, count = scores.data_ptr(), 4 * scores.stride(0), scores.shape[1]
        if state.gates is not None:
            return follow(state, places, self._markov)
        logits = torch.empty(len(places), count)
        before, after = [one.data_ptr() for one in self._markov]
        for i, (depth, token) in enumerate(places):
            row, to = before + 2 * rank * token, logits.data_ptr() + 4 * count * i
            self._pack.kernels.follow(at + depth * step, count, names, row, after, rank, to)
        return logits

    def _conv(self, i: int, name: str) -> BlockConv:
        c, at = self.config, f"model.layers.{i}.{name}_conv"
        shared = Linear((ParameterRows(f"{at}.kernel_projection.weight"),))
        return BlockConv(shared, f"{at}.base_kernel", c.conv_taps, c.conv_group, c.block_size)

    def _of_gemma(self, c: Config, layer: Layer, i: int) -> Layer:
        """Return one of Gemma 4's layers for one of Qwen3's."""
        attention, fed = layer.attention, layer.feed_forward
        assert attention is not None and isinstance(fed, FeedForward)
        keys = self.config.values_are_keys
        qkv = Linear(attention.qkv.weights[:2]) if keys else attention.qkv
        how: dict[str, Any] = {"value_norm": True, "values_are_keys": keys, "qkv": qkv}
        attention = replace(attention, scaling=1.0, **how)
        fed, scalar = replace(fed, activation="gelu_tanh"), f"model.layers.{i}.layer_scalar"
        return layer_of(c, i, attention, fed, AROUND, scalar=scalar)

    def _make_reading(self, network: BlockNetwork, fc: Packed) -> Program:
        """Return the program that reads committed tokens: keys and values of each layer."""
        program, epsilon = Program(self._pack.kernels), self.config.eps
        fused, normed = program.buffer(fc.outputs, True), program.buffer(fc.outputs)
        program.linear(fc, program.external("states", fc.inputs), fused)
        program.norm(fused, normed, network.hidden_norm.weight, epsilon)
        how = {"value_norm": self.config.gemma, "values_are_keys": self.config.values_are_keys}
        layers: Any = zip(network.layers, self.pool.shapes, self.pool.offsets, strict=True)
        for layer, shape, offset in layers:
            of = layer.self_attn
            packed = self._pack(*(of[name].weight for name in ("k_proj", "v_proj") if name in of))
            both, none = program.buffer(packed.outputs, True), program.buffer(packed.outputs)
            norms = [of[name].weight for name in ("q_norm", "k_norm")]
            program.linear(packed, normed, both)
            program.heads(both, none, 0, shape, offset, norms, epsilon, **how)
        return program


class BlockState(FeatureState):
    """What the block drafter keeps of one sequence.

    `cache`: keys and values of committed tokens before the anchor, and of nothing else. Of the tree
    that is being grown: `rows` `[drafted, d]`, `scores` `[drafted, s]`: U of `tokens` `[s]`,
    `confidence`, by depth: its logits, by the rows alone, with a selector `gates` `[drafted, r]`:
    what W1 is taken times, and where `follow` needs them `after` `[s, r]`: W2 of `tokens`.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        super().__init__(cache, ids, shortlist)
        self.rows = self.scores = torch.empty(0)
        self.tokens, self.confidence = torch.empty(0, dtype=torch.int64), list[float]()
        self.gates: torch.Tensor | None = None
        self.after: torch.Tensor | None = None

    def attach(self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor]) -> None:
        super().attach(chunks, tokens, hidden)
        if chunks and self.waiting:  # a row depends on its own token alone: the last is read
            self.unread.drop(1)

    def release(self) -> None:
        super().release()
        self.rows = self.scores = torch.empty(0)
        self.gates = self.after = None


class BlockDrafter(FeatureDrafter):
    """A block drafter: a `BlockNetwork` on the target's hidden states.

    The request for a tree's root reads the tokens that were committed since the last tree, whose
    keys and values stay, and runs the block of the anchor, which is the root. All other requests of
    the tree are answered without a pass: the distribution after a node depends on its depth and its
    token. It is over those of the scored tokens whose logit is near the likeliest one's at some
    depth: at most `within` below it, the Markov head, a selector and a softcap left out. Nodes as
    deep as the block is long get zeros: nothing is proposed there.

    The drafter takes the network over, and makes `model` return the hidden states that it reads
    (`Model.set_aux_layers`). `native`: let the native kernels run the network where they can.
    `weights`: the format that they keep its weights in; None: 8 bits.
    """

    kind = BlockState
    one_call = True

    def __init__(
        self,
        network: BlockNetwork,
        model: Model,
        *,
        native: bool = True,
        weights: str | None = None,
        within: float = WITHIN,
    ) -> None:
        self.network = network.to(model.device, model.dtype).eval().requires_grad_(False)
        self.vocab_size, self.device = model.vocab_size, model.device
        self.tokens, size = network.tokens, network.config.hidden_size
        self.head_size, self.within = None if self.tokens is not None else size, within
        model.set_aux_layers(network.config.taps)
        # weights of rows for the confidence, and what each token before adds
        self._confidence: tuple[torch.Tensor, Sequence[float]] | None = None
        if self.network.config.confidence:
            proj = self.network.confidence_head["proj"]
            (weight,), bias = (proj.get_parameter(name).float() for name in ("weight", "bias"))
            adds = torch.mv(network.markov()[0].float(), weight[size:]) + bias
            self._confidence = weight[:size], array("f", adds.tolist())
        kernels = network_kernels(model, network) if native else None
        self.passes: NativeBlocks | TorchBlocks = (
            NativeBlocks(network, kernels, weights) if kernels else TorchBlocks(network, model)
        )
        self.pool = self.passes.pool

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the candidates. See `Drafter.answer`.

        Raises `ValueError` where a tree's first request doesn't begin with the root, or where
        hidden states of committed tokens are missing.
        """
        if firsts := [request for request in requests if request.nodes[0] == 0]:
            choose_scorers(firsts)
            self._run([one.state for one in firsts], [one.tree for one in firsts])
        return [self._probs(request) for request in requests]

    def _read(self, states: Sequence[BlockState]) -> None:
        for part in in_parts(states, BlockState.readable):
            hidden = torch.cat([state.unread.first(count) for state, count in part])
            # a row depends on its hidden state alone, whatever its token
            batch = Batch([Chain(state.cache, [0] * count, 0) for state, count in part])
            self.passes.read(batch, hidden)
            for state, count in part:
                state.unread.drop(count)
                state.cache.commit(range(count))

    def _run(self, states: Sequence[BlockState], trees: Sequence[TokenTree]) -> None:
        self._read(states)
        for state in states:
            anchor = len(state.ids) - 1
            if state.cache.length != anchor:
                raise ValueError(
                    f"hidden states of {state.cache.length} tokens for {anchor} before the anchor"
                )
        anchors = [tree.token[0] for tree in trees]
        rows = self.passes.run([state.cache for state in states], anchors)
        for state, tree, part in zip(states, trees, rows, strict=True):
            state.tree, state.rows = tree, part
        self._score(states)

    def _score(self, states: Sequence[BlockState]) -> None:
        """Compute U of the candidates of all depths."""
        config = self.network.config
        nothing = [None if one.shortlist is None else one.shortlist.shared.none for one in states]
        for scored in score(states, [state.rows for state in states], nothing, self.passes):
            for i, logits in scored.split(scored.logits.float()):
                state = states[i]
                tokens = scored.tokens
                if tokens is None:  # the whole head, which may be padded
                    logits, tokens = logits[:, : self.vocab_size], self.tokens
                within = self.within / config.output_multiplier
                scores, state.tokens = self.passes.candidates(logits, tokens, within)
                if config.output_multiplier != 1:
                    scores = scores * config.output_multiplier
                if config.softcap:
                    scores = torch.tanh(scores / config.softcap) * config.softcap
                if config.top_k:
                    least = scores.topk(min(config.top_k, scores.shape[-1]), -1).values[:, -1:]
                    scores = scores.masked_fill(scores < least, -math.inf)
                    state.gates = self.network.gates(state.rows)
                state.scores, state.after = scores, None
                if self._confidence is not None:
                    state.confidence = (state.rows.float() @ self._confidence[0]).tolist()

    def _probs(self, request: DraftRequest) -> DraftProbs:
        state, tree, nodes = request.state, request.tree, request.nodes
        if tree is not state.tree:
            raise ValueError("a new tree: ask for its root first")
        deepest = len(state.scores) - 1
        places = [(min(tree.depth[node], deepest), tree.token[node]) for node in nodes]
        logits = self.passes.follow(state, places)
        probs, confidence = probs_of(logits, request.context.draft_temperature), list[float]()
        for i, node in enumerate(nodes):
            if tree.depth[node] > deepest:
                probs[i] = 0
        if self._confidence is not None:
            own, adds = state.confidence, self._confidence[1]
            summed = [own[depth] + adds[token] for depth, token in places]
            confidence = [0.5 + 0.5 * math.tanh(0.5 * logit) for logit in summed]
        return DraftProbs(probs, state.tokens, self.vocab_size, confidence=confidence)
