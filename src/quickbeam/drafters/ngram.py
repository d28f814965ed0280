"""N-grams as a source: what came after the end of the text, where it occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.drafters.base import Source, SourceState
from quickbeam.drafters.texts import Match

MAX_N = 3  # tokens of the longest n-grams


class NgramIndex(SourceState):
    """Finds the newest earlier occurrence of a suffix in one text, which gets longer.

    The work per token and per lookup is constant. Each n-gram of 1 to `MAX_N` tokens is mapped to
    the position right after its newest occurrence. Continuations are read from the text itself.

    An n-gram is entered only when the token after it arrives. So the n-gram at the very end of the
    text can't hide an earlier occurrence, and a suffix never finds itself.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._entered = 0  # before how many tokens the n-grams are entered

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Their n-grams are entered when a match is next looked for."""
        self.ids.extend(tokens)

    def match(self, suffix: Sequence[int], least: int = 1) -> Match | None:
        """Find the newest occurrence of the longest end of `suffix` that the text holds.

        At least `least` and at most `MAX_N` tokens are matched, and some token of the text must
        follow the occurrence. Returns None without a match. `suffix` is the end of the text,
        perhaps continued by tokens that are only guessed; its last `MAX_N` tokens are enough.
        """
        ids = self.ids
        after = self._after
        size = len(suffix)
        for end in range(self._entered, len(ids)):
            for n in range(1, min(MAX_N, end) + 1):
                after[tuple(ids[end - n : end])] = end
        self._entered = len(ids)
        # The shortest comes first: most suffixes have no match, and without it no longer one has.
        position = after.get(tuple(suffix[size - least :])) if least <= size else None
        if position is None:
            return None
        for n in range(min(MAX_N, size), least, -1):
            longer = after.get(tuple(suffix[size - n :]))
            if longer is not None:
                return Match(longer, n)
        return Match(position, least)

    def extent(self, match: Match, limit: int = 16) -> int:
        """Return how many tokens before the match agree with the end of the text, up to `limit`.

        This shows how long the repetition has gone on.
        """
        ids = self.ids
        length = 0
        limit = min(limit, match.position)
        before = match.position - 1
        last = len(ids) - 1
        while length < limit and ids[before - length] == ids[last - length]:
            length += 1
        return length

    def continuation(self, match: Match, length: int, guessed: Sequence[int] = ()) -> list[int]:
        """Return the `length` tokens that follow a match.

        `guessed`: the tokens that the matched suffix had beyond the text. Where the tokens after
        the match run out, the continuation goes on with what it has predicted itself, as LZ77
        copies past its own end: text that has begun to repeat itself with some period is continued
        with it. (LogitSpec's pool takes an older occurrence there, with a longer continuation.)
        """
        tokens = self.ids[match.position : match.position + length]
        if len(tokens) < length:
            period = [*tokens, *guessed]
            tokens = [period[i % len(period)] for i in range(length)]
        return tokens


class Ngram(Source):
    """The n-gram index as a source of candidates: it searches the prompt and output so far."""

    name = "ngram"

    def begin(self, ids: Sequence[int]) -> NgramIndex:
        index = NgramIndex()
        index.extend(ids)
        return index
