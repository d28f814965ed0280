"""A smaller causal language model as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.scoring import ScoringState, choose_scorers, score
from quickbeam.drafters.shadow import ShadowTree
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.models.base import Batch, Chain, Draft, Model, inference
from quickbeam.models.cache.kv import Page, Pool
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.torch.model import TorchModel
from quickbeam.noise import Row

# If about this many committed tokens are unread, they are read as a prompt is: without logits for
# each of them. The engine lets drafters catch up from this many on (`proposing.CATCH_UP`).
GAP = 32


class LMState(ScoringState):
    """What the drafter keeps of one sequence: keys and values, and the shadow of its draft tree.

    `skipped`: how many tokens of the text came before `ids` and are left out.
    """

    def __init__(
        self, model: Model, ids: Sequence[int], shortlist: ShortlistState | None = None
    ) -> None:
        super().__init__(shortlist)
        self._model = model
        self.ids = self._in_vocabulary(ids)
        self.cache = model.pool.new()
        self.skipped = 0
        self.shadow: ShadowTree | None = None

    @property
    def waiting(self) -> int:
        computed = self.cache.length + len(self.accepted())
        return max(0, len(self.ids) - 1 - computed)

    def accepted(self) -> list[int]:
        """Return the rows of the last shadow that were run and accepted, its first row first."""
        if self.shadow is None:
            return []
        return self.shadow.accepted(self.ids[self.cache.length : -1])

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self.ids.extend(self._in_vocabulary(tokens))

    def _in_vocabulary(self, tokens: Sequence[int]) -> list[int]:
        # the model's largest token stands for larger ones of the target's
        return [min(token, self._model.vocab_size - 1) for token in tokens]

    def skip(self, tail: int) -> None:
        """Begin anew with the last `tail` tokens, as if the text began there."""
        if self.waiting <= tail:
            return
        self.cache.truncate(0)
        self.shadow = None
        self.skipped += len(self.ids) - 1 - tail
        self.ids = self.ids[-1 - tail :]

    def chunk_pages(self, chunk: int, tokens: int) -> list[Page] | None:
        # a text can't go on behind a recurrent model's keys and values alone
        is_recurrent = self._model.pool.state_pages > 0
        if is_recurrent or self.skipped or (chunk + 1) * tokens > self.cache.length:
            return None
        return self.cache.chunk_pages(chunk, tokens)

    def attach(
        self, chunks: Sequence[list[Page]], tokens: int, hidden: Sequence[torch.Tensor]
    ) -> None:
        self.cache.attach(chunks, tokens)

    def release(self) -> None:
        super().release()
        self.cache.release()
        self.shadow = None


class LMDrafter(Drafter):
    """A drafter that is a smaller causal language model, whose token ids mean what the target's do
    (`same_tokens`).

    The model runs only the requested nodes of a draft tree, which form its shadow. The accepted
    nodes of the last shadow stay computed. Other committed tokens, such as accepted leaves, begin
    the next shadow as a chain that ends in the root, so catching up takes no extra pass.

    `vocab_size`: width of the target's logits, and of the distributions returned. `ranks_ids`: as
    of `Drafter`. On the native kernels the head can score a shortlist. Of a request's
    sampling parameters only the temperature shapes these: answers are exact without the others, and
    the model's own distribution is its best estimate.
    """

    skips = True
    pool: Pool

    def __init__(self, model: Model, vocab_size: int, ranks_ids: bool = False) -> None:
        self.model = self.head_model = model
        self.weight_bytes = model.weight_bytes
        self.ranks_ids = ranks_ids
        prepare_head(self, model)
        self.pool = model.pool
        self.context_length = model.context_length
        self._vocab_size = vocab_size
        if isinstance(model, TorchModel):
            model.rank(min(model.vocab_size, vocab_size))

    def begin(self, ids: Sequence[int], shortlist: ShortlistState | None = None) -> LMState:
        return LMState(self.model, ids, shortlist)

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
        """Return distributions on the drafter's device, by one pass. See `Drafter.answer`.

        They are `[len(nodes), vocab]` float32, or over a shortlist. Raises `ValueError` where a
        tree's first request doesn't begin with the root, or where a node's parent was never
        requested.
        """
        choose_scorers([request for request in requests if request.nodes[0] == 0])
        shadows = [self._shadow_of(request) for request in requests]
        states = [request.state for request in requests]
        parts = [shadow.part(state.cache) for shadow, state in zip(shadows, states, strict=True)]
        return run_shadows(self.model, requests, shadows, parts, self._vocab_size)

    def _shadow_of(self, request: DraftRequest) -> ShadowTree:
        """Return the shadow of a request's tree, with the requested nodes."""
        state = request.state
        tree = request.tree
        nodes = request.nodes
        if nodes[0] == 0:
            self._catch_up(state)
            state.shadow = ShadowTree(tree, state.ids[state.cache.length :], self.name)
        shadow: ShadowTree | None = state.shadow
        if shadow is None or tree is not shadow.tree:
            raise ValueError("a new tree: ask for its root first")
        shadow.add(nodes, self.model.vocab_size - 1)
        return shadow

    def _catch_up(self, state: LMState) -> None:
        """Commit the accepted nodes of the last shadow, and read what lies far behind."""
        if path := state.accepted():
            state.cache.commit(path)
        state.shadow = None
        if len(state.ids) - state.cache.length > GAP:
            self._read(state, len(state.ids) - 1)

    def _read(self, state: LMState, last: int) -> None:
        """Run the first `last` committed tokens, without logits, and forget the shadow."""
        state.shadow = None
        while state.cache.length < last:
            begin = state.cache.length
            end = min(last, (begin // self.model.chunk + 1) * self.model.chunk)
            text = Chain(state.cache, state.ids[begin:end], wanted=0)
            self.model.forward(Batch([text]))
            state.cache.commit(range(end - begin))


def prepare_head(drafter: Drafter, model: Model) -> None:
    """Let a drafter that runs `model` score parts of its head, if the native kernels run it."""
    if isinstance(model, NativeModel):
        drafter.head_size = int(model.config.hidden_size)
        model.set_aux_layers([model.config.num_hidden_layers + 1])


def run_shadows(
    model: Model,
    requests: Sequence[DraftRequest],
    shadows: Sequence[ShadowTree],
    parts: Sequence[Draft],
    vocab_size: int,
) -> list[DraftProbs]:
    """Run the new rows of the requests' shadows by one pass of `model`.

    `parts`: these rows of each shadow. Returns the distributions of the requested nodes, which are
    the last rows of each part, over the `vocab_size` tokens of the target, or over a shortlist.
    """
    batch = Batch(list(parts))
    states: list[ScoringState] = [request.state for request in requests]
    if any(state.scorer is not None for state in states):
        assert isinstance(model, NativeModel)
        answers = _shortlisted(model, requests, batch, vocab_size)
    else:
        answers = _of_all_tokens(model, requests, batch, vocab_size)
    for shadow in shadows:
        shadow.run = len(shadow.rows)
    return answers


def _of_all_tokens(
    model: Model, requests: Sequence[DraftRequest], batch: Batch, vocab_size: int
) -> list[DraftProbs]:
    shared = min(model.vocab_size, vocab_size)
    answers = list[DraftProbs]()
    for request, results in zip(requests, model.forward(batch), strict=True):
        rows = slice(len(results.logits) - len(request.nodes), len(results.logits))
        temperature = request.context.draft_temperature
        likeliest: Sequence[Row] = ()
        if results.ranked is not None and temperature == 1:
            probs, likeliest, _ = results.ranked.part(rows)
        else:
            probs = probs_of(results.logits[rows, :shared], temperature)
        if shared < vocab_size:
            probs = F.pad(probs, (0, vocab_size - shared))
        answers.append(DraftProbs(probs, likeliest=likeliest))
    return answers


def _shortlisted(
    model: NativeModel, requests: Sequence[DraftRequest], batch: Batch, vocab_size: int
) -> list[DraftProbs]:
    shared = min(model.vocab_size, vocab_size)
    states: list[ScoringState] = [request.state for request in requests]
    features = [
        rows[-len(request.nodes) :]
        for request, rows in zip(requests, model.features(batch), strict=True)
    ]
    none = [None if state.scorer is None else state.scorer.shared.none for state in states]
    answers = dict[int, DraftProbs]()
    for number, logits, tokens in score(states, features, none, model.head):
        logits = model.finish(logits if tokens is not None else logits[:, :shared])
        values = probs_of(logits, requests[number].context.draft_temperature)
        if tokens is None:
            values = F.pad(values, (0, vocab_size - shared))
        answers[number] = DraftProbs(values, tokens, vocab_size)
    return [answers[number] for number in range(len(requests))]


def same_tokens(target_tokenizer: Any, drafter_tokenizer: Any, sizes: tuple[int, int]) -> bool:
    """Whether all token ids mean the same to a drafter as to the target.

    `sizes`: widths of the target's and the drafter's logits, which may differ. A token that only
    one tokenizer knows is allowed in the other model's padding: after the last token of its
    tokenizer, yet within its logits.
    """
    ours = {i: token for token, i in target_tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in drafter_tokenizer.get_vocab().items()}
    # ids behind the tokenizer's last token, yet within the logits
    our_padding = range(max(ours, default=-1) + 1, sizes[0])
    their_padding = range(max(theirs, default=-1) + 1, sizes[1])
    for i in ours.keys() | theirs.keys():
        is_padding = i in our_padding or i in their_padding
        if ours.get(i) != theirs.get(i) and not is_padding:
            return False
    return True
