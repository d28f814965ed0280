"""Candidates without a call: what the text repeats, how finished texts went on, the last logits.

They compete in one best-first search, by acceptance rates that are learned for each kind. N-grams
are the source of prompt lookup and of LogitSpec (2507.01449, §3), the last logits are LogitSpec's.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.drafters.answers import Answers
from quickbeam.drafters.base import GRAMMAR, Context
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import MAX_N, Ngram, NgramIndex
from quickbeam.methods.acceptance import (
    GUESSED,
    REMEMBERED,
    REPEATED,
    AcceptanceModel,
    free_features,
)
from quickbeam.methods.base import ProposalSteps, without_calls
from quickbeam.methods.search import Candidate, Search, observe
from quickbeam.tree import TokenTree

LONGEST = 16  # the most tokens of a continuation
FARTHER = 128  # the same after the root, where the search is wide (`search.WIDE`)
MIN_MATCH = 2  # the fewest matching tokens for a guessed path to be continued from the text
GUESSES = 8  # how many of the best last logits may be guesses


class FreeCandidates:
    """Enters the candidates of one tree that take no call of the drafter, from these sources."""

    def __init__(
        self,
        context: Context,
        last_logits: LastLogits | None = None,
        answers: Answers | None = None,
    ) -> None:
        self._index: NgramIndex = context.states[Ngram.name]
        self._last_logits = last_logits
        self._answers = answers
        # candidates whose continuation was looked for, or that belong to one
        self._matched = set[int]()

    def enter(self, search: Search) -> None:
        """Enter continuations of the text below the root, or below new paths, and guesses."""
        index = self._index
        if not self._matched:
            self._matched.add(search.root.number)
            longest = FARTHER if search.wide else LONGEST
            if match := index.match(self._tail(search, search.root)):
                tokens = index.continuation(match, longest)
                self._continue(search, search.root, tokens, index.extent(match, LONGEST))
            self._remember(search, search.root, longest)
            self._guess(search)
            search.rank()
        new_paths = [path for path in search.best if path.number not in self._matched]
        for path in new_paths:
            self._matched.add(path.number)
            tail = self._tail(search, path)
            if match := index.match(tail, MIN_MATCH):
                drafted = tail[-min(path.depth, len(tail)) :]
                tokens = index.continuation(match, LONGEST, drafted)
                self._continue(search, path, tokens, match.length)
            self._remember(search, path, LONGEST)
        search.rank()

    def _tail(self, search: Search, path: Candidate) -> tuple[int, ...]:
        """Return the last tokens of the text that ends with `path`, as many as n-grams have."""
        return (*search.context.ids[-MAX_N:], *path.path)[-MAX_N:]

    def _remember(self, search: Search, path: Candidate, longest: int) -> None:
        """Enter what followed the text that ends with `path` in another text."""
        context = search.context
        match = self._answers.match(context, path.path) if self._answers else None
        if match and context.texts is not None:
            tokens = context.texts.continuation(match, longest)
            self._continue(search, path, tokens, match.length, Answers.name, REMEMBERED)

    def _continue(
        self,
        search: Search,
        path: Candidate,
        tokens: Sequence[int],
        length: int,
        source: str = Ngram.name,
        kind: str = REPEATED,
    ) -> None:
        """Enter `tokens` below `path`, up to the first that can't get in.

        `length`: how many tokens of repetition end with `path`.
        """
        admission_value = search.admission_value
        context = search.context
        tokens = context.within(path.path, tokens[: search.max_depth - path.depth])
        for i, token in enumerate(tokens):
            if token in path.children:  # another source proposes the same so far
                path = path.children[token]
                continue
            forced = context.forced(path.path) == token
            features = free_features(kind, length + i)
            rate = 1.0 if forced else search.model.rate(features)
            # what other guesses leave
            rate *= 1 - sum(child.rate for child in path.children.values())
            value = path.value * rate
            if value <= admission_value or search.below_cost(value, path.depth + 1):
                break
            if forced:
                path = search.enter(path, token, GRAMMAR, rate)
            else:
                path = search.enter(path, token, source, rate, [features])
            self._matched.add(path.number)

    def _guess(self, search: Search) -> None:
        """Enter what the last logits nearly chose below the root."""
        if self._last_logits is None:
            return
        left = 1 - sum(child.rate for child in search.root.children.values())
        # ranking the logits takes time, so the first guess is looked at before
        best = left * search.model.rate(free_features(GUESSED, 1))
        if best <= search.admission_value or search.below_cost(best, 1):
            return
        if search.context.forced(()) is not None:
            return
        for rank, token in self._last_logits.ranked(search.context, GUESSES):
            features = free_features(GUESSED, rank)
            rate = left * search.model.rate(features)
            if rate <= search.admission_value or search.below_cost(rate, 1):
                break
            if token not in search.root.children:
                search.enter(search.root, token, LastLogits.name, rate, (features,))


def free_tree(
    context: Context, budget: int, max_depth: int, model: AcceptanceModel, free: FreeCandidates
) -> ProposalSteps:
    """Return the steps to propose the tree of free candidates alone that are worth their cost."""
    search = Search(None, context, budget - 1, max_depth, model)
    free.enter(search)

    def learn(tree: TokenTree, path: Sequence[int]) -> None:
        observe(search, tree, path)

    return without_calls(search.tree(), learn)
