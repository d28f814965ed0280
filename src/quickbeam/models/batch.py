"""The token rows of several sequences that one pass runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quickbeam.models.kv_cache import SequenceCache
from quickbeam.tree import TokenTree


class Chain(NamedTuple):
    """Tokens of a text that follow a sequence's committed tokens.

    `wanted`: after how many of the last of them the logits are wanted.
    """

    cache: SequenceCache
    tokens: Sequence[int]
    wanted: int = 1

    @property
    def rows(self) -> int:
        return len(self.tokens)


class Draft(NamedTuple):
    """A draft tree whose root follows a sequence's committed tokens.

    `base`: how many of its first nodes an earlier pass has run since the last commit.
    """

    cache: SequenceCache
    tree: TokenTree
    base: int = 0

    @property
    def rows(self) -> int:
        return len(self.tree) - self.base


Part = Chain | Draft


@dataclass
class Batch:
    """Parts of different sequences, at most one for each sequence.

    `rows`: the number of rows of all parts.
    """

    parts: list[Part] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class Passed(NamedTuple):
    """What a pass gives of one part.

    `logits` `[wanted, vocab]`: after every node that a draft runs, or after a chain's last tokens.
    `hidden` `[rows, layers * d]`: hidden states of all rows, where the model watches layers.
    `best`: the likeliest token of each row of `logits` where the kernels tell, -1 where its logits
    are not finite.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    best: list[int] | None = None
