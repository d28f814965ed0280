"""What the trainer asks of a kind of drafter (`DrafterTraining`), and what passes between them.

A block drafter and a feature drafter both draft tokens behind an anchor, a token of the text. The
tokens before each drafted one are the text's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.models.torch.pages import to_device
from quickbeam.train.target import TrainingBatch


class Anchors(NamedTuple):
    """Anchors in a batch of b conversations, `a` of each, with k positions behind each.

    Position p of an anchor drafts the token at anchor + p + 1. All is on the CPU.

    `anchors`: `[b, a]` int64, positions in the text. `mask`: `[b, a, k]` bool, the positions that
    are trained on: those whose token is in the text, and where only answers count, in an answer.
    `indices`: `[3, m]`, of what is set in `mask`; a device would make the host wait for them.
    """

    anchors: torch.Tensor
    mask: torch.Tensor
    indices: torch.Tensor

    @staticmethod
    def of(anchors: torch.Tensor, mask: torch.Tensor) -> Anchors:
        return Anchors(anchors, mask, mask.nonzero().T)

    @property
    def depth(self) -> int:
        """How many positions an anchor has."""
        return self.mask.shape[-1]

    @property
    def further(self) -> int:
        """How many of the first anchors it takes to have all with more than one position."""
        more = self.mask[..., 1:].any(-1).any(0).nonzero()
        return max(more[:, 0].tolist(), default=0) + 1

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `anchors` and `indices` on a device."""
        return to_device(self.anchors, device), to_device(self.indices, device)


def sample_anchors(
    batch: TrainingBatch, depth: int, spacing: int, answers_only: bool, generator: torch.Generator
) -> Anchors:
    """Return random anchors, one for every `spacing` tokens of the longest conversation.

    An anchor has a token before it, and the token after it is trained on. `depth`: positions of an
    anchor. `answers_only`: whether only tokens of answers are trained on. The batch is on the CPU.
    """
    length = batch.tokens.shape[1]
    count = max(1, min(length - 2, -(-length // spacing)))
    wanted = torch.arange(length + depth) < batch.lengths[:, None]
    if answers_only:
        wanted &= F.pad(batch.answer, (0, depth))
    possible = wanted[:, 2:length]  # the anchor before such a token is 1 to length - 2
    rank = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1)
    rank, anchors = rank.topk(count, 1)
    anchors = anchors + 1
    following = anchors[..., None] + torch.arange(1, depth + 1)
    following_wanted = wanted[:, None].expand(-1, count, -1).gather(2, following)
    return Anchors.of(anchors, following_wanted & (rank >= 0)[..., None])


class DraftedRows(NamedTuple):
    """The m positions that are trained on, after a pass of the drafter.

    `hidden`: `[m, d]`, what the head reads. `target_hidden`: `[m, d]`, the target's last hidden
    states. `previous`: `[m]`, the tokens before the positions. `position`: `[m]`, from 0.
    """

    hidden: torch.Tensor
    target_hidden: torch.Tensor
    previous: torch.Tensor
    position: torch.Tensor

    @staticmethod
    def of(
        batch: TrainingBatch, hidden: torch.Tensor, anchors: torch.Tensor, indices: torch.Tensor
    ) -> DraftedRows:
        """Return the rows at `indices`, whose outputs are `hidden`, beside the target's.

        `anchors`, `indices`: of `Anchors.inputs`. The target's last hidden state is the last part
        of what the batch has, as wide as `hidden`.
        """
        conversation, anchor, position = indices
        previous = anchors[conversation, anchor] + position
        target_hidden = batch.hidden[conversation, previous, -hidden.shape[-1] :]
        return DraftedRows(hidden, target_hidden, batch.tokens[conversation, previous], position)


class DrafterTraining(ABC):
    """A drafter that is trained. A kind of drafter is a class.

    `network`: whose parameters are trained. `depth`: how many positions behind an anchor it drafts.
    """

    network: Any
    depth: int

    @abstractmethod
    def sample(
        self, batch: TrainingBatch, answers_only: bool, generator: torch.Generator
    ) -> Anchors:
        """Return the anchors of a training step."""

    @abstractmethod
    def draft(self, batch: TrainingBatch, anchors: Anchors) -> DraftedRows:
        """Run the network on a batch with hidden states. Returns what is set in `anchors.mask`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the drafter, so that it can be loaded."""

    @abstractmethod
    def logits(self, drafted: DraftedRows, head: torch.Tensor) -> torch.Tensor:
        """Return the drafter's logits, `[m, vocab]`. `head`: the target's, `[vocab, d]`."""

    @abstractmethod
    def loss(
        self,
        drafted: DraftedRows,
        head: torch.Tensor,
        tokens: torch.Tensor,
        shift: torch.Tensor,
        done: float = 1.0,
    ) -> torch.Tensor:
        """Return the loss, a scalar (`distribution_loss`).

        `head`: the target's, `[vocab, d]`. `tokens` `[s]`: those that the loss is taken over, and
        `shift` `[s]` what is added to their logits. `done`: how much of the run is over, 0 to 1.
        """
