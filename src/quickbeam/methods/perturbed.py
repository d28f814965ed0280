"""A drafter's children where the noise of their place is known (coupled sampling, `noise.py`).

Let q be a drafter's distribution at temperature 1, and l its logits. For an answer at temperature
0, q(x) estimates how likely token x is the target's best. That is exact if the target's logits are
l plus independent Gumbel numbers of scale 1, since the argmax of that sum is distributed as q. At
temperature T the target emits the argmax of logits / T + g, where g is the noise of the place. With
the same error in the logits, this is the argmax of l + T * g + a Gumbel number. It is token x with
probability

    q(x) * exp(T * g(x)) / sum over y of q(y) * exp(T * g(y)).

So one rule serves every temperature: the children are the likeliest tokens of q, perturbed by the
noise and normalised. At temperature 0 that is q itself. How often such children are really accepted
is learned by one rule too (`acceptance.Likeliest`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quickbeam.drafters.base import Context, DraftProbs
from quickbeam.methods.wide import Row, likeliest
from quickbeam.noise import Array, Noise, Places, Wanted
from quickbeam.params import SamplingParams

FAINT = 1e-5  # share of the likeliest token's probability below which tokens don't count
# The filters' bound, found on the drafter's distribution, is multiplied by this, because the
# target's distribution may differ.
MARGIN = 0.5


def proposals(
    context: Context,
    distributions: DraftProbs,
    depths: Sequence[int],
    count: int,
    least: Sequence[float] | None = None,
) -> list[Row]:
    """Return the `count` likeliest children after nodes of these depths, the likeliest first.

    They are chosen by `distributions`, and by the noise of their places where there is any.
    `least`: for
    each node, what a child's probability must exceed for the child to count. A forced token has
    probability 1.
    """
    if context.noise is None:
        found = likeliest(distributions.values, count, least, distributions.tokens)
    else:
        values, tokens = (
            distributions.values.cpu(),
            None if distributions.tokens is None else distributions.tokens.cpu(),
        )
        unlikely = [0.0] * len(values)
        if context.filters is not None:
            unlikely = [MARGIN * ruled_out_below(q, context.filters) for q in values.numpy()]
        positions = [len(context.ids) + depth for depth in depths]
        places = Places(positions, unlikely, least or [0.0] * len(values))
        found = context.noise.perturb(values, tokens, places, Wanted(context.temperature, count))
    for i, token in distributions.forced.items():
        found[i] = [token], [1.0]
    return found


def ruled_out_below(q: Array, filters: SamplingParams) -> float:
    """Return about how likely the least likely token is that top-k, top-p and min-p leave of `q`
    `[vocab]`.

    The probability is that of `q`, at temperature 1. Tokens less likely than `FAINT` times the
    likeliest don't count.
    """
    likely = np.sort(q[q > FAINT * q.max()].astype(np.float64))[::-1]
    if not len(likely):
        return 0.0
    likely = likely[: filters.top_k or None]
    heated = (likely / likely[0]) ** (1 / max(filters.temperature, 1e-3))
    before = heated.cumsum() - heated
    kept = (before < filters.top_p * heated.sum()) & (heated >= filters.min_p)
    return float(likely[kept][-1])


def perturbed_plain(
    q: torch.Tensor, noise: Noise, position: int, temperature: float
) -> torch.Tensor:
    """Return the whole perturbed distribution `[vocab]` of `q` `[vocab]`: the reference for
    tests."""
    every = noise.of(np.arange(len(q)), np.full(len(q), position))
    return (q.double().log() + temperature * torch.from_numpy(every)).softmax(0)
