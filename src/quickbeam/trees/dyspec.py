"""DySpec's tree of drawn tokens (2410.11744, Alg. 1): always fill the slot that is most likely to be reached."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from quickbeam.draft.base import Context
from quickbeam.tree import TokenTree
from quickbeam.trees.acceptance import Chances
from quickbeam.trees.drafted import DraftedPolicy
from quickbeam.trees.draws import Draws

PEAK = 0.6  # the largest probability of a law that was not asked for yet: a guess (0.67 at temperature 0.6 on our own questions, 0.33 at 1)
FIRST = -1  # the place of a certain child that is tried before all draws


class Slot(NamedTuple):
    cost: float  # minus its worth: the best sort first
    missed: float  # minus the probability that it is reached
    node: int
    place: int  # which child


class Sure(NamedTuple):
    """A certain child to be tried before all draws of its node: its token, who proposes it, how likely it is accepted."""

    token: int
    source: str
    chance: float


class Slots:
    """The open slots of a growing `tree`, in a heap; `fill` grows it. Filling one opens its sibling's and its child's.

    A slot is worth the probability that it is reached, times that of its token being accepted, as far as that can be told before the token
    is known (`chances`): that keeps sampling exact. `policy` asks its drafter. `drawn`: by node, the place and the probability of its draw.
    """

    def __init__(self, policy: DraftedPolicy, context: Context, budget: int, max_depth: int, chances: Chances) -> None:
        self.tree = TokenTree(context.ids[-1])
        self.drawn: dict[int, tuple[int, float]] = {}
        self._policy, self._context, self._chances = policy, context, chances
        self._budget, self._max_depth = budget, max_depth
        self._heap: list[Slot] = []
        self._sure: dict[int, Sure] = {}
        self._draws: dict[int, Draws] = {}
        self._seen: set[int] = set()  # nodes whose laws have had their turn

    def fill(self) -> TokenTree:
        """Fill slots to the budget."""
        self._open(0)
        while self._heap and len(self.tree) < self._budget:
            _, _, node, place = slot = self._heap[0]
            if place == FIRST:
                self._fill_sure(slot)
            elif node not in self._draws:
                self._ask()
            elif node not in self._seen:  # its law is there: now it is known what its first draw is worth
                self._seen.add(node)
                heapreplace(self._heap, self._slot(-slot.missed, node, 0))
            else:
                self._fill_draw(heappop(self._heap))
        return self.tree

    def sure(self, node: int) -> Sure | None:
        """What to try before the draws of a new node, by the tokens down to it."""
        return None

    def placed(self, node: int) -> None:
        """Its parent's `sure` became this node."""

    def _open(self, node: int) -> None:
        """The first slot of a new node."""
        if self.tree.depth[node] == self._max_depth:
            return
        reached, first = self.tree.value[node], self._chances.slot(0, PEAK)
        sure = self.sure(node)
        if sure is None:
            heappush(self._heap, Slot(-reached * first, -reached, node, 0))
        else:
            self._sure[node] = sure
            worth = max(sure.chance, (1 - sure.chance) * first)  # the draws wait behind it
            heappush(self._heap, Slot(-reached * worth, -reached, node, FIRST))

    def _fill_sure(self, slot: Slot) -> None:
        """Fill the slot of a certain child."""
        token, source, chance = self._sure[slot.node]
        new = self.tree.add(slot.node, token, source, -slot.missed * chance)
        self.placed(new)
        left = -slot.missed * (1 - chance)
        heapreplace(self._heap, Slot(-left * self._chances.slot(0, PEAK), -left, slot.node, 0))
        self._open(new)

    def _ask(self) -> None:
        """Ask for the nodes whose first draws are among the best of the heap, as many as there are nodes left to add."""
        free = self._budget - len(self.tree)
        best = [slot.node for slot in sorted(self._heap)[:free] if slot.node not in self._draws and slot.place != FIRST]
        due = list(dict.fromkeys(self._askable(node) for node in best))
        for node, draws in zip(due, self._policy.ask(self._context, self.tree, due, free), strict=True):
            if node in self._sure:
                draws.strike(self._sure[node].token)
            self._draws[node] = draws

    def _askable(self, node: int) -> int:
        """The topmost node on the way to `node` that was not asked for: the drafter goes from parent to child."""
        while node and self.tree.parent[node] not in self._draws:
            node = self.tree.parent[node]
        return node

    def _fill_draw(self, slot: Slot) -> None:
        """Fill the slot of a draw."""
        draws = self._draws[slot.node]
        new = self._policy.add(self.tree, slot.node, draws, slot.place)
        if new is None:
            return
        probability = draws.chance(slot.place)
        chance = self._chances.child(slot.place, probability)
        self.tree.value[new] = -slot.missed * chance
        self.drawn[new] = slot.place, probability
        heappush(self._heap, self._slot(-slot.missed * (1 - chance), slot.node, slot.place + 1))
        self._open(new)

    def _slot(self, reached: float, node: int, place: int) -> Slot:
        """That of a draw of `node`, which is reached with probability `reached`."""
        peak = self._draws[node].peak(place)
        return Slot(-reached * self._chances.slot(place, peak), -reached, node, place)
