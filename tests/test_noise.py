"""The noise of a place."""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from kernels import every_set, load
from quickbeam import noise
from quickbeam.models.native.noise import NativeNoise
from quickbeam.noise import CHUNK, Noise, NoisePosition, philox, uniform

# From the authors' own list (Random123, kat_vectors): key, counter, words.
KNOWN = """
00000000 00000000 | 00000000 00000000 00000000 00000000 | 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff | ffffffff ffffffff ffffffff ffffffff | 408f276d 41c83b0e a20bc7c6 6d5451fd
a4093822 299f31d0 | 243f6a88 85a308d3 13198a2e 03707344 | d16cfe09 94fdcceb 5001e420 24126ea1
"""


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_philox_gives_the_published_words(line):
    key, counter, expected = line.split("|")
    first, second = words(key)
    got = philox(np.array([words(counter)] * 3, dtype=np.uint64).T, (first, second))
    assert got.T.tolist() == [words(expected)] * 3


def gumbels(source, position, count=None):
    count = source.vocab if count is None else count
    return source.of(np.arange(count), np.full(count, position))


def test_numbers_are_gumbels_and_those_of_a_chunk_are_independent():
    every = np.concatenate([gumbels(Noise(seed, 0, 6400), 5) for seed in range(8)])
    assert stats.kstest(np.exp(-np.exp(-every)), "uniform").pvalue > 1e-3
    chunks = every.reshape(-1, CHUNK)
    # the largest of 64 independent ones
    assert stats.kstest(np.exp(-CHUNK * np.exp(-chunks.max(1))), "uniform").pvalue > 1e-3
    assert stats.chisquare(np.bincount(chunks.argmax(1), minlength=CHUNK)).pvalue > 1e-3
    rest = np.sort(np.exp(-chunks), 1)[:, 1] - np.exp(-chunks).min(1)
    # the second least exponential number of 64
    assert stats.kstest(rest * (CHUNK - 1), "expon").pvalue > 1e-3


def test_a_chunk_that_shares_one_number_is_found_out(monkeypatch):
    """The test above fails where others than the largest have no number of their own."""
    own = Noise.words

    def shared(self, first, positions, purpose):
        return own(self, first // CHUNK if purpose == noise.TOKEN else first, positions, purpose)

    monkeypatch.setattr(Noise, "words", shared)
    with pytest.raises(AssertionError):
        test_numbers_are_gumbels_and_those_of_a_chunk_are_independent()


def test_places_tokens_seeds_and_choices_have_nothing_in_common():
    base = Noise(7, 0, 20_000)
    first = gumbels(base, 3)
    seeds = ((8, 0), (7, 1), (7 + 2**32, 0))
    others = [gumbels(base, 4), *(gumbels(Noise(*seed, 20_000), 3) for seed in seeds)]
    for other in others:
        assert not {*first.tolist()} & {*other.tolist()}
    for other in [*others, np.roll(first, 1), np.roll(first, CHUNK)]:
        assert stats.spearmanr(first, other).pvalue > 1e-3


def test_numbers_belong_to_the_place_alone_and_peaks_are_the_largest():
    wide, narrow = Noise(5, 2, 1000), Noise(5 - 2**64, 2, 130)  # 64 bits of the seed count
    narrow.peaks(90)
    assert np.array_equal(gumbels(narrow, 7), gumbels(wide, 7, 130))
    tokens, positions = np.array([99, 3, 99, 128]), np.array([9, 7, 7, 8])
    right = [gumbels(wide, at)[token] for token, at in zip(tokens, positions, strict=True)]
    assert wide.of(tokens, positions).tolist() == right
    ends = np.array([0, 0xFFFFFFFF], dtype=np.uint64)
    assert uniform(ends, ends).tolist() == [2.0**-53, 1 - 2.0**-53]
    source = Noise(3, 0, 640)
    for position in (0, 5, 1000):
        peaks, owners = source.peaks(position)
        chunks = gumbels(source, position).reshape(-1, CHUNK)
        assert np.array_equal(chunks.max(1), peaks)
        assert np.array_equal(chunks.argmax(1) + CHUNK * np.arange(10), owners)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 700, 5000])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_largest_is_the_largest_of_all(vocab, scale, way=Noise):
    rng = np.random.default_rng(vocab)
    for position in range(40):
        scores = (rng.normal(size=vocab) * rng.choice([0.0, 0.5, 3.0])).astype(np.float32)
        scores[rng.random(vocab) < rng.choice([0.0, 0.9])] = -np.inf
        if not np.isfinite(scores).any():
            continue
        source = way(position, 1, vocab)
        every = scores.astype(np.float64) * scale + gumbels(source, 9)
        assert source.largest(scores, 9, scale) == int(every.argmax())


def test_looking_at_the_first_chunks_alone_is_found_out(monkeypatch):
    """The test above fails where chunks that might hold it are left out."""
    best_of, called = noise._best_of, 0

    def once(*arguments):
        nonlocal called
        called += 1
        return best_of(*arguments) if called % 2 else (-np.inf, 0)

    monkeypatch.setattr(noise, "_best_of", once)
    monkeypatch.setattr(noise, "LIKELY", 1)
    with pytest.raises(AssertionError):
        test_largest_is_the_largest_of_all(5000, 1.0)


@every_set
def test_the_compiled_loops_take_scores_however_they_lie(isa):
    way, vocab = partial(NativeNoise, load(isa)), 300
    scores = np.random.default_rng(1).standard_normal(2 * vocab).astype(np.float32)
    plain = np.ascontiguousarray(scores[::2])
    locked = plain.copy()
    locked.flags.writeable = False
    for position in range(20):
        expected = Noise(2, 0, vocab).largest(plain, position, 3.0)
        for given in (plain, locked, scores[::2], plain.astype(np.float64)):
            assert way(2, 0, vocab).largest(given, position, 3.0) == expected
    places = [NoisePosition(5)], 1.0, 4
    rows = np.exp(locked)[None] / np.exp(locked).sum()
    expected = way(2, 0, vocab).perturb(rows, None, *places)
    rows.flags.writeable = False
    assert way(2, 0, vocab).perturb(rows, None, *places) == expected


@every_set
def test_the_compiled_loops_do_what_the_plain_ones_do(isa):
    native, rng = partial(NativeNoise, load(isa)), np.random.default_rng(0)
    for count in (0, 1, 7, 64, 1001):
        at = rng.integers(0, 2**32, (2, count), dtype=np.uint64)
        words = [way(2**64 - 3, 7, 1).words(*at, noise.TOKEN) for way in (Noise, native)]
        assert np.array_equal(*words)
    for vocab in (1, 63, 64, 65, 1000):
        for tokens in (None, rng.permutation(vocab)[: max(1, vocab // 2)]):
            size = (4, vocab if tokens is None else len(tokens))
            rows = rng.exponential(size=size).astype(np.float32) ** 4
            rows[rows < 0.1] = 0.0
            rows[:3] /= rows[:3].sum(1, keepdims=True) + 1e-9
            rows[3] = 0.0
            for temperature in (0.4, 1.0):
                places = [NoisePosition(3), NoisePosition(4, least=0.01)]
                places += [NoisePosition(3, least_after=0.05), NoisePosition(90)]
                plain, own = (
                    way(4, 1, vocab).perturb(rows, tokens, places, temperature, 9)
                    for way in (Noise, native)
                )
                for (columns, values), (others, same) in zip(plain, own, strict=True):
                    assert columns == others and np.allclose(values, same, rtol=1e-5)
                assert vocab < 9 or (len(own[0][0]) > 0 and min(own[2][1], default=1) > 0.05)
                assert own[3] == ([], [])
        for scale in (0.3, 4.0):
            test_largest_is_the_largest_of_all(vocab, scale, native)
        for way in (Noise, native):
            for bad in (np.nan, np.inf):
                scores = np.zeros(vocab, dtype=np.float32)
                scores[vocab // 2] = bad
                assert way(0, 0, vocab).largest(scores, 3) == -1
            assert way(0, 0, vocab).largest(np.full(vocab, -np.inf, dtype=np.float32), 3) == -1
    (peaks, owners), (others, same) = (way(4, 1, 999).peaks(5) for way in (native, Noise))
    assert np.allclose(peaks, others, rtol=1e-13) and np.array_equal(owners, same)


@every_set
def test_a_place_that_is_kept_no_longer_leaves_what_it_gave(isa):
    """Its memory comes to hold another place."""
    native, plain = NativeNoise(load(isa), 4, 1, 999), Noise(4, 1, 999)
    peaks, owners = native.peaks(0)
    scores = np.random.default_rng(0).standard_normal((2, 999)).astype(np.float32)
    for position in [*range(3 * noise.KEPT + 1), 0]:  # what held the first place holds another one
        assert native.largest(scores[1], position) == plain.largest(scores[1], position)
    assert len(native.rows) == noise.KEPT
    again = NativeNoise(load(isa), 4, 1, 999).peaks(0)
    assert np.array_equal(peaks, again[0]) and np.array_equal(owners, again[1])
