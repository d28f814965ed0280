"""DySpec's greedy tree (2410.11744): always fill the slot that is most likely to be reached."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import zip_longest
from typing import NamedTuple

from quickbeam.drafters.base import Context, Drafter, DraftProbs, DraftRequest, MarginalCost
from quickbeam.methods.acceptance import Chances, Likeliest, Measured
from quickbeam.methods.base import Grown, Growth
from quickbeam.methods.best_first import Search, keep_worthwhile, open_ends
from quickbeam.methods.drafted import DraftedPolicy
from quickbeam.methods.draws import Draws
from quickbeam.tree import TokenTree

# Stands for the largest probability of a distribution that the drafter was not asked for yet. It is
# a guess: on our own questions that probability is 0.67 at temperature 0.6, and 0.33 at 1.
PEAK = 0.6
# About how many nodes a tree gains by asking about one node: at first, and at most.
FINDS = 2


class Slot(NamedTuple):
    cost: float  # minus its worth, so that the best sort first
    missed: float  # minus the probability that it is reached
    node: int
    place: int  # which child of the node


class Slots:
    """The open slots of a growing `tree`, in a heap. `fill` grows the tree.

    Filling a slot opens the slot of its next sibling and that of its first child. A slot is worth
    the probability that it is reached, times the estimated acceptance rate of its token
    (`chances`). Only what is known before the token is drawn may enter that estimate: this keeps
    sampling exact.

    `policy` asks its drafter. `drawn` holds the rank and the probability of each node's draw.
    """

    def __init__(
        self, policy: DraftedPolicy, context: Context, budget: int, max_depth: int, chances: Chances
    ) -> None:
        self.tree = TokenTree(context.ids[-1])
        self.drawn: dict[int, tuple[int, float]] = {}
        self._policy, self._context, self._chances = policy, context, chances
        self._budget, self._max_depth = budget, max_depth
        self._heap: list[Slot] = []
        self._draws: dict[int, Draws] = {}
        # nodes whose first slot was already revalued by their distribution
        self._seen: set[int] = set()

    def fill(self) -> Generator[DraftRequest, DraftProbs | None, TokenTree]:
        """Fill slots until the budget is used up."""
        self._open(0)
        while self._heap and len(self.tree) < self._budget:
            _, _, node, _ = slot = self._heap[0]
            if node not in self._draws:
                yield from self._ask()
            # the node's distribution has arrived, so the worth of its first slot is known now
            elif node not in self._seen:
                self._seen.add(node)
                heapreplace(self._heap, self._slot(-slot.missed, node, 0))
            else:
                self._fill_draw(heappop(self._heap))
        return self.tree

    def _open(self, node: int) -> None:
        """Open the first slot of a new node, unless the node is at the largest depth."""
        if self.tree.depth[node] == self._max_depth:
            return
        reached, first = self.tree.value[node], self._chances.slot(0, PEAK)
        heappush(self._heap, Slot(-reached * first, -reached, node, 0))

    def _ask(self) -> Generator[DraftRequest, DraftProbs | None, None]:
        """Ask about the nodes whose first slots are among the best of the heap.

        As many slots are considered as there are nodes left to add.
        """
        free = self._budget - len(self.tree)
        best = [slot.node for slot in sorted(self._heap)[:free] if slot.node not in self._draws]
        due = list(dict.fromkeys(self._askable(node) for node in best))
        found = yield from self._policy.ask(self._context, self.tree, due, free)
        for node, draws in zip(due, found, strict=True):
            self._draws[node] = draws

    def _askable(self, node: int) -> int:
        """Return the topmost node on the way to `node` that the drafter was not asked about.

        The drafter must be asked about a parent before its children.
        """
        while node and self.tree.parent[node] not in self._draws:
            node = self.tree.parent[node]
        return node

    def _fill_draw(self, slot: Slot) -> None:
        """Fill the slot with its draw, and open the two slots that follow from it."""
        draws = self._draws[slot.node]
        new = self._policy.add(self.tree, slot.node, draws, slot.place)
        if new is None:
            return
        if draws.forced:  # nothing is learned from a forced token
            return self._open(new)
        probability = draws.chance(slot.place)
        chance = self._chances.child(slot.place, probability)
        self.tree.value[new] = -slot.missed * chance
        self.drawn[new] = slot.place, probability
        heappush(self._heap, self._slot(-slot.missed * (1 - chance), slot.node, slot.place + 1))
        self._open(new)

    def _slot(self, reached: float, node: int, place: int) -> Slot:
        """Return the slot of a draw of `node` that is reached with probability `reached`."""
        draws = self._draws[node]
        chance = 1.0 if draws.forced else self._chances.slot(place, draws.peak(place))
        return Slot(-reached * chance, -reached, node, place)


class Promises:
    """How many tokens are accepted for each one that trees expect. Drafters are not calibrated.

    A tree expects the sum of its nodes' estimated probabilities. `asked` is the summed probability
    of being reached, over the nodes that the drafter was called for. Both are compared with the
    accepted tokens, as fading sums. So are the nodes that calls added.
    """

    MEMORY = 64  # trees after which an observation has lost most of its weight
    TRUST = 4.0  # how many trees the first guess counts for
    # Tokens that are added to both sums and never fade. The quotient stays a positive number even
    # if nothing was promised or accepted for long.
    LEAST = 1e-3

    def __init__(self) -> None:
        self._accepted, self._promised, self._asked = 0.6 * self.TRUST, 0.6 * self.TRUST, self.TRUST
        self._added = FINDS * self.TRUST

    @property
    def truth(self) -> float:
        """Accepted tokens for each expected one."""
        return (self._accepted + self.LEAST) / (self._promised + self.LEAST)

    @property
    def gain(self) -> float:
        """Accepted tokens for each node that is reached and was asked about."""
        return self._accepted / self._asked

    @property
    def finds(self) -> float:
        """Nodes that the tree gains for each node that is reached and was asked about.

        Where nodes are dear, few are worth adding. Of more than `FINDS` the further ones count for
        nothing: each was added because it is worth its price.
        """
        return min(FINDS, self._added / self._asked)

    def observe(self, accepted: int, promised: float, asked: float, added: int) -> None:
        """Record a verified tree.

        `accepted` tokens were accepted of `promised` expected ones, on `added` nodes. `asked` is
        the summed probability of being reached of the nodes that the drafter was called for.
        """
        keep = 1 - 1 / self.MEMORY
        self._accepted = keep * self._accepted + accepted
        self._promised = keep * self._promised + promised
        self._asked = keep * self._asked + asked
        self._added = keep * self._added + added


class DySpec(DraftedPolicy):
    """DySpec's tree by best-first search (App. D.1), or by slots where children are drawn (Alg. 1).

    The search's tree is the likeliest paths, by the product of estimated acceptance rates. Where
    children are drawn (`--coupling residual`), Alg. 1 keeps a heap of open slots and fills the best
    of them (`Slots`). Nodes are in order of worth.

    DySpec assumes that acceptance probability equals draft probability (`acceptance.Printed`). For
    drawn children that makes trees too wide. A rare draw is accepted often, by min(1, p / q), and
    its sibling, tried after a rejection, seldom. The defaults follow what was accepted instead:
    `acceptance.Measured` for draws, `acceptance.Likeliest` in the search. Slots are chosen by what
    is known before their tokens are drawn: that keeps sampling exact.

    The paper calls the drafter once for each node. Here one call asks about several nodes, and
    there are about as many calls as the tree is deep. A distribution that arrives early changes
    nothing of the tree, since it is not looked at before its turn.

    - Alg. 1: when the best slot belongs to a node without a distribution, the drafter is asked
      about the nodes whose first slots are among the best of the heap. As many slots are considered
      as there are nodes left to add. Until a node has its distribution, its first slot counts with
      the usual largest probability, `PEAK`.
    - Best-first: each call considers the likeliest paths found so far, as many as fit the budget.
      It asks about those paths that have no distribution yet, that could still add a child with
      `HOPE` of their own probability, and that are at least `FRACTION` as likely as the best of
      these. Calls end when no such path is left. Few of the likeliest paths are missed: those below
      a path that barely got in.

    The paper's budget is a number of nodes. With `Context.marginal_cost` the search's tree also
    ends where
    the next likeliest path is expected to give fewer tokens than the marginal cost of a node. No
    call is made for nodes that are expected to give fewer tokens than a call costs. `Promises`
    corrects these expectations.
    """

    priced = True

    def __init__(self, drafter: Drafter, chances: Chances | None = None) -> None:
        super().__init__(drafter)
        self.chances = chances or Measured()  # estimates for drawn children
        self.likeliest = chances or Likeliest()  # estimates for deterministic proposals
        self.promises = Promises()

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        if budget < 2 or max_depth < 1:
            return Grown(TokenTree(context.ids[-1]))
        if context.draws and self.draws:
            slots = Slots(self, context, budget, max_depth, self.chances)
            tree = yield from slots.fill()
            return Grown(tree, partial(self._learn_drawn, slots))
        search = self._search(context, budget - 1, max_depth)
        if context.marginal_cost is not None:
            return (
                yield from self._worthwhile(search, context.marginal_cost, budget - 1, max_depth)
            )
        due = [search.root]
        while due:
            yield from search.expand(due)
            due = open_ends(search, budget - 1, max_depth)
        return Grown(search.tree(), partial(self._learn, search))

    def _worthwhile(
        self, search: Search, prices: MarginalCost, size: int, max_depth: int
    ) -> Growth:
        truth, asked = self.promises.truth, 0.0
        due, trial = [search.root], prices.explore
        keep_worthwhile(search, prices, truth)
        while due:
            worths = [search.worth(one) for one in due]
            gain = float("inf") if trial else self._gain(search, worths)
            if not (yield from search.expand(due, gain=gain)):
                break
            worth = sum(worths)
            # forced tokens took no call, so the trial is still to come
            asked, trial = asked + worth, trial and not worth
            keep_worthwhile(search, prices, truth)
            due = open_ends(search, size, max_depth)
        return Grown(search.tree(), partial(self._learn, search, asked=asked), truth)

    def _gain(self, search: Search, worths: Sequence[float]) -> float:
        """Return the tokens expected from asking about nodes, less the marginal cost of the nodes
        it adds.

        `worths` is what `search.worth` says of them.
        """
        promises = self.promises
        gain, price = promises.gain, promises.finds * promises.truth * -search.worst
        return sum(max(0.0, worth * gain - price) for worth in worths)

    def _search(self, context: Context, size: int, max_depth: int) -> Search:
        return Search(self, context, size, self.likeliest, self.promises.truth)

    def _learn(
        self, search: Search, tree: TokenTree, path: Sequence[int], asked: float = 0.0
    ) -> None:
        """Learn from a verified tree of deterministic proposals."""
        for node, accepted in zip_longest(path, path[1:]):
            for child in tree.children[node].values():
                if (said := search.said(child)) is not None:
                    self.likeliest.observe(*said, child == accepted)
        if asked:
            # only the part of the tree that was verified counts
            added = self._asked_for(search, tree, range(1, len(tree)))
            promised = sum(tree.value[node] for node in added)
            accepted = self._asked_for(search, tree, path[1:])
            self.promises.observe(len(accepted), promised, asked, len(added))

    def _learn_drawn(self, slots: Slots, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a verified tree of drawn children.

        Verification never reached the siblings after the accepted one, so they don't count.
        """
        for node, accepted in zip_longest(path, path[1:]):
            for child in tree.children[node].values():
                if child in slots.drawn:
                    self.chances.observe(*slots.drawn[child], child == accepted)
                if child == accepted:
                    break

    def _asked_for(self, search: Search, tree: TokenTree, nodes: Sequence[int]) -> list[int]:
        """Return those of `nodes` that the drafter proposed."""
        return [node for node in nodes if tree.source[node] == self.drafter.name]
