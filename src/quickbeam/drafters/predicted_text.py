"""A text that an answer is expected to be much like, and where the answer is in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from quickbeam.drafters.texts import AGREED, Match

GAP = -1  # in a predicted text: any tokens may stand here
NEAR = 16  # how many occurrences of a token are compared, before and after the last match
FOLLOWED = 2  # how many tokens must agree for the answer to be taken to be there


class PredictedText:
    """The tokens `ids` of a predicted answer, and where the answer is in them.

    `GAP` among them stands for any number of tokens that are not predicted.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self._gaps = [position for position, token in enumerate(self._ids) if token == GAP]
        self._after: dict[int, list[int]] = {}  # by token: the positions after its occurrences
        for position, token in enumerate(self._ids, 1):
            self._after.setdefault(token, []).append(position)
        self._position = 0  # of the token that is expected next
        self._followed: int | None = None  # how many tokens the text had then

    def match(self, text: Sequence[int], path: Sequence[int] = ()) -> Match | None:
        """Return where the prediction goes on after `text` and the drafted tokens of `path`.

        Of the occurrences of the last token, it is the one before which most tokens agree, of equal
        ones the nearest to where the answer is. None if the prediction does not hold that token.
        """
        return self._nearest([*text[-AGREED:], *path][-AGREED:], self._advanced(len(path)))

    def follow(self, text: Sequence[int]) -> None:
        """Find where the answer is whose committed tokens end `text`.

        Where too few tokens agree, each new token is taken to replace one of the prediction, or to
        stand in the next gap.
        """
        if self._followed is None:
            self._followed = len(text) - 1
        for end in range(self._followed + 1, len(text) + 1):
            expected = self._advanced(1)
            match = self._nearest(text[max(0, end - AGREED) : end], expected)
            if match and match.length >= FOLLOWED:
                self._position = match.position
            else:
                self._position = expected
        self._followed = len(text)

    def _nearest(self, tail: Sequence[int], expected: int) -> Match | None:
        """Return the best match of `tail`, of equal ones the nearest to the position `expected`."""
        positions = self._after.get(tail[-1], [])
        middle = bisect_left(positions, expected)
        near = positions[max(0, middle - NEAR) : middle + NEAR]
        matches = [Match(position, self._agreement(position, tail)) for position in near]
        return max(
            matches, key=lambda match: (match.length, -abs(match.position - expected)), default=None
        )

    def continuation(self, match: Match, length: int) -> list[int]:
        """Return the `length` tokens that follow a match, fewer before a gap and at the end."""
        end = min(match.position + length, self._next_gap(match.position))
        return self._ids[match.position : end]

    def _advanced(self, tokens: int) -> int:
        """Return where the answer is after so many tokens more."""
        return min(self._position + tokens, self._next_gap(self._position))

    def _next_gap(self, position: int) -> int:
        """Return the position of the first gap from `position` on, or of the text's end."""
        index = bisect_left(self._gaps, position)
        return self._gaps[index] if index < len(self._gaps) else len(self._ids)

    def _agreement(self, position: int, tail: Sequence[int]) -> int:
        """Return how many tokens before `position` are those that `tail` ends with."""
        before = self._ids[max(0, position - len(tail)) : position]
        length = 0
        for theirs, ours in zip(reversed(before), reversed(tail), strict=False):
            if theirs != ours:
                break
            length += 1
        return length
