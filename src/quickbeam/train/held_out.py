"""Figures of a drafter on held-out answers, by position behind the last committed token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.drafters.loss import autocast, row_slices
from quickbeam.train.base import Anchors, DraftedRows, DrafterTraining, sample_anchors
from quickbeam.train.shards import Shards, collate
from quickbeam.train.states import StateCache
from quickbeam.train.target import FrozenTarget, TrainingBatch


class HeldOutMetrics(NamedTuple):
    """Figures on held-out answers. The tokens before a position are the text's.

    `agreement`: by position, how often the drafter's likeliest token is the target's. `overlap`: by
    position, the mean of sum min(p, q), which is how often a drawn token is accepted at temperature
    1. `mat`: tokens a step of a chain, one of the target's own included, if a position is accepted
    where the likeliest tokens agree; `mat_drawn`: the same at temperature 1, by the overlap.
    """

    agreement: list[float]
    overlap: list[float]
    mat: float
    mat_drawn: float


@torch.no_grad()
def measure_held_out(
    drafter: DrafterTraining,
    target: FrozenTarget,
    states: StateCache,
    shards: Shards,
    indices: Sequence[int],
    spacing: int,
) -> HeldOutMetrics:
    """Measure a drafter on the conversations at `indices`, which it was not trained on.

    `states`: the target's hidden states of them. `spacing`: tokens of text an anchor.
    """
    depth = drafter.depth
    generator = torch.Generator().manual_seed(0)
    # by position: the sums of agreement and of overlap, and how many were measured
    sums = torch.zeros(2, depth)
    measured = torch.zeros(depth)
    # the accepted tokens behind anchors whose positions all count, and how many these anchors are
    accepted = torch.zeros(2)
    complete_anchors = torch.zeros(())
    for index in indices:
        batch = collate([shards[index]])
        anchors = sample_anchors(batch, depth, spacing, True, generator)
        rates = _acceptance_rates(drafter, target, states.read(batch), anchors)
        sums += rates.sum((1, 2))
        measured += anchors.mask.sum((0, 1))
        complete = anchors.mask.all(-1)  # the end of an answer would make the others look shorter
        accepted += rates.cumprod(-1).sum(-1)[:, complete].sum(1)
        complete_anchors += complete.sum()
    agreement, overlap = (sums / measured.clamp(min=1)).tolist()
    mat, mat_drawn = (1 + accepted / complete_anchors.clamp(min=1)).tolist()
    return HeldOutMetrics(agreement, overlap, mat, mat_drawn)


def _acceptance_rates(
    drafter: DrafterTraining, target: FrozenTarget, batch: TrainingBatch, anchors: Anchors
) -> torch.Tensor:
    """Return whether the likeliest tokens agree, and sum min(p, q): `[2, b, a, k]` on the CPU.

    Both are zero at positions that `anchors.mask` leaves out.
    """
    rates = torch.zeros(2, *anchors.mask.shape)
    parts = list[torch.Tensor]()
    with autocast(target.device):
        drafted = drafter.draft(batch, anchors)
        for rows in row_slices(drafted.hidden):
            part = DraftedRows(*(column[rows] for column in drafted))
            target_logits = F.linear(part.target_hidden.to(target.head.dtype), target.head)
            p = target_logits.float().softmax(-1)
            q = drafter.logits(part, target.head).softmax(-1)
            agree = (p.argmax(-1) == q.argmax(-1)).float()
            overlap = torch.minimum(p, q).sum(-1)
            parts.append(torch.stack([agree, overlap]).cpu())
    if parts:
        rates[:, anchors.mask] = torch.cat(parts, 1)
    return rates
