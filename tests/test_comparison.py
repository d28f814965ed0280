"""The modes of a step: which goes on, and how seldom the others are tried."""

import random

import pytest

from quickbeam.engine.budget import Budget
from quickbeam.engine.comparison import ASKED, PLAIN, UNASKED, Comparison
from quickbeam.engine.cost import CostModel

MODES = {PLAIN: 1.0, UNASKED: 1.2, ASKED: 1.3}


def compared(comparison, steps, many, modes):
    """Run steps of `many` sequences, and return their modes. `modes`: tokens and seconds of a step;
    the tokens vary, and the machine is slow now and then."""
    chosen, rng = list[str](), random.Random(1)
    for _ in range(steps):
        chosen.append(comparison.mode)
        gain, cost = modes[comparison.mode]
        tokens = 1 + sum(2.0 * (rng.random() < (gain - 1) / 2) for _ in range(many)) / many
        slow = 20.0 if rng.random() < 0.01 else rng.uniform(0.9, 1.1)
        comparison.observe(tokens, cost * slow, many, comparison.mode == ASKED)
    return chosen


@pytest.mark.parametrize("many", [1, 2, 4, 16, 64])
@pytest.mark.parametrize(
    ("modes", "fastest"),
    [
        ({PLAIN: (1.0, 1.0), ASKED: (1.4, 1.8)}, PLAIN),
        ({PLAIN: (1.0, 1.0), ASKED: (1.6, 1.3)}, ASKED),
        ({PLAIN: (1.0, 1.0), UNASKED: (1.4, 1.05), ASKED: (1.9, 1.9)}, UNASKED),
        ({PLAIN: (1.0, 1.0), UNASKED: (1.2, 1.05), ASKED: (1.9, 1.4)}, ASKED),
        ({PLAIN: (1.0, 1.0), UNASKED: (1.05, 1.25), ASKED: (1.3, 1.7)}, PLAIN),
    ],
)
def test_the_fastest_mode_goes_on(many, modes, fastest):
    comparison = Comparison({mode: MODES[mode] for mode in modes})
    chosen = compared(comparison, 3000, many, modes)
    assert chosen[1500:].count(fastest) > 0.9 * 1500
    assert chosen[300:600].count(fastest) > 0.7 * 300  # decided early


def test_loads_are_compared_by_themselves_and_begin_with_what_their_neighbours_gave():
    budget = Budget(CostModel({1: 1.0, 64: 1.5}))

    def of(sequences, setting="a method"):
        budget.begin(sequences)
        return budget.comparison(setting, [ASKED, PLAIN], "drafter")

    four = of(4)
    assert four.mode == ASKED and four is of(4) and budget.asks("a method", 4)
    compared(four, 2000, 4, {PLAIN: (1.0, 1.0), ASKED: (1.2, 1.9)})
    assert four.best == PLAIN and not budget.asks("a method", 4)
    assert of(16).mode == PLAIN  # the more sequences, the less drafting gains
    assert of(1).mode == ASKED and of(4, "another").mode == ASKED
    assert of(15) is of(16) is not of(32)
