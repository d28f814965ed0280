"""Products are looked at as wide as they are: kernels may choose another way for wide ones. `pytest
tests/test_wide_products.py`"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from quickbeam.models import bit_exact
from quickbeam.models.bit_exact import NARROW, _rows_alike, rows_alike
from quickbeam.models.linear import FastLinear

INPUTS, WIDE = 34, NARROW + 1000
ASKED = rows_alike.__wrapped__  # without what was found before


def otherwise(rows: range):
    """`nn.Linear.forward`, with the bits of another kernel for wide products of so many rows, in
    the last outputs alone."""
    inner = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = inner(self, x)
        if self.out_features > NARROW and len(x) in rows:
            out[:, -1] += 1
        return out

    return forward


@pytest.mark.parametrize(
    ("rows", "least", "most"),
    [(range(0), 1, 64), (range(1, 2), 2, 64), (range(33, 65), 1, 32), (range(8, 65), 1, 4)],
)
def test_what_wide_kernels_do_is_seen(
    rows: range, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ASKED("plain", INPUTS, NARROW)
    monkeypatch.setattr(nn.Linear, "forward", otherwise(rows))
    assert ASKED("plain", INPUTS, NARROW) == plain
    assert ASKED("plain", INPUTS, WIDE) == (max(least, plain.least), min(most, plain.most))


@pytest.mark.parametrize("kind", ["plain", "packed", "conv"])
def test_the_real_shape_is_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def looked_at(kind: str, block: torch.Tensor, outputs: int):
        product = make(kind, block, outputs)
        seen.append((tuple(block.shape), product(torch.ones(2, INPUTS).bfloat16()).shape[1]))
        return product

    make = bit_exact._product
    monkeypatch.setattr(bit_exact, "_product", looked_at)
    ASKED(kind, INPUTS, WIDE)
    assert seen == [((NARROW, INPUTS), NARROW), ((NARROW, INPUTS), WIDE)]
    seen.clear()
    ASKED(kind, INPUTS, 100)
    assert seen == [((100, INPUTS), 100)]
    monkeypatch.setattr(bit_exact, "MOST_WEIGHTS", INPUTS * (NARROW + 5))
    seen.clear()
    ASKED(kind, INPUTS, WIDE)
    assert seen[-1][1] == NARROW + 5  # as wide as memory is given for


def test_a_few_rows_say_the_same_as_all() -> None:
    assert _rows_alike("plain", 64, 512, bit_exact.LOOKED_AT) == _rows_alike(
        "plain", 64, 512, range(0, 64, 2)
    )


def test_a_real_head_takes_little_time() -> None:
    begun = time.process_time()  # whatever else the machine does
    ASKED("packed", 576, 49152)
    assert time.process_time() - begun < 10  # well below one


def test_weights_of_a_wide_product_are_repeated() -> None:
    block = torch.randn(8, INPUTS).bfloat16()
    x = torch.randn(3, INPUTS).bfloat16()
    for kind in ("plain", "packed", "conv"):
        product = bit_exact._product(kind, block, 20)
        assert isinstance(product, FastLinear) == (kind == "packed")
        torch.testing.assert_close(
            product(x), torch.cat([x @ block.t()] * 3, 1)[:, :20], rtol=0.05, atol=0.05
        )
