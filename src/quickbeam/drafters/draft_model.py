"""A smaller causal language model as a drafter, with the target's tokenizer or another one.

With another one, a target's token is read and proposed as the drafter's token of the same bytes
(2502.05202, token-level intersection). One without such a token is read as the drafter spells its
bytes, and is never proposed. Whatever is mapped wrongly costs acceptance, no more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest, probs_of
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.errors import InvalidInput
from quickbeam.grammar.token_texts import TokenTexts
from quickbeam.models.base import Batch, Chain, Draft, Model, Part, Passed, inference
from quickbeam.models.cache.kv import Pool
from quickbeam.tree import TokenTree

logger = logging.getLogger(__name__)

LEAST = 0.5  # of the smaller vocabulary's tokens that both must have


class Translation:
    """The drafter's tokens for a target's.

    `shared`: `[s]` int64, the target's tokens that the drafter has, too. `columns`: `[s]`, the ids
    that the drafter has for them. `sizes`: how many tokens the target's logits have, and the
    drafter's. `partner`: from the first to the second. Raises `InvalidInput` for too few.
    """

    def __init__(self, target: Any, drafter: Any, sizes: tuple[int, int]) -> None:
        self._target, self._drafter, self._spelt = target, drafter, dict[int, list[int]]()
        ours, theirs = _tokens(target, sizes[0]), _tokens(drafter, sizes[1])
        self._texts, self.vocab_size = TokenTexts(target), sizes[0]
        self.partner = {token: theirs[one] for one, token in ours.items() if one in theirs}
        smaller = min(len(ours), len(theirs))
        shared = f"{len(self.partner):,} of {smaller:,} tokens"
        if len(self.partner) < LEAST * smaller:
            raise InvalidInput(
                f"the drafter has another tokenizer, and shares {shared} with the target "
                f"({len(self.partner) / smaller:.0%}): it takes {LEAST:.0%}; use a drafter whose "
                "tokenizer is more like the target's"
            )
        logger.info("the drafter shares %s with the target", shared)
        self.shared = torch.tensor(list(self.partner))
        self.columns = torch.tensor(list(self.partner.values()))

    def read(self, ids: Sequence[int]) -> list[int]:
        """Return a text as the drafter's own tokenizer divides it."""
        text = self._target.decode(list(ids), skip_special_tokens=False)
        return self._drafter.encode(text, add_special_tokens=False) or self.spell(ids)

    def spell(self, ids: Sequence[int]) -> list[int]:
        """Return the drafter's tokens for each of a text's tokens, one after the other."""
        return [one for token in ids for one in self._of(token)]

    def _of(self, token: int) -> list[int]:
        if token in self.partner:
            return [self.partner[token]]
        if token not in self._spelt:
            text = self._texts.text_of(token)
            self._spelt[token] = self._drafter.encode(text, add_special_tokens=False) or [0]
        return self._spelt[token]


def _tokens(tokenizer: Any, size: int) -> dict[tuple[bool, bytes], int]:
    """Return the ids below `size`, by whether a token is a special one and its bytes."""
    texts = TokenTexts(tokenizer)
    special = {i for i, one in tokenizer.added_tokens_decoder.items() if one.special}
    ids = sorted((i for i in tokenizer.get_vocab().values() if i < size), reverse=True)
    spelt = (((i in special, texts.bytes_of(i)), i) for i in ids)
    return {spelling: i for spelling, i in spelt if spelling[1]}


# If about this many committed tokens are unread, they are read as a prompt is: without logits for
# each of them. The engine lets drafters catch up from this many on (`proposing.CATCH_UP`).
GAP = 32


class LMState(DrafterState):
    """What the drafter keeps of one sequence: keys and values, and the shadow of its growing tree.

    The shadow is explained at `LMDrafter`. `ids` are of the model's own tokens.
    """

    def __init__(self, model: Model, ids: Sequence[int], translation: Translation | None) -> None:
        self._model, self._translation = model, translation
        self.ids = self._own(ids) if translation is None else translation.read(ids)
        self.prompt = len(ids), len(self.ids)  # tokens of the target's, and of the model's
        self.cache = model.pool.new()
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
        path, node = list[int](), 0
        if self.shadow is None:
            return path
        for token in self.ids[self.cache.length : -1]:
            child = self.shadow.child(node, token) if path else 0
            if child is None or child >= self.done or self.shadow.token[child] != token:
                break
            path.append(node := child)
        return path

    def extend(self, tokens: Sequence[int]) -> None:
        of = self._translation
        self.ids.extend(self._own(tokens) if of is None else of.spell(tokens))

    def _own(self, tokens: Sequence[int]) -> list[int]:
        # the model's largest token stands for larger ones of the target's
        return [min(token, self._model.vocab_size - 1) for token in tokens]

    def skip(self, tail: int) -> None:
        """Begin anew with the last `tail` tokens, as if the text began there."""
        if self.waiting <= tail:
            return
        self.cache.truncate(0)
        self.tree = self.shadow = None
        self.skipped += len(self.ids) - 1 - tail
        self.ids = self.ids[-1 - tail :]

    def share(self, chunk: int, tokens: int) -> Any:
        # a text can't go on behind a recurrent model's keys and values alone
        unshared = self._model.pool.state_pages > 0 or self._translation is not None
        if unshared or self.skipped or (chunk + 1) * tokens > self.cache.length:
            return None
        return self.cache.share(chunk, tokens)

    def adopt(self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor]) -> None:
        self.cache.adopt(chunks, tokens)

    def release(self) -> None:
        self.cache.release()
        self.tree = self.shadow = None


class LMDrafter(Drafter):
    """A drafter that is a smaller causal language model of transformers.

    Its token ids must mean what the target's do (`same_tokens`), or a `translation` says what
    they mean. With that, a prompt is read as the model's own tokenizer divides it, an answer token
    by token. Distributions are over the tokens that both have: zeros after nodes without a token of
    the model's, and beyond its context.

    Of a growing tree the model runs only the nodes that are requested. They form the tree's
    *shadow*: a tree of the drafter's own, which grows by one pass a call. The accepted nodes of the
    last shadow stay computed. Other committed tokens, such as accepted leaves, begin the next
    shadow as a chain that ends in the root, so catching up takes no extra pass.

    `vocab_size`: width of the target's logits, and of the distributions returned. Of a request's
    sampling parameters only the temperature shapes these: answers are exact without the others, and
    the model's own distribution is its best estimate.
    """

    skips = True
    pool: Pool

    def __init__(
        self, model: Model, vocab_size: int, translation: Translation | None = None
    ) -> None:
        self.model, self.pool, self.context_length = model, model.pool, model.context_length
        self._vocab_size, self._shared = vocab_size, min(model.vocab_size, vocab_size)
        self.translation = translation
        if translation is not None:
            self._tokens = translation.shared.to(model.device)
            self._columns = translation.columns.to(model.device)

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> LMState:
        return LMState(self.model, ids, self.translation)

    @inference
    def read(self, states: Sequence[DrafterState], least: int = 1, end: int | None = None) -> None:
        for state in states:
            assert isinstance(state, LMState)
            last, (ours, own) = len(state.ids) - 1, state.prompt
            if end is not None and (self.translation is None or end < ours):
                last = min(own * end // ours - state.skipped, last)
            if self._fits(state, 0) and last - state.cache.length >= max(least, GAP):
                self._read(state, last)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions `[len(nodes), vocab]` float32 on the drafter's device, by one pass.

        See `Drafter.answer`. Raises `ValueError` where a tree's first request doesn't begin with
        the root, or where a node's parent was never requested.
        """
        followed = [self._follow(request) for request in requests]
        states = [request.state for request, rows in zip(requests, followed, strict=True) if rows]
        parts: list[Part] = [Draft(state.cache, state.shadow, state.done) for state in states]
        passed = iter(self.model.forward(Batch(parts)) if parts else ())
        return [
            self._probs(request, rows, next(passed) if rows else None)
            for request, rows in zip(requests, followed, strict=True)
        ]

    def _follow(self, request: DraftRequest) -> list[int]:
        """Grow the shadow by the requested nodes. Return which of them the model has tokens for."""
        state, tree, nodes = request.state, request.tree, request.nodes
        if not self._fits(state, max(tree.depth)):
            return []
        if nodes[0] == 0:
            state.shadow, state.place = self._catch_up(state)
            state.tree, state.done = tree, 0
        if state.shadow is None or tree is not state.tree:
            raise ValueError("a new tree: ask for its root first")
        for node in nodes:
            if node == 0 or node in state.place:  # known where a failed call is made again
                continue
            parent = state.place.get(tree.parent[node])
            token = min(tree.token[node], self.model.vocab_size - 1)
            if self.translation is not None:
                token = self.translation.partner.get(tree.token[node], -1)
            elif parent is None:
                raise ValueError(f"node {node}: ask for its parent {tree.parent[node]} first")
            if parent is not None and token >= 0:
                state.place[node] = state.shadow.add(parent, token, self.name)
        return [row for row, node in enumerate(nodes) if node in state.place]

    def _fits(self, state: LMState, depth: int) -> bool:
        """Whether a text that was translated, and so many tokens below it, are within the model's
        context. Of others the engine knows it before."""
        limit = self.context_length if self.translation is not None else None
        return limit is None or len(state.ids) + state.skipped + depth < limit

    def _catch_up(self, state: LMState) -> tuple[TokenTree, dict[int, int]]:
        """Commit the accepted nodes of the last shadow, and start a new one.

        It is the chain of committed tokens that were not run yet. Returns it, and the root's place.
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

    def _probs(self, request: DraftRequest, rows: list[int], passed: Passed | None) -> DraftProbs:
        probs = torch.empty(0)
        if passed is not None:
            request.state.done = len(request.state.shadow)
            logits = passed.logits[-len(rows) :, : self._shared]
            probs = probs_of(logits, request.context.draft_temperature)
        if self.translation is None:
            missing = self._vocab_size - self._shared
            return DraftProbs(F.pad(probs, (0, missing)) if missing else probs)
        values = torch.zeros(len(request.nodes), len(self._tokens), device=self._tokens.device)
        if rows:
            both = probs[:, self._columns]
            values[rows] = both / both.sum(-1, keepdim=True).clamp(min=1e-9)
        return DraftProbs(values, self._tokens, self.translation.vocab_size)


def same_tokens(target_tokenizer: Any, drafter_tokenizer: Any, sizes: tuple[int, int]) -> bool:
    """Whether all token ids mean the same to a drafter as to the target.

    `sizes`: widths of the target's and the drafter's logits, which may differ. A token that only
    one tokenizer knows is allowed in the other model's padding: after the last token of its
    tokenizer, yet within its logits.
    """
    ours = {i: token for token, i in target_tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in drafter_tokenizer.get_vocab().items()}
    ends = max(ours, default=-1), max(theirs, default=-1)
    return all(
        ours.get(i) == theirs.get(i)
        or (i not in theirs and ends[1] < i < sizes[1])
        or (i not in ours and ends[0] < i < sizes[0])
        for i in ours.keys() | theirs.keys()
    )
