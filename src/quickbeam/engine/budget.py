"""One budget for all running sequences: the nodes of their trees and the calls of a drafter.

The aim is the most tokens a second. To maximise that ratio is to maximise `tokens - rate *
seconds`, where rate is the best ratio there is (Dinkelbach, 1967). So a node or a call is taken if
its expected tokens at the recent rate are worth more than its time (`CostModel`).

Besides its nodes and calls, a tree takes time to be planned, accepted and learned from. Among
several sequences that adds up. So there, kinds of steps are compared as a whole (`Speed`). One step
in many tries a kind that is not the fastest.

The recent rate of a lone sequence is that of its own answer, as soon as it has a few steps: those
of one answer are more alike than those of two. An answer that copies its question emits several
times as many tokens a second as one that does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ClassVar

from quickbeam.engine.cost import CostModel

# kinds of steps: without trees; with trees, but no calls of a drafter; with both
PLAIN, FREE, ASKED = "plain", "free", "asked"
MAX_NODES = 64  # the most nodes of a tree under the measured budget
MAX_NODES_SLOW = 512  # the same where a pass reads weights from disk
# the numbers of nodes whose passes are compared
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Speed:
    """Tokens a second of one kind of step: a fading mean. The unit of time is a plain step's pass.

    - `steps_since`: how many steps ago this kind was last taken.
    - `pause`: for how many steps this kind is not tried while another kind is faster.
    """

    MEMORY = 256.0  # after so many tokens of plain decoding an observation has lost most weight
    STEPS = 16.0  # and after so many steps at least
    TRUST = 2.0  # how many steps the first guess counts for
    OTHERS = 4.0  # and how many the steps of other answers, when one begins alone
    SLOW = 2.5  # a step counts for no more than so many average ones: the machine was busy

    def __init__(self, guess: float) -> None:
        self._tokens = guess * self.TRUST
        self._seconds = self.TRUST
        self.steps_since = 0
        self.pause = float(MeasuredBudget.EXPLORE)

    @property
    def mean(self) -> float:
        return self._tokens / self._seconds

    def begin_answer(self) -> None:
        """Let the steps so far count for no more than `OTHERS`."""
        share = min(1.0, self.OTHERS / self._seconds)
        self._tokens *= share
        self._seconds *= share

    def observe(self, tokens: float, seconds: float, sequences: int) -> float:
        """Record a step: `tokens` a sequence, `seconds` by those of a plain pass.

        Returns the seconds that were counted.
        """
        fade = 1 - 1 / max(self.STEPS, self.MEMORY / sequences)
        seconds = min(seconds, self.SLOW * tokens / self.mean)
        self._tokens = fade * self._tokens + tokens
        self._seconds = fade * self._seconds + seconds
        return seconds


class MeasuredBudget:
    """Decides which steps draft, how many nodes a tree has, and which calls of a drafter are made.

    `begin` opens a step, `observe` closes it. Each `setting` (methods and what their drafts depend
    on) has speeds of its own. `limit` is the most nodes of a tree.

    After `begin`:

    - `kind`: `PLAIN` without trees, `FREE` with trees but no calls of a drafter, or `ASKED`.
    - `rate`: the tokens a second that a node or a call has to be worth.
    """

    EXPLORE = 32  # one step in so many, at most, tries what the others don't do
    LOST = 0.01  # the share of the time that may be lost by trying
    LONGEST = 1024  # the most steps between trials of a kind
    EXPLORED_NODES = 8  # nodes of a tree that explores, whatever they cost
    # guesses: tokens and rows of a sequence in each kind of step
    GUESSES: ClassVar = {
        PLAIN: (1.0, 1),
        FREE: (1.3, 2),
        ASKED: (1.6, 2),
    }

    def __init__(self, cost: CostModel, limit: int = MAX_NODES) -> None:
        self.cost = cost
        self.limit = limit
        self._widths = [width for width in WIDTHS if width <= limit]
        # by setting and load, then by kind
        self._speeds_by_load: dict[tuple[Hashable, int], dict[str, Speed]] = {}
        # by setting: for how many of its steps no drafter was asked
        self._steps_since_call: dict[Hashable, int] = {}
        self._answer: Hashable = None  # the last that was alone
        self.begin(None)

    def begin(
        self,
        setting: Hashable,
        sequences: int = 1,
        tokens: int = 0,
        nodes: int = 1,
        rows: int = 0,
        drafter: Hashable = None,
        unread: Callable[[], int] = lambda: 0,
        answer: Hashable = None,
    ) -> None:
        """Open a step of so many sequences.

        `tokens`: of all their texts. `nodes`: of all their last trees. `rows`: rows of prompts that
        the same pass reads. `drafter`: the one that may be asked, if there is one. `unread`:
        returns how many tokens it would have to read first. `answer`: to which answer the step of a
        lone sequence belongs.
        """
        self._setting = setting
        self._drafter = drafter
        self._sequences = sequences
        self._context = tokens // sequences
        self._other_rows = rows + round(nodes * (1 - 1 / sequences))  # of a pass without one tree
        self._plain_seconds = self._seconds_of_plain(sequences)
        self._explored = False
        self._node_costs: list[float] | None = None
        speeds = self._speeds_of(sequences)
        self._speeds = speeds
        if sequences == 1 and answer != self._answer:
            self._answer = answer
            for speed in speeds.values():
                speed.begin_answer()
        self.fastest = fastest_of(speeds)
        tokens_per_plain_pass = max(1.0, speeds[self.fastest].mean) * sequences
        self.rate = tokens_per_plain_pass / self._plain_seconds
        self.kind = self.fastest
        due = [kind for kind, speed in speeds.items() if speed.steps_since >= speed.pause]
        if ASKED in due and not self._can_afford_reading(unread()):
            due.remove(ASKED)
        if due:
            self.kind = max(due, key=lambda kind: speeds[kind].steps_since)

    def _can_afford_reading(self, tokens: int) -> bool:
        """Whether a trial may begin with the drafter reading so many tokens.

        As `observe` does after a trial, this bounds the share of the time that is lost.
        """
        lost = self.cost.of_reading(self._drafter, tokens) / self._plain_seconds
        lost *= self._speeds[self.fastest].mean
        return self._speeds[ASKED].steps_since >= min(lost / self.LOST, self.LONGEST)

    def would_ask(self, sequences: int) -> bool:
        """Whether steps like this one, but of so many sequences, would ask the drafter."""
        return fastest_of(self._speeds_of(sequences)) == ASKED

    def _seconds_of_plain(self, sequences: int) -> float:
        """Return the seconds of a plain step's pass."""
        contexts = sequences * self.cost.of_context(1, self._context)
        return self.cost.of_pass(sequences) + contexts

    def _speeds_of(self, sequences: int) -> dict[str, Speed]:
        """Return the speeds of all kinds of steps of so many sequences in the present setting.

        Steps of one sequence are all of one kind: there the tree alone decides.
        """
        load = sequences if sequences <= 4 else round(2 * math.log2(sequences)) + 1
        key = self._setting, load
        if key not in self._speeds_by_load:
            kinds = [PLAIN, FREE] if self._drafter is None else [PLAIN, FREE, ASKED]
            possible = kinds if sequences > 1 else kinds[-1:]
            guesses = {kind: Speed(self._guess(kind, sequences)) for kind in possible}
            self._speeds_by_load[key] = guesses
        return self._speeds_by_load[key]

    def _guess(self, kind: str, sequences: int) -> float:
        tokens, rows = self.GUESSES[kind]
        cost = self.cost
        seconds = cost.of_pass(rows * sequences) - cost.of_pass(sequences)
        if kind == ASKED:
            seconds += cost.of_call(self._drafter, sequences)
        return tokens / (1 + seconds / self._seconds_of_plain(sequences))

    def explore(self, seconds: float) -> bool:
        """Whether to try a tree and a call whatever they bring, if the call takes `seconds`.

        At most one sequence a step does.
        """
        pause = max(self.EXPLORE, seconds / self._plain_seconds / self.LOST)
        if self._drafter is not None and not self.cost.knows_call(self._drafter):
            pause = 0.0  # a guess of the cost could keep the drafter from being asked for long
        explore = not self._explored and self._steps_since_call.get(self._setting, 0) >= pause
        self._explored = self._explored or explore
        return explore

    def node_costs(self, explore: bool = False) -> Sequence[float]:
        """Return what nodes of a tree cost, in tokens.

        Entry n is the cost of one more node in a tree of n nodes. It never falls.
        """
        if explore:
            return [0.0] * min(self.limit, self.EXPLORED_NODES)
        if self._node_costs is None:
            widths = self._widths
            seconds = self.cost.of_trees(widths, self._other_rows, self._context)
            slopes = convex_slopes(widths, seconds)
            self._node_costs = [self.rate * slope for slope in slopes]
        return self._node_costs

    def worth_asking(self, drafter: Hashable, gains: Sequence[float]) -> list[bool]:
        """Return which sequences to ask a drafter for, all in one call.

        It is the set whose expected tokens (`gains`) most exceed the cost of the call. Sequences
        of infinite gain are always in it.
        """
        largest_first = sorted(range(len(gains)), key=lambda i: -gains[i])
        best_count = sum(map(math.isinf, gains))
        most = -self._call_cost(drafter, best_count)  # tokens that the best choice gains
        tokens = 0.0
        for count in range(best_count + 1, len(gains) + 1):
            tokens += gains[largest_first[count - 1]]
            profit = tokens - self._call_cost(drafter, count)
            if profit > most:
                most = profit
                best_count = count
        asked = set(largest_first[:best_count])
        return [i in asked for i in range(len(gains))]

    def _call_cost(self, drafter: Hashable, sequences: int) -> float:
        """Return what a call for so many sequences costs, in tokens."""
        return self.rate * self.cost.of_call(drafter, sequences) if sequences else 0.0

    def observe(self, tokens: int, seconds: float, reading: float, asked: bool) -> None:
        """Close a step. It emitted `tokens` in all and took `seconds`.

        `reading`: seconds in which a drafter read what it had missed; this serves later steps, too.
        `asked`: whether a drafter was asked; if there is none, whether there were trees.
        """
        speed = self._speeds[self.kind]
        plain = self._plain_seconds
        emitted = tokens / self._sequences
        counted = speed.observe(emitted, (seconds - reading) / plain, self._sequences)
        fastest_tokens = (counted + reading / plain) * self._speeds[self.fastest].mean
        lost = fastest_tokens - emitted
        speed.pause = min(max(self.EXPLORE, lost / self.LOST), self.LONGEST)
        for kind, other in self._speeds.items():
            other.steps_since = 0 if kind == self.kind else other.steps_since + 1
        steps = self._steps_since_call.get(self._setting, 0)
        self._steps_since_call[self._setting] = 0 if asked else steps + 1


def fastest_of(speeds: Mapping[str, Speed]) -> str:
    """Return the kind of steps with the most tokens a second."""
    return max(speeds, key=lambda kind: speeds[kind].mean)


def convex_slopes(widths: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return the seconds that one more node adds to a pass, by nodes, as if they never fell.

    `seconds[i]` is the time of a pass over a tree of `widths[i]` nodes. Where that rises in steps
    (a kernel's tiles), a step is spread over its nodes: these are the slopes of the times' lower
    convex hull. Entry n belongs to a tree of n nodes.
    """
    corners = [0]  # of the hull so far: indices, and the slopes that lead to them
    slopes_to = [0.0]
    for i in range(1, len(widths)):
        while True:
            corner = corners[-1]
            slope = (seconds[i] - seconds[corner]) / (widths[i] - widths[corner])
            if corner == 0 or slope > slopes_to[-1]:
                break
            corners.pop()
            slopes_to.pop()
        corners.append(i)
        slopes_to.append(slope)
    slopes = [0.0] * widths[0]
    for i in range(1, len(corners)):
        nodes = widths[corners[i]] - widths[corners[i - 1]]
        slopes += [max(0.0, slopes_to[i])] * nodes
    return slopes
