"""Draws tokens on the device in a pass, by the noise of their positions (`quickbeam/noise.py`).

The random words are the same integers as there. A device's logarithm may differ in the last bit, so
where two tokens are as good as equal, the host decides. It also does where so many tokens are
likely that more chunks would have to be looked at than `LIKELY`. So the token of a row is the one
that `Noise.largest` gives for the row's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.noise import CHUNK, FACTORS, PEAK, ROUNDS, STEPS, TOKEN

LIKELY = 64  # chunks of a row whose tokens are looked at
MARGIN = 1e-9  # two sums are as good as equal if they differ by less than this, 1e-12 of them aside
LOW = 0xFFFFFFFF


class DrawnRows(NamedTuple):
    """The positions of r rows, `[r, 1]` each.

    `key0`, `key1`: the low and the high half of the seed. `choice` and `position`: of the token
    that is drawn. All int64. `scale`: what logits are multiplied by, float64; 0 for a row that
    takes its likeliest token.
    """

    key0: torch.Tensor
    key1: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, draws: torch.Tensor, positions: torch.Tensor) -> DrawnRows:
        """Return the rows of `PassRows.draws` `[r, 3]`, which stand at `positions` `[r]`."""
        seed, choice, scale = torch.split(draws, 1, -1)
        position = positions[:, None] + 1
        return cls(seed & LOW, (seed >> 32) & LOW, choice, position, scale.view(torch.float64))


def philox(rows: DrawnRows, first: torch.Tensor, purpose: int) -> tuple[torch.Tensor, ...]:
    """Return 4 random words `[r, n]` for chunks or tokens `first` `[r, n]`, as `Noise.words`.

    Products of two words may take all 64 bits, the sign's too, so the upper word is masked.
    """
    a, b, c, d = first, rows.position, rows.choice, torch.full_like(rows.choice, purpose)
    key0, key1 = rows.key0, rows.key1
    for _ in range(ROUNDS):
        left, right = a * FACTORS[0], c * FACTORS[1]
        a, b = (right >> 32) & LOW ^ b ^ key0, right & LOW
        c, d = (left >> 32) & LOW ^ d ^ key1, left & LOW
        key0, key1 = (key0 + STEPS[0]) & LOW, (key1 + STEPS[1]) & LOW
    return a, b, c, d


def exponential(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return numbers with an exponential distribution from two words each, as `Noise` does."""
    whole = (high << 20) | (low >> 12)
    return -torch.log1p(-(whole.double() + 0.5) * 2.0**-52)


def draw(
    logits: torch.Tensor,
    rows: DrawnRows,
    random_words: Callable[..., tuple[torch.Tensor, ...]] = philox,
) -> torch.Tensor:
    """Return the token of each row of logits `[r, vocab]`, int64 `[r]`; -1: the host decides.

    It has the largest sum of its scaled logit and its number. A row with a scale of 0 gets any.
    `random_words`: does what `philox` does.
    """
    # at least one chunk more, which stands for the others where there are none
    added = CHUNK + -logits.shape[1] % CHUNK
    padded = torch.unflatten(F.pad(logits, (0, added), value=-torch.inf), 1, (-1, CHUNK))
    chunk = torch.arange(padded.shape[1], device=logits.device)
    words = random_words(rows, chunk.expand(len(logits), -1), PEAK)
    least = exponential(words[0], words[1]) / CHUNK
    owner = (words[2] >> 26) + chunk * CHUNK

    # the chunks that may hold the largest sum, and how large one may be in the others
    bounds = padded.amax(-1).double() * rows.scale - least.log()
    top = bounds.topk(min(LIKELY + 1, bounds.shape[1]))
    likely, beyond = top.indices[:, :-1], top.values[:, -1]

    tokens = (likely[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    words = random_words(rows, tokens, TOKEN)
    least = least.gather(1, tokens // CHUNK)
    more = exponential(words[0], words[1])
    is_owner = owner.gather(1, tokens // CHUNK) == tokens
    numbers = -torch.where(is_owner, least, least + more).log()
    sums = padded.flatten(1).gather(1, tokens).double() * rows.scale + numbers
    (best, second), places = (part.unbind(1) for part in sums.topk(2))
    token = tokens.gather(1, places[0][:, None])[:, 0]
    margin = MARGIN + 1e-12 * best.abs()
    # false where a logit is NaN
    certain = best.isfinite() & (best - torch.maximum(second, beyond) > margin)
    return torch.where(certain, token, -1)
