"""A drafter's children where the noise of their place is known (coupled sampling, `noise.py`).

At temperature 0 a drafter's distribution q, at temperature 1, says how likely each token is the
target's best: as if the target's logits were the drafter's l plus a Gumbel number of scale 1, whose
argmax is distributed as q. At temperature T the target emits the argmax of logits / T + g. With the
same error in the logits that is the argmax of l + T * g + a Gumbel number, which token x is with
probability

    q(x) * exp(T * g(x)) / sum over y of q(y) * exp(T * g(y)).

So one rule serves every temperature: the children are the likeliest of q, perturbed by the noise
and made a distribution again; at temperature 0 that is q itself. How likely such a child is in fact
is learned alike (`acceptance.Likeliest`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quickbeam.draft.base import Context, Laws
from quickbeam.noise import Array, Noise, Places, Wanted
from quickbeam.params import SamplingParams
from quickbeam.trees.wide import Row, likeliest

FAINT = 1e-5  # of the likeliest token
MARGIN = 0.5  # of what the filters leave by the drafter: the target may see it otherwise


def proposals(
    context: Context,
    laws: Laws,
    depths: Sequence[int],
    count: int,
    least: Sequence[float] | None = None,
) -> list[Row]:
    """The `count` likeliest children after nodes of these depths, the likeliest first: by `laws`,
    and by the noise of their places where there is any. `least`: for each node, what a probability
    must be above for the token to count. A forced token has all of it."""
    if context.noise is None:
        rows = likeliest(laws.values, count, least)
    else:
        values = np.ascontiguousarray(laws.values.cpu().numpy())
        tokens = None if laws.tokens is None else np.ascontiguousarray(laws.tokens.cpu().numpy())
        unlikely = [
            0.0 if context.filters is None else MARGIN * ruled_out_below(q, context.filters)
            for q in values
        ]
        positions = [len(context.ids) + depth for depth in depths]
        places = Places(positions, unlikely, least or [0.0] * len(values))
        rows = context.noise.perturb(values, tokens, places, Wanted(context.temperature, count))
    found = [(laws.names(columns), chances) for columns, chances in rows]
    for i, token in laws.forced.items():
        found[i] = [token], [1.0]
    return found


def ruled_out_below(q: Array, filters: SamplingParams) -> float:
    """The probability, at temperature 1, of the least likely token that top-k, top-p and min-p
    leave of `q` `[vocab]`, about: tokens less likely than `FAINT` times the likeliest don't
    count."""
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
    """All of the perturbed distribution of `q` `[vocab]`, the reference."""
    every = noise.of(np.arange(len(q)), np.full(len(q), position))
    return (q.double().log() + temperature * torch.from_numpy(every)).softmax(0)
