"""The benchmark's methods, harness and figures: pytest tests/test_bench.py. Runners with set
timings stand in for models."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from fake_runner import PARAMS, FakeRunner, measured, questions_of, two_methods
from quickbeam.bench import report
from quickbeam.bench.base import Answer
from quickbeam.bench.methods import LLMRunner, MethodItem, load_runners, parse_budget, parse_methods
from quickbeam.bench.questions import Question, load_questions
from quickbeam.bench.run import (
    WARM_UP,
    WARM_UP_TOKENS,
    begin,
    first_difference,
    reference_of,
    run,
    warm_up,
)
from quickbeam.bench.summary import by_category, summaries
from quickbeam.engine.result import Completion, SourceCount, Statistics
from quickbeam.errors import InvalidInput
from quickbeam.noise import Noise
from quickbeam.params import SamplingParams
from quickbeam.presets import PRESETS

# Methods


def test_methods_take_budgets_and_switches_of_their_own():
    text = (
        "ar, "
        "pld,logitspec:64,logitspec:auto,ar+exact,logitspec:16+no-exact+plain,hf,ar+residual,pld+exact+coupled"
    )
    items = parse_methods(text, 32, None, True)
    assert items == [
        MethodItem("ar", "ar", None, exact=None, fast=True),
        MethodItem("pld", "pld", 32, exact=None, fast=True),
        MethodItem("logitspec:64", "logitspec", 64, exact=None, fast=True),
        MethodItem("logitspec:auto", "logitspec", 0, exact=None, fast=True),
        MethodItem("ar+exact", "ar", None, exact=True, fast=True),
        MethodItem("logitspec:16+no-exact+plain", "logitspec", 16, exact=False, fast=False),
        MethodItem("hf", "hf", None, exact=None, fast=True),
        MethodItem("ar+residual", "ar", coupling="residual"),
        MethodItem("pld+exact+coupled", "pld", 32, exact=True, coupling="coupled"),
    ]
    assert parse_methods(
        "pld,dyspec,dynaspec:8@999,frspec@7+context", drafter="x", vocab="router", shortlist=50
    ) == [
        MethodItem("pld", "pld"),
        MethodItem("dyspec", "dyspec", vocab="router", shortlist=50),
        MethodItem("dynaspec:8@999", "dynaspec", 8, "router", 999),
        MethodItem("frspec@7+context", "frspec", vocab="context", shortlist=7),
    ]
    both = parse_methods("frspec@7+frequency+context,dynaspec+clusters+context", drafter="x")
    assert [item.vocab for item in both] == ["frequency+context", "router"]
    assert [item.exact for item in parse_methods("ar,ar+no-exact", exact=True)] == [True, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ar,lgitspec", "unknown method 'lgitspec'; known: ar, "),
        (" , ", "names no method"),
        ("ar,pld,ar", "'ar' is given twice"),
        ("ar:4", "ar grows no draft tree"),
        ("hf:4", "hf grows no draft tree"),
        ("hf+exact", "no switches"),
        ("pld+fats", "unknown switch 'fats'; known: exact"),
        ("pld:0", "budget '0'"),
        ("pld@9", "pld has no drafter"),
        ("ar+router", "ar has no drafter"),
        ("dyspec@many", "@many must be"),
        ("dyspec@99", "a shortlist of 99 tokens, where the drafter scores its full vocabulary"),
        ("frspec@99+full", "scores its full vocabulary"),
        ("dyspec+router+full", "scores one of router, full"),
        ("pld:", "budget ''"),
        ("pld:many", "or auto"),
        ("hf-assisted", "--drafter"),
        *(
            (name, f"{name} needs a drafter")
            for name, preset in PRESETS.items()
            if "drafter" in preset.sources and not preset.without
        ),
    ],
)
def test_bad_methods_are_refused(text, says):
    with pytest.raises(InvalidInput) as caught:
        parse_methods(text, model="another/model")
    assert says in str(caught.value)


def test_the_default_model_brings_a_drafter_which_transformers_cannot_use():
    assert [item.method for item in parse_methods("dyspec,eagle2:8")] == ["dyspec", "eagle2"]
    with pytest.raises(InvalidInput, match="smaller model"):
        parse_methods("dyspec,hf-assisted")


def test_budget_words():
    assert (parse_budget("auto"), parse_budget("64")) == (0, 64)
    with pytest.raises(InvalidInput):
        parse_budget("-1")


class FakeTarget:
    """One sequence on a `FakeLLM`'s model."""

    released: ClassVar[list[object]] = []

    def __init__(self, model):
        self.store = SimpleNamespace(release=lambda: self.released.append(model))

    def prefill(self, ids):
        return torch.arange(4.0) * len(ids)


class FakeLLM:
    made: ClassVar[list[tuple]] = []

    def __init__(
        self,
        model,
        method,
        *,
        dtype,
        device,
        exact,
        fast,
        drafter=None,
        progress=None,
        weights="bfloat16",
        draft_weights="bfloat16",
        memory=None,
    ):
        self.weights = weights
        self.made.append((model, method, dtype, device, exact, fast))
        self.drafter, self.prepared = drafter, []
        self.name, self.folder, self.asked, self.reason = model or "own", "folder", [], "length"
        self.model = SimpleNamespace(device=torch.device("cpu"))

    def prepare(self, method, vocab, shortlist):
        self.prepared.append((method, vocab, shortlist))

    def reset(self):
        self.asked.append("reset")

    def encode_chat(self, messages):
        return [len(messages)]

    def generate(self, prompt, params, *, method, budget, vocab, shortlist):
        self.coupling = params.coupling
        self.asked.append((prompt, method, budget, vocab, shortlist))
        statistics = Statistics(
            new_tokens=7,
            steps=3,
            seconds=1.5,
            prefill_seconds=9.0,
            draft_seconds=0.25,
            verify_seconds=1.0,
        )
        statistics.drafter_calls, statistics.drafter_seconds, statistics.nodes = 9, 0.125, 11
        statistics.sources = {"drafter": SourceCount(5, 3), "n-gram": SourceCount(2, 0)}
        return Completion("text", [1] * 7, self.reason, statistics)


def test_methods_with_the_same_settings_share_one_load(monkeypatch):
    monkeypatch.setattr("quickbeam.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    items = parse_methods("ar,pld:8,ar+exact,logitspec:4+exact,pld+plain")
    runners, name = load_runners(
        items, "some/model", "float32", "cpu", "some/drafter", weights="int8"
    )
    assert {runner.llm.weights for runner in runners.values()} == {"int8"}
    assert name == "some/model" and list(runners) == [item.name for item in items]
    assert FakeLLM.made == [("some/model", method, "float32", "cpu", *key) for method, *key in
                            (("ar", None, True), ("ar", True, True),
                                ("pld", None, False))]  # fmt: skip
    assert (
        runners["ar"].llm is runners["pld:8"].llm
        and runners["ar+exact"].llm is runners["logitspec:4+exact"].llm
    )
    assert len({id(runner.llm) for runner in runners.values()}) == 3
    assert {runner.llm.drafter for runner in runners.values()} == {"some/drafter"}
    assert runners["ar"].llm.prepared == [("ar", None, None), ("pld", None, None)], (
        "a drafter is loaded before anything is timed"
    )


def test_llm_runner_asks_for_its_method_and_budget(monkeypatch):
    monkeypatch.setattr("quickbeam.target.target.Target", FakeTarget)
    llm = FakeLLM(None, "ar", dtype="bfloat16", device=None, exact=None, fast=True, progress=None)
    runner = LLMRunner(llm, MethodItem("dynaspec:16@99", "dynaspec", 16, "router", 99))
    figures = dict(
        seconds=1.5,
        draft_seconds=0.25,
        verify_seconds=1.0,
        drafter_calls=9,
        drafter_seconds=0.125,
        prefill_seconds=9.0,
    )
    counted = dict(nodes=11, accepted={"drafter": 3, "n-gram": 0})
    assert runner.answer([4, 5], PARAMS) == Answer(
        [1] * 7, "text", decoded=6, steps=3, **figures, **counted
    )
    assert llm.asked == ["reset", ([4, 5], "dynaspec", 16, "router", 99)]
    assert (
        runner.last_logits([1, 2]).tolist() == [0, 2, 4, 6]
        and runner.encode([{}, {}]) == [2]
        and runner.device == "cpu"
    )
    assert FakeTarget.released == [llm.model], "what was measured leaves no keys and values behind"
    for own, asked, told in (
        (None, "residual", "residual"),
        ("residual", "coupled", "residual"),
        ("coupled", "residual", "coupled"),
    ):
        LLMRunner(llm, MethodItem("ar", "ar", coupling=own)).answer(
            [4], SamplingParams(temperature=1.0, coupling=asked)
        )
        assert llm.coupling == told
    llm.reason = "interrupted"
    with pytest.raises(KeyboardInterrupt):
        runner.answer([4], PARAMS)


# The harness


def test_methods_take_turns_at_going_first():
    calls: list = []
    runners = {name: FakeRunner(name, calls) for name in ("ar", "b", "c")}
    measured(runners, questions_of("x", "y", "x", "y"))
    assert [name for name, _ in calls] == [
        "ar",
        "b",
        "c",
        "b",
        "c",
        "ar",
        "c",
        "ar",
        "b",
        "ar",
        "b",
        "c",
    ]
    assert [text for _, text in calls] == [f"q{i}" for i in range(4) for _ in range(3)]


def test_warm_up_is_short_and_not_counted():
    runners = two_methods()
    done = []
    warm_up(runners, SamplingParams(max_tokens=500), lambda: done.append(1))
    assert len(done) == 2
    for name, runner in runners.items():
        assert runner.calls.count((name, WARM_UP)) == 1 and runner.lengths == [WARM_UP_TOKENS]
    assert WARM_UP not in {turn for question in load_questions() for turn in question.turns}


def test_only_first_turns_by_default_and_the_reference_speaks_in_conversations():
    question = Question(1, "chat", ("hello", "and then?"))
    runners = two_methods()
    assert [trial.turn for trial in measured(runners, [question]).trials] == [0]
    runners = two_methods()
    results = measured(dict(reversed(runners.items())), [question], all_turns=True)
    assert results.reference == "ar" and [trial.turn for trial in results.trials] == [0, 1]
    assert runners["ar"].conversations[1] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "said by ar"},
        {"role": "user", "content": "and then?"},
    ]
    assert runners["ar"].prompts == runners["fast"].prompts, "all methods see the same ids"


def test_reference_is_ar_or_else_the_first():
    assert reference_of(["pld", "ar+exact", "ar"]) == "ar"
    assert reference_of(["pld", "ar+exact"]) == "ar+exact"
    assert reference_of(["pld", "hf"]) == "pld"
    assert reference_of(["ar+residual", "pld", "ar"]) == "ar"
    assert reference_of(["ar+residual", "ar+no-exact", "ar+exact+plain"]) == "ar+no-exact"
    assert reference_of(["pld", "ar+residual"]) == "ar+residual"


def test_every_prompt_has_a_seed_of_its_own_that_all_methods_share():
    runners = two_methods()
    results = measured(
        runners, questions_of("x", "y", "x"), SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    )
    assert runners["ar"].seeds == runners["fast"].seeds == [5, 6, 7]
    assert results.differences == [] and summaries(results)["fast"].identical == 3


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (0.6, 5)])
def test_an_answer_that_ought_to_be_the_references_and_is_not_is_counted(temperature, seed):
    runners = two_methods()
    runners["other"] = FakeRunner("other", runners["ar"].calls, tokens=(1, 2, 3, 4, 6))
    results = measured(
        runners,
        questions_of("x", "y"),
        SamplingParams(max_tokens=8, temperature=temperature, seed=seed),
    )
    assert [summaries(results)[name].identical for name in results.methods] == [2, 2, 0]
    assert [(one.method, one.position) for one in results.differences] == [("other", 4)] * 2
    assert "other: 2 of 2 outputs differ" in "\n".join(report.footer(results))


SAMPLED = SamplingParams(max_tokens=8, temperature=0.6, seed=5)


@pytest.mark.parametrize(
    ("params", "uncoupled", "identical", "said"),
    [
        (
            SAMPLED,
            "other",
            [1, 1, None],
            "outputs of other are not compared, as they are not coupled",
        ),
        (SAMPLED, "ar", [None] * 3, "outputs are not compared, as those of ar are not coupled"),
        (
            replace(SAMPLED, coupling="residual"),
            "",
            [None] * 3,
            "outputs are not compared, as those of ar are not coupled",
        ),
        (replace(SAMPLED, seed=None), "", [None] * 3, "give --seed to compare outputs"),
        (replace(SAMPLED, seed=None, temperature=0.0, coupling="residual"), "other", [1, 1, 0], ""),
    ],
)
def test_outputs_that_the_seed_alone_does_not_decide_are_not_compared(
    params, uncoupled, identical, said
):
    runners = two_methods()
    runners["other"] = FakeRunner("other", runners["ar"].calls, tokens=(7,))
    if uncoupled:
        runners[uncoupled].coupled = False
    results = measured(runners, questions_of("x"), params)
    assert [summaries(results)[name].identical for name in results.methods] == identical
    assert len(results.differences) == identical.count(0)
    lines = [line for line in report.footer(results) if line.startswith("tokens are sampled: ")]
    assert len(lines) == bool(said) and all(said in line for line in lines)


def test_which_methods_a_seed_decides():
    coupled, residual = (
        SamplingParams(temperature=1.0, seed=0),
        SamplingParams(temperature=1.0, seed=0, coupling="residual"),
    )
    plain, drawn, noisy, peer = parse_methods("ar,ar+residual,ar+coupled,hf")
    assert [item.comparable(coupled) for item in (plain, drawn, noisy, peer)] == [
        True,
        False,
        True,
        False,
    ]
    assert [item.comparable(residual) for item in (plain, drawn, noisy, peer)] == [
        False,
        False,
        True,
        False,
    ]
    assert not any(
        item.comparable(SamplingParams(temperature=1.0)) for item in (plain, drawn, noisy, peer)
    )
    assert all(item.comparable(SamplingParams()) for item in (plain, drawn, noisy, peer))


def test_methods_of_a_model_give_the_seeds_tokens_unless_they_are_residual(toy_folder):
    items = parse_methods(
        "ar,pld,logitspec:8,dyspec:8,ar+residual,specinfer:8+residual", drafter=toy_folder
    )
    runners, _ = load_runners(items, toy_folder, "float32", "cpu", toy_folder)
    questions = [
        Question(i, "x", (text,)) for i, text in enumerate(("abc abc", "one two one two", "q"))
    ]
    results = measured(runners, questions, SamplingParams(max_tokens=24, temperature=0.6, seed=4))
    assert [summary.identical for summary in summaries(results).values()] == [
        3,
        3,
        3,
        3,
        None,
        None,
    ] and results.differences == []
    answers = [trial.answers for trial in results.trials]
    assert all(
        any(one["ar"].token_ids != one[name].token_ids for one in answers)
        for name in ("ar+residual", "specinfer:8+residual")
    )


def test_refused_prompt_is_left_out_for_all_methods_with_later_turns(caplog):
    runners = two_methods()
    runners["fast"].fails = {"q1": InvalidInput("prompt too long")}
    questions = [
        Question(0, "x", ("q0",)),
        Question(1, "x", ("q1", "later")),
        Question(2, "x", ("q2",)),
    ]
    results = measured(runners, questions, all_turns=True)
    assert [trial.question.question_id for trial in results.trials] == [0, 2] and results.complete
    assert [(skipped.question_id, skipped.reason) for skipped in results.skipped] == [
        (1, "prompt too long")
    ]
    assert "later" not in {text for _, text in runners["ar"].calls} and "question 1" in caplog.text
    assert "prompts left out: 1; the first: prompt too long" in "\n".join(report.footer(results))


def test_interrupted_run_keeps_whole_prompts_only():
    runners = two_methods()
    runners["ar"].fails = {"q1": KeyboardInterrupt()}
    results = begin(runners, PARAMS)
    with pytest.raises(KeyboardInterrupt):
        list(run(questions_of("x", "y", "z"), runners, results))
    assert [trial.question.question_id for trial in results.trials] == [0] and not results.complete


@examples(100)
@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_first_difference(a, b):
    position = first_difference(a, b)
    if position is None:
        assert a == b
    else:
        assert (
            a[:position] == b[:position]
            and a[position : position + 1] != b[position : position + 1]
        )


def test_differences_carry_the_gap_after_what_both_agree_on():
    runners = two_methods()
    runners["late"] = FakeRunner("late", runners["ar"].calls, tokens=(1, 2, 9, 4))
    runners["short"] = FakeRunner("short", runners["ar"].calls, tokens=(1, 2))
    results = measured(runners, questions_of("x"))
    late, short = results.differences
    assert (late.method, late.position, late.reference_token, late.token) == ("late", 2, 3, 9)
    assert (short.method, short.position, short.reference_token, short.token) == (
        "short",
        2,
        3,
        None,
    )
    assert runners["ar"].prompts[1:] == [[ord("q"), ord("0"), 1, 2]], (
        "one pass for both, after prompt and shared tokens"
    )
    assert late.gap == short.gap == 4 / 8
    assert [summaries(results)[name].identical for name in results.methods] == [1, 1, 0, 0]
    assert "late: 1 of 1 outputs differ; the target's top-2 logit gap" in "\n".join(
        report.footer(results)
    )


def test_the_gap_of_a_sampled_difference_counts_the_noise_in():
    runners = two_methods()
    runners["late"] = FakeRunner("late", runners["ar"].calls, tokens=(1, 2, 9, 4))
    # 2 tokens of the prompt, 2 of the answer
    noise = Noise(5, 0, 10).of(np.arange(10), np.full(10, 4))
    for top_k, possible in ((0, range(10)), (2, (3, 7))):
        (one,) = measured(
            runners, questions_of("x"), SamplingParams(temperature=0.6, seed=5, top_k=top_k)
        ).differences
        logits = runners["ar"].last_logits([0] * 4).tolist()
        sums = sorted(logits[token] / 0.6 + noise[token] for token in possible)
        assert one.gap == pytest.approx(sums[-1] - sums[-2], abs=1e-6)
    (one,) = measured(
        runners, questions_of("x"), SamplingParams(temperature=0.6, seed=5, top_k=1)
    ).differences
    assert one.gap == inf, "one token is left"
    results = measured(runners, questions_of("x"), SamplingParams(temperature=1e-6, seed=5))
    assert results.differences[0].gap == pytest.approx(0.5 / 1e-6, rel=1e-4), (
        "a probability that is 0 in float32 has a gap all the same"
    )
    assert "top-2 gap, noise counted in, at the first" in "\n".join(report.footer(results))


# Figures


def test_statistics_are_ratios_of_sums():
    calls: list = []
    ar, fast = FakeRunner("ar", calls), FakeRunner("fast", calls)
    results = begin({"ar": ar, "fast": fast}, PARAMS)
    for i, (category, tokens, seconds, steps, fast_seconds) in enumerate(
        (("x", 10, 5.0, 5, 2.0), ("y", 30, 10.0, 10, 3.0))
    ):
        ar.reply = replace(
            ar.reply, token_ids=[1] * (tokens + 1), decoded=tokens, steps=tokens, seconds=seconds
        )
        fast.reply = Answer(
            [1] * (tokens + 1), "", tokens, steps, fast_seconds, 0.5, 1.0, 3 * steps, 0.25
        )
        list(run([Question(i, category, ("q",))], {"ar": ar, "fast": fast}, results))
    whole = summaries(results)
    assert (
        whole["ar"].speedup == 1
        and whole["ar"].mean_accepted_tokens == 1
        and whole["ar"].tokens_per_second == 40 / 15
    )
    assert whole["fast"].speedup == pytest.approx(15 / 5), (
        "equal outputs: the ratio of total decode times"
    )
    assert (
        whole["fast"].mean_accepted_tokens == 40 / 15 and whole["fast"].tokens_per_second == 40 / 5
    )
    assert (whole["fast"].draft_ms, whole["fast"].verify_ms) == pytest.approx(
        (1000 / 15, 2000 / 15)
    )
    assert whole["fast"].overhead_ms == pytest.approx(2000 / 15)
    assert whole["fast"].drafter_calls == 3 and whole["fast"].drafter_ms == pytest.approx(500 / 15)
    assert whole["fast"].break_even_ms == pytest.approx(1000 * (15 - 5 + 0.5) / 45)
    assert whole["ar"].drafter_calls is whole["ar"].drafter_ms is whole["ar"].break_even_ms is None
    parts = by_category(results)
    assert (
        list(parts) == ["x", "y"]
        and parts["x"]["fast"].speedup == 2.5
        and parts["y"]["fast"].speedup == pytest.approx(10 / 3)
    )


def test_speedup_is_per_token_where_outputs_differ():
    calls: list = []
    ar = FakeRunner("ar", calls, tokens=range(11), seconds=10.0)  # 1 s a token
    other = FakeRunner("other", calls, tokens=range(6), seconds=2.5)  # 0.5 s a token
    results = measured({"ar": ar, "other": other}, questions_of("x"))
    assert summaries(results)["other"].speedup == 2.0


def test_nothing_decoded_gives_no_figures_instead_of_failing():
    calls: list = []
    ended = FakeRunner("ended", calls, tokens=(1,), steps=0, seconds=0.0, split=(0.0, 0.0))
    peer = FakeRunner("hf", calls, split=(None, None))
    results = measured({"ar": ended, "hf": peer}, questions_of("x"))
    summary = summaries(results)["ar"]
    assert (
        summary.tokens_per_second,
        summary.speedup,
        summary.mean_accepted_tokens,
        summary.draft_ms,
    ) == (None,) * 4
    assert summaries(results)["hf"].speedup is None
    assert (
        summaries(results)["hf"].verify_ms is None and summaries(results)["hf"].overhead_ms is None
    )
