"""What a router learns from.

A row is an input of the drafter's layer. Its label says which clusters hold the mass of the
distribution that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.shortlist.layout import ABSENT, Layout
from quickbeam.errors import InvalidInput
from quickbeam.train.drafter import autocast
from quickbeam.train.shards import Shards, spread_lengths
from quickbeam.train.unroll import Batch, ahead, collate, unroll

CANDIDATES = 10  # the drafter's likeliest tokens that labels include
FLOATS = 2**24  # probabilities that are computed at once
BATCH_TOKENS = 1024  # tokens of the conversations that the drafter runs at once
# The least share of a conversation's rows that is used. A smaller one would spread the rows better
# over the text, but would cost more passes of the drafter.
LEAST_SHARE = 0.25


class Inputs(NamedTuple):
    """The rows that count at one depth of the unrolling.

    The drafter's layer reads `hidden` `[m, hidden_size]` and the embeddings of `tokens` `[m]`.
    `out` and `target` are as in `unroll`'s `Pass`.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    out: torch.Tensor
    target: torch.Tensor


@torch.no_grad()
def inputs(network: EagleHead, batch: Batch, depths: int) -> Iterator[Inputs]:
    """Yield the passes of `unroll`, with what the layer was given in each of them."""
    given: list[torch.Tensor] = []
    watch = network.register_forward_pre_hook(lambda module, arguments: given.append(arguments[0]))
    try:
        for depth, (out, target) in enumerate(unroll(network, batch, depths)):
            counts = ahead(batch.answer, depth + 2)
            yield Inputs(given.pop()[counts], ahead(batch.tokens, depth + 1)[counts], out, target)
    finally:
        watch.remove()


class Labels(NamedTuple):
    """Labels of n rows.

    `masses` `[n, clusters]`: the mass of each cluster in the distribution to be covered. `common`
    `[n]`: the mass of the frequent block in the target's distribution. `best` `[n]`: the cluster of
    the target's likeliest token (`FREQUENT`, or `ABSENT` if the layout lacks it).
    """

    masses: torch.Tensor
    common: torch.Tensor
    best: torch.Tensor


class Labeller:
    """Makes labels for a layout.

    `head` `[vocab, d]` is copied in the layout's order, in which a cluster is a slice.

    `mix`: the distribution to be covered is `(1 - mix) * p + mix * q`. Here p is the target's
    distribution, and q is the drafter's, cut to its `CANDIDATES` likeliest tokens and renormalised.
    It stands in for DynaSpec's labels, which are not published.
    """

    def __init__(self, head: torch.Tensor, layout: Layout, mix: float) -> None:
        self.layout, self.mix, self.vocab = layout, mix, len(head)
        absent = (layout.cluster_of == ABSENT).nonzero()[:, 0]
        order = torch.cat([layout.order, absent])
        self._cluster = layout.cluster_of[order].to(head.device)
        self._head = head[order.to(head.device)]

    @torch.no_grad()
    def __call__(self, feature: torch.Tensor, target: torch.Tensor) -> Labels:
        """Return the labels of m rows.

        `feature` `[m, d]`: what the drafter's head reads. `target` `[m, d]`: what the target's head
        reads.
        """
        law = self._logits(target).softmax(-1)
        first, last = self.layout.frequent, len(self.layout.order)
        missing = self.layout.clusters * self.layout.size - (last - first)
        masses = (
            F.pad(law[:, first:last], (0, missing))
            .view(len(law), self.layout.clusters, self.layout.size)
            .sum(-1)
        )
        if self.mix:
            masses = (1 - self.mix) * masses + self.mix * self._candidates(feature)
        return Labels(masses, law[:, :first].sum(-1), self._cluster[law.argmax(-1)])

    def _candidates(self, feature: torch.Tensor) -> torch.Tensor:
        top = self._logits(feature).topk(min(CANDIDATES, self.vocab), -1)
        cluster = self._cluster[top.indices]
        law = top.values.softmax(-1) * (cluster >= 0)
        return law.new_zeros(len(law), self.layout.clusters).scatter_add_(
            1, cluster.clamp(min=0), law
        )

    def _logits(self, feature: torch.Tensor) -> torch.Tensor:
        with autocast(feature.device):
            return (feature.to(self._head.dtype) @ self._head.T).float()


class Rows(NamedTuple):
    """Rows with their labels, on the CPU.

    `hidden`: `[n, hidden_size]` bfloat16. `tokens`: `[n]` int32. `depth`: `[n]` uint8. `masses`:
    `[n, clusters]` float16. `common`: `[n]` float32. `best`: `[n]` int32.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    depth: torch.Tensor
    masses: torch.Tensor
    common: torch.Tensor
    best: torch.Tensor

    @staticmethod
    def empty(count: int, hidden_size: int, clusters: int) -> Rows:
        return Rows(
            torch.empty(count, hidden_size, dtype=torch.bfloat16),
            torch.empty(count, dtype=torch.int32),
            torch.empty(count, dtype=torch.uint8),
            torch.empty(count, clusters, dtype=torch.float16),
            torch.empty(count),
            torch.empty(count, dtype=torch.int32),
        )

    @staticmethod
    def memory(count: int, hidden_size: int, clusters: int) -> int:
        """Return the bytes that `count` rows take."""
        return count * (2 * hidden_size + 2 * clusters + 13)

    def take(self, rows: torch.Tensor | slice) -> Rows:
        return Rows(*(column[rows] for column in self))


def collect(
    network: EagleHead,
    shards: Shards,
    chosen: Sequence[int],
    labeller: Labeller,
    depths: int,
    count: int,
    seed: int,
    report: Callable[[float], None] = lambda done: None,
) -> Rows:
    """Return at most `count` rows with labels, drawn at random.

    Rows are from the answers in the `chosen` conversations, at depths 0 to `depths` - 1.
    `report(done)` is called with the share that is done, 0 to 1. Raises `InvalidInput` if there is
    no row in an answer.
    """
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    lengths = [shards.length(i) for i in chosen]
    there = shards.answers * sum(lengths) / shards.tokens * depths  # an estimate
    share = min(1.0, max(LEAST_SHARE, count / max(there, 1)))
    rows = Rows.empty(count, network.config.hidden_size, labeller.layout.clusters)
    found = 0
    for group in spread_lengths(lengths, BATCH_TOKENS, generator) if lengths else ():
        batch = collate([shards[chosen[i]] for i in group]).to(device)
        columns = [
            column[: count - found] for column in _drawn(network, batch, depths, share, generator)
        ]
        for part in zip(
            *(torch.split(column, max(1, FLOATS // labeller.vocab)) for column in columns),
            strict=True,
        ):
            hidden, tokens, depth, feature, target = part
            into = rows.take(slice(found, found + len(tokens)))
            for column, values in zip(
                into, (hidden, tokens, depth, *labeller(feature, target)), strict=True
            ):
                column.copy_(values)
            found += len(tokens)
        report(min(1.0, found / min(count, max(1.0, share * there))))
        if found == count:
            break
    if not found:
        raise InvalidInput("the text holds no answers that a router could be trained on")
    report(1.0)
    return rows.take(slice(found))


def _drawn(
    network: EagleHead, batch: Batch, depths: int, share: float, generator: torch.Generator
) -> list[torch.Tensor]:
    """Draw a share of the rows of all depths.

    Returns hidden states, tokens, depths, and what the drafter's and the target's head read.
    """
    parts = []
    with autocast(batch.tokens.device):
        for depth, row in enumerate(inputs(network, batch, depths)):
            kept = (
                (torch.rand(len(row.tokens), generator=generator) < share)
                .nonzero()[:, 0]
                .to(row.tokens.device)
            )
            hidden, tokens, out, target = (column[kept] for column in row)
            parts.append(
                (hidden, tokens, torch.full_like(tokens, depth), network.feature(out), target)
            )
    return [torch.cat(column) for column in zip(*parts, strict=True)]
