"""The draft trees of one step, grown side by side.

Each round answers all trees that want a drafter's distributions in one call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from quickbeam.drafters.base import Drafter, DraftProbs
from quickbeam.engine.budget import ASKED, PLAIN, UNASKED, Budget, Comparison, worth_asking
from quickbeam.engine.cost import CostModel
from quickbeam.engine.sequence import SequenceState
from quickbeam.methods.base import Grown, Growth, NoDraft
from quickbeam.methods.constrained import constrained
from quickbeam.models.base import Draft, Model

logger = logging.getLogger(__name__)
P = TypeVar("P", bound=Any)  # something of a `sequence`
T = TypeVar("T")

# Of a plain step: what calls take at most that a lone request is not compared for. Those of a block
# drafter take a quarter to a third.
CHEAP = 0.4
UNPRICED = 16  # nodes of a tree under the measured budget whose method asks nothing of their costs
CATCH_UP = 32  # where a drafter has to read more tokens than this, it does so before the call
# Of these it reads at most twice as many as the answer may still have, and at most so many, if it
# can leave out those before them: drafts gain little from the rest, and reading takes time.
TAIL = 128


@dataclass(eq=False)
class TreeDraft:
    """One sequence's tree while it grows.

    - `request`: its next request to the drafter, None once it is grown.
    - `grown`: the result, once there is one.
    - `calls`, `seconds`: the drafter's calls for it and its share of their time.
    """

    sequence: SequenceState
    growth: Growth
    request: Any = None
    grown: Grown | None = None
    calls: int = 0
    seconds: float = 0.0

    @property
    def part(self) -> Draft:
        """The tree as a part of a pass, once it is grown."""
        assert self.grown is not None and self.sequence.cache is not None
        return Draft(self.sequence.cache, self.grown.tree, draws=self.sequence.draws)

    @property
    def measured(self) -> bool:
        """Whether each of its nodes has to be worth its marginal cost."""
        return self.sequence.context.marginal_cost is not None


class DraftStep:
    """Grows the trees of one step.

    `budget` returns the budget, which may have to be measured first; it is asked for only if a
    tree's size is not fixed. `prompts`: rows of prompts that the same pass reads. If a tree fails,
    its sequence ends with an error of its own.
    """

    def __init__(
        self,
        model: Model,
        budget: Callable[[], Budget],
        running: Sequence[SequenceState],
        prompts: int,
    ) -> None:
        self.model, self.running = model, running
        self._make_budget, self._prompts = budget, prompts
        self._explored = False  # one sequence is enough to explore
        self.asked = False  # whether the drafter was asked
        self.reading = 0.0  # seconds in which it read what it had missed

    @cached_property
    def budget(self) -> Budget:
        budget = self._make_budget()
        tokens = sum(len(one.ids) for one in self.running)
        nodes = sum(one.nodes for one in self.running)
        budget.begin(len(self.running), tokens, nodes, self._prompts)
        return budget

    @cached_property
    def comparison(self) -> Comparison:
        """The comparison that all sequences with a measured budget take part in."""
        measured = [one for one in self.running if one.request.budget is None]
        settings = frozenset(one.request.setting for one in measured)
        drafter = next((one.drafter for one in measured if one.drafter is not None), None)
        modes = list({mode: None for one in measured for mode in _modes(one)})
        # Modes are compared over whole texts. One that repeats itself would make a fast drafter
        # seem superfluous in the next one, which does not: there the tree alone decides on calls.
        fast = self.budget.cost.call(drafter) < CHEAP * self.budget.plain
        alone = len(self.running) == 1 and ASKED in modes and fast
        key = (settings, "alone") if alone else settings  # costs, and so modes, may change
        comparison = self.budget.comparison(key, [ASKED] if alone else modes, drafter)
        if alone and not self.running[0].statistics.steps:
            comparison.begin_text()
        return comparison

    @cached_property
    def rate(self) -> float:
        return self.budget.rate(self.comparison)

    def grow(self) -> list[TreeDraft]:
        """Grow the trees of all running sequences, round by round."""
        drafts = list[TreeDraft]()
        for sequence in self.running:
            try:
                drafts.append(self._begin(sequence))
                self._send(drafts[-1], None)
            except Exception as error:
                fail(sequence, error)
        while waiting := [one for one in drafts if one.request is not None]:
            for drafter in {one.sequence.drafter for one in waiting}:
                assert drafter is not None
                asked = self._ask([one for one in waiting if one.sequence.drafter is drafter])
                if asked:
                    self._answer(drafter, asked)
        return [one for one in drafts if not one.sequence.over]

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that the step emitted `tokens` in all and took `seconds`."""
        if "comparison" in vars(self):
            # what it read serves the rest of the answer
            self.budget.observe(self.comparison, tokens, seconds - self.reading, self.asked)

    def _begin(self, sequence: SequenceState) -> TreeDraft:
        request, policy, context = sequence.request, sequence.policy, sequence.context
        nodes, context.marginal_cost = request.budget or 1, None
        if request.budget is None and policy.sources and self._mode(sequence) != PLAIN:
            nodes = UNPRICED
            if policy.priced and not context.draws:
                cost = self.budget.marginal_cost(self.rate)
                explore = self._explores(sequence)
                # a node gives one token at most
                nodes = self.budget.limit if explore or cost.node(1) < 1 else 1
                context.marginal_cost = replace(cost, explore=explore)
            if nodes == 1:
                self.budget.recheck_costs(self.model)
        depth = sequence.remaining - 1
        # for the root alone nothing is looked for
        growth = (policy if nodes > 1 else NoDraft()).grow(context, nodes, depth)
        if context.grammar is not None:
            growth = constrained(growth, context, nodes, depth)
        return TreeDraft(sequence, growth)

    def _mode(self, sequence: SequenceState) -> str:
        mode, modes = self.comparison.mode, _modes(sequence)
        return mode if mode in modes else modes[0]

    def _explores(self, sequence: SequenceState) -> bool:
        if self._explored or sequence.drafter is None or self._mode(sequence) != ASKED:
            return False
        cost, plain = self.budget.cost, self.budget.plain
        call, reading = cost.call(sequence.drafter), cost.read(sequence.drafter, _unread(sequence))
        self._explored = self.comparison.explores(call / plain, reading / plain)
        return self._explored

    def _ask(self, waiting: list[TreeDraft]) -> list[TreeDraft]:
        """Return the trees whose requests are worth their time; the others go on without."""
        measured = [one for one in waiting if one.measured]
        if not measured:
            return waiting
        drafter = measured[0].sequence.drafter
        gains = [one.request.gain if self._mode(one.sequence) == ASKED else 0.0 for one in measured]
        answered = worth_asking(gains, lambda n: self.budget.cost.call(drafter, n), self.rate)
        refused = [one for one, yes in zip(measured, answered, strict=True) if not yes]
        for one in refused:
            self._send(one, None)
        return [one for one in waiting if one not in refused]

    def _answer(self, drafter: Drafter, asked: list[TreeDraft]) -> None:
        # Where the drafter missed many tokens because it was not asked, it reads them first, or the
        # last of them, if it can do without the others. So the call that follows is timed like any
        # other, however long ago the last one was.
        self.asked = True
        cost = self.budget.cost if any(one.measured for one in asked) else None
        began = time.perf_counter()
        first = [one for one in asked if one.request.nodes[0] == 0]
        behind = [one.sequence for one in first if _unread(one.sequence) > CATCH_UP]
        if behind:
            try:
                for sequence in behind:
                    if cost is not None and drafter.skips and sequence.draft_state is not None:
                        sequence.draft_state.skip(min(TAIL, 2 * sequence.remaining))
                read_ahead(drafter, behind, cost)
            except Exception as error:
                # the call meets it again, and tells which sequence it is
                logger.info("a drafter can't catch up: %s", error)
        caught_up = time.perf_counter()
        self.reading += caught_up - began
        unread = sum(_unread(one.sequence) for one in first)
        answers = each_alone(asked, lambda some: drafter.answer([one.request for one in some]))
        answered = time.perf_counter()
        for one, answer in zip(asked, answers, strict=True):
            one.calls += 1
            one.seconds += (answered - began) / len(asked)
            if answer is None:
                one.request = None
            else:
                self._send(one, answer)
        timed = len(first) if drafter.one_call else len(asked)
        if cost is not None and timed:
            cost.observe_call(drafter, timed, time.perf_counter() - caught_up, unread)

    def _send(self, one: TreeDraft, answer: DraftProbs | None) -> None:
        try:
            one.request = one.growth.send(answer)
        except StopIteration as end:
            one.request, one.grown = None, end.value
        except Exception as error:
            one.request = None
            fail(one.sequence, error)


def _modes(sequence: SequenceState) -> list[str]:
    """Return the modes that a sequence's steps can have, see `Comparison`.

    Forced tokens are drafted in any case. A policy that can't leave a call out is always answered.
    """
    policy, context = sequence.policy, sequence.context
    asks = [ASKED] if sequence.drafter is not None else []
    leaves_out = policy.priced and not context.draws
    free = [UNASKED] if not asks or (len(policy.sources) > 1 and leaves_out) else []
    return asks + free + ([PLAIN] if sequence.params.grammar is None else [])


def _unread(sequence: SequenceState) -> int:
    return 0 if sequence.draft_state is None else sequence.draft_state.waiting


def read_ahead(
    drafter: Drafter,
    sequences: Sequence[SequenceState],
    cost: CostModel | None = None,
    least: int = 1,
    end: int | None = None,
) -> None:
    """Let a drafter read committed tokens of these sequences ahead of their next trees.

    `cost` learns what a token takes, if there are many of them. See `Drafter.read`.
    """
    states = [one.draft_state for one in sequences if one.draft_state is not None]
    before, began = sum(map(_unread, sequences)), time.perf_counter()
    drafter.read(states, least, end)
    tokens = before - sum(map(_unread, sequences))
    if cost is not None and tokens > CATCH_UP:
        cost.observe_read(drafter, tokens, time.perf_counter() - began)


def each_alone(parts: Sequence[P], run: Callable[[Sequence[P]], Sequence[T]]) -> list[T | None]:
    """Return the results of `run` for all parts.

    If it fails, it is run for one part at a time: only sequences that make it fail end, with None.
    """
    try:
        return list(run(parts))
    except Exception as error:
        if len(parts) == 1:
            fail(parts[0].sequence, error)
            return [None]
        return [result for one in parts for result in each_alone([one], run)]


def fail(sequence: SequenceState, error: Exception) -> None:
    """End one sequence with an error of its own."""
    logger.info("a sequence ends: %s", error)
    sequence.end("error", error)
