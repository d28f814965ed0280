"""How likely proposals are accepted: the first guess, and what was accepted."""

import random
from statistics import mean

import pytest

from quickbeam.methods.acceptance import (
    REPEATED,
    AcceptanceModel,
    as_printed,
    drafted,
    elsewhere,
)


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_what_is_accepted_is_learned_where_it_was_seen(rate):
    model, rng = AcceptanceModel(), random.Random(3)
    for _ in range(4000):
        accepted = rng.random() < rate
        model.observe(drafted(1, rng.uniform(0.4, 0.5)), accepted)
        model.observe(elsewhere(REPEATED, 5), accepted)
        model.observe(as_printed(0, 0.5), accepted)
    assert mean(model.rate(drafted(1, x)) for x in (0.41, 0.45, 0.49)) == pytest.approx(
        rate, abs=0.06
    )
    assert model.rate(elsewhere(REPEATED, 4)) == pytest.approx(rate, abs=0.06)
    others = drafted(0, 0.45), drafted(1, 0.2), drafted(2, 0.45), as_printed(0, 0.5)
    for other in (*others, elsewhere(REPEATED, 3)):
        assert model.rate(other) == other.usual
    agreed = elsewhere(REPEATED, 4).given(True)
    assert model.rate(agreed) == agreed.usual
