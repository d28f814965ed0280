"""Reading rows as wide as a vocabulary: their most probable tokens, and draws from them.

The fast ways look at a row once, mostly in chunks of `CHUNK` tokens, and then into a few places
only. They need the rows on a CPU; the plain ways are for other devices, and the reference.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 64
ROUNDING = 1 - 1e-6  # what to take a bound times, so that float32 doesn't round it up
# the first left 16 tokens or more of 47 in 48 laws after roots, on two of our own questions
BARS = (1e-5, 1e-7, 0.0)
MANY = 4  # times as many tokens as are wanted, and a partition is faster than sorting them
Array = npt.NDArray[Any]
Row = tuple[list[int], list[float]]  # tokens, and their probabilities
Stream = Iterator[tuple[int, float]]  # tokens one by one, with their probabilities


def likeliest_plain(
    laws: torch.Tensor, count: int, least: Sequence[float] | None = None
) -> list[Row]:
    """The `count` most probable tokens of each of `[m, vocab]` laws, the most probable first,
    without those that have no probability.

    `least`: for each law, what a probability must be above for the token to count.
    """
    top = laws.topk(min(count, laws.shape[-1]))
    rows = []
    for tokens, values, floor in zip(
        top.indices.tolist(), top.values.tolist(), least or [0.0] * len(laws), strict=True
    ):
        kept = sum(value > floor for value in values)
        rows.append((tokens[:kept], values[:kept]))
    return rows


def likeliest(laws: torch.Tensor, count: int, least: Sequence[float] | None = None) -> list[Row]:
    """`likeliest_plain`, faster on a CPU, and in a tie the lowest id first. `least` counts as
    rounded to float32.

    Reads a row for what is above a bar, and sorts the little that is. Where `least` gives no bar
    that is high enough, the first of `BARS` does that leaves `count` tokens.
    """
    if laws.device.type != "cpu":
        return likeliest_plain(laws, count, least)
    rows = []
    for law, floor in zip(laws.numpy(), least or [0.0] * len(laws), strict=True):
        if count == 1:
            best = int(law.argmax())
            rows.append(([best], [float(law[best])]) if law[best] > floor else ([], []))
            continue
        for bar in BARS:
            spots = (law > max(bar, floor)).nonzero()[0]
            if len(spots) >= count or bar <= floor:
                break
        found = law[spots]
        if len(found) > MANY * count:
            kept = found >= np.partition(found, -count)[-count]
            spots, found = spots[kept], found[kept]
        tokens, values = spots.tolist(), found.tolist()
        # stable: of equals, the lowest id stays first
        order = sorted(range(len(tokens)), key=values.__getitem__, reverse=True)[:count]
        rows.append(([tokens[i] for i in order], [values[i] for i in order]))
    return rows


def peaks(laws: torch.Tensor, count: int) -> list[list[float]]:
    """The `count` largest values of each of `[m, vocab]` laws, about: of those that share a chunk
    the largest counts."""
    maxima = _maxima(laws, count)
    return (laws if maxima is None else maxima).topk(min(count, laws.shape[-1])).values.tolist()


def _maxima(laws: torch.Tensor, count: int) -> torch.Tensor | None:
    """`[m, chunks]`: the largest value of each chunk, `None` where there are too few tokens for
    twice `count` chunks. A chunk takes every C-th token, C the number of chunks, so that all maxima
    are found side by side; tokens left over at the end are in none."""
    size, vocab = laws.shape
    depth = min(CHUNK, vocab // (2 * count))
    if depth < 2:
        return None
    chunks = vocab // depth
    return laws[:, : depth * chunks].reshape(size, depth, chunks).amax(1)


def independent(laws: torch.Tensor, count: int, generator: torch.Generator) -> list[Stream]:
    """`count` independent draws from each of `[m, vocab]` laws.

    Laws need not be normalised; draws from one that is all zero have no probability. The generator
    is on the CPU, laws may be elsewhere.
    """
    mass = laws.cumsum(-1, dtype=torch.float64)
    uniforms = torch.rand(len(laws), count, dtype=torch.float64, generator=generator).to(
        laws.device
    )
    hits = torch.searchsorted(mass, uniforms * mass[:, -1:], right=True).clamp_(
        max=laws.shape[-1] - 1
    )
    # one transfer from the device
    both = torch.stack((hits.double(), laws.gather(-1, hits).double())).tolist()
    return [
        zip(map(int, tokens), values, strict=True) for tokens, values in zip(*both, strict=True)
    ]


def distinct(laws: torch.Tensor, count: int, generator: torch.Generator) -> list[Stream]:
    """Draws without replacement from each of `[m, vocab]` laws, `count` at most: in law the
    distinct tokens of `independent`, which this gives (repeats and all) where laws are not on a CPU
    or small.

    Each draw is made when it is asked for. Its uniform number is laid on what is left of the law,
    token by token: it finds its chunk by the chunks' sums, and its token by running sums within.
    The sums are float32's: their rounding moves a token's probability by as little as that of the
    law itself does.
    """
    size, vocab = laws.shape
    if laws.device.type != "cpu" or vocab < 2 * CHUNK:
        return independent(laws, count, generator)
    sums = _sums(laws)
    mass = sums.cumsum(-1, dtype=torch.float64)
    uniforms = torch.rand(size, count, dtype=torch.float64, generator=generator).tolist()
    return [
        _distinct(*row)
        for row in zip(laws.numpy(), sums.numpy(), mass.numpy(), uniforms, strict=True)
    ]


def _distinct(law: Array, sums: Array, mass: Array, uniforms: list[float]) -> Stream:
    """What these numbers draw from one law, by the `sums` of its chunks and their running
    `mass`."""
    left, last = float(mass[-1]), len(mass) - 1
    # where on the whole law's running sum a token begins, and how much of it the token has
    drawn: list[tuple[float, float]] = []
    tokens = set[int]()
    for number in uniforms:
        goal = number * left
        for begin, value in drawn:
            if goal < begin:
                break
            goal += value
        chunk = min(int(mass.searchsorted(goal, "right")), last)
        inside = law[chunk * CHUNK : (chunk + 1) * CHUNK].tolist()
        before = float(mass[chunk]) - float(sums[chunk])
        running = [0.0, *accumulate(inside[:-1])]
        # the last token of a chunk has what is left of it
        place = max(0, bisect_right(running, goal - before) - 1)
        token, value = chunk * CHUNK + place, inside[place]
        if value > 0 and token not in tokens:  # by rounding alone
            tokens.add(token)
            insort(drawn, (before + running[place], value))
            left -= value
            yield token, value


def _sums(laws: torch.Tensor) -> torch.Tensor:
    """`[m, chunks]`: the sum of each `CHUNK` tokens in a row, the last chunk holding the rest."""
    size, vocab = laws.shape
    whole = vocab // CHUNK * CHUNK
    if whole == vocab:
        return laws.reshape(size, -1, CHUNK).sum(-1)
    return torch.cat(
        (laws[:, :whole].reshape(size, -1, CHUNK).sum(-1), laws[:, whole:].sum(-1, keepdim=True)),
        -1,
    )
