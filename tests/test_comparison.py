"""The modes of a step: which goes on, and how seldom the others are tried.
pytest tests/test_comparison.py"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from quickbeam.engine.budget import Budget
from quickbeam.engine.comparison import ASKED, PLAIN, UNASKED, Comparison
from quickbeam.engine.cost import CostModel

MODES = {PLAIN: 1.0, UNASKED: 1.2, ASKED: 1.3}


def compared(
    comparison: Comparison, steps: int, many: int, modes: dict[str, tuple[float, float]]
) -> list[str]:
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
def test_the_fastest_mode_goes_on(
    many: int, modes: dict[str, tuple[float, float]], fastest: str
) -> None:
    comparison = Comparison({mode: MODES[mode] for mode in modes})
    chosen = compared(comparison, 3000, many, modes)
    assert chosen[1500:].count(fastest) > 0.9 * 1500
    assert chosen[300:600].count(fastest) > 0.7 * 300  # decided early


@pytest.mark.parametrize("many", [1, 8, 32])
def test_what_clearly_loses_is_seldom_tried(many: int) -> None:
    modes = {PLAIN: (1.0, 1.0), UNASKED: (1.5, 1.05), ASKED: (1.6, 2.2)}
    chosen = compared(Comparison(MODES), 4000, many, modes)
    lost = sum(modes[mode][1] * 1.5 / 1.05 - modes[mode][0] for mode in chosen)
    assert lost < 0.03 * sum(modes[mode][0] for mode in chosen)
    assert {ASKED} < set(chosen)


def test_where_drafting_is_clearly_faster_plain_decoding_is_not_tried() -> None:
    modes = {PLAIN: (1.0, 1.0), ASKED: (1.9, 1.2)}
    assert set(compared(Comparison({PLAIN: 1.0, ASKED: 1.3}), 1000, 4, modes)) == {ASKED}


def test_a_change_of_what_is_faster_is_noticed() -> None:
    comparison = Comparison(MODES)
    slow = {PLAIN: (1.0, 1.0), UNASKED: (1.3, 1.1), ASKED: (1.4, 1.9)}
    assert compared(comparison, 2000, 1, slow)[-100:].count(UNASKED) > 80
    fast = slow | {ASKED: (1.9, 1.2)}
    assert compared(comparison, 6000, 1, fast)[-500:].count(ASKED) > 450


def test_the_first_step_of_a_mode_is_not_counted() -> None:
    """It takes thirty times as long: the drafter reads what it missed."""
    comparison, before, late = Comparison({PLAIN: 1.0, ASKED: 1.1}), ASKED, 0
    for step in range(4000):
        changed, before = comparison.mode != before, comparison.mode
        asked = before == ASKED
        seconds = (1.3 if asked else 1.0) * (30 if changed else 1)
        comparison.observe(1.5 if asked else 1.0, seconds, 8, asked)
        late += step > 2000 and asked
    assert late > 1900


def test_steps_in_which_every_answer_fails_are_compared_without_an_error() -> None:
    comparison = Comparison(MODES)
    for _ in range(2000):
        comparison.observe(0.0, 1.0, 4, False)


@pytest.mark.parametrize(("call", "pause"), [(0.1, 32), (0.8, 80)])
def test_a_call_is_made_now_and_then_whatever_it_seems_to_bring(call: float, pause: int) -> None:
    """In the first steps, then no sooner than after 32, and for no more than a hundredth of the
    time."""
    comparison, calls = Comparison({ASKED: 1.3}), list[int]()
    for step in range(400):
        if asked := comparison.explores(call, 0.0):
            calls.append(step)
        comparison.observe(1.0, 1.0, 1, asked)
    assert calls[: comparison.FIRST] == list(range(comparison.FIRST))
    later = calls[comparison.FIRST - 1 :]
    assert {b - a for a, b in pairwise(later)} == {pause + 1}


def test_what_is_unread_makes_no_pause_between_such_calls_endless() -> None:
    comparison, silent, longest = Comparison({ASKED: 1.3}), 0, 0
    for step in range(2000):
        asked = comparison.explores(0.1, 0.1 * silent)
        silent = 0 if asked else silent + 1
        longest = max(longest, silent if step > 10 else 0)
        comparison.observe(1.0, 1.0, 1, asked)
    assert longest == 8 * comparison.REST


def test_loads_are_compared_by_themselves_and_begin_with_what_their_neighbours_gave() -> None:
    budget = Budget(CostModel({1: 1.0, 64: 1.5}))

    def of(sequences: int, setting: str = "a method") -> Comparison:
        budget.begin(dict.fromkeys(range(sequences), 0), {})
        return budget.comparison(setting, [ASKED, PLAIN], "drafter")

    four = of(4)
    assert four.mode == ASKED and four is of(4) and budget.asks("a method", 4)
    compared(four, 2000, 4, {PLAIN: (1.0, 1.0), ASKED: (1.2, 1.9)})
    assert four.best == PLAIN and not budget.asks("a method", 4)
    assert of(16).mode == PLAIN  # the more sequences, the less drafting gains
    assert of(1).mode == ASKED and of(4, "another").mode == ASKED
    assert of(15) is of(16) is not of(32)


def test_an_earlier_text_counts_for_little_in_the_next() -> None:
    """A text that repeats itself is fast; its speed must not silence the drafter in the next."""
    comparison = Comparison({ASKED: 1.5})
    for _ in range(100):
        comparison.observe(10.0, 1.0, 1, False)
    before = comparison.speed(ASKED)
    comparison.begin_text()
    assert comparison.speed(ASKED) == pytest.approx(before) and before > 8
    for _ in range(16):
        comparison.observe(1.0, 1.0, 1, False)
    assert comparison.speed(ASKED) < 1 + (before - 1) * 0.4
