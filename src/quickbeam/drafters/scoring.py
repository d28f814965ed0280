"""What a drafter's head scores for the sequences of a call: all tokens, or a shortlist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from quickbeam.drafters.base import Context, DrafterState, DraftRequest, HeadUse
from quickbeam.drafters.largest import largest
from quickbeam.drafters.shortlist.shortlist import ShortlistState

# How many of the likeliest tokens of the last logits a shortlist takes up: hints at what follows.
OFFERED = 16
MAX_SEPARATE = 2  # the most sequences of a call that each have their context's tokens scored


class ScoringState(DrafterState):
    """What a drafter with a head keeps of one sequence.

    - `shortlist`: what the head may score, or None for all tokens.
    - `scorer`: what the head scores for this tree: the shortlist, or its frequent tokens alone.
    - `used`: how the head was used.
    """

    used: HeadUse

    def __init__(self, shortlist: ShortlistState | None) -> None:
        self.shortlist = self.scorer = shortlist
        self.used = HeadUse()
        self._unseen: list[int] = []  # committed tokens that the shortlist has yet to read

    def extend(self, tokens: Sequence[int]) -> None:
        self._unseen.extend(tokens)

    def offer(self, context: Context) -> None:
        """Let the shortlist read new tokens, and those that the context's last logits favour."""
        if self.shortlist is not None:
            began = perf_counter()
            ((favoured, _),) = largest(context.logits[None], OFFERED, kernels=context.kernels)
            self.shortlist.extend([*self._unseen, *favoured])
            self.used.seconds += perf_counter() - began
        self._unseen.clear()

    def release(self) -> None:
        self.shortlist = self.scorer = None


class ScoredState(NamedTuple):
    """The logits of one state's rows.

    - `number`: the state's index in the arguments of `score`.
    - `logits`: `[n, s]`.
    - `tokens`: `[s]`, the token of each column; None where all of the head was scored.
    """

    number: int
    logits: torch.Tensor
    tokens: torch.Tensor | None


def score(
    states: Sequence[ScoringState],
    features: Sequence[torch.Tensor],
    clusters: Sequence[torch.Tensor | None],
    head: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[ScoredState]:
    """Yield the logits of all states' `features` `[n, d]`, in any order.

    The sequences without a shortlist share one product with the whole `head`. The
    sequences whose frequent tokens `choose_scorers` put together share another one. Each other
    sequence takes a product of its own: with the frequent tokens, its context's tokens and its
    `clusters`.
    """
    groups: dict[ShortlistState | None, list[int]] = {}
    for number, state in enumerate(states):
        groups.setdefault(state.scorer, []).append(number)
    for scorer, group in groups.items():
        began = perf_counter()
        feature = torch.cat([features[number] for number in group])
        if scorer is None:
            logits = head(feature)
            tokens = None
            count = logits.shape[-1]
        else:
            scored_before = scorer.scored
            first_clusters = clusters[group[0]]
            assert first_clusters is not None
            logits, tokens = scorer.score(feature, first_clusters)
            count = scorer.scored - scored_before
        seconds = (perf_counter() - began) / len(group)
        rows = logits.split_with_sizes([len(features[number]) for number in group])
        for number, part in zip(group, rows, strict=True):
            used = states[number].used
            used.calls += 1
            used.tokens += count
            used.seconds += seconds
            yield ScoredState(number, part, tokens)


def choose_scorers(requests: Sequence[DraftRequest]) -> None:
    """Choose what is scored for the trees whose roots are requested, until these trees are over.

    If more than `MAX_SEPARATE` sequences share a shortlist without a router, one product scores its
    frequent tokens for all of them. Their contexts' tokens are left out: these would take a product
    for each sequence, which costs more than they bring. Where children are drawn, the answer
    depends on what is scored. So those sequences score what they would score alone.
    """

    def common(request: DraftRequest) -> ShortlistState | None:
        shortlist = None if request.context.samples_children else request.state.shortlist
        return None if shortlist is None else shortlist.shared.common

    counts = Counter(map(common, requests))
    for request in requests:
        state = request.state
        shared = common(request)
        if shared is not None and counts[shared] > MAX_SEPARATE:
            state.scorer = shared
        else:
            state.scorer = state.shortlist
            state.offer(request.context)
