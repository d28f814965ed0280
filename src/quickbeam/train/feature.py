"""Training of a feature drafter by training-time test (EAGLE-3, 2503.01840, §3.2).

The drafter runs several passes over a text, each over its own outputs of the pass before, as in
drafting.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_files import save_eagle
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.train.base import Anchors, DraftedRows, DrafterTraining, sample_anchors
from quickbeam.train.loss import distribution_loss
from quickbeam.train.start import copy_layer, target_norm
from quickbeam.train.target import FrozenTarget, TrainingBatch

DEEP_SHARE = 0.25  # of the steps that have all passes, whatever is over of the run


class UnrolledAttention:
    """The attention of training-time test.

    A row sees the keys of the first pass for all rows up to it. Of each later pass it sees only its
    own key. `window`: how many of the last positions it sees, None for all.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `[b, n, query heads * size]` of `[b, n, heads, size]`, and keep key and value."""
        dtype = value.dtype
        self._keys.append(key.to(dtype).transpose(1, 2))
        self._values.append(value.transpose(1, 2))
        out = F.scaled_dot_product_attention(
            query.to(dtype).transpose(1, 2),
            torch.cat(self._keys, 2),
            torch.cat(self._values, 2),
            self._visible(query.shape[1], query.device),
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(2)

    def _visible(self, n: int, device: torch.device) -> torch.Tensor:
        """Return which keys of all passes each row sees, `[n, passes * n]` bool."""
        passes = len(self._keys)
        window = self._window or n + passes
        itself = torch.eye(n, dtype=torch.bool, device=device)
        up_to_itself = torch.ones_like(itself).tril()
        visible = list[torch.Tensor]()
        for number in range(passes):
            mask = itself if number else up_to_itself
            # in the pass before the last, keys stand one position further back, and so on
            visible.append(mask.triu(passes - number - window))
        return torch.cat(visible, 1)


def moved_forward(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return `[b, n, …]` whose row i is row i + count of `x`. The last `count` rows are zero."""
    if not count:
        return x
    return torch.cat([x[:, count:], x.new_zeros(x.shape[0], count, *x.shape[2:])], 1)


def unroll(
    network: EagleHead, batch: TrainingBatch, depths: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Run `depths` passes, and yield the hidden states that each reads, and its outputs.

    In pass k, row i drafts the token at i + k + 2. It reads its hidden state and the embedding of
    the token at i + k + 1. Hidden states of the first pass are the target's up to i, those of
    another are the outputs of the pass before. Both tensors are `[b, n, d]`.
    """
    config = network.config
    attention = UnrolledAttention(config.window)
    embedded = network.embedding(batch.tokens).float()
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    hidden = network.fuse(batch.hidden[..., : len(config.layers) * config.target_size].float())
    for depth in range(depths):
        following = moved_forward(embedded, depth + 1)
        drafted_positions = (positions + depth).expand(len(batch.tokens), -1)
        out = network(hidden, following, drafted_positions, attention)
        yield hidden, out
        hidden = out


class FeatureTraining(DrafterTraining):
    """A feature drafter that is trained for `depth` positions ahead of the text."""

    def __init__(self, network: EagleHead, depth: int) -> None:
        self.network = network
        self.depth = depth

    def sample(
        self, batch: TrainingBatch, answers_only: bool, done: float, generator: torch.Generator
    ) -> Anchors:
        """Return every token as an anchor.

        A step of k passes takes k times as long, and what it learns first is the first pass. So
        there is one pass at first, and another one after every further part of the run. Some steps
        have all of them from the beginning, so that an early drafter can draft several tokens.
        """
        passes = 1 + int(min(done, 0.999) * self.depth)
        if float(torch.rand((), generator=generator)) < DEEP_SHARE:
            passes = self.depth
        return sample_anchors(batch, passes, 1, answers_only, generator)

    def draft(self, batch: TrainingBatch, anchors: Anchors) -> DraftedRows:
        """Run a pass for each position: the row before an anchor drafts what follows the anchor."""
        on_device, indices = anchors.inputs(batch.hidden.device)
        outputs = torch.stack([out for _, out in unroll(self.network, batch, anchors.depth)])
        conversation, anchor, position = indices
        rows = on_device[conversation, anchor] - 1
        hidden = self.network.feature(outputs[position, conversation, rows])
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
