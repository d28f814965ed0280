"""The tokens that `min_tokens` and `bad_words` ban at a place of an answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from typing import Any

from quickbeam.automaton import Automaton
from quickbeam.errors import InvalidInput

MOST_BAD = 256  # tokens of a bad word; the work grows with the square of it


class Bans:
    """The tokens that may not come next.

    These are the ids that would end the answer among its first `min_tokens` tokens, and the last
    tokens of bad words whose other tokens stand at the end of the output.

    Only output counts: a bad word that begins in the prompt is not noticed.
    """

    def __init__(
        self, min_tokens: int, ends: Collection[int], bad: Collection[Sequence[int]]
    ) -> None:
        self._min_tokens, self._ends = min_tokens, list(ends)
        self._always = [word[0] for word in bad if len(word) == 1]
        longer = [word for word in bad if len(word) > 1]
        self._starts = Automaton([word[:-1] for word in longer])
        self._last = [w[-1] for w in longer]
        self._length = 0  # tokens of output
        self._state = 0  # of the automaton, after the output

    def extend(self, tokens: Sequence[int]) -> None:
        """Record tokens that became output."""
        self._length += len(tokens)
        self._state = self._after(tokens)

    def after(self, path: Sequence[int]) -> list[int]:
        """Return the banned ids for the token that follows output and `path`, in no particular
        order."""
        banned = (
            [*self._always, *self._ends]
            if self._length + len(path) < self._min_tokens
            else self._always
        )
        return [*banned, *(self._last[i] for i in self._starts.ends(self._after(path)))]

    def _after(self, path: Sequence[int]) -> int:
        return reduce(self._starts.read, path, self._state)


def bad_word_ids(tokenizer: Any, words: Iterable[str]) -> list[list[int]]:
    """Return the token sequences of bad words for a `Sampler`.

    Each word is split by `tokenizer` without and with a leading space. A sequence that ends with
    another one is left out, since the shorter one bans as much. The same letters split into other
    tokens are not noticed. Raises `InvalidInput` for a word that has no tokens, or more than
    `MOST_BAD`.
    """
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            ids = tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise InvalidInput(
                    f"bad_words: {word!r} has no tokens in this model's vocabulary: leave it out"
                )
            if len(ids) > MOST_BAD:
                raise InvalidInput(
                    f"bad_words: {word[:20]!r}… has {len(ids)} tokens: a word may have at most "
                    f"{MOST_BAD}"
                )
            found[ids] = None
    return [list(ids) for ids in found if not any(ids[i:] in found for i in range(1, len(ids)))]
