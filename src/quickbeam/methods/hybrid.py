"""One tree from n-grams of the text and from a drafter.

Both sources compete in one search, by estimated acceptance rates.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from quickbeam.drafters.base import GRAMMAR, Context, Drafter, DraftProbs, DraftRequest
from quickbeam.drafters.ngram import Ngram, NgramIndex
from quickbeam.methods.best_first import Candidate, Search
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.wide import Row
from quickbeam.tree import TokenTree

LONGEST = 16  # the most tokens of a continuation
# If a tree may have more nodes than this, a pass is so expensive that calls of the drafter cost
# little beside it. The continuation of the root may then have `FARTHER` tokens, and the drafter is
# asked along it too.
WIDE = 128
FARTHER = 128
# A repetition of at least this many tokens is a situation of its own: many tokens are accepted
# without a call.
LONG = 8
SURE = 2  # the fewest matching tokens for a guessed path to be continued from the text


# What the drafter says of the token that continues the text: it was not asked, or has no answer;
# the token is its likeliest; another token is.
UNASKED, SAME, OTHER = range(3)


class Repeats:
    """Acceptance rates of n-gram continuations.

    They depend on how many tokens the text has been repeating itself, and on what the drafter says
    of the next one: `UNASKED`, `SAME` or `OTHER`. They begin with a guess, 0.25 to 0.9 as in
    `Budget.expected_tokens` where the drafter was not asked. Observed acceptance corrects it.
    """

    USUAL = (0.25, 0.45, 0.65, 0.8, 0.9)  # after 1, 2 and 3, 4 to 7, 8 to 15 tokens, 16 and more
    # by how much the odds are multiplied, at first, if the drafter agrees; divided if it does not
    AGREED = 4.0
    TRUST = 8.0  # how many observations the guess counts for
    MEMORY = 256  # observations of a class after which one has lost most of its weight

    def __init__(self) -> None:
        odds = [chance / (1 - chance) for chance in self.USUAL]
        usual = [
            more * one / (1 + more * one)
            for more in (1.0, self.AGREED, 1 / self.AGREED)
            for one in odds
        ]
        self._right = [self.TRUST * chance for chance in usual]
        self._count = [self.TRUST] * len(usual)

    def chance(self, length: int, said: int = UNASKED) -> float:
        """Return the probability that the next token is the one that followed the earlier
        occurrence.

        `length`: for how many tokens the text has been repeating itself. `said`: what the drafter
        says of that token.
        """
        i = self._class(length, said)
        return min(0.99, self._right[i] / self._count[i])

    def observe(self, length: int, said: int, right: bool) -> None:
        i, keep = self._class(length, said), 1 - 1 / self.MEMORY
        self._right[i] = keep * self._right[i] + right
        self._count[i] = keep * self._count[i] + 1

    def _class(self, length: int, said: int) -> int:
        sizes = len(self.USUAL)
        return said * sizes + min(max(length, 1).bit_length(), sizes) - 1


class HybridSearch(Search):
    """A search that includes n-gram continuations: paths that cost no call of the drafter.

    If the drafter is asked about a node that has a continuation, both may propose the same token.
    They are then one child. Its acceptance rate is the larger of two: that of the drafter's
    proposal, and that which continuations have had where the drafter said the same (its likeliest
    token is this one, or is another). The drafter's other tokens share the rest.
    """

    def __init__(
        self,
        policy: DySpec,
        context: Context,
        size: int,
        max_depth: int,
        ngram: NgramIndex,
        repeats: Repeats,
    ) -> None:
        super().__init__(policy, context, size, policy.likeliest, policy.promises.truth)
        if context.marginal_cost is not None:
            self.floor = context.marginal_cost.node(1) / self._truth
        # by the number of a continuation's candidate: tokens of repetition before it, and what the
        # drafter says of it
        self.lengths: dict[int, tuple[int, int]] = {}
        # by the number of its parent: the probability that it is right
        self.chances: dict[int, float] = {}
        # by the number of its parent: the candidate and those that continue it
        self._chains: dict[int, list[Candidate]] = {}
        self._ngram, self._repeats, self._max_depth, self.wide = (
            ngram,
            repeats,
            max_depth,
            size > WIDE,
        )
        # numbers of candidates whose continuation was looked for, or that belong to one
        self._matched = {0}
        if match := ngram.match(self._tail(self.root)):
            longest = FARTHER if self.wide else LONGEST
            self._continue(
                self.root, ngram.continuation(match, longest), ngram.extent(match, LONGEST)
            )

    def expand(
        self, due: Sequence[Candidate], width: int | None = None, gain: float = float("inf")
    ) -> Generator[DraftRequest, DraftProbs | None, bool]:
        if not (yield from super().expand(due, width, gain)):
            return False
        for one in [one for one in self.best if one.number not in self._matched]:
            self._matched.add(one.number)
            tail = self._tail(one)
            if match := self._ngram.match(tail, SURE):
                guessed = tail[-min(one.depth, len(tail)) :]
                self._continue(one, self._ngram.continuation(match, LONGEST, guessed), match.length)
        return True

    def worth(self, one: Candidate) -> float:
        worth = super().worth(one)
        return worth if self.wide else worth * (1 - self.chances.get(one.number, 0.0))

    def force(self, one: Candidate, token: int, worst: float) -> None:
        if not self._continued(one):
            super().force(one, token, worst)

    def repeating(self, node: int) -> tuple[int, int] | None:
        """Return, for a node of `tree` that continues the text, the tokens of repetition before it,
        and what the drafter says of it.

        Returns None for any other node.
        """
        return self.lengths.get(self.best[node - 1].number)

    def take(
        self, one: Candidate, row: Row, worst: float, share: float = 1.0, known: int | None = None
    ) -> None:
        chain = self._continued(one)
        if not chain:
            return super().take(one, row, worst)
        before, first = self.chances[one.number], chain[0]
        known, (tokens, probabilities), said = first.token, row, 0.0
        if known in tokens:
            rank = tokens.index(known)
            self._said[one.number, known] = rank, probabilities[rank]
            said = min(self._chances.child(rank, probabilities[rank]), 1 - 1e-6)
        both = max(said, before)
        if tokens and first.number in self.lengths:
            length, verdict = self.lengths[first.number][0], SAME if tokens[0] == known else OTHER
            self.lengths[first.number] = length, verdict
            both = max(said, self._repeats.chance(length, verdict))
        below = {candidate.number for candidate in chain}
        self.best = [
            found._replace(cost=found.cost * both / before) if found.number in below else found
            for found in self.best
        ]
        super().take(one, row, worst, (1 - both) / (1 - said), known)

    def _tail(self, one: Candidate) -> tuple[int, ...]:
        """Return the last tokens of the text that ends with `one`, as many as the longest n-gram
        has."""
        most = self._ngram.max_n
        return (*self._context.ids[-most:], *one.path)[-most:]

    def _continued(self, one: Candidate) -> list[Candidate]:
        """Return the continuation below `one`, or nothing if it is no longer among the best."""
        chain = self._chains.get(one.number, [])
        return (
            chain if chain and any(found.number == chain[0].number for found in self.best) else []
        )

    def _continue(self, one: Candidate, tokens: Sequence[int], length: int) -> None:
        """Enter `tokens` as a path below `one`, up to the first that can't get in.

        `length`: how many tokens of repetition end with `one`.
        """
        worst, chain, above = self.worst, list[Candidate](), one
        for i, token in enumerate(
            self._context.within(one.path, tokens[: self._max_depth - one.depth])
        ):
            forced = self._context.forced(above.path) == token
            chance = 1.0 if forced else self._repeats.chance(length + i)
            cost = above.cost * chance
            if cost >= worst or self.too_dear(cost, above.depth + 1):
                break
            self.chances[above.number] = chance
            above = self.new(above, token, chance, GRAMMAR if forced else Ngram.name)
            if not forced:
                self.lengths[above.number] = length + i, UNASKED
            self._matched.add(above.number)
            chain.append(above)
        for i, candidate in enumerate(chain):
            self._chains[candidate.parent] = chain[i:]
        self.best = sorted(self.best + chain)[: self._size]


class Hybrid(DySpec):
    """`DySpec`'s search, with n-gram continuations of the text as further paths.

    N-grams are the source of prompt lookup and of LogitSpec (2507.01449, §3). Merging them by
    calibrated value is ours. Continuations cost nodes but no call. Where the text repeats itself
    for long, the drafter is not asked at all.
    """

    draws = False

    def __init__(self, drafter: Drafter, ngram: Ngram) -> None:
        super().__init__(drafter)
        self.sources = (drafter, ngram)
        self.repeats = Repeats()

    def situation(self, context: Context) -> int:
        index: NgramIndex = context.states[Ngram.name]
        match = index.match(context.ids[-index.max_n :])
        return 4 if match and index.extent(match, LONG) == LONG else super().situation(context)

    def _search(self, context: Context, size: int, max_depth: int) -> Search:
        return HybridSearch(
            self, context, size, max_depth, context.states[Ngram.name], self.repeats
        )

    def _asked_for(self, search: Search, tree: TokenTree, nodes: Sequence[int]) -> list[int]:
        assert isinstance(search, HybridSearch)
        return list(nodes) if search.wide else super()._asked_for(search, tree, nodes)

    def _learn(
        self, search: Search, tree: TokenTree, path: Sequence[int], asked: float = 0.0
    ) -> None:
        assert isinstance(search, HybridSearch)
        _observe(self.repeats, search, tree, path)
        super()._learn(search, tree, path, asked)


def _observe(repeats: Repeats, search: HybridSearch, tree: TokenTree, path: Sequence[int]) -> None:
    """Record whether the nodes that continue the text were accepted."""
    for node, following in zip(path, [*path[1:], None], strict=True):
        for child in tree.children[node].values():
            if (found := search.repeating(child)) is not None:
                repeats.observe(*found, child == following)
