"""What EAGLE's drafters and block drafters share: they read the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from quickbeam.drafters.base import Drafter, DrafterState
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.drafters.scoring import ScoringState
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.models.base import inference
from quickbeam.models.cache.kv import Page, Pool, SequenceCache
from quickbeam.tree import TokenTree

CHUNK = 512  # the most rows of committed tokens that one pass runs
RECORDED = 512  # the latest hidden states of a sequence that are recorded at least


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
        self._count += hidden.shape[0]  # `len` of a tensor would ask for overrides first

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


class HiddenRecord(HiddenQueue):
    """The hidden states of the latest committed tokens, `RECORDED` or more where there are more."""

    def append(self, hidden: torch.Tensor) -> None:
        super().append(hidden)
        if len(self) > 2 * RECORDED:
            self.drop(len(self) - RECORDED)


class FeatureState(ScoringState):
    """What a feature or block drafter keeps of one sequence.

    - `cache`: keys and values of committed tokens.
    - `unread`: hidden states of the other committed tokens.
    - `tree`: the tree that is being proposed.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        super().__init__(shortlist)
        self.cache = cache
        self.ids = list(ids)
        self.unread = HiddenQueue()
        self.tree: TokenTree | None = None

    @property
    def waiting(self) -> int:
        return len(self.unread)

    def readable(self) -> int:
        """Return how many rows of committed tokens can be computed ahead of the next tree."""
        return len(self.unread)

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self.ids.extend(tokens)

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
        super().release()
        self.cache.release()
        self.unread.reset()
        self.tree = None


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

    def begin(self, ids: Sequence[int], shortlist: ShortlistState | None = None) -> Any:
        return self.kind(self.pool.new(), ids, shortlist)

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
