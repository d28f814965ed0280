"""The draft trees of one step, grown side by side: one call of the drafter serves all trees."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from quickbeam.drafters.base import Drafter, DraftProbs, DraftRequest
from quickbeam.engine.budget import Budget, Load, Plan
from quickbeam.engine.cost import CallCost
from quickbeam.engine.sequence import SequenceState
from quickbeam.methods.base import Grown, Growth
from quickbeam.methods.constrained import constrained, situation
from quickbeam.models.model import Model
from quickbeam.tree import TokenTree

logger = logging.getLogger(__name__)

CAUGHT_UP = 32  # where a drafter has to read more tokens than this, it does so before the call


@dataclass
class Growing:
    """A tree that is being grown.

    - `wish`: its next request to the drafter, None once it is grown.
    - `grown`: the result, once there is one.
    - `calls`, `seconds`: the drafter's calls for it and its share of their time.
    """

    sequence: SequenceState
    plan: Plan
    growth: Growth
    wish: DraftRequest | None = None
    grown: Grown | None = None
    calls: int = 0
    seconds: float = 0.0
    beside: int = 1  # how many trees grew side by side

    @property
    def tree(self) -> TokenTree:
        """The tree, once it is grown."""
        assert self.grown is not None
        return self.grown.tree

    def count(
        self,
        tree: TokenTree,
        path: Sequence[int],
        emitted: Sequence[int],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Add the verified `tree`, its accepted path and its times to the sequence's statistics."""
        stats = self.sequence.statistics
        stats.steps += 1
        stats.nodes += len(tree)
        stats.draft_seconds += draft_seconds
        stats.drafter_calls += self.calls
        stats.drafter_seconds += self.seconds
        stats.verify_seconds += verify_seconds
        for name in tree.source[1:]:
            stats.sources[name].drafted += 1
        for node in path[1 : len(emitted) + 1]:
            stats.sources[tree.source[node]].accepted += 1


class Grower:
    """Grows the trees of one step.

    `budget` returns the budget, which may have to be measured first. `load` is that of the step. If
    a tree fails, its sequence ends with an error of its own.
    """

    def __init__(self, model: Model, budget: Callable[[], Budget], load: Load) -> None:
        self.model, self._measure, self.load = model, budget, load
        self._alike = False  # whether one comparison is of all sequences

    @cached_property
    def budget(self) -> Budget:
        """The budget. It is asked for only if a tree's size is not fixed."""
        return self._measure()

    def grow(self, running: Sequence[SequenceState]) -> list[Growing]:
        """Grow the trees of all running sequences, side by side.

        Each round answers one request of each tree, all in one call.
        """
        growing, trials = list[Growing](), set[Hashable]()
        self._alike = (
            len(running) > 1
            and len({one.request.setting for one in running}) == 1
            and all(self._comparable(one) for one in running)
        )
        for sequence in running:
            setting = sequence.request.setting
            trial = False
            try:
                drafts = self._drafts(sequence)
                if (
                    drafts
                    and sequence.request.budget is None
                    and sequence.drafter is not None
                    and setting not in trials
                ):
                    cost, plain = self.budget.call(setting), self.budget.plain(self.load)
                    reading = cost.row * _unread(sequence)
                    rate = self.budget.rate(setting, self.load)
                    trial = rate.trial(cost.seconds(1), plain, reading)
                    if trial and not rate.drafts:
                        cost.doubt()
                    trials.add(setting)  # one sequence of a setting is enough for a trial
                plan = self._plan(sequence, trial) if drafts else Plan(1)
                assert sequence.context is not None and sequence.cache is not None
                sequence.context.marginal_cost = plan.prices
                remaining = sequence.params.max_tokens - len(sequence.output.token_ids)
                depth = min(remaining - 1, self.model.depth_limit(sequence.cache))
                growth = sequence.policy.grow(sequence.context, plan.nodes, depth)
                if (grammar := sequence.context.grammar) is not None:
                    growth = constrained(growth, grammar, plan.nodes, depth)
                one = Growing(sequence, plan, growth)
                self._send(one, None)
                growing.append(one)
            except Exception as error:
                fail(sequence, error)
        while wishing := [one for one in growing if one.wish is not None]:
            for drafter in {
                id(one.sequence.drafter): one.sequence.drafter for one in wishing
            }.values():
                assert drafter is not None
                self._round(drafter, [one for one in wishing if one.sequence.drafter is drafter])
        growing = [one for one in growing if not one.sequence.over]
        for one in growing:
            one.beside = len(growing)
        self._share(growing)
        return growing

    def _comparable(self, sequence: SequenceState) -> bool:
        """Whether measuring may tell that this sequence should not draft.

        It may where other sequences run too. The tokens that a grammar forces are drafted in any
        case.
        """
        return (
            len(self.load.contexts) > 1
            and sequence.request.budget is None
            and sequence.params.grammar is None
        )

    def _drafts(self, sequence: SequenceState) -> bool:
        """Whether drafting is worth its time under this load, by what was measured.

        The step itself is measured if all sequences draft alike.
        """
        if not self._comparable(sequence):
            return True
        comparison = self.budget.comparison(sequence.request.setting, self.load)
        if self._alike:
            self.load.comparison = comparison
        return comparison.drafts

    def _plan(self, sequence: SequenceState, trial: bool) -> Plan:
        """Return how many nodes and calls the sequence's next tree may have."""
        request, policy = sequence.request, sequence.policy
        assert sequence.context is not None
        if request.budget is not None:
            return Plan(request.budget)
        if policy.priced and not sequence.context.draws:
            plan = self.budget.prices(sequence.arrival, request.setting, self.load, trial)
            return plan._replace(nodes=self.model.nodes_of(plan.nodes))
        plan = self.budget.nodes(
            sequence.arrival, request.setting, self.load, situation(policy, sequence.context)
        )
        # counts for the sequences that are planned after it
        self.load.nodes[sequence.arrival] = plan.nodes
        return plan

    def _round(self, drafter: Drafter, wishing: list[Growing]) -> None:
        """Answer the requests that are worth their time, all in one call."""
        priced = [one for one in wishing if one.plan.prices is not None]
        refused: set[int] = set()
        if priced:
            setting = priced[0].sequence.request.setting
            call, rate = self.budget.call(setting), self.budget.best_rate(setting, self.load)
            answered = self.budget.worthwhile(
                [one.wish.gain for one in priced if one.wish is not None], call, rate
            )
            refused = {id(one) for one, wanted in zip(priced, answered, strict=True) if not wanted}
        for one in wishing:
            if id(one) in refused:
                self._send(one, None)
        asked = [one for one in wishing if id(one) not in refused]
        if not asked:
            return
        began = time.perf_counter()
        first = [one for one in asked if one.wish is not None and one.wish.nodes[0] == 0]
        behind = [one for one in first if _unread(one.sequence) > CAUGHT_UP]
        self._catch_up(drafter, behind)
        caught_up, unread = time.perf_counter(), sum(_unread(one.sequence) for one in first)
        if any(one.plan.prices is not None and not one.plan.prices.trial for one in asked):
            self.budget.rate(priced[0].sequence.request.setting, self.load).worth_a_call()
        distributions = self._answer(drafter, asked)
        answered_at = time.perf_counter()
        for one, probs in zip(asked, distributions, strict=True):
            one.calls += 1
            one.seconds += (answered_at - began) / len(asked)
            if probs is not None:
                self._send(one, probs)
        if priced:
            cost = self.budget.call(priced[0].sequence.request.setting)
            cost.observe(len(asked), time.perf_counter() - caught_up, unread)

    def _catch_up(self, drafter: Drafter, behind: Sequence[Growing]) -> None:
        """Let the drafter read what these sequences committed while it was not asked.

        So the call that follows is timed like any other, however long ago the last one was. An
        estimate that a busy machine made too high is corrected by it.
        """
        if not behind:
            return
        setting, priced = behind[0].sequence.request.setting, behind[0].plan.prices is not None
        cost = self.budget.call(setting) if priced else None
        try:
            read(drafter, [one.sequence for one in behind], cost)
        except Exception as error:
            # the call meets it again, and tells which sequence it is
            logger.info("a drafter can't catch up: %s", error)

    def _answer(self, drafter: Drafter, asked: Sequence[Growing]) -> list[DraftProbs | None]:
        """Return the distributions for all requests.

        If the call fails, it is repeated sequence by sequence, so that only the sequence that makes
        it fail ends.
        """
        wishes = [one.wish for one in asked if one.wish is not None]
        try:
            return list(drafter.answer(wishes))
        except Exception as error:
            if len(asked) > 1:
                return [probs for one in asked for probs in self._answer(drafter, [one])]
            fail(asked[0].sequence, error)
            asked[0].wish = None
            return [None]

    def _send(self, one: Growing, distributions: DraftProbs | None) -> None:
        """Let a tree grow until its next request or its end."""
        try:
            one.wish = one.growth.send(distributions)
        except StopIteration as end:
            one.wish, one.grown = None, end.value
        except Exception as error:
            one.wish = None
            fail(one.sequence, error)

    def _share(self, growing: Sequence[Growing]) -> None:
        """Divide the pass's rows among several trees: nodes stay where the most tokens are
        expected."""
        priced = [
            one
            for one in growing
            if one.plan.prices is not None
            and one.grown is not None
            and one.grown.accepted_per_expected is not None
        ]
        if len(growing) < 2 or all(len(one.tree) < 2 for one in priced):
            return
        fixed = sum(
            len(one.grown.tree) for one in growing if one.grown is not None and one not in priced
        )
        values = [
            [value * (one.grown.accepted_per_expected or 0.0) for value in one.grown.tree.value[1:]]
            for one in priced
            if one.grown is not None
        ]
        rate = self.budget.best_rate(priced[0].sequence.request.setting, self.load)
        kept = self.budget.share(values, self.load.prompts + fixed + len(priced), rate)
        for one, nodes in zip(priced, kept, strict=True):
            if one.grown is not None and nodes + 1 < len(one.grown.tree):
                one.grown = one.grown._replace(tree=one.grown.tree.first(nodes + 1))


def _unread(sequence: SequenceState) -> int:
    """Return how many tokens the sequence's drafter has yet to read."""
    return 0 if sequence.draft_state is None else sequence.draft_state.waiting


def read(
    drafter: Drafter,
    sequences: Sequence[SequenceState],
    cost: CallCost | None = None,
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
    if cost is not None and tokens > CAUGHT_UP:
        cost.read(tokens, time.perf_counter() - began)


def fail(sequence: SequenceState, error: Exception) -> None:
    """End one sequence with an error of its own."""
    logger.info("a sequence ends: %s", error)
    sequence.end("error", error)
