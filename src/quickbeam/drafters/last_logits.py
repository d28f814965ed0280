"""The last logits as a source: guesses the token after the one that they chose."""

from __future__ import annotations

import torch

from quickbeam.drafters.base import Context, Source
from quickbeam.drafters.largest import largest
from quickbeam.noise import NoisePosition


class LastLogits(Source):
    """Guesses the token after the root from the logits that chose the root (LogitSpec).

    If a model ranks a token high but picks another one, it often emits the former next. Stateless.
    """

    name = "last_logits"

    def ranked(self, context: Context, k: int) -> list[tuple[int, int]]:
        """Return `(rank, token)` of the `k` largest of `context.logits`, best first.

        Rank 0 is the argmax. The root is left out, whatever its rank. Where the noise of the next
        position is known, it perturbs the logits first (`methods/children.py`). Under a grammar
        only tokens that it allows after the root are ranked.
        """
        k = min(k, context.logits.shape[-1])
        if k < 1:
            return []
        root = context.ids[-1]
        logits = context.logits
        if context.grammar is not None:
            logits = context.grammar.ban(logits.to(torch.float32, copy=True))
        if context.noise is None:
            ((tokens, _),) = largest(logits[None], k, kernels=context.kernels)
        else:  # the guessed position has its own noise, as those of a drafter's children do
            rows = logits.float().softmax(-1)[None].cpu()
            position = NoisePosition(len(context.ids))
            ((tokens, _),) = context.noise.perturb(rows, None, [position], context.temperature, k)
        return [(rank, token) for rank, token in enumerate(tokens) if token != root]
