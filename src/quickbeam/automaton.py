"""Find many words in one text at once (Aho and Corasick, 1975).

A word is a sequence of symbols: the characters of a text, or the ids of tokens. A state stands for
the longest end of the text so far that a word begins with; 0 is the empty one. A symbol takes a few
steps, however many words there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence


class Automaton:
    """Finds `words`, which are not empty, in texts that are read symbol by symbol."""

    def __init__(self, words: Iterable[Sequence[Hashable]]) -> None:
        self._next: list[dict[Hashable, int]] = [{}]
        depth = [0]
        self._words: list[list[int]] = [[]]  # by state: the words that are exactly it, by number
        for number, word in enumerate(words):
            state = 0
            for symbol in word:
                if symbol not in self._next[state]:
                    self._next[state][symbol] = len(self._next)
                    self._next.append({})
                    depth.append(depth[state] + 1)
                    self._words.append([])
                state = self._next[state][symbol]
            self._words[state].append(number)
        # by state: the longest shorter end that a word begins with, and the longest that is a word
        self._shorter, self._ending = [0] * len(self._next), [0] * len(self._next)
        self._begun = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            shorter = self._shorter[state]
            self._ending[state] = shorter if self._words[shorter] else self._ending[shorter]
            self._begun[state] = depth[state] if self._next[state] else self._begun[shorter]
            for symbol, longer in self._next[state].items():
                self._shorter[longer] = self.read(shorter, symbol)
                queue.append(longer)

    def read(self, state: int, symbol: Hashable) -> int:
        """Return the state after one more symbol."""
        while symbol not in self._next[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return self._next[state][symbol]

    def begun(self, state: int) -> int:
        """Return the length of the longest end of the text with which a longer word begins."""
        return self._begun[state]

    def ends(self, state: int) -> list[int]:
        """Return the numbers of the words that end here, longest first."""
        found = list(self._words[state])
        while state := self._ending[state]:
            found += self._words[state]
        return found
