"""Steps with drafts against steps without: which go on, and how seldom the others are tried.
pytest tests/test_comparison.py"""

from __future__ import annotations

import random

import pytest

from loads import METHOD, crowd
from quickbeam.engine.budget import Budget
from quickbeam.engine.comparison import Comparison
from quickbeam.engine.cost import CostModel


def compared(comparison: Comparison, steps: int, many: int, gain: float, cost: float) -> list[bool]:
    """Run steps of `many` sequences, and return which of them drafted. Drafting gives `gain` times
    the tokens in `cost` times the seconds; the machine is twice as slow in every other 150."""
    drafted, rng = list[bool](), random.Random(1)
    for step in range(steps):
        drafted.append(comparison.drafts)
        seconds = (cost if comparison.drafts else 1.0) * (1 + step // 150 % 2)
        extra = sum(rng.random() < gain - 1 for _ in range(many)) if comparison.drafts else 0
        recent = gain / cost if comparison.drafts else 1.0
        comparison.observe(many, many + extra, seconds, 1.0, recent)
    return drafted


@pytest.mark.parametrize("many", [2, 4, 16, 64])
@pytest.mark.parametrize(("gain", "cost", "faster"), [(1.4, 1.7, False), (1.5, 1.3, True)])
def test_the_faster_kind_of_step_goes_on(many: int, gain: float, cost: float, faster: bool) -> None:
    drafted = compared(Comparison(), 3000, many, gain, cost)
    late = drafted[1500:]
    assert sum(one is faster for one in late) > 0.9 * len(late)
    assert sum(one is not faster for one in late) > 0  # the other kind is tried again
    # the first decision is made early
    assert sum(one is faster for one in drafted[250:500]) > 0.7 * 250


def test_where_drafting_is_clearly_faster_nothing_is_compared() -> None:
    assert all(compared(Comparison(), 1000, 4, 1.6, 1.2))


@pytest.mark.parametrize("many", [8, 32])
def test_what_clearly_loses_is_seldom_tried(many: int) -> None:
    """From the beginning: comparing loses a small share of the time."""
    for gain, cost in ((1.2, 1.8), (1.1, 3.0)):
        drafted = compared(Comparison(), 400, many, gain, cost)
        lost = sum(drafted) * (1 - gain / cost)
        assert lost < 0.06 * len(drafted)
        assert not all(drafted[:8]) or many < 16  # the first comparison begins early


def test_steps_in_which_every_answer_fails_are_compared_without_an_error() -> None:
    comparison = Comparison()
    for _ in range(200):
        comparison.observe(4, 0, 1.0, 1.0, 0.0)


def test_a_change_of_what_is_faster_is_noticed() -> None:
    comparison = Comparison()
    compared(comparison, 2000, 16, 1.3, 1.6)
    assert not comparison.faster
    compared(comparison, 2000, 16, 1.6, 1.35)
    drafted = compared(comparison, 1000, 16, 1.6, 1.35)
    assert comparison.faster and sum(drafted) > 900


def test_the_first_step_of_a_turn_is_not_counted() -> None:
    """It takes a hundred times as long: the drafter reads what it missed."""
    comparison, before, steps = Comparison(), True, 0
    while steps < 2000:
        changed, before = comparison.drafts != before, comparison.drafts
        seconds = (1.3 if comparison.drafts else 1.0) * (100 if changed else 1)
        comparison.observe(8, 12 if comparison.drafts else 8, seconds, 1.0, 1.1)
        steps += 1
    assert comparison.faster


def test_loads_are_compared_by_themselves_and_begin_with_what_their_neighbours_found() -> None:
    budget = Budget(CostModel({1: 1.0, 64: 2.0}))
    four = budget.comparison(METHOD, crowd(3))
    assert four.drafts and four is budget.comparison(METHOD, crowd(3))
    compared(four, 2000, 4, 1.2, 1.9)
    assert not four.faster
    larger, smaller = budget.comparison(METHOD, crowd(15)), budget.comparison(METHOD, crowd(1))
    # the more sequences, the less drafting gains
    assert not larger.drafts and not smaller.drafts
    compared(smaller, 2000, 2, 1.6, 1.2)
    assert smaller.faster and not budget.comparison(METHOD, crowd(2)).drafts
    assert budget.comparison("another", crowd(15)).drafts
    assert not budget.drafts(METHOD, 16) and budget.drafts(METHOD, 2)
    # far fewer sequences, or a load that was only guessed, say nothing
    many = Budget(CostModel({1: 1.0, 64: 2.0}))
    compared(many.comparison(METHOD, crowd(31)), 2000, 32, 1.2, 1.9)
    assert not many.comparison(METHOD, crowd(15)).drafts
    assert many.comparison(METHOD, crowd(7)).drafts and many.comparison(METHOD, crowd(3)).drafts


def test_steps_of_one_method_are_compared() -> None:
    budget, load = Budget(CostModel({1: 1.0, 64: 2.0})), crowd(15)
    for _ in range(Comparison.REST + 1):
        budget.observe([METHOD] * 16, load, 16, 2.0)
    assert budget.comparison(METHOD, load).drafts  # nothing was said of a comparison
    load.comparison = budget.comparison(METHOD, load)
    for _ in range(Comparison.EARLY // 16):
        assert load.comparison.drafts
        budget.observe([METHOD] * 16, load, 16, 2.0)
    assert not load.comparison.drafts
