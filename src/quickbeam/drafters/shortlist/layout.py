"""The order in which a drafter's head stores its rows.

First come the tokens that are always scored, then clusters of tokens that are scored on demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from quickbeam.errors import InvalidInput

FREQUENT = -1  # in `Layout.cluster_of`: always scored
ABSENT = -2  # in `Layout.cluster_of`: not in the layout


@dataclass(frozen=True, eq=False)
class Layout:
    """The vocabulary, of `vocab` tokens, in the order in which a drafter's head stores its rows.

    - `order`: `[v]` int64 token ids on the CPU, no repeats, `v <= vocab`. The `frequent` tokens
      come first, then one cluster after another.
    - `size`: how many tokens a cluster has; only the last cluster may have fewer.

    Raises `InvalidInput` for anything else.
    """

    order: torch.Tensor
    frequent: int
    size: int
    vocab: int

    def __post_init__(self) -> None:
        require_distinct(self.order, self.vocab, "the layout's order")
        if self.size < 1 or not 0 <= self.frequent <= len(self.order):
            raise InvalidInput(
                f"a layout of {len(self.order)} tokens can't have {self.frequent} frequent ones "
                f"and clusters of {self.size}"
            )

    @property
    def clusters(self) -> int:
        """How many clusters the layout has."""
        return -(-(len(self.order) - self.frequent) // self.size)

    @cached_property
    def cluster_of(self) -> torch.Tensor:
        """`[vocab]` int64: the cluster of each token, or `FREQUENT` or `ABSENT`."""
        clusters = torch.full((self.vocab,), ABSENT, dtype=torch.int64)
        clusters[self.order[: self.frequent]] = FREQUENT
        in_clusters = self.order[self.frequent :]
        clusters[in_clusters] = torch.arange(len(in_clusters)) // self.size
        return clusters

    def scored(self, clusters: torch.Tensor) -> torch.Tensor:
        """Return the token ids of the frequent block and of `clusters` `[k]`, one after another."""
        first = self.frequent + clusters.cpu() * self.size
        in_clusters = (first[:, None] + torch.arange(self.size)).flatten()
        in_clusters = in_clusters[in_clusters < len(self.order)]  # the last may have fewer
        return self.order[torch.cat([torch.arange(self.frequent), in_clusters])]

    def within(self, size: int) -> tuple[Layout, int]:
        """Return a layout of which `size` tokens are scored, and how many clusters these hold.

        This is the layout itself where its frequent block and a cluster fit. Otherwise it has the
        same clusters and only the first of the frequent tokens. Raises `InvalidInput` where there
        are no clusters, or one alone is larger than `size`.
        """
        if not self.clusters or size < self.size:
            raise InvalidInput(
                f"a shortlist of {size} tokens: must be at least {self.size}, a cluster's, of "
                f"{self.clusters}"
            )
        if size >= len(self.order):
            return self, self.clusters
        if self.frequent + self.size <= size:
            return self, (size - self.frequent) // self.size
        kept = size - self.size
        order = torch.cat([self.order[:kept], self.order[self.frequent :]])
        return Layout(order, kept, self.size, self.vocab), 1

    @staticmethod
    def by_frequency(ranking: torch.Tensor, size: int, vocab: int) -> Layout:
        """Return a layout of the first `size` tokens of `ranking`, without clusters.

        This is FR-Spec's shortlist (2502.14856). If `ranking` is shorter, the layout has all of it.
        """
        order = ranking[:size].clone()
        return Layout(order, len(order), size, vocab)

    @staticmethod
    def nothing(vocab: int) -> Layout:
        """Return a layout without tokens: only the context is scored then (NanoSpec)."""
        return Layout(torch.empty(0, dtype=torch.int64), 0, 1, vocab)


class Scores(NamedTuple):
    # [n, s], in the head's dtype or float32; -inf in columns that don't count (padding, repeats)
    logits: torch.Tensor
    # [s] int64, the token of each column. A token has at most one column that isn't -inf.
    tokens: torch.Tensor


def require_distinct(ids: torch.Tensor, vocab: int, what: str) -> None:
    """Raise `InvalidInput` unless `ids` are distinct token ids, int64 `[m]` on the CPU.

    `what`: what the error message calls them.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise InvalidInput(f"{what}: must be int64 [m], is {ids.dtype} {list(ids.shape)}")
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside):
        raise InvalidInput(
            f"{what} names token {int(outside[0])}: must be ids from 0 to {vocab - 1}"
        )
    repeated = (torch.bincount(ids, minlength=vocab) > 1).nonzero()
    if len(repeated):
        raise InvalidInput(f"{what} names token {int(repeated[0])} more than once")
