"""Candidates without a call: what the text repeats, how finished texts went on, the last logits.

They compete in one best-first search, by acceptance rates that are learned for each kind. N-grams
are the source of prompt lookup and of LogitSpec (2507.01449, §3), the last logits are LogitSpec's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from quickbeam.drafters.answers import Answers
from quickbeam.drafters.base import GRAMMAR, Context, DraftProbs, SuccessorSource
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import MAX_N, Ngram, NgramIndex
from quickbeam.drafters.prediction import Prediction, Skeletons
from quickbeam.drafters.successors import Successors
from quickbeam.methods.acceptance import (
    ALTERNATIVE,
    GUESSED,
    PREDICTED,
    REMEMBERED,
    REPEATED,
    SKELETON,
    AcceptanceModel,
    CandidateFeatures,
    free_features,
    successor_features,
)
from quickbeam.methods.base import ProposalSteps, without_calls
from quickbeam.methods.children import likeliest_children
from quickbeam.methods.search import Candidate, Search, observe
from quickbeam.tree import TokenTree

LONGEST = 16  # the most tokens of a continuation
FARTHER = 128  # the same after the root, where the search is wide (`search.WIDE`)
LONGEST_PREDICTED = 48  # the most tokens of a continuation of a predicted text
KINDS = {Prediction.name: PREDICTED, Skeletons.name: SKELETON}  # of their acceptance rates
MIN_MATCH = 2  # the fewest matching tokens for a guessed path to be continued from the text
GUESSES = 8  # how many of the best last logits may be guesses


class FreeCandidates:
    """Enters the candidates of one tree that take no call of the drafter, from these sources."""

    def __init__(
        self,
        context: Context,
        last_logits: LastLogits | None = None,
        answers: Answers | None = None,
        successors: Sequence[SuccessorSource] = (),
        predictions: Sequence[Prediction] = (),
    ) -> None:
        self._index: NgramIndex = context.states[Ngram.name]
        self._last_logits = last_logits
        self._answers = answers if context.texts is not None else None
        self._successors = [each for each in successors if each.knows_of(context)]
        self._predictions = [each for each in predictions if each.text(context) is not None]
        self._end = tuple(context.ids[-MAX_N:])  # the last tokens of the text
        self._expanded = set[Candidate]()  # those whose successors were looked for
        # those whose continuation was looked for, or that belong to one
        self._matched = set[Candidate]()

    def enter(self, search: Search) -> None:
        """Enter continuations of the text below the root, or below new paths, and guesses.

        What followed the same tokens elsewhere is entered below every path that is kept.
        """
        index = self._index
        if not self._matched:
            self._matched.add(search.root)
            longest = FARTHER if search.wide else LONGEST
            self._predict(search, search.root)
            first = REPEATED
            matches = index.matches(search.context.ids[-LONGEST:])
            # beside a drafter an alternative is worth less than the node that it takes
            for match in matches[:1] if search.name else matches:
                tokens = index.continuation(match, longest)
                self._continue(search, search.root, tokens, match.length, first=first)
                first = ALTERNATIVE
            self._remember(search, search.root, longest)
            self._succeed(search, search.root)
            self._guess(search)
            search.rank()
        self._continue_new_paths(search)
        if not self._successors:
            return
        while new_paths := [path for path in search.best if path not in self._expanded]:
            for path in new_paths:
                self._succeed(search, path)
            search.rank()
            self._continue_new_paths(search)

    def _continue_new_paths(self, search: Search) -> None:
        """Enter continuations of the text below the paths that are new in `search.best`."""
        index = self._index
        entered_before = len(search.candidates)
        new_paths = [path for path in search.best if path not in self._matched]
        for path in new_paths:
            self._matched.add(path)
            self._predict(search, path)
            if match := index.match((self._end + path.path)[-MAX_N:], MIN_MATCH):
                tokens = index.continuation(match, LONGEST, path.path[-MAX_N:])
                self._continue(search, path, tokens, match.length)
            self._remember(search, path, LONGEST)
        if len(search.candidates) > entered_before:
            search.rank()

    def _predict(self, search: Search, path: Candidate) -> None:
        """Enter how predicted texts go on after the text that ends with `path`."""
        context = search.context
        longest = FARTHER if search.wide else LONGEST_PREDICTED
        for prediction in self._predictions:
            text = prediction.text(context)
            match = prediction.match(context, path.path)
            if match and text is not None:
                tokens = text.continuation(match, longest)
                kind = KINDS[prediction.name]
                self._continue(search, path, tokens, match.length, prediction.name, kind)

    def _remember(self, search: Search, path: Candidate, longest: int) -> None:
        """Enter what followed the text that ends with `path` in another text."""
        if self._answers is None:
            return
        context = search.context
        match = self._answers.match(context, path.path)
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
        first: str | None = None,
    ) -> None:
        """Enter `tokens` below `path`, up to the first that can't get in.

        `length`: how many tokens of repetition end with `path`. `kind`: of their acceptance rates.
        `first`: that of the first token, where it is another one.
        """
        first = first or kind
        admission_value = search.admission_value
        context = search.context
        tokens = context.within(path.path, tokens[: search.max_depth - path.depth])
        for i, token in enumerate(tokens):
            if token in path.children:  # another source proposes the same so far
                path = path.children[token]
                continue
            forced = context.forced(path.path) == token
            token_kind = kind if i else first
            features = free_features(token_kind, length + i)
            rate = 1.0 if forced else search.model.rate(features)
            # what other guesses leave; the rates of alternatives were learned beside another guess
            rate = min(rate, path.left) if token_kind == ALTERNATIVE else rate * path.left
            value = path.value * rate
            if value <= admission_value or search.below_cost(value, path.depth + 1):
                break
            if forced:
                path = search.enter(path, token, GRAMMAR, rate, [])
            else:
                path = search.enter(path, token, source, rate, [features])
            self._matched.add(path)

    def _succeed(self, search: Search, path: Candidate) -> None:
        """Enter what followed elsewhere the tokens that `path` ends with, from each source."""
        self._expanded.add(path)
        context = search.context
        if path.depth >= search.max_depth or context.forced(path.path) is not None:
            return
        for source in self._successors:
            if path.value <= search.admission_value:
                return
            successors = source.after(context, path.path)
            if successors is not None:
                self._enter_successors(search, path, source.name, successors)

    def _enter_successors(
        self, search: Search, path: Candidate, source: str, successors: Successors
    ) -> None:
        """Enter successors below `path`.

        A token that is below `path` already gets the larger of two rates. The others share what
        those tokens leave.
        """
        context = search.context
        admission_value = search.admission_value
        ranked: Iterable[tuple[int, CandidateFeatures]] = (
            (token, successor_features(source, successors.known, rank, probability))
            for rank, (token, probability) in enumerate(_ranked(context, successors, path.depth))
        )
        left = 1.0
        if path.children:  # else most need not be looked at
            ranked = list(ranked)
            left = self._join(search, path, ranked)
        for rank, (token, features) in enumerate(ranked):
            if token in path.children:
                continue
            rate = search.model.rate(features) * left
            value = path.value * rate
            if value <= admission_value or search.below_cost(value, path.depth + 1 + rank):
                break
            if context.within(path.path, [token]):
                search.enter(path, token, source, rate, [features])

    def _join(
        self, search: Search, path: Candidate, ranked: Iterable[tuple[int, CandidateFeatures]]
    ) -> float:
        """Give the children that `path` has the rates of the same successors, if larger.

        Returns by what the rates of the other successors are multiplied.
        """
        shared = 0.0
        for token, features in ranked:
            child = path.children.get(token)
            if child is not None:
                rate = min(search.model.rate(features), 1 - 1e-6)
                child.features.append(features)
                child.revalue(path.value, max(child.rate, rate))
                shared += rate
        return max(0.0, path.left) / max(1e-6, 1 - shared)

    def _guess(self, search: Search) -> None:
        """Enter what the last logits nearly chose below the root."""
        if self._last_logits is None:
            return
        left = search.root.left
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
                search.enter(search.root, token, LastLogits.name, rate, [features])


def _ranked(context: Context, successors: Successors, depth: int) -> list[tuple[int, float]]:
    """Return successors and their probabilities after a node of this depth.

    The likeliest come first, given the noise of their position (`methods/children.py`).
    """
    if context.noise is None:
        return list(zip(successors.tokens.tolist(), successors.probs.tolist(), strict=True))
    probs = DraftProbs(
        torch.from_numpy(successors.probs)[None],
        torch.from_numpy(successors.tokens.astype("int64")),
    )
    (row,) = likeliest_children(context, probs, [depth], len(successors.tokens))
    return list(zip(*row, strict=True))


def free_tree(
    context: Context, budget: int, max_depth: int, model: AcceptanceModel, free: FreeCandidates
) -> ProposalSteps:
    """Return the steps to propose the tree of free candidates alone that are worth their cost."""
    search = Search(None, context, budget - 1, max_depth, model)
    free.enter(search)

    def learn(tree: TokenTree, path: Sequence[int]) -> None:
        observe(search, tree, path)

    return without_calls(search.tree(), learn)
