"""A smaller causal language model with the target's vocabulary as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from quickbeam.draft.base import Drafter, DrafterState, DraftRequest, Laws, law_of
from quickbeam.errors import InvalidInput
from quickbeam.shortlist.shortlist import Shortlist
from quickbeam.target.batch import Batch, Chain, Draft
from quickbeam.target.kv_cache import Pool, SequenceCache
from quickbeam.target.model import Model
from quickbeam.target.native.quantised import BFLOAT16
from quickbeam.target.streamed_pass import Source
from quickbeam.target.weight_file import WeightFile
from quickbeam.tree import TokenTree

# committed tokens not run yet beyond which they are read as a prompt is: without the logits of each
GAP = 64


class LMState(DrafterState):
    """One sequence's keys and values in the drafter, and the shadow of its growing tree. `calls`:
    passes over trees."""

    def __init__(self, cache: SequenceCache, ids: Sequence[int]) -> None:
        self.cache, self.ids, self.calls = cache, list(ids), 0
        self.tree: TokenTree | None = None  # being grown
        self.shadow: TokenTree | None = None
        self.done = 0  # nodes of the shadow that were run
        self.place: dict[int, int] = {}  # node of the tree: node of the shadow

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)

    def share(self, chunk: int, tokens: int) -> Any:
        return (
            self.cache.share(chunk, tokens) if (chunk + 1) * tokens <= self.cache.length else None
        )

    def adopt(
        self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        self.cache.adopt(chunks, tokens)

    def release(self) -> None:
        self.cache.release()
        self.tree = self.shadow = None


class LMDrafter(Drafter):
    """Laws of the next token from any causal LM of transformers whose token ids mean what the
    target's do (`check_vocabulary`).

    A sequence keeps the keys and values of what the model has read, as it does in the target. Of a
    growing tree the model runs only the nodes that it is asked for: they form its shadow, a tree of
    its own, which grows by one pass a call. What was accepted of the last shadow stays computed;
    the committed tokens that are not (accepted leaves, which nobody asked for) lead the next shadow
    as a chain that ends in the root, so catching up takes no pass of its own.

    `vocab_size`: width of the target's logits, and of the laws given. Tokens beyond this model's
    own have probability 0. Top-k, top-p and penalties of a request don't shape the laws, only its
    temperature does: no need of exactness, and the model's own law is what it knows. Takes the
    model over, as `Model` does (`weights`, `kept` and `source` as there); raises `InvalidInput` for
    models that `Model` can't run.
    """

    name = "drafter"
    pool: Pool

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        *,
        fast: bool = True,
        weights: str = BFLOAT16,
        kept: WeightFile | None = None,
        source: Source | None = None,
    ) -> None:
        own = int(model.get_output_embeddings().weight.shape[0])
        if own < vocab_size:  # so that any token that the target can emit can be read
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        self.model = Model(model, fast=fast, exact=False, weights=weights, kept=kept, source=source)
        self.pool, self.context_length = self.model.pool, self.model.context_length
        self._vocab_size, self._shared = vocab_size, min(own, vocab_size)

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> LMState:
        self.check_shortlist(shortlist)
        return LMState(self.model.pool.new(), ids)

    @torch.inference_mode()
    def read(self, states: Sequence[DrafterState], least: int = 1) -> None:
        for state in states:
            assert isinstance(state, LMState)
            if len(state.ids) - 1 - state.cache.length >= max(least, GAP):
                self._read(state)

    @torch.inference_mode()
    def answer(self, requests: Sequence[DraftRequest]) -> list[Laws]:
        """Laws `[len(nodes), vocab]` float32, on the drafter's device, by one pass (see `Drafter`).

        Raises `ValueError` where a tree's first request doesn't begin with the root or a node's
        parent was never asked for.
        """
        batch = Batch()
        for request in requests:
            state = self._state(request)
            if request.nodes[0] == 0:
                state.shadow, state.place = self._catch_up(state)
                state.tree, state.done = request.tree, 0
            if state.shadow is None or request.tree is not state.tree:
                raise ValueError("a new tree: ask for its root first")
            for node in request.nodes:
                if node == 0:
                    continue
                if (parent := state.place.get(request.tree.parent[node])) is None:
                    raise ValueError(
                        f"node {node}: ask for its parent {request.tree.parent[node]} first"
                    )
                state.place[node] = state.shadow.add(parent, request.tree.token[node], self.name)
            state.calls += 1
            batch.parts.append(Draft(state.cache, state.shadow, state.done))
        laws = []
        for request, passed in zip(requests, self.model.forward(batch), strict=True):
            state = self._state(request)
            assert state.shadow is not None
            state.done = len(state.shadow)
            laws.append(
                Laws(
                    self._law(
                        passed.logits[-len(request.nodes) :], request.context.draft_temperature
                    )
                )
            )
        return laws

    def _state(self, request: DraftRequest) -> LMState:
        state: LMState = request.context.states[self.name]
        return state

    def _catch_up(self, state: LMState) -> tuple[TokenTree, dict[int, int]]:
        """Keep what the text took of the last shadow; a new one whose nodes are the committed
        tokens not run yet, and the root's place."""
        cache, ids = state.cache, state.ids
        if state.shadow is not None and (path := beginning(state.shadow, ids[cache.length : -1])):
            path = [node for node in path if node < state.done]
            cache.commit(path)
        if len(ids) - cache.length > GAP:
            self._read(state)
        shadow = TokenTree(ids[cache.length])
        for token in ids[cache.length + 1 :]:
            shadow.add(len(shadow) - 1, token, self.name)
        return shadow, {0: len(shadow) - 1}

    def _read(self, state: LMState) -> None:
        """Run all but the last token of the text."""
        state.shadow = state.tree = None
        while state.cache.length < len(state.ids) - 1:
            begin = state.cache.length
            end = min(len(state.ids) - 1, (begin // self.model.chunk + 1) * self.model.chunk)
            self.model.forward(Batch([Chain(state.cache, state.ids[begin:end], wanted=False)]))
            state.cache.commit(range(end - begin))

    def _law(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        law = law_of(logits[:, : self._shared], temperature)
        missing = self._vocab_size - self._shared
        return F.pad(law, (0, missing)) if missing else law


def beginning(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The nodes, root first, of the longest path from the root that begins `tokens`."""
    path: list[int] = []
    for token in tokens:
        node = tree.child(path[-1], token) if path else 0 if tree.token[0] == token else None
        if node is None:
            break
        path.append(node)
    return path


def check_vocabulary(target_tokenizer: Any, drafter_tokenizer: Any, sizes: tuple[int, int]) -> None:
    """Raise `InvalidInput`, naming the first token id that differs, where a drafter's ids don't
    mean what the target's do.

    `sizes`: widths of the target's and the drafter's logits. They may differ, and a token that only
    one tokenizer knows may lie in the other's padded tail: after its last token, yet within its
    logits.
    """
    target, drafter = (
        {i: token for token, i in tokenizer.get_vocab().items()}
        for tokenizer in (target_tokenizer, drafter_tokenizer)
    )
    tail = max(target, default=-1), max(drafter, default=-1)
    for i in sorted(target.keys() | drafter.keys()):
        ours, theirs = target.get(i), drafter.get(i)
        padding = (theirs is None and tail[1] < i < sizes[1]) or (
            ours is None and tail[0] < i < sizes[0]
        )
        if ours != theirs and not padding:
            spelt = [f"{token!r}" if token is not None else "no token" for token in (ours, theirs)]
            raise InvalidInput(
                f"the drafter's vocabulary is not the target's: token {i} is {spelt[0]} to the "
                f"target and {spelt[1]} to the drafter; "
                "use a smaller model of the target's family, with the same tokenizer"
            )
