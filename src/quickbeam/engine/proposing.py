"""The draft trees of one step, proposed side by side.

Each round answers all trees that want a drafter's distributions in one call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from quickbeam.drafters.base import Drafter, DraftProbs, DraftRequest
from quickbeam.engine.budget import ASKED, PLAIN, MeasuredBudget
from quickbeam.engine.sequence import SequenceState
from quickbeam.methods.base import Method, NoDraft, Proposal, ProposalSteps
from quickbeam.methods.constrained import constrained
from quickbeam.models.base import Draft

logger = logging.getLogger(__name__)


class OfSequence(Protocol):
    """What belongs to one sequence: its proposal, or its part of a pass."""

    @property
    def sequence(self) -> SequenceState: ...


P = TypeVar("P", bound=OfSequence)
T = TypeVar("T")

# nodes of a tree under the measured budget whose method doesn't use the cost model
NODES_WITHOUT_COSTS = 16
CATCH_UP = 32  # where a drafter has to read more tokens than this, it does so before the call
FEW = 8  # tokens of a sequence that are read in a call whose time counts
# A drafter that can leave out tokens reads at most so many, and at most twice as many as the answer
# may still have: drafts gain little from those before them, and reading takes time.
TAIL = 128
TOKENS_PER_STEP = 2.0  # about


@dataclass(eq=False)
class SequenceProposal:
    """One sequence's tree while it is proposed.

    - `method`: what proposes it, `NoDraft` in a step without trees.
    - `request`: its next request to the drafter, None once there is a result.
    - `result`: the result, once there is one.
    - `calls`, `seconds`: the drafter's calls for it and its share of their time.
    """

    sequence: SequenceState
    method: Method
    steps: ProposalSteps
    request: DraftRequest | None = None
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

    def send(self, answer: DraftProbs | None) -> None:
        """Go on to the next request, or to the result. An error ends the sequence."""
        self.request = None
        try:
            self.request = self.steps.send(answer)
        except StopIteration as end:
            self.result = end.value
        except Exception as error:
            fail(self.sequence, error)


class StepProposer:
    """Proposes the trees of one step.

    `budget` returns the budget, which may have to be measured first; it is asked for only if a
    tree's size is not fixed. `prompts`: rows of prompts that the same pass reads. If a tree fails,
    its sequence ends with an error of its own.
    """

    def __init__(
        self,
        budget: Callable[[], MeasuredBudget],
        running: Sequence[SequenceState],
        prompts: int,
    ) -> None:
        self.running = running
        self._make_budget = budget
        self._prompts = prompts
        self.asked = False  # whether the drafter was asked
        self.reading = 0.0  # seconds in which it read what it had missed

    @cached_property
    def budget(self) -> MeasuredBudget:
        """The budget, with this step opened."""
        budget = self._make_budget()
        # what is learned in it belongs to all methods whose budget is measured
        measured = [sequence for sequence in self.running if sequence.request.budget == "auto"]
        drafters = [sequence.drafter for sequence in measured if sequence.drafter is not None]
        budget.begin(
            frozenset(sequence.request.setting for sequence in measured),
            sequences=len(self.running),
            tokens=sum(len(sequence.ids) for sequence in self.running),
            nodes=sum(sequence.nodes for sequence in self.running),
            rows=self._prompts,
            drafter=drafters[0] if drafters else None,
            unread=lambda: sum(_tokens_to_read(sequence) for sequence in measured),
            answer=self.running[0].arrival,
        )
        return budget

    def propose(self) -> list[SequenceProposal]:
        """Propose the trees of all running sequences, round by round."""
        proposals = list[SequenceProposal]()
        for sequence in self.running:
            try:
                proposals.append(self._begin(sequence))
            except Exception as error:
                fail(sequence, error)
            else:
                proposals[-1].send(None)
        while waiting := [proposal for proposal in proposals if proposal.request is not None]:
            for drafter in {proposal.sequence.drafter for proposal in waiting}:
                assert drafter is not None
                of_drafter = [
                    proposal for proposal in waiting if proposal.sequence.drafter is drafter
                ]
                worth_asking = self._worth_asking(drafter, of_drafter)
                if worth_asking:
                    self._answer(drafter, worth_asking)
        return [proposal for proposal in proposals if not proposal.sequence.over]

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that the step emitted `tokens` in all and took `seconds`."""
        if "budget" not in vars(self):  # no tree needed it
            return
        asked = self.asked
        if all(sequence.drafter is None for sequence in self.running):
            asked = any(sequence.nodes > 1 for sequence in self.running)
        self.budget.observe(tokens, seconds, self.reading, asked)

    def _begin(self, sequence: SequenceState) -> SequenceProposal:
        context = sequence.context
        max_depth = sequence.remaining - 1  # as the target adds a token behind the accepted path
        context.node_costs = None
        context.explore = False
        budget = sequence.request.budget
        nodes = budget if isinstance(budget, int) else self._measured_nodes(sequence)
        # for the root alone no source is asked
        method = sequence.method if nodes > 1 else NoDraft()
        steps = method.propose(context, nodes, max_depth)
        if context.grammar is not None:
            steps = constrained(steps, context, nodes, max_depth)
        return SequenceProposal(sequence, method, steps)

    def _measured_nodes(self, sequence: SequenceState) -> int:
        """Return how many nodes a tree may have, and give the context what a node costs."""
        method = sequence.method
        context = sequence.context
        if not method.sources:
            return 1
        # forced tokens are drafted in any case
        if self.budget.kind == PLAIN and context.grammar is None:
            return 1
        if not method.uses_cost_model or context.samples_children:
            return NODES_WITHOUT_COSTS
        if self.budget.kind == ASKED or sequence.drafter is None:
            context.explore = self.budget.explore(self._exploring_seconds(sequence))
        context.node_costs = self.budget.node_costs(context.explore)
        # a node gives one token at most
        return self.budget.limit if context.node_cost(1) < 1 else 1

    def _exploring_seconds(self, sequence: SequenceState) -> float:
        """Return what a call of the drafter takes, with what it has to read before."""
        drafter = sequence.drafter
        if drafter is None:
            return 0.0
        cost = self.budget.cost
        return cost.of_call(drafter) + cost.of_reading(drafter, _tokens_to_read(sequence))

    def _worth_asking(
        self, drafter: Drafter, waiting: list[SequenceProposal]
    ) -> list[SequenceProposal]:
        """Return the trees whose requests are worth their time; the others go on without."""
        measured = [proposal for proposal in waiting if proposal.measured]
        if not measured:
            return waiting
        gains = [self._gain(proposal) for proposal in measured]
        worth = self.budget.worth_asking(drafter, gains)
        refused = [proposal for proposal, ask in zip(measured, worth, strict=True) if not ask]
        for proposal in refused:
            proposal.send(None)
        return [proposal for proposal in waiting if proposal not in refused]

    def _gain(self, proposal: SequenceProposal) -> float:
        """Return the tokens that a tree gains from an answer, less the time to read before it.

        Where the drafter has to read much first, that time is spread over the steps that are left.
        """
        assert proposal.request is not None
        sequence = proposal.sequence
        if self.budget.kind != ASKED:
            return 0.0
        gain = proposal.request.gain
        unread = _tokens_to_read(sequence)
        if unread <= CATCH_UP:
            return gain
        steps = max(1.0, sequence.remaining / TOKENS_PER_STEP)
        reading = self.budget.cost.of_reading(sequence.drafter, unread) / steps
        return gain - self.budget.rate * reading

    def _answer(self, drafter: Drafter, proposals: list[SequenceProposal]) -> None:
        """Ask the drafter once for all of these trees, and send each its answer."""
        self.asked = True
        measured = any(proposal.measured for proposal in proposals)
        began = time.perf_counter()
        first_calls = [
            proposal
            for proposal in proposals
            if proposal.request is not None and proposal.request.nodes[0] == 0
        ]
        self._catch_up(drafter, [proposal.sequence for proposal in first_calls], measured)
        caught_up = time.perf_counter()
        self.reading += caught_up - began
        unread = sum(_unread(proposal.sequence) for proposal in first_calls)
        answers = each_alone(proposals, lambda some: drafter.answer(_requests(some)))
        answered = time.perf_counter()
        for proposal, answer in zip(proposals, answers, strict=True):
            proposal.calls += 1
            proposal.seconds += (answered - began) / len(proposals)
            if answer is None:
                proposal.request = None
            else:
                proposal.send(answer)
        timed = len(first_calls) if drafter.one_call else len(proposals)
        if measured and timed and unread <= FEW * timed:
            seconds = time.perf_counter() - caught_up
            self.budget.cost.observe_call(drafter, timed, seconds)

    def _catch_up(
        self, drafter: Drafter, sequences: Sequence[SequenceState], measured: bool
    ) -> None:
        """Let a drafter read first where it missed many tokens because it was not asked.

        It reads only the last of them, if it can leave out those before. So the call that follows
        is timed like any other, however long ago the last one was.
        """
        behind = [sequence for sequence in sequences if _unread(sequence) > CATCH_UP]
        if not behind:
            return
        try:
            for sequence in behind:
                if measured and drafter.skips and sequence.draft_state is not None:
                    sequence.draft_state.skip(_tail(sequence))
            read_ahead(drafter, behind)
        except Exception as error:
            # the call meets it again, and tells which sequence it is
            logger.info("a drafter can't catch up: %s", error)


def _requests(proposals: Sequence[SequenceProposal]) -> list[DraftRequest]:
    return [proposal.request for proposal in proposals if proposal.request is not None]


def _tail(sequence: SequenceState) -> int:
    """Return how many tokens a drafter reads at most that can leave out those before them."""
    return min(TAIL, 2 * sequence.remaining)


def _unread(sequence: SequenceState) -> int:
    state = sequence.draft_state
    return 0 if state is None else state.waiting


def _tokens_to_read(sequence: SequenceState) -> int:
    """Return how many tokens the drafter has to read before it is asked."""
    unread = _unread(sequence)
    skips = sequence.drafter is not None and sequence.drafter.skips
    return min(unread, _tail(sequence)) if skips else unread


def read_ahead(
    drafter: Drafter,
    sequences: Sequence[SequenceState],
    least: int = 1,
    end: int | None = None,
) -> None:
    """Let a drafter read committed tokens of these sequences ahead of their next trees.

    See `Drafter.read`.
    """
    states = [sequence.draft_state for sequence in sequences if sequence.draft_state is not None]
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
        return [result for part in parts for result in each_alone([part], run)]


def fail(sequence: SequenceState, error: Exception) -> None:
    """End one sequence with an error of its own."""
    logger.info("a sequence ends: %s", error)
    sequence.end("error", error)
