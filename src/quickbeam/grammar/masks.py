"""Which tokens a grammar allows after any path of a draft tree.

This module knows nothing of models. Of sampling it knows only which ids end an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from quickbeam.errors import InvalidInput

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")


class DeadEnd(InvalidInput):
    """No token may come next."""


class AllowedTokens(NamedTuple):
    """What may follow a path.

    - `banned`: `[vocab]` bool.
    - `left`: how many tokens are not banned.
    - `first`: the lowest of these.
    """

    banned: torch.Tensor
    left: int
    first: int


class CompiledGrammar(NamedTuple):
    """A grammar compiled for one tokenizer.

    - `matcher`: a matcher that has read nothing yet.
    - `ends`: the ids by which the matcher says that the text may end.
    - `size`: how many tokens its masks have.
    - `unnamed`: ids that are no text and that the grammar doesn't name. They are never allowed.
    - `named_text`: ids that the grammar names and that stand for text elsewhere.
    """

    matcher: LLMatcher
    ends: Sequence[int]
    size: int
    unnamed: np.ndarray
    named_text: Set[int]


class Masks:
    """Where one answer stands in its grammar, and what may follow any path from there.

    - `vocab`: the width of the logits. Tokens that the tokenizer doesn't know are never allowed.
    - `ends`: ids that end the answer. After one of them the grammar asks nothing more of the text.
    - `closing`: those of `ends` that are not text. They are allowed where the grammar may end.
      Where it must end, nothing else is.

    One matcher goes from path to path: it rolls back to where the two paths part and reads the
    rest. What is allowed depends on the tokens alone. Results are cached until the
    answer grows.
    """

    def __init__(
        self, compiled: CompiledGrammar, vocab: int, ends: Collection[int], closing: Collection[int]
    ) -> None:
        self._compiled, self._vocab, self._ends = compiled, vocab, frozenset(ends)
        self._closing = [token for token in closing if token < vocab]
        self._text: list[int] = []  # the answer so far
        self._path: list[int] = []  # what the matcher has read after it
        self._over = False
        self._allowed: dict[tuple[int, ...], AllowedTokens] = {}
        self._forced: dict[tuple[int, ...], int | None] = {}
        self._reason = ""
        self._matcher = self._new_matcher()

    def extend(self, tokens: Sequence[int]) -> None:
        """Record tokens that became output."""
        self._allowed.clear()
        self._forced.clear()
        for token in tokens:
            self._over = self._over or token in self._ends
            if not self._over:
                self._go([token])
                self._text.append(token)
                self._path = self._path[1:]

    def allowed(self, path: Sequence[int] = ()) -> AllowedTokens | None:
        """Return what may follow output and `path`, or None if the answer is over by then.

        Raises `DeadEnd` if no token may follow.
        """
        if self._over or not self._ends.isdisjoint(path):
            return None
        key = tuple(path)
        if key not in self._allowed:
            self._allowed[key] = self._compute(key)
        return self._allowed[key]

    def ban(self, scores: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """Set the scores of banned tokens after `path` to minus infinity.

        `scores` `[vocab]` are changed in place and returned. Raises `DeadEnd` if no token is left.
        """
        allowed = self.allowed(path)
        if allowed is None:
            return scores
        scores.masked_fill_(allowed.banned.to(scores.device), -math.inf)
        if scores.max() == -math.inf:
            where = f"after {len(self._text) + len(path)} tokens of the answer"
            raise DeadEnd(
                f"grammar: it allows {allowed.left} tokens {where}, all ruled out by "
                "min_tokens, bad_words or logit_bias"
            )
        return scores

    def find(self, path: Sequence[int] = ()) -> AllowedTokens | None:
        """Return `allowed`, for drafting: None also if no token may follow."""
        try:
            return self.allowed(path)
        except DeadEnd:
            return None

    def forces(self, allowed: AllowedTokens) -> bool:
        """Whether only one token may come there and the answer goes on after it."""
        return allowed.left == 1 and allowed.first not in self._ends

    def forced(self, path: Sequence[int] = ()) -> int | None:
        """Return the token that is forced after `path`, or None.

        If none is forced, this seldom has to compute a mask.
        """
        key = tuple(path)
        if key not in self._forced:
            known = self.find(key) if key in self._allowed or self._is_written(key) else None
            self._forced[key] = known.first if known is not None and self.forces(known) else None
        return self._forced[key]

    def follows(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow `path`, for drafting.

        A token that ends the answer doesn't count, nor do those after it. No mask is computed.
        """
        if self._over or not self._ends.isdisjoint(path):
            return 0
        before_end = list(takewhile(lambda token: token not in self._ends, tokens))
        if not before_end:
            return 0
        return self._ask(path, lambda matcher: matcher.validate_tokens(before_end)) or 0

    def _is_written(self, path: tuple[int, ...]) -> bool:
        """Whether the grammar fixes the next text, so that llguidance knows it without a mask."""
        if self._over or not self._ends.isdisjoint(path):
            return False
        return bool(self._ask(path, lambda matcher: matcher.compute_ff_tokens()))

    def _compute(self, path: tuple[int, ...]) -> AllowedTokens:
        bits = self._ask(path, lambda matcher: matcher.compute_bitmask())
        if bits is None:
            raise self._dead_end(path, self._reason)
        allowed = np.unpackbits(
            np.frombuffer(bits, dtype=np.uint8), count=self._compiled.size, bitorder="little"
        ).view(bool)
        may_end = self._may_end(allowed)
        allowed[self._compiled.ends] = False
        allowed[self._compiled.unnamed] = False
        banned = np.ones(self._vocab, dtype=bool)
        shared = min(self._vocab, self._compiled.size)
        np.logical_not(allowed[:shared], out=banned[:shared])
        if may_end:
            banned[self._closing] = False
        left = self._vocab - int(np.count_nonzero(banned))
        if left == 0:
            raise self._dead_end(path, "no token spells what comes next")
        return AllowedTokens(torch.from_numpy(banned), left, int(banned.argmin()))

    def _may_end(self, allowed: np.ndarray) -> bool:
        """Whether the answer may end where the matcher is and allows these tokens."""
        if self._matcher.is_accepting():
            return True
        # a grammar may take an end-of-sequence id as a token that it names
        for token in self._compiled.ends:
            if allowed[token]:
                ended = self._matcher.deep_copy()
                ended.consume_token(token)
                if ended.is_accepting():
                    return True
        return False

    def _dead_end(self, path: Sequence[int], why: str) -> DeadEnd:
        where = f"after {len(self._text) + len(path)} tokens of the answer"
        return DeadEnd(f"grammar: no token can come {where} ({why})")

    def _ask(self, path: Sequence[int], question: Callable[[LLMatcher], T]) -> T | None:
        for _ in range(2):
            self._go(path)
            if not self._matcher.is_error():
                answer = question(self._matcher)
                if not self._matcher.is_error():
                    return answer
            # many drafts may use up the matcher's limits, and some grammars can't be rolled back: a
            # new matcher reads the path from the beginning
            self._reason = str(self._matcher.get_error()).partition("\n")[0]
            self._matcher = self._new_matcher()
        return None

    def _go(self, path: Sequence[int]) -> None:
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        behind = self._path[shared:]
        if not self._compiled.named_text.isdisjoint(behind):
            # llguidance doesn't know how long such a token's text was, and can't go back before it
            self._matcher = self._new_matcher()
            shared = 0
        elif behind:
            self._matcher.rollback(len(behind))
        if ahead := list(path[shared:]):
            self._matcher.consume_tokens(ahead)
        self._path = list(path)

    def _new_matcher(self) -> LLMatcher:
        matcher = self._compiled.matcher.deep_copy()
        if self._text:
            matcher.consume_tokens(self._text)
        self._path = []
        return matcher
