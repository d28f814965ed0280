"""What a source of candidates is told, whatever it drafts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Context:
    """What is certain before a step.

    `ids`: prompt and output so far; the last one becomes the root of the next tree. `logits`: `[vocab]` raw target logits that the
    last id was chosen from, on the target's device.
    """

    ids: list[int]
    logits: torch.Tensor


class Source(ABC):
    """Proposes tokens. Holds state of one sequence at a time."""

    name: str  # as statistics and `TokenTree.source` show it

    @abstractmethod
    def reset(self, ids: Sequence[int]) -> None:
        """Begin a sequence: forget everything, read the prompt."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens that became certain. Called once after the first token and once a step."""
