"""The loss that trains a drafter: how far it is from the target's distributions.

The loss is DSpark's (2607.05147), but for the confidence, which is a block drafter's (`block.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

# Rows whose logits are computed at once: on a CPU as many as its caches hold, on another device so
# many that launches take little of the time.
CPU_ROWS, DEVICE_ROWS = 128, 4096
GAMMA = 4.0  # a position's weight is e^(-position / GAMMA), from 0
# The weights of the cross-entropy with the target's distribution and of the distance to it. The
# first falls from 1 in the first `ENTROPY_SHARE` of the run: far from the target's distribution,
# the distance has next to no gradient.
ENTROPY_WEIGHT, DISTANCE_WEIGHT, ENTROPY_SHARE = 0.1, 0.9, 0.3


def position_weights(position: torch.Tensor) -> torch.Tensor:
    """Return the weights of rows at these positions behind their anchors, `[m]`; their sum is 1."""
    weight = (-position.float() / GAMMA).exp()
    return weight / weight.sum()


def entropy_weight(done: float) -> float:
    """Return the weight of the cross-entropy if `done` (0 to 1) of the run is over."""
    return max(ENTROPY_WEIGHT, 1 - (1 - ENTROPY_WEIGHT) * done / ENTROPY_SHARE)


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


class SlicedLoss(torch.autograd.Function):
    """Of m positions: the weighted sum of their losses, a scalar, and their distances, `[m]`.

    q is the softmax of `x @ [head, bias].T + shift` over s tokens, p that of
    `target @ target_head.T + shift`. A position's loss is the cross-entropy -sum p log q by
    `entropy_weight`, and the distance sum |q - p| by `DISTANCE_WEIGHT`. Gradients of `x`
    `[m, d + r]` and `bias` `[s, r]` are computed with the values, some rows at a time, so that no
    tensor of `[m, s]` exists: most of the time of a training on a CPU would go into reading and
    writing it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor,
        target: torch.Tensor,
        head: torch.Tensor,
        target_head: torch.Tensor,
        shift: torch.Tensor,
        weight: torch.Tensor,
        entropy_weight: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        d = head.shape[1]
        outputs = torch.cat([head, bias.to(head.dtype)], -1)
        x_grad = torch.empty_like(x)
        bias_grad = torch.zeros_like(bias)
        total = x.new_zeros(())
        distances = list[torch.Tensor]()
        for rows in row_slices(x):
            x_rows = x[rows].to(head.dtype)
            row_weight = weight[rows][:, None]
            p = torch.softmax((target[rows] @ target_head.T).float().add_(shift), -1)
            log_q = torch.log_softmax((x_rows @ outputs.T).float().add_(shift), -1)
            entropy = -(p * log_q).sum(-1, keepdim=True)
            q = log_q.exp_()
            difference = q - p
            distance = difference.abs().sum(-1, keepdim=True)
            row_losses = entropy_weight * entropy + DISTANCE_WEIGHT * distance
            total += (row_weight * row_losses).sum()
            # of the logits: q - p for the entropy, q (sign - mean of sign) for the distance
            logits_grad = difference * entropy_weight
            sign = difference.sign_()
            mean = (sign * q).sum(-1, keepdim=True)
            logits_grad += q.mul_(sign.sub_(mean)).mul_(DISTANCE_WEIGHT)
            logits_grad = logits_grad.mul_(row_weight).to(head.dtype)
            x_grad[rows] = (logits_grad @ outputs).to(x.dtype)
            bias_grad += (logits_grad.T @ x_rows[:, d:]).to(bias.dtype)
            distances.append(distance[:, 0])
        ctx.save_for_backward(x_grad, bias_grad)
        return total, torch.cat(distances)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_grad, bias_grad = ctx.saved_tensors
        return grads[0] * x_grad, grads[0] * bias_grad, *[None] * 6


def distribution_loss(
    x: torch.Tensor,
    token_bias: torch.Tensor,
    target_hidden: torch.Tensor,
    position: torch.Tensor,
    head: torch.Tensor,
    shift: torch.Tensor,
    done: float,
    target_head: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of m rows, a scalar, and the distances sum |p - q| of each, `[m]`.

    A row's loss is the cross-entropy (nats) of the target's distribution p and the drafter's q, and
    their distance. The loss is the mean by `position_weights`. The arguments are those of
    `SlicedLoss`; `done`: how much of the run is over, 0 to 1. `target_head`: None where the drafter
    has the target's head.
    """
    loss: torch.Tensor
    loss, distance = SlicedLoss.apply(
        x.float(),
        token_bias,
        target_hidden.to(head.dtype),
        head,
        head if target_head is None else target_head,
        shift,
        position_weights(position),
        entropy_weight(done),
    )  # type: ignore[no-untyped-call]
    return loss, distance


def fast_bfloat16(device: torch.device) -> bool:
    """Return whether PyTorch has fast products in bfloat16 on `device`."""
    return device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast(device: torch.device) -> torch.autocast:
    """Return a context in which products are computed in bfloat16 if that is fast on the device.

    Parameters and sums stay float32.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_bfloat16(device))
