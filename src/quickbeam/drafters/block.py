"""The block drafter at work: one pass of its network serves a whole tree (`block_model.py`)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quickbeam.drafters.base import DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.feature import (
    FeatureDrafter,
    FeatureState,
    choose_scorers,
    in_chunks,
    score,
)
from quickbeam.drafters.passes import NativePasses, passes_of
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.models.base import Batch, Block, Chain, Model, inference
from quickbeam.models.cache.kv import Page, SequenceCache
from quickbeam.models.native.library import Kernels

WITHIN = 10.0  # by how much a candidate's logit may be below that of the likeliest token


class TorchCandidates:
    """Finds a block's candidates, and their logits, by PyTorch's operators: the reference.

    `markov`: W1 and W2.
    """

    def __init__(self, markov: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.markov = markov

    def likely(
        self, logits: torch.Tensor, tokens: torch.Tensor | None, within: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns of `logits` `[drafted, s]` that are likely, and their tokens.

        In some row they are at most `within` below the largest, or NaN. `tokens`: see `ScoredRows`.
        """
        floors = logits.amax(-1, keepdim=True) - within
        columns = (~(logits < floors)).any(0).nonzero()[:, 0]
        names = columns if tokens is None else tokens.index_select(0, columns)
        return logits.index_select(1, columns), names

    def follow(self, state: BlockState, nodes: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the logits `[n, s]` of a state's candidates after n nodes, by W1 and W2.

        `nodes`: the depth of each, and its token.
        """
        depths, tokens = torch.tensor(nodes, device=state.scores.device).unbind(-1)
        before = F.embedding(tokens, self.markov[0]).float()
        if state.after is None:  # once a tree
            state.after = F.embedding(state.tokens, self.markov[1]).float()
        if state.gates is not None:
            before = before * state.gates.index_select(0, depths)
        return torch.addmm(state.scores.index_select(0, depths), before, state.after.T)


class NativeCandidates(TorchCandidates):
    """What `TorchCandidates` finds, by the native kernels."""

    def __init__(self, markov: tuple[torch.Tensor, torch.Tensor], kernels: Kernels) -> None:
        super().__init__(markov)
        self._kernels = kernels

    def likely(
        self, logits: torch.Tensor, tokens: torch.Tensor | None, within: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = logits.shape
        names = torch.empty(columns, dtype=torch.int64)
        kept = torch.empty(rows * columns)
        count = self._kernels.candidates(
            logits.data_ptr(),
            rows,
            logits.stride(0),
            columns,
            None if tokens is None else tokens.data_ptr(),
            within,
            names.data_ptr(),
            kept.data_ptr(),
        )
        return kept[: rows * count].view(rows, count), names[:count]

    def follow(self, state: BlockState, nodes: Sequence[tuple[int, int]]) -> torch.Tensor:
        if state.gates is not None:
            return super().follow(state, nodes)
        scores = state.scores
        tokens = state.tokens.data_ptr()
        before, after = self.markov
        rank = before.shape[1]
        count = scores.shape[1]
        logits = torch.empty(len(nodes), count)
        for i, (depth, token) in enumerate(nodes):
            source = scores.data_ptr() + 4 * scores.stride(0) * depth
            row = before.data_ptr() + 2 * rank * token
            target = logits.data_ptr() + 4 * count * i
            self._kernels.follow(source, count, tokens, row, after.data_ptr(), rank, target)
        return logits


class BlockState(FeatureState):
    """What the block drafter keeps of one sequence, and of the tree that is being proposed.

    - `cache`: keys and values of the committed tokens before the anchor, and of nothing else.
    - `rows`: `[drafted, d]`, the block's rows that draft.
    - `tokens`: `[s]`, the candidates. `scores`: `[drafted, s]`, U of the candidates.
    - `confidence`: by depth, the part of its logit that depends on the row alone.
    - `gates`: with a selector, `[drafted, r]`, the factors of W1.
    - `after`: where `follow` needs it, `[s, r]`, W2 of the candidates.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        super().__init__(cache, ids, shortlist)
        self.rows = self.scores = torch.empty(0)
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.confidence = list[float]()
        self.gates: torch.Tensor | None = None
        self.after: torch.Tensor | None = None

    def attach(
        self, chunks: Sequence[list[Page]], tokens: int, hidden: Sequence[torch.Tensor]
    ) -> None:
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
    keys and values stay. Then it runs the block of the anchor, which is the root. All other
    requests of the tree are answered without a pass: the distribution after a node depends on its
    depth and its token. It is over the candidates: the scored tokens whose logit is at most
    `within` below the largest logit at some depth. That is decided without the Markov head, a
    selector and a softcap. Nodes as deep as the block is long get zeros: nothing is proposed there.

    The drafter takes the network over, and makes `model` return the hidden states that it reads
    (`Model.set_aux_layers`). `kernels`: run the network if they can; None: PyTorch does. `weights`:
    the format that the kernels keep its weights in; None: 8 bits.
    """

    kind = BlockState
    one_call = True

    def __init__(
        self,
        network: BlockNetwork,
        model: Model,
        kernels: Kernels | None,
        *,
        weights: str | None = None,
        within: float = WITHIN,
    ) -> None:
        self.network = network.to(model.device, model.dtype).eval().requires_grad_(False)
        self.vocab_size = model.vocab_size
        self.device = model.device
        self.tokens = network.tokens
        size = network.config.hidden_size
        self.head_size = None if self.tokens is not None else size
        self.within = within
        model.set_aux_layers(network.config.aux_layers)
        # the confidence's weights of rows, and what it adds for each token before
        self._confidence: tuple[torch.Tensor, Sequence[float]] | None = None
        if network.config.confidence:
            weight, bias = (tensor.float() for tensor in network.confidence_weights())
            of_tokens = torch.mv(network.markov()[0].float(), weight[size:]) + bias
            self._confidence = weight[:size], array("f", of_tokens.tolist())
        self.passes = passes_of(network, model, kernels, weights)
        self.pool = self.passes.pool
        self.candidates = TorchCandidates(network.markov())
        if isinstance(self.passes, NativePasses):
            self.candidates = NativeCandidates(network.markov(), self.passes.pool.kernels)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the candidates. See `Drafter.answer`.

        Raises `ValueError` where a tree's first request doesn't begin with the root, or where
        hidden states of committed tokens are missing.
        """
        firsts = [request for request in requests if request.nodes[0] == 0]
        if firsts:
            choose_scorers(firsts)
            self._run(firsts)
        return [self._probs(request) for request in requests]

    def _read(self, states: Sequence[BlockState]) -> None:
        for chunk in in_chunks(states, BlockState.readable):
            hidden = torch.cat([state.unread.first(count) for state, count in chunk])
            # a row depends on its hidden state alone, whatever its token
            batch = Batch([Chain(state.cache, [0] * count, wanted=0) for state, count in chunk])
            self.passes.write_keys(batch, hidden, fuse=True)
            for state, count in chunk:
                state.unread.drop(count)
                state.cache.commit(range(count))

    def _run(self, requests: Sequence[DraftRequest]) -> None:
        """Run the blocks of requested roots, and score them."""
        states: list[BlockState] = [request.state for request in requests]
        self._read(states)
        for state in states:
            anchor = len(state.ids) - 1
            if state.cache.length != anchor:
                raise ValueError(
                    f"hidden states of {state.cache.length} tokens for {anchor} before the anchor"
                )
        config = self.network.config
        roots = [request.tree.token[0] for request in requests]
        anchors = torch.tensor(roots, device=self.device)
        batch = Batch([Block(state.cache, config.block_size) for state in states])
        rows = self.passes.run(batch, self.network.inputs(anchors)).normed
        blocks = torch.unflatten(rows, 0, (len(states), -1))[
            :, config.block_size - config.drafted :
        ]
        for request, block in zip(requests, blocks, strict=True):
            request.state.tree = request.tree
            request.state.rows = block
        self._score(states)

    def _score(self, states: Sequence[BlockState]) -> None:
        """Compute U of the candidates of all depths."""
        config = self.network.config
        clusters: list[torch.Tensor | None] = []
        for state in states:
            clusters.append(None if state.shortlist is None else state.shortlist.shared.none)
        for scored in score(states, [state.rows for state in states], clusters, self.passes):
            state = states[scored.number]
            tokens = scored.tokens
            logits = scored.logits.float()
            if tokens is None:  # the whole head, which may be padded
                logits = logits[:, : self.vocab_size]
                tokens = self.tokens
            within = self.within / config.output_multiplier
            scores, state.tokens = self.candidates.likely(logits, tokens, within)
            if config.output_multiplier != 1:
                scores = scores * config.output_multiplier
            if config.softcap:
                scores = torch.tanh(scores / config.softcap) * config.softcap
            if config.top_k:
                top = scores.topk(min(config.top_k, scores.shape[-1]), -1).values
                scores = scores.masked_fill(scores < top[:, -1:], -math.inf)
                state.gates = self.network.gates(state.rows)
            state.scores = scores
            state.after = None
            if self._confidence is not None:
                state.confidence = (state.rows.float() @ self._confidence[0]).tolist()

    def _probs(self, request: DraftRequest) -> DraftProbs:
        state = request.state
        tree = request.tree
        nodes = request.nodes
        if tree is not state.tree:
            raise ValueError("a new tree: ask for its root first")
        deepest = len(state.scores) - 1
        followed = [(min(tree.depth[node], deepest), tree.token[node]) for node in nodes]
        logits = self.candidates.follow(state, followed)
        probs = probs_of(logits, request.context.draft_temperature)
        confidence = list[float]()
        for i, node in enumerate(nodes):
            if tree.depth[node] > deepest:
                probs[i] = 0
        if self._confidence is not None:
            by_depth = state.confidence
            by_token = self._confidence[1]
            summed = [by_depth[depth] + by_token[token] for depth, token in followed]
            confidence = [0.5 + 0.5 * math.tanh(0.5 * logit) for logit in summed]
        return DraftProbs(probs, state.tokens, self.vocab_size, confidence=confidence)
