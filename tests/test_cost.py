"""What passes and calls cost, by the time they took.
pytest tests/test_cost.py"""

from __future__ import annotations

import pytest
import torch

from loads import METHOD
from models import tiny
from quickbeam.engine.budget import Budget
from quickbeam.engine.cost import CallCost, CostModel
from quickbeam.models.batch import Batch, Passed
from quickbeam.models.kv_cache import NoRoom
from quickbeam.models.model import Model
from quickbeam.tree import TokenTree

# --- the cost of a pass ---------------------------------------------------------------------------


def test_cost_is_interpolated_and_measured() -> None:
    cost = CostModel({1: 1.0, 3: 2.0, 8: 4.0})
    assert (
        [cost.seconds(n) for n in (1, 2, 3, 8, 16)]
        == [cost.alone(n) for n in (1, 2, 3, 8, 16)]
        == [1.0, 1.5, 2.0, 4.0, 8.0]
    )
    longer = CostModel({1: 1.0, 8: 2.0}, {1: 0.01, 8: 0.3})
    assert [longer.seconds(n, 100) for n in (1, 8)] == pytest.approx([2.0, 32.0])
    assert [longer.reading(n, 100) for n in (1, 8)] == pytest.approx([1.0, 30.0])
    with pytest.raises(ValueError, match="no cost"):
        CostModel({})
    many = CostModel({1: 1.0, 8: 2.0}, {1: 0.01}, per_sequence=0.5, beside=0.25)
    assert [many.alone(8, n) for n in (1, 2, 5)] == [2.0, 2.5, 4.0]
    assert [many.reading(1, 100, n) for n in (1, 2, 1000)] == pytest.approx(
        [1.0, 0.5, 0.25], rel=0.01
    )
    measured = CostModel.measure(Model(tiny("qwen3", seed=5)), 16, repeats=1)
    assert measured._per_sequence >= 0 and 0 <= measured._beside <= 1
    assert all(
        measured.seconds(n) > 0 and measured.seconds(n, 50) >= measured.alone(n)
        for n in (1, 5, 16, 40)
    )


@pytest.mark.parametrize("gathered", [False, True])
def test_measuring_is_not_bound_by_the_memory_limit(
    gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds before, after, and meanwhile for all who look at it; nothing that is kept is
    given up for it."""
    model = Model(tiny("qwen3", torch.float32, seed=5), gathered=gathered)
    pool, limits, forward = model.pool, set[int | None](), model.forward
    pool.limit, pool.spare = 2, lambda: pytest.fail("nothing is to be given up")
    held = pool.new()
    held.reserve(2 * pool.page)

    def watched(batch: Batch) -> list[Passed]:
        limits.add(pool.limit)
        if len(limits) > 1 or broken:
            raise RuntimeError
        return forward(batch)

    monkeypatch.setattr(model, "forward", watched)
    for broken in (False, True):
        if broken:
            with pytest.raises(RuntimeError):
                CostModel.measure(model, 8, repeats=1)
        else:
            CostModel.measure(model, 8, repeats=1)
        assert (limits, pool.limit, pool.used) == ({2}, 2, 2)
        pool.spare = lambda: False
        with pytest.raises(NoRoom):
            pool.new().reserve(1)
    held.release()


def test_a_followed_cost_comes_to_what_passes_take() -> None:
    cost = CostModel({1: 1.0, 8: 2.0, 64: 8.0})
    for _ in range(300):
        cost.observe(8, 3.5, reading=0.5)
        cost.observe(64, 8.0)
    assert cost.seconds(8) == pytest.approx(3.0, rel=0.01)
    assert cost.seconds(64) == pytest.approx(8.0, rel=0.01)
    assert 1.0 < cost.seconds(1) < 1.5  # nothing was seen of it but what is common to all
    cost.observe(8, 1e9)
    assert cost.seconds(8) < 3.3


def test_no_width_stays_dear_because_it_was_in_use_while_the_machine_was_busy() -> None:
    cost = CostModel({1: 1.0, 8: 2.0, 64: 8.0})
    for _ in range(200):
        cost.observe(8, 8.0)
        cost.observe(1, 4.0)
    assert [cost.alone(n) for n in (1, 8)] == pytest.approx([4.0, 8.0], rel=0.01)
    for _ in range(200):
        cost.observe(1, 1.0)
    assert cost.alone(1) == pytest.approx(1.0, rel=0.01) and cost.alone(8) < 4.2
    assert cost.alone(64) < 16.0


def test_a_followed_cost_comes_to_the_slope_between_measured_widths() -> None:
    """A wrong guess of what a row adds is put right by passes whose widths no table has."""
    cost = CostModel({16: 20.0, 24: 21.0, 32: 36.0}, per_sequence=0.25)
    for i in range(1000):
        rows = 16 + i % 9
        cost.observe(rows, rows + 4.0, sequences=5)
    assert [cost.alone(n, 5) for n in (16, 20, 24)] == pytest.approx([20.0, 24.0, 28.0], rel=0.01)
    assert cost.alone(32) < 1.5 * 36


def test_a_measured_cost_never_falls_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow moments of the machine while it is measured, the first one above all, are left out: a
    narrow pass can't take longer than a wide one, or what stands before it would cost nothing."""
    model, asked = Model(tiny("qwen3", seed=5)), list[tuple[int, int, int]]()

    def timed(
        model: Model, tree: TokenTree, context: int, repeats: int, sequences: int = 1
    ) -> float:
        asked.append((len(tree), context, sequences))
        if len(asked) == 1:
            return 60.0
        slow = 3.0 if (len(tree), context, sequences) in ((1, 0, 1), (4, 0, 1)) else 0.0
        return slow + (8 + len(tree) + 0.001 * context) * (1 + 0.5 * (sequences - 1))

    monkeypatch.setattr("quickbeam.engine.cost._time", timed)
    cost = CostModel.measure(model, 16)
    assert asked[0] == asked[1] == (1, 0, 1)
    assert [cost.alone(n) for n in (1, 2, 4, 8, 12, 16)] == [10.0, 10.0, 15.0, 16.0, 20.0, 24.0]
    assert cost.reading(8, 1000) == pytest.approx(1.0)


# --- what a call costs ----------------------------------------------------------------------------


def test_what_a_call_reads_first_is_no_part_of_its_cost() -> None:
    cost = CallCost(1.0)
    for _ in range(5):
        cost.observe(1, 0.2)
    cost.read(100, 1.0)
    assert cost.seconds(1) == 0.2 and cost.row == pytest.approx(0.01)
    for _ in range(16):
        cost.observe(1, 0.4, 20)
    assert cost.seconds(1) == pytest.approx(0.2)


def test_one_cheap_call_outweighs_doubted_ones() -> None:
    call = CallCost(1.0)
    for count in (1, 4):
        for _ in range(call.CALLS):
            call.observe(count, 5.0)
    assert call.seconds(1) == call.seconds(4) == 5.0
    call.doubt()
    call.observe(1, 0.2)
    assert call.seconds(1) == 0.2 and call.seconds(4) == pytest.approx(0.2 * 1.45)
    for _ in range(2):
        call.observe(4, 5.0)
    assert call.seconds(1) == 0.2 and call.seconds(4) == 5.0  # it is so


def test_reading_is_no_part_of_a_calls_cost() -> None:
    call = CallCost(1.0)
    call.read(100, 2.0)  # 0.02 for each token
    for _ in range(call.CALLS):
        call.observe(1, 1.3, 20)
    assert call.seconds(1) == pytest.approx(0.9)
    for _ in range(call.CALLS):
        call.observe(1, 1.3, 1000)  # never less than a part of it
    assert call.seconds(1) == pytest.approx(0.65)


def test_before_a_call_was_seen_its_cost_is_a_guess() -> None:
    call = CallCost(2.0)
    assert [call.seconds(n) for n in (1, 2, 11)] == pytest.approx([0.5, 0.5 * 1.15, 0.5 * 2.5])


def test_a_calls_cost_is_that_of_about_as_many_sequences_or_the_least_that_others_make_of_it() -> (
    None
):
    call = CallCost(1.0)
    call.observe(1, 1.0)
    call.observe(8, 9.0)  # once, on a busy machine: that is not believed of any number
    assert [call.seconds(n) for n in (1, 2, 8, 16)] == pytest.approx(
        [1.0, 1.15, 1 + 0.15 * 7, 1 + 0.15 * 15]
    )
    for _ in range(call.ENOUGH - 1):
        call.observe(8, 9.0)  # it is so
    assert [call.seconds(n) for n in (1, 2, 8)] == pytest.approx([1.0, 1.15, 9.0])
    assert call.seconds(12) == pytest.approx(9.0 * (1 + 0.15 * 11) / (1 + 0.15 * 7))
    assert call.seconds(16) == pytest.approx(1 + 0.15 * 15)  # too far off: to be tried


def test_one_call_is_enough_to_find_cheap_what_seemed_dear() -> None:
    call = CallCost(1.0)
    call.observe(1, 4.0)
    call.observe(1, 0.1)
    assert call.seconds(1) == 0.1
    for _ in range(20):
        call.observe(1, 0.25)
    for _ in range(call.CALLS // 2):
        call.observe(1, 1e9)  # the machine was busy
    assert call.seconds(1) == 0.25
    for _ in range(call.CALLS):
        call.observe(1, 3.0)
    assert call.seconds(1) == 3.0


def test_every_method_has_calls_of_its_own() -> None:
    budget = Budget(CostModel({1: 4.0}))
    budget.call(METHOD).observe(1, 9.0)
    assert budget.call(METHOD).seconds(1) == 9.0 and budget.call("another").seconds(1) == 1.0
