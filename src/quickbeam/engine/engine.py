"""The engine: it answers all running sequences, step by step.

In a step all trees are proposed side by side, one pass verifies them, and accepted paths are kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from quickbeam.config import EngineOptions
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.ngram_table import NgramTable
from quickbeam.drafters.texts import AnswerMemory
from quickbeam.engine.budget import MAX_NODES, MAX_NODES_SLOW, MeasuredBudget
from quickbeam.engine.commit import Commit
from quickbeam.engine.learning import Learner
from quickbeam.engine.measuring import measure
from quickbeam.engine.prefix_cache import PrefixCache
from quickbeam.engine.proposing import StepProposer, each_alone, fail, read_ahead
from quickbeam.engine.scheduler import ScheduledPart, Scheduler
from quickbeam.engine.sequence import Request, SequenceState
from quickbeam.errors import InvalidInput
from quickbeam.models.base import Batch, Model, Passed, inference
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.pages import PagePool

MAX_UNREAD_HIDDEN = 1024  # hidden states that may wait for a drafter that is not asked


class Engine:
    """Answers any number of requests with one model.

    Call `add` for a request, then `step` until it is over, or `cancel` it. All calls but
    `new_sequence` must come from one thread, which `EngineThread` has for many clients.

    - `max_running`: how many sequences run side by side; the others wait.
    - `pages`: pages of keys and values, None for any number.
    - `share`: whether texts that begin alike share their beginning.
    - `memory`: what finished texts are kept in, for other answers to draft from; None for none.
    - `table`: n-grams of text that the model wrote before, to draft from; None for none.
    - `budget`: None makes one when the first tree needs it, and measures the model's passes then.
    - `kernels`: compute what the host does between passes: draws, and the largest of some numbers.
      None: those that run the model if there are any, else PyTorch and NumPy.

    Every request ends with a reason or an `error` of its own: no failure touches another sequence.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_running: int = EngineOptions.max_running,
        pages: int | None = None,
        share: bool = True,
        memory: AnswerMemory | None = None,
        table: NgramTable | None = None,
        budget: MeasuredBudget | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.model = model
        if kernels is None and isinstance(model.pool, PagePool):
            kernels = model.pool.kernels
        # draws take a tenth of the time by the kernels, on whichever device passes run
        self._kernels = kernels
        self.prefixes = PrefixCache(model.granularity if share else None, model.pool)
        self.scheduler = Scheduler(model, self.prefixes, max_running)
        model.pool.limit = pages
        model.pool.evict = self.prefixes.evict
        self._budget = budget
        self._memory = memory
        self.table = table
        self.learner: Learner | None = None  # learns from answers, where drafters shall
        self.finished: list[SequenceState] = []  # those that ended in the last step
        # of all steps in which no prompt was read
        self.decoding_seconds = 0.0
        self.decoding_tokens = 0

    @property
    def budget(self) -> MeasuredBudget:
        """The measured budget. It is made on first use, because it measures passes."""
        if self._budget is None:
            max_nodes = MAX_NODES if self.model.streamed is None else MAX_NODES_SLOW
            self._budget = MeasuredBudget(measure(self.model, max_nodes), max_nodes)
        return self._budget

    def add(self, request: Request) -> SequenceState:
        """Take a request and return its sequence. Raises what `new_sequence` raises."""
        sequence = self.new_sequence(request)
        self.start(sequence)
        return sequence

    def new_sequence(self, request: Request) -> SequenceState:
        """Return the sequence of a request, for `start`. May be called from any thread.

        Raises `InvalidInput` if it might not fit the model's or drafter's context, or the memory.
        """
        self.model.check_prompt(request.prompt)
        prompt = len(request.prompt)
        max_tokens = request.params.max_tokens
        sequence = SequenceState(request, self._kernels)
        for limit, what, advice in self.limits(sequence.drafter):
            if prompt + max_tokens > limit:
                raise InvalidInput(
                    f"a prompt of {prompt} tokens and max_tokens={max_tokens} exceed {what} of "
                    f"{limit} tokens: shorten the prompt, ask for fewer tokens (at most "
                    f"{max(0, limit - prompt)} fit){advice}"
                )
        return sequence

    def limits(self, drafter: Drafter | None) -> list[tuple[int, str, str]]:
        """Return how many tokens a prompt and its answer may have together.

        There is an entry for each thing that limits them: the number of tokens, the thing's name,
        and what else may be done about it.
        """
        limits = list[tuple[int, str, str]]()
        if self.model.context_length is not None:
            limits.append((self.model.context_length, "the model's context", ""))
        if drafter is not None and drafter.context_length is not None:
            advice = ", or take a method without a drafter"
            limits.append((drafter.context_length, "the drafter's context", advice))
        pool = self.model.pool
        if pool.limit is not None:
            pages = max(0, pool.limit - pool.most_state_pages)
            capacity = max(0, pages * pool.page - 1)
            limits.append((capacity, "the memory for keys and values", ", or raise --kv-memory"))
        return limits

    def start(self, sequence: SequenceState) -> None:
        """Let a sequence wait until it is admitted, unless it is over."""
        if sequence.over:
            return
        self.prefixes.drafter = self.prefixes.drafter or sequence.drafter
        sequence.context.table = self.table
        if not sequence.params.repeats_drafts:
            if self._memory is not None:
                sequence.context.texts = self._memory.of(sequence.request.tenant)
            if self.learner is not None:
                sequence.learned = self.learner.of(sequence.request.tenant)
        self.scheduler.waiting.add(sequence)

    def cancel(self, sequence: SequenceState) -> None:
        """End a sequence as `interrupted`, unless it is over, and free what it holds."""
        if not sequence.over:
            sequence.end("interrupted")
            self._remove(sequence)

    def close(self) -> None:
        """End all sequences and forget all texts."""
        for sequence in [*self.scheduler.active, *self.scheduler.waiting]:
            self.cancel(sequence)
        while self.prefixes.save_next():
            pass
        if self._memory is not None:
            self._memory.close()
        self.forget()
        self.model.close()

    def forget(self) -> None:
        """Forget all texts. Prefixes that are kept in files stay there."""
        self.prefixes.clear()
        if self._memory is not None:
            self._memory.forget()
        if self.learner is not None:
            self.learner.forget()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.active or self.scheduler.waiting)

    @property
    def used(self) -> float:
        """The share of the pool that sequences hold.

        What only the prefix cache holds counts as free. May be read from any thread, at any time.
        """
        pool = self.model.pool
        if not pool.limit:
            return 0.0
        return max(0, pool.used - self.prefixes.evictable_pages()) / pool.limit

    @property
    def nodes(self) -> float:
        """The average number of nodes of the last trees of all running sequences; 0 if none runs.

        May be read from any thread.
        """
        active = list(self.scheduler.active)
        nodes = [sequence.nodes for sequence in active if sequence.running]
        return sum(nodes) / len(nodes) if nodes else 0.0

    def use_idle_time(self) -> bool:
        """Do a short piece of work that can wait. Returns whether there was any."""
        return self.prefixes.save_next() or (self.learner is not None and self.learner.step())

    @inference
    def step(self) -> None:
        """Run one step of all sequences.

        However it ends, the outputs hold all that was emitted. An error that belongs to no sequence
        ends all that were under way, and is raised. An observer must not call this.
        """
        self.finished = []
        try:
            self._step()
        except BaseException as error:
            for sequence in list(self.scheduler.active):
                sequence.end("interrupted", error if isinstance(error, Exception) else None)
                self._remove(sequence)
            raise

    def _step(self) -> None:
        began = time.perf_counter()
        # schedule
        self.scheduler.admit()
        self._release_finished()
        running = [sequence for sequence in self.scheduler.active if sequence.running]
        reading = self.scheduler.to_read()
        prompts = sum(text.part.rows for text in reading)
        # draft
        proposer = StepProposer(lambda: self.budget, running, prompts)
        proposals = proposer.propose()
        self._release_finished()  # those that failed: before any is preempted for their pages
        scheduled = [
            ScheduledPart(proposal.sequence, proposal.part, proposal) for proposal in proposals
        ]
        drafted = time.perf_counter()
        # verify
        scheduled = self.scheduler.fit_memory(scheduled + reading)
        passed = self._forward(scheduled)
        verify_seconds = time.perf_counter() - drafted
        # commit
        commit = Commit(self.prefixes, began, drafted - began, verify_seconds)
        emitted = 0
        for part, part_passed in zip(scheduled, passed, strict=True):
            if part_passed is not None and not part.sequence.over:
                emitted += commit.part(part, part_passed)
        self._advance_drafters(scheduled)
        seconds = time.perf_counter() - began
        self._record_times(scheduled, seconds, verify_seconds)
        if not prompts:
            self.decoding_seconds += seconds
            self.decoding_tokens += emitted
            proposer.observe(emitted, seconds)
        self._release_finished()

    def _release_finished(self) -> None:
        for sequence in list(self.scheduler.active):
            if sequence.over:
                self._remove(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that is over.

        What was computed goes to the prefix cache, its text to the memory of finished ones.
        """
        if sequence.cache is not None and sequence.error is None:
            self.prefixes.remember(sequence, sequence.read)
        if self._memory is not None and sequence.started:
            self._memory.of(sequence.request.tenant).add(sequence.ids)
        state = sequence.draft_state
        learned = None if sequence.error is not None else sequence.learned
        if self.learner is not None and learned is not None and state is not None:
            prompt = len(sequence.request.prompt)
            self.learner.add(learned, sequence.ids, prompt, sequence.read, state)
        self.scheduler.remove(sequence)
        self.finished.append(sequence)

    def _forward(self, scheduled: Sequence[ScheduledPart]) -> list[Passed | None]:
        return each_alone(scheduled, self._run_pass) if scheduled else []

    def _run_pass(self, scheduled: Sequence[ScheduledPart]) -> Sequence[Passed]:
        passed = self.model.forward(Batch([part.part for part in scheduled]))
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return passed

    def _reads_along(self, sequence: SequenceState) -> bool:
        """Whether the drafter should read the prompt along with the target.

        It should if it is going to be asked. In a full batch no call may be worth its time. Then
        the hidden states are kept, in case a call is worth it later on.
        """
        request = sequence.request
        fixed = request.budget != "auto" or not sequence.method.uses_cost_model
        if fixed or self._budget is None:
            return True
        if sequence.drafter is not None and sequence.drafter.skips:
            return False  # it reads the end of the prompt once a call is expected to pay
        return self._budget.would_ask(len(self.scheduler.active))

    def _advance_drafters(self, scheduled: Sequence[ScheduledPart]) -> None:
        """Let drafters read prompts, and hidden states that have waited for long.

        Whole chunks of texts that are read are entered in the prefix cache.
        """
        for part in scheduled:
            sequence = part.sequence
            is_text = part.proposal is None
            if sequence.over or sequence.cache is None:
                continue
            try:
                self._advance_drafter(sequence, is_text)
            except Exception as error:
                fail(sequence, error)
                continue
            if is_text:
                self.prefixes.remember(sequence, sequence.read)

    def _advance_drafter(self, sequence: SequenceState, is_text: bool) -> None:
        state = sequence.draft_state
        drafter = sequence.drafter
        if state is None or drafter is None:
            return
        along = is_text and self._reads_along(sequence)
        least = 1 if along else MAX_UNREAD_HIDDEN
        if state.waiting >= least and (along or drafter.needs_hidden):
            read_ahead(drafter, [sequence], least, sequence.read)

    def _record_times(
        self, scheduled: Sequence[ScheduledPart], seconds: float, verify_seconds: float
    ) -> None:
        for part in scheduled:
            statistics = part.sequence.statistics
            if part.proposal is None:
                statistics.prefill_seconds += seconds
            else:
                statistics.seconds += seconds
                statistics.experts += self.model.experts_read
        trees = [part for part in scheduled if part.proposal is not None]
        if self._budget is None or not trees:
            return
        cost = self._budget.cost
        # the texts have the step's tokens by now, which changes little
        context = 0.0
        for tree in trees:
            context += cost.of_context(tree.part.rows, len(tree.sequence.ids))
        rows = sum(part.part.rows for part in scheduled)
        cost.observe_pass(rows, verify_seconds, context)
