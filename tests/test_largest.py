"""The largest logits of a row: the kernels' scan and the sort are held to a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels import every_set, load
from quickbeam.drafters import largest as module
from quickbeam.drafters.largest import largest, largest_by_sorting


def plain(row: list[float], count: int) -> list[int]:
    """Tokens by logit, the largest first and of equal ones the smallest token."""
    kept = [token for token, value in enumerate(row) if value > -math.inf]
    return sorted(kept, key=lambda token: (-row[token], token))[:count]


def rows() -> list[np.ndarray]:
    """All, some and few tokens near the peak; equal logits; ends of chunks; bad numbers."""
    generator = np.random.default_rng(0)
    found = [spread * generator.standard_normal(5000) for spread in (0.01, 1.0, 5.0)]
    found += [generator.integers(0, 4, size).astype(float) for size in (1, 63, 64, 65, 700)]
    found += [np.arange(300.0), -np.arange(300.0)]
    bad = generator.standard_normal(200)
    bad[[0, 64, 130]], bad[[3, 70, 199]], bad[[5, 7]] = math.nan, -math.inf, math.inf
    found += [bad, np.full(100, math.nan), np.full(100, -math.inf)]
    return [row.astype(np.float32) for row in found]


@every_set
def test_the_kernels_find_the_largest(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "settled", lambda: load(isa))
    for row in rows():
        for count in (1, 2, 16, 60, 6000):
            tokens, values = largest(torch.from_numpy(row), count)
            assert tokens == plain(row.tolist(), count) and values == row[tokens].tolist()


def test_sorting_finds_the_same() -> None:
    for row in rows():
        for count in (1, 2, 16, 60, len(row)):
            tokens, values = largest_by_sorting(row, min(count, len(row)))
            assert tokens == plain(row.tolist(), count) and values == row[tokens].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_formats_take_pytorchs_operators(dtype: torch.dtype) -> None:
    for row in rows():
        logits = torch.from_numpy(row).to(dtype)
        tokens, values = largest(logits, 16)
        assert values == logits[tokens].tolist() and len(set(tokens)) == len(tokens)
        assert values == [logits.tolist()[token] for token in plain(logits.tolist(), 16)]


def test_every_other_number_of_a_row() -> None:
    row = torch.randn(400, generator=torch.Generator().manual_seed(1))
    assert largest(row[::2], 8)[0] == plain(row[::2].tolist(), 8)
