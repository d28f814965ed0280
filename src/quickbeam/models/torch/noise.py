"""Draws tokens on the device, inside a pass, with the noise of `quickbeam/noise.py`.

The random words are the same integers as on the host. A device's logarithm may differ in the last
bit. So where two tokens are nearly equal, the host draws. The host also draws where so many tokens
are likely that more than `LIKELY` chunks would have to be read. So the token of a row is the one
that `Noise.largest` returns for the row's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.noise import CHUNK, FACTORS, PEAK, ROUNDS, STEPS, TOKEN

LIKELY = 64  # chunks of a row whose tokens are read
# two sums are nearly equal if they differ by less than this sum
MARGIN, RELATIVE_MARGIN = 1e-9, 1e-12
LOW = 0xFFFFFFFF  # the mask of a word's 32 bits


class DrawnRows(NamedTuple):
    """What the noise of r rows depends on, `[r, 1]` each.

    `key0`, `key1`: the low and the high half of the seed, int64. `choice`, `position`: those of the
    token that is drawn, int64. `scale`: the factor of logits, float64; 0 for a row that takes its
    likeliest token.
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
        return cls(
            key0=seed & LOW,
            key1=(seed >> 32) & LOW,
            choice=choice,
            position=positions[:, None] + 1,
            scale=scale.view(torch.float64),
        )


def philox(rows: DrawnRows, first: torch.Tensor, purpose: int) -> tuple[torch.Tensor, ...]:
    """Return 4 random words `[r, n]` for chunks or tokens `first` `[r, n]`, as `Noise.words`.

    A product of two words may take all 64 bits, the sign bit too, so its upper word is masked.
    """
    # the counter
    a = first
    b = rows.position
    c = rows.choice
    d = torch.full_like(rows.choice, purpose)
    key0 = rows.key0
    key1 = rows.key1
    for _ in range(ROUNDS):
        left = a * FACTORS[0]
        right = c * FACTORS[1]
        a = (right >> 32) & LOW ^ b ^ key0
        b = right & LOW
        c = (left >> 32) & LOW ^ d ^ key1
        d = left & LOW
        key0 = (key0 + STEPS[0]) & LOW
        key1 = (key1 + STEPS[1]) & LOW
    return a, b, c, d


def exponential(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return numbers with an exponential distribution from two words each, as `Noise` does."""
    bits = (high << 20) | (low >> 12)  # 52 of them
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log1p(-uniform)


def draw(
    logits: torch.Tensor,
    rows: DrawnRows,
    random_words: Callable[..., tuple[torch.Tensor, ...]] = philox,
) -> torch.Tensor:
    """Return the token x of each row of logits `[r, vocab]`, int64 `[r]`; -1: the host draws.

        argmax over x of  scale * logit(x) - log e(x)

    where e(x) is exponentially distributed. The smallest e of each chunk is computed first
    (`quickbeam/noise.py`). The token of a row with a scale of 0 is undefined. `random_words`: has
    the signature of `philox`.
    """
    # one chunk more at least, as the bound of the chunks that are not read
    padding = CHUNK + -logits.shape[1] % CHUNK
    logits = F.pad(logits, (0, padding), value=-torch.inf)
    chunks = torch.unflatten(logits, 1, (-1, CHUNK))  # [r, chunks, CHUNK]

    # the smallest e of each chunk, and the token that has it, `[r, chunks]`
    chunk = torch.arange(chunks.shape[1], device=logits.device)
    words = random_words(rows, chunk.expand(len(logits), -1), PEAK)
    smallest = exponential(words[0], words[1]) / CHUNK
    smallest_token = (words[2] >> 26) + chunk * CHUNK

    # the chunks that may hold the largest sum, and the bound of the sums in the others
    bounds = chunks.amax(-1).double() * rows.scale - smallest.log()
    top = bounds.topk(min(LIKELY + 1, bounds.shape[1]))
    likely = top.indices[:, :-1]
    other_bound = top.values[:, -1]

    # e of all tokens of the likely chunks, `[r, likely * CHUNK]`
    offset = torch.arange(CHUNK, device=logits.device)
    tokens = (likely[..., None] * CHUNK + offset).flatten(1)
    words = random_words(rows, tokens, TOKEN)
    smallest = smallest.gather(1, tokens // CHUNK)
    others = smallest + exponential(words[0], words[1])
    has_smallest = smallest_token.gather(1, tokens // CHUNK) == tokens
    gumbel = -torch.where(has_smallest, smallest, others).log()

    sums = logits.gather(1, tokens).double() * rows.scale + gumbel
    top_sums = sums.topk(2)
    best, second = top_sums.values.unbind(1)
    token = tokens.gather(1, top_sums.indices[:, :1])[:, 0]
    margin = MARGIN + RELATIVE_MARGIN * best.abs()
    # false where a logit is NaN
    certain = best.isfinite() & (best - torch.maximum(second, other_bound) > margin)
    return torch.where(certain, token, -1)
