"""The largest numbers of a row: the kernels and PyTorch's operators are held to a plain loop."""

import math

import numpy as np
import torch

from kernels import every_set, load
from quickbeam.drafters.largest import largest, largest_plain


def plain(row, count, floor=-math.inf):
    """Columns by number, the largest first and of equal ones the first."""
    kept = [token for token, value in enumerate(row) if value > floor]
    return sorted(kept, key=lambda token: (-row[token], token))[:count]


def rows():
    """All, some and few tokens near the peak; equal logits; ends of chunks; bad numbers."""
    generator = np.random.default_rng(0)
    made = [spread * generator.standard_normal(5000) for spread in (0.01, 1.0, 5.0)]
    made += [generator.integers(0, 4, size).astype(float) for size in (1, 63, 64, 65, 700)]
    made += [np.arange(300.0), -np.arange(300.0)]
    bad = generator.standard_normal(200)
    bad[[0, 64, 130]], bad[[3, 70, 199]], bad[[5, 7]] = math.nan, -math.inf, math.inf
    made += [bad, np.full(100, math.nan), np.full(100, -math.inf)]
    return [row.astype(np.float32) for row in made]


@every_set
def test_the_kernels_find_the_largest(isa):
    for row in rows():
        for count in (1, 2, 16, 60, 6000):
            ((tokens, values),) = largest(torch.from_numpy(row)[None], count, kernels=load(isa))
            assert tokens == plain(row.tolist(), count) and values == row[tokens].tolist()


@every_set
def test_floors_and_names_belong_to_rows_and_columns(isa):
    distributions = torch.randn(5, 700, generator=torch.Generator().manual_seed(2)).softmax(-1)
    floors = [0.0, 0.002, 0.01, 0.5, 0.004]
    names = 3 * torch.arange(700) + 1
    for kernels in (load(isa), None):
        rows = largest(distributions, 40, floors, names, kernels)
        for row, floor, (tokens, values) in zip(distributions, floors, rows, strict=True):
            columns = plain(row.tolist(), 40, floor)
            assert tokens == names[columns].tolist() and values == row[columns].tolist()


def test_pytorchs_operators_find_the_same_numbers_however_they_lie():
    for row in rows():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            logits = torch.from_numpy(row).to(dtype)[None]
            for count in (1, 16, len(row)):
                ((tokens, values),) = largest_plain(logits, min(count, len(row)), [-math.inf])
                expected = plain(logits[0].tolist(), count)
                assert values == [logits[0].tolist()[token] for token in expected]
                assert values == logits[0, tokens].tolist() and len(set(tokens)) == len(tokens)
    row = torch.randn(400, generator=torch.Generator().manual_seed(1))
    assert largest(row[None, ::2], 8)[0][0] == plain(row[::2].tolist(), 8)
