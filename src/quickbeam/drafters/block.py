"""The block drafter at work: one pass of its network serves a whole tree (`block_model.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.drafters.unread import Unread
from quickbeam.models.base import Model, inference
from quickbeam.models.gathered import Behind, GatheredStep, RowPool, RowStore
from quickbeam.models.kv import Layer, LayerShape, SequenceCache
from quickbeam.tree import TokenTree

CHUNK = 512  # the most committed tokens that are read at once


class BlockState(DrafterState):
    """What the block drafter keeps of one sequence.

    `cache`: keys and values of committed tokens before the anchor, and of nothing else. `logits`:
    U of the tree that is being grown, `[drafted, vocab]`. `calls`: how many passes were run.
    """

    def __init__(self, cache: SequenceCache, ids: Sequence[int]) -> None:
        self.cache, self.ids, self.calls = cache, list(ids), 0
        self.unread = Unread()
        self.tree: TokenTree | None = None
        self.logits = torch.empty(0)

    @property
    def waiting(self) -> int:
        return len(self.unread)

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)

    def append_hidden(self, hidden: torch.Tensor) -> None:
        self.unread.append(hidden)

    def share(self, chunk: int, tokens: int) -> Any:
        """Return the rows of these tokens, or None if they were not read yet."""
        whole = (chunk + 1) * tokens <= self.cache.length
        return self.cache.share(chunk, tokens) if whole else None

    def adopt(
        self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        if not chunks:
            return self.unread.reset(hidden)
        self.cache.adopt(chunks, tokens)
        self.unread.reset(hidden)
        if len(self.unread):  # a row depends on its own token alone: the last one adopted is read
            self.unread.drop(1)

    def unread_hidden(self, chunk: int, tokens: int) -> torch.Tensor | None:
        begin = chunk * tokens - self.cache.length
        if not 0 <= begin <= len(self.unread) - tokens:
            return None
        return self.unread.first(begin + tokens)[begin:].clone()

    def release(self) -> None:
        self.cache.release()
        self.unread.reset()
        self.tree, self.logits = None, torch.empty(0)


class BlockDrafter(Drafter):
    """A block drafter: a `BlockNetwork` on the target's hidden states.

    The request for a tree's root reads the tokens that were committed since the last tree, whose
    keys and values stay, and runs the block of the anchor, which is the root. The blocks of all
    sequences of a call are one pass. A block's own keys and values are overwritten by what comes
    next. All other requests of the tree are answered without a pass: the distribution after a node
    depends on its depth and its token. Nodes as deep as the block is long get zeros: nothing is
    proposed there.

    The drafter takes the network over. It makes `model` return the hidden states that the network
    reads (`Model.watch`).
    """

    name = "drafter"
    needs_hidden = True
    pool: RowPool

    def __init__(self, network: BlockNetwork, model: Model) -> None:
        config = network.config
        self.network = network.to(model.device, model.dtype).eval().requires_grad_(False)
        self.vocab_size, self.device = model.vocab_size, model.device
        model.watch(config.taps)
        shape = LayerShape(config.kv_heads, config.head_dim, config.head_dim)
        self.pool = RowPool([shape] * config.depth, model.dtype, model.device)
        scale = config.head_dim**-0.5
        self._layers = [Layer(i, scale, None, None, None) for i in range(config.depth)]
        size = config.block_size
        visible = torch.ones(size, size, dtype=torch.bool)
        self._visible = (visible.tril() if config.causal else visible).numpy()

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> BlockState:
        self.check_shortlist(shortlist)
        return BlockState(self.pool.new(), ids)

    @inference
    def read(self, states: Sequence[DrafterState], least: int = 1, end: int | None = None) -> None:
        # `end` bounds the hidden states that were given, so it needs no look here
        for state in states:
            if isinstance(state, BlockState) and len(state.unread) >= max(1, least):
                self._read(state)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions `[len(nodes), vocab]`. See `Drafter.answer`.

        Raises `ValueError` where a tree's first request doesn't begin with the root, or where
        hidden states of committed tokens are missing.
        """
        if firsts := [request for request in requests if request.nodes[0] == 0]:
            self._run([self._state(one) for one in firsts], [one.tree for one in firsts])
        return self._probs(requests)

    def _state(self, request: DraftRequest) -> BlockState:
        state: BlockState = request.context.states[self.name]
        return state

    def _read(self, state: BlockState) -> None:
        """Write keys and values of all tokens whose hidden states are unread."""
        while len(state.unread):
            hidden = state.unread.first(min(len(state.unread), CHUNK))
            fused, count = self.network.fuse(hidden), len(hidden)
            assert isinstance(state.cache, RowStore)
            step = GatheredStep([Behind(state.cache, range(count))], self.pool)
            for i, layer in enumerate(self._layers):
                key, value = self.network.key_value(i, fused, step.positions)
                step.write(layer, key.transpose(0, 1), value.transpose(0, 1))
            state.cache.commit(range(count))
            state.unread.drop(count)

    def _run(self, states: Sequence[BlockState], trees: Sequence[TokenTree]) -> None:
        """Run the blocks of the trees' roots in one pass."""
        blocks = []
        for state in states:
            self._read(state)
            anchor = len(state.ids) - 1
            if state.cache.length != anchor:
                raise ValueError(
                    f"hidden states of {state.cache.length} tokens for {anchor} before the anchor"
                )
            assert isinstance(state.cache, RowStore)
            rows_of_block = range(len(self._visible))
            blocks.append(Behind(state.cache, rows_of_block, visible=self._visible))
        step = GatheredStep(blocks, self.pool)

        def attend(
            i: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            step.write(self._layers[i], key.transpose(0, 1), value.transpose(0, 1))
            return step.attend(query, self._layers[i])

        anchors = [tree.token[0] for tree in trees]
        rows = self.network(anchors, [state.cache.length for state in states], attend)
        logits = self.network.logits(rows)[..., : self.vocab_size].float()
        for state, tree, part in zip(states, trees, logits, strict=True):
            state.tree, state.logits = tree, part
            state.calls += 1

    def _probs(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return the distributions after all requested nodes, by one product of the Markov head."""
        tokens = [request.tree.token[node] for request in requests for node in request.nodes]
        bias = self.network.bias(torch.tensor(tokens, device=self.device))
        counts, drafts = [len(request.nodes) for request in requests], []
        parts = [None] * len(requests) if bias is None else bias.split_with_sizes(counts)
        for request, part in zip(requests, parts, strict=True):
            state, tree = self._state(request), request.tree
            if tree is not state.tree:
                raise ValueError("a new tree: ask for its root first")
            depths = torch.tensor([tree.depth[node] for node in request.nodes], device=self.device)
            inside = depths < len(state.logits)
            scores = state.logits[depths.clamp(max=len(state.logits) - 1)]
            if part is not None:
                scores = scores + part[:, : self.vocab_size].float()
            probs = probs_of(scores, request.context.draft_temperature)
            drafts.append(DraftProbs(probs * inside[:, None]))
        return drafts
