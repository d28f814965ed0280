"""The block drafter at work: one pass of its network serves a whole tree (`block_model.py`)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from quickbeam.drafters.base import DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.feature import FeatureDrafter, FeatureState, in_chunks
from quickbeam.drafters.passes import Head, NativePasses, ScoredRows, TorchPasses, passes_of
from quickbeam.drafters.scoring import choose_scorers, score
from quickbeam.drafters.shortlist.shortlist import Shortlist, ShortlistState
from quickbeam.models.base import Batch, Block, Chain, Model, Part, RankedRows, inference
from quickbeam.models.cache.kv import Page, SequenceCache
from quickbeam.models.native.library import Kernels
from quickbeam.models.torch.likeliest import rank_tokens, ranked_rows
from quickbeam.models.torch.pages import to_device

WITHIN = 10.0  # by how much a candidate's logit may be below that of the likeliest token


def output_scores(
    config: BlockConfig, logits: torch.Tensor, dropped: torch.Tensor | None = None
) -> torch.Tensor:
    """Return U of the head's logits `[..., drafted, s]`; -inf for tokens that can't be drafted.

    `dropped`: which tokens are no candidates, of the same dimensions.
    """
    scores = logits
    if config.output_multiplier != 1:
        scores = scores * config.output_multiplier
    if config.softcap:
        scores = torch.tanh(scores / config.softcap) * config.softcap
    if dropped is not None:
        scores = scores.masked_fill(dropped, -math.inf)
    if config.top_k:
        top = scores.topk(min(config.top_k, scores.shape[-1]), -1).values
        scores = scores.masked_fill(scores < top[..., -1:], -math.inf)
    return scores


def follow(
    scores: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    gates: torch.Tensor | None,
) -> torch.Tensor:
    """Return the logits `[..., n, s]` after n nodes, whose U is `scores`.

    `before`: W1 of the nodes' tokens, `[..., n, r]`. `after`: W2 of the tokens that are scored,
    float32 `[..., s, r]`. `gates`: with a selector, the factors of W1, `[..., n, r]`.
    """
    if not before.shape[-1]:
        return scores
    factors = before.float() if gates is None else before.float() * gates
    return scores + factors @ after.mT


class BlockState(FeatureState):
    """What the block drafter keeps of one sequence, and of the tree that is being proposed.

    - `cache`: keys and values of the committed tokens before the anchor, and of nothing else.
    - `tokens`: `[s]`, the tokens that are scored; None: all of the vocabulary. `scores`:
      `[drafted, s]`, U of these tokens.
    - `confidence`: by depth, the part of its logit that depends on the row alone.
    - `gates`: with a selector, `[drafted, r]`, the factors of W1.
    - `after`: where `follow` needs it, `[s, r]`, W2 of the tokens that are scored.
    - `ranked`: the distributions of the first depths, where the pass computes them.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        super().__init__(cache, ids, shortlist)
        self.scores = torch.empty(0)
        self.tokens: torch.Tensor | None = None
        self.confidence = list[float]()
        self.gates: torch.Tensor | None = None
        self.after: torch.Tensor | None = None
        self.ranked: RankedRows | None = None

    def attach(
        self, chunks: Sequence[list[Page]], tokens: int, hidden: Sequence[torch.Tensor]
    ) -> None:
        super().attach(chunks, tokens, hidden)
        if chunks and self.waiting:  # a row depends on its own token alone: the last is read
            self.unread.drop(1)

    def release(self) -> None:
        super().release()
        self.scores = torch.empty(0)
        self.tokens = self.gates = self.after = self.ranked = None


class TorchBlocks:
    """Runs blocks in PyTorch: candidates and the distributions after the roots are in the pass.

    Without a Markov head and a selector, the distributions of all depths are. Of each token that is
    no candidate, U is -inf. `confidence`: the confidence head's weights of rows, `[d]`.
    """

    def __init__(
        self,
        network: BlockNetwork,
        passes: TorchPasses,
        within: float,
        confidence: torch.Tensor | None,
    ) -> None:
        self._network = network
        self._config: BlockConfig = network.config
        self._passes = passes
        self._within = within
        self._confidence = confidence
        self._tokens = network.tokens
        self._before, self._after = network.markov()
        # W2 of the head's tokens, in float32
        rows = self._after if self._tokens is None else self._after[self._tokens]
        self._after_of_head = rows.float()
        # of how many depths the pass computes distributions
        self._ranked = 1 if self._before.shape[1] else self._config.drafted

    def run(self, states: Sequence[BlockState], roots: Sequence[int]) -> None:
        """Run the blocks of `roots`, the states' last tokens."""
        groups: dict[Shortlist | None, list[int]] = {}
        for number, state in enumerate(states):
            shortlist = state.shortlist
            groups.setdefault(None if shortlist is None else shortlist.shared, []).append(number)
        for shared, group in groups.items():
            self._run(shared, [states[i] for i in group], [roots[i] for i in group])

    def _run(
        self, shared: Shortlist | None, states: Sequence[BlockState], roots: Sequence[int]
    ) -> None:
        config = self._config
        parts: list[Part] = [
            Block(state.cache, config.block_size, root, config.drafted)
            for state, root in zip(states, roots, strict=True)
        ]
        head = Head(True, shared, self._tokens, self._finish, self._inputs)
        outputs = self._passes.run(Batch(parts), None, head, [state.scorer for state in states])
        scores, gates, confidence, probs, likeliest = outputs.finished
        ranked_count = len(states) * self._ranked
        ranked = ranked_rows(probs[:ranked_count], likeliest[:ranked_count])
        confidences = confidence.tolist() if self._confidence is not None else [()] * len(states)
        for i, state in enumerate(states):
            state.scores = scores[i]
            state.gates = gates[i] if config.top_k else None
            state.confidence = list(confidences[i])
            state.ranked = ranked.part(slice(i * self._ranked, (i + 1) * self._ranked))
            state.tokens = self._tokens
            state.after = self._after_of_head
            if outputs.columns is not None:
                state.tokens = outputs.columns[i]
                state.after = None
            state.used.calls += 1
            state.used.tokens += state.ranked.scored[0]

    def probs(
        self, state: BlockState, nodes: Sequence[tuple[int, int]], temperature: float
    ) -> DraftProbs:
        """Return the distributions after nodes, by the depth and the token of each."""
        assert state.ranked is not None
        depths = [depth for depth, _ in nodes]
        ranked = state.ranked
        if max(depths) < self._ranked:
            probs = torch.cat([ranked.probs[depth : depth + 1] for depth in depths])
            likeliest = [ranked.likeliest[depth] for depth in depths]
        else:
            ranked = self._follow(state, nodes)
            probs, likeliest = ranked.probs, list(ranked.likeliest)
        vocab = self._config.vocab_size
        return DraftProbs(probs, state.tokens, vocab, likeliest=likeliest).at(temperature)

    def _follow(self, state: BlockState, nodes: Sequence[tuple[int, int]]) -> RankedRows:
        device = state.scores.device
        depths, previous = to_device(np.array(nodes, np.int64).T.copy(), device)
        columns = None if state.tokens is None else state.tokens[None]
        if state.after is None:  # once a tree
            assert state.tokens is not None
            state.after = F.embedding(state.tokens, self._after).float()
        logits = follow(
            state.scores.index_select(0, depths),
            F.embedding(previous, self._before),
            state.after,
            None if state.gates is None else state.gates.index_select(0, depths),
        )
        return ranked_rows(*rank_tokens(logits, columns, torch.zeros_like(depths)))

    # Nothing below reads from the device: it is a part of passes.

    def _inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the rows of blocks read, of whose tokens the first is the anchor's."""
        return self._network.inputs(tokens[:: self._config.block_size])

    def _finish(self, scored: ScoredRows) -> Sequence[torch.Tensor]:
        """Return U, gates, confidences, and the distributions of each block's first depths.

        They are `[blocks, drafted, s]`, `[blocks, drafted, r]` and `[blocks, drafted]`, then what
        `rank_tokens` returns, of as many rows a block as depths are ranked.
        """
        config = self._config
        shape = len(scored.logits) // config.drafted, config.drafted
        # rows behind those of whole blocks are padding
        logits, feature, token, sequence = (
            torch.unflatten(rows[: math.prod(shape)], 0, shape)
            for rows in (scored.logits.float(), scored.feature, scored.token, scored.sequence)
        )
        floors = logits.amax(-1, keepdim=True) - self._within / config.output_multiplier
        unlikely = (logits < floors) | (logits == -math.inf)
        scores = output_scores(config, logits, unlikely.all(1, keepdim=True))
        nothing = scores.new_empty(0)
        gates = self._network.gates(feature) if config.top_k else None
        confidence = nothing if self._confidence is None else feature.float() @ self._confidence

        sequence = sequence[:, : self._ranked]
        after = self._after_of_head
        if scored.columns is not None and self._tokens is None:
            columns = scored.columns.clamp(min=0)[sequence[:, 0]]
            after = F.embedding(columns, self._after).float()
        after_nodes = follow(
            scores[:, : self._ranked],
            F.embedding(token[:, : self._ranked], self._before),
            after,
            None if gates is None else gates[:, : self._ranked],
        )
        ranked = rank_tokens(after_nodes.flatten(0, 1), scored.columns, sequence.flatten())
        return scores, nothing if gates is None else gates, confidence, *ranked


class NativeBlocks:
    """Runs blocks by the native kernels, which compute U of the candidates alone.

    `confidence`: as of `TorchBlocks`.
    """

    def __init__(
        self,
        network: BlockNetwork,
        passes: NativePasses,
        within: float,
        confidence: torch.Tensor | None,
    ) -> None:
        self._network = network
        self._config: BlockConfig = network.config
        self._passes = passes
        self._within = within
        self._confidence = confidence
        self._before, self._after = network.markov()
        self._kernels = passes.pool.kernels

    def run(self, states: Sequence[BlockState], roots: Sequence[int]) -> None:
        """Run the blocks of `roots`, the states' last tokens."""
        config = self._config
        parts: list[Part] = [
            Block(state.cache, config.block_size, root, config.drafted)
            for state, root in zip(states, roots, strict=True)
        ]
        inputs = self._network.inputs(torch.tensor(roots))
        rows = self._passes.run(Batch(parts), inputs).normed
        blocks = torch.unflatten(rows, 0, (len(states), -1))[:, -config.drafted :]
        clusters: list[torch.Tensor | None] = []
        for state in states:
            clusters.append(None if state.shortlist is None else state.shortlist.shared.none)
        for number, logits, tokens in score(states, list(blocks), clusters, self._passes.score_all):
            state = states[number]
            logits = logits.float()
            if tokens is None:  # the whole head, which may be padded
                logits = logits[:, : config.vocab_size]
                tokens = self._network.tokens
            logits, state.tokens = self.likely(logits, tokens)
            state.scores = output_scores(config, logits)
            state.after = None
            if config.top_k:
                state.gates = self._network.gates(blocks[number])
            if self._confidence is not None:
                state.confidence = (blocks[number].float() @ self._confidence).tolist()

    def probs(
        self, state: BlockState, nodes: Sequence[tuple[int, int]], temperature: float
    ) -> DraftProbs:
        """Return the distributions after nodes, by the depth and the token of each."""
        values = probs_of(self.follow(state, nodes), temperature)
        return DraftProbs(values, state.tokens, self._config.vocab_size)

    def likely(
        self, logits: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns of `logits` `[drafted, s]` that are likely, and their tokens.

        In some row they are at most `within` below the largest, or NaN. `tokens`: see
        `ScoredState`.
        """
        rows, columns = logits.shape
        names = torch.empty(columns, dtype=torch.int64)
        kept = torch.empty(rows * columns)
        count = self._kernels.candidates(
            logits.data_ptr(),
            rows,
            logits.stride(0),
            columns,
            None if tokens is None else tokens.data_ptr(),
            self._within / self._config.output_multiplier,
            names.data_ptr(),
            kept.data_ptr(),
        )
        return kept[: rows * count].view(rows, count), names[:count]

    def follow(self, state: BlockState, nodes: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the logits `[n, s]` of a state's candidates after n nodes, by W1 and W2."""
        scores = state.scores
        assert state.tokens is not None
        if state.gates is not None:
            if state.after is None:  # once a tree
                state.after = F.embedding(state.tokens, self._after).float()
            depths, previous = torch.tensor(nodes).unbind(-1)
            before = F.embedding(previous, self._before)
            return follow(scores[depths], before, state.after, state.gates[depths])
        tokens = state.tokens.data_ptr()
        rank = self._before.shape[1]
        count = scores.shape[1]
        logits = torch.empty(len(nodes), count)
        for i, (depth, token) in enumerate(nodes):
            source = scores.data_ptr() + 4 * scores.stride(0) * depth
            row = self._before.data_ptr() + 2 * rank * token
            target = logits.data_ptr() + 4 * count * i
            self._kernels.follow(source, count, tokens, row, self._after.data_ptr(), rank, target)
        return logits


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
        size = network.config.hidden_size
        self.head_size = None if network.tokens is not None else size
        model.set_aux_layers(network.config.aux_layers)
        confidence: torch.Tensor | None = None
        self._confidence: Sequence[float] | None = None  # what it adds for each token before
        if network.config.confidence:
            weight, bias = (tensor.float() for tensor in network.confidence_weights())
            of_tokens = torch.mv(network.markov()[0].float(), weight[size:]) + bias
            confidence = weight[:size]
            self._confidence = array("f", of_tokens.tolist())
        self.passes = passes_of(network, model, kernels, weights)
        self.pool = self.passes.pool
        self.blocks: TorchBlocks | NativeBlocks
        if isinstance(self.passes, TorchPasses):
            self.blocks = TorchBlocks(network, self.passes, within, confidence)
        else:
            self.blocks = NativeBlocks(network, self.passes, within, confidence)

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
        self.blocks.run(states, [request.tree.token[0] for request in requests])
        for request in requests:
            request.state.tree = request.tree

    def _probs(self, request: DraftRequest) -> DraftProbs:
        state = request.state
        tree = request.tree
        nodes = request.nodes
        if tree is not state.tree:
            raise ValueError("a new tree: ask for its root first")
        deepest = len(state.scores) - 1
        followed = [(min(tree.depth[node], deepest), tree.token[node]) for node in nodes]
        probs = self.blocks.probs(state, followed, request.context.draft_temperature)
        too_deep = [i for i, node in enumerate(nodes) if tree.depth[node] > deepest]
        if too_deep:
            probs = probs.emptied(too_deep)
        confidence = list[float]()
        if self._confidence is not None:
            by_depth = state.confidence
            by_token = self._confidence
            summed = [by_depth[depth] + by_token[token] for depth, token in followed]
            confidence = [0.5 + 0.5 * math.tanh(0.5 * logit) for logit in summed]
        return probs._replace(confidence=confidence)
