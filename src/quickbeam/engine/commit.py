"""What a pass says of one sequence: committed rows, emitted tokens, and what learns from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quickbeam.engine.accept import accept, first_token
from quickbeam.engine.budget import Budget
from quickbeam.engine.growing import TreeDraft, fail
from quickbeam.engine.prefix_cache import PrefixCache
from quickbeam.engine.scheduler import Ready
from quickbeam.engine.sequence import SequenceState
from quickbeam.engine.trace import StepRecord
from quickbeam.models.base import Draft, Passed
from quickbeam.tree import TokenTree


class Clock:
    """When a step began, and when its drafts and its pass were done.

    In seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.began = self.drafted = self.verified = time.perf_counter()

    @property
    def drafting(self) -> float:
        return self.drafted - self.began

    @property
    def verifying(self) -> float:
        return self.verified - self.drafted

    @property
    def seconds(self) -> float:
        """The seconds of the step so far."""
        return time.perf_counter() - self.began


@dataclass
class Commit:
    """Commits the parts of one pass.

    `budget` learns from trees whose size it chose. `prefixes` keeps hidden states at the edges of
    its chunks.
    """

    clock: Clock
    prefixes: PrefixCache | None
    budget: Budget | None

    def part(self, one: Ready, passed: Passed) -> int:
        """Commit what the pass says of one sequence. Returns how many tokens its tree emitted.

        An error ends this sequence alone.
        """
        try:
            if one.growing is None:
                self._text(one, passed)
                return 0
            assert isinstance(one.part, Draft)
            return self._tree(one.sequence, one.growing, one.part.tree, passed)
        except Exception as error:
            fail(one.sequence, error)
            return 0

    def _text(self, one: Ready, passed: Passed) -> None:
        """Commit tokens of a text that was read. After the last token of a prompt, emit the first
        token, if one is wanted."""
        sequence, part = one.sequence, one.part
        self._rows(sequence, list(range(part.rows)), passed)
        if sequence.scoring:
            sequence.score(passed.logits)
        if sequence.started or sequence.unread:
            return
        if not sequence.params.max_tokens:
            sequence.end("length")
            return
        logits = passed.logits[-1].clone()  # a slice would keep the logits of all rows in memory
        token = first_token(
            sequence.request.sampler, logits, sequence.randomness, len(sequence.ids)
        )
        sequence.emit([token], lambda _: logits)
        sequence.extend([token], logits)

    def _tree(
        self,
        sequence: SequenceState,
        growing: TreeDraft,
        tree: TokenTree,
        passed: Passed,
    ) -> int:
        """Accept a path of a tree, commit it and emit its tokens. Returns how many."""
        path, token = accept(
            sequence.request.sampler, tree, passed, sequence.randomness, len(sequence.ids)
        )
        grown = growing.grown
        assert grown is not None
        grown.learn(tree, path)
        if sequence.drafter is not None and sequence.context is not None:
            sequence.drafter.learn(sequence.context, tree, passed.logits)
        self._rows(sequence, path, passed)
        tokens = [*(tree.token[node] for node in path[1:]), token]
        emitted = sequence.emit(tokens, lambda i: passed.logits[path[i]])
        sequence.extend(tokens, passed.logits[path[-1]])
        if growing.situation is not None:
            assert self.budget is not None
            self.budget.observe_tree(
                sequence.request.setting,
                growing.situation,
                growing.nodes,
                path,
                sequence.drafter if growing.calls else None,
                growing.seconds,
            )
        sequence.nodes = len(tree)
        growing.count(tree, path, emitted, self.clock.drafting, self.clock.verifying)
        if (observer := sequence.request.observer) is not None:
            times = self.clock.drafting, self.clock.verifying, self.clock.seconds
            observer(StepRecord(tree, path, token, emitted, *times))
        return len(tokens)

    def _rows(self, sequence: SequenceState, path: Sequence[int], passed: Passed) -> None:
        """Keep the path's rows of the pass, and give their hidden states to the drafter."""
        cache, before = sequence.cache, sequence.read
        assert cache is not None
        cache.commit(path)
        drafter, state = sequence.drafter, sequence.draft_state
        if drafter is None or state is None or not drafter.needs_hidden or passed.hidden is None:
            return
        hidden, kept = passed.hidden, len(path)
        if kept < hidden.shape[0]:  # `len` of a tensor would ask for overrides first
            straight = path[-1] == kept - 1  # the usual case, in which a slice will do
            # indexing with a list would make a tensor of it first, which takes longer than this
            rows = [hidden[node : node + 1] for node in path] if not straight else []
            hidden = torch.cat(rows) if rows else hidden[:kept]
        state.append_hidden(hidden)
        if self.prefixes is not None:
            size = self.prefixes.size
            for chunk in range(before // size, cache.length // size):
                at = (chunk + 1) * size - 1 - before
                sequence.edges[chunk] = hidden[at : at + 1].clone()
