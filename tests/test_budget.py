"""One budget for all sequences: its parts by hand and against brute force.
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
from loads import ME, METHOD, alone, crowd
from quickbeam.engine.budget import MOST, OVERHEAD, Budget, Expected, Load, NodePrices, Rate
from quickbeam.engine.cost import WIDTHS, CallCost, CostModel


def test_drafters_read_along_until_no_call_was_worth_its_time_for_long() -> None:
    budget = Budget(CostModel({1: 0.01, 64: 0.02}))
    assert budget.drafts(METHOD, 16)  # nothing is known
    rate = budget.rate(METHOD, crowd(15))
    for step in range(Rate.REST):
        assert budget.drafts(METHOD, 16) and budget.drafts(METHOD, 17), step
        rate.trial(1.0, 0.01)
    assert not budget.drafts(METHOD, 16)
    assert budget.drafts(METHOD, 1) and budget.drafts("another", 16)  # records of their own
    rate.worth_a_call()
    assert budget.drafts(METHOD, 16)


def test_what_is_unread_makes_no_pause_between_trials_endless() -> None:
    """A token takes longer to read than a step may spend, so reading grows faster than the
    pause allows for it."""
    rate, trials = Rate(1.0, 1.0), list[int]()
    for step in range(1000):
        unread = step - trials[-1] if trials else 0
        if rate.trial(0.1, 1.0, 0.1 * unread) and step >= Rate.FIRST:
            trials.append(step)
    assert {b - a for a, b in pairwise(trials)} == {Rate.LONGEST}


# --- prices of nodes ------------------------------------------------------------------------------


def test_steps_in_the_cost_are_spread_over_their_nodes() -> None:
    prices = NodePrices([1, 2, 8, 16], [1.0, 2.0, 2.0, 6.0])
    assert [prices.node(n) for n in (1, 2, 7, 8, 15)] == pytest.approx([1 / 7] * 3 + [0.5] * 2)
    assert prices.node(16) == prices.node(1000) == float("inf")
    assert NodePrices([1, 2], [1.0, 0.5]).node(1) == 0  # measured so: wider is no dearer
    assert NodePrices([1], [1.0]).node(1) == float("inf")


@examples(100, derandomize=True)
@given(
    st.lists(st.floats(0, 4), min_size=1, max_size=8),
    st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
def test_prices_are_the_slopes_of_the_largest_convex_bound(
    more: list[float], gaps: list[int]
) -> None:
    widths = list(itertools.accumulate(gaps[: len(more)], initial=1))
    passes = list(itertools.accumulate(more, initial=1.0))
    prices, total = NodePrices(widths, passes), passes[0]
    below = {1: total}
    for n in range(1, widths[-1]):
        total += prices.node(n)
        below[n + 1] = total
    assert all(a <= b + 1e-9 for a, b in pairwise(prices.node(n) for n in range(1, widths[-1])))
    for n, bound in below.items():  # by brute force: the lowest chord over n
        chords = [
            passes[i] if a == b else passes[i] + (passes[j] - passes[i]) * (n - a) / (b - a)
            for (i, a), (j, b) in itertools.product(enumerate(widths), repeat=2)
            if a <= n <= b
        ]
        assert bound == pytest.approx(min(chords), abs=1e-6)


def test_prices_are_what_time_gave_of_late() -> None:
    budget = Budget(CostModel({1: 1.0, 64: 64.0}))
    plan = budget.prices(ME, METHOD, alone())
    assert plan.nodes == MOST and plan.prices is not None and not plan.measured
    assert budget.rate(METHOD, alone()).rate == pytest.approx(1.0, rel=0.01) and plan.prices.node(
        1
    ) == pytest.approx(1.0, rel=0.01)
    for _ in range(600):
        budget.observe([METHOD], alone(), 3, 2.0)
    assert budget.rate(METHOD, alone()).rate == pytest.approx(1.5, rel=0.01)
    held = [budget.prices(ME, METHOD, alone()).prices for _ in range(budget.HOLD)]
    assert [prices.node(1) for prices in held if prices] == pytest.approx(
        [1.0] * (budget.HOLD - 1) + [1.5], rel=0.01
    )


def test_nodes_are_dearer_behind_a_long_text_and_in_a_full_pass() -> None:
    cost = CostModel({1: 1.0, 32: 1.1, 64: 9.0}, {1: 0.0, 64: 0.1})

    def price(load: Load) -> float:
        prices = Budget(cost).prices(ME, METHOD, load).prices
        assert prices is not None
        return prices.node(1)

    assert price(alone()) < price(alone(1000))
    assert price(alone()) < price(alone(prompts=40))
    # Alone, a node that costs 1/310 of a pass; beside 40 rows, 1/4 of what 41 answers take.
    assert price(crowd(10, 4)) / 11 > 2 * price(alone())


def test_prices_are_kept_for_a_while_unless_the_pass_changes() -> None:
    budget = Budget(CostModel({1: 1.0, 32: 1.1, 64: 9.0}))
    first = budget.prices(ME, METHOD, crowd(8, 2)).prices
    assert budget.prices(ME, METHOD, crowd(9, 2)).prices is first  # about the same
    assert budget.prices(ME, METHOD, crowd(8, 6)).prices is not first
    assert (
        budget.prices(ME, METHOD, crowd(8, 6), trial=True).prices.trial
        and not budget.prices(ME, METHOD, crowd(8, 6)).prices.trial
    )
    last = budget.prices(ME, METHOD, crowd(8, 6)).prices
    budget.forget(ME)
    assert budget.prices(ME, METHOD, crowd(8, 6)).prices is not last


# --- rates and trials -----------------------------------------------------------------------------


def test_rates_are_learned_by_method_and_load() -> None:
    budget = Budget(CostModel({1: 1.0, 64: 2.0}))
    for _ in range(300):
        budget.observe([METHOD, METHOD], crowd(7), 24, 2.0)
        budget.observe([METHOD], alone(), 1, 4.0)
    assert budget.rate(METHOD, crowd(7)).rate == pytest.approx(12, rel=0.02)
    assert budget.rate(METHOD, alone()).rate == pytest.approx(0.25, rel=0.02)
    others = budget.rate("another", crowd(7))  # at first that of a plain step
    assert others.rate == pytest.approx(8 / (budget.cost.alone(8) + OVERHEAD))
    assert (
        budget.rate(METHOD, crowd(7))
        is budget.rate(METHOD, crowd(8))
        is not budget.rate(METHOD, crowd(15))
    )
    # few sequences: each number its own
    assert len({id(budget.rate(METHOD, crowd(n))) for n in range(5)}) == 5
    assert budget.best_rate(METHOD, crowd(7)) == budget.rate(METHOD, crowd(7)).rate
    # plain decoding would have given that
    assert budget.best_rate(METHOD, alone()) == pytest.approx(1 / (1 + OVERHEAD))


def test_a_sequence_alone_goes_by_a_rate_of_its_own() -> None:
    """After a text that is easy to draft comes one that is not: its calls must not seem too dear
    because the other's were worth more."""
    budget = Budget(CostModel({1: 0.01, 64: 0.02}))

    def runs(one: str, tokens: int, steps: int) -> float:
        load = Load({one: 0})
        for _ in range(steps):
            budget.best_rate(METHOD, load)
            budget.observe([METHOD], load, tokens, 0.02)
        return budget.best_rate(METHOD, load)

    assert runs("easy", 10, 300) == pytest.approx(500, rel=0.02)
    assert runs("new", 4, 0) == pytest.approx(500, rel=0.02)  # nothing else is known of it
    assert runs("new", 4, 24) == pytest.approx((8 * 500 + 24 * 200) / 32, rel=0.1)
    assert budget.rate(METHOD, Load({"new": 0})).rate > 350  # of all, for the next
    assert runs("easy", 10, 1) == pytest.approx(500, rel=0.02)
    budget.forget("easy")
    assert runs("easy", 10, 0) < 450  # another one of that name
    both = Load({"easy": 0, "new": 0})
    assert budget.best_rate(METHOD, both) == budget.rate(METHOD, both).rate


@pytest.mark.parametrize(
    ("call", "trials"), [(0.1, [0, 1, 2, 3, 35, 67, 99]), (0.8, [0, 1, 2, 3, 43, 83])]
)
def test_a_trial_now_and_then(call: float, trials: list[int]) -> None:
    """The first steps, then no sooner than 32, and with no more than a fiftieth of the time."""
    rate = Rate(1.0, 1.0)
    assert [i for i in range(100) if rate.trial(call, 1.0)] == trials


def test_the_first_steps_of_a_method_are_trials_under_its_first_load_only() -> None:
    budget = Budget(CostModel({1: 1.0, 64: 2.0}))
    assert budget.rate(METHOD, crowd(3)).trial(0.1, 1.0)
    assert not budget.rate(METHOD, crowd(15)).trial(0.1, 1.0)
    assert budget.rate("another", crowd(15)).trial(0.1, 1.0)


# --- a number of nodes ----------------------------------------------------------------------------


@examples(50, derandomize=True)
@given(
    st.integers(0, 4), st.lists(st.lists(st.integers(1, 63), max_size=6), min_size=1, max_size=50)
)
def test_estimates_are_what_smaller_trees_would_have_emitted(
    situation: int, paths: list[list[int]]
) -> None:
    expected = Expected(64)
    for path in paths:
        expected.observe(situation, 64, [0, *sorted(set(path))])
    for i, width in enumerate(expected.budgets):
        emitted = [1 + sum(node < width for node in set(path)) for path in paths]
        assert expected._emitted[situation][i] == pytest.approx(sum(emitted) / len(emitted))
    untouched = (situation + 1) % 5
    assert expected.tokens(untouched) == Expected(64).tokens(untouched)
    for _ in range(300):
        expected.observe(situation, 64, [0, 1, 6])
    assert expected.tokens(situation) == pytest.approx(
        [1 + (width > 1) + (width > 6) for width in expected.budgets], abs=0.2
    )


def test_at_first_more_is_expected_of_better_situations_and_of_more_nodes() -> None:
    expected = Expected(64)
    tokens = [expected.tokens(situation) for situation in range(5)]
    assert expected.budgets == [width for width in WIDTHS if width <= 64]
    for row in tokens:
        assert row[0] == 1 and row == sorted(row)
    for column in zip(*tokens, strict=True):
        assert list(column) == sorted(column)
    assert tokens[3] == pytest.approx([Expected.prior(3, width) for width in expected.budgets])


def test_what_was_seen_of_small_trees_is_drawn_on_for_larger_ones() -> None:
    """9 in 10 of what a node added is expected of the next."""
    expected = Expected(64)
    for _ in range(1000):
        expected.observe(3, 4, [0, 2])  # one token, by nodes 1 to 3
    tokens = dict(zip(expected.budgets, expected.tokens(3), strict=True))
    slope = (tokens[4] - tokens[2]) / 2
    assert tokens[4] == pytest.approx(2.0, abs=0.1)
    assert tokens[8] == pytest.approx(tokens[4] + slope * sum(0.9**i for i in range(1, 5)))


def test_a_tree_that_is_not_the_beginning_of_a_larger_one_tells_of_its_own_budget() -> None:
    expected = Expected(64)
    expected.observe(3, 16, [0, 1, 2], nested=False)
    assert dict(zip(expected.budgets, expected._count[3], strict=True)) == {
        width: int(width == 16) for width in expected.budgets
    }
    assert expected._emitted[3][expected.budgets.index(16)] == 3


@examples(80, derandomize=True)
@given(
    st.lists(st.floats(0, 0.6), min_size=3, max_size=3),
    st.integers(0, 4),
    st.integers(0, 4000),
    st.floats(0, 1),
    st.lists(st.integers(1, 40), max_size=6),
)
def test_the_number_of_nodes_gives_most_tokens_a_second(
    more: list[float], situation: int, context: int, drafting: float, path: list[int]
) -> None:
    cost = CostModel(
        dict(zip((1, 8, 24, 64), itertools.accumulate(more, initial=1.0), strict=True)),
        {1: 0.0, 64: 0.001},
    )
    budget, expected = Budget(cost), Expected(64)
    plan = budget.nodes(ME, METHOD, alone(context), situation)
    budget.grew(METHOD, 64, drafting)
    for _ in range(10):
        budget.learn(METHOD, plan._replace(nodes=64), [0, *sorted(set(path))], True)
        expected.observe(situation, 64, [0, *sorted(set(path))])
    budget.forget(ME)
    found = budget.nodes(ME, METHOD, alone(context), situation)
    rates = {
        width: tokens / (cost.seconds(width, context) + OVERHEAD + drafting * (width - 1) / 63)
        for width, tokens in zip(expected.budgets, expected.tokens(situation), strict=True)
    }
    assert found.measured and found.prices is None and found.situation == situation
    assert rates[found.nodes] == pytest.approx(max(rates.values()))


def test_the_number_of_nodes_follows_what_was_accepted_and_what_it_costs() -> None:
    def first(cost: CostModel, context: int = 0) -> int:
        return Budget(cost).nodes(ME, METHOD, alone(context), 0).nodes

    assert first(CostModel({1: 1.0, 64: 1.01})) == 64 and first(CostModel({1: 1.0, 64: 64.0})) == 1
    longer = CostModel({1: 1.0, 64: 1.01}, {1: 0.0, 64: 0.1})
    assert first(longer) > first(longer, 10_000)
    budget = Budget(CostModel({1: 1.0, 8: 1.2, 64: 4.0}))
    for _ in range(100):
        plan = budget.nodes(ME, METHOD, alone(), 3)
        # a repetition: 12 tokens hold
        budget.learn(METHOD, plan, list(range(min(plan.nodes, 12))), True)
        # new text beside it: nothing does
        budget.learn(METHOD, budget.nodes(ME, METHOD, alone(), 0), [0], True)
    assert budget.nodes(ME, METHOD, alone(), 3).nodes in (12, 16)
    assert budget.nodes(ME, METHOD, alone(), 0).nodes <= 2
    # what was learned is the method's
    assert budget.nodes("another", METHOD, Load({"another": 0}), 3).nodes in (12, 16)
    assert Budget(CostModel({1: 1.0, 64: 1.01}), limit=12).nodes(ME, METHOD, alone(), 4).nodes == 12


def test_trees_shrink_in_a_full_batch() -> None:
    """32 rows cost little more than one; beyond, each costs its own."""
    cost = CostModel({1: 1.0, 32: 1.05, 64: 2.1, 128: 4.2})
    found = []
    for others in (0, 3, 7, 15, 31):
        budget, nodes = Budget(cost), 1
        for _ in range(20):  # all others do as I do
            budget.forget(ME)
            nodes = budget.nodes(ME, METHOD, crowd(others, nodes), 3).nodes
            budget.observe([METHOD], crowd(others, nodes), 2 * (others + 1), 1.0)
        found.append(nodes)
    assert found == sorted(found, reverse=True) and found[0] >= 16 and found[-1] == 1
    # beside a prompt that is read
    assert Budget(cost).nodes(ME, METHOD, alone(prompts=60), 3).nodes < found[0]


def test_a_number_of_nodes_is_kept_for_a_while() -> None:
    budget = Budget(CostModel({1: 1.0, 64: 1.01}))
    found = []
    for _ in range(2 * budget.CHOICE):
        plan = budget.nodes(ME, METHOD, alone(), 0)
        found.append(plan.nodes)
        for _ in range(100):
            budget.learn(METHOD, plan, [0], True)
        budget.grew(METHOD, 64, 1e6)
    assert found[: budget.CHOICE] == [64] * budget.CHOICE and max(found[budget.CHOICE :]) < 64
    budget = Budget(CostModel({1: 1.0, 32: 1.01, 64: 2.0, 128: 8.0}))
    # where the load is another
    assert (
        budget.nodes(ME, METHOD, alone(), 4).nodes
        > 2
        >= budget.nodes(ME, METHOD, crowd(64), 4).nodes
    )
    budget.forget(ME)
    assert not budget._chosen


def test_the_time_of_growing_is_learned_by_the_number_of_nodes() -> None:
    budget = Budget(CostModel({1: 1.0}))
    assert budget._growing(METHOD, 1) == budget._growing(METHOD, 64) == 0
    for seconds in (9.0, 1.0, 1.5, 1.0):  # the first is slow
        budget.grew(METHOD, 16, seconds)
    assert [budget._growing(METHOD, n) for n in (1, 4, 16, 64)] == pytest.approx(
        [0.0, 0.2, 1.0, 2.0]
    )
    for _ in range(4):
        budget.grew(METHOD, 4, 0.8)
    assert [budget._growing(METHOD, n) for n in (4, 10, 16)] == pytest.approx([0.8, 0.9, 1.0])
    assert budget._growing("another", 16) == 0
    budget.grew(METHOD, 16, 1e9)
    assert budget._growing(METHOD, 16) < 1.06
    for _ in range(200):
        budget.grew(METHOD, 16, 3.0)
    assert budget._growing(METHOD, 16) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("call", [0.0, 0.5, 4.0, 100.0])
def test_the_number_chosen_is_the_best_with_drafting_counted(call: float, nested: bool) -> None:
    """Trees as deep as the square root of their budget, a call of the drafter (`call` seconds) a
    layer, 8 in 10 layers accepted."""
    rng, budget = random.Random(0), Budget(CostModel({1: 11.0, 64: 15.0}))

    def depth(nodes: int) -> int:
        return round(nodes**0.5) if nodes > 1 else 0

    def rate(nodes: int) -> float:
        return sum(0.8**i for i in range(depth(nodes) + 1)) / (
            budget.cost.seconds(nodes) + call * depth(nodes)
        )

    chosen = []
    for _ in range(1500):
        plan = budget.nodes(ME, METHOD, alone(), 3)
        chosen.append(plan.nodes)
        accepted = next(
            (i for i in range(depth(plan.nodes)) if rng.random() > 0.8), depth(plan.nodes)
        )
        # The node that is the i-th of the path is the first of its layer.
        path = [
            0,
            *(next(n for n in range(2, 65) if depth(n) >= i) - 1 for i in range(1, accepted + 1)),
        ]
        budget.learn(METHOD, plan, path, nested)
        if plan.nodes > 1:
            budget.grew(METHOD, plan.nodes, call * depth(plan.nodes))
    best = max(rate(width) for width in WIDTHS if width <= 64)
    assert sum(map(rate, chosen[-500:])) / 500 > (0.93 if nested else 0.85) * best
    if call == 100.0:
        assert max(chosen[-500:]) == 1


# --- which calls are made, and who gets the nodes -------------------------------------------------


gains = st.lists(st.one_of(st.floats(0, 3), st.just(float("inf"))), min_size=1, max_size=7)


@examples(200, derandomize=True)
@given(gains, st.dictionaries(st.integers(1, 7), st.floats(0.01, 2)), st.floats(0.01, 4))
def test_the_requests_of_a_round_that_are_answered_are_the_best_choice(
    gains: list[float], seen: dict[int, float], rate: float
) -> None:
    budget, call = Budget(CostModel({1: 1.0})), CallCost(1.0)
    for sequences, seconds in seen.items():
        call.observe(sequences, seconds)

    def profit(answered: Sequence[bool]) -> float:
        """Tokens, less what the call's time would have given. The infinite ones are no choice."""
        if any(math.isinf(gain) and not taken for gain, taken in zip(gains, answered, strict=True)):
            return float("-inf")
        count = sum(answered)
        brought = sum(
            gain
            for gain, taken in zip(gains, answered, strict=True)
            if taken and not math.isinf(gain)
        )
        return brought - rate * (call.seconds(count) if count else 0.0)

    found = budget.worthwhile(gains, call, rate)
    assert profit(found) == pytest.approx(
        max(map(profit, itertools.product([False, True], repeat=len(gains))))
    )


def test_requests_share_the_price_of_a_call() -> None:
    budget, call = Budget(CostModel({1: 1.0})), CallCost(1.0)
    call.observe(1, 1.0)
    assert budget.worthwhile([0.9], call, 1.0) == [False]
    assert budget.worthwhile([0.9, 0.1, 0.8], call, 1.0) == [True, False, True]  # 1.7 of 1.15
    assert (
        budget.worthwhile([0.9, float("inf")], call, 1.0) == [True, True]
        and budget.worthwhile([], call, 1.0) == []
    )


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
    budget = Budget(
        CostModel(dict(zip(WIDTHS, itertools.accumulate(steps, initial=1.0), strict=True)))
    )

    def profit(kept: Sequence[int]) -> float:
        promised = sum(sum(row[:count]) for row, count in zip(values, kept, strict=True))
        return promised - rate * budget.cost.alone(rows + sum(kept))

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
