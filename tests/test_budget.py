"""One budget for all sequences: its decisions by hand and against brute force."""

import itertools
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.drafters.base import MarginalCost
from quickbeam.engine.budget import worth_asking

# --- marginal costs -------------------------------------------------------------------------------


@examples(100, derandomize=True)
@given(
    st.lists(st.floats(0, 4), min_size=1, max_size=8),
    st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
def test_marginal_costs_are_the_slopes_of_the_largest_convex_bound(more, gaps):
    widths = list(itertools.accumulate(gaps[: len(more)], initial=1))
    passes = list(itertools.accumulate(more, initial=1.0))
    cost, total = MarginalCost.of_passes(widths, passes), passes[0]
    below = {1: total}
    for n in range(1, widths[-1]):
        total += cost.node(n)
        below[n + 1] = total
    assert all(a <= b + 1e-9 for a, b in pairwise(cost.node(n) for n in range(1, widths[-1])))
    for n, bound in below.items():  # by brute force: the lowest chord over n
        chords = [
            passes[i] if a == b else passes[i] + (passes[j] - passes[i]) * (n - a) / (b - a)
            for (i, a), (j, b) in itertools.product(enumerate(widths), repeat=2)
            if a <= n <= b
        ]
        assert bound == pytest.approx(min(chords), abs=1e-6)


# --- which calls are made -------------------------------------------------------------------------


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
