"""Training of a block drafter (DSpark, 2607.05147).

One pass a batch runs the blocks of many anchors at once: a block's rows see the context strictly
before its anchor, and one another. The token before each position is that of the text ("teacher
forcing").
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.loss import distribution_loss, position_weights
from quickbeam.drafters.network import LayerInputs
from quickbeam.models.torch.network import LayerStack
from quickbeam.train.base import Anchors, DraftedRows, DrafterTraining, sample_anchors
from quickbeam.train.start import copy_layer, target_norm
from quickbeam.train.target import FrozenTarget, TrainingBatch


def visible_context(anchors: torch.Tensor, n: int) -> torch.Tensor:
    """Return which of `n` tokens a block sees, `[b, a, n]`: those before its anchor."""
    return torch.arange(n, device=anchors.device) < anchors[..., None]


class BlockAttention:
    """The attention of the blocks at `anchors` `[b, a]`, which is called in each layer.

    `layers`: of the network. `fused`: `[b, n, d]`, the vectors of the context.

    Blocks of a conversation share the keys of its context. So scores with the context are one
    product for all blocks, and scores within the blocks another.
    """

    def __init__(
        self,
        config: BlockConfig,
        layers: LayerStack,
        fused: torch.Tensor,
        anchors: torch.Tensor,
    ) -> None:
        self._config = config
        self._blocks: Any = layers.blocks
        self._fused = fused
        self._anchors = anchors
        self._group = config.heads // config.kv_heads  # query heads of a key head
        self._positions = torch.arange(fused.shape[1], device=fused.device)
        self._offsets = torch.arange(config.block_size, device=fused.device)
        self._hidden_context = ~visible_context(anchors, fused.shape[1])
        self._angles = layers.angles_at(self._positions.repeat(len(fused)))

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention's outputs `[b * a * k, query heads * size]`.

        `query`: `[b * a * k, query heads, size]`. `key`, `value`: `[b * a * k, key heads, size]`.
        """
        b, a = self._anchors.shape
        n = len(self._positions)
        k = len(self._offsets)
        heads, size = key.shape[1:]
        attention = self._blocks[layer].attention
        context = attention.key_value(self._fused.flatten(0, 1), self._angles)
        context_key, context_value = (x.view(b, n, heads, size).transpose(1, 2) for x in context)
        block_key = key.view(b, a, k, heads, size).permute(0, 3, 1, 2, 4)
        block_value = value.view(b, a, k, heads, size).permute(0, 3, 1, 2, 4)
        grouped = query.view(b, a, k, heads, self._group, size).permute(0, 3, 1, 2, 4, 5)
        rows = grouped.flatten(3, 4) * size**-0.5  # [b, heads, a, k * group, size]

        context_scores = rows.flatten(2, 3) @ context_key.transpose(2, 3)
        context_scores = context_scores.unflatten(2, (a, -1))
        block_scores = rows @ block_key.transpose(3, 4)
        hidden_context, hidden_block = self._hidden(layer)
        scores = [
            context_scores.masked_fill(hidden_context, -math.inf),
            block_scores.masked_fill(hidden_block, -math.inf),
        ]
        weights = torch.cat(scores, -1).softmax(-1).to(block_value.dtype)

        out = weights[..., :n].flatten(2, 3) @ context_value.to(block_value.dtype)
        out = out.view_as(rows) + weights[..., n:] @ block_value
        out = out.view(b, heads, a, k, self._group, size)
        attended: torch.Tensor = out.permute(0, 2, 3, 1, 4, 5).reshape(len(query), -1)
        return attended

    def _hidden(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the rows of a layer don't see of the context and of their own block.

        Both are bool and fit the scores: `[b, 1, a, 1 or k * group, n]` and `[k * group, k]`.
        """
        window, causal = self._config.attention(layer)
        distance = self._offsets[:, None] - self._offsets
        hidden_block = (distance < 0) & causal
        hidden_context = self._hidden_context[:, None, :, None]
        if window is not None:
            hidden_block = hidden_block | (distance >= window)
            row_positions = self._anchors[..., None] + self._offsets
            too_far = row_positions[..., None] - self._positions >= window  # [b, a, k, n]
            hidden_context = hidden_context | too_far.repeat_interleave(self._group, 2)[:, None]
        return hidden_context, hidden_block.repeat_interleave(self._group, 0)


class BlockTraining(DrafterTraining):
    """A block drafter that is trained on a block for every `spacing` tokens of the text."""

    def __init__(self, network: BlockNetwork, spacing: int) -> None:
        self.network: BlockNetwork = network
        self.depth = network.config.block_size
        self._spacing = spacing

    def sample(
        self, batch: TrainingBatch, answers_only: bool, generator: torch.Generator
    ) -> Anchors:
        return sample_anchors(batch, self.depth, self._spacing, answers_only, generator)

    def draft(self, batch: TrainingBatch, anchors: Anchors) -> DraftedRows:
        """Run the blocks of all anchors in one pass."""
        config, layers = self.network.config, self.network.layers_in_torch()
        on_device, indices = anchors.inputs(batch.hidden.device)
        context_size = len(config.aux_layers) * config.target_size
        fused = layers.fuse(batch.hidden[..., :context_size].float())
        offsets = torch.arange(config.block_size, device=on_device.device)
        positions = on_device.flatten()[:, None] + offsets
        attention = BlockAttention(config, layers, fused, on_device)
        inputs = LayerInputs(layers.angles_at(positions.flatten()), attention)
        tokens = batch.tokens.gather(1, on_device)
        stream = layers.drafter_stream(None, self.network.inputs(tokens.flatten()), inputs)
        rows = layers.norm(stream).unflatten(0, (*on_device.shape, config.block_size))
        conversation, block, position = indices
        return DraftedRows.of(batch, rows[conversation, block, position], on_device, indices)

    def logits(self, drafted: DraftedRows, head: torch.Tensor) -> torch.Tensor:
        scores = F.linear(drafted.hidden.to(head.dtype), head).float()
        bias = self.network.bias(drafted.previous)
        return scores if bias is None else scores + bias.float()

    def loss(
        self,
        drafted: DraftedRows,
        head: torch.Tensor,
        tokens: torch.Tensor,
        shift: torch.Tensor,
        done: float = 1.0,
    ) -> torch.Tensor:
        """Return the loss, a scalar: that of the distributions and that of the confidence.

        The latter is the binary cross-entropy of the confidence with 1 - sum |p - q| / 2, which is
        how often a drawn token is accepted. (DSpark takes the cross-entropy with the text's token,
        of which p is the mean.)
        """
        network = self.network
        hidden, target_hidden, previous, position = drafted
        x, token_bias = hidden.float(), head.new_zeros(len(tokens), 0)
        if network.config.markov_rank:
            first, second = network.markov()
            x = torch.cat([x, F.embedding(previous, first).float()], -1)
            token_bias = second[tokens]
        loss, distance = distribution_loss(
            x, token_bias, target_hidden, position, head[tokens], shift, done
        )
        confidence = network.confidence(hidden, previous)
        if confidence is not None:
            accepted = (1 - distance / 2).clamp(0, 1)
            confidence_loss = F.binary_cross_entropy_with_logits(
                confidence.float(), accepted, reduction="none"
            )
            loss = loss + (position_weights(position) * confidence_loss).sum()
        return loss

    def save(self, folder: Path) -> None:
        self.network.save(folder)


@torch.no_grad()
def new_block_network(config: BlockConfig, target: FrozenTarget, seed: int) -> BlockNetwork:
    """Return a network to be trained.

    Its layers begin as the target's last ones where names and shapes agree, its last norm as the
    target's, and its context as the last of the target's hidden states that it reads. The first
    layer's attention hands that on as it is. All else begins with small random weights, and the
    Markov head as a bias of zero.
    """
    network = BlockNetwork(config, target.embedding)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if weight.dim() == 2:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(0, 0.01 if small else 0.02, generator=generator)
    last_hidden = network["fc"].weight[:, -config.target_size :]
    last_hidden.add_(torch.eye(config.hidden_size, config.target_size))
    skipped = len(target.stack.layers) - config.depth
    for index in range(max(0, -skipped), config.depth):
        copy_layer(network, index, target, skipped + index)
    for name in ("v_proj", "o_proj"):
        weight = network["layers"][0].get_parameter(f"self_attn.{name}.weight")
        weight.copy_(torch.eye(*weight.shape))
    last_norm = target_norm(target)
    if last_norm is not None:
        network["norm"].get_parameter("weight").copy_(last_norm)
    if config.markov_rank:
        first, second = network.markov()
        first.normal_(0, 1, generator=generator)
        second.zero_()
    if config.confidence:
        for parameter in network.confidence_weights():
            parameter.zero_()
    return network
