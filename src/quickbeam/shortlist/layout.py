"""The order in which a drafter's head stores its rows: tokens that are always scored, then clusters
of tokens scored on demand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from quickbeam.errors import InvalidInput

FREQUENT = -1  # in `Layout.cluster_of`: always scored
ABSENT = -2  # in `Layout.cluster_of`: the layout lacks it


@dataclass(frozen=True, eq=False)
class Layout:
    """The vocabulary in the order in which a drafter's head stores its rows.

    `order`: `[v]` int64 token ids on the CPU, no repeats, `v <= vocab`: the `frequent` first, then
    the clusters one after another, `size` tokens each; only the last one may hold fewer. Raises
    `InvalidInput` for anything else.
    """

    order: torch.Tensor
    frequent: int
    size: int
    vocab: int

    def __post_init__(self) -> None:
        if self.vocab < 1 or self.size < 1:
            raise InvalidInput(
                f"a layout of {self.vocab} tokens with clusters of {self.size}: "
                "both must be at least 1"
            )
        require_distinct(self.order, self.vocab, "the layout's order")
        if not 0 <= self.frequent <= len(self.order):
            raise InvalidInput(
                f"a layout of {len(self.order)} tokens with {self.frequent} "
                f"frequent ones: must be 0 to {len(self.order)}"
            )

    @property
    def clusters(self) -> int:
        """How many there are."""
        return -(-(len(self.order) - self.frequent) // self.size)

    @cached_property
    def cluster_of(self) -> torch.Tensor:
        """`[vocab]` int64: the cluster of each token, `FREQUENT` or `ABSENT`."""
        found = torch.full((self.vocab,), ABSENT, dtype=torch.int64)
        found[self.order[: self.frequent]] = FREQUENT
        rest = self.order[self.frequent :]
        found[rest] = torch.arange(len(rest)) // self.size
        return found

    def tokens(self, cluster: int) -> torch.Tensor:
        """`[size]` int64 ids of a cluster, the last one's possibly fewer. Raises `IndexError` where
        there is no such cluster."""
        if not 0 <= cluster < self.clusters:
            raise IndexError(f"cluster {cluster} of {self.clusters}")
        begin = self.frequent + cluster * self.size
        return self.order[begin : begin + self.size]

    def within(self, size: int) -> Layout:
        """A layout in which the frequent block and one cluster are at most `size` tokens: this one,
        or one with the same clusters and only the first of the frequent tokens. Raises
        `InvalidInput` where a cluster alone is larger."""
        if self.frequent + self.size <= size or not self.clusters:
            return self
        if size < self.size:
            raise InvalidInput(
                f"a shortlist of {size} tokens: must be at least {self.size}, a cluster's"
            )
        kept = size - self.size
        return Layout(
            torch.cat([self.order[:kept], self.order[self.frequent :]]), kept, self.size, self.vocab
        )

    @staticmethod
    def by_frequency(ranking: torch.Tensor, size: int, vocab: int) -> Layout:
        """The first `size` tokens of `ranking`, all of it where it is shorter, and no clusters
        (FR-Spec, 2502.14856)."""
        if size < 1:
            raise InvalidInput(
                f"a shortlist of the {size} most frequent tokens: must be at least 1"
            )
        order = ranking[:size].clone()
        return Layout(order, len(order), size, vocab)

    @staticmethod
    def nothing(vocab: int) -> Layout:
        """No token at all: what is scored then comes from the context alone (NanoSpec)."""
        return Layout(torch.empty(0, dtype=torch.int64), 0, 1, vocab)


def require_distinct(ids: torch.Tensor, vocab: int, what: str) -> None:
    """Raise `InvalidInput` where `ids` are anything but distinct int64 token ids in one CPU tensor
    `[m]`."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device.type != "cpu":
        raise InvalidInput(
            f"{what}: must be int64 [m] on the CPU, is {ids.dtype} "
            f"{list(ids.shape)} on {ids.device}"
        )
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside):
        raise InvalidInput(
            f"{what} names token {int(outside[0])}: must be ids from 0 to {vocab - 1}"
        )
    repeated = (torch.bincount(ids, minlength=vocab) > 1).nonzero()
    if len(repeated):
        raise InvalidInput(f"{what} names token {int(repeated[0])} more than once")
