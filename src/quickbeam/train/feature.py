"""Training of a feature drafter by training-time test (EAGLE-3, 2503.01840, §3.2)."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_files import save_eagle
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.loss import distribution_loss
from quickbeam.drafters.unrolled import rounded_up, unroll
from quickbeam.train.base import Anchors, DraftedRows, DrafterTraining, sample_anchors
from quickbeam.train.start import copy_layer, target_norm
from quickbeam.train.target import FrozenTarget, TrainingBatch

FURTHER_SHARE = 0.25  # of the rows with a loss, on which the passes after the first one run, too


class FeatureTraining(DrafterTraining):
    """A feature drafter that is trained for `depth` positions ahead of the text."""

    def __init__(self, network: EagleHead, depth: int) -> None:
        self.network = network
        self.depth = depth

    def sample(
        self, batch: TrainingBatch, answers_only: bool, generator: torch.Generator
    ) -> Anchors:
        """Return every token as an anchor, a share of them with all positions.

        The first position is what a drafter learns most by, and a pass over all rows costs as much
        as the first one. So random rows of each conversation are run further. Their number is
        rounded up, so that other steps have it, too.
        """
        anchors, mask, _ = sample_anchors(batch, self.depth, 1, answers_only, generator)
        wanted = int(mask[..., 0].sum(1).max())
        mask[:, math.ceil(FURTHER_SHARE * rounded_up(wanted)) :, 1:] = False
        return Anchors.of(anchors, mask)

    def draft(self, batch: TrainingBatch, anchors: Anchors) -> DraftedRows:
        """Run a pass for each position: the row before an anchor drafts what follows the anchor."""
        on_device, indices = anchors.inputs(batch.hidden.device)
        further = anchors.further
        rows = anchors.anchors[:, :further] - 1
        passes = unroll(self.network, batch.tokens, batch.hidden, anchors.depth, rows=rows)
        outputs = torch.cat([out for _, out in passes], 1)
        conversation, anchor, position = indices
        # the first pass has a place for each row of the text, another one for each of `rows`
        later = batch.tokens.shape[1] + (position - 1) * further + anchor
        place = torch.where(position > 0, later, on_device[conversation, anchor] - 1)
        hidden = self.network.feature(outputs[conversation, place])
        return DraftedRows.of(batch, hidden, on_device, indices)

    def logits(self, drafted: DraftedRows, head: torch.Tensor) -> torch.Tensor:
        return F.linear(drafted.hidden.to(head.dtype), head).float()

    def loss(
        self,
        drafted: DraftedRows,
        head: torch.Tensor,
        tokens: torch.Tensor,
        shift: torch.Tensor,
        done: float = 1.0,
    ) -> torch.Tensor:
        no_bias = head.new_zeros(len(tokens), 0)
        hidden, target_hidden, _, position = drafted
        loss, _ = distribution_loss(
            hidden, no_bias, target_hidden, position, head[tokens], shift, done
        )
        return loss

    def save(self, folder: Path) -> None:
        save_eagle(self.network, folder)


def feature_layers(count: int) -> tuple[int, ...]:
    """Return which hidden states a feature drafter reads of a model of `count` layers.

    As in EAGLE-3, they are a low one, a middle one and a high one. The high one is what the last
    layer reads, whose weights the drafter begins with.
    """
    return tuple(sorted({min(2, count), max(1, count // 2), max(1, count - 1)}))


@torch.no_grad()
def new_feature_network(config: EagleConfig, target: FrozenTarget, seed: int) -> EagleHead:
    """Return a network to be trained.

    Its layer begins as the target's last one. It reads the highest hidden state as it is, but for
    its size: that is normed, and what the layer adds is made smaller in proportion. The other
    hidden states and the token's embedding begin with small random weights.
    """
    network = EagleHead(config, target.embedding)
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        if weight.dim() == 2:
            weight.normal_(0, 0.02, generator=generator)
    fusion = network.get_parameter("fc.weight")
    fusion[:, -config.target_size :] += torch.eye(config.hidden_size, config.target_size)
    high = config.layers[-1]
    copy_layer(network, 0, target, len(target.stack.layers) - 1, 1 / target.size_of_hidden(high))
    last_norm = target_norm(target)
    if last_norm is not None:
        network.get_parameter("norm.weight").copy_(last_norm)
    return network
