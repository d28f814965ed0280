"""What passes and calls cost, by the time they took; which nodes and calls are worth it; and which
kinds of steps go on."""

import contextlib
import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import before, examples, refuses
from models import tiny
from quickbeam.engine.budget import ASKED, FREE, PLAIN, MeasuredBudget, convex_slopes
from quickbeam.engine.cost import CostModel
from quickbeam.engine.measuring import measure
from quickbeam.models.cache.kv import OutOfPages
from quickbeam.models.opening import make_model


def test_cost_is_interpolated():
    cost = CostModel({1: 1.0, 3: 2.0, 8: 4.0})
    assert [cost.of_pass(n) for n in (1, 2, 3, 8, 16)] == [1.0, 1.5, 2.0, 4.0, 8.0]
    longer = CostModel({1: 1.0, 8: 2.0}, {1: 0.01, 8: 0.3})
    assert [longer.of_context(n, 100) for n in (1, 8)] == pytest.approx([1.0, 30.0])
    refuses("no cost", CostModel, {}, error=ValueError)


def test_calls_are_followed_from_the_second_on():
    cost = CostModel({1: 2.0})
    assert cost.of_call("d", 1) == pytest.approx(cost.CALL * 2.0)
    cost.observe_call("d", 1, 50.0)  # weights were packed in it
    assert cost.of_call("d", 1) == pytest.approx(cost.CALL * 2.0)
    cost.observe_call("d", 1, 1.5)
    assert cost.of_call("d", 1) == 1.5 < cost.of_call("d", 8)
    cost.observe_call("d", 8, 4.0)
    assert [cost.of_call("d", n) for n in (1, 8)] == [1.5, 4.0]
    for _ in range(20):
        cost.observe_call("d", 1, 6.0)
    assert cost.of_call("d", 1) == pytest.approx(6.0, rel=0.2)
    assert cost.of_reading("d", 40) == pytest.approx(40 * cost.READ * cost.of_call("d", 1))


def test_passes_are_measured_within_the_memory(monkeypatch):
    measured = measure(make_model(tiny("qwen3", seed=5)), 16)
    assert all(measured.of_pass(n) > 0 and measured.of_context(n, 50) >= 0 for n in (1, 5, 16, 40))
    model = make_model(tiny("qwen3", torch.float32, seed=5))
    pool, limits = model.pool, set[int | None]()
    pool.limit, pool.evict = 2, lambda: pytest.fail("nothing is to be given up")
    held = pool.new()
    held.reserve(2 * pool.page)

    def watched(batch):
        limits.add(pool.limit)
        if len(limits) > 1 or broken:
            raise RuntimeError

    before(monkeypatch, model, "forward", watched)
    for broken in (False, True):
        with pytest.raises(RuntimeError) if broken else contextlib.nullcontext():
            measure(model, 8)
        assert (limits, pool.limit, pool.used) == ({2}, 2, 2)
        pool.evict = lambda: False
        with pytest.raises(OutOfPages):
            pool.new().reserve(1)
    held.release()


def test_a_machine_that_is_busy_at_first_is_measured_while_it_is_not(monkeypatch):
    model, ticks = make_model(tiny("qwen3", torch.bfloat16, seed=5)), itertools.count(1)
    # the first nine readings of the clock are far apart
    monkeypatch.setattr("time.perf_counter", lambda: (tick := next(ticks)) / 1000 + min(tick, 9))
    measured = measure(model, 16)
    assert all(measured.of_pass(n) < 0.005 for n in (1, 4, 8, 16))
    assert all(measured.of_context(n, 1024) < 0.005 for n in (1, 16))


@pytest.mark.parametrize("wrong", [0.03, 1.0, 30.0])
def test_passes_that_were_measured_wrong_are_followed(wrong):
    passes = {1: 1.0, 8: 2.0, 32: 6.0}
    rng, true = random.Random(3), CostModel(passes)
    cost = CostModel({n: wrong * at for n, at in passes.items()})
    for _ in range(100):
        rows = rng.choice([1, 4, 8, 12])
        cost.observe_pass(rows, true.of_pass(rows) * rng.uniform(0.9, 1.1))
    for rows in (1, 4, 8, 12):
        assert cost.of_pass(rows) == pytest.approx(true.of_pass(rows), rel=0.35)


@pytest.mark.parametrize("wrong", [0.03, 1.0, 30.0])
def test_what_a_text_adds_to_a_pass_is_followed(wrong):
    passes, per_token = {1: 1.0, 8: 2.0, 32: 6.0}, {1: 0.001, 32: 0.003}
    rng, true = random.Random(3), CostModel(passes, per_token)
    cost = CostModel(passes, {n: wrong * at for n, at in per_token.items()})

    def seconds(model, rows, context):
        return model.of_pass(rows) + model.of_context(rows, context)

    for _ in range(3000):
        rows, context = rng.choice([1, 4, 8, 12]), rng.choice([50, 500, 4000])
        took = seconds(true, rows, context) * rng.uniform(0.9, 1.1)
        cost.observe_pass(rows, took, cost.of_context(rows, context))
    for rows, context in itertools.product([1, 8, 12], [50, 500, 4000]):
        known = seconds(cost, rows, context)
        assert known == pytest.approx(seconds(true, rows, context), rel=0.35)


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_machine_that_changes_is_followed_within_20_passes(speed):
    cost = CostModel({1: 1.0, 8: 2.0, 32: 6.0})
    for _ in range(20):
        cost.observe_pass(4, CostModel({1: 1.0, 8: 2.0}).of_pass(4) / speed)
    assert cost.of_pass(4) == pytest.approx((1 + 3 / 7) / speed, rel=0.2)
    # what was not used meanwhile follows halfway
    assert (cost.of_pass(32) - 6.0) * (6.0 / speed - 6.0) > 0


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_rows_that_begin_to_cost_are_followed_within_20_passes(noise):
    def cost_of_rows(cost):
        return (cost.of_pass(4) - cost.of_pass(1)) / 3 / cost.of_pass(1)

    rng, cheap = random.Random(3), CostModel({1: 1.0, 4: 1.0, 8: 2.0})
    slow = CostModel({1: 1.0, 4: 1.48, 8: 2.5})
    cost = CostModel({1: 1.0, 4: 1.0, 8: 2.0})
    for true, passes in (cheap, 200), (slow, 20):
        for step in range(passes):
            rows = 1 + step % 4
            cost.observe_pass(rows, true.of_pass(rows) * math.exp(rng.gauss(0, noise)))
            assert true is slow or cost_of_rows(cost) == pytest.approx(0, abs=0.03)
    assert cost_of_rows(cost) == pytest.approx(0.16, rel=0.25)


def test_a_slow_pass_now_and_then_changes_little():
    cost = CostModel({1: 1.0, 8: 2.0})
    for step in range(200):
        cost.observe_pass(1, 50.0 if step % 50 == 0 else 1.0)
        assert cost.of_pass(1) < 1.2


widths = st.lists(st.floats(0.1, 9), min_size=5, max_size=5)


@examples(200, derandomize=True)
@given(widths)
def test_costs_of_nodes_never_fall_and_add_up_to_a_pass_at_most(seconds):
    sizes = [1, 2, 4, 8, 16]
    seconds = list(itertools.accumulate(seconds))
    slopes = convex_slopes(sizes, seconds)
    assert slopes == sorted(slopes) and len(slopes) == 16
    below = [seconds[0] + sum(slopes[:size]) for size in sizes]
    assert all(a <= b + 1e-9 for a, b in zip(below, seconds, strict=True))
    assert below[-1] == pytest.approx(seconds[-1])


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

    budget = MeasuredBudget(CostModel({1: 1.0}))
    budget.rate, budget.cost.of_call = rate, lambda drafter, count: seconds(count)
    best = max(map(profit, itertools.product([False, True], repeat=len(gains))))
    assert profit(budget.worth_asking("drafter", gains)) == pytest.approx(best)


def steps(budget, count, many, kinds, setting="a method"):
    """Run steps of `many` sequences, and return their kinds. `kinds`: tokens and seconds of a step,
    by those of a plain one. The tokens vary, and the machine is slow now and then."""
    chosen, rng = list[str](), random.Random(1)
    for _ in range(count):
        budget.begin(setting, many, 100 * many, many, 0, "drafter")
        chosen.append(budget.kind)
        gain, seconds = kinds[budget.kind]
        tokens = many + sum(2 * (rng.random() < (gain - 1) / 2) for _ in range(many))
        seconds *= 20.0 if rng.random() < 0.01 else rng.uniform(0.9, 1.1)
        budget.observe(tokens, 1.1 * seconds, 0.0, budget.kind == ASKED)
    return chosen


SLOW = {PLAIN: (1.0, 1.0), FREE: (1.2, 1.5), ASKED: (1.4, 1.9)}
FAST = {PLAIN: (1.0, 1.0), FREE: (1.2, 1.05), ASKED: (1.9, 1.2)}


@pytest.mark.parametrize("many", [2, 4, 16, 64])
@pytest.mark.parametrize(
    ("kinds", "fastest"),
    [
        (SLOW, PLAIN),
        (FAST, ASKED),
        ({PLAIN: (1.0, 1.0), FREE: (1.4, 1.05), ASKED: (1.9, 1.9)}, FREE),
        ({PLAIN: (1.0, 1.0), FREE: (1.05, 1.25), ASKED: (1.3, 1.7)}, PLAIN),
    ],
)
def test_the_fastest_kind_of_step_goes_on(many, kinds, fastest):
    chosen = steps(MeasuredBudget(CostModel({1: 1.0, 256: 1.5})), 3000, many, kinds)
    assert chosen[1500:].count(fastest) > 0.9 * 1500
    assert chosen[300:600].count(fastest) > 0.7 * 300  # decided early
    # the others are tried seldom, but never given up
    assert all(chosen.count(kind) > 3 for kind in kinds)


def test_a_change_of_what_is_faster_is_found():
    budget = MeasuredBudget(CostModel({1: 1.0, 64: 1.5}))
    steps(budget, 500, 8, SLOW)
    assert budget.fastest == PLAIN
    assert steps(budget, 4000, 8, FAST)[-500:].count(ASKED) > 450


def test_loads_and_settings_are_known_by_themselves():
    budget = MeasuredBudget(CostModel({1: 1.0, 64: 1.5}))
    steps(budget, 500, 4, SLOW)

    def fastest(sequences, setting="a method"):
        budget.begin(setting, sequences, drafter="drafter")
        return budget.fastest

    assert fastest(4) == PLAIN
    assert fastest(1) == ASKED  # there the tree alone decides
    assert fastest(4, "another") == fastest(5) == FREE
    steps(budget, 500, 16, SLOW)
    assert fastest(16) == fastest(15) == PLAIN


def test_steps_of_many_begin_with_what_their_rows_lead_one_to_expect():
    for steep, kind in ((1.1, FREE), (64.0, PLAIN)):
        budget = MeasuredBudget(CostModel({1: 1.0, 64: steep}))
        budget.begin("a method", 8, drafter="drafter")
        assert budget.kind == kind


def test_a_trial_that_begins_with_much_reading_comes_later():
    def first_trial(unread):
        budget = MeasuredBudget(CostModel({1: 1.0, 64: 3.0}))
        for step in itertools.count():
            budget.begin("a method", 8, drafter="drafter", unread=lambda: unread)
            if budget.kind == ASKED:
                return step
            budget.observe(8, budget.cost.of_pass(8), 0.0, asked=False)

    # a token is guessed to take 0.04 of a pass of one row, and no more than 1 % may be lost
    plain = CostModel({1: 1.0, 64: 3.0}).of_pass(8)
    assert first_trial(0) <= MeasuredBudget.EXPLORE + 1
    assert first_trial(30) == pytest.approx(30 * 0.04 / plain / MeasuredBudget.LOST, rel=0.1)
    assert first_trial(10**6) in range(MeasuredBudget.LONGEST, MeasuredBudget.LONGEST + 2)


def test_dear_rows_are_not_taken_and_cheap_ones_are():
    steep, flat = (
        MeasuredBudget(CostModel({1: 1.0, 64: 64.0})),
        MeasuredBudget(CostModel({1: 1.0, 64: 1.1})),
    )
    for budget in (steep, flat):
        budget.begin("a method")
    assert min(steep.node_costs()[1:]) >= 0.99 and max(flat.node_costs()) < 0.01
    # with more tokens a second, time is worth more
    before = steep.node_costs()[1]
    for _ in range(500):
        steep.begin("a method")
        steep.observe(3, 1.0, 0.0, True)
    steep.begin("a method")
    assert steep.node_costs()[1] == pytest.approx(3 * before, rel=0.2)


def test_a_lone_answer_soon_has_a_rate_of_its_own():
    budget = MeasuredBudget(CostModel({1: 1.0, 64: 64.0}))

    def rate_after(steps, answer, tokens, sequences=1):
        for _ in range(steps):
            budget.begin("a method", sequences, answer=answer)
            budget.observe(tokens * sequences, 1.0, 0.0, True)
        budget.begin("a method", sequences, answer=answer)
        return budget.rate

    assert rate_after(500, 1, 8) == pytest.approx(8, rel=0.2)
    assert rate_after(0, 2, 0) == pytest.approx(8, rel=0.2)  # what others brought comes first
    assert rate_after(24, 2, 1.5) < 3
    assert rate_after(24, 2, 8) == pytest.approx(5, rel=0.2)  # an answer's steps count alike
    # it counts no step of others again, though several have run meanwhile
    before = rate_after(0, 2, 0)
    rate_after(1, 3, 2, sequences=2)
    assert rate_after(0, 2, 0) == before


@pytest.mark.parametrize("call", [0.1, 1.0, 5.0])
def test_exploring_is_bounded(call):
    """It takes about 1 % of the time at most, one sequence in a step, and never ends."""
    budget, explored, steps = MeasuredBudget(CostModel({1: 1.0, 64: 1.0})), 0, 5000
    for _ in range(steps):
        budget.begin("a method")
        tries = [budget.explore(call) for _ in range(2)]
        assert sum(tries) <= 1
        explored += sum(tries)
        budget.observe(1, 1.0, 0.0, any(tries))
    assert 0 < explored * call <= 1.1 * budget.LOST * steps
    assert explored <= steps / budget.EXPLORE


def test_a_drafter_whose_cost_is_not_known_is_asked_at_once():
    budget, tried = MeasuredBudget(CostModel({1: 1.0, 64: 1.0})), list[bool]()
    for _ in range(40):
        budget.begin("auto", drafter="drafter")
        tried.append(budget.explore(0.1))
        if tried[-1]:
            budget.cost.observe_call("drafter", 1, 0.1)
        budget.observe(1, 1.0, 0.0, asked=tried[-1])
    known = 1 + CostModel.FIRST_CALLS  # the first one does not count
    assert tried == [True] * known + [False] * 32 + [True] + [False] * (7 - known)


def test_one_slow_call_among_the_first_does_not_decide():
    cost = CostModel({1: 1.0})
    for seconds in (9.0, 8.0, 0.3, 0.25):  # packing, a busy moment, then as always
        assert not cost.knows_call("drafter")
        cost.observe_call("drafter", 1, seconds)
    assert cost.knows_call("drafter") and cost.of_call("drafter") == 0.25


def test_steps_of_another_setting_put_off_no_trial():
    budget = MeasuredBudget(CostModel({1: 1.0, 64: 1.0}))
    tried = 0
    for step in range(8 * budget.EXPLORE):
        setting = ("recycling", "auto")[step % 2]
        budget.begin(setting)
        explore = setting == "auto" and budget.explore(0.1)
        tried += explore
        budget.observe(1, 1.0, 0.0, asked=explore or setting == "recycling")
    assert 2 <= tried <= 4


def test_an_explored_tree_costs_nothing_and_is_small():
    budget = MeasuredBudget(CostModel({1: 1.0, 64: 64.0}))
    costs = budget.node_costs(explore=True)
    assert set(costs) == {0.0} and len(costs) == budget.EXPLORED_NODES
