"""What a feature drafter is trained for: the target's own law of the next tokens, several drafts
deep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.draft.eagle_model import EagleConfig, EagleHead
from quickbeam.errors import InvalidInput
from quickbeam.train.shards import Shards
from quickbeam.train.unroll import Batch, collate, lasting, unroll

HELD_OUT = 50  # one conversation in so many is never trained on


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained.

    Steps of about `batch` tokens, padding counted; up to `depths` passes of training-time test
    (`ahead`), each later one weighs `decay` of the one before. The learning rate rises over
    `warmup` steps, stays, and falls to zero over the last `cooldown` of the run. The loss is the
    cross-entropy with the target's law over `loss_vocab` tokens (`LossVocabulary`), plus
    `regression` times the smooth L1 distance to the target's hidden state, which leads the way
    while the law is still far off: its weight falls to zero over the first `lead` of the run. In
    the first `whole` of the run every token counts, what users say too: text is dear, and theirs
    teaches what answers don't hold. Then answers only.
    """

    epochs: float = 6
    batch: int = 1024
    depths: int = 3
    decay: float = 0.8
    lr: float = 1e-3
    warmup: int = 50
    cooldown: float = 0.3
    loss_vocab: int = 8192
    regression: float = 10.0
    lead: float = 0.5
    whole: float = 0.5
    clip: float = 1.0
    seed: int = 0

    def ahead(self, done: float) -> int:
        """Passes of a step, `done` (0 to 1) of the run being behind it: one in the first half, as a
        step of three takes three times as long and what it learns first is the first; then one more
        every fifth of the run."""
        return min(self.depths, 1 if done < 0.5 else 2 + int((done - 0.5) * 5))

    def rate(self, step: int, done: float) -> float:
        """The learning rate of a step, `done` (0 to 1) of the run being behind it."""
        return (
            self.lr
            * min(1.0, (step + 1) / self.warmup)
            * min(1.0, max(0.0, 1 - done) / max(self.cooldown, 1e-9))
        )


def new_network(model: nn.Module, config: EagleConfig, seed: int) -> EagleHead:
    """A network to be trained, with small random weights and no head. Its last norm begins as the
    target's, if that is of its kind."""
    network = EagleHead(config, model.get_input_embeddings())  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2:
                weight.normal_(
                    0, 0.01 if name.startswith(("out.", "down.")) else 0.02, generator=generator
                )
        last = getattr(model.base_model, "norm", None)
        kind = type(last).__name__  # Gemma's norms keep their weight less one
        if (
            last is not None
            and kind.endswith("RMSNorm")
            and "Gemma" not in kind
            and last.weight.shape == network.norm.weight.shape
        ):
            network.norm.weight.copy_(last.weight)
    return network


def begun(model: nn.Module, config: EagleConfig, folder: Path) -> EagleHead:
    """A network that was trained before, to be trained on. Raises `InvalidInput` for one of another
    shape than `config`."""
    network = EagleHead.load(folder, model.get_input_embeddings())  # type: ignore[operator]
    there, wanted = asdict(network.config), asdict(config)
    if others := [
        f"{name} {there[name]!r} instead of {wanted[name]!r}"
        for name in wanted
        if there[name] != wanted[name]
    ]:
        raise InvalidInput(
            f"--start {folder}: of another shape than what is trained for this "
            f"model: {'; '.join(others)}"
        )
    return network.float()


def head_of(model: nn.Module) -> torch.Tensor:
    """`[vocab, d]`: the weights of a model's head."""
    return model.get_output_embeddings().weight.detach()  # type: ignore[operator, no-any-return]


class LossVocabulary:
    """The tokens that a step's loss is taken over: the most frequent ones, those of the batch, and
    random ones for the rest.

    The softmax over a whole vocabulary costs more than the network. Each random token stands for
    its share of those left out: the logarithm of their number is added to its logit, so that the
    sum over the sample estimates the sum over the vocabulary.
    """

    def __init__(self, counts: torch.Tensor, size: int, seed: int) -> None:
        self._vocab, self._size = len(counts), min(size, len(counts))
        self._frequent = counts.argsort(descending=True, stable=True)[: self._size // 2]
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids `[s]`, and what to add to their logits `[s]`."""
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
    """The loss of a batch, as one module, which `accelerate` can wrap."""

    def __init__(self, network: EagleHead, recipe: Recipe) -> None:
        super().__init__()
        self.network, self.recipe = network, recipe

    def forward(
        self, batch: Batch, head: torch.Tensor, shift: torch.Tensor, done: float = 1.0
    ) -> torch.Tensor:
        """Cross-entropy in nats, summed over depths by weight. `head` `[s, d]`: the head's rows of
        the loss's tokens, without a gradient; `shift` `[s]`; `done`: how much of the run is
        over."""
        distance = self.recipe.regression * max(0.0, 1 - done / max(self.recipe.lead, 1e-9))
        total = torch.zeros((), device=batch.tokens.device)
        batch = batch.whole() if done < self.recipe.whole else batch
        with autocast(batch.tokens.device):
            for depth, (out, target) in enumerate(
                unroll(self.network, batch, self.recipe.ahead(done))
            ):
                if depth == 0:
                    with torch.no_grad():
                        laws = (
                            F.linear(target.to(head.dtype), head, shift.to(head.dtype))
                            .float()
                            .softmax(-1)
                        )
                        rows, offsets = mean_rows(laws, head, shift)
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
    laws: torch.Tensor, head: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `laws` `[m, s]`, all that a cross-entropy with them needs: the means of the rows of `head`
    `[s, d]`, `[m, d]` float32, and of `shift` `[s]`, `[m]`."""
    return (laws.to(head.dtype) @ head).float(), laws @ shift


class CrossEntropy(torch.autograd.Function):
    """`[m]`, nats: between laws p and the softmax q of the scores z = `features @ head.T + shift`
    `[m, s]`.

    -sum(p log q) is log(sum(exp z)) less the mean of z under p, and that mean needs no more than
    the `mean_rows` of p, which are the same at every depth. The gradient is the mean row under q
    less that under p. So `[m, s]` is gone through a few times only, of which a training on a CPU
    mostly consists, and nothing of it is kept. Only `features` have a gradient.
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
        law = scores.softmax(-1)
        total = scores.amax(-1).float() - law.amax(-1).float().log()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward((law @ head).float() - row)
        return total - (features.float() * row).sum(-1) - offset

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (difference,) = ctx.saved_tensors
        return difference * grads[0][:, None], None, None, None, None


def kept(known: torch.Tensor, batch: Batch, depth: int) -> torch.Tensor:
    """Of what is known of the tokens at the rows of the first pass, that at the rows of the pass at
    `depth`: they are the same tokens."""
    rows = lasting(batch.answer, depth)
    return known if bool(rows.all()) else known[rows]


class Held(NamedTuple):
    """On held-out answers, by depth: `agreement`, how often the drafter's likeliest token is the
    target's; `overlap`, the mean of Σ min(p, q), how often a drawn token is accepted at temperature
    1. `loss`: cross-entropy in nats at depth 1."""

    agreement: list[float]
    overlap: list[float]
    loss: float


@torch.no_grad()
def hold_out(
    network: EagleHead, shards: Shards, chosen: Sequence[int], head: torch.Tensor, depths: int
) -> Held:
    """How well the drafter does on conversations it was not trained on. `head`: `[vocab, d]`."""
    agree, overlap = [0.0] * depths, [0.0] * depths
    count, loss = [0] * depths, 0.0
    for i in chosen:
        batch = collate([shards[i]]).to(head.device)
        with autocast(head.device):
            for depth, (out, target) in enumerate(unroll(network, batch, depths)):
                if depth == 0:
                    laws = (target.to(head.dtype) @ head.T).float().softmax(-1)
                p = kept(laws, batch, depth)
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
    """Which conversations are trained on, and which are held out."""
    held = [i for i in range(len(shards)) if i % HELD_OUT == HELD_OUT - 1] or [len(shards) - 1]
    return sorted(set(range(len(shards))) - set(held)), held


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 products where the device has them; parameters and sums stay float32."""
    return torch.autocast(
        device.type,
        torch.bfloat16,
        enabled=device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    )
