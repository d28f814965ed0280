"""What a method under measurement must offer. The harness knows nothing of models beyond this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quickbeam.params import SamplingParams

if TYPE_CHECKING:  # `quickbeam --help` reads this file: torch takes seconds
    import torch

    from quickbeam.draft.base import HeadUse

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One method's answer to one prompt.

    `token_ids`: the whole answer, up to and including the id that ended it. `decoded`: how many of
    them the `steps` target passes after the one over the prompt emitted. `seconds`: what those
    steps took, prefill apart; `draft_seconds` and `verify_seconds` are parts of it, and
    `drafter_seconds` is what `drafter_calls` calls of a drafter took of the first; None where a
    method doesn't tell them apart.
    """

    token_ids: list[int]
    text: str
    decoded: int
    steps: int
    seconds: float
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    drafter_calls: int | None = None
    drafter_seconds: float | None = None
    head: HeadUse | None = None  # what became of the drafter's vocabulary
    prefill_seconds: float | None = None
    nodes: int | None = None  # of all trees that were verified, roots included
    # drafted tokens that were accepted, by the source that proposed them
    accepted: Mapping[str, int] | None = None


class Runner(ABC):
    """A loaded method: a model, a way to decode with it, and the model's own word where two methods
    differ."""

    device: str

    @abstractmethod
    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the assistant begins."""

    @abstractmethod
    def answer(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        """Continue the ids. Raises `InvalidInput` where they can't be continued, KeyboardInterrupt
        when interrupted."""

    def comparable(self, params: SamplingParams) -> bool:
        """Whether the model, the ids and `params` alone decide the tokens, so that other methods
        ought to give the same ones."""
        return params.greedy

    @abstractmethod
    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """`[vocab]` raw target logits after the last id."""
