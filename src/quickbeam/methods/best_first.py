"""Best-first search for the likeliest paths.

It is for deterministic proposals only: which paths are kept may then depend on the tokens
themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from quickbeam.drafters.base import GRAMMAR, Context, DraftProbs, DraftRequest, MarginalCost
from quickbeam.methods.acceptance import Chances, Printed
from quickbeam.methods.drafted import DraftedPolicy
from quickbeam.methods.perturbed import proposals
from quickbeam.methods.wide import ROUNDING, Row
from quickbeam.tree import TokenTree

PLAIN = Printed()
# The search asks about a path's children only if a child with this share of the path's probability
# would get in. On our own questions, asking about all paths promised 0.005 tokens more a tree (of
# 3.1 with 16 nodes, 4.1 with 64; on texts trees had 0.004 to 0.028 more). It took a quarter more
# of the drafter's time with 16 nodes, 37 % more with 64.
HOPE = 0.5
# One call asks about all such paths that are at least this share as likely as the likeliest of
# them.
FRACTION = 0.1


class Candidate(NamedTuple):
    cost: float  # minus the probability of its path, so that the best sort first
    number: int  # in the order of discovery; parents come before children, which cost no less
    parent: int  # the parent's number
    token: int
    depth: int
    source: str
    path: tuple[int, ...] = ()  # the tokens below the root that lead to it, and its own


class Search:
    """The `size` likeliest paths among those found so far, in `best`.

    `expand` finds their children, and `tree` returns the result.

    - `policy`: asks its drafter. The drafter sees a tree of its own, of the expanded nodes only.
    - `chances`: estimates the acceptance rate of a child from its rank and its probability.
    - `truth`: accepted tokens for each expected one. Used where the context has prices of nodes.
    - `floor`: a path that is no likelier than this adds no node. It can still replace a path that
      is less likely.

    A token that a grammar forces is as likely as the token before it.
    """

    def __init__(
        self,
        policy: DraftedPolicy,
        context: Context,
        size: int,
        chances: Chances = PLAIN,
        truth: float = 1.0,
    ) -> None:
        self.best: list[Candidate] = []
        self._chances = chances
        # by the parent's number and the token: rank and the drafter's probability
        self._said: dict[tuple[int, int], tuple[int, float]] = {}
        self.expanded = {0: 0}  # by number: the candidate's node in the drafter's tree
        self._policy, self._context, self._size, self.floor = policy, context, size, 0.0
        self._prices, self._truth = context.marginal_cost, truth
        self._seen = TokenTree(context.ids[-1])
        self._numbers = 1  # how many numbers are given out
        self.root = Candidate(-1.0, 0, 0, context.ids[-1], 0, "root")

    def expand(
        self, due: Sequence[Candidate], width: int | None = None, gain: float = float("inf")
    ) -> Generator[DraftRequest, DraftProbs | None, bool]:
        """Ask the drafter once for the `width` likeliest tokens after each of `due`.

        `due` is the root at first, later any of `best`. `gain` is the number of tokens expected
        from the call. Returns False if the call was not worth its time.
        """
        name, seen, place = self._policy.drafter.name, self._seen, self.expanded
        for one in due:
            if one is not self.root:
                place[one.number] = seen.add(place[one.parent], one.token, name, -one.cost)
        # All that can be computed before the call is computed here, because the call leaves the
        # caches cold.
        worst = self.worst
        bar = ROUNDING * worst / self._chances.LIFT
        # for each of `due`, what a child's probability must exceed for its path to get in
        least = [bar / one.cost for one in due]
        distributions = yield DraftRequest(
            self._context, seen, [place[one.number] for one in due], gain
        )
        if distributions is None:
            return False
        rows = proposals(
            self._context,
            distributions,
            [one.depth for one in due],
            min(width or self._size, self._size),
            least,
        )
        for i, (one, row) in enumerate(zip(due, rows, strict=True)):
            if (token := distributions.forced.get(i)) is not None:
                self.force(one, token, worst)
            else:
                self.take(one, row, worst)
        self.best = sorted(self.best)[: self._size]
        return True

    @property
    def worst(self) -> float:
        """The cost that a path must stay below to get in."""
        if not self.best:
            return -self.floor
        last = self.best[-1].cost
        return last if len(self.best) == self._size else max(last, -self.floor)

    def too_dear(self, cost: float, place: int) -> bool:
        """Whether a path is not worth its node if at least `place - 1` likelier ones are found.

        `keep_worthwhile` would drop it. Its likelier siblings and all that is on the way to it are
        such paths, so most paths need not be entered at all. (Siblings count as likelier by their
        rank. Observed rates may turn two estimates around; one such path may then be missed.)
        """
        prices = self._prices
        return prices is not None and -cost * self._truth <= prices.node(place)

    def worth(self, one: Candidate) -> float:
        """Return the probability that asking about `one` is of use.

        It is the probability that `one` is reached, or 0 if a grammar leaves no choice after it.
        """
        return -one.cost if self._context.forced(one.path) is None else 0.0

    def force(self, one: Candidate, token: int, worst: float) -> None:
        """Enter the only token that may come after `one`."""
        if one.cost < worst:
            self.best.append(self.new(one, token, 1.0, GRAMMAR))

    def take(
        self, one: Candidate, row: Row, worst: float, share: float = 1.0, known: int | None = None
    ) -> None:
        """Enter the drafter's tokens after `one`, the likeliest first.

        `share` multiplies their estimated acceptance rates. `known` is a token that is in the tree
        already and is skipped.
        """
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
            cost = one.cost * chance
            if cost >= worst or self.too_dear(cost, one.depth + 1 + rank):
                break
            best.append(self.new(one, token, chance, name))
            said[one.number, token] = rank, probability

    def new(self, parent: Candidate, token: int, chance: float, source: str) -> Candidate:
        """Return a candidate with the next number."""
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
        """Return the tree of the root and `best`, in order of worth: node i is `best[i - 1]`."""
        tree, place = TokenTree(self._context.ids[-1]), {0: 0}
        for one in self.best:
            _, probability = self._said.get((one.parent, one.token), (0, None))
            place[one.number] = tree.add(
                place[one.parent], one.token, one.source, -one.cost, probability=probability
            )
        return tree

    def said(self, node: int) -> tuple[int, float] | None:
        """Return the rank of a node of `tree` among its parent's children, and the drafter's
        probability.

        Returns None if the drafter did not propose it.
        """
        one = self.best[node - 1]
        return self._said.get((one.parent, one.token))


def keep_worthwhile(search: Search, prices: MarginalCost, truth: float) -> None:
    """Keep the likeliest paths, as long as each is expected to give more tokens than its node
    costs.

    The cost is the marginal cost of a node. `search.floor` is set so that later paths below that
    worth add no node. `truth`: accepted tokens for each expected one.
    """
    search.best = [
        one for nodes, one in enumerate(search.best, 1) if -one.cost * truth > prices.node(nodes)
    ]
    search.floor = prices.node(len(search.best) + 1) / truth


def open_ends(search: Search, size: int, max_depth: int) -> list[Candidate]:
    """Return the paths that the drafter is asked about next; see `DySpec`."""
    expanded, worst = search.expanded, search.worst
    due = [
        one
        # if all places are taken, nothing below the last path can get one
        for one in search.best[: size - 1]
        if one.cost * HOPE < worst
        and one.number not in expanded
        and one.parent in expanded
        and one.depth < max_depth
    ]
    return [one for one in due if one.cost <= FRACTION * due[0].cost]
