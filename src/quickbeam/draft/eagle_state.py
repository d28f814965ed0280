"""What the feature drafter keeps of one sequence, and its rows of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quickbeam.draft.base import DEPTHS, DrafterState, HeadUse
from quickbeam.shortlist.shortlist import Routed, ShortlistState
from quickbeam.target.kv_cache import SequenceCache
from quickbeam.tree import TokenTree


class EagleState(DrafterState):
    """Of one sequence: a key and a value for every row of the committed text, and what is known of
    the tree being grown.

    Row j stands for the first j + 2 of `ids`. `calls`: passes of the network.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        self.cache, self.ids, self.shortlist = cache, list(ids), shortlist
        self.counted = HeadUse()
        self.calls = 0
        # hidden states of committed tokens that have no row yet
        self.pending: list[torch.Tensor] = []
        self.waiting = 0  # how many those are
        self.tree: TokenTree | None = None  # being grown
        # outputs of the root's row, then of the rows of the nodes asked for
        self.out = torch.empty(0)
        self.feature = torch.empty(0)  # what the head reads of them, where the kernels give it
        self.place: dict[int, int] = {}  # node: its row in `out`
        # node: orders of what it sees behind the committed rows, for the kernels
        self.path: dict[int, list[int]] = {}
        # by node asked for: which of them are its ancestors or itself
        self.visible = torch.empty(0, 0, dtype=torch.bool)
        self.routed: dict[int, Routed] = {}  # by node whose law was made with a shortlist

    @property
    def used(self) -> HeadUse:
        """Waits for the device, where that counts what was scored."""
        return replace(
            self.counted,
            tokens=self.counted.tokens
            + (self.shortlist.scored if self.shortlist is not None else 0),
        )

    def hear(self, hidden: torch.Tensor) -> None:
        self.pending.append(hidden)
        self.waiting += len(hidden)

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        if self.shortlist is None:
            return
        node: int | None = 0
        for depth, token in enumerate(tokens):
            if self.tree is None or node is None or (routed := self.routed.get(node)) is None:
                break
            self.counted.wanted += 1
            held = self.shortlist.holds(token, routed)
            self.counted.held += held
            if not self.shortlist.always(token):
                place = min(depth, DEPTHS - 1)
                self.counted.rare[place] += 1
                self.counted.rare_held[place] += held
            node = self.tree.child(node, token)
        self.routed.clear()
        self.shortlist.extend(tokens)

    def share(self, chunk: int, tokens: int) -> Any:
        """Rows of these tokens. The last one is of the token after them, too: who adopts it makes
        that one anew."""
        return (
            self.cache.share(chunk, tokens) if (chunk + 1) * tokens <= self.cache.length else None
        )

    def adopt(
        self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        if chunks:
            self.cache.adopt(chunks, tokens)
            self.cache.truncate(self.cache.length - 1)
        self.pending, self.waiting = list(hidden), sum(map(len, hidden))

    def heard(self, chunk: int, tokens: int) -> torch.Tensor | None:
        begin = chunk * tokens - self.cache.length
        return (
            self.first(begin + tokens)[begin:].clone()
            if 0 <= begin <= self.waiting - tokens
            else None
        )

    def release(self) -> None:
        self.cache.release()
        self.pending, self.waiting, self.tree, self.shortlist = [], 0, None, None
        self.out = self.feature = torch.empty(0)

    def first(self, count: int) -> torch.Tensor:
        """The next hidden states that have no row yet."""
        if len(self.pending) > 1:
            self.pending = [torch.cat(self.pending)]
        return self.pending[0][:count]

    def commit(self, count: int) -> None:
        """They have rows now."""
        rest = self.pending[0][count:].clone()  # not a slice, which would keep those that have rows
        self.pending, self.waiting = ([rest] if len(rest) else []), len(rest)
        self.cache.commit(range(count))


class Work(NamedTuple):
    """Rows of one sequence in a pass: what goes in, and the nodes that the last of them stand for,
    with their depths."""

    state: EagleState
    hidden: torch.Tensor  # the target's hidden states, or outputs of the rows above
    tokens: Sequence[int]
    asked: dict[int, int]
    nodes: Sequence[int] = ()  # of the tree; none for committed rows
