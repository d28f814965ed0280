"""What passes and calls cost, by the time they took; which calls are made; and which mode of a step
goes on."""

import contextlib
import itertools
import json
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import before, examples, refuses
from models import tiny
from quickbeam.engine import measuring
from quickbeam.engine.budget import ASKED, PLAIN, UNASKED, Budget, Comparison, worth_asking
from quickbeam.engine.cost import CostModel
from quickbeam.engine.measuring import WIDTHS, measure, measure_or_read
from quickbeam.models.cache.kv import OutOfPages
from quickbeam.models.opening import make_model


def test_cost_is_interpolated_and_measured_within_the_memory(monkeypatch):
    cost = CostModel({1: 1.0, 3: 2.0, 8: 4.0})
    assert [cost.alone(n) for n in (1, 2, 3, 8, 16)] == [1.0, 1.5, 2.0, 4.0, 8.0]
    longer = CostModel({1: 1.0, 8: 2.0}, {1: 0.01, 8: 0.3})
    assert [longer.reading(n, 100) for n in (1, 8)] == pytest.approx([1.0, 30.0])
    refuses("no cost", CostModel, {}, error=ValueError)
    many = CostModel({1: 1.0, 8: 2.0}, {1: 0.01}, per_sequence=0.5)
    assert [many.alone(8, n) for n in (1, 2, 5)] == [2.0, 2.5, 4.0]
    measured = measure(make_model(tiny("qwen3", seed=5)), 16)
    assert all(measured.alone(n) > 0 and measured.reading(n, 50) >= 0 for n in (1, 5, 16, 40))
    cost = CostModel({1: 2.0})
    cost.observe_call("d", 1, 50.0)  # weights were packed in it
    assert cost.call("d", 1) == pytest.approx(cost.CALL * 2.0)
    cost.observe_call("d", 1, 1.5)
    assert cost.call("d", 1) == 1.5
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


def test_what_was_measured_is_kept_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    model = make_model(tiny("qwen3", torch.bfloat16, seed=5))
    measure_or_read(model, 16)
    assert not list(tmp_path.iterdir())  # a small model
    model.weight_bytes, ticks = 2**30, itertools.count(1)
    with monkeypatch.context() as patch:  # a clock by which no pass takes as long as another
        patch.setattr("time.perf_counter", lambda: next(ticks) ** 1.02 / 1000)
        first = measure_or_read(model, 16)
        patch.setattr(measuring, "measure", None)
        second = measure_or_read(model, 16)
    for rows in (1, 5, 16, 40):
        assert second.alone(rows, 3) == first.alone(rows, 3) > first.alone(rows)
        assert second.reading(rows, 100) == first.reading(rows, 100) > 0
    (kept,) = (tmp_path / "costs").iterdir()
    passes, tokens, sequence = json.loads(kept.read_text())
    slow = {rows: at * (1 if int(rows) < 8 else 40) for rows, at in passes.items()}
    far = {nodes: 40 * passes["1"] / 1024 for nodes in tokens}
    for busy in ([slow, tokens, sequence], [passes, far, sequence]):
        kept.write_text(json.dumps(busy))
        with monkeypatch.context() as patch:  # a clock by which all passes take as long
            patch.setattr("time.perf_counter", lambda: next(ticks) / 1000)
            again = measure_or_read(model, 16)
        assert again.alone(8) + again.reading(8, 1024) < 20 * again.alone(1)
    for broken in ("{", "[1]", "[{}, {}, 0]"):
        kept.write_text(broken)
        assert measure_or_read(model, 16).alone(1) > 0
    measure_or_read(model, 8)  # other trees
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_a_machine_that_is_busy_most_of_the_time_is_measured_while_it_is_not(monkeypatch):
    model, ticks = make_model(tiny("qwen3", torch.bfloat16, seed=5)), itertools.count(1)

    def clock():  # three of five ticks are ten times as long
        tick = next(ticks)
        return tick / 1000 + tick * 3 // 5 * 0.01

    monkeypatch.setattr("time.perf_counter", clock)
    measured = measure(model, 16)
    assert all(measured.alone(n) < 0.005 and measured.reading(n, 1024) < 0.005 for n in (1, 8, 16))


@pytest.mark.parametrize("wrong", [0.03, 1.0, 30.0])
def test_what_a_text_adds_to_a_pass_is_followed(wrong):
    rng, true = random.Random(3), CostModel({1: 1.0, 8: 2.0, 32: 6.0}, {1: 0.001, 32: 0.003})
    cost = CostModel(true.seconds, {n: wrong * at for n, at in true.per_token.items()})

    def seconds(model, rows, context):
        return model.alone(rows) + model.reading(rows, context)

    for _ in range(3000):
        rows, context = rng.choice([1, 4, 8, 12]), rng.choice([50, 500, 4000])
        took = seconds(true, rows, context) * rng.uniform(0.9, 1.1)
        cost.observe(rows, took, cost.reading(rows, context))
    for rows, context in itertools.product([1, 8, 12], [50, 500, 4000]):
        known = seconds(cost, rows, context)
        assert known == pytest.approx(seconds(true, rows, context), rel=0.35)


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

    best = max(map(profit, itertools.product([False, True], repeat=len(gains))))
    assert profit(worth_asking(gains, seconds, rate)) == pytest.approx(best)


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
    chosen = compared(Comparison({mode: MODES[mode] for mode in modes}), 3000, many, modes)
    assert chosen[1500:].count(fastest) > 0.9 * 1500
    assert chosen[300:600].count(fastest) > 0.7 * 300  # decided early


def test_loads_are_compared_by_themselves_and_begin_with_what_their_neighbours_gave():
    budget = Budget(CostModel({1: 1.0, 64: 1.5}))
    assert Budget(CostModel(dict.fromkeys(WIDTHS, 1.0))).marginal_cost(1.0).passes
    assert not budget.marginal_cost(1.0).passes

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
    # what a call brings is explored once, whatever the load
    assert of(4, "a third").explores(0.1, 0.0) and not of(8, "a third").explores(0.1, 0.0)
