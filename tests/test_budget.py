"""One budget for all sequences: its decisions by hand and against brute force."""

import itertools
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.drafters.base import MarginalCost
from quickbeam.engine.budget import Budget, worth_asking
from quickbeam.engine.comparison import ASKED
from quickbeam.engine.cost import WIDTHS, CostModel

METHOD, DRAFTER = "a method", "a drafter"


def begun(cost, many=1, nodes=1, context=0, prompts=0):
    """A budget in a step of so many sequences, each of whose last trees had so many nodes."""
    budget = Budget(cost)
    budget.begin(dict.fromkeys(range(many), context), dict.fromkeys(range(many), nodes), prompts)
    return budget


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


# --- a number of nodes ----------------------------------------------------------------------------


@examples(50, derandomize=True)
@given(
    st.integers(0, 4), st.lists(st.lists(st.integers(1, 63), max_size=6), min_size=1, max_size=5)
)
def test_expected_tokens_come_to_what_smaller_trees_would_have_emitted(situation, paths):
    budget = begun(CostModel({1: 1.0}))
    for path in paths * 100:
        budget.observe_tree(METHOD, situation, 64, [0, *sorted(set(path))])
    tokens = budget.expected_tokens(METHOD, situation)
    for width, expected in zip([w for w in WIDTHS if w <= 64], tokens, strict=True):
        emitted = [1 + sum(node < width for node in set(path)) for path in paths]
        assert expected == pytest.approx(sum(emitted) / len(emitted), abs=0.6)
    other = (situation + 1) % 5
    untouched = begun(CostModel({1: 1.0})).expected_tokens(METHOD, other)
    assert budget.expected_tokens(METHOD, other) == untouched


@pytest.mark.parametrize("call", [0.0, 0.5, 4.0, 100.0])
def test_the_number_chosen_is_the_best_with_drafting_counted(call):
    rng, budget, chosen = random.Random(0), begun(CostModel({1: 11.0, 64: 15.0})), list[int]()

    def depth(nodes):
        return round(nodes**0.5) if nodes > 1 else 0

    def seconds(nodes):
        return budget.cost.alone(nodes) + call * depth(nodes)

    def rate(nodes):
        return sum(0.8**i for i in range(depth(nodes) + 1)) / seconds(nodes)

    comparison = budget.comparison(METHOD, [ASKED], DRAFTER)
    for _ in range(1500):
        budget.begin({0: 0}, {})
        nodes = budget.nodes(METHOD, 3, budget.rate(comparison), DRAFTER)
        chosen.append(nodes)
        deep = next((i for i in range(depth(nodes)) if rng.random() > 0.8), depth(nodes))
        # The node that is the i-th of the path is the first of its layer.
        layers = [next(n for n in range(2, 65) if depth(n) >= i) - 1 for i in range(1, deep + 1)]
        budget.observe_tree(METHOD, 3, nodes, [0, *layers], DRAFTER, call * depth(nodes))
        budget.observe(comparison, 1 + deep, seconds(nodes), True)
    best = max(rate(width) for width in WIDTHS if width <= 64)
    assert sum(map(rate, chosen[-500:])) / 500 > 0.9 * best


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
