"""Search for the likeliest paths, for deterministic proposals: which ones are kept may depend on
the tokens themselves."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from quickbeam.draft.base import GRAMMAR, Context, DraftRequest, Laws, Prices
from quickbeam.tree import TokenTree
from quickbeam.trees.acceptance import Chances, Printed
from quickbeam.trees.drafted import DraftedPolicy
from quickbeam.trees.perturbed import proposals
from quickbeam.trees.wide import ROUNDING, Row

PLAIN = Printed()
# Best-first search asks for a path's children where this much of its probability would get one in.
# On our own questions, asking for all promised 0.005 tokens more a tree (of 3.1 with 16 nodes, 4.1
# with 64; `bench trees` found 0.004 to 0.028 more), for a quarter more of the drafter's time with
# 16, 37 % with 64.
HOPE = 0.5
# of the likeliest path's probability: it asks for all such paths down to this in one call
FRACTION = 0.1


class Candidate(NamedTuple):
    cost: float  # minus the probability of its path: the best sort first
    number: int  # in the order they were found; parents before children, which cost no less
    parent: int  # its number
    token: int
    depth: int
    source: str
    path: tuple[int, ...] = ()  # the tokens below the root that lead to it, its own included


class Search:
    """The `size` likeliest paths among those found so far, in `best`; `expand` finds their
    children.

    `policy` asks its drafter, and `tree` gives the result. The drafter sees a tree of its own, of
    the expanded nodes only. `chances`: the estimated acceptance rate of a child, by its rank and
    its probability. `floor`: a path that is no likelier adds no node, but can take the place of one
    that is less likely still. A token that a grammar forces is as likely as what it follows.
    """

    def __init__(
        self, policy: DraftedPolicy, context: Context, size: int, chances: Chances = PLAIN
    ) -> None:
        self.best: list[Candidate] = []
        self._chances = chances
        # by parent's number and token: place and probability
        self._said: dict[tuple[int, int], tuple[int, float]] = {}
        self.expanded = {0: 0}  # by number: where a candidate is in the drafter's tree
        self._policy, self._context, self._size, self.floor = policy, context, size, 0.0
        self._seen = TokenTree(context.ids[-1])
        self._numbers = 1  # given out so far
        self.root = Candidate(-1.0, 0, 0, context.ids[-1], 0, "root")

    def expand(
        self, due: Sequence[Candidate], width: int | None = None, gain: float = float("inf")
    ) -> Generator[DraftRequest, Laws | None, bool]:
        """Ask the drafter once, for the `width` likeliest tokens after each of `due`: the root
        first, later any of `best`. `gain`: the tokens expected from it. Returns False where the
        call was not worth its time."""
        name, seen, place = self._policy.drafter.name, self._seen, self.expanded
        for one in due:
            if one is not self.root:
                place[one.number] = seen.add(place[one.parent], one.token, name, -one.cost)
        # What can be known before the call is, as after it the caches are cold.
        worst = self.worst
        bar = ROUNDING * worst / self._chances.LIFT
        # what a probability must be above for its path to get in
        least = [bar / one.cost for one in due]
        laws = yield DraftRequest(self._context, seen, [place[one.number] for one in due], gain)
        if laws is None:
            return False
        rows = proposals(
            self._context,
            laws,
            [one.depth for one in due],
            min(width or self._size, self._size),
            least,
        )
        for i, (one, row) in enumerate(zip(due, rows, strict=True)):
            if (token := laws.forced.get(i)) is not None:
                self.force(one, token, worst)
            else:
                self.take(one, row, worst)
        self.best = sorted(self.best)[: self._size]
        return True

    @property
    def worst(self) -> float:
        """What a path must cost less than to get in."""
        if not self.best:
            return -self.floor
        last = self.best[-1].cost
        return last if len(self.best) == self._size else max(last, -self.floor)

    def worth(self, one: Candidate) -> float:
        """The probability that a call for `one` is of use: that it is reached, and 0 where a
        grammar leaves no choice after it."""
        return -one.cost if self._context.forced(one.path) is None else 0.0

    def force(self, one: Candidate, token: int, worst: float) -> None:
        """Only this token may come after `one`."""
        if one.cost < worst:
            self.best.append(self.new(one, token, 1.0, GRAMMAR))

    def take(
        self, one: Candidate, row: Row, worst: float, share: float = 1.0, known: int | None = None
    ) -> None:
        """Enter the drafter's tokens after `one`, the likeliest first. `share`: their probabilities
        are multiplied by it. `known`: a token that is in the tree already."""
        child, best, said, name = (
            self._chances.child,
            self.best,
            self._said,
            self._policy.drafter.name,
        )
        for rank, (token, probability) in enumerate(zip(*row, strict=True)):
            if token == known:
                continue
            chance = child(rank, probability) * share
            if one.cost * chance >= worst:
                break
            best.append(self.new(one, token, chance, name))
            said[one.number, token] = rank, probability

    def new(self, parent: Candidate, token: int, chance: float, source: str) -> Candidate:
        """A candidate with the next number."""
        self._numbers += 1
        path = (*parent.path, token)
        return Candidate(
            parent.cost * chance,
            self._numbers - 1,
            parent.number,
            token,
            parent.depth + 1,
            source,
            path,
        )

    def tree(self) -> TokenTree:
        """The root and `best`, in order of worth; `place` then says which node a candidate is."""
        tree, place = TokenTree(self._context.ids[-1]), {0: 0}
        self.place = place
        for one in self.best:
            _, probability = self._said.get((one.parent, one.token), (0, None))
            place[one.number] = tree.add(
                place[one.parent], one.token, one.source, -one.cost, probability=probability
            )
        return tree

    def said(self) -> dict[int, tuple[int, float]]:
        """For each node of the finished tree: its rank among its parent's children, and the
        drafter's probability."""
        both = (
            (self.place[one.number], self._said.get((one.parent, one.token))) for one in self.best
        )
        return {node: found for node, found in both if found is not None}


def keep_worthwhile(search: Search, prices: Prices, truth: float) -> None:
    """Keep the likeliest paths as long as each is expected to give more tokens than the marginal
    cost of its node, and ignore less likely ones from now on. `truth`: accepted tokens for each
    expected one."""
    search.best = [
        one for nodes, one in enumerate(search.best, 1) if -one.cost * truth > prices.node(nodes)
    ]
    search.floor = prices.node(len(search.best) + 1) / truth


def open_ends(search: Search, size: int, max_depth: int) -> list[Candidate]:
    """The paths that the drafter is asked for next."""
    expanded, worst = search.expanded, search.worst
    due = [
        one
        # where all places are taken, nothing below the last can get one
        for one in search.best[: size - 1]
        if one.cost * HOPE < worst
        and one.number not in expanded
        and one.parent in expanded
        and one.depth < max_depth
    ]
    return [one for one in due if one.cost <= FRACTION * due[0].cost]
