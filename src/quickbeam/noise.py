"""The noise of a position: one Gumbel number for each token of the vocabulary.

A number depends on the seed, the choice, the position and the token, and on nothing else.

At a position each token x has a Gumbel number g(x). With p the target's distribution there,

    emitted  =  argmax over x of  log p(x) + g(x)

is an exact draw from p (the Gumbel-max trick). The numbers belong to the position and not to a
draft. So the same token is emitted whatever was drafted, in whichever batch (drafter-invariant
sampling; Daliri, Musco and Suresh, 2408.07978).

The numbers come from a counter-based generator, Philox4x32-10 (Salmon et al., SC 2011). Its key is
the seed, and its counter names choice, position and token. So any number can be computed without
the ones before it, on any device, and padding the vocabulary changes none.

Tokens are grouped into chunks of 64 neighbours. The largest number of a chunk is generated first,
so that few tokens have to be looked at. Let e(x) = exp(-g(x)), which has an exponential
distribution. Then

    the least e of 64 tokens     =  an exponential number / 64
    the token that has it        =  uniform among the 64
    the e of each other token    =  that least e + an exponential number of its own

This is how 64 independent exponential numbers are distributed, because they have no memory. A chunk
is skipped if the sum of its largest log p and its largest g is below the best sum elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ArrayLike = Any  # an array, or a tensor on the CPU

CHUNK = 64  # tokens of a chunk, whose largest number is generated first
LIKELY = 8  # chunks that are looked at first
KEPT = 32  # positions whose peaks are cached
# the last word of a counter says what the number is for
PEAK = 0  # the largest number of a chunk
TOKEN = 1  # the number of a token
# Philox's constants
ROUNDS = 10
FACTORS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round
_FACTORS = np.array(FACTORS, np.uint64)[:, None]
_STEPS = np.array(STEPS, np.uint64)[:, None]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Return 4 random words `[4, n]` of Philox4x32-10 for counters `[4, n]`.

    Words have 32 bits and are held in uint64. `key` is two words.
    """
    # words 0 and 2, words 1 and 3
    even = counter[0::2].astype(np.uint64)
    odd = counter[1::2].astype(np.uint64)
    keys = np.array([[key[0]], [key[1]]], dtype=np.uint64)
    for number in range(ROUNDS):
        if number:
            keys = (keys + _STEPS) & _LOW
        product = even * _FACTORS
        even = (product >> _HALF)[::-1] ^ odd ^ keys
        odd = (product & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(high: Array, low: Array) -> Array:
    """Return float64 numbers `[n]` strictly between 0 and 1, each made from two 32-bit words.

    They are the middles of 2^52 equal parts of the interval.
    """
    part = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (part.astype(np.float64) + 0.5) * 2.0**-52  # type: ignore[no-any-return]


Peaks = tuple[Array, Array]  # the largest number of each chunk, and the token that has it
Row = tuple[list[int], list[float]]  # tokens, and their perturbed probabilities
# `perturb` first estimates the largest perturbed probability of a row. It leaves out tokens that
# can't exceed this share of it, or a quarter of `NoisePosition.least_after` if that is more.
CUT = 0.02
NINTH_DECILE = 2.3  # exp(-g) is below this 9 times in 10
TINY = 2.0**-120  # the lowest threshold of a perturbed probability


class NoisePosition(NamedTuple):
    """Whose noise perturbs a row, and which tokens of the row count.

    - `position`: of the text.
    - `least`: the least probability of a token before it is perturbed.
    - `least_after`: what its perturbed probability must exceed.
    """

    position: int
    least: float = 0.0
    least_after: float = 0.0


def _best_of(
    noise: Noise, scores: Array, position: int, scale: float, chunks: Array
) -> tuple[float, int]:
    """Return the largest sum of score and number in these chunks, and its token."""
    tokens = (np.sort(chunks)[:, None] * CHUNK + np.arange(CHUNK)).ravel()
    tokens = tokens[tokens < len(scores)]
    gumbels = noise.of(tokens, np.full(len(tokens), position))
    sums = scores[tokens].astype(np.float64) * scale + gumbels
    best = int(sums.argmax())
    return float(sums[best]), int(tokens[best])


class Noise:
    """The Gumbel numbers of one answer, in NumPy: the reference for those of `models/native`.

    - `seed`: any integer; only its lowest 64 bits count.
    - `choice`: which of several answers to one prompt this is.
    - `vocab`: how many tokens there are. The number of a token does not depend on it.
    """

    def __init__(self, seed: int, choice: int, vocab: int) -> None:
        self.seed = seed % 2**64
        self.choice = choice
        self.vocab = vocab
        self.key = (self.seed & 0xFFFFFFFF, self.seed >> 32)
        self._peaks_at: OrderedDict[int, Peaks] = OrderedDict()

    def peaks(self, position: int) -> Peaks:
        """Return each chunk's largest number `[chunks]` at a position, and its token `[chunks]`.

        In the last chunk that token may lie beyond the vocabulary. Positions count prompt and
        answer from 0.
        """
        if position not in self._peaks_at:
            self._peaks_at[position] = self._find_peaks(position)
            while len(self._peaks_at) > KEPT:
                self._peaks_at.popitem(last=False)
        return self._peaks_at[position]

    def _find_peaks(self, position: int) -> Peaks:
        chunks = np.arange(-(-self.vocab // CHUNK), dtype=np.uint64)
        words = self.words(chunks, np.full(len(chunks), position, dtype=np.uint64), PEAK)
        largest = -np.log(-np.log1p(-uniform(words[0], words[1])) / CHUNK)
        owners = (words[2] >> np.uint64(26)) + chunks * np.uint64(CHUNK)
        return largest, owners.astype(np.int64)

    def of(self, tokens: Array, positions: Array) -> Array:
        """Return the numbers of `tokens` `[n]`, each at its own position of `positions` `[n]`."""
        words = self.words(tokens.astype(np.uint64), positions.astype(np.uint64), TOKEN)
        exponential = -np.log1p(-uniform(words[0], words[1]))
        largest = np.empty(len(tokens))
        owner = np.empty(len(tokens), dtype=np.int64)  # the token that has the largest
        for position in set(positions.tolist()):
            here = positions == position
            peaks, owners = self.peaks(position)
            chunks = tokens[here] // CHUNK
            largest[here] = peaks[chunks]
            owner[here] = owners[chunks]
        return np.where(owner == tokens, largest, -np.log(np.exp(-largest) + exponential))

    def largest(self, scores: ArrayLike, position: int, scale: float = 1.0) -> int:
        """Return the token with the largest `scale * scores[token]` + number at a position.

        `scores` is `[vocab]`. Returns -1 where a score is NaN or the largest is infinite. The
        result is exact: chunks are skipped only where they can't hold that token.
        """
        scores = np.asarray(scores)
        full = len(scores) // CHUNK * CHUNK  # tokens in chunks of full size
        chunk_scores = scores[:full].reshape(-1, CHUNK).max(1)
        if full < len(scores):
            chunk_scores = np.append(chunk_scores, scores[full:].max())
        if not np.isfinite(chunk_scores.max()):  # the maximum is NaN if any score is
            return -1
        peaks, _ = self.peaks(position)
        bounds = chunk_scores.astype(np.float64) * scale + peaks[: len(chunk_scores)]
        first = np.arange(len(bounds))
        if len(bounds) > LIKELY:
            first = np.argpartition(-bounds, LIKELY)[:LIKELY]
        best, token = _best_of(self, scores, position, scale, first)
        bounds[first] = -np.inf
        others = (bounds > best).nonzero()[0]
        if len(others):
            second, other = _best_of(self, scores, position, scale, others)
            if second > best:
                return other
        return token

    def perturb(
        self,
        rows: ArrayLike,
        tokens: ArrayLike | None,
        noise_positions: Sequence[NoisePosition],
        temperature: float,
        most: int,
    ) -> list[Row]:
        """Return the likeliest tokens of each row, perturbed by the noise of its position.

        `rows` is `[m, s]` probabilities (float32). Column i of a row gets probability *
        exp(temperature * number), and the results are normalised. At most `most` tokens come back,
        each with its result, the largest first. `tokens` `[s]` names the token of each column; None
        means that column i is token i. `noise_positions`: one for each row.

        Tokens far less likely than the likeliest are left out without computing their numbers. The
        normalising sum counts them as if their number was 0.
        """
        rows = np.asarray(rows)
        if tokens is not None:
            tokens = np.asarray(tokens)
        candidates = [
            self._candidates(q, tokens, noise_position, temperature)
            for q, noise_position in zip(rows, noise_positions, strict=True)
        ]
        sizes = [len(columns) for columns in candidates]
        positions = np.repeat(np.array([row.position for row in noise_positions]), sizes)
        every = np.concatenate(candidates)
        gumbels = self.of(every if tokens is None else tokens[every], positions)
        perturbed = list[Row]()
        first = 0
        for q, columns, noise_position in zip(rows, candidates, noise_positions, strict=True):
            row_gumbels = gumbels[first : first + len(columns)]
            first += len(columns)
            probs = q[columns] * np.exp(temperature * row_gumbels)
            without = max(0.0, 1 - float(q[columns].sum(dtype=np.float64)))
            probs /= probs.sum() + without
            ranked = np.argsort(-probs, kind="stable")[:most]
            ranked = ranked[probs[ranked] > noise_position.least_after]
            names = columns[ranked] if tokens is None else tokens[columns[ranked]]
            perturbed.append((names.tolist(), probs[ranked].tolist()))
        return perturbed

    def _candidates(
        self, q: Array, tokens: Array | None, row: NoisePosition, temperature: float
    ) -> Array:
        """Return the columns of a row `q` `[s]` whose perturbed probability may count."""
        peaks, owners = self.peaks(row.position)
        # no token's number is larger than the largest of its chunk
        factors = np.exp(temperature * peaks).astype(np.float32)
        likeliest = float(q.max(initial=0.0)) * NINTH_DECILE**-temperature
        if tokens is None:
            bounds = q * np.repeat(factors, CHUNK)[: len(q)]
            # the bound of a token that has the largest number of its chunk is its result
            of_owners = bounds[owners[owners < len(q)]]
            likeliest = max(likeliest, float(of_owners.max(initial=0.0)))
        else:
            bounds = q * factors[tokens // CHUNK]
        threshold = max(max(CUT, row.least_after / 4) * likeliest, TINY)
        columns: Array = ((bounds > threshold) & (q >= row.least)).nonzero()[0]
        return columns

    def forget(self) -> None:
        """Forget the cached peaks. Each of them can be computed again."""
        self._peaks_at.clear()

    def words(self, first: Array, positions: Array, purpose: int) -> Array:
        """Return random words `[4, n]` for chunks or tokens `first` `[n]` at `positions` `[n]`.

        `purpose` is `PEAK` where `first` are chunks and `TOKEN` where they are tokens.
        """
        counter = np.empty((4, len(first)), dtype=np.uint64)
        counter[0] = first
        counter[1] = positions
        counter[2] = self.choice
        counter[3] = purpose
        return self._philox(counter)

    def _philox(self, counter: Array) -> Array:
        return philox(counter, self.key)
