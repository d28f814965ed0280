"""Computes the tokens that a grammar allows after any path of a draft tree.

This module knows nothing of models. Of sampling it knows only the ids that end an answer.
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
    """The tokens that may follow a path.

    - `banned`: `[vocab]` bool.
    - `left`: how many tokens are not banned.
    - `first`: the lowest token that is not banned.
    """

    banned: torch.Tensor
    left: int
    first: int


class CompiledGrammar(NamedTuple):
    """A grammar compiled for one tokenizer.

    - `matcher`: a matcher that has read nothing yet.
    - `eos_ids`: the ids that the matcher allows where the text may end.
    - `size`: how many tokens its masks have.
    - `unnamed`: ids that are no text and that the grammar doesn't name. They are never allowed.
    - `named_text`: ids that the grammar names and that stand for text elsewhere.
    """

    matcher: LLMatcher
    eos_ids: Sequence[int]
    size: int
    unnamed: np.ndarray
    named_text: Set[int]


class Masks:
    """The state of one answer in its grammar, and the tokens that may follow any path from there.

    - `vocab`: the width of the logits. Tokens that the tokenizer lacks are never allowed.
    - `eos_ids`: ids that end the answer. After one of them the grammar asks nothing of the text.
    - `closing_ids`: those of `eos_ids` that are not text. They are allowed where the grammar may
      end. Where the grammar must end, no other token is allowed.

    One matcher serves all paths: it rolls back to the tokens that its last path shares with the
    next one, and reads the others. What is allowed depends on the tokens alone. Results are cached
    until the answer grows.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        vocab: int,
        eos_ids: Collection[int],
        closing_ids: Collection[int],
    ) -> None:
        self._compiled = compiled
        self._vocab = vocab
        self._eos_ids = frozenset(eos_ids)
        self._closing_ids = [token for token in closing_ids if token < vocab]
        self._text: list[int] = []  # the answer so far
        self._path: list[int] = []  # tokens that the matcher has read after the answer
        self._over = False
        self._allowed: dict[tuple[int, ...], AllowedTokens] = {}  # by path
        self._forced: dict[tuple[int, ...], int | None] = {}  # by path
        self._reason = ""  # the matcher's last error
        self._matcher = self._new_matcher()

    def extend(self, tokens: Sequence[int]) -> None:
        """Record tokens that became output."""
        self._allowed.clear()
        self._forced.clear()
        for token in tokens:
            self._over = self._over or token in self._eos_ids
            if not self._over:
                self._read([token])
                self._text.append(token)
                self._path = self._path[1:]

    def allowed(self, path: Sequence[int] = ()) -> AllowedTokens | None:
        """Return the tokens that may follow output and `path`; None if the answer is over by then.

        Raises `DeadEnd` if no token may follow.
        """
        if self._over or not self._eos_ids.isdisjoint(path):
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
        """Return `allowed(path)`, for drafting: None also if no token may follow."""
        try:
            return self.allowed(path)
        except DeadEnd:
            return None

    def forces(self, allowed: AllowedTokens) -> bool:
        """Whether only one token is allowed and the answer goes on after it."""
        return allowed.left == 1 and allowed.first not in self._eos_ids

    def forced(self, path: Sequence[int] = ()) -> int | None:
        """Return the token that is forced after `path`, or None.

        If no token is forced, this seldom has to compute a mask.
        """
        key = tuple(path)
        if key not in self._forced:
            self._forced[key] = None
            if key in self._allowed or self._is_written(key):
                allowed = self.find(key)
                if allowed is not None and self.forces(allowed):
                    self._forced[key] = allowed.first
        return self._forced[key]

    def follows(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow `path`, for drafting.

        A token that ends the answer doesn't count, nor do those after it. No mask is computed.
        """
        if self._over or not self._eos_ids.isdisjoint(path):
            return 0
        before_end = list(takewhile(lambda token: token not in self._eos_ids, tokens))
        if not before_end:
            return 0
        return self._ask(path, lambda matcher: matcher.validate_tokens(before_end)) or 0

    def _is_written(self, path: tuple[int, ...]) -> bool:
        """Whether llguidance finds without a mask that the grammar fixes the next text."""
        if self._over or not self._eos_ids.isdisjoint(path):
            return False
        return bool(self._ask(path, lambda matcher: matcher.compute_ff_tokens()))

    def _compute(self, path: tuple[int, ...]) -> AllowedTokens:
        bits = self._ask(path, lambda matcher: matcher.compute_bitmask())
        if bits is None:
            raise self._dead_end(path, self._reason)
        packed = np.frombuffer(bits, dtype=np.uint8)
        unpacked = np.unpackbits(packed, count=self._compiled.size, bitorder="little")
        allowed = unpacked.view(bool)
        may_end = self._may_end(allowed)
        allowed[self._compiled.eos_ids] = False
        allowed[self._compiled.unnamed] = False
        banned = np.ones(self._vocab, dtype=bool)
        shared = min(self._vocab, self._compiled.size)
        np.logical_not(allowed[:shared], out=banned[:shared])
        if may_end:
            banned[self._closing_ids] = False
        left = self._vocab - int(np.count_nonzero(banned))
        if left == 0:
            raise self._dead_end(path, "no token spells what comes next")
        return AllowedTokens(torch.from_numpy(banned), left, int(banned.argmin()))

    def _may_end(self, allowed: np.ndarray) -> bool:
        """Whether the answer may end after what the matcher has read. `allowed`: its mask."""
        if self._matcher.is_accepting():
            return True
        # a grammar may take an end-of-sequence id as a token that it names
        for token in self._compiled.eos_ids:
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
        """Return what `question` returns of a matcher that has read `path`; None after an error."""
        for _ in range(2):
            self._read(path)
            if not self._matcher.is_error():
                answer = question(self._matcher)
                if not self._matcher.is_error():
                    return answer
            # Many drafts may use up the matcher's limits, and some grammars can't be rolled back.
            # So a new matcher reads the path from the beginning.
            self._reason = str(self._matcher.get_error()).partition("\n")[0]
            self._matcher = self._new_matcher()
        return None

    def _read(self, path: Sequence[int]) -> None:
        """Have the matcher read `path` after the answer, and nothing else."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        surplus = self._path[shared:]
        if not self._compiled.named_text.isdisjoint(surplus):
            # llguidance can't roll back such a token, because it doesn't store its text's length
            self._matcher = self._new_matcher()
            shared = 0
        elif surplus:
            self._matcher.rollback(len(surplus))
        unread = list(path[shared:])
        if unread:
            self._matcher.consume_tokens(unread)
        self._path = list(path)

    def _new_matcher(self) -> LLMatcher:
        matcher = self._compiled.matcher.deep_copy()
        if self._text:
            matcher.consume_tokens(self._text)
        self._path = []
        return matcher
