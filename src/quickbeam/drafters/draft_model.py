"""A smaller causal language model with the target's vocabulary as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.models.base import Batch, Chain, Draft, Model, inference
from quickbeam.models.kv import Pool, SequenceCache
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.opening import make_model
from quickbeam.models.weight_file import WeightFile
from quickbeam.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# If about this many committed tokens are unread, they are read as a prompt is: without logits for
# each of them. The engine lets drafters catch up from this many on (`growing.CAUGHT_UP`).
GAP = 32


class LMState(DrafterState):
    """What the drafter keeps of one sequence: keys and values, and the shadow of its growing tree.

    The shadow is explained at `LMDrafter`. `calls`: how many passes over trees were run.
    `recurrent`: whether the model has recurrent layers.
    """

    def __init__(self, cache: SequenceCache, ids: Sequence[int], recurrent: bool = False) -> None:
        self.cache, self.ids, self.calls = cache, list(ids), 0
        self.recurrent = recurrent
        self.skipped = 0  # how many tokens of the text came before `ids` and are left out
        self.tree: TokenTree | None = None  # the tree that is being grown
        self.shadow: TokenTree | None = None
        self.done = 0  # how many nodes of the shadow were run
        self.place: dict[int, int] = {}  # from nodes of the tree to nodes of the shadow

    @property
    def waiting(self) -> int:
        return max(0, len(self.ids) - 1 - self.cache.length - len(self.accepted()))

    def accepted(self) -> list[int]:
        """Return the nodes of the last shadow that were run and accepted, its root first."""
        if self.shadow is None:
            return []
        path = beginning(self.shadow, self.ids[self.cache.length : -1])
        return [node for node in path if node < self.done]

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)

    def skip(self, tail: int) -> None:
        """Begin anew with the last `tail` tokens, as if the text began there."""
        if self.waiting <= tail:
            return
        self.cache.truncate(0)
        self.tree = self.shadow = None
        self.skipped += len(self.ids) - 1 - tail
        self.ids = self.ids[-1 - tail :]

    def share(self, chunk: int, tokens: int) -> Any:
        whole = not self.skipped and (chunk + 1) * tokens <= self.cache.length
        if self.recurrent:  # a text can't go on behind keys and values alone
            return None
        return self.cache.share(chunk, tokens) if whole else None

    def adopt(
        self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        self.cache.adopt(chunks, tokens)

    def release(self) -> None:
        self.cache.release()
        self.tree = self.shadow = None


class LMDrafter(Drafter):
    """A drafter that is a smaller causal language model of transformers.

    Its token ids must mean what the target's do (`first_difference`).

    A sequence keeps the keys and values of what the model has read, as it does in the target. Of a
    growing tree the model runs only the nodes that are requested. They form the tree's *shadow*: a
    tree of the drafter's own, which grows by one pass a call. The accepted nodes of the last shadow
    stay computed. Other committed tokens are not computed yet, such as accepted leaves, which were
    never requested. They begin the next shadow as a chain that ends in the root, so catching up
    takes no extra pass.

    `vocab_size`: width of the target's logits, and of the distributions returned. Tokens beyond
    this model's own have probability 0. Of a request's sampling parameters only the temperature
    shapes the distributions. Top-k, top-p and penalties don't: answers are exact without them, and
    the model's own distribution is its best estimate.

    `model`: a `Model` with at least as many tokens. One of transformers is taken over, as
    `make_model` does; `native`, `weights` and `kept` are the same as there, and it raises the same.
    """

    skips = True
    pool: Pool

    def __init__(
        self,
        model: Model | PreTrainedModel,
        vocab_size: int,
        *,
        native: bool = True,
        weights: str = BFLOAT16,
        kept: WeightFile | None = None,
    ) -> None:
        if isinstance(model, Model):
            self.model, own = model, model.vocab_size
        else:
            own = int(model.get_output_embeddings().weight.shape[0])
            if own < vocab_size:  # the target may emit tokens that the model's embedding lacks
                model.resize_token_embeddings(vocab_size, mean_resizing=False)
            self.model = make_model(model, native=native, weights=weights, kept=kept)
        self.pool, self.context_length = self.model.pool, self.model.context_length
        self.weight_bytes = self.model.token_bytes
        self._vocab_size, self._shared = vocab_size, min(own, vocab_size)

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> LMState:
        return LMState(self.pool.new(), ids, self.pool.state_pages > 0)

    @inference
    def read(self, states: Sequence[DrafterState], least: int = 1, end: int | None = None) -> None:
        for state in states:
            assert isinstance(state, LMState)
            last = len(state.ids) - 1
            if end is not None:
                last = min(end - state.skipped, last)
            if last - state.cache.length >= max(least, GAP):
                self._read(state, last)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions `[len(nodes), vocab]` float32 on the drafter's device, by one pass.

        See `Drafter.answer`. Raises `ValueError` where a tree's first request doesn't begin with
        the root, or where a node's parent was never requested.
        """
        batch = Batch()
        for request in requests:
            state = request.state
            if request.nodes[0] == 0:
                state.shadow, state.place = self._catch_up(state)
                state.tree, state.done = request.tree, 0
            if state.shadow is None or request.tree is not state.tree:
                raise ValueError("a new tree: ask for its root first")
            for node in request.nodes:
                if node == 0 or node in state.place:  # known where a failed call is made again
                    continue
                if (parent := state.place.get(request.tree.parent[node])) is None:
                    raise ValueError(
                        f"node {node}: ask for its parent {request.tree.parent[node]} first"
                    )
                state.place[node] = state.shadow.add(parent, request.tree.token[node], self.name)
            state.calls += 1
            batch.parts.append(Draft(state.cache, state.shadow, state.done))
        distributions = []
        for request, passed in zip(requests, self.model.forward(batch), strict=True):
            state = request.state
            assert state.shadow is not None
            state.done = len(state.shadow)
            distributions.append(
                DraftProbs(
                    self._probs(
                        passed.logits[-len(request.nodes) :], request.context.draft_temperature
                    )
                )
            )
        return distributions

    def _catch_up(self, state: LMState) -> tuple[TokenTree, dict[int, int]]:
        """Commit the accepted nodes of the last shadow, and start a new one.

        The new shadow is the chain of the committed tokens that were not run yet. Returns it, and
        the map from the root to its last node.
        """
        cache, ids = state.cache, state.ids
        if path := state.accepted():
            cache.commit(path)
        if len(ids) - cache.length > GAP:
            self._read(state, len(ids) - 1)
        shadow = TokenTree(ids[cache.length])
        for token in ids[cache.length + 1 :]:
            shadow.add(len(shadow) - 1, token, self.name)
        return shadow, {0: len(shadow) - 1}

    def _read(self, state: LMState, last: int) -> None:
        """Run the first `last` committed tokens, without logits, and forget the shadow."""
        state.shadow = state.tree = None
        while state.cache.length < last:
            begin = state.cache.length
            end = min(last, (begin // self.model.chunk + 1) * self.model.chunk)
            self.model.forward(Batch([Chain(state.cache, state.ids[begin:end], wanted=0)]))
            state.cache.commit(range(end - begin))

    def _probs(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        probs = probs_of(logits[:, : self._shared], temperature)
        missing = self._vocab_size - self._shared
        return F.pad(probs, (0, missing)) if missing else probs


def beginning(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """Return the nodes of the longest path from the root whose tokens begin `tokens`, root
    first."""
    path: list[int] = []
    for token in tokens:
        node = tree.child(path[-1], token) if path else 0 if tree.token[0] == token else None
        if node is None:
            break
        path.append(node)
    return path


def first_difference(
    target_tokenizer: Any, drafter_tokenizer: Any, sizes: tuple[int, int]
) -> str | None:
    """Say which token id first means another token to a drafter than to the target; None if none.

    `sizes`: widths of the target's and the drafter's logits, which may differ. A token that only
    one tokenizer knows is allowed in the other model's padding: after the last token of its
    tokenizer, yet within its logits.
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
            return f"token {i} is {spelt[0]} to the target and {spelt[1]} to the drafter"
    return None
