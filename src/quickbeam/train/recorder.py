"""Records the hidden states of what is written, so that training need not have it read again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quickbeam.drafters.base import Drafter, DrafterState, DraftProbs, DraftRequest
from quickbeam.drafters.feature import HiddenQueue
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.methods.base import NoDraft


class RecorderState(DrafterState):
    """The hidden states of the tokens that were read since the sequence began."""

    def __init__(self) -> None:
        self.rows = HiddenQueue()

    def append_hidden(self, hidden: torch.Tensor) -> None:
        self.rows.append(hidden)


class Recorder(Drafter):
    """A drafter that keeps the hidden states of one sequence and is never asked.

    `state`: of the sequence, since it began or began again.
    """

    name = "recorder"
    needs_hidden = True

    def __init__(self) -> None:
        self.state = RecorderState()

    def begin(self, ids: Sequence[int], shortlist: ShortlistState | None = None) -> RecorderState:
        self.state = RecorderState()
        return self.state

    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        raise NotImplementedError("a recorder proposes nothing")


class Recorded(NoDraft):
    """Plain decoding of one sequence, whose hidden states a `recorder` keeps."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.sources = (self.recorder,)

    def rows(self) -> torch.Tensor:
        """Return the hidden states `[n, layers * d]` of the last n tokens that were read."""
        rows = self.recorder.state.rows
        return rows.first(len(rows)) if len(rows) else torch.empty(0)
