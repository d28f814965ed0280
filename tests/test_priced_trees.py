"""Trees whose nodes and calls have prices, and how likely proposals are accepted."""

import random
from dataclasses import replace
from statistics import mean

import pytest

from drafters import context_of, tree_of, zipf_drafter
from quickbeam.drafters.base import MarginalCost
from quickbeam.methods import make_method
from quickbeam.methods.acceptance import (
    REPEATED,
    AcceptanceModel,
    as_printed,
    drafted,
    drawn,
    elsewhere,
)
from quickbeam.methods.dyspec import DySpec


def flat(node, nodes=64, explore=False):
    return replace(MarginalCost.of_passes([1, nodes], [0.0, node * (nodes - 1)]), explore=explore)


def test_what_promises_too_little_is_not_asked_for():
    drafter = zipf_drafter()
    policy = DySpec(drafter, as_printed)
    context, calls = context_of([0], 0.0), []
    context.marginal_cost = flat(0.02)
    for call in (0.0, 0.05, 0.2, 0.5, 0.7):
        policy.calls = type(policy.calls)()
        before = drafter.rounds
        tree = tree_of(policy, context, 64, 20, call)
        calls.append(drafter.rounds - before)
        assert (len(tree) == 1) == (calls[-1] == 0)
    assert calls == sorted(calls, reverse=True) and calls[0] > calls[2] > 0 == calls[-1]
    context.marginal_cost = flat(0.02, explore=True)
    assert len(tree_of(policy, context, 64, 20, call=0.7)) > 1 and len(drafter.calls) == 1
    tree_of(policy, context_of([0], 0.0), 8, 20, call=0.7)  # without prices, the paper's own
    assert len(drafter.calls) > 1


def test_only_the_first_call_of_a_block_drafter_costs_anything():
    rounds, sizes = [], []
    for one_call in (False, True):
        drafter = zipf_drafter()
        drafter.one_call = one_call
        context = context_of([0], 0.0)
        context.marginal_cost = flat(0.02)
        policy = DySpec(drafter, as_printed)
        sizes.append(len(tree_of(policy, context, 64, 20, call=0.3)))
        rounds.append(drafter.rounds)
        assert len(tree_of(policy, context, 64, 20, call=9.0)) == 1  # that one is too slow
        assert drafter.rounds == rounds[-1]
    assert 0 < rounds[0] < rounds[1] and sizes[0] < sizes[1]


def test_a_drafter_that_is_never_right_ends_nothing():
    policy, context = DySpec(zipf_drafter(), as_printed), context_of([0], 0.0)
    for _ in range(60_000):
        policy.calls.observe(0, 1.0, 2)
    context.marginal_cost = flat(0.02, explore=True)
    assert len(tree_of(policy, context, 64, 20, call=0.1)) >= 1


@pytest.mark.parametrize("name", ["pld", "logitspec"])
def test_free_trees_hold_what_is_worth_its_cost_and_learn(name):
    policy, sizes = make_method(name), list[int]()
    context = context_of([5, 9, 2, 7, 1, 8, 3] * 3, 0.0).begin(policy.sources)
    for node in (0.001, 0.1, 0.3, 0.7):
        context.marginal_cost = flat(node)
        tree = tree_of(policy, context, 64, 20)
        assert len(tree_of(policy, context, 64, 0)) == 1
        assert all(value > node for value in tree.value[1:])
        sizes.append(len(tree))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > 1
    for _ in range(300):  # the text goes on differently each time
        growth = policy.grow(context, 64, 20)
        with pytest.raises(StopIteration) as end:
            next(growth)
        end.value.value.learn(end.value.value.tree, [0])
    assert len(end.value.value.tree) == 1


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_what_is_accepted_is_learned_where_it_was_seen(rate):
    model, rng = AcceptanceModel(), random.Random(3)
    for _ in range(4000):
        accepted = rng.random() < rate
        model.observe(drawn(1, rng.uniform(0.3, 0.6)), accepted)
        model.observe(elsewhere(REPEATED, 5), accepted)
        model.observe(as_printed(0, 0.5), accepted)
    near = pytest.approx(rate, abs=0.06)
    assert mean(model.rate(drawn(1, x)) for x in (0.31, 0.45, 0.59)) == near
    assert model.rate(elsewhere(REPEATED, 4)) == near
    others = drawn(0, 0.45), drawn(1, 0.2), drafted(1, 0.45), as_printed(0, 0.5)
    for other in (*others, elsewhere(REPEATED, 3)):
        assert model.rate(other) == other.usual
    agreed = elsewhere(REPEATED, 4).given(True)
    assert model.rate(agreed) == agreed.usual
