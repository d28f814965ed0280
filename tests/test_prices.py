"""Trees that are worth their time: prices by hand, against brute force, and in a simulated engine. pytest tests/test_prices.py"""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import KnownDrafter, context_of, zipf_drafter
from quickbeam.draft.prices import Prices
from quickbeam.engine.budget import CostModel
from quickbeam.engine.market import Market
from quickbeam.tree import TokenTree
from quickbeam.trees.acceptance import Printed
from quickbeam.trees.greedy import Greedy
from toy import path_tokens

# --- prices --------------------------------------------------------------------------------------------------------------------------


def test_steps_in_the_cost_are_spread_over_their_nodes() -> None:
    prices = Prices([1, 2, 8, 16], [1.0, 2.0, 2.0, 6.0], 0.1)
    assert [prices.node(n) for n in (1, 2, 7, 8, 15)] == pytest.approx([1 / 7] * 3 + [0.5] * 2)
    assert prices.node(16) == prices.node(1000) == float("inf")
    assert Prices([1, 2], [1.0, 0.5], 0.1).node(1) == 0  # measured so: wider is no dearer
    assert Prices([1], [1.0], 0.1).node(1) == float("inf")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 4), min_size=1, max_size=8), st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_prices_are_the_slopes_of_the_largest_convex_bound(more: list[float], gaps: list[int]) -> None:
    widths = list(itertools.accumulate(gaps[: len(more)], initial=1))
    passes = list(itertools.accumulate(more, initial=1.0))
    prices, total = Prices(widths, passes, 0.0), passes[0]
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


# --- the market ----------------------------------------------------------------------------------------------------------------------


def test_prices_follow_what_time_gave_of_late() -> None:
    market = Market(CostModel({1: 1.0, 64: 64.0}), 64, overhead=0.0)
    assert market.rate == 1 and market.prices(0).call == 0.25 and market.prices(0).node(1) == pytest.approx(1.0)
    for _ in range(600):
        market.observe(3, 2.0, 2, 0.5)
    assert market.rate == pytest.approx(1.5, rel=0.01)
    prices = [market.prices(0) for _ in range(market.HOLD + 1)][-1]
    assert prices.call == pytest.approx(1.5 * 0.25, rel=0.01) and prices.node(1) == pytest.approx(1.5, rel=0.01)
    for _ in range(market.CALLS // 2):
        market.observe(3, 2.0, 2, 1e9)  # the machine was busy
    assert market.call == 0.25
    longer = Market(CostModel({1: 1.0, 64: 2.0}, {1: 0.0, 64: 0.1}), 64)
    assert longer.prices(0).node(1) < Market(longer.cost, 64).prices(1000).node(1)


def test_one_trial_is_enough_to_find_a_call_cheap_that_seemed_dear() -> None:
    market = Market(CostModel({1: 1.0}), 64)
    market.observe(1, 5.0, 1, 4.0)
    market.observe(1, 1.1, 1, 0.1)
    assert market.call == 0.1


def test_a_trial_now_and_then() -> None:
    for call, trials in ((0.1, [0, 1, 2, 3, 35, 67, 99]), (0.8, [0, 1, 2, 3, 43, 83])):
        market = Market(CostModel({1: 1.0}), 64)
        market.observe(1, 1.0, 1, call)
        assert [i for i in range(100) if market.prices(0).trial] == trials


# --- trees ---------------------------------------------------------------------------------------------------------------------------


def flat(node: float, call: float = 0.0, nodes: int = 64, trial: bool = False) -> Prices:
    return Prices([1, nodes], [0.0, node * (nodes - 1)], call, trial)


@pytest.mark.parametrize("node", [0.01, 0.03, 0.1, 0.4])
def test_a_tree_holds_every_path_that_promises_its_price(node: float) -> None:
    policy, drafter = Greedy(zipf_drafter(), Printed()), zipf_drafter()
    context = context_of([3], 0.0)
    context.prices = flat(node)
    tree = policy.grow(context, 64, 20)
    expected, layer = {}, {(): 1.0}
    while layer:  # by brute force, layer by layer
        below = {}
        for path, value in layer.items():
            for token, p in enumerate(drafter.law([3, *path]).tolist()):
                if value * p > node * 1.001:
                    below[(*path, token)] = value * p
        expected.update(below)
        layer = below
    found = {tuple(path_tokens(tree, i)): tree.value[i] for i in range(1, len(tree))}
    # Nodes whose own law finds too little are not asked for: they would cost more than they give.
    assert set(found) <= set(expected) or len(expected) > 63
    missing = sorted(value for path, value in expected.items() if path not in found)
    assert len(tree) == 64 or not missing or missing[-1] < 4 * node
    assert all(found[path] == pytest.approx(expected[path], rel=1e-4) for path in set(found) & set(expected))


def test_a_second_node_that_costs_nothing_opens_no_wider_search() -> None:
    """A pass over two tokens often takes no longer than one over one."""
    rows, sizes = [], []
    for prices in (Prices([1, 2, 64], [1.0, 1.0, 1.0 + 62 * 0.03], 0.05), flat(0.03, 0.05)):
        policy = Greedy(zipf_drafter(), Printed())
        for i in range(40):
            context = context_of([i], 0.0)
            context.prices = prices
            sizes.append(len(policy.grow(context, 64, 20)))
        rows.append(policy.rows)
    assert abs(rows[0] - rows[1]) <= 0.05 * rows[1] and rows[1] > 100
    assert sum(sizes[:40]) == pytest.approx(sum(sizes[40:]), rel=0.1)


def test_what_promises_too_little_is_not_asked_for() -> None:
    policy = Greedy(zipf_drafter(), Printed())
    context, calls = context_of([0], 0.0), []
    for call in (0.0, 0.05, 0.2, 0.5, 0.7):
        context.prices = flat(0.02, call)
        policy.promises = type(policy.promises)()
        before = policy.calls
        tree = policy.grow(context, 64, 20)
        calls.append(policy.calls - before)
        assert (len(tree) == 1) == (calls[-1] == 0)
    assert calls == sorted(calls, reverse=True) and calls[0] > calls[2] > 0 == calls[-1]
    context.prices = flat(0.02, 0.7, trial=True)
    assert len(policy.grow(context, 64, 20)) > 1 and len(policy.drafter.calls) == 1
    policy.grow(context_of([0], 0.0), 8, 20)  # without prices, the paper's own
    assert len(policy.drafter.calls) > 1


@pytest.mark.parametrize("promised", [0.0, 0.5])
def test_a_drafter_that_is_never_right_ends_nothing(promised: float) -> None:
    policy, context = Greedy(zipf_drafter(), Printed()), context_of([0], 0.0)
    for _ in range(60_000):
        policy.promises.observe(0, promised, 1.0)
    assert 0 < policy.promises.truth <= 1
    context.prices = flat(0.02, 0.1, trial=True)
    assert len(policy.grow(context, 64, 20)) >= 1


@pytest.mark.parametrize("honest", [1.0, 0.3])
@pytest.mark.parametrize(("node", "call"), [(0.2, 0.5), (0.02, 0.5), (0.02, 2.0), (1.0, 0.1), (0.2, 20.0)])
def test_no_fixed_budget_is_much_faster(node: float, call: float, honest: float) -> None:
    """A pass takes 10 and `node` for each further node, a call `call`; a drafted token is the model's with the probability that the drafter
    gives it, times `honest`."""
    ranks = torch.arange(1, 101).log()
    laws = {}

    def law(context: tuple[int, ...]) -> torch.Tensor:
        key = tuple(context[-2:])
        if key not in laws:
            rng = random.Random(str(key))
            laws[key] = (-rng.uniform(0.8, 4.0) * ranks).softmax(0).roll(rng.randrange(100))
        return laws[key]

    def run(budget: int | Market, steps: int) -> float:
        policy, rng, ids, tokens, seconds = Greedy(KnownDrafter(law)), random.Random(1), [0], 0, 0.0
        for step in range(steps):
            context, nodes, before = context_of(list(ids), 0.0), budget, policy.calls
            if isinstance(budget, Market):
                nodes, context.prices = budget.limit, budget.prices(0)
            tree = policy.grow(context, nodes, 20)
            path = walk(tree, ids, rng)
            policy.verified(tree, path)
            calls = policy.calls - before
            took = 10 + node * (len(tree) - 1) + call * calls
            if isinstance(budget, Market):
                budget.observe(len(path), took, calls, call * calls)
            if step >= steps // 3:
                tokens, seconds = tokens + len(path), seconds + took
        return tokens / seconds

    def walk(tree: TokenTree, ids: list[int], rng: random.Random) -> list[int]:
        path = [0]
        while True:
            wanted = rng.choices(range(100), law(ids).tolist())[0] if rng.random() < honest else 100
            ids.append(wanted)
            child = tree.child(path[-1], wanted)
            if child is None:
                return path
            path.append(child)

    cost = CostModel({1: 10.0, 64: 10 + 63 * node})
    best = max(run(budget, 240) for budget in (1, 2, 3, 4, 6, 8, 12, 16, 32))
    assert run(Market(cost, 64, overhead=0.0), 480) > 0.95 * best
