"""The loop: speculative answers are plain decoding's own, however they end.

pytest tests/test_engine.py
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import VOCAB, tiny
from quickbeam.engine.budget import AutoBudget, CostModel, DraftingCost
from quickbeam.engine.loop import Generation
from quickbeam.engine.output import Output
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.presets import PRESETS
from quickbeam.sampling import SamplingParams
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree
from quickbeam.trees import make_policy

CERTAIN = [name for name, preset in PRESETS.items() if "drafter" not in preset.sources]  # the others: test_lm_drafter.py
DRAFTED = [name for name in CERTAIN if name != "ar"]


class Letters:
    """A tokenizer whose tokens are characters; every seventh is two of them."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) * (2 if i % 7 == 0 else 1) for i in ids)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("qwen3", seed=5))


def run(target: Target, method: str, params: SamplingParams, prompt: list[int], budget: int = 16, eos: tuple[int, ...] = ()) -> Generation:
    target.reset()
    policy = make_policy(PRESETS[method].sources, PRESETS[method].tree)
    generation = Generation(target, policy, Output(Letters(), params, eos), prompt, params, 1 if method == "ar" else budget)
    for _ in generation:
        pass
    return generation


def prompt_of(seed: int, length: int = 12) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("method", DRAFTED)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_answer_is_plain_decodings(target: Target, method: str, data: st.DataObject) -> None:
    """Greedy and sampled, penalised or not, cut by length, eos, stop ids and stop strings: the same tokens, text, reason and logprobs."""
    params = SamplingParams(
        max_tokens=data.draw(st.integers(1, 40)),
        temperature=data.draw(st.sampled_from([0.0, 0.6, 1.0])),
        top_k=data.draw(st.sampled_from([0, 20])),
        top_p=data.draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        logit_bias=data.draw(st.sampled_from([{}, {7: 3.0, 8: -math.inf}])),
        stop=data.draw(st.sampled_from([(), ("ab", "ccd"), ("e", "zz")])),
        stop_token_ids=data.draw(st.sampled_from([(), (17, 40)])),
        logprobs=data.draw(st.sampled_from([None, 2])),
        seed=data.draw(st.integers(0, 9)),
    )
    prompt, eos = prompt_of(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 30))), (3, 60)
    plain = run(target, "ar", params, prompt, eos=eos)
    drafted = run(target, method, params, prompt, budget=data.draw(st.sampled_from([1, 2, 5, 24, 64])), eos=eos)
    assert drafted.output.token_ids == plain.output.token_ids
    assert drafted.output.text == plain.output.text
    assert drafted.output.finish_reason == plain.output.finish_reason
    assert drafted.statistics.new_tokens == plain.statistics.new_tokens == len(plain.output.token_ids)
    assert plain.statistics.mean_accepted_tokens == 1.0 <= drafted.statistics.mean_accepted_tokens
    if params.logprobs is not None:
        assert drafted.logprobs is not None and plain.logprobs is not None
        for mine, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert (mine.token, list(mine.top)) == (theirs.token, list(theirs.top))
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_drafts_are_accepted_where_text_repeats(target: Target) -> None:
    """A model that loops: most of what is drafted must be accepted, and the statistics must add up."""
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    for method in DRAFTED:
        stats = run(target, method, params, prompt_of(0)).statistics
        accepted = sum(source.accepted for source in stats.sources.values())
        assert accepted + stats.steps + 1 == stats.new_tokens == 120
        assert all(source.accepted <= source.drafted for source in stats.sources.values())
        assert stats.mean_accepted_tokens > 2


def test_sampled_answers_depend_on_the_seed_only(target: Target) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    answers = {tuple(run(target, method, params, prompt_of(1), budget).output.token_ids) for method in CERTAIN for budget in (3, 30)}
    assert len(answers) == 1
    other = SamplingParams(max_tokens=30, temperature=1.0, seed=4, ignore_eos=True)
    assert tuple(run(target, "ar", other, prompt_of(1)).output.token_ids) not in answers


def test_a_prompt_and_answer_beyond_the_context_are_refused(target: Target) -> None:
    with pytest.raises(InvalidInput, match="at most 6 tokens"):
        run(target, "logitspec", SamplingParams(max_tokens=7), [1] * 4090)


def test_an_answer_may_fill_the_context_to_its_last_token() -> None:
    model = tiny("gpt2")  # positions are looked up in a table: one too many would raise
    target = Target(model)
    generation = run(target, "logitspec", SamplingParams(max_tokens=40, ignore_eos=True), prompt_of(0, 512 - 40), budget=64)
    assert generation.statistics.new_tokens == 40


def test_nan_logits_are_an_error_that_keeps_what_was_produced(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    verify, calls = Target.verify, []

    def failing(self, tree):
        calls.append(len(tree))
        return verify(self, tree) * (math.nan if len(calls) == 3 else 1)

    monkeypatch.setattr(Target, "verify", failing)
    target.reset()
    generation = Generation(target, make_policy((), "none"), Output(Letters(), params), prompt_of(2), params, 1)
    with pytest.raises(QuickbeamError, match="NaN"):
        list(generation)
    assert len(generation.output.token_ids) == 3
    assert generation.output.finish_reason == "interrupted"


@pytest.mark.parametrize("where", ["verify", "commit", "prefill"])
def test_an_interrupt_anywhere_leaves_answer_and_target_whole(target: Target, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = run(target, "ar", params, prompt_of(4)).output.token_ids
    inner, calls = getattr(Target, where), []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        result = inner(self, *args, **kwargs)
        if len(calls) == (1 if where == "prefill" else 4):
            raise KeyboardInterrupt
        return result

    target.reset()
    generation = Generation(target, make_policy(("ngram",), "chain"), Output(Letters(), params), prompt_of(4), params, 8)
    with monkeypatch.context() as patch:
        patch.setattr(Target, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(generation)
    got = generation.output.token_ids
    assert got == expected[: len(got)]
    assert generation.output.finish_reason == "interrupted"
    assert target.store.length == len(target.ids) <= len(prompt_of(4)) + len(got)
    held = list(target.ids)
    again = target.prefill([*held, 5], keep=len(held)).clone()
    target.reset()
    torch.testing.assert_close(again, target.prefill([*held, 5]), atol=1e-3, rtol=1e-4)


def test_cost_is_interpolated_and_measured(target: Target) -> None:
    cost = CostModel({1: 1.0, 3: 2.0, 8: 4.0})
    assert [cost.seconds(n) for n in (1, 2, 3, 8, 16)] == [1.0, 1.5, 2.0, 4.0, 8.0]
    target.reset()
    target.prefill(prompt_of(0))
    tree = TokenTree(5)
    expected = target.verify(tree).clone()
    measured = CostModel.measure(target, 16, repeats=1)
    torch.testing.assert_close(target.verify(tree), expected)
    assert all(measured.seconds(n) > 0 for n in (1, 5, 16, 40))
    assert target.store.length == len(prompt_of(0))
    longer = CostModel({1: 1.0, 8: 2.0}, {1: 0.01, 8: 0.3})
    assert [longer.seconds(n, 100) for n in (1, 8)] == pytest.approx([2.0, 32.0])
    assert AutoBudget(longer, 8).choose(4, 0) > AutoBudget(longer, 8).choose(4, 10_000)
    with pytest.raises(ValueError, match="no cost"):
        CostModel({})


def test_a_followed_cost_comes_to_what_passes_take() -> None:
    cost = CostModel({1: 1.0, 8: 2.0, 64: 8.0})
    for _ in range(300):
        cost.observe(8, 0, 3.0)
        cost.observe(64, 0, 8.0)
    assert cost.seconds(8) == pytest.approx(3.0, rel=0.01)
    assert cost.seconds(64) == pytest.approx(8.0, rel=0.01)
    assert cost.seconds(1) == 1.0
    cost.observe(8, 0, 1e9)
    assert cost.seconds(8) < 3.3


def test_budget_follows_what_was_accepted_and_what_it_costs() -> None:
    flat, steep = CostModel({1: 1.0, 64: 1.01}), CostModel({1: 1.0, 64: 64.0})
    assert AutoBudget(flat, 64).choose() == 64
    assert AutoBudget(steep, 64).choose() == 1
    auto = AutoBudget(CostModel({1: 1.0, 8: 1.2, 64: 4.0}), 64)
    for _ in range(100):
        budget = auto.choose(3)
        auto.observe(3, budget, list(range(min(budget, 12))))  # a repetition: 12 tokens hold
        auto.observe(0, auto.choose(0), [0])  # new text beside it: nothing does
    assert auto.choose(3) in (12, 16)
    assert auto.choose(0) <= 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 4), st.lists(st.lists(st.integers(1, 63), max_size=6), min_size=1, max_size=50))
def test_estimates_are_what_smaller_trees_would_have_emitted(situation: int, paths: list[list[int]]) -> None:
    auto = AutoBudget(CostModel({1: 1.0}), 64)
    for path in paths:
        auto.observe(situation, 64, [0, *sorted(set(path))])
    for i, width in enumerate(auto.budgets):
        emitted = [1 + sum(node < width for node in set(path)) for path in paths]
        assert auto._emitted[situation][i] == pytest.approx(sum(emitted) / len(emitted))
    for _ in range(300):
        auto.observe(situation, 64, [0, 1, 6])
    assert auto.expected(situation) == pytest.approx([1 + (width > 1) + (width > 6) for width in auto.budgets], abs=0.2)


# --- the cost of drafting ------------------------------------------------------------------------------------------------------------


def test_the_cost_of_drafting_is_learned_by_budget() -> None:
    drafting = DraftingCost()
    assert drafting.seconds(1) == drafting.seconds(64) == 0
    for seconds in (9.0, 1.0, 1.5, 1.0):  # the first is slow
        drafting.observe(16, seconds)
    assert [drafting.seconds(n) for n in (1, 4, 16, 64)] == pytest.approx([0.0, 0.2, 1.0, 2.0])
    for _ in range(4):
        drafting.observe(4, 0.8)
    assert [drafting.seconds(n) for n in (4, 10, 16)] == pytest.approx([0.8, 0.9, 1.0])
    drafting.observe(16, 1e9)
    assert drafting.seconds(16) < 1.06
    for _ in range(200):
        drafting.observe(16, 3.0)
    assert drafting.seconds(16) == pytest.approx(3.0, rel=0.01)


def test_a_tree_that_is_not_the_beginning_of_a_larger_one_tells_of_its_own_budget() -> None:
    auto = AutoBudget(CostModel({1: 1.0}), 64)
    auto.observe(3, 16, [0, 1, 2], nested=False)
    assert dict(zip(auto.budgets, auto._count[3], strict=True)) == {width: int(width == 16) for width in auto.budgets}
    assert auto._emitted[3][auto.budgets.index(16)] == 3


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("call", [0.0, 0.5, 4.0, 100.0])
def test_the_budget_chosen_is_the_best_with_drafting_counted(call: float, nested: bool) -> None:
    """Trees as deep as the square root of their budget, a call of the drafter (`call` seconds) a layer, 8 in 10 layers accepted."""
    rng, auto = random.Random(0), AutoBudget(CostModel({1: 10.0, 64: 14.0}), 64, overhead=1.0)

    def depth(budget: int) -> int:
        return round(budget**0.5) if budget > 1 else 0

    def rate(budget: int) -> float:
        return sum(0.8**i for i in range(depth(budget) + 1)) / (auto.cost.seconds(budget) + call * depth(budget) + 1.0)

    chosen = []
    for _ in range(1500):
        budget = auto.choose(3)
        chosen.append(budget)
        accepted = next((i for i in range(depth(budget)) if rng.random() > 0.8), depth(budget))
        # The node that is the i-th of the path is the first of its layer.
        auto.observe(3, budget, [0, *(next(n for n in range(2, 65) if depth(n) >= i) - 1 for i in range(1, accepted + 1))], nested)
        if budget > 1:
            auto.drafting.observe(budget, call * depth(budget))
    best = max(map(rate, auto.budgets))
    assert sum(map(rate, chosen[-500:])) / 500 > (0.93 if nested else 0.85) * best
    if call == 100.0:
        assert max(chosen[-500:]) == 1
