"""What a block drafter is trained for: the target's distributions over a block's tokens.

This is DSpark's way (2607.05147). One pass a batch runs the blocks of many anchors at once: a
block's rows see the context strictly before its anchor, and one another. The token before each
position is the text's own ("teacher forcing").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import Attend, BlockNetwork
from quickbeam.drafters.network import LayerInputs
from quickbeam.models.torch.network import LayerStack
from quickbeam.models.torch.pages import to_device
from quickbeam.train.shards import Shards, collate
from quickbeam.train.target import FrozenTarget, TrainingBatch, autocast

CHECK_SPACING = 16  # tokens of held-out text an anchor
# Rows whose logits are computed at once: on a CPU as many as caches hold, elsewhere so many that
# launches don't count.
ROWS, MANY_ROWS = 128, 4096
GAMMA = 4.0  # a position's weight is e^(-position / GAMMA), from 0
# The weights of the cross-entropy with the target's distribution and of the distance to it. The
# first falls from 1 in the `LEAD`, the first share of the run: far from the target's distribution,
# the distance has next to no gradient.
ENTROPY, DISTANCE, LEAD = 0.1, 0.9, 0.3


class Blocks(NamedTuple):
    """The blocks of a batch of b conversations, `a` of each, on the CPU.

    `anchors`: `[b, a]` int64, positions. `counts`: `[b, a, k]` bool, which positions are trained
    on: those whose token is in the text, and where only answers count, in an answer.
    """

    anchors: torch.Tensor
    counts: torch.Tensor

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return on the device the anchors, and the indices of what counts in `counts`, `[3, m]`.

        A device would make the host wait for the indices.
        """
        return to_device(self.anchors, device), to_device(self.counts.nonzero().T, device)


def place_blocks(
    batch: TrainingBatch, size: int, spacing: int, answers: bool, generator: torch.Generator
) -> Blocks:
    """Return blocks at random places, one for every `spacing` tokens of the longest conversation.

    An anchor has a token before it, and the token after it counts. `answers`: whether only tokens
    of answers count. The batch is on the CPU.
    """
    n = batch.tokens.shape[1]
    count = max(1, min(n - 2, -(-n // spacing)))
    wanted = torch.arange(n + size) < batch.lengths[:, None]
    if answers:
        wanted &= F.pad(batch.answer, (0, size))
    fit = wanted[:, 2:n]  # the anchor before it is 1 to n - 2
    rank = torch.rand(fit.shape, generator=generator).masked_fill(~fit, -1)
    rank, anchors = rank.topk(count, 1)
    anchors = anchors + 1
    ahead = anchors[..., None] + torch.arange(1, size + 1)
    counts = wanted[:, None].expand(-1, count, -1).gather(2, ahead) & (rank >= 0)[..., None]
    return Blocks(anchors, counts)


def sees(anchors: torch.Tensor, n: int) -> torch.Tensor:
    """Return which of `n` tokens a block sees, `[b, a, n]`: those before its anchor."""
    return torch.arange(n, device=anchors.device) < anchors[..., None]


def attention(
    network: BlockNetwork, layers: LayerStack, fused: torch.Tensor, anchors: torch.Tensor
) -> Attend:
    """Return the attention of the blocks at `anchors` `[b, a]`.

    `layers`: of the network. `fused`: `[b, n, d]`, the vectors of the context.

    Blocks of a conversation share its keys, so scores with the context are one product for all of
    them, and scores within the blocks another.
    """
    (b, n, _), a, config = fused.shape, anchors.shape[1], network.config
    text = torch.arange(n, device=fused.device)
    k = torch.arange(config.block_size, device=fused.device)
    angles = layers.angles_at(text.repeat(b))
    blocks: Any = layers.blocks
    after, group = ~sees(anchors, n), config.heads // config.kv_heads

    def hide(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rows of layer i don't see of the context and of their own block."""
        window, causal = config.attention(i)
        behind = k[:, None] - k
        own = (behind < 0) & causal
        past = after[:, None, :, None]
        if window is not None:
            own = own | (behind >= window)
            far = (anchors[..., None] + k)[..., None] - text >= window  # [b, a, k, n]
            past = past | far.repeat_interleave(group, 2)[:, None]
        return past, own.repeat_interleave(group, 0)

    def attend(i: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads, size = key.shape[1:]
        context = blocks[i].attention.key_value(fused.flatten(0, 1), angles)
        past_key, past_value = (x.view(b, n, heads, size).transpose(1, 2) for x in context)
        own_key, own_value = (
            x.view(b, a, -1, heads, size).permute(0, 3, 1, 2, 4) for x in (key, value)
        )
        grouped = query.view(b, a, -1, heads, query.shape[1] // heads, size)
        rows = grouped.permute(0, 3, 1, 2, 4, 5).flatten(3, 4) * size**-0.5
        past = (rows.flatten(2, 3) @ past_key.transpose(2, 3)).unflatten(2, (a, -1))
        hidden = hide(i)
        own = (rows @ own_key.transpose(3, 4)).masked_fill(hidden[1], -math.inf)
        scores = past.masked_fill(hidden[0], -math.inf), own
        weights = torch.cat(scores, -1).softmax(-1).to(own_value.dtype)
        out = (weights[..., :n].flatten(2, 3) @ past_value.to(own_value.dtype)).view_as(rows)
        out = (out + weights[..., n:] @ own_value).view(b, heads, a, -1, grouped.shape[4], size)
        rows_first: torch.Tensor = out.permute(0, 2, 3, 1, 4, 5).reshape(len(query), -1)
        return rows_first

    return attend


class Drafted(NamedTuple):
    """What a pass says of the m positions that count.

    `rows`: `[m, d]`, the drafter's. `target`: `[m, d]`, the target's last hidden states.
    `previous`: `[m]`, the tokens before the positions. `position`: `[m]`, from 0.
    """

    rows: torch.Tensor
    target: torch.Tensor
    previous: torch.Tensor
    position: torch.Tensor


class LossVocabulary:
    """Chooses the tokens that a step's loss is taken over: about `size` of them.

    Half are the most frequent by `counts` `[vocab]`, then come those of the batch, and random
    others. The softmax over a whole vocabulary costs more than the network. Each random token
    stands for its share of the tokens that are neither frequent nor in the batch. The logarithm of
    how many it stands for is added to its logit, so the sum over the sample estimates the sum over
    the vocabulary.
    """

    def __init__(self, counts: torch.Tensor, size: int) -> None:
        self._vocab, self._size = len(counts), min(size, len(counts))
        self._frequent = counts.argsort(descending=True, stable=True)[: self._size // 2]

    def choose(
        self, tokens: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids `[s]` in rising order, and what to add to their logits `[s]`.

        `tokens`: those of the batch, on the CPU.
        """
        if self._size == self._vocab:
            return torch.arange(self._vocab), torch.zeros(self._vocab)
        common = torch.zeros(self._vocab, dtype=torch.bool)
        common[self._frequent] = True
        common[tokens.flatten()] = True
        others = (~common).nonzero()[:, 0]
        count = min(len(others), max(self._size - int(common.sum()), self._size // 8))
        drawn = others[torch.randperm(len(others), generator=generator)[:count]]
        shift = torch.zeros(self._vocab)
        shift[drawn] = math.log(len(others) / max(count, 1))
        common[drawn] = True
        chosen = common.nonzero()[:, 0]
        return chosen, shift[chosen]


def pieces(rows: torch.Tensor) -> list[slice]:
    """Divide rows into those whose logits are computed at once."""
    size = ROWS if rows.device.type == "cpu" else MANY_ROWS
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]


class BlockLoss(torch.autograd.Function):
    """Of m positions: the weighted sum of their losses, a scalar, and their distances, `[m]`.

    q is the softmax of `x @ [head, second].T + shift` over s tokens, p that of `target @ head.T +
    shift`. A position's loss is the cross-entropy -sum p log q and the distance sum |q - p|, each
    by its weight in `mixture`. Gradients of `x` `[m, d + r]` and `second` `[s, r]` are computed
    with the values, some rows at a time, so that no tensor of `[m, s]` exists: most of the time of
    a training on a CPU would go into reading and writing it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        second: torch.Tensor,
        target: torch.Tensor,
        head: torch.Tensor,
        shift: torch.Tensor,
        weight: torch.Tensor,
        mixture: tuple[float, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        d, outputs = head.shape[1], torch.cat([head, second.to(head.dtype)], -1)
        to_x, to_second = torch.empty_like(x), torch.zeros_like(second)
        total, distances = x.new_zeros(()), list[torch.Tensor]()
        for rows in pieces(x):
            some, by = x[rows].to(head.dtype), weight[rows][:, None]
            p = torch.softmax((target[rows] @ head.T).float().add_(shift), -1)
            log = torch.log_softmax((some @ outputs.T).float().add_(shift), -1)
            entropy = -(p * log).sum(-1, keepdim=True)
            q = log.exp_()
            difference = q - p
            distance = difference.abs().sum(-1, keepdim=True)
            total += (by * (mixture[0] * entropy + mixture[1] * distance)).sum()
            # of the logits: q - p for the entropy, q (sign - mean of sign) for the distance
            slope = difference * mixture[0]
            sign = difference.sign_()
            mean = (sign * q).sum(-1, keepdim=True)
            slope += q.mul_(sign.sub_(mean)).mul_(mixture[1])
            slope = slope.mul_(by).to(head.dtype)
            to_x[rows] = (slope @ outputs).to(x.dtype)
            to_second += (slope.T @ some[:, d:]).to(second.dtype)
            distances.append(distance[:, 0])
        ctx.save_for_backward(to_x, to_second)
        return total, torch.cat(distances)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_x, to_second = ctx.saved_tensors
        return grads[0] * to_x, grads[0] * to_second, *[None] * 5


def draft(
    network: BlockNetwork, batch: TrainingBatch, anchors: torch.Tensor, counting: torch.Tensor
) -> Drafted:
    """Run blocks, and return the positions that count: those of `Blocks.inputs`."""
    config, layers = network.config, network.layers_in_torch()
    # the target's hidden states: those that are fused, and its last one
    fused_size = len(config.aux_layers) * config.target_size
    fused = layers.fuse(batch.hidden[..., :fused_size].float())
    last = batch.hidden[..., fused_size:]
    # the rows of the blocks
    rows_of_block = torch.arange(config.block_size, device=anchors.device)
    positions = anchors.flatten()[:, None] + rows_of_block
    angles = layers.angles_at(positions.flatten())
    inputs = LayerInputs(angles, attention(network, layers, fused, anchors))
    tokens = batch.tokens.gather(1, anchors)
    x = network.inputs(tokens.flatten())
    rows = layers.norm(layers.drafter_stream(None, x, inputs))
    rows = rows.unflatten(0, (*anchors.shape, config.block_size))
    # those that count
    conversation, block, offset = counting
    position = anchors[conversation, block] + offset
    return Drafted(
        rows[conversation, block, offset],
        last[conversation, position],
        batch.tokens[conversation, position],
        offset,
    )


def logits(network: BlockNetwork, drafted: Drafted, head: torch.Tensor) -> torch.Tensor:
    """Return the drafter's logits, `[m, vocab]`. `head`: the target's, `[vocab, d]`."""
    scores = F.linear(drafted.rows.to(head.dtype), head).float()
    bias = network.bias(drafted.previous)
    return scores if bias is None else scores + bias.float()


def loss_of(
    network: BlockNetwork,
    drafted: Drafted,
    head: torch.Tensor,
    chosen: torch.Tensor,
    shift: torch.Tensor,
    done: float = 1.0,
) -> torch.Tensor:
    """Return the loss, a scalar: the mean over positions, by weights e^(-k / GAMMA).

    A position's loss is the cross-entropy (nats) of the target's distribution p and the drafter's
    q, the distance sum |p - q|, and the binary cross-entropy of the confidence with
    1 - sum |p - q| / 2, which is how often a drawn token is accepted. (DSpark takes the first with
    the text's token, of which p is the mean.) `head`: the target's, `[vocab, d]`. `chosen` `[s]`:
    the tokens that it is taken over, and `shift` `[s]` what is added to their logits. `done`: how
    much of the run is over, 0 to 1.
    """
    weight = (-drafted.position.float() / GAMMA).exp()
    weight, head = weight / weight.sum(), head[chosen]
    x, second = drafted.rows.float(), head.new_zeros(len(chosen), 0)
    if network.config.markov_rank:
        first, second = network.markov()
        x = torch.cat([x, F.embedding(drafted.previous, first).float()], -1)
        second = second[chosen]
    loss: torch.Tensor
    loss, distance = BlockLoss.apply(
        x,
        second,
        drafted.target.to(head.dtype),
        head,
        shift,
        weight,
        (max(ENTROPY, 1 - (1 - ENTROPY) * done / LEAD), DISTANCE),
    )  # type: ignore[no-untyped-call]
    confidence = network.confidence(drafted.rows, drafted.previous)
    if confidence is not None:
        accepted = (1 - distance / 2).clamp(0, 1)
        doubt = F.binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
        loss = loss + (weight * doubt).sum()
    return loss


def new_network(config: BlockConfig, target: FrozenTarget, seed: int) -> BlockNetwork:
    """Return a network to be trained.

    Its layers begin as the target's last ones where names and shapes agree, its last norm as the
    target's, and its context as the last of the target's hidden states that it reads. The first
    layer's attention hands that on as it is. All else begins with small random weights, and the
    Markov head as a bias of zero.
    """
    network = BlockNetwork(config, target.embedding)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0, 0.01 if small else 0.02, generator=generator)
        network["fc"].weight[:, -config.target_size :].add_(
            torch.eye(config.hidden_size, config.target_size)
        )
        for layer, source in zip(network["layers"], target.layers[-config.depth :], strict=False):
            known = dict(source.named_parameters())
            for name, weight in layer.named_parameters():
                if name in known and known[name].shape == weight.shape:
                    weight.copy_(known[name])
        for name in ("v_proj", "o_proj"):
            weight = network["layers"][0].get_parameter(f"self_attn.{name}.weight")
            weight.copy_(torch.eye(*weight.shape))
        if target.norm is not None:
            network["norm"].get_parameter("weight").copy_(target.norm)
        if config.markov_rank:
            first, second = network.markov()
            first.normal_(0, 1, generator=generator)
            second.zero_()
        if config.confidence:
            for parameter in network.confidence_weights():
                parameter.zero_()
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
    network: BlockNetwork, target: FrozenTarget, shards: Shards, chosen: Sequence[int]
) -> HeldOutMetrics:
    """Measure a drafter on the `chosen` conversations, which it was not trained on."""
    size = network.config.block_size
    generator, sums, chains = torch.Generator().manual_seed(0), torch.zeros(3, size), torch.zeros(3)
    for i in chosen:
        batch = collate([shards[i]])
        blocks = place_blocks(batch, size, CHECK_SPACING, True, generator)
        counts, rates, parts = blocks.counts, torch.zeros(2, *blocks.counts.shape), []
        batch = target.read(batch)
        with autocast(target.device):
            drafted = draft(network, batch, *blocks.inputs(target.device))
            for piece in pieces(drafted.rows):
                part = Drafted(*(x[piece] for x in drafted))
                p = F.linear(part.target.to(target.head.dtype), target.head).float().softmax(-1)
                q = logits(network, part, target.head).softmax(-1)
                same = (p.argmax(-1) == q.argmax(-1)).float()
                parts.append(torch.stack([same, torch.minimum(p, q).sum(-1)]).cpu())
        if parts:
            rates[:, counts] = torch.cat(parts, 1)
        sums += torch.stack([*rates.sum((1, 2)), counts.sum((0, 1))])
        whole = counts.all(-1)  # blocks at the end of an answer would make it look shorter
        chains[:2] += rates.cumprod(-1).sum(-1)[:, whole].sum(1)
        chains[2] += whole.sum()
    agreement, overlap = (sums[:2] / sums[2].clamp(min=1)).tolist()
    mats = (1 + chains[:2] / chains[2].clamp(min=1)).tolist()
    return HeldOutMetrics(agreement, overlap, *mats)
