"""What passes and calls cost, by the time they took."""

import pytest
import torch

from models import tiny
from quickbeam.engine import cost as cost_module
from quickbeam.engine.cost import CostModel
from quickbeam.models.kv import NoRoom
from quickbeam.models.opening import make_model

# --- the cost of a pass ---------------------------------------------------------------------------


def test_cost_is_interpolated_and_measured():
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


def test_measuring_is_not_bound_by_the_memory_limit(monkeypatch):
    """The limit holds before, after, and meanwhile for all who look at it."""
    model = make_model(tiny("qwen3", torch.float32, seed=5))
    pool, limits, forward = model.pool, set[int | None](), model.forward
    pool.limit, pool.spare = 2, lambda: pytest.fail("nothing is to be given up")
    held = pool.new()
    held.reserve(2 * pool.page)

    def watched(batch):
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


# --- what a call costs ----------------------------------------------------------------------------


def test_the_first_call_of_all_does_not_count():
    cost = CostModel({1: 2.0})
    cost.observe_call("d", 1, 50.0)  # weights were packed in it
    assert cost.call("d", 1) == pytest.approx(cost.CALL * 2.0)
    cost.observe_call("d", 1, 1.5)
    assert cost.call("d", 1) == 1.5


def takes(monkeypatch, seconds):
    """Have passes of so many nodes take `seconds(nodes)`, as far as costs are measured."""
    run = cost_module._time

    def timed(model, nodes, context, sequences):
        run(model, nodes, context, sequences)
        return seconds(nodes)

    monkeypatch.setattr(cost_module, "_time", timed)


def test_what_was_measured_is_kept_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    takes(monkeypatch, lambda nodes: 1 + 0.1 * nodes)
    model = make_model(tiny("qwen3", torch.bfloat16, seed=5))
    CostModel.kept(model, 16)
    assert not list(tmp_path.iterdir())  # a small model
    model.weight_bytes = 2**30
    first = CostModel.kept(model, 16)
    monkeypatch.setattr(CostModel, "measure", None)
    second = CostModel.kept(model, 16)
    for rows in (1, 5, 16, 40):
        assert second.alone(rows, 3) == first.alone(rows, 3)
        assert second.reading(rows, 100) == first.reading(rows, 100)
    monkeypatch.undo()
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    takes(monkeypatch, lambda nodes: 1 + 0.1 * nodes)
    (kept,) = (tmp_path / "costs").iterdir()
    for broken in ("{", "[1]", "[{}, {}, 0]"):
        kept.write_text(broken)
        assert CostModel.kept(model, 16).alone(1) > 0
    CostModel.kept(model, 8)  # other trees
    assert len(list((tmp_path / "costs").iterdir())) == 2
