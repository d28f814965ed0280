"""The loss that trains a block drafter: how far it is from the target's distributions.

The loss is DSpark's (2607.05147). One pass a batch runs the blocks of many anchors at once: a
block's rows see the context strictly before its anchor, and one another. The token before each
position is that of the text ("teacher forcing").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.models.torch.pages import to_device
from quickbeam.train.shards import Shards, collate
from quickbeam.train.target import FrozenTarget, TrainingBatch, autocast

CHECK_SPACING = 16  # tokens of held-out text an anchor
# Rows whose logits are computed at once: on a CPU as many as its caches hold, on another device so
# many that launches take little of the time.
CPU_ROWS, DEVICE_ROWS = 128, 4096
GAMMA = 4.0  # a position's weight is e^(-position / GAMMA), from 0
# The weights of the cross-entropy with the target's distribution and of the distance to it. The
# first falls from 1 in the first `ENTROPY_SHARE` of the run: far from the target's distribution,
# the distance has next to no gradient.
ENTROPY_WEIGHT, DISTANCE_WEIGHT, ENTROPY_SHARE = 0.1, 0.9, 0.3


class Blocks(NamedTuple):
    """The blocks of a batch of b conversations, `a` of each, on the CPU.

    `anchors`: `[b, a]` int64, positions. `mask`: `[b, a, k]` bool, the block positions that are
    trained on: those whose token is in the text, and where only answers count, in an answer.
    """

    anchors: torch.Tensor
    mask: torch.Tensor

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return on the device the anchors, and the indices of what is set in `mask`, `[3, m]`.

        The indices are found here because a device would make the host wait for them.
        """
        return to_device(self.anchors, device), to_device(self.mask.nonzero().T, device)


def sample_blocks(
    batch: TrainingBatch, size: int, spacing: int, answers_only: bool, generator: torch.Generator
) -> Blocks:
    """Return random blocks, one for every `spacing` tokens of the longest conversation.

    An anchor has a token before it, and the token after it is trained on. `answers_only`: whether
    only tokens of answers are trained on. The batch is on the CPU.
    """
    length = batch.tokens.shape[1]
    count = max(1, min(length - 2, -(-length // spacing)))
    wanted = torch.arange(length + size) < batch.lengths[:, None]
    if answers_only:
        wanted &= F.pad(batch.answer, (0, size))
    possible = wanted[:, 2:length]  # the anchor before such a token is 1 to length - 2
    rank = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1)
    rank, anchors = rank.topk(count, 1)
    anchors = anchors + 1
    following = anchors[..., None] + torch.arange(1, size + 1)
    following_wanted = wanted[:, None].expand(-1, count, -1).gather(2, following)
    return Blocks(anchors, following_wanted & (rank >= 0)[..., None])


def visible_context(anchors: torch.Tensor, n: int) -> torch.Tensor:
    """Return which of `n` tokens a block sees, `[b, a, n]`: those before its anchor."""
    return torch.arange(n, device=anchors.device) < anchors[..., None]


class BlockAttention:
    """The attention of the blocks at `anchors` `[b, a]`, which `BlockNetwork` calls in each layer.

    `fused`: `[b, n, d]`, the vectors of the context.

    Blocks of a conversation share the keys of its context. So scores with the context are one
    product for all blocks, and scores within the blocks another.
    """

    def __init__(self, network: BlockNetwork, fused: torch.Tensor, anchors: torch.Tensor) -> None:
        config = network.config
        self._network = network
        self._fused = fused
        self._anchors = anchors
        self._group = config.heads // config.kv_heads  # query heads of a key head
        self._positions = torch.arange(fused.shape[1], device=fused.device)
        self._offsets = torch.arange(config.block_size, device=fused.device)
        self._hidden_context = ~visible_context(anchors, fused.shape[1])

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
        positions = self._positions.repeat(b)
        context = self._network.key_value(layer, self._fused.flatten(0, 1), positions)
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
        return out.permute(0, 2, 3, 1, 4, 5).reshape(len(query), -1)

    def _hidden(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the rows of a layer don't see of the context and of their own block.

        Both are bool and fit the scores: `[b, 1, a, 1 or k * group, n]` and `[k * group, k]`.
        """
        window, causal = self._network.config.attention(layer)
        distance = self._offsets[:, None] - self._offsets
        hidden_block = (distance < 0) & causal
        hidden_context = self._hidden_context[:, None, :, None]
        if window is not None:
            hidden_block = hidden_block | (distance >= window)
            row_positions = self._anchors[..., None] + self._offsets
            too_far = row_positions[..., None] - self._positions >= window  # [b, a, k, n]
            hidden_context = hidden_context | too_far.repeat_interleave(self._group, 2)[:, None]
        return hidden_context, hidden_block.repeat_interleave(self._group, 0)


class BlockOutputs(NamedTuple):
    """The m block positions that are trained on, after a pass of the drafter.

    `hidden`: `[m, d]`, the drafter's outputs. `target_hidden`: `[m, d]`, the target's last hidden
    states. `previous`: `[m]`, the tokens before the positions. `position`: `[m]`, from 0.
    """

    hidden: torch.Tensor
    target_hidden: torch.Tensor
    previous: torch.Tensor
    position: torch.Tensor


class LossVocabulary:
    """Samples the tokens that a step's loss is taken over: about `size` of them.

    Half are the most frequent by `counts` `[vocab]`, then come those of the batch, and random
    others. The softmax over a whole vocabulary costs more than the network. Each random token
    stands for its share of the tokens that are neither frequent nor in the batch. The logarithm of
    how many it stands for is added to its logit, so the sum over the sample estimates the sum over
    the vocabulary.
    """

    def __init__(self, counts: torch.Tensor, size: int) -> None:
        self._vocab = len(counts)
        self._size = min(size, self._vocab)
        self._frequent = counts.argsort(descending=True, stable=True)[: self._size // 2]

    def sample(
        self, tokens: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids `[s]` in rising order, and what to add to their logits `[s]`.

        `tokens`: those of the batch, on the CPU.
        """
        if self._size == self._vocab:
            return torch.arange(self._vocab), torch.zeros(self._vocab)
        selected = torch.zeros(self._vocab, dtype=torch.bool)
        selected[self._frequent] = True
        selected[tokens.flatten()] = True
        others = (~selected).nonzero()[:, 0]
        count = min(len(others), max(self._size - int(selected.sum()), self._size // 8))
        drawn = others[torch.randperm(len(others), generator=generator)[:count]]
        shift = torch.zeros(self._vocab)
        shift[drawn] = math.log(len(others) / max(count, 1))
        selected[drawn] = True
        sample = selected.nonzero()[:, 0]
        return sample, shift[sample]


def row_slices(rows: torch.Tensor) -> list[slice]:
    """Divide rows into those whose logits are computed at once."""
    size = CPU_ROWS if rows.device.type == "cpu" else DEVICE_ROWS
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]


class SlicedBlockLoss(torch.autograd.Function):
    """Of m positions: the weighted sum of their losses, a scalar, and their distances, `[m]`.

    q is the softmax of `x @ [head, bias].T + shift` over s tokens, p that of `target @ head.T +
    shift`. A position's loss is the cross-entropy -sum p log q and the distance sum |q - p|, each
    by its weight in `mixture`. Gradients of `x` `[m, d + r]` and `bias` `[s, r]` are computed with
    the values, some rows at a time, so that no tensor of `[m, s]` exists: most of the time of a
    training on a CPU would go into reading and writing it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor,
        target: torch.Tensor,
        head: torch.Tensor,
        shift: torch.Tensor,
        weight: torch.Tensor,
        mixture: tuple[float, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entropy_weight, distance_weight = mixture
        d = head.shape[1]
        outputs = torch.cat([head, bias.to(head.dtype)], -1)
        x_grad = torch.empty_like(x)
        bias_grad = torch.zeros_like(bias)
        total = x.new_zeros(())
        distances = list[torch.Tensor]()
        for rows in row_slices(x):
            x_rows = x[rows].to(head.dtype)
            row_weight = weight[rows][:, None]
            p = torch.softmax((target[rows] @ head.T).float().add_(shift), -1)
            log_q = torch.log_softmax((x_rows @ outputs.T).float().add_(shift), -1)
            entropy = -(p * log_q).sum(-1, keepdim=True)
            q = log_q.exp_()
            difference = q - p
            distance = difference.abs().sum(-1, keepdim=True)
            row_losses = entropy_weight * entropy + distance_weight * distance
            total += (row_weight * row_losses).sum()
            # of the logits: q - p for the entropy, q (sign - mean of sign) for the distance
            logits_grad = difference * entropy_weight
            sign = difference.sign_()
            mean = (sign * q).sum(-1, keepdim=True)
            logits_grad += q.mul_(sign.sub_(mean)).mul_(distance_weight)
            logits_grad = logits_grad.mul_(row_weight).to(head.dtype)
            x_grad[rows] = (logits_grad @ outputs).to(x.dtype)
            bias_grad += (logits_grad.T @ x_rows[:, d:]).to(bias.dtype)
            distances.append(distance[:, 0])
        ctx.save_for_backward(x_grad, bias_grad)
        return total, torch.cat(distances)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_grad, bias_grad = ctx.saved_tensors
        return grads[0] * x_grad, grads[0] * bias_grad, *[None] * 5


def draft(
    network: BlockNetwork, batch: TrainingBatch, anchors: torch.Tensor, indices: torch.Tensor
) -> BlockOutputs:
    """Run blocks, and return the positions that are trained on.

    `anchors` and `indices` are those of `Blocks.inputs`.
    """
    context_size = len(network.config.taps) * network.config.target_size
    fused = network.fuse(batch.hidden[..., :context_size].float())
    conversations = torch.arange(len(anchors), device=anchors.device)[:, None]
    tokens = batch.tokens[conversations, anchors]
    attention = BlockAttention(network, fused, anchors)
    rows = network(tokens.flatten(), anchors.flatten(), attention)
    conversation, block, position = indices
    previous = anchors[conversation, block] + position
    return BlockOutputs(
        rows.unflatten(0, anchors.shape)[conversation, block, position],
        batch.hidden[conversation, previous, context_size:],
        batch.tokens[conversation, previous],
        position,
    )


def logits(network: BlockNetwork, drafted: BlockOutputs, head: torch.Tensor) -> torch.Tensor:
    """Return the drafter's logits, `[m, vocab]`. `head`: the target's, `[vocab, d]`."""
    scores = F.linear(drafted.hidden.to(head.dtype), head).float()
    bias = network.bias(drafted.previous)
    return scores if bias is None else scores + bias.float()


def block_loss(
    network: BlockNetwork,
    drafted: BlockOutputs,
    head: torch.Tensor,
    tokens: torch.Tensor,
    shift: torch.Tensor,
    done: float = 1.0,
) -> torch.Tensor:
    """Return the loss, a scalar: the mean over positions, by weights e^(-k / GAMMA).

    A position's loss is the cross-entropy (nats) of the target's distribution p and the drafter's
    q, the distance sum |p - q|, and the binary cross-entropy of the confidence with
    1 - sum |p - q| / 2, which is how often a drawn token is accepted. (DSpark takes the first with
    the text's token, of which p is the mean.) `head`: the target's, `[vocab, d]`. `tokens` `[s]`:
    those that the loss is taken over, and `shift` `[s]` what is added to their logits. `done`: how
    much of the run is over, 0 to 1.
    """
    weight = (-drafted.position.float() / GAMMA).exp()
    weight = weight / weight.sum()
    head = head[tokens]
    x = drafted.hidden.float()
    token_bias = head.new_zeros(len(tokens), 0)
    if network.config.markov_rank:
        previous_rows = network.markov_head["markov_w1"](drafted.previous)
        x = torch.cat([x, previous_rows.float()], -1)
        token_bias = network.markov_head["markov_w2"].get_parameter("weight")[tokens]
    entropy_weight = max(ENTROPY_WEIGHT, 1 - (1 - ENTROPY_WEIGHT) * done / ENTROPY_SHARE)
    loss: torch.Tensor
    loss, distance = SlicedBlockLoss.apply(
        x,
        token_bias,
        drafted.target_hidden.to(head.dtype),
        head,
        shift,
        weight,
        (entropy_weight, DISTANCE_WEIGHT),
    )  # type: ignore[no-untyped-call]
    confidence = network.confidence(drafted.hidden, drafted.previous)
    if confidence is not None:
        accepted = (1 - distance / 2).clamp(0, 1)
        confidence_loss = F.binary_cross_entropy_with_logits(
            confidence.float(), accepted, reduction="none"
        )
        loss = loss + (weight * confidence_loss).sum()
    return loss


@torch.no_grad()
def new_network(config: BlockConfig, target: FrozenTarget, seed: int) -> BlockNetwork:
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
    last_hidden = network.fc.weight[:, -config.target_size :]
    last_hidden.add_(torch.eye(config.hidden_size, config.target_size))
    for layer, source in zip(network.layers, target.layers[-config.depth :], strict=False):
        source_weights = dict(source.named_parameters())
        for name, weight in layer.named_parameters():
            if name in source_weights and source_weights[name].shape == weight.shape:
                weight.copy_(source_weights[name])
    for name in ("v_proj", "o_proj"):
        weight = network.layers[0].get_parameter(f"self_attn.{name}.weight")
        weight.copy_(torch.eye(*weight.shape))
    if target.norm is not None:
        network.norm.get_parameter("weight").copy_(target.norm)
    if config.markov_rank:
        previous_rows = network.markov_head["markov_w1"].get_parameter("weight")
        previous_rows.normal_(0, 1, generator=generator)
        network.markov_head["markov_w2"].get_parameter("weight").zero_()
    if config.confidence:
        for weight in network.confidence_head.parameters():
            weight.zero_()
    return network


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
    network: BlockNetwork, target: FrozenTarget, shards: Shards, indices: Sequence[int]
) -> HeldOutMetrics:
    """Measure a drafter on the conversations at `indices`, which it was not trained on."""
    size = network.config.block_size
    generator = torch.Generator().manual_seed(0)
    # by position: the sums of agreement and of overlap, and how many were measured
    sums = torch.zeros(2, size)
    measured = torch.zeros(size)
    # the accepted tokens of complete blocks, and how many blocks that were
    accepted = torch.zeros(2)
    complete_blocks = torch.zeros(())
    for index in indices:
        batch = collate([shards[index]])
        blocks = sample_blocks(batch, size, CHECK_SPACING, True, generator)
        rates = _acceptance_rates(network, target, target.read(batch), blocks)
        sums += rates.sum((1, 2))
        measured += blocks.mask.sum((0, 1))
        complete = blocks.mask.all(-1)  # the end of an answer would make the others look shorter
        accepted += rates.cumprod(-1).sum(-1)[:, complete].sum(1)
        complete_blocks += complete.sum()
    agreement, overlap = (sums / measured.clamp(min=1)).tolist()
    mat, mat_drawn = (1 + accepted / complete_blocks.clamp(min=1)).tolist()
    return HeldOutMetrics(agreement, overlap, mat, mat_drawn)


def _acceptance_rates(
    network: BlockNetwork, target: FrozenTarget, batch: TrainingBatch, blocks: Blocks
) -> torch.Tensor:
    """Return whether the likeliest tokens agree, and sum min(p, q): `[2, b, a, k]` on the CPU.

    Both are zero at positions that `blocks.mask` leaves out.
    """
    rates = torch.zeros(2, *blocks.mask.shape)
    parts = list[torch.Tensor]()
    with autocast(target.device):
        drafted = draft(network, batch, *blocks.inputs(target.device))
        for rows in row_slices(drafted.hidden):
            part = BlockOutputs(*(column[rows] for column in drafted))
            target_logits = F.linear(part.target_hidden.to(target.head.dtype), target.head)
            p = target_logits.float().softmax(-1)
            q = logits(network, part, target.head).softmax(-1)
            agree = (p.argmax(-1) == q.argmax(-1)).float()
            overlap = torch.minimum(p, q).sum(-1)
            parts.append(torch.stack([agree, overlap]).cpu())
    if parts:
        rates[:, blocks.mask] = torch.cat(parts, 1)
    return rates
