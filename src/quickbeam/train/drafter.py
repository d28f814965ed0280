"""What a feature drafter is trained for.

That is the target's own distribution over the next tokens, at several draft depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.errors import InvalidInput
from quickbeam.train.recipes import Recipe as Recipe
from quickbeam.train.shards import Shards
from quickbeam.train.unroll import Batch, collate, lasting, unroll

HELD_OUT = 50  # one conversation in this many is never trained on


def new_network(model: nn.Module, config: EagleConfig, seed: int) -> EagleHead:
    """Return a network to be trained, with small random weights and no head.

    Its last norm begins as the target's, if that is of the same kind and size.
    """
    network = EagleHead(config, model.get_input_embeddings())  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2:
                weight.normal_(
                    0, 0.01 if name.startswith(("out.", "down.")) else 0.02, generator=generator
                )
        last = getattr(model.base_model, "norm", None)
        kind = type(last).__name__  # Gemma's norms store their weight minus one
        if (
            last is not None
            and kind.endswith("RMSNorm")
            and "Gemma" not in kind
            and last.weight.shape == network.norm.weight.shape
        ):
            network.norm.weight.copy_(last.weight)
    return network


def begun(model: nn.Module, config: EagleConfig, folder: Path) -> EagleHead:
    """Return a network that was trained before, in float32, to be trained on.

    Raises `InvalidInput` if its shape is not that of `config`.
    """
    network = EagleHead.load(folder, model.get_input_embeddings())  # type: ignore[operator]
    own, expected = asdict(network.config), asdict(config)
    if others := [
        f"{name} {own[name]!r} instead of {expected[name]!r}"
        for name in expected
        if own[name] != expected[name]
    ]:
        raise InvalidInput(
            f"--start {folder}: of another shape than what is trained for this "
            f"model: {'; '.join(others)}"
        )
    return network.float()


def head_of(model: nn.Module) -> torch.Tensor:
    """Return the weights of a model's head, `[vocab, d]`."""
    return model.get_output_embeddings().weight.detach()  # type: ignore[operator, no-any-return]


def for_products(head: torch.Tensor) -> torch.Tensor:
    """Return `head` in the type that its device multiplies fast: as it is, or in float32.

    Without AVX-512 or its like, PyTorch multiplies matrices in bfloat16 by plain loops. Measured
    on AVX2, two cores: 1 GFLOP/s for `x @ head` and 19 for `x @ head.T`, and 150 in float32.
    """
    return head if head.dtype is not torch.bfloat16 or fast_bfloat16(head.device) else head.float()


def fast_bfloat16(device: torch.device) -> bool:
    """Return whether PyTorch has fast products in bfloat16 on `device`."""
    return device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class LossVocabulary:
    """Chooses the tokens that a step's loss is taken over.

    These are the most frequent ones, those of the batch, and some random others. The softmax over a
    whole vocabulary costs more than the network. Each random token stands for its share of the
    tokens that are neither frequent nor in the batch. The logarithm of how many it stands for is
    added to its logit, so the sum over the sample estimates the sum over the vocabulary.

    `counts` `[vocab]`. `size`: about how many tokens are chosen; half of them are the most frequent
    ones.
    """

    def __init__(self, counts: torch.Tensor, size: int, seed: int) -> None:
        self._vocab, self._size = len(counts), min(size, len(counts))
        self._frequent = counts.argsort(descending=True, stable=True)[: self._size // 2]
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids `[s]`, and what to add to their logits `[s]`."""
        if self._size == self._vocab:
            return torch.arange(self._vocab), torch.zeros(self._vocab)
        common = torch.zeros(self._vocab, dtype=torch.bool)
        common[self._frequent] = True
        common[batch.tokens.flatten().cpu()] = True
        certain, others = common.nonzero()[:, 0], (~common).nonzero()[:, 0]
        count = min(len(others), max(self._size - len(certain), self._size // 8))
        drawn = others[torch.randperm(len(others), generator=self._generator)[:count]]
        shift = torch.zeros(len(certain) + count)
        shift[len(certain) :] = math.log(len(others) / max(count, 1))
        return torch.cat([certain, drawn]), shift


class Objective(nn.Module):
    """The loss of a batch as one module, so that `accelerate` can wrap it."""

    def __init__(self, network: EagleHead, recipe: Recipe) -> None:
        super().__init__()
        self.network, self.recipe = network, recipe

    def forward(
        self, batch: Batch, head: torch.Tensor, shift: torch.Tensor, done: float = 1.0
    ) -> torch.Tensor:
        """Return the loss, a scalar in nats.

        It is the sum over depths of the mean over rows, by the depths' weights. A row's loss is the
        cross-entropy plus the weighted distance to the target's hidden state (see `Recipe`). `head`
        `[s, d]`: the head's rows of the loss's tokens, without a gradient. `shift` `[s]`: what is
        added to their logits. `done`: how much of the run is over, 0 to 1.
        """
        distance = self.recipe.regression * max(0.0, 1 - done / max(self.recipe.lead, 1e-9))
        total = torch.zeros((), device=batch.tokens.device)
        batch = batch.whole() if done < self.recipe.whole else batch
        with autocast(batch.tokens.device):
            for depth, (_, _, out, target) in enumerate(
                unroll(self.network, batch, self.recipe.ahead(done))
            ):
                if depth == 0:
                    with torch.no_grad():
                        probs = (
                            F.linear(target.to(head.dtype), head, shift.to(head.dtype))
                            .float()
                            .softmax(-1)
                        )
                        rows, offsets = mean_rows(probs, head, shift)
                row, offset = (kept(known, batch, depth) for known in (rows, offsets))
                feature = self.network.feature(out)
                each: torch.Tensor = CrossEntropy.apply(
                    feature.to(head.dtype), head, shift, row, offset
                )  # type: ignore[no-untyped-call]
                if distance:
                    each = each + distance * F.smooth_l1_loss(
                        feature.float(), target.float(), reduction="none"
                    ).mean(-1)
                total = total + self.recipe.decay**depth * each.sum() / max(len(each), 1)
        return total


def mean_rows(
    probs: torch.Tensor, head: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all that a cross-entropy with the distributions `probs` `[m, s]` needs of them.

    That is the mean of the rows of `head` `[s, d]` under each distribution, `[m, d]` float32, and
    the mean of `shift` `[s]`, `[m]`.
    """
    return (probs.to(head.dtype) @ head).float(), probs @ shift


class CrossEntropy(torch.autograd.Function):
    """The cross-entropy between distributions p and the softmax q of scores z: `[m]`, in nats.

    z is `features @ head.T + shift` `[m, s]`. -sum(p log q) is log(sum(exp z)) minus the mean of z
    under p. That mean needs only the `mean_rows` of p (`row`, `offset`), which are the same at
    every depth. The gradient is the mean row under q minus the mean row under p. So there are only
    a few operations on `[m, s]`, which take most of the time of a training on a CPU. No tensor of
    that size is kept for the backward pass. Only `features` have a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        head: torch.Tensor,
        shift: torch.Tensor,
        row: torch.Tensor,
        offset: torch.Tensor,
    ) -> torch.Tensor:
        scores = F.linear(features, head, shift.to(head.dtype))
        q = scores.softmax(-1)
        total = scores.amax(-1).float() - q.amax(-1).float().log()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward((q @ head).float() - row)
        return total - (features.float() * row).sum(-1) - offset

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (difference,) = ctx.saved_tensors
        return difference * grads[0][:, None], None, None, None, None


def kept(known: torch.Tensor, batch: Batch, depth: int) -> torch.Tensor:
    """Select what is `known` at the rows of the first pass for the rows of a later pass.

    Both passes predict the same tokens there, but the one at `depth` may lack some of the rows.
    """
    rows = lasting(batch.answer, depth)
    return known if bool(rows.all()) else known[rows]


class Held(NamedTuple):
    """Figures on held-out answers, by depth.

    `agreement`: how often the drafter's likeliest token is the target's. `overlap`: the mean of Σ
    min(p, q), which is how often a drawn token is accepted at temperature 1. `loss`: the
    cross-entropy in nats at depth 1.
    """

    agreement: list[float]
    overlap: list[float]
    loss: float


@torch.no_grad()
def hold_out(
    network: EagleHead, shards: Shards, chosen: Sequence[int], head: torch.Tensor, depths: int
) -> Held:
    """Measure the drafter on the `chosen` conversations, which it was not trained on.

    `head`: the target's, `[vocab, d]`.
    """
    agree, overlap = [0.0] * depths, [0.0] * depths
    count, loss = [0] * depths, 0.0
    for i in chosen:
        batch = collate([shards[i]]).to(head.device)
        with autocast(head.device):
            for depth, (_, _, out, target) in enumerate(unroll(network, batch, depths)):
                if depth == 0:
                    probs = (target.to(head.dtype) @ head.T).float().softmax(-1)
                p = kept(probs, batch, depth)
                scores = (network.feature(out).to(head.dtype) @ head.T).float()
                q = scores.softmax(-1)
                count[depth] += len(out)
                agree[depth] += float((p.argmax(-1) == q.argmax(-1)).sum())
                overlap[depth] += float(torch.minimum(p, q).sum())
                if depth == 0:
                    loss -= float((p * scores.log_softmax(-1)).sum())
    rates = [[x / max(c, 1) for x, c in zip(sums, count, strict=True)] for sums in (agree, overlap)]
    return Held(rates[0], rates[1], loss / max(count[0], 1))


def split(shards: Shards) -> tuple[list[int], list[int]]:
    """Return the numbers of the conversations to train on, and of those that are held out.

    Both are at least one. Raises `InvalidInput` for fewer than two conversations.
    """
    if len(shards) < 2:
        raise InvalidInput(
            "the text is a single conversation, which can't be both trained on and held out: run "
            "`quickbeam train` with more --tokens, a smaller --length, or more --prompts"
        )
    held = [i for i in range(len(shards)) if i % HELD_OUT == HELD_OUT - 1] or [len(shards) - 1]
    return sorted(set(range(len(shards))) - set(held)), held


def autocast(device: torch.device) -> torch.autocast:
    """Return a context in which products are computed in bfloat16 if that is fast on the device.

    Parameters and sums stay float32.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_bfloat16(device))
