"""`bench throughput`: arrivals, cancellations, and what is counted."""

import json
from dataclasses import replace

import pytest

from quickbeam import LLM, SamplingParams
from quickbeam.bench import throughput
from quickbeam.bench.methods import parse_methods
from quickbeam.bench.throughput import Run, TimedRequest, by_load, figures, measure, requests
from scripts import cli

PROMPTS = [[5, 6, 7, 8, 5, 6, 7][: 3 + i % 4] * (1 + i) for i in range(9)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def measured(llm, asked, methods, loads, params=PARAMS, **options):
    runs: list[Run] = []
    measure(llm, asked, parse_methods(methods, drafter="x"), loads, params, runs, **options)
    return runs


@pytest.mark.parametrize(("rate", "cancel"), [(None, 0.0), (300.0, 0.0), (None, 0.4), (300.0, 0.4)])
def test_every_answer_is_the_one_given_alone(toy_folder, rate, cancel):
    with LLM(toy_folder, "pld") as llm:
        asked = requests(PROMPTS, rate, cancel, 12)
        loads = by_load(measured(llm, asked, "ar,pld:8,logitspec", [1, 3], rounds=2))
    assert list(loads) == [1, 3]
    for by_name in loads.values():
        assert list(by_name) == ["ar", "pld:8", "logitspec"]
        for name, one in by_name.items():
            assert one["identical"] == one["prompts"] == 18
            assert one["tokens_per_second"] > 0 and one["p50_ttft_ms"] <= one["p95_ttft_ms"]
            # a tree of any width may be a whole answer
            assert name == "logitspec" or (one["cancelled"] > 0) == (cancel > 0)
    assert loads[1]["ar"]["mean_accepted_tokens"] == 1.0 == loads[1]["ar"]["over_ar"]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_answers_are_those_given_alone_where_they_are_coupled(toy_folder, temperature):
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    with LLM(toy_folder, "dyspec", dtype="float32", drafter=toy_folder) as llm:
        asked = requests(PROMPTS[:5], None, 0.2, 12)
        runs = measured(llm, asked, "ar,pld,dyspec:8", [1, 3], params)
        assert [run.identical for run in runs] == [5, 5, 5] * 2
        for other in (replace(params, seed=None), replace(params, coupling="residual")):
            drawn = measured(llm, asked, "ar", [3], other)[0]
            assert drawn.identical is None
        plain, drawn = ([one.token_ids for one in run.answers] for run in (runs[3], drawn))
        assert sorted(plain) != sorted(drawn)


def test_another_answer_is_not_identical(toy_folder, monkeypatch):
    """The wrong version: an engine that gives a sequence another's tokens."""
    served = throughput.serve

    def wrong(*args):
        run = served(*args)
        run.answers[0].token_ids, run.answers[1].token_ids = [1] * 12, [2] * 12
        return run

    with LLM(toy_folder, "ar") as llm:
        monkeypatch.setattr(throughput, "serve", wrong)
        (run,) = measured(llm, requests(PROMPTS, None, 0.0, 12), "ar", [2])
    assert run.identical == 7


def test_figures_of_runs_and_arrivals():
    answers = [
        TimedRequest([1], first=1.0, last=3.0, token_ids=[1, 2, 3], steps=1, nodes=4),
        TimedRequest([2], arrives=1.0, cancelled=True),
    ]
    row = figures([Run(1, "pld", answers, 3.0, 2.0, 3), Run(1, "pld", seconds=1.0)])
    assert row["tokens_per_second"] == 0.75 and row["decoding_tokens_per_second"] == 1.5
    assert row["p50_ttft_ms"] == 1000.0 and row["p95_tpot_ms"] == 1000.0
    assert row["mean_accepted_tokens"] == 2.0 and row["nodes_per_step"] == 4.0
    assert row["cancelled"] == 1 and row["identical"] is None
    assert {one.arrives for one in requests(PROMPTS, None, 0.0, 12)} == {0.0}
    many = requests(PROMPTS * 200, 50.0, 0.0, 12)
    arrivals = [one.arrives for one in many]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(many) == pytest.approx(1 / 50, rel=0.1)
    leaving = [one.leaves_after for one in requests(PROMPTS * 10, None, 1 / 3, 12)]
    assert sum(after is not None for after in leaving) == 30
    assert all(1 <= after <= 6 for after in leaving if after is not None)


def test_the_command(toy_folder, tmp_path):
    record, questions = tmp_path / "record.json", tmp_path / "questions.jsonl"
    turns = ["the cat sat", "one two three", "far too long " * 50]
    lines = [{"question_id": i, "category": "c", "turns": [turn]} for i, turn in enumerate(turns)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    options = ["bench", "throughput", "--model", toy_folder, "--methods", "ar,pld", "--raw"]
    options += ["--concurrency", "1,2", "--max-tokens", "4", "--questions", str(questions)]
    options += ["--json", str(record)]
    result = cli(*options, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert "| at a time | method | tokens/s" in result.stdout
    content = json.loads(record.read_text())
    assert content["concurrency"]["2"]["pld"]["identical"] == 2
    assert content["settings"]["skipped"] == 1 and content["complete"]
    for coupling, same in (("coupled", 2), ("residual", None)):
        given = ["--temperature", "0.6", "--top-k", "40", "--coupling", coupling]
        result = cli(*options, *given, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        sampled = json.loads(record.read_text())
        assert sampled["concurrency"]["2"]["pld"]["identical"] == same
        assert {"coupling": coupling, "top_k": 40}.items() <= sampled["settings"].items()
    assert set(content) >= {"environment", "model", "settings", "concurrency", "complete"}


def test_bad_options_are_refused_in_a_line(monkeypatch):
    wrong = "--methods hf", "--concurrency none", "--top-p 2", "--json no-such-folder/record.json"
    for options in map(str.split, wrong):
        monkeypatch.setattr("quickbeam.llm.LLM", None)  # nothing is loaded before
        result = cli("bench", "throughput", *options)
        assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
        assert options[0] in result.stderr or options[0][2:].replace("-", "_") in result.stderr
