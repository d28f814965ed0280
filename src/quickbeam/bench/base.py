"""The interface of a method under measurement. The harness knows nothing of models beyond it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quickbeam.params import SamplingParams

if TYPE_CHECKING:  # `quickbeam --help` imports this file, and torch takes seconds to import
    import torch

    from quickbeam.draft.base import HeadUse

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One method's answer to one prompt. A figure is None where the method doesn't measure it.

    - `token_ids`: the whole answer, up to and including the id that ended it.
    - `decoded`: how many of these tokens were emitted by the `steps` target passes that follow the
      pass over the prompt.
    - `seconds`: what those steps took, without prefill.
    - `draft_seconds`, `verify_seconds`: parts of `seconds`.
    - `drafter_seconds`: the part of `draft_seconds` that the `drafter_calls` calls of a drafter
      took.
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
    head: HeadUse | None = None  # how much of the vocabulary the drafter scored
    prefill_seconds: float | None = None
    nodes: int | None = None  # of all verified trees, roots included
    # accepted drafted tokens, by the source that proposed them
    accepted: Mapping[str, int] | None = None


class Runner(ABC):
    """A loaded method: a model and a way to decode with it.

    `last_logits` shows what the model itself says where the answers of two methods differ.
    """

    device: str

    @abstractmethod
    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's turn begins."""

    @abstractmethod
    def answer(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        """Continue the ids.

        Raises `InvalidInput` where they can't be continued, and `KeyboardInterrupt` when
        interrupted.
        """

    def comparable(self, params: SamplingParams) -> bool:
        """Whether the model, the ids and `params` alone decide the tokens.

        Where they do, other methods ought to give the same tokens.
        """
        return params.greedy

    @abstractmethod
    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the target's raw logits `[vocab]` after the last id."""
