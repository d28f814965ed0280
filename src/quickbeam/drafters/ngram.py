"""N-grams as a source: what came after the end of the text, where it occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quickbeam.drafters.base import Source, SourceState
from quickbeam.drafters.texts import Match

MAX_N = 3  # tokens of the longest n-grams
SCAN = 8  # how many occurrences of an n-gram are compared


class NgramIndex(SourceState):
    """Finds earlier occurrences of a suffix in one text, which gets longer.

    The work per token and per lookup is bounded. Each n-gram of 1 to `MAX_N` tokens is mapped to
    the position right after its newest occurrence, and each occurrence to the one before it.
    Continuations are read from the text itself.

    An n-gram is entered only when the token after it arrives. So the n-gram at the very end of the
    text can't hide an earlier occurrence, and a suffix never finds itself.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}
        # for n-1, by position: the position of the occurrence before. 0: there is none.
        self._older = [array("i", [0]) for _ in range(MAX_N)]
        self._entered = 1  # before how many tokens the n-grams are entered

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Their n-grams are entered when a match is next looked for."""
        self.ids.extend(tokens)

    def match(self, suffix: Sequence[int], least: int = 1) -> Match | None:
        """Return the first of `matches`; None without one."""
        return next(iter(self.matches(suffix, least)), None)

    def matches(self, suffix: Sequence[int], least: int = 1) -> list[Match]:
        """Return the occurrence that agrees with the most tokens of `suffix`, and an alternative.

        The alternative is the one with the most tokens among those that another token follows.
        Among equals the newest is taken. Where nothing matches, the list is empty.

        Of the n-grams that end `suffix`, the longest that the text holds is looked up, of at least
        `least` and at most `MAX_N` tokens. Its `SCAN` newest occurrences are compared; some token
        of the text must follow them. `suffix` is the end of the text, perhaps continued by tokens
        that are only guessed.
        """
        self._enter()
        newest = self._newest
        size = len(suffix)
        # The shortest comes first: most suffixes have no match, and without it no longer one has.
        if least > size or tuple(suffix[size - least :]) not in newest:
            return []
        n = min(MAX_N, size)
        while (position := newest.get(tuple(suffix[size - n :]), 0)) == 0:
            n -= 1
        best = dict[int, Match]()  # by the token that follows
        for _ in range(SCAN):
            token = self.ids[position]
            length = self._agreement(position, suffix, n)
            if token not in best or length > best[token].length:
                best[token] = Match(position, length)
            position = self._older[n - 1][position]
            if position == 0:
                break
        return sorted(best.values(), key=lambda match: (-match.length, -match.position))[:2]

    def _enter(self) -> None:
        """Enter the n-grams that a token has followed since the last match."""
        ids = self.ids
        newest = self._newest
        for end in range(self._entered, len(ids)):
            for n, older in enumerate(self._older, 1):
                if n > end:
                    older.append(0)
                    continue
                gram = tuple(ids[end - n : end])
                older.append(newest.get(gram, 0))
                newest[gram] = end
        self._entered = max(self._entered, len(ids))

    def _agreement(self, position: int, suffix: Sequence[int], agreed: int) -> int:
        """Return how many tokens before `position` are those that `suffix` ends with.

        The last `agreed` tokens are known to be.
        """
        ids = self.ids
        limit = min(position, len(suffix))
        before = position - 1
        while agreed < limit and ids[before - agreed] == suffix[-1 - agreed]:
            agreed += 1
        return agreed

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
