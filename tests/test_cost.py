"""What passes and calls cost, by the time they took.
pytest tests/test_cost.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig

from models import SIZES, tiny
from quickbeam.engine.cost import CostModel, ExpertsRead
from quickbeam.models.base import Batch, Model, Passed
from quickbeam.models.kv import NoRoom
from quickbeam.models.opening import make_model

# --- the cost of a pass ---------------------------------------------------------------------------


def test_cost_is_interpolated_and_measured() -> None:
    cost = CostModel({1: 1.0, 3: 2.0, 8: 4.0})
    assert [cost.alone(n) for n in (1, 2, 3, 8, 16)] == [1.0, 1.5, 2.0, 4.0, 8.0]
    longer = CostModel({1: 1.0, 8: 2.0}, {1: 0.01, 8: 0.3})
    assert [longer.reading(n, 100) for n in (1, 8)] == pytest.approx([1.0, 30.0])
    with pytest.raises(ValueError, match="no cost"):
        CostModel({})
    many = CostModel({1: 1.0, 8: 2.0}, {1: 0.01}, per_sequence=0.5)
    assert [many.alone(8, n) for n in (1, 2, 5)] == [2.0, 2.5, 4.0]
    measured = CostModel.measure(make_model(tiny("qwen3", seed=5)), 16)
    assert all(measured.alone(n) > 0 and measured.reading(n, 50) >= 0 for n in (1, 5, 16, 40))


def test_measuring_is_not_bound_by_the_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit holds before, after, and meanwhile for all who look at it; nothing that is kept is
    given up for it."""
    model = make_model(tiny("qwen3", torch.float32, seed=5))
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
                CostModel.measure(model, 8)
        else:
            CostModel.measure(model, 8)
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
    assert cost.alone(8) == pytest.approx(3.0, rel=0.01)
    assert cost.alone(64) == pytest.approx(8.0, rel=0.01)
    assert 1.0 < cost.alone(1) < 1.5  # nothing was seen of it but what is common to all
    cost.observe(8, 1e9)
    assert cost.alone(8) < 3.3


def test_no_width_stays_slow_because_it_was_in_use_while_the_machine_was_busy() -> None:
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
    model, asked = make_model(tiny("qwen3", seed=5)), list[tuple[int, int, int]]()

    def timed(model: Model, nodes: int, context: int, sequences: int) -> float:
        asked.append((nodes, context, sequences))
        busy = 60.0 if len(asked) in (1, 2, 5, 20) else 0.0
        slow = 3.0 if (nodes, context, sequences) in ((1, 0, 1), (4, 0, 1)) else 0.0
        return busy + slow + (8 + nodes + 0.001 * context) * (1 + 0.5 * (sequences - 1))

    monkeypatch.setattr("quickbeam.engine.cost._time", timed)
    cost = CostModel.measure(model, 16)
    assert asked[0] == asked[1] == (1, 0, 1)
    assert [cost.alone(n) for n in (1, 2, 4, 8, 12, 16)] == [10.0, 10.0, 15.0, 16.0, 20.0, 24.0]
    assert cost.reading(8, 1000) == pytest.approx(1.0)
    assert cost.alone(8, 8) == pytest.approx(9 * 4.5)


def test_a_pass_that_wakes_fewer_experts_than_were_measured_takes_less() -> None:
    """An expert of every layer is a tenth of what every pass reads. 8 rows woke 20 at first."""
    cost = CostModel({1: 3.0, 8: 9.0}, experts=ExpertsRead({1: 4.0, 8: 20.0}, 0.1))
    assert [cost.alone(n) for n in (1, 8)] == [3.0, 9.0]
    followed = CostModel({1: 3.0, 8: 9.0})
    for _ in range(100):  # this text's rows share most of their experts
        followed.observe(8, 9.0 * (1 + 0.8) / (1 + 2.0))
        cost.observe(8, 9.0 * (1 + 0.8) / (1 + 2.0), experts=8.0)
    assert cost.experts is not None and cost.experts.at(8) == pytest.approx(8.0, rel=0.01)
    assert cost.alone(8) == pytest.approx(5.4, rel=0.02)
    # a row reads its own experts all the same, which passes of 8 rows alone don't tell
    assert cost.experts.at(1) == 4.0 and cost.alone(1) > 2.5 > followed.alone(1)
    # a pass that wakes new ones is slow again
    for _ in range(100):
        cost.observe(8, 9.0, experts=20.0)
    assert cost.alone(8) == pytest.approx(9.0, rel=0.02)


def test_what_passes_read_is_measured_with_their_times() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=6)
    model = make_model(tiny("", torch.bfloat16, config=config))
    cost = CostModel.measure(model, 16)
    assert cost.experts is not None and cost.experts.at(1) == 2.0
    assert 2.0 < cost.experts.at(16) <= 6.0 and model.expert_share > 0
    assert CostModel.measure(make_model(tiny("qwen3")), 4).experts is None


# --- what a call costs ----------------------------------------------------------------------------


def test_before_a_call_was_seen_its_cost_is_a_guess() -> None:
    cost = CostModel({1: 2.0})
    assert [cost.call("d", n) for n in (1, 2, 11)] == pytest.approx([0.6, 0.6 * 1.15, 0.6 * 2.5])
    assert cost.read("d", 10) > 0


def test_a_call_costs_the_median_of_recent_ones_for_as_many_sequences() -> None:
    cost = CostModel({1: 2.0})
    for seconds in (99.0, 0.5, 0.6, 0.4, 9.0, 9.0):  # the first is slow; the machine is busy
        cost.observe_call("d", 1, seconds)
    assert cost.call("d", 1) == 0.6 and cost.call("another", 1) == pytest.approx(0.6)
    assert cost.call("d", 2) == pytest.approx(0.6 * 1.15)
    cost.observe_call("d", 8, 5.0)
    assert cost.call("d", 8) == 5.0 and cost.call("d", 1) == 0.6
    assert cost.call("d", 16) == pytest.approx(5.0 * (1 + 0.15 * 15) / (1 + 0.15 * 7))
    for _ in range(cost.CALLS):
        cost.observe_call("d", 1, 3.0)
    assert cost.call("d", 1) == 3.0


def test_the_first_call_of_all_does_not_count() -> None:
    cost = CostModel({1: 2.0})
    cost.observe_call("d", 1, 50.0)  # weights were packed in it
    assert cost.call("d", 1) == pytest.approx(cost.CALL * 2.0)
    cost.observe_call("d", 1, 1.5)
    assert cost.call("d", 1) == 1.5


def test_one_fast_call_outweighs_doubted_ones() -> None:
    cost = CostModel({1: 2.0})
    for _ in range(cost.CALLS):
        cost.observe_call("d", 1, 5.0)
    cost.doubt_calls("d")
    cost.doubt_calls("never called")
    cost.observe_call("d", 1, 0.2)
    assert cost.call("d", 1) < 3.0


def test_reading_is_no_part_of_a_calls_cost() -> None:
    cost = CostModel({1: 1.0})
    cost.observe_read("d", 100, 2.0)
    assert cost.read("d", 50) == pytest.approx(1.0)
    for _ in range(2):
        cost.observe_call("d", 1, 1.3, 20)
    assert cost.call("d", 1) == pytest.approx(0.9)
    for _ in range(cost.CALLS):
        cost.observe_call("d", 1, 1.3, 1000)  # never less than a part of it
    assert cost.call("d", 1) == pytest.approx(0.65)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss-sinks"])
def test_what_was_measured_is_kept_for_the_next_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    model = make_model(tiny(name, torch.bfloat16, seed=5))
    CostModel.kept(model, 16)
    assert not list(tmp_path.iterdir())  # a small model
    model.weight_bytes = 2**30
    first = CostModel.kept(model, 16)
    monkeypatch.setattr(CostModel, "measure", None)
    second = CostModel.kept(model, 16)
    for rows in (1, 5, 16, 40):
        assert second.alone(rows, 3) == first.alone(rows, 3)
        assert second.reading(rows, 100) == first.reading(rows, 100)
        for one in (first, second):  # of a text whose tokens share their experts
            one.observe(rows, 1.0, experts=2.0)
        assert second.alone(16) == first.alone(16)
    assert (second.experts is None) == (first.experts is None) == (name == "qwen3")
    monkeypatch.undo()
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    (kept,) = (tmp_path / "costs").iterdir()
    for broken in ("{", "[1]", "[{}, {}, 0]", "[{}, {}, 0, {}]"):
        kept.write_text(broken)
        assert CostModel.kept(model, 16).alone(1) > 0
    CostModel.kept(model, 8)  # other trees
    assert len(list((tmp_path / "costs").iterdir())) == 2
