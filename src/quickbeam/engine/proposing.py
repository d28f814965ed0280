"""The draft trees of one step, proposed side by side.

Each round answers all trees that want a drafter's distributions in one call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from quickbeam.drafters.base import Drafter, DraftProbs
from quickbeam.engine.budget import ASKED, PLAIN, Budget
from quickbeam.engine.sequence import SequenceState
from quickbeam.methods.base import NoDraft, Proposal, ProposalSteps
from quickbeam.methods.constrained import constrained
from quickbeam.models.base import Draft, Model

logger = logging.getLogger(__name__)
P = TypeVar("P", bound=Any)  # something of a `sequence`
T = TypeVar("T")

# nodes of a tree under the measured budget whose method doesn't use the cost model
NODES_WITHOUT_COSTS = 16
CATCH_UP = 32  # where a drafter has to read more tokens than this, it does so before the call
FEW = 8  # tokens of a sequence that are read in a call whose time counts
# Of these it reads at most twice as many as the answer may still have, and at most so many, if it
# can leave out those before them: drafts gain little from the rest, and reading takes time.
TAIL = 128
TOKENS = 2.0  # of a step, about


@dataclass(eq=False)
class SequenceProposal:
    """One sequence's tree while it is proposed.

    - `request`: its next request to the drafter, None once there is a result.
    - `result`: the result, once there is one.
    - `calls`, `seconds`: the drafter's calls for it and its share of their time.
    """

    sequence: SequenceState
    steps: ProposalSteps
    request: Any = None
    result: Proposal | None = None
    calls: int = 0
    seconds: float = 0.0

    @property
    def part(self) -> Draft:
        """The tree as a part of a pass, once there is a result."""
        assert self.result is not None and self.sequence.cache is not None
        return Draft(self.sequence.cache, self.result.tree, draws=self.sequence.draws)

    @property
    def measured(self) -> bool:
        """Whether each of its nodes has to be worth its marginal cost."""
        return self.sequence.context.node_costs is not None


class StepProposer:
    """Proposes the trees of one step.

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
        self.asked = False  # whether the drafter was asked
        self.reading = 0.0  # seconds in which it read what it had missed

    @cached_property
    def budget(self) -> Budget:
        """The budget, with this step opened."""
        budget = self._make_budget()
        # what is learned in it belongs to all methods whose budget is measured
        measured = [one for one in self.running if one.request.budget is None]
        setting = frozenset(one.request.setting for one in measured)
        drafter = next((one.drafter for one in measured if one.drafter is not None), None)
        tokens = sum(len(one.ids) for one in self.running)
        nodes = sum(one.nodes for one in self.running)
        budget.begin(setting, len(self.running), tokens, nodes, self._prompts, drafter)
        return budget

    def propose(self) -> list[SequenceProposal]:
        """Propose the trees of all running sequences, round by round."""
        drafts = list[SequenceProposal]()
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
        if "budget" in vars(self):
            asks = any(one.drafter is not None for one in self.running)
            asked = self.asked if asks else any(one.nodes > 1 for one in self.running)
            self.budget.observe(tokens, seconds, self.reading, asked)

    def _begin(self, sequence: SequenceState) -> SequenceProposal:
        context, depth = sequence.context, sequence.remaining - 1
        context.node_costs, context.explore = None, False
        nodes = sequence.request.budget
        if nodes is None:
            nodes = self._measured_nodes(sequence)
        # for the root alone nothing is looked for
        steps = (sequence.policy if nodes > 1 else NoDraft()).propose(context, nodes, depth)
        if context.grammar is not None:
            steps = constrained(steps, context, nodes, depth)
        return SequenceProposal(sequence, steps)

    def _measured_nodes(self, sequence: SequenceState) -> int:
        """Return how many nodes a tree may have, and give the context what a node costs."""
        policy, context = sequence.policy, sequence.context
        if not policy.sources:
            return 1
        # forced tokens are drafted in any case
        if self.budget.kind == PLAIN and context.grammar is None:
            return 1
        if not policy.uses_cost_model or context.samples_children:
            return NODES_WITHOUT_COSTS
        if self.budget.kind == ASKED or sequence.drafter is None:
            context.explore = self.budget.explore(self._exploring_seconds(sequence))
        context.node_costs = self.budget.node_costs(context.explore)
        # a node gives one token at most
        return self.budget.limit if context.node_cost(1) < 1 else 1

    def _exploring_seconds(self, sequence: SequenceState) -> float:
        """Return what a call of the drafter takes, with what it has to read before."""
        drafter, cost = sequence.drafter, self.budget.cost
        if drafter is None:
            return 0.0
        return cost.of_call(drafter) + cost.of_reading(drafter, self._to_read(sequence))

    def _ask(self, waiting: list[SequenceProposal]) -> list[SequenceProposal]:
        """Return the trees whose requests are worth their time; the others go on without."""
        measured = [one for one in waiting if one.measured]
        if not measured:
            return waiting
        gains = [self._gain(one) for one in measured]
        answered = self.budget.worth_asking(measured[0].sequence.drafter, gains)
        refused = [one for one, yes in zip(measured, answered, strict=True) if not yes]
        for one in refused:
            self._send(one, None)
        return [one for one in waiting if one not in refused]

    def _to_read(self, sequence: SequenceState) -> int:
        """Return how many tokens the drafter has to read before it is asked."""
        drafter, unread = sequence.drafter, _unread(sequence)
        skips = drafter is not None and drafter.skips
        return min(unread, _tail(sequence)) if skips else unread

    def _gain(self, one: SequenceProposal) -> float:
        """Return the tokens that a tree gains from an answer, beside the time of the call.

        Where the drafter has to read much first, this is spread over the steps that are left.
        """
        sequence, cost = one.sequence, self.budget.cost
        if self.budget.kind != ASKED:
            return 0.0
        unread = self._to_read(sequence)
        if unread <= CATCH_UP:
            return float(one.request.gain)
        steps = max(1.0, sequence.remaining / TOKENS)
        reading = cost.of_reading(sequence.drafter, unread) / steps
        return float(one.request.gain - self.budget.rate * reading)

    def _answer(self, drafter: Drafter, asked: list[SequenceProposal]) -> None:
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
                        sequence.draft_state.skip(_tail(sequence))
                read_ahead(drafter, behind)
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
        if cost is not None and timed and unread <= FEW * timed:
            cost.observe_call(drafter, timed, time.perf_counter() - caught_up)

    def _send(self, one: SequenceProposal, answer: DraftProbs | None) -> None:
        try:
            one.request = one.steps.send(answer)
        except StopIteration as end:
            one.request, one.result = None, end.value
        except Exception as error:
            one.request = None
            fail(one.sequence, error)


def _tail(sequence: SequenceState) -> int:
    """Return how many tokens a drafter reads at most that can leave out those before them."""
    return min(TAIL, 2 * sequence.remaining)


def _unread(sequence: SequenceState) -> int:
    return 0 if sequence.draft_state is None else sequence.draft_state.waiting


def read_ahead(
    drafter: Drafter,
    sequences: Sequence[SequenceState],
    least: int = 1,
    end: int | None = None,
) -> None:
    """Let a drafter read committed tokens of these sequences ahead of their next trees.

    See `Drafter.read`.
    """
    states = [one.draft_state for one in sequences if one.draft_state is not None]
    drafter.read(states, least, end)


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
