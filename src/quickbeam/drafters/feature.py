"""What EAGLE's drafters and block drafters share: they read the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from quickbeam.drafters.base import Context, Drafter, DrafterState, DraftRequest, HeadUse
from quickbeam.drafters.largest import largest
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.drafters.shortlist.shortlist import Shortlist, ShortlistState
from quickbeam.models.base import inference
from quickbeam.models.cache.kv import Page, Pool, SequenceCache
from quickbeam.tree import TokenTree

CHUNK = 512  # the most rows of committed tokens that one pass runs
# How many of the likeliest tokens of the last logits a shortlist takes up: hints at what follows.
OFFERED = 16
MAX_SEPARATE = 2  # the most sequences of a call that each have their context's tokens scored


class HiddenQueue:
    """Hidden states of committed tokens that the drafter has not read, one row a token."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, hidden: torch.Tensor) -> None:
        """Append a copy of the next tokens' rows `[k, width]`: a slice would keep the pass."""
        self._parts.append(hidden.clone())
        self._count += len(hidden)

    def reset(self, parts: Sequence[torch.Tensor] = ()) -> None:
        """Forget all rows and take these."""
        self._parts = list(parts)
        self._count = sum(map(len, parts))

    def first(self, count: int) -> torch.Tensor:
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0][:count]

    def drop(self, count: int) -> None:
        left = self.first(self._count)[count:]
        self.reset([left.clone()] if len(left) else [])


class FeatureState(DrafterState):
    """What a feature or block drafter keeps of one sequence.

    - `cache`: keys and values of committed tokens.
    - `unread`: hidden states of the other committed tokens.
    - `shortlist`: what the head may score, or None for all tokens.
    - `scorer`: what the head scores for this tree: the shortlist, or its frequent tokens alone.
    - `used`: how the head was used.
    - `tree`: the tree that is being proposed.
    """

    used: HeadUse

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        self.cache = cache
        self.ids = list(ids)
        self.unread = HiddenQueue()
        self.shortlist = self.scorer = shortlist
        self.used = HeadUse()
        self._unseen: list[int] = []  # committed tokens that the shortlist has yet to read
        self.tree: TokenTree | None = None

    @property
    def waiting(self) -> int:
        return len(self.unread)

    def readable(self) -> int:
        """Return how many rows of committed tokens can be computed ahead of the next tree."""
        return len(self.unread)

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        self._unseen.extend(tokens)

    def offer(self, context: Context) -> None:
        """Let the shortlist read new tokens, and those that the context's last logits favour."""
        if self.shortlist is not None:
            began = perf_counter()
            ((favoured, _),) = largest(context.logits[None], OFFERED, kernels=context.kernels)
            self.shortlist.extend([*self._unseen, *favoured])
            self.used.seconds += perf_counter() - began
        self._unseen.clear()

    def append_hidden(self, hidden: torch.Tensor) -> None:
        self.unread.append(hidden)

    def chunk_pages(self, chunk: int, tokens: int) -> list[Page] | None:
        """Return the rows of these tokens, or None if they were not read yet."""
        is_read = (chunk + 1) * tokens <= self.cache.length
        return self.cache.chunk_pages(chunk, tokens) if is_read else None

    def attach(
        self, chunks: Sequence[list[Page]], tokens: int, hidden: Sequence[torch.Tensor]
    ) -> None:
        if chunks:
            self.cache.attach(chunks, tokens)
        self.unread.reset(hidden)

    def unread_hidden(self, chunk: int, tokens: int) -> torch.Tensor | None:
        begin = chunk * tokens - self.cache.length
        if not 0 <= begin <= len(self.unread) - tokens:
            return None
        return self.unread.first(begin + tokens)[begin:].clone()

    def release(self) -> None:
        self.cache.release()
        self.unread.reset()
        self.tree = self.shortlist = self.scorer = None


class FeatureDrafter(Drafter):
    """A drafter that reads the target's hidden states.

    `kind`: the class of its states. `passes`: run its network.
    """

    needs_hidden = True
    pool: Pool
    kind: type[Any]
    passes: NativePasses | TorchPasses

    @property
    def scores_in_passes(self) -> bool:
        return isinstance(self.passes, TorchPasses)

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> Any:
        state = None if shortlist is None else shortlist.begin(ids)
        return self.kind(self.pool.new(), ids, state)

    @inference
    def read(self, states: Sequence[DrafterState], least: int = 1, end: int | None = None) -> None:
        # `end` bounds the hidden states that were appended, so it needs no look here
        own = [state for state in states if isinstance(state, self.kind)]
        self._read([state for state in own if state.readable() >= max(1, least)])

    @abstractmethod
    def _read(self, states: Sequence[Any]) -> None:
        """Compute all rows of the states that can be computed now."""


def in_chunks(
    states: Sequence[Any], readable: Callable[[Any], int]
) -> Iterator[list[tuple[Any, int]]]:
    """Yield states and how many of their rows one pass reads, at most `CHUNK` together.

    `readable`: returns how many rows of a state are left. The caller commits the rows before the
    next pass.
    """
    while left := [state for state in states if readable(state) > 0]:
        chunk = list[tuple[Any, int]]()
        capacity = CHUNK
        for state in left:
            count = min(readable(state), CHUNK)
            if chunk and count > capacity:
                break
            capacity -= count
            chunk.append((state, count))
        yield chunk


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
    states: Sequence[FeatureState],
    features: Sequence[torch.Tensor],
    clusters: Sequence[torch.Tensor | None],
    passes: NativePasses,
) -> Iterator[ScoredState]:
    """Yield the logits of all states' `features` `[n, d]`, in any order.

    The sequences without a shortlist share one product, with the whole head of `passes`. The
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
            logits = passes.logits(feature)
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
