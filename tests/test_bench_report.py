"""The benchmark's tables, record, plot and command: pytest tests/test_bench_report.py."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fake_runner import FakeRunner, measured, questions_of, two_methods
from quickbeam.bench import files, report
from quickbeam.bench.run import Results
from quickbeam.bench.summary import summaries
from quickbeam.cli import bench as command
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams


def rendered(results: Results) -> str:
    console = Console(width=120, record=True, file=StringIO())
    console.print(report.category_table(results))
    console.print(report.overall_table(results))
    console.print("\n".join(report.footer(results)))
    return console.export_text()


def test_missing_figures_are_dashes():
    calls: list = []
    ended = FakeRunner("ended", calls, tokens=(1,), steps=0, seconds=0.0)
    rows = [
        line
        for line in rendered(measured({"ended": ended}, questions_of("x"))).splitlines()
        if "ended" in line
    ]
    assert rows[0].count(" - ") == 3 and "1/1" in rows[0]


def test_tables_show_figures_and_the_reference():
    results = measured(two_methods(), questions_of("maths", "[/odd]"))
    lines = rendered(results).splitlines()
    row = next(line for line in lines if "maths" in line)
    assert "ar" in row and "1.00" in row and "2.0" in row and "1/1" in row
    overall = [line for line in lines if "fast" in line][-1]
    assert all(figure in overall for figure in ("2.00", "8.0", "4.00x", "2/2", "50.00", "150.00"))
    assert any("[/odd]" in line for line in lines), "a category is text, not markup"
    assert "reference: ar;" in rendered(results) and "ar is not among" not in rendered(results)
    runners = two_methods()
    del runners["ar"]
    assert "reference: fast (ar is not among the methods)" in rendered(
        measured(runners, questions_of("x"))
    )


def test_calls_of_a_drafter_are_shown_where_there_are_any():
    runners = two_methods()
    assert all(
        words not in rendered(measured(runners, questions_of("x")))
        for words in ("drafter ms", "call of the drafter")
    )
    name = "dyspec-threshold:16"
    runners[name] = FakeRunner(name, runners["ar"].calls)
    runners[name].reply = replace(runners[name].reply, drafter_calls=12, drafter_seconds=0.25)
    results = measured(runners, questions_of("x"))
    lines = rendered(results).splitlines()
    (row,) = [line for line in lines if name in line and "125.00" in line]
    spare = summaries(results)[name].break_even_ms
    assert f"{name}: a call of the drafter took 20.83 ms; as fast as ar at {spare:.2f} ms" in lines
    assert (
        row.split("│")[6:9] == ["   125.00 ", "      62.50 ", "  3.00 "]
        and max(map(len, lines)) <= 120
    )
    content = report.record(results, {}, "m", {})
    assert (
        content["methods"][name]["drafter_ms"] == 62.5
        and content["trials"][0]["answers"][name]["drafter_calls"] == 12
    )
    assert content["methods"]["ar"]["drafter_calls"] is None


def test_what_was_accepted_is_told_by_source_and_a_step():
    runners = two_methods()
    runners["fast"].reply = replace(
        runners["fast"].reply, nodes=9, prefill_seconds=0.5, accepted={"drafter": 3, "n-gram": 1}
    )
    results = measured(runners, questions_of("x", "y"))
    fast, plain = (summaries(results)[name] for name in ("fast", "ar"))
    assert (fast.accepted, fast.nodes, fast.prefill_ms) == (
        {"drafter": 1.5, "n-gram": 0.5},
        4.5,
        500.0,
    )
    # a runner that doesn't tell
    assert (plain.accepted, plain.nodes, plain.prefill_ms) == (None, None, None)
    assert report.record(results, {}, "m", {})["methods"]["fast"]["accepted"] == {
        "drafter": 1.5,
        "n-gram": 0.5,
    }


def test_json_record_holds_what_a_reader_needs(tmp_path):
    runners = two_methods()
    runners["other"] = FakeRunner("other", runners["ar"].calls, tokens=(1, 9))
    results = measured(runners, questions_of("x", "y", "x"))
    files.save(
        tmp_path / "out.json", report.record(results, {"python": "3"}, "m", {"max_tokens": 8})
    )
    content = json.loads((tmp_path / "out.json").read_text())
    assert {
        "environment",
        "model",
        "settings",
        "questions",
        "complete",
        "reference",
        "methods",
        "differences",
        "skipped",
    } <= set(content)
    assert (content["questions"], content["complete"], content["reference"], content["model"]) == (
        3,
        True,
        "ar",
        "m",
    )
    fields = {
        "tokens_per_second",
        "speedup",
        "mean_accepted_tokens",
        "identical",
        "prompts",
        "draft_ms",
        "verify_ms",
        "overhead_ms",
    }
    for entry in content["methods"].values():
        assert fields | {"by_category"} <= set(entry) and set(entry["by_category"]) == {"x", "y"}
        assert all(fields <= set(row) for row in entry["by_category"].values())
    assert (
        content["methods"]["fast"]["speedup"] == 4
        and content["methods"]["fast"]["by_category"]["x"]["prompts"] == 2
    )
    assert content["methods"]["other"]["identical"] == 0 and len(content["differences"]) == 3
    assert (
        content["differences"][0]["gap"] > 0
        and content["trials"][0]["answers"]["ar"]["decoded"] == 4
    )


def test_a_gap_that_is_infinite_is_null():
    runners = two_methods()
    runners["other"] = FakeRunner("other", runners["ar"].calls, tokens=(1, 9))
    results = measured(runners, questions_of("x"), SamplingParams(temperature=0.6, seed=1, top_k=1))
    assert report.record(results, {}, "m", {})["differences"][0]["gap"] is None


def test_save_leaves_the_old_file_where_the_new_one_fails(tmp_path):
    path = tmp_path / "out.json"
    files.save(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        files.save(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


def test_outputs_are_checked_before_any_work(tmp_path, monkeypatch):
    files.check_output("--json", tmp_path / "fine.json")
    files.check_plot(tmp_path / "fine.png")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match="is a folder"):
        files.check_output("--json", tmp_path)
    with pytest.raises(InvalidInput, match="does not exist"):
        files.check_output("--json", tmp_path / "none" / "out.json")
    with pytest.raises(InvalidInput, match="must end in"):
        files.check_plot(tmp_path / "out.gif")
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"quickbeam\[bench\]"):
        files.check_plot(tmp_path / "out.png")


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(measured(two_methods(), questions_of("x", "y")), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "out.png"
    ).stat().st_size > 5000


# The command


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run `bench` on three questions with the given runners in place of loaded models."""
    lines = [
        json.dumps({"question_id": i, "category": "ab"[i % 2], "turns": [f"q{i}", "more"]})
        for i in range(3)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))

    def call(runners, *options):
        loads = []
        monkeypatch.setattr(
            command, "load_runners", lambda items, *_: (loads.append(1), (runners, "toy"))[1]
        )
        result = CliRunner().invoke(
            command.commands, ["--questions", str(tmp_path / "q.jsonl"), *map(str, options)]
        )
        result.loads = len(loads)
        return result

    return call


def test_command_prints_tables_and_writes_everything(invoke, tmp_path):
    result = invoke(
        two_methods(),
        "--json",
        tmp_path / "out.json",
        "--plot",
        tmp_path / "out.svg",
        "--turns",
        "all",
        "--limit",
        2,
    )
    assert result.exit_code == 0, result.output
    assert "overall" in result.stdout and "4.00x" in result.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert (
        content["model"] == "toy"
        and content["questions"] == 2
        and content["methods"]["ar"]["prompts"] == 4
    )
    assert {
        "python",
        "torch",
        "transformers",
        "quickbeam",
        "cpu",
        "cores",
        "threads",
        "device",
        "dtype",
    } <= set(content["environment"])
    assert content["environment"]["device"] == "cpu" and content["settings"]["turns"] == "all"
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_a_seed_makes_sampled_outputs_comparable(invoke, tmp_path):
    runners = two_methods()
    runners["other"] = FakeRunner("other", runners["ar"].calls, tokens=(1, 9))
    for options, identical in (
        (["--seed", 3], [3, 3, 0]),
        ([], [None] * 3),
        (["--seed", 3, "--coupling", "residual"], [None] * 3),
    ):
        result = invoke(runners, "--temperature", 0.6, *options, "--json", tmp_path / "out.json")
        assert result.exit_code == 0, result.output
        content = json.loads((tmp_path / "out.json").read_text())
        assert [one["identical"] for one in content["methods"].values()] == identical
        assert content["settings"]["coupling"] == (
            "residual" if "residual" in options else "coupled"
        )
        assert ("give --seed to compare outputs" in result.stdout) == (not options)


def test_record_is_written_after_every_question(invoke, tmp_path, monkeypatch):
    counts = []
    monkeypatch.setattr(
        "quickbeam.cli.bench.save", lambda path, content: counts.append(content["questions"])
    )
    assert invoke(two_methods(), "--json", tmp_path / "out.json").exit_code == 0
    assert counts == [1, 2, 3, 3]


def test_ctrl_c_keeps_and_shows_what_was_done(invoke, tmp_path):
    runners = two_methods()
    runners["fast"].fails = {"q2": KeyboardInterrupt()}
    result = invoke(runners, "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert result.exit_code == 130 and "prompts: 2;" in result.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert (
        content["questions"] == 2
        and content["complete"] is False
        and (tmp_path / "out.png").exists()
    )


def test_failure_mid_run_keeps_and_shows_what_was_done(invoke, tmp_path):
    runners = two_methods()
    runners["fast"].fails = {"q1": QuickbeamError("NaN logits")}
    result = invoke(runners, "--json", tmp_path / "out.json")
    assert isinstance(result.exception, QuickbeamError) and "prompts: 1;" in result.stdout
    assert json.loads((tmp_path / "out.json").read_text())["questions"] == 1


def test_full_disk_is_told_after_the_tables(invoke, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quickbeam.cli.bench.save", full)
    result = invoke(two_methods(), "--json", tmp_path / "out.json")
    assert "prompts: 3;" in result.stdout and isinstance(result.exception, QuickbeamError)
    assert "No space left on device" in str(result.exception) and not isinstance(
        result.exception, InvalidInput
    )


def test_all_prompts_refused_is_bad_input(invoke):
    runners = two_methods()
    runners["ar"].fails = {f"q{i}": InvalidInput("too long") for i in range(3)}
    result = invoke(runners)
    assert isinstance(result.exception, InvalidInput) and "too long" in str(result.exception)


@pytest.mark.parametrize(
    "options",
    [
        ("--methods", "nope"),
        ("--questions", "/none.jsonl"),
        ("--json", "/none/out.json"),
        ("--plot", "/none/out.png"),
        ("--temperature", "-1"),
        ("--budget", "x"),
    ],
)
def test_bad_input_is_refused_before_loading(invoke, options):
    result = invoke(two_methods(), *options)
    assert isinstance(result.exception, InvalidInput) and result.loads == 0
