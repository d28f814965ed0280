"""One budget for all sequences: its decisions by hand and against brute force."""

import itertools
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.engine.budget import Budget, worth_asking
from quickbeam.engine.cost import WIDTHS, CostModel

# --- which calls are made, and who gets the nodes -------------------------------------------------


gains = st.lists(st.one_of(st.floats(0, 3), st.just(float("inf"))), min_size=1, max_size=7)


@examples(200, derandomize=True)
@given(gains, st.floats(0.01, 2), st.floats(0.01, 1), st.floats(0.01, 4))
def test_the_requests_of_a_round_that_are_answered_are_the_best_choice(gains, first, more, rate):
    def seconds(count):
        return first + more * (count - 1)

    def profit(answered):
        """Tokens, less what the call's time would have given. The infinite ones are no choice."""
        if any(math.isinf(gain) and not taken for gain, taken in zip(gains, answered, strict=True)):
            return float("-inf")
        taken = [gain for gain, taken in zip(gains, answered, strict=True) if taken]
        finite = sum(gain for gain in taken if not math.isinf(gain))
        return finite - rate * (seconds(len(taken)) if taken else 0.0)

    answered = worth_asking(gains, seconds, rate)
    assert profit(answered) == pytest.approx(
        max(map(profit, itertools.product([False, True], repeat=len(gains))))
    )


def by_worth(rows):
    return [sorted(row, reverse=True) for row in rows]


@examples(200, derandomize=True)
@given(
    st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=4).map(by_worth),
    st.lists(st.floats(0, 0.3), min_size=len(WIDTHS) - 1, max_size=len(WIDTHS) - 1).map(sorted),
    st.integers(4, 60),
    st.floats(0.1, 4),
)
def test_nodes_are_shared_as_the_best_choice_of_all(values, slopes, rows, rate):
    """Each tree keeps its first nodes."""
    steps = [slope * (b - a) for slope, (a, b) in zip(slopes, pairwise(WIDTHS), strict=True)]
    passes = itertools.accumulate(steps, initial=1.0)
    budget = Budget(CostModel(dict(zip(WIDTHS, passes, strict=True))))

    def profit(kept):
        expected = sum(sum(row[:count]) for row, count in zip(values, kept, strict=True))
        return expected - rate * budget.cost.alone(rows + sum(kept))

    kept = budget.share(values, rows, rate)
    assert all(0 <= count <= len(row) for count, row in zip(kept, values, strict=True))
    assert profit(kept) == pytest.approx(
        max(map(profit, itertools.product(*(range(len(row) + 1) for row in values))))
    )
