"""The decoding loop: draft a tree, verify it, keep one path."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from quickbeam.draft.base import Context
from quickbeam.engine.budget import AutoBudget
from quickbeam.engine.market import Market
from quickbeam.engine.output import Output
from quickbeam.engine.result import Logprob, SourceCount, Statistics
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput
from quickbeam.sampling import Sampler, SamplingParams, draw, logprobs, most_probable
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree
from quickbeam.trees.base import TreePolicy
from quickbeam.verify import Verdict, verify_greedy, verify_sampled

DRAFTING = 0x9E3779B97F4A7C15  # what sets the seed of drawn drafts apart from the seed of the answer


class Generation:
    """One answer in the making: iterate for the tokens of each step; `output`, `statistics` and `logprobs` grow along.

    `budget`: nodes a tree, or what finds how many are worth their time: an `AutoBudget`, or a `Market` for a policy that heeds prices.
    `keep`: how many of the prompt's first tokens the target holds already. However it ends (an exception and Ctrl-C included), `output`
    holds what was emitted and the target only certain tokens. `observer` is told of every step.

    A seed makes two generators, one for what is emitted and one for what is drawn while drafting, so that an answer whose drafts are
    certain proposals is plain decoding's own for that seed, and one with drawn drafts repeats.

    Raises `InvalidInput` where the answer might not fit the model's context.
    """

    def __init__(
        self,
        target: Target,
        policy: TreePolicy,
        output: Output,
        prompt: Sequence[int],
        params: SamplingParams,
        budget: int | AutoBudget | Market,
        keep: int = 0,
        observer: Callable[[StepRecord], None] | None = None,
    ) -> None:
        limit = target.context_length
        if limit is not None and len(prompt) + params.max_tokens > limit:
            raise InvalidInput(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed the model's context of {limit}: "
                f"shorten the prompt or ask for at most {max(0, limit - len(prompt))} tokens"
            )
        self.target, self.policy, self.output, self.params = target, policy, output, params
        self.statistics = Statistics(sources={source.name: SourceCount() for source in policy.sources})
        self._used = copy.copy(policy.head)  # before this answer
        self.logprobs: list[Logprob] | None = None if params.logprobs is None else []
        self._prompt, self._keep = list(prompt), keep
        self._budget = budget
        self._sampler = Sampler(params, self._prompt, target.vocab_size)
        self._observer = observer
        self._generator, self._drafting = torch.Generator(), torch.Generator()
        if params.seed is None:
            self._generator.seed()
            self._drafting.seed()
        else:
            self._generator.manual_seed(params.seed)
            self._drafting.manual_seed((params.seed ^ DRAFTING) % 2**64)

    def __iter__(self) -> Iterator[list[int]]:
        certain = 0
        try:
            start = time.perf_counter()
            logits = self.target.prefill(self._prompt, self._keep)
            certain = len(self._prompt)
            token = self._first(logits)
            context = Context([*self._prompt, token], logits, self.params.temperature, self._drafting)
            for source in self.policy.sources:
                source.reset(context.ids)
            self.statistics.prefill_seconds = time.perf_counter() - start
            start = time.perf_counter()
            emitted = self._emit([token], lambda _: logits)
            self._clock(start)
            yield emitted
            while self.output.finish_reason is None:
                start = time.perf_counter()
                certain = self.target.store.length
                emitted = self._step(context)
                self._clock(start)
                yield emitted
        except BaseException:
            self.output.close("interrupted")
            self.target.truncate(min(certain, len(self.target.ids), self.target.store.length))
            raise

    def _clock(self, start: float) -> None:
        """Count time since `start` as decoding; what the caller does between steps is not."""
        self.statistics.seconds += time.perf_counter() - start

    def _first(self, logits: torch.Tensor) -> int:
        if self.params.greedy:
            return self._sampler.best(logits)
        return draw(self._sampler.law(logits), self._generator)

    def _step(self, context: Context) -> list[int]:
        """Draft, verify, commit, emit."""
        began = time.perf_counter()
        measured, situation = self._budget, 0
        if isinstance(measured, AutoBudget):
            situation = self.policy.situation(context)
            budget = measured.choose(situation, len(context.ids))
        elif isinstance(measured, Market):
            budget, context.prices = measured.limit, measured.prices(len(context.ids))
        else:
            budget = measured
        remaining = self.params.max_tokens - len(self.output.token_ids)
        called, calling = self.policy.calls, self.policy.seconds
        tree = self.policy.grow(context, budget, min(remaining - 1, self.target.depth_limit()))
        drafted = time.perf_counter()
        logits = self.target.verify(tree)
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        verified = time.perf_counter()
        path, token = self._accept(tree, logits)
        self.policy.verified(tree, path)
        self.target.commit(tree, path)
        tokens = [*(tree.token[node] for node in path[1:]), token]
        emitted = self._emit(tokens, lambda i: logits[path[i]])

        context.ids.extend(tokens)
        context.logits = logits[path[-1]]
        for source in self.policy.sources:
            source.extend(tokens)
        calls = self.policy.calls - called
        if isinstance(measured, AutoBudget):
            measured.observe(situation, budget, path, self.policy.nested)
            if calls:
                measured.drafting.observe(budget, drafted - began)
        elif isinstance(measured, Market):
            known = (calls, drafted - began) if self.statistics.steps else (0, 0.0)
            measured.observe(len(tokens), time.perf_counter() - began, *known)
        if not isinstance(measured, int):
            measured.cost.observe(len(tree), len(context.ids) - len(tokens), verified - drafted)
        stats = self.statistics
        stats.steps += 1
        stats.draft_seconds += drafted - began
        stats.drafter_calls += calls
        stats.drafter_seconds += self.policy.seconds - calling
        stats.verify_seconds += verified - drafted
        if self.policy.head is not None and self._used is not None:
            stats.head = self.policy.head.since(self._used)
        for name in tree.source[1:]:
            stats.sources[name].drafted += 1
        for node in path[1 : len(emitted) + 1]:
            stats.sources[tree.source[node]].accepted += 1
        if self._observer:
            self._observer(StepRecord(tree, path, token, emitted, drafted - began, verified - drafted, time.perf_counter() - began))
        return emitted

    def _accept(self, tree: TokenTree, logits: torch.Tensor) -> Verdict:
        """The lossless choice of a path (`verify.py`). Laws are made for the nodes it visits only."""
        sampler = self._sampler

        def tokens_below_root(node: int) -> list[int]:
            return [tree.token[i] for i in tree.path(node)[1:]]

        if not self.params.greedy:
            return verify_sampled(tree, lambda node: sampler.law(logits[node], tokens_below_root(node)), self._generator)
        if not self.params.adjusts_logits:
            if (known := self.target.best) is not None:  # the kernels found them on the way; -1 stands for logits that are not finite
                return verify_greedy(tree, lambda node: known[node] if known[node] >= 0 else sampler.best(logits[node]))
            if logits.device.type != "cpu":  # one transfer for the whole tree
                return verify_greedy(tree, most_probable(logits).__getitem__)
        return verify_greedy(tree, lambda node: sampler.best(logits[node], tokens_below_root(node)))

    def _emit(self, tokens: list[int], row: Callable[[int], torch.Tensor]) -> list[int]:
        """Feed tokens to the output until it ends; give those it took. `row(i)`: the raw logits that the i-th was chosen from."""
        taken = []
        for i, token in enumerate(tokens):
            taken.append(token)
            if self.logprobs is not None:
                self.logprobs.append(Logprob(token, *logprobs(row(i), token, self.params.logprobs or 0)))
            if self.output.append(token):
                break
        self._sampler.extend(taken)
        self.statistics.new_tokens += len(taken)
        return taken
