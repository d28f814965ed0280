"""DySpec's greedy tree (2410.11744, Alg. 1): always fill the slot that is most likely to be reached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from quickbeam.draft.base import Context, Drafter
from quickbeam.draft.prices import Prices
from quickbeam.tree import TokenTree
from quickbeam.trees.acceptance import Chances, Likeliest, Measured
from quickbeam.trees.best_first import Candidate, Search
from quickbeam.trees.drafted import DraftedPolicy
from quickbeam.trees.dyspec import Slots

FINDS = 2  # nodes, each at the price of the next, that asking for one adds to a tree, or about so many: chosen on our own questions
# Best-first search asks for a path's children where this much of its probability would get one in. On our own questions, asking for all
# promised 0.005 tokens more a tree (of 3.1 with 16 nodes, 4.1 with 64; `bench trees` found 0.004 to 0.028 more), for a quarter more of the
# drafter's time with 16, 37 % with 64.
HOPE = 0.5
FRACTION = 0.1  # of the likeliest path's probability: it asks for all such paths down to this in one call


class Promises:
    """How much of what trees promise comes true: what a drafter says is not always so.

    A tree promises the sum of its nodes' probabilities. Its calls were made for nodes that are reached with a probability, in sum `asked`.
    Both are held against the tokens that were accepted, in sums that fade.
    """

    MEMORY = 64  # trees after which an observation has lost most of its weight
    TRUST = 4.0  # trees that the first guess counts for
    LEAST = 1e-3  # tokens that never fade: where nothing was promised for long, or nothing came, the quotient stays a number

    def __init__(self) -> None:
        self._accepted, self._promised, self._asked = 0.6 * self.TRUST, 0.6 * self.TRUST, self.TRUST

    @property
    def truth(self) -> float:
        """Accepted tokens for each one that was promised."""
        return (self._accepted + self.LEAST) / (self._promised + self.LEAST)

    @property
    def gain(self) -> float:
        """Accepted tokens that come of asking for a node that is reached."""
        return self._accepted / self._asked

    def observe(self, accepted: int, promised: float, asked: float) -> None:
        """A tree promised `promised` tokens, with calls for nodes of `asked`."""
        keep = 1 - 1 / self.MEMORY
        self._accepted = keep * self._accepted + accepted
        self._promised = keep * self._promised + promised
        self._asked = keep * self._asked + asked


class Greedy(DraftedPolicy):
    """Above temperature 0, Alg. 1: a heap of open slots, the best of which is filled (`Slots`). At temperature 0, best-first search
    (App. D.1): the tree is the likeliest paths, by the product of their chances. Nodes stand in order of worth.

    As printed, Alg. 1 takes the probability of a draw for the chance that it is accepted (`acceptance.Printed`). That makes trees too wide:
    a rare draw is accepted often, by min(1, p / q), and its sibling, which comes after a rejection, seldom. `acceptance.Measured`, the
    default, goes by what was accepted, and `acceptance.Likeliest` does at temperature 0. Slots are chosen by what is known before their
    tokens are: that keeps sampling exact.

    The paper calls the drafter once a node. Here it is asked for several nodes at once, about as often as the tree is deep; a law
    that comes early changes nothing of the tree, as it is not looked at before its turn.

    - Alg. 1: when the best slot belongs to a node without a law, those nodes are asked for whose first slots are among the best of the
      heap, as many as there are nodes left to add. Until a node's first slot is the best, it counts as one of a law of usual `PEAK`.
    - Best-first: of the likeliest paths found so far, as many as fit the budget, those are asked for that have no law yet, have `HOPE` of
      a child among them, and are at least `FRACTION` as likely as the best of these, until there is none. So few of the likeliest paths
      are missed, those below a path that barely got in.

    The paper's budget is a number of nodes. With `Context.prices`, at temperature 0, the tree ends where the next likeliest path promises
    less than a node's price, and no call is made for nodes that promise less than a call's (`Promises`: how much of it to believe).
    """

    priced = True

    def __init__(self, drafter: Drafter, chances: Chances | None = None) -> None:
        super().__init__(drafter)
        self.chances = chances or Measured()  # of draws
        self.likeliest = chances or Likeliest()  # of certain children
        self._drawn: dict[int, tuple[int, float]] = {}  # the drawn nodes of the last tree: their place and probability
        self._certain: dict[int, tuple[int, float]] = {}  # or the certain ones
        self.promises = Promises()
        self._last = (0.0, 0.0)  # what the last tree promised, and what it asked for

    def grow(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        self._last, self._drawn, self._certain = (0.0, 0.0), {}, {}
        if budget < 2 or max_depth < 1:
            return TokenTree(context.ids[-1])
        if context.temperature > 0:
            return self._sampled(context, budget, max_depth)
        if context.prices is not None:
            return self._worthwhile(context, context.prices, budget - 1, max_depth)
        return self._best_first(context, budget - 1, max_depth)

    def verified(self, tree: TokenTree, path: Sequence[int]) -> None:
        for node, accepted in zip_longest(path, path[1:]):
            for child in tree.children[node].values():
                if child in self._certain:
                    self.likeliest.observe(*self._certain[child], child == accepted)
                elif child in self._drawn:
                    self.chances.observe(*self._drawn[child], child == accepted)
                if self._drawn and child == accepted:  # later ones had no turn
                    break
        if self._last[1]:
            self.promises.observe(self._accepted(path), *self._last)

    def _sampled(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        slots = Slots(self, context, budget, max_depth, self.chances)
        tree = slots.fill()
        self._drawn = slots.drawn
        return tree

    def _best_first(self, context: Context, size: int, max_depth: int) -> TokenTree:
        search = self._search(context, size, max_depth)
        due = [search.root]
        while due:
            search.expand(due)
            due = open_ends(search, size, max_depth)
        return self._planted(search)

    def _worthwhile(self, context: Context, prices: Prices, size: int, max_depth: int) -> TokenTree:
        truth, asked = self.promises.truth, 0.0
        search = self._search(context, size, max_depth)
        due, trial = [search.root], prices.trial
        keep_worthwhile(search, prices, truth)
        while due and (trial or self._profit(search, due) > prices.call):
            trial = False
            search.expand(due)
            asked += sum(search.worth(one) for one in due)
            keep_worthwhile(search, prices, truth)
            due = open_ends(search, size, max_depth)
        self._last = -sum(one.cost for one in search.drafted), asked
        return self._planted(search)

    def _profit(self, search: Search, due: Sequence[Candidate]) -> float:
        """Tokens that asking about `due` gives, less the price of the nodes it adds."""
        gain, price = self.promises.gain, FINDS * self.promises.truth * -search.worst
        return sum(max(0.0, search.worth(one) * gain - price) for one in due)

    def _search(self, context: Context, size: int, max_depth: int) -> Search:
        return Search(self, context, size, self.likeliest)

    def _planted(self, search: Search) -> TokenTree:
        tree = search.tree()
        self._certain = search.said()
        return tree

    def _accepted(self, path: Sequence[int]) -> int:
        """How many tokens of the drafter were accepted."""
        return len(path) - 1


def keep_worthwhile(search: Search, prices: Prices, truth: float) -> None:
    """Of the paths found, keep the likeliest as long as each promises more than the next node costs, and look for no others from now on.
    `truth`: how much of a promise comes true."""
    search.best = [one for nodes, one in enumerate(search.best, 1) if -one.cost * truth > prices.node(nodes)]
    search.floor = prices.node(len(search.best) + 1) / truth


def open_ends(search: Search, size: int, max_depth: int) -> list[Candidate]:
    """The paths to be asked for next."""
    expanded, worst = search.expanded, search.worst
    due = [
        one
        for one in search.best[: size - 1]  # where all places are taken, nothing below the last can get one
        if one.cost * HOPE < worst and one.number not in expanded and one.parent in expanded and one.depth < max_depth
    ]
    return [one for one in due if one.cost <= FRACTION * due[0].cost]
