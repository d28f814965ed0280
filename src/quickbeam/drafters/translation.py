"""A smaller model with another tokenizer as a drafter (2502.05202, token-level intersection).

A target's token is read and proposed as the drafter's token of the same bytes. One without such a
token is read as the drafter spells its bytes, and is never proposed. Whatever is mapped wrongly
costs acceptance, as tokens are verified by their equality.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest
from quickbeam.drafters.draft_model import LMDrafter, LMState
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.errors import InvalidInput
from quickbeam.models.base import inference
from quickbeam.models.token_texts import TokenTexts
from quickbeam.tree import TokenTree

logger = logging.getLogger(__name__)

LEAST = 0.5  # of the smaller vocabulary's tokens that both must have
Spelling = tuple[bool, bytes]  # whether a token is a special one, and its bytes


class Translation:
    """The drafter's tokens for a target's.

    `shared`: `[s]` int64, the target's tokens that the drafter has, too. `columns`: `[s]`, the ids
    that the drafter has for them. `sizes`: how many tokens the target's logits have, and the
    drafter's. Raises `InvalidInput` where they share too few.
    """

    def __init__(self, target: Any, drafter: Any, sizes: tuple[int, int]) -> None:
        self._target, self._drafter, self._spelt = target, drafter, dict[int, list[int]]()
        ours, theirs = _tokens(target, sizes[0]), _tokens(drafter, sizes[1])
        self._texts, self.vocab_size = TokenTexts(target), sizes[0]
        self.partner = {token: theirs[one] for one, token in ours.items() if one in theirs}
        smaller = min(len(ours), len(theirs))
        told = f"{len(self.partner):,} of {smaller:,} tokens"
        if len(self.partner) < LEAST * smaller:
            raise InvalidInput(
                f"the drafter has another tokenizer, and shares {told} with the target "
                f"({len(self.partner) / smaller:.0%}): it takes {LEAST:.0%}; use a drafter whose "
                "tokenizer is more like the target's"
            )
        logger.info("the drafter shares %s with the target", told)
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


def _tokens(tokenizer: Any, size: int) -> dict[Spelling, int]:
    """Return the ids below `size` by what they stand for."""
    texts = TokenTexts(tokenizer)
    special = {i for i, one in tokenizer.added_tokens_decoder.items() if one.special}
    ids = sorted((i for i in tokenizer.get_vocab().values() if i < size), reverse=True)
    spelt = (((i in special, texts.bytes_of(i)), i) for i in ids)
    return {spelling: i for spelling, i in spelt if spelling[1]}


class TranslatedState(DrafterState):
    """What the drafter keeps of one sequence.

    `inner`: the smaller model's. `tree`, `place`: of the tree in flight the nodes that it knows, as
    a tree of its own tokens, and their numbers there. `prompt`: how many of the target's tokens it
    began with, and how many those are of its own.
    """

    def __init__(self, inner: LMState, translation: Translation, prompt: tuple[int, int]) -> None:
        self.inner, self._translation, self.prompt = inner, translation, prompt
        self.seen: TokenTree | None = None  # the target's tree that `tree` follows
        self.tree, self.place = TokenTree(0), dict[int, int]()

    @property
    def waiting(self) -> int:
        return self.inner.waiting

    def extend(self, tokens: Sequence[int]) -> None:
        self.inner.extend(self._translation.spell(tokens))

    def skip(self, tail: int) -> None:
        self.inner.skip(tail)

    def release(self) -> None:
        self.inner.release()
        self.seen = None

    def follow(self, tree: TokenTree, nodes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the rows of `nodes` that the model has a token for, and their numbers in its tree.

        Nodes below one without a token have none, either.
        """
        if nodes[0] == 0:
            self.seen, self.tree, self.place = tree, TokenTree(self.inner.ids[-1]), {0: 0}
        if tree is not self.seen:
            raise ValueError("a new tree: ask for its root first")
        for row, node in enumerate(nodes):
            above = self.place.get(tree.parent[node])
            own = self._translation.partner.get(tree.token[node])
            if node not in self.place and above is not None and own is not None:
                self.place[node] = self.tree.add(above, own, Drafter.name)
            if node in self.place:
                yield row, self.place[node]


class TranslatedDrafter(Drafter):
    """An `LMDrafter` whose tokens are others than the target's.

    A prompt is read as the model's own tokenizer divides it, an answer token by token.
    """

    skips = True

    def __init__(self, drafter: LMDrafter, translation: Translation) -> None:
        self._drafter, self._translation = drafter, translation
        self.pool, self.weight_bytes = drafter.pool, drafter.weight_bytes
        self.context_length = drafter.context_length
        self._shared = translation.shared.to(drafter.model.device)
        self._columns = translation.columns.to(drafter.model.device)

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> TranslatedState:
        own = self._translation.read(ids)
        inner = self._drafter.begin(own, shortlist)
        return TranslatedState(inner, self._translation, (len(ids), len(own)))

    def read(self, states: Sequence[DrafterState], least: int = 1, end: int | None = None) -> None:
        for state in states:
            assert isinstance(state, TranslatedState)
            ours, own = state.prompt
            last = own * end // ours if end is not None and end < ours else None
            if self._fits(state, 0):
                self._drafter.read([state.inner], least, last)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the shared tokens.

        They are zeros after nodes without a token of the model's, and beyond its context.
        """
        inner, rows = list[DraftRequest](), list[list[int]]()
        for request in requests:
            state: TranslatedState = request.state
            deep = self._fits(state, max(request.tree.depth))
            known = [*state.follow(request.tree, request.nodes)] if deep else []
            rows.append([row for row, _ in known])
            if known:
                context = replace(request.context, states={self._drafter.name: state.inner})
                nodes = [node for _, node in known]
                inner.append(DraftRequest(context, state.tree, nodes, request.gain))
        answers = iter(self._drafter.answer(inner) if inner else ())
        return [
            self._translate(next(answers) if known else None, known, len(request.nodes))
            for request, known in zip(requests, rows, strict=True)
        ]

    def _fits(self, state: TranslatedState, depth: int) -> bool:
        """Whether a text and so many tokens below it are within the model's context."""
        limit = self.context_length
        return limit is None or len(state.inner.ids) + state.inner.skipped + depth < limit

    def _translate(self, probs: DraftProbs | None, known: list[int], rows: int) -> DraftProbs:
        values = torch.zeros(rows, len(self._shared), device=self._shared.device)
        if probs is not None:
            found = probs.values[:, self._columns]
            values[known] = found / found.sum(-1, keepdim=True).clamp(min=1e-9)
        return DraftProbs(values, self._shared, self._translation.vocab_size)
