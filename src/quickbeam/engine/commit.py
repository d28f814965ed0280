"""What a pass says of one sequence: accepted path, committed rows, emitted tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quickbeam.engine.prefix_cache import PrefixCache
from quickbeam.engine.proposing import SequenceProposal, fail
from quickbeam.engine.result import Statistics
from quickbeam.engine.scheduler import ScheduledPart
from quickbeam.engine.sequence import SequenceState
from quickbeam.engine.trace import StepRecord
from quickbeam.grammar.masks import DeadEnd
from quickbeam.models.base import Draft, Passed
from quickbeam.noise import Noise
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.verify import Verdict, verify_equal, verify_residual


def accept(
    sampler: Sampler,
    tree: TokenTree,
    passed: Passed,
    noise: Noise | None,
    generator: torch.Generator,
    position: int,
) -> Verdict:
    """Choose a path of the tree losslessly (`verify.py`), by the `noise` of its positions.

    Without noise the residual rule draws with `generator`, unless the answer is greedy. `position`
    is that of the token after the root. Only nodes that are visited get distributions.

    Raises `QuickbeamError` for NaN logits, and `DeadEnd` if no token may come after the root. If
    that happens deeper in the tree, the path ends before that node: the answer may be over by then.
    """
    logits, params, reached = passed.logits, sampler.params, 0
    # the pass has chosen the tokens already, where nothing changes the logits
    known = passed.drawn
    if params.greedy:
        known = None if params.adjusts_logits else passed.best

    def below_root(node: int) -> list[int]:
        nonlocal reached
        reached = node
        return tree.tokens(node)

    def emitted(node: int) -> int:
        if known is not None and known[node] >= 0:
            return known[node]
        if params.greedy or noise is None:
            return sampler.best(logits[node], below_root(node))
        return sampler.emitted(logits[node], noise, position + tree.depth[node], below_root(node))

    try:
        if params.greedy or noise is not None:
            return verify_equal(tree, emitted)
        probs = lambda node: sampler.probs(logits[node], below_root(node))  # noqa: E731
        return verify_residual(tree, probs, generator)
    except DeadEnd:
        if not reached:
            raise
        return Verdict(tree.path(reached)[:-1], tree.token[reached])


@dataclass
class Commit:
    """Commits the parts of one pass.

    `prefixes` keeps hidden states at the edges of its chunks. `began`: when the step did, by
    `time.perf_counter`. `drafting` and `verifying`: the seconds of its drafts and of its pass.
    """

    prefixes: PrefixCache
    began: float
    drafting: float
    verifying: float

    def part(self, one: ScheduledPart, passed: Passed) -> int:
        """Commit what the pass says of one sequence. Returns how many tokens its tree emitted.

        An error ends this sequence alone.
        """
        try:
            if one.proposal is None:
                self._text(one, passed)
                return 0
            assert isinstance(one.part, Draft)
            return self._tree(one.sequence, one.proposal, one.part.tree, passed)
        except Exception as error:
            fail(one.sequence, error)
            return 0

    def _text(self, one: ScheduledPart, passed: Passed) -> None:
        sequence = one.sequence
        self._rows(sequence, list(range(one.part.rows)), passed)
        if sequence.scoring:
            sequence.score(passed.logits)
        if sequence.started or sequence.unread:
            return
        if not sequence.params.max_tokens:
            sequence.end("length")
            return
        logits = passed.logits[-1].clone()  # a slice would keep the logits of all rows in memory
        _, token = self._accept(sequence, TokenTree(sequence.ids[-1]), Passed(logits[None]))
        sequence.emit([token], lambda _: logits)
        sequence.extend([token], logits)

    def _tree(
        self, sequence: SequenceState, proposal: SequenceProposal, tree: TokenTree, passed: Passed
    ) -> int:
        """Accept a path of a tree, commit it and emit its tokens. Returns how many."""
        path, token = self._accept(sequence, tree, passed)
        assert proposal.result is not None
        proposal.result.learn(tree, path)
        if sequence.drafter is not None:
            sequence.drafter.learn(sequence.context, tree, passed.logits)
        self._rows(sequence, path, passed)
        tokens = [*(tree.token[node] for node in path[1:]), token]
        emitted = sequence.emit(tokens, lambda i: passed.logits[path[i]])
        sequence.extend(tokens, passed.logits[path[-1]])
        sequence.nodes = len(tree)
        self._count(sequence.statistics, proposal, tree, path[1 : len(emitted) + 1])
        if (observer := sequence.request.observer) is not None:
            times = self.drafting, self.verifying, time.perf_counter() - self.began
            observer(StepRecord(tree, path, token, emitted, *times))
        return len(tokens)

    def _count(
        self,
        stats: Statistics,
        proposal: SequenceProposal,
        tree: TokenTree,
        accepted: Sequence[int],
    ) -> None:
        stats.steps += 1
        stats.nodes += len(tree)
        stats.draft_seconds += self.drafting
        stats.drafter_calls += proposal.calls
        stats.drafter_seconds += proposal.seconds
        stats.verify_seconds += self.verifying
        for name in tree.source[1:]:
            stats.sources[name].drafted += 1
        for node in accepted:
            stats.sources[tree.source[node]].accepted += 1

    def _accept(self, sequence: SequenceState, tree: TokenTree, passed: Passed) -> Verdict:
        noise, generator = sequence.noise, sequence.generator
        return accept(sequence.request.sampler, tree, passed, noise, generator, len(sequence.ids))

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
        size = self.prefixes.size
        for chunk in range(before // size, cache.length // size):
            at = (chunk + 1) * size - 1 - before
            sequence.edges[chunk] = hidden[at : at + 1].clone()
