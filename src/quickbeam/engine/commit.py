"""Commits what a pass gives one sequence: accepted path, committed rows, emitted tokens."""

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
from quickbeam.params import SamplingParams
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
    logits = passed.logits
    params = sampler.params
    pass_tokens = _tokens_of_pass(params, passed)
    last_node = 0  # the one after which a token was looked for last

    def path_tokens(node: int) -> list[int]:
        nonlocal last_node
        last_node = node
        return tree.tokens(node)

    def emitted(node: int) -> int:
        if pass_tokens is not None and pass_tokens[node] >= 0:
            return pass_tokens[node]
        if params.greedy or noise is None:
            return sampler.best(logits[node], path_tokens(node))
        node_position = position + tree.depth[node]
        return sampler.emitted(logits[node], noise, node_position, path_tokens(node))

    def probs(node: int) -> torch.Tensor:
        return sampler.probs(logits[node], path_tokens(node))

    try:
        if params.greedy or noise is not None:
            return verify_equal(tree, emitted)
        return verify_residual(tree, probs, generator)
    except DeadEnd:
        if last_node == 0:
            raise
        return Verdict(tree.path(last_node)[:-1], tree.token[last_node])


def _tokens_of_pass(params: SamplingParams, passed: Passed) -> list[int] | None:
    """Return the tokens that the pass itself chose, by node; None if the host chooses them all.

    At temperature 0 these are the likeliest tokens, if nothing changes the logits. Else these are
    the draws of `Draft.draws`. Where the entry of a node is -1, the host has to choose.
    """
    if not params.greedy:
        return passed.drawn
    return None if params.adjusts_logits else passed.best


@dataclass
class Commit:
    """Commits the parts of one pass.

    - `prefixes`: the prefix cache, whose chunks keep the hidden states of their last tokens.
    - `began`: when the step began, by `time.perf_counter`.
    - `draft_seconds`, `verify_seconds`: how long the step's drafts and its pass took.
    """

    prefixes: PrefixCache
    began: float
    draft_seconds: float
    verify_seconds: float

    def part(self, scheduled: ScheduledPart, passed: Passed) -> int:
        """Commit what the pass says of one sequence. Returns how many tokens its tree emitted.

        An error ends this sequence alone.
        """
        try:
            if scheduled.proposal is None:
                self._text(scheduled.sequence, scheduled.part.rows, passed)
                return 0
            assert isinstance(scheduled.part, Draft)
            tree = scheduled.part.tree
            return self._tree(scheduled.sequence, scheduled.proposal, tree, passed)
        except Exception as error:
            fail(scheduled.sequence, error)
            return 0

    def _text(self, sequence: SequenceState, rows: int, passed: Passed) -> None:
        """Commit `rows` tokens of a text that were read. Behind its last one, emit a token."""
        self._rows(sequence, list(range(rows)), passed)
        if sequence.scoring:
            sequence.score(passed.logits)
        if sequence.started or sequence.unread:
            return
        if not sequence.params.max_tokens:
            sequence.end("length")
            return
        logits = passed.logits[-1].clone()  # a slice would keep the logits of all rows in memory
        root = TokenTree(sequence.ids[-1])
        _, token = self._accept(sequence, root, Passed(logits[None]))
        sequence.emit([token], lambda _: logits)
        sequence.extend([token], logits)

    def _tree(
        self, sequence: SequenceState, proposal: SequenceProposal, tree: TokenTree, passed: Passed
    ) -> int:
        """Accept a path of a tree, commit it and emit its tokens. Returns how many."""
        path, token = self._accept(sequence, tree, passed)
        assert proposal.result is not None
        proposal.result.learn(tree, path)
        for source in proposal.method.sources:
            source.learn(sequence.context, tree, passed.logits)
        self._rows(sequence, path, passed)
        tokens = [*(tree.token[node] for node in path[1:]), token]
        emitted = sequence.emit(tokens, lambda i: passed.logits[path[i]])
        sequence.extend(tokens, passed.logits[path[-1]])
        sequence.nodes = len(tree)
        self._count(sequence.statistics, proposal, tree, path[1 : len(emitted) + 1])
        observer = sequence.request.observer
        if observer is not None:
            record = StepRecord(
                tree=tree,
                path=path,
                token=token,
                emitted=emitted,
                draft_seconds=self.draft_seconds,
                verify_seconds=self.verify_seconds,
                seconds=time.perf_counter() - self.began,
            )
            observer(record)
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
        stats.draft_seconds += self.draft_seconds
        stats.drafter_calls += proposal.calls
        stats.drafter_seconds += proposal.seconds
        stats.verify_seconds += self.verify_seconds
        for name in tree.source[1:]:
            stats.sources[name].drafted += 1
        for node in accepted:
            stats.sources[tree.source[node]].accepted += 1

    def _accept(self, sequence: SequenceState, tree: TokenTree, passed: Passed) -> Verdict:
        return accept(
            sequence.request.sampler,
            tree,
            passed,
            noise=sequence.noise,
            generator=sequence.generator,
            position=len(sequence.ids),
        )

    def _rows(self, sequence: SequenceState, path: Sequence[int], passed: Passed) -> None:
        """Keep the path's rows of the pass, and give their hidden states to the drafter."""
        cache = sequence.cache
        before = sequence.read
        assert cache is not None
        cache.commit(path)
        drafter = sequence.drafter
        state = sequence.draft_state
        if drafter is None or state is None or not drafter.needs_hidden or passed.hidden is None:
            return
        hidden = passed.hidden
        kept = len(path)
        if kept < hidden.shape[0]:  # `len` of a tensor would ask for overrides first
            if path[-1] == kept - 1:  # most often the path is the first nodes: a slice will do
                hidden = hidden[:kept]
            else:
                # indexing with a list would make a tensor of it first, which takes longer than this
                hidden = torch.cat([hidden[node : node + 1] for node in path])
        state.append_hidden(hidden)
        size = self.prefixes.size
        for chunk in range(before // size, cache.length // size):
            at = (chunk + 1) * size - 1 - before
            sequence.last_hidden[chunk] = hidden[at : at + 1].clone()
