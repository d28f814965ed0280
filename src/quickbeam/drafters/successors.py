"""What sources know of the next token by the last few tokens alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from quickbeam.drafters.base import Context, Source
from quickbeam.noise import Array


class Successors(NamedTuple):
    """The likeliest next tokens, the likeliest first, and their probabilities, each `[k]`.

    `known`: by how many of the last tokens they were found.
    """

    tokens: Array
    probs: Array
    known: int


class SuccessorSource(Source):
    """Proposes what followed the last tokens of a text elsewhere."""

    def knows_of(self, context: Context) -> bool:
        """Whether there may be something to find for this sequence."""
        return True

    @abstractmethod
    def after(self, context: Context, path: Sequence[int]) -> Successors | None:
        """Return what may follow the text that `path` continues; None if nothing is known."""
