"""One budget for all sequences: its decisions by hand and against brute force.
pytest tests/test_budget.py"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.drafters.base import MarginalCost
from quickbeam.engine.budget import MAX_NODES, OVERHEAD, Budget, worth_asking
from quickbeam.engine.comparison import ASKED, PLAIN, UNASKED
from quickbeam.engine.cost import WIDTHS, CostModel

METHOD, DRAFTER = "a method", "a drafter"


def begun(cost: CostModel, many: int = 1, nodes: int = 1, context: int = 0, prompts: int = 0):
    """A budget in a step of so many sequences, each of whose last trees had so many nodes."""
    budget = Budget(cost)
    budget.begin(dict.fromkeys(range(many), context), dict.fromkeys(range(many), nodes), prompts)
    return budget


# --- marginal costs -------------------------------------------------------------------------------


def test_steps_in_the_cost_are_spread_over_their_nodes() -> None:
    cost = MarginalCost.of_passes([1, 2, 8, 16], [1.0, 2.0, 2.0, 6.0])
    assert [cost.node(n) for n in (1, 2, 7, 8, 15)] == pytest.approx([1 / 7] * 3 + [0.5] * 2)
    assert cost.node(16) == cost.node(1000) == float("inf")
    assert (
        MarginalCost.of_passes([1, 2], [1.0, 0.5]).node(1) == 0
    )  # measured so: wider is no slower
    assert MarginalCost.of_passes([1], [1.0]).node(1) == float("inf")


@examples(100, derandomize=True)
@given(
    st.lists(st.floats(0, 4), min_size=1, max_size=8),
    st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
def test_marginal_costs_are_the_slopes_of_the_largest_convex_bound(
    more: list[float], gaps: list[int]
) -> None:
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


def test_nodes_cost_more_behind_a_long_text_in_a_full_pass_and_at_a_high_rate() -> None:
    cost = CostModel({1: 1.0, 32: 1.1, 64: 9.0}, {1: 0.0, 64: 0.1})

    def node(rate: float = 1.0, **step: int) -> float:
        return begun(cost, **step).marginal_cost(METHOD, rate).node(1)

    assert node() < node(context=1000)
    assert node() < node(prompts=40)
    assert node(many=11, nodes=4) > 2 * node()
    assert node(2.0) == pytest.approx(2 * node())


def test_the_rate_is_that_of_recent_steps_and_no_less_than_plain_decodings() -> None:
    budget = begun(CostModel({1: 1.0, 64: 1.01}))
    comparison = budget.comparison(METHOD, [ASKED, PLAIN], DRAFTER)
    assert budget.plain == pytest.approx(1 + OVERHEAD)
    for _ in range(2000):
        budget.observe(comparison, 3, 1.5, True)
    assert budget.rate(comparison) == pytest.approx(2.0, rel=0.02)
    for _ in range(2000):
        budget.observe(comparison, 1, 4.0, True)
    assert budget.rate(comparison) >= 1 / budget.plain


def test_a_guess_follows_what_calls_and_rows_cost() -> None:
    def mode(call: float, row: float) -> str:
        budget = begun(CostModel({1: 1.0, 64: 1.0 + 63 * row}))
        for _ in range(2):
            budget.cost.observe_call(DRAFTER, 1, call)
        return budget.comparison(METHOD, [ASKED, UNASKED, PLAIN], DRAFTER).mode

    assert mode(0.1, 0.01) == ASKED and mode(0.9, 0.01) == UNASKED and mode(0.9, 0.5) == PLAIN


# --- a number of nodes ----------------------------------------------------------------------------


@examples(50, derandomize=True)
@given(
    st.integers(0, 4), st.lists(st.lists(st.integers(1, 63), max_size=6), min_size=1, max_size=5)
)
def test_expected_tokens_come_to_what_smaller_trees_would_have_emitted(
    situation: int, paths: list[list[int]]
) -> None:
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


def test_the_number_of_nodes_follows_what_was_accepted_and_what_it_costs() -> None:
    def first(cost: CostModel, situation: int = 0, **step: int) -> int:
        budget = begun(cost, **step)
        return budget.nodes(METHOD, situation, step.get("many", 1) / budget.plain, None)

    assert first(CostModel({1: 1.0, 64: 1.01})) == MAX_NODES
    assert first(CostModel({1: 1.0, 64: 64.0})) == 1
    longer = CostModel({1: 1.0, 64: 1.01}, {1: 0.0, 64: 0.1})
    assert first(longer, 0) > first(longer, 0, context=10_000)
    cost = CostModel({1: 1.0, 32: 1.05, 64: 2.1, 128: 4.2})
    full = [first(cost, 3, many=many, nodes=16) for many in (1, 2, 4, 32)]
    assert full == sorted(full, reverse=True) and full[0] >= 16 and full[-1] == 1
    assert first(cost, 3, prompts=60) < full[0]  # beside a prompt that is read
    budget = begun(CostModel({1: 1.0, 8: 1.2, 64: 4.0}))
    for _ in range(100):
        nodes = budget.nodes(METHOD, 3, 1.0, None)
        budget.observe_tree(METHOD, 3, nodes, list(range(min(nodes, 12))))  # a repetition
        budget.observe_tree(METHOD, 0, budget.nodes(METHOD, 0, 1.0, None), [0])  # new text
        budget.begin({0: 0}, {})
    assert budget.nodes(METHOD, 3, 1.0, None) in (12, 16)
    assert budget.nodes(METHOD, 0, 1.0, None) <= 2
    assert Budget(CostModel({1: 1.0, 64: 1.01}), 12).nodes(METHOD, 4, 1.0, None) == 12


@pytest.mark.parametrize("call", [0.0, 0.5, 4.0, 100.0])
def test_the_number_chosen_is_the_best_with_drafting_counted(call: float) -> None:
    """Trees as deep as the square root of their budget, a call of the drafter (`call` seconds) a
    layer, 8 in 10 layers accepted."""
    rng, budget, chosen = random.Random(0), begun(CostModel({1: 11.0, 64: 15.0})), list[int]()

    def depth(nodes: int) -> int:
        return round(nodes**0.5) if nodes > 1 else 0

    def seconds(nodes: int) -> float:
        return budget.cost.alone(nodes) + call * depth(nodes)

    def rate(nodes: int) -> float:
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
def test_the_requests_of_a_round_that_are_answered_are_the_best_choice(
    gains: list[float], first: float, more: float, rate: float
) -> None:
    def seconds(count: int) -> float:
        return first + more * (count - 1)

    def profit(answered: Sequence[bool]) -> float:
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


def test_requests_share_the_cost_of_a_call() -> None:
    def seconds(count: int) -> float:
        return 1 + 0.15 * (count - 1)

    assert worth_asking([0.9], seconds, 1.0) == [False]
    assert worth_asking([0.9, 0.1, 0.8], seconds, 1.0) == [True, False, True]  # 1.7 of 1.15
    assert worth_asking([0.9, float("inf")], seconds, 1.0) == [True, True]
    assert worth_asking([], seconds, 1.0) == []


def by_worth(rows: list[list[float]]) -> list[list[float]]:
    return [sorted(row, reverse=True) for row in rows]


@examples(200, derandomize=True)
@given(
    st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=4).map(by_worth),
    st.lists(st.floats(0, 0.3), min_size=len(WIDTHS) - 1, max_size=len(WIDTHS) - 1).map(sorted),
    st.integers(4, 60),
    st.floats(0.1, 4),
)
def test_nodes_are_shared_as_the_best_choice_of_all(
    values: list[list[float]], slopes: list[float], rows: int, rate: float
) -> None:
    """Each tree keeps its first nodes. By brute force, where each further row costs no less than
    the one before."""
    steps = [slope * (b - a) for slope, (a, b) in zip(slopes, pairwise(WIDTHS), strict=True)]
    passes = itertools.accumulate(steps, initial=1.0)
    budget = Budget(CostModel(dict(zip(WIDTHS, passes, strict=True))))

    def profit(kept: Sequence[int]) -> float:
        expected = sum(sum(row[:count]) for row, count in zip(values, kept, strict=True))
        return expected - rate * budget.cost.alone(rows + sum(kept))

    kept = budget.share(values, rows, rate)
    assert all(0 <= count <= len(row) for count, row in zip(kept, values, strict=True))
    assert profit(kept) == pytest.approx(
        max(map(profit, itertools.product(*(range(len(row) + 1) for row in values))))
    )


def test_steps_of_the_cost_are_filled() -> None:
    """16 rows cost as much as 9, as tiles of a kernel do: where half of them is worth it, all
    are."""
    budget = Budget(CostModel({1: 1.0, 8: 1.0, 9: 2.0, 16: 2.0, 17: 9.0, 64: 200.0}))
    kept = budget.share([[0.3, 0.2, 0.2], [0.25, 0.2, 0.2], [0.2, 0.2, 0.2]], 8, 1.0)
    assert sum(kept) == 8 and kept[:2] == [3, 3]
    assert budget.share([[0.1] * 20, [0.05]], 8, 1.0) == [0, 0]
    assert budget.share([[0.3, 0.2], [0.3]], 1, 1.0) == [2, 1] and budget.share([], 1, 1.0) == []
