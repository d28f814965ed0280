"""Search for the likeliest paths, for proposals that are certain: what is kept may depend on the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quickbeam.draft.base import Context
from quickbeam.grow.drafted import DraftedPolicy
from quickbeam.grow.wide import ROUNDING, likeliest
from quickbeam.tree import TokenTree


class Candidate(NamedTuple):
    cost: float  # minus the probability of its path: the best sort first
    number: int  # in the order they were found; parents before children, which cost no less
    parent: int  # its number
    token: int
    depth: int


class Search:
    """The `size` likeliest paths among those found so far, in `best`; `expand` finds their children.

    `policy` asks its drafter, and `tree` gives the result. The drafter sees a tree of its own, of the expanded nodes only. Paths that are
    no likelier than `floor` are left out.
    """

    def __init__(self, policy: DraftedPolicy, context: Context, size: int, floor: float = 0.0) -> None:
        self.best: list[Candidate] = []
        self.expanded = {0: 0}  # by number: where a candidate is in the drafter's tree
        self._policy, self._context, self._size, self._floor = policy, context, size, floor
        self._seen = TokenTree(context.ids[-1])
        self._numbers = 1  # given out so far
        self.root = Candidate(-1.0, 0, 0, context.ids[-1], 0)

    def expand(self, due: Sequence[Candidate], width: int | None = None) -> None:
        """Ask the drafter once, for the `width` likeliest tokens after each of `due`: the root first, later any of `best`."""
        name, seen, place = self._policy.drafter.name, self._seen, self.expanded
        for one in due:
            if one is not self.root:
                place[one.number] = seen.add(place[one.parent], one.token, name, -one.cost)
        laws = self._policy.laws(self._context, seen, [place[one.number] for one in due])
        worst = min(-self._floor, self.best[-1].cost if len(self.best) == self._size else 0.0)
        least = [ROUNDING * worst / one.cost for one in due]  # what a probability must be above for its path to get in
        fresh = list[Candidate]()
        for one, row in zip(due, likeliest(laws.values, min(width or self._size, self._size), least), strict=True):
            for token, probability in zip(laws.names(row[0]), row[1], strict=True):
                cost = one.cost * probability
                if cost >= worst:
                    break
                fresh.append(Candidate(cost, self._numbers, one.number, token, one.depth + 1))
                self._numbers += 1
        self.best = sorted(self.best + fresh)[: self._size]

    def tree(self) -> TokenTree:
        """The root and `best`, in order of worth."""
        tree, place = TokenTree(self._context.ids[-1]), {0: 0}
        for one in self.best:
            place[one.number] = tree.add(place[one.parent], one.token, self._policy.drafter.name, -one.cost)
        return tree
