"""Reading rows as wide as a vocabulary: the fast ways give what the plain ones do.

pytest tests/test_wide.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import context_of, zipf_drafter
from quickbeam.draft.base import Laws
from quickbeam.grow import DRAFTED, wide
from quickbeam.grow.draws import drawn
from quickbeam.grow.wide import CHUNK, independent, independent_plain, likeliest, likeliest_plain, peaks
from quickbeam.tree import TokenTree
from toy import chi_square

vocabs = st.sampled_from([1, 5, 127, 128, 129, 300, 1000, 4096, 5003])
seeds = st.integers(0, 10**6)


def peaked(size: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """Laws whose probabilities are nearly all different."""
    return (scale * torch.randn(size, vocab, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def dyadic(size: int, vocab: int, seed: int, kinds: int = 4) -> torch.Tensor:
    """Weights `[size, vocab]` whose sums are exact in float32, so that every way of adding gives the same; many are equal, many 0."""
    weights = torch.randint(-kinds, kinds, (size, vocab), generator=torch.Generator().manual_seed(seed)).clamp(min=0).float()
    return weights / 2**15


@settings(deadline=None, derandomize=True, max_examples=150)
@given(seeds, st.integers(1, 5), vocabs, st.integers(1, 200), st.booleans())
def test_the_likeliest_tokens_are_those_of_a_full_sort(seed: int, size: int, vocab: int, count: int, floored: bool) -> None:
    laws = peaked(size, vocab, seed)
    least = [float(law[seed % vocab]) for law in laws] if floored else None
    found = likeliest(laws, count, least)
    assert found == likeliest_plain(laws, count, least)
    for law, floor, (tokens, values) in zip(laws, least or [0.0] * size, found, strict=True):
        order = [token for token in law.argsort(descending=True).tolist() if law[token] > floor][:count]
        assert tokens == order and values == law[order].tolist()


@settings(deadline=None, derandomize=True, max_examples=80)
@given(seeds, st.sampled_from([130, 200, 1000, 4097]), st.integers(1, 200))
def test_in_a_tie_the_lowest_ids_come_first_and_zeros_never(seed: int, vocab: int, count: int) -> None:
    laws = torch.cat((dyadic(3, vocab, seed), torch.zeros(1, vocab), torch.full((1, vocab), 0.5)))
    for law, (tokens, values) in zip(laws, likeliest(laws, count), strict=True):
        ranked = sorted((-p, token) for token, p in enumerate(law.tolist()) if p > 0)[:count]
        assert (tokens, values) == ([token for _, token in ranked], [-p for p, _ in ranked])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(seeds, st.integers(1, 4), vocabs, st.integers(1, 16))
def test_draws_are_the_same_as_by_one_running_sum(seed: int, size: int, vocab: int, count: int) -> None:
    laws = torch.cat((dyadic(size, vocab, seed), torch.zeros(1, vocab)))
    plain, fast = (draw(laws, count, torch.Generator().manual_seed(seed)) for draw in (independent_plain, independent))
    assert fast == plain
    assert fast[-1] == ([], []) and (laws.sum() == 0 or any(tokens for tokens, _ in fast))
    alone = [independent(laws[:1], 1, torch.Generator().manual_seed(i)) for i in range(5)]
    assert alone == [independent_plain(laws[:1], 1, torch.Generator().manual_seed(i)) for i in range(5)]


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("vocab", [192, 200])
def test_draws_have_the_law(vocab: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharp laws over several chunks and a ragged end, drawn one by one or at once."""
    monkeypatch.setattr(wide, "FEW", few)
    law, generator = peaked(1, vocab, vocab, 2.0), torch.Generator().manual_seed(0)
    counts: Counter[int] = Counter()
    for _ in range(5000):
        counts.update(row[0][0] for row in independent(law.expand(3, -1).contiguous(), 1, generator))
    assert chi_square(counts, dict(enumerate(law[0].tolist()))) > 1e-3


@pytest.mark.parametrize("few", [0, 100])
def test_ends_of_chunks_and_of_the_law_are_drawn_with_their_probability(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number just below each running sum finds the token it belongs to, and one on it the next that has probability."""
    monkeypatch.setattr(wide, "FEW", few)
    law = torch.zeros(1, 200)
    holders = [0, 63, 64, 130, 198]
    law[0, holders] = torch.tensor([0.25, 0.25, 0.125, 0.125, 0.25])
    edges = [0.0, 0.25, 0.5, 0.625, 0.75]
    numbers = [*edges, *(edge - 2**-53 for edge in [*edges[1:], 1.0])]
    expected = [*holders, *holders]

    def rand(*shape: int, **_: object) -> torch.Tensor:
        return torch.tensor(numbers[: shape[1]] if shape[1] > 1 else [numbers[rand.turn]], dtype=torch.float64)[None]  # type: ignore[attr-defined]

    monkeypatch.setattr(torch, "rand", rand)
    found = []
    for turn in range(len(numbers)):
        rand.turn = turn  # type: ignore[attr-defined]
        found += independent(law, 1, torch.Generator())[0][0]
    assert found == expected
    assert independent(law, len(numbers), torch.Generator())[0][0] == holders


@pytest.mark.parametrize("make", [peaked, dyadic])
def test_a_wide_law_can_be_drawn_from_until_nothing_is_left(make: Callable[..., torch.Tensor]) -> None:
    laws = make(2, 150, 7)
    for law, draws in zip(laws, drawn(Laws(laws), torch.Generator().manual_seed(1), 1), strict=True):
        holders = law.nonzero()[:, 0].tolist()
        order = [draws.draw(i) for i in range(len(holders))]
        assert sorted(token for token, _ in order) == holders and draws.draw(len(holders)) is None
        assert [draws.worth(i) for i in range(3)] == pytest.approx([1.0, 1 - order[0][1], 1 - order[0][1] - order[1][1]], abs=1e-6)


def test_peaks_are_the_largest_that_share_no_chunk() -> None:
    vocab = 100 * CHUNK
    laws = peaked(3, vocab, 5)
    for law, found in zip(laws, peaks(laws, 4), strict=True):
        best: dict[int, float] = {}
        for token in law.argsort(descending=True).tolist():
            best.setdefault(token % 100, float(law[token]))
        assert found == list(best.values())[:4]
    few = peaked(2, 5, 5)
    assert peaks(few, 4) == few.topk(4).values.tolist()


def test_a_peak_is_that_of_what_was_not_drawn_yet() -> None:
    law = torch.zeros(1, 100 * CHUNK)
    law[0, [7, 300, 41, 2222]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    for seed in range(20):
        (draws,) = drawn(Laws(law), torch.Generator().manual_seed(seed))
        found = [draws.draw(i) for i in range(4)]
        for i in range(4):
            rest = [p for _, p in found[i:]]
            assert draws.peak(i) == pytest.approx(max(rest) / sum(rest), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("name", DRAFTED)
def test_trees_over_wide_laws_are_those_of_the_plain_ways(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def grown() -> list[TokenTree]:
        policy, generator = DRAFTED[name](zipf_drafter(vocab=1000)), torch.Generator().manual_seed(1)
        return [policy.grow(context_of([i], temperature, generator), budget, 12) for i in range(4) for budget in (5, 40)]

    fast = grown()
    for module in ("draws", "search"):
        monkeypatch.setattr(f"quickbeam.grow.{module}.likeliest", likeliest_plain)
    monkeypatch.setattr("quickbeam.grow.draws.independent", independent_plain)
    for one, other in zip(fast, grown(), strict=True):
        assert (one.token, one.parent, one.value) == (other.token, other.parent, other.value) and len(one) > 1
