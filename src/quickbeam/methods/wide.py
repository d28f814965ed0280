"""Reading rows as wide as a vocabulary: their most probable tokens, and draws from them.

The fast ways read a row once, mostly in chunks of `CHUNK` tokens, and then look into a few places
only. They need the rows on a CPU. The plain ways serve other devices and are the reference.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quickbeam.drafters.largest import ranked
from quickbeam.models.native.library import settled

CHUNK = 64
ROUNDING = 1 - 1e-6  # a factor for bounds, so that float32 can't round them up
# Bars that `likeliest_by_sorting` tries. On two of our own questions, the first one left 16 tokens
# or more in 47 of 48 distributions after roots.
BARS = (1e-5, 1e-7, 0.0)
# with more than this many times the wanted tokens, a partition is faster than sorting them
MANY = 4
Array = npt.NDArray[Any]
Row = tuple[list[int], list[float]]  # tokens, and their probabilities
Stream = Iterator[tuple[int, float]]  # tokens one by one, with their probabilities


def likeliest_plain(
    distributions: torch.Tensor,
    count: int,
    least: Sequence[float] | None = None,
    tokens: torch.Tensor | None = None,
) -> list[Row]:
    """Return the `count` most probable tokens of each of `[m, s]` distributions.

    The most probable comes first. Tokens without probability are left out. `least`: for each
    distribution, what a token's probability must exceed for the token to count. `tokens`: the token
    of each column `[s]` int64; None means that column i is token i.
    """
    top = distributions.topk(min(count, distributions.shape[-1]))
    rows = []
    for columns, values, floor in zip(
        top.indices.tolist(), top.values.tolist(), least or [0.0] * len(distributions), strict=True
    ):
        kept = sum(value > floor for value in values)
        rows.append((columns[:kept], values[:kept]))
    return _named(rows, tokens)


def _named(rows: list[Row], tokens: torch.Tensor | None) -> list[Row]:
    return (
        rows if tokens is None else [(tokens[columns].tolist(), values) for columns, values in rows]
    )


def likeliest(
    distributions: torch.Tensor,
    count: int,
    least: Sequence[float] | None = None,
    tokens: torch.Tensor | None = None,
) -> list[Row]:
    """Do what `likeliest_plain` does, faster on a CPU. In a tie the lowest column comes first.

    `least` counts as rounded to float32. A row is read once: by the native kernels where they run.
    """
    if distributions.device.type != "cpu":
        return likeliest_plain(distributions, count, least, tokens)
    floors = least or [0.0] * len(distributions)
    if (found := settled()) is None:
        return _named(likeliest_by_sorting(distributions, count, floors), tokens)
    return ranked(found, distributions, min(count, distributions.shape[-1]), floors, tokens)


def likeliest_by_sorting(
    distributions: torch.Tensor, count: int, least: Sequence[float]
) -> list[Row]:
    """Return the columns that `likeliest` finds, where the native kernels don't run.

    A row is read once for the values above a bar, and only those few are sorted. If `least` gives
    no bar that is high enough, the first of `BARS` that leaves `count` tokens is used.
    """
    rows = []
    for probs, floor in zip(distributions.numpy(), least, strict=True):
        if count == 1:
            best = int(probs.argmax())
            rows.append(([best], [float(probs[best])]) if probs[best] > floor else ([], []))
            continue
        for bar in BARS:
            spots = (probs > max(bar, floor)).nonzero()[0]
            if len(spots) >= count or bar <= floor:
                break
        found = probs[spots]
        if len(found) > MANY * count:
            kept = found >= np.partition(found, -count)[-count]
            spots, found = spots[kept], found[kept]
        tokens, values = spots.tolist(), found.tolist()
        # stable: of equals, the lowest id stays first
        order = sorted(range(len(tokens)), key=values.__getitem__, reverse=True)[:count]
        rows.append(([tokens[i] for i in order], [values[i] for i in order]))
    return rows


def peaks(distributions: torch.Tensor, count: int) -> list[list[float]]:
    """Return about the `count` largest values of each of `[m, vocab]` distributions.

    Of values that share a chunk, only the largest counts.
    """
    maxima = _maxima(distributions, count)
    return (
        (distributions if maxima is None else maxima)
        .topk(min(count, distributions.shape[-1]))
        .values.tolist()
    )


def _maxima(distributions: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return the largest value of each chunk, `[m, chunks]`.

    `None` if there are too few tokens for twice `count` chunks. A chunk takes every C-th token, C
    being the number of chunks, so that all maxima are found side by side. Tokens left over at the
    end are in no chunk.
    """
    size, vocab = distributions.shape
    depth = min(CHUNK, vocab // (2 * count))
    if depth < 2:
        return None
    chunks = vocab // depth
    return distributions[:, : depth * chunks].reshape(size, depth, chunks).amax(1)


def independent(
    distributions: torch.Tensor, count: int, generator: torch.Generator
) -> list[Stream]:
    """Return `count` independent draws from each of `[m, vocab]` distributions.

    The distributions need not be normalised. Draws from one that is all zero have probability 0.
    The generator is on the CPU; the distributions may be elsewhere.
    """
    mass = distributions.cumsum(-1, dtype=torch.float64)
    uniforms = torch.rand(len(distributions), count, dtype=torch.float64, generator=generator).to(
        distributions.device
    )
    hits = torch.searchsorted(mass, uniforms * mass[:, -1:], right=True).clamp_(
        max=distributions.shape[-1] - 1
    )
    # tokens and values together: one transfer from the device
    both = torch.stack((hits.double(), distributions.gather(-1, hits).double())).tolist()
    return [
        zip(map(int, tokens), values, strict=True) for tokens, values in zip(*both, strict=True)
    ]


def distinct(distributions: torch.Tensor, count: int, generator: torch.Generator) -> list[Stream]:
    """Return draws without replacement from each of `[m, vocab]` distributions, `count` at most.

    They are distributed as the distinct tokens of `independent`. If the distributions are not on a
    CPU, or have fewer than 2 * `CHUNK` tokens, the draws of `independent` itself are returned,
    repeats included.

    Each draw is made when it is asked for. Its uniform number is a position on the running sum of
    the tokens not drawn yet. The sums of the chunks give its chunk, and running sums within the
    chunk give its token. The sums are float32: their rounding changes a token's probability as
    little as the rounding of the distribution itself does.
    """
    size, vocab = distributions.shape
    if distributions.device.type != "cpu" or vocab < 2 * CHUNK:
        return independent(distributions, count, generator)
    sums = _sums(distributions)
    mass = sums.cumsum(-1, dtype=torch.float64)
    uniforms = torch.rand(size, count, dtype=torch.float64, generator=generator).tolist()
    return [
        _distinct(*row)
        for row in zip(distributions.numpy(), sums.numpy(), mass.numpy(), uniforms, strict=True)
    ]


def _distinct(probs: Array, sums: Array, mass: Array, uniforms: list[float]) -> Stream:
    """Yield what these uniform numbers draw from one distribution.

    `sums` are the sums of its chunks, `mass` their running sum.
    """
    left, last = float(mass[-1]), len(mass) - 1
    # for each drawn token: where it begins on the running sum of the whole distribution, and its
    # value
    drawn: list[tuple[float, float]] = []
    tokens = set[int]()
    for number in uniforms:
        goal = number * left
        for begin, value in drawn:
            if goal < begin:
                break
            goal += value
        chunk = min(int(mass.searchsorted(goal, "right")), last)
        inside = probs[chunk * CHUNK : (chunk + 1) * CHUNK].tolist()
        before = float(mass[chunk]) - float(sums[chunk])
        running = [0.0, *accumulate(inside[:-1])]
        # the last token of a chunk has all that is left of the chunk
        place = max(0, bisect_right(running, goal - before) - 1)
        token, value = chunk * CHUNK + place, inside[place]
        if value > 0 and token not in tokens:  # only rounding can make this false
            tokens.add(token)
            insort(drawn, (before + running[place], value))
            left -= value
            yield token, value


def _sums(distributions: torch.Tensor) -> torch.Tensor:
    """Return the sum of each `CHUNK` consecutive tokens, `[m, chunks]`. The last chunk has the
    rest."""
    size, vocab = distributions.shape
    whole = vocab // CHUNK * CHUNK
    if whole == vocab:
        return distributions.reshape(size, -1, CHUNK).sum(-1)
    return torch.cat(
        (
            distributions[:, :whole].reshape(size, -1, CHUNK).sum(-1),
            distributions[:, whole:].sum(-1, keepdim=True),
        ),
        -1,
    )
