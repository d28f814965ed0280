"""The block drafter at work: one pass of its network serves a whole tree (`block_model.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quickbeam.drafters.base import DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.block_passes import NativeBlocks, TorchBlocks
from quickbeam.drafters.feature import FeatureDrafter, FeatureState, choose_scorers, in_parts, score
from quickbeam.drafters.largest import largest
from quickbeam.drafters.native import usable_kernels
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.models.base import Model, inference
from quickbeam.models.kv import SequenceCache
from quickbeam.tree import TokenTree

CANDIDATES = 64  # how many of the likeliest tokens of each depth are scored
WITHIN = 10.0  # by how much their logits may be below the likeliest token's


class BlockState(FeatureState):
    """What the block drafter keeps of one sequence.

    `cache`: keys and values of committed tokens before the anchor, and of nothing else. `rows`: of
    the tree that is being grown, `[drafted, d]`. `scores`: U of `tokens` `[s]`, `[drafted, s]`.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        super().__init__(cache, ids, shortlist)
        self.rows = self.scores = torch.empty(0)
        self.tokens = torch.empty(0, dtype=torch.int64)

    def adopt(
        self, chunks: Sequence[object], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        super().adopt(chunks, tokens, hidden)
        if chunks and self.waiting:  # a row depends on its own token alone: the last is read
            self.unread.drop(1)

    def release(self) -> None:
        super().release()
        self.rows = self.scores = torch.empty(0)


class BlockDrafter(FeatureDrafter[BlockState]):
    """A block drafter: a `BlockNetwork` on the target's hidden states.

    The request for a tree's root reads the tokens that were committed since the last tree, whose
    keys and values stay, and runs the block of the anchor, which is the root. The blocks of all
    sequences of a call are one pass. A block's own keys and values are overwritten by what comes
    next. All other requests of the tree are answered without a pass: the distribution after a node
    depends on its depth and its token. It is over the tokens that are among the `candidates`
    likeliest of some depth without the Markov head, and `within` so much of the likeliest one's
    logit. Nodes as deep as the block is long get zeros: nothing is proposed there.

    The drafter takes the network over. It makes `model` return the hidden states that the network
    reads (`Model.watch`). `native`: let the native kernels run the network where they can.
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
        candidates: int = CANDIDATES,
        within: float = WITHIN,
    ) -> None:
        self.network = network.to(model.device, model.dtype).eval().requires_grad_(False)
        self.vocab_size, self.device, self.candidates = model.vocab_size, model.device, candidates
        self.head_size, self.within = network.config.hidden_size, within
        model.watch(network.config.taps)
        found = usable_kernels(model, network)
        self.passes: NativeBlocks | TorchBlocks = (
            NativeBlocks(self.network, found, weights)
            if native and found is not None
            else TorchBlocks(self.network, model)
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
        """Write keys and values of all tokens whose hidden states are unread."""
        for part in in_parts(states, BlockState.readable):
            hidden = [state.unread.first(count) for state, count in part]
            self.passes.read([state.cache for state, _ in part], hidden)
            for state, count in part:
                state.commit(count)

    def _run(self, states: Sequence[BlockState], trees: Sequence[TokenTree]) -> None:
        """Run the blocks of the trees' roots in one pass."""
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
            state.tree, state.rows, state.calls = tree, part, state.calls + 1
        self._score(states)

    def _score(self, states: Sequence[BlockState]) -> None:
        """Compute U of the candidates of all depths."""
        nothing = [None if one.shortlist is None else one.shortlist.shared.none for one in states]
        for scored in score(states, [state.rows for state in states], nothing, self.passes):
            tokens = scored.tokens
            every = scored.logits.float()
            if tokens is None:
                every = every[:, : self.vocab_size]
            for i, logits in scored.split(every):
                floors, state = (logits.amax(-1) - self.within).tolist(), states[i]
                likely = [columns for columns, _ in largest(logits, self.candidates, floors)]
                columns = torch.tensor(sorted(set[int]().union(*likely)) or [0], device=self.device)
                state.tokens = columns if tokens is None else tokens[columns]
                state.scores = logits[:, columns]

    def _probs(self, request: DraftRequest) -> DraftProbs:
        """Return the distributions after the requested nodes."""
        state, tree, nodes = request.state, request.tree, request.nodes
        if tree is not state.tree:
            raise ValueError("a new tree: ask for its root first")
        previous = torch.tensor([tree.token[node] for node in nodes], device=self.device)
        depths = torch.tensor([tree.depth[node] for node in nodes], device=self.device)
        inside, rows = depths < len(state.scores), depths.clamp(max=len(state.scores) - 1)
        scores = state.scores[rows]
        if (bias := self.network.bias(previous, state.tokens)) is not None:
            scores = scores + bias.float()
        probs = probs_of(scores, request.context.draft_temperature) * inside[:, None]
        logits = self.network.confidence(state.rows[rows], previous)
        sure = () if logits is None else logits.float().sigmoid().tolist()
        return DraftProbs(probs, state.tokens, self.vocab_size, confidence=sure)
