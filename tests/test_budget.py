"""One budget for all sequences: its decisions by hand and against brute force."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.engine.budget import worth_asking

# --- marginal costs -------------------------------------------------------------------------------


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
