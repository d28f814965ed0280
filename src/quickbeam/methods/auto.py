"""Our own method: one tree of what the text repeats, how finished texts went on, what the last
logits nearly chose, and what a drafter says.

All compete in one best-first search, by acceptance rates that are learned for each kind of
proposal. N-grams are the source of prompt lookup and of LogitSpec (2507.01449, §3), the last logits
are LogitSpec's. Merging them with a drafter's candidates by calibrated value is ours. They cost
nodes but no call. Where the text repeats itself for long, the drafter is not asked at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quickbeam.drafters.base import GRAMMAR, Context, Drafter
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Answers, Ngram, NgramIndex
from quickbeam.methods.acceptance import (
    AcceptanceModel,
    Calibration,
    Evidence,
    guessed,
    remembered,
    repeated,
)
from quickbeam.methods.base import Growth, Method, without_calls
from quickbeam.methods.search import Candidate, Search, best_first
from quickbeam.tree import TokenTree

LONGEST = 16  # the most tokens of a continuation
FARTHER = 128  # the same after the root, where the search is wide (`search.WIDE`)
# A repetition of at least this many tokens is a situation of its own: many tokens are accepted
# without a call.
LONG = 8
SURE = 2  # the fewest matching tokens for a guessed path to be continued from the text
GUESSES = 8  # how many of the best last logits may be guesses


class FreeCandidates:
    """Enters the candidates of one tree that take no call of the drafter."""

    def __init__(self, index: NgramIndex, last_logits: LastLogits, answers: Answers) -> None:
        self._index, self._last_logits, self._answers = index, last_logits, answers
        # candidates whose continuation was looked for, or that belong to one
        self._matched = set[int]()

    def propose(self, search: Search) -> None:
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
        for one in [one for one in search.best if one.number not in self._matched]:
            self._matched.add(one.number)
            tail = self._tail(search, one)
            if match := index.match(tail, SURE):
                beyond = tail[-min(one.depth, len(tail)) :]
                tokens = index.continuation(match, LONGEST, beyond)
                self._continue(search, one, tokens, match.length)
            self._remember(search, one, LONGEST)
        search.rank()

    def _tail(self, search: Search, one: Candidate) -> tuple[int, ...]:
        """Return the last tokens of the text that ends with `one`, as many as the longest n-gram
        has."""
        most = self._index.max_n
        return (*search.context.ids[-most:], *one.path)[-most:]

    def _remember(self, search: Search, one: Candidate, longest: int) -> None:
        """Enter what followed the text that ends with `one` in another text."""
        context = search.context
        if (match := self._answers.match(context, one.path)) and context.texts is not None:
            tokens = context.texts.continuation(match, longest)
            self._continue(search, one, tokens, match.length, Answers.name, remembered)

    def _continue(
        self,
        search: Search,
        one: Candidate,
        tokens: Sequence[int],
        length: int,
        source: str = Ngram.name,
        kind: Callable[[int], Evidence] = repeated,
    ) -> None:
        """Enter `tokens` as a path below `one`, up to the first that can't get in.

        `length`: how many tokens of repetition end with `one`.
        """
        worst, context = search.worst, search.context
        tokens = context.within(one.path, tokens[: search.max_depth - one.depth])
        for i, token in enumerate(tokens):
            if token in one.children:  # another source says the same so far
                one = one.children[token]
                continue
            forced = context.forced(one.path) == token
            evidence = () if forced else (kind(length + i),)
            rate = 1.0 if forced else search.model.rate(*evidence)
            # what other guesses leave
            rate *= 1 - sum(child.rate for child in one.children.values())
            value = one.value * rate
            if value <= worst or search.below_cost(value, one.depth + 1):
                break
            one = search.enter(one, token, GRAMMAR if forced else source, rate, evidence)
            self._matched.add(one.number)

    def _guess(self, search: Search) -> None:
        """Enter what the last logits nearly chose below the root."""
        left = 1 - sum(child.rate for child in search.root.children.values())
        best = left * search.model.rate(guessed(1))
        if (
            best <= search.worst
            or search.below_cost(best, 1)
            or search.context.forced(()) is not None
        ):
            return
        for rank, token in self._last_logits.ranked(search.context, GUESSES):
            evidence = guessed(rank)
            rate = left * search.model.rate(evidence)
            if rate <= search.worst or search.below_cost(rate, 1):
                break
            if token not in search.root.children:
                search.enter(search.root, token, LastLogits.name, rate, (evidence,))


class Auto(Method):
    """The search over a drafter's candidates and free ones."""

    priced = True

    def __init__(
        self,
        drafter: Drafter,
        ngram: Ngram,
        last_logits: LastLogits,
        answers: Answers = Answers(),  # noqa: B008
    ) -> None:
        self.drafter, self.last_logits, self.answers = drafter, last_logits, answers
        self.sources = (drafter, ngram, last_logits, answers)
        self.model, self.calibration = AcceptanceModel(), Calibration()

    def situation(self, context: Context) -> int:
        index: NgramIndex = context.states[Ngram.name]
        match = index.match(context.ids[-index.max_n :])
        return 4 if match and index.extent(match, LONG) == LONG else 3

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        if budget < 2 or max_depth < 1:
            return (yield from without_calls(TokenTree(context.ids[-1])))
        free = FreeCandidates(context.states[Ngram.name], self.last_logits, self.answers)
        share = self.calibration.accepted_per_expected
        search = Search(self.drafter, context, budget - 1, max_depth, self.model, share)
        return (yield from best_first(search, self.calibration, free.propose))
