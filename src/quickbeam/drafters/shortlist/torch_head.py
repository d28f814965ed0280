"""The rows of a head that a shortlist scores, in PyTorch, as a part of a pass."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quickbeam.drafters.shortlist.layout import ABSENT, Layout
from quickbeam.models.torch.attention import runs_triton


class TorchHead:
    """Scores the frequent tokens of a layout, and for each sequence tokens of its own.

    Several sequences are scored at once. All shapes are fixed, and nothing reads from the device,
    so that a graph can hold the operations.

    `weight`: `[vocab, d]`, the head in the order of token ids.
    """

    def __init__(self, weight: torch.Tensor, layout: Layout) -> None:
        device = weight.device
        order = layout.order.to(device)
        in_clusters = order[layout.frequent :]
        padding = -len(in_clusters) % layout.size
        self.frequent = order[: layout.frequent]
        self._weight = weight.contiguous()
        self._frequent_weight = weight[self.frequent]
        self._clusters = F.pad(in_clusters, (0, padding), value=-1).view(-1, layout.size)
        self._cluster_of = layout.cluster_of.to(device)
        self._multiply = product_on(device)

    def columns(self, clusters: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the token of each column that is scored, `[S, s]`; -1 where no token counts.

        The frequent tokens come first, then those of `clusters` `[S, k]`, then those of `context`
        `[S, m]`. The context's tokens are distinct, not frequent, and may be -1. Those that a
        cluster holds, too, don't count.
        """
        count = len(clusters)
        # entries behind those of the clusters, as FREQUENT (-1) and ABSENT (-2) are indices, too
        is_scored = clusters.new_zeros(count, len(self._clusters) - ABSENT, dtype=torch.bool)
        is_scored = is_scored.scatter(1, clusters, True)
        repeated = is_scored.gather(1, self._cluster_of[context] % is_scored.shape[1])
        return torch.cat(
            [
                self.frequent.expand(count, -1),
                self._clusters[clusters].flatten(1),
                context.masked_fill(repeated, -1),
            ],
            dim=1,
        )

    def logits(
        self, feature: torch.Tensor, columns: torch.Tensor, sequence: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of rows `[n, d]`, `[n, s]` in the head's format.

        `columns`: the result of `columns`. `sequence`: of each row, `[n]`. They are -inf where a
        column doesn't count.
        """
        own = columns[:, len(self.frequent) :]
        logits = [F.linear(feature, self._frequent_weight)]
        if own.shape[1]:
            logits.append(self._multiply(feature, self._weight, own, sequence))
        return torch.cat(logits, 1)


def product_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the `selected_product` of a device: a Triton kernel where these run."""
    if not runs_triton(device) and os.environ.get("TRITON_INTERPRET") != "1":
        return selected_product
    from quickbeam.drafters.shortlist import fused  # Triton is imported only here

    return fused.selected_product


def selected_product(
    h: torch.Tensor, weight: torch.Tensor, selected: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """Return the products of each row of `h` `[n, d]` with the rows selected for its sequence.

    `weight`: `[vocab, d]`. `selected`: rows of `weight`, or -1, `[S, s]`. `sequence`: the sequence
    of each row of `h`, `[n]`. The result is `[n, s]`, -inf where no row is selected.
    """
    logits = h.new_full((len(h), selected.shape[1]), -torch.inf)
    for number, rows in enumerate(selected):
        of_sequence = F.linear(h, weight[rows.clamp(min=0)]).masked_fill(rows < 0, -torch.inf)
        logits = torch.where((sequence == number)[:, None], of_sequence, logits)
    return logits
