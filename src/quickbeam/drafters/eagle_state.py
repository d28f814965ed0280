"""What the feature drafter keeps of one sequence, and one sequence's rows of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quickbeam.drafters.base import DEPTHS, DrafterState, HeadUse
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.drafters.unread import Unread
from quickbeam.models.kv import SequenceCache
from quickbeam.tree import TokenTree


class EagleState(DrafterState):
    """What the feature drafter keeps of one sequence.

    It holds a key and a value for every row of the committed text, and what is known of the tree
    that is being grown. Row j stands for the first j + 2 of `ids` (see `eagle_model.py`). `calls`:
    how many passes of the network were run.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        self.cache, self.ids, self.shortlist = cache, list(ids), shortlist
        self.unseen: list[int] = []  # committed tokens that the shortlist has yet to read
        self.counted = HeadUse()
        self.calls = 0
        self.unread = Unread()  # hidden states of committed tokens that have no row yet
        self.tree: TokenTree | None = None  # the tree that is being grown
        # outputs of the root's row, then of the rows of the requested nodes
        self.out = torch.empty(0)
        self.feature = torch.empty(0)  # what the head reads of `out`
        self.place: dict[int, int] = {}  # by node: its row in `out`
        # by node: the orders of the tree rows that it sees, itself last; the native kernels only
        self.path: dict[int, list[int]] = {}
        # a row for each requested node below the root: which of these are its ancestors or itself
        self.visible = torch.empty(0, 0, dtype=torch.bool)
        # by node: the clusters scored for its distribution, with a shortlist
        self.routed: dict[int, torch.Tensor] = {}

    @property
    def waiting(self) -> int:
        return len(self.unread)

    @property
    def used(self) -> HeadUse:
        """The counters of the head.

        Off the CPU this may wait for the device, which counts the scored tokens.
        """
        return replace(
            self.counted,
            tokens=self.counted.tokens
            + (self.shortlist.scored if self.shortlist is not None else 0),
        )

    def append_hidden(self, hidden: torch.Tensor) -> None:
        self.unread.append(hidden)

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        if self.shortlist is None:
            return
        node: int | None = 0
        for depth, token in enumerate(tokens):
            if self.tree is None or node is None or (routed := self.routed.get(node)) is None:
                break
            self.counted.wanted += 1
            always = self.shortlist.always(token)
            held = always or self.shortlist.holds(token, routed)
            self.counted.held += held
            if not always:
                place = min(depth, DEPTHS - 1)
                self.counted.rare[place] += 1
                self.counted.rare_held[place] += held
            node = self.tree.child(node, token)
        self.routed.clear()
        self.unseen.extend(tokens)

    def share(self, chunk: int, tokens: int) -> Any:
        """Return the rows of these tokens, or None if they were not read yet.

        The last row also depends on the token after them, so whoever adopts the rows computes it
        anew.
        """
        return (
            self.cache.share(chunk, tokens) if (chunk + 1) * tokens <= self.cache.length else None
        )

    def adopt(
        self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        if chunks:
            self.cache.adopt(chunks, tokens)
            self.cache.truncate(self.cache.length - 1)
        self.unread.reset(hidden)

    def unread_hidden(self, chunk: int, tokens: int) -> torch.Tensor | None:
        begin = chunk * tokens - self.cache.length
        if not 0 <= begin <= len(self.unread) - tokens:
            return None
        return self.unread.first(begin + tokens)[begin:].clone()

    def release(self) -> None:
        self.cache.release()
        self.unread.reset()
        self.tree = self.shortlist = None
        self.out = self.feature = torch.empty(0)

    def commit(self, count: int) -> None:
        """Commit the next `count` rows, and drop the hidden states that they were computed from."""
        self.unread.drop(count)
        self.cache.commit(range(count))


class Work(NamedTuple):
    """The rows of one sequence in a pass.

    The last rows stand for nodes whose distributions are computed. `asked` maps these nodes to
    their depths.
    """

    state: EagleState
    hidden: torch.Tensor  # the target's hidden states, or outputs of the parents' rows
    tokens: Sequence[int]
    asked: dict[int, int]
    nodes: Sequence[int] = ()  # the nodes of the rows; none for committed rows
