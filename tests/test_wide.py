"""Reading rows as wide as a vocabulary: the fast ways give what the plain ones do.

pytest tests/test_wide.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from drafters import context_of, tree_of, zipf_drafter
from quickbeam.drafters.base import DraftProbs
from quickbeam.methods import DRAFTED
from quickbeam.methods.draws import drawn
from quickbeam.methods.wide import (
    CHUNK,
    distinct,
    independent,
    likeliest,
    likeliest_by_sorting,
    likeliest_plain,
    peaks,
)
from quickbeam.tree import TokenTree
from toy import chi_square

vocabs = st.sampled_from([1, 5, 127, 128, 129, 300, 1000, 4096, 5003])
seeds = st.integers(0, 10**6)


def peaked(size: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """DraftProbs whose probabilities are nearly all different."""
    return (
        scale * torch.randn(size, vocab, generator=torch.Generator().manual_seed(seed))
    ).softmax(-1)


def dyadic(size: int, vocab: int, seed: int, kinds: int = 4) -> torch.Tensor:
    """Weights `[size, vocab]` whose sums are exact in float32, so that every way of adding gives
    the same; many are equal, many 0."""
    weights = (
        torch.randint(-kinds, kinds, (size, vocab), generator=torch.Generator().manual_seed(seed))
        .clamp(min=0)
        .float()
    )
    return weights / 2**15


@examples(150, derandomize=True)
@given(seeds, st.integers(1, 5), vocabs, st.integers(1, 200), st.booleans())
def test_the_likeliest_tokens_are_those_of_a_full_sort(
    seed: int, size: int, vocab: int, count: int, floored: bool
) -> None:
    distributions = peaked(size, vocab, seed)
    least = [float(probs[seed % vocab]) for probs in distributions] if floored else None
    found = likeliest(distributions, count, least)
    assert found == likeliest_plain(distributions, count, least)
    assert found == likeliest_by_sorting(distributions, count, least or [0.0] * size)
    named = [([3 * column + 1 for column in columns], values) for columns, values in found]
    for way in (likeliest, likeliest_plain):
        assert (
            way(distributions, count, least, 3 * torch.arange(distributions.shape[1]) + 1) == named
        )
    for probs, floor, (tokens, values) in zip(
        distributions, least or [0.0] * size, found, strict=True
    ):
        order = [
            token for token in probs.argsort(descending=True).tolist() if probs[token] > floor
        ][:count]
        assert tokens == order and values == probs[order].tolist()


@examples(80, derandomize=True)
@given(seeds, st.sampled_from([130, 200, 1000, 4097]), st.integers(1, 200))
def test_in_a_tie_the_lowest_ids_come_first_and_zeros_never(
    seed: int, vocab: int, count: int
) -> None:
    distributions = torch.cat(
        (dyadic(3, vocab, seed), torch.zeros(1, vocab), torch.full((1, vocab), 0.5))
    )
    for found in (
        likeliest(distributions, count),
        likeliest_by_sorting(distributions, count, [0.0] * len(distributions)),
    ):
        for probs, (tokens, values) in zip(distributions, found, strict=True):
            ranked = sorted((-p, token) for token, p in enumerate(probs.tolist()) if p > 0)[:count]
            assert (tokens, values) == ([token for _, token in ranked], [-p for p, _ in ranked])


def one_after_the_other(probs: torch.Tensor, uniforms: list[float]) -> list[tuple[int, float]]:
    """Each number draws from what is left of `[vocab]`, by one running sum."""
    rest, found = probs.double(), []
    for number in uniforms:
        if rest.sum() > 0:
            token = int(torch.searchsorted(rest.cumsum(0), number * rest.sum(), right=True))
            found.append((token, float(probs[token])))
            rest[token] = 0
    return found


@examples(100, derandomize=True)
@given(
    seeds,
    st.integers(1, 4),
    st.sampled_from([128, 129, 300, 1000, 4096, 5003]),
    st.integers(1, 16),
    st.sampled_from([0.0, 0.99]),
)
def test_draws_are_those_of_what_is_left(
    seed: int, size: int, vocab: int, count: int, sparse: float
) -> None:
    distributions = dyadic(size, vocab, seed) * (
        torch.rand(size, vocab, generator=torch.Generator().manual_seed(seed)) >= sparse
    )
    distributions = torch.cat((distributions, torch.zeros(1, vocab)))
    uniforms = torch.rand(
        size + 1, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    found = [
        list(row) for row in distinct(distributions, count, torch.Generator().manual_seed(seed))
    ]
    assert (
        found == [one_after_the_other(*row) for row in zip(distributions, uniforms, strict=True)]
        and not found[-1]
    )
    for probs, row in zip(distributions, found, strict=True):
        assert len(row) == min(count, int((probs > 0).sum()))


@examples(100, derandomize=True)
@given(seeds, st.integers(1, 4), vocabs, st.integers(1, 16))
def test_independent_draws_are_those_of_a_running_sum(
    seed: int, size: int, vocab: int, count: int
) -> None:
    distributions = torch.cat((dyadic(size, vocab, seed), torch.zeros(1, vocab)))
    uniforms = torch.rand(
        size + 1, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    for probs, numbers, row in zip(
        distributions,
        uniforms,
        independent(distributions, count, torch.Generator().manual_seed(seed)),
        strict=True,
    ):
        alone = [one_after_the_other(probs, [number]) for number in numbers]
        assert [one for one in row if one[1] > 0] == [one for found in alone for one in found]


@pytest.mark.parametrize("vocab", [192, 200])
def test_draws_have_the_probs(vocab: int) -> None:
    """Sharp distributions over several chunks and a ragged end."""
    probs, generator = peaked(1, vocab, vocab, 2.0), torch.Generator().manual_seed(0)
    counts: Counter[int] = Counter()
    for _ in range(5000):
        counts.update(
            next(row)[0] for row in distinct(probs.expand(3, -1).contiguous(), 1, generator)
        )
    assert chi_square(counts, dict(enumerate(probs[0].tolist()))) > 1e-3


def test_draws_over_several_chunks_are_without_replacement() -> None:
    weights = {3: 0.6, 5: 0.05, 70: 0.2, 199: 0.15}
    probs = torch.zeros(1, 200)
    probs[0, list(weights)] = torch.tensor(list(weights.values()))
    generator, counts = torch.Generator().manual_seed(0), Counter[tuple[int, ...]]()
    for _ in range(5000):
        (row,) = distinct(probs, 4, generator)
        counts[tuple(token for token, _ in row)] += 1
    exact = {}
    for order in permutations(weights):
        exact[order], left = 1.0, 1.0
        for token in order:
            exact[order] *= weights[token] / left
            left -= weights[token]
    assert chi_square(counts, exact) > 1e-3


def test_ends_of_chunks_and_of_the_probs_are_drawn_with_their_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number just below each running sum finds the token it belongs to, and one on it the next
    that has probability."""
    probs = torch.zeros(1, 200)
    holders = [0, 63, 64, 130, 198]
    probs[0, holders] = torch.tensor([0.25, 0.25, 0.125, 0.125, 0.25])
    edges = [0.0, 0.25, 0.5, 0.625, 0.75]
    numbers = torch.tensor(
        [*edges, *(edge - 2**-53 for edge in [*edges[1:], 1.0])], dtype=torch.float64
    )
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: numbers.view(shape))
    rows = distinct(probs.expand(len(numbers), -1).contiguous(), 1, torch.Generator())
    assert [next(row)[0] for row in rows] == [*holders, *holders]
    (row,) = independent(probs, len(numbers), torch.Generator())
    assert [token for token, _ in row] == [*holders, *holders]


@pytest.mark.parametrize("make", [peaked, dyadic])
def test_a_wide_probs_can_be_drawn_from_until_nothing_is_left(
    make: Callable[..., torch.Tensor],
) -> None:
    distributions = make(2, 150, 7)
    for probs, draws in zip(
        distributions,
        drawn(DraftProbs(distributions), torch.Generator().manual_seed(1)),
        strict=True,
    ):
        holders = probs.nonzero()[:, 0].tolist()
        order = [draws.draw(i) for i in range(len(holders))]
        assert sorted(token for token, _ in order) == holders and draws.draw(len(holders)) is None
        assert [draws.worth(i) for i in range(3)] == pytest.approx(
            [1.0, 1 - order[0][1], 1 - order[0][1] - order[1][1]], abs=1e-6
        )


def test_peaks_are_the_largest_that_share_no_chunk() -> None:
    vocab = 100 * CHUNK
    distributions = peaked(3, vocab, 5)
    for probs, found in zip(distributions, peaks(distributions, 4), strict=True):
        best: dict[int, float] = {}
        for token in probs.argsort(descending=True).tolist():
            best.setdefault(token % 100, float(probs[token]))
        assert found == list(best.values())[:4]
    few = peaked(2, 5, 5)
    assert peaks(few, 4) == few.topk(4).values.tolist()


def test_a_peak_is_that_of_what_was_not_drawn_yet() -> None:
    probs = torch.zeros(1, 100 * CHUNK)
    probs[0, [7, 300, 41, 2222]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    for seed in range(20):
        (draws,) = drawn(DraftProbs(probs), torch.Generator().manual_seed(seed))
        found = [draws.draw(i) for i in range(4)]
        for i in range(4):
            rest = [p for _, p in found[i:]]
            assert draws.peak(i) == pytest.approx(max(rest) / sum(rest), rel=1e-5)


@pytest.mark.parametrize("name", DRAFTED)
def test_trees_over_wide_distributions_are_those_of_the_plain_ways(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grown() -> list[TokenTree]:
        policy = DRAFTED[name](zipf_drafter(vocab=1000))
        return [
            tree_of(policy, context_of([i], 0.0), budget, 12)
            for i in range(4)
            for budget in (5, 40)
        ]

    fast = grown()
    monkeypatch.setattr("quickbeam.methods.perturbed.likeliest", likeliest_plain)
    for one, other in zip(fast, grown(), strict=True):
        assert (one.token, one.parent, one.value) == (
            other.token,
            other.parent,
            other.value,
        ) and len(one) > 1
