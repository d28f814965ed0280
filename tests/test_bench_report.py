"""The benchmark's tables, record and command."""

import json

import pytest
from typer.testing import CliRunner

from fake_runner import FakeRunner, measured, questions_of, two_methods
from quickbeam.bench import report
from quickbeam.cli import bench as command
from quickbeam.cli import common
from quickbeam.errors import InvalidInput, QuickbeamError


def shown(results):
    return "\n".join([*report.tables(results), *report.footer(results)]).splitlines()


def test_tables_show_figures_and_the_reference():
    runners = two_methods()
    runners["hf"] = FakeRunner("hf", runners["ar"].calls, seconds=8.0, split=(0.0, 0.0))
    lines = shown(measured(runners, questions_of("maths", "[/odd|]")))
    row = next(line for line in lines if "maths" in line)
    assert row.split()[1:10:2] == ["maths", "ar", "1.00", "2.00", "2.50"] and "1 of 1" in row
    overall = next(line for line in lines if "overall" in line and "fast" in line)
    assert all(figure in overall for figure in ("2.00", "8.00", "4.00 ", "2 of 2"))
    step = [line for line in lines if "fast" in line][-1]
    assert "50.00" in step and "150.0" in step
    assert [line for line in lines if "hf" in line][-1].count(" - ") == 6, "phases of a peer"
    assert any("[/odd/]" in line for line in lines), "a cell stays in its place"
    assert all(line.count("|") == lines[0].count("|") for line in lines[: lines.index("")])
    assert any("speed-up over ar" in line for line in lines)


def test_save_leaves_the_old_file_where_the_new_one_fails(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    common.save("--json", path, {"a": float("nan")})
    with pytest.raises(TypeError, match="JSON"):
        common.save("--json", path, {"a": object()})

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(QuickbeamError, match=r"--json .*No space left"):
        common.save("--json", path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": None}


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
            command, "load_runners", lambda *_: (loads.append(1), (runners, "toy", None))[1]
        )
        items = [runner.item for runner in runners.values()]
        if "--methods" not in options:
            monkeypatch.setattr(command, "parse_methods", lambda *_: items)
        given = ["--questions", str(tmp_path / "q.jsonl"), *map(str, options)]
        result = CliRunner().invoke(command.commands, given)
        monkeypatch.undo()
        result.loads = len(loads)
        return result

    return call


def test_command_prints_tables_and_writes_everything(invoke, tmp_path):
    out = tmp_path / "out.json"
    result = invoke(two_methods(), "--json", out, "--limit", 2)
    assert result.exit_code == 0, result.output
    assert "overall" in result.stdout and "4.00" in result.stdout
    content = json.loads(out.read_text())
    assert content["model"] == "toy" and content["questions"] == 2
    assert content["methods"]["ar"]["prompts"] == 2
    known = {"python", "torch", "transformers", "quickbeam", "cpu", "cores", "threads", "device"}
    known |= {"dtype", "commit", "date", "command", "kernels"}
    assert known <= set(content["environment"]) and content["environment"]["device"] == "cpu"


def test_ctrl_c_keeps_and_shows_what_was_done(invoke, tmp_path):
    runners = two_methods()
    runners["fast"].fails = {"q2": KeyboardInterrupt()}
    result = invoke(runners, "--json", tmp_path / "out.json")
    assert result.exit_code == 130 and "prompts: 2;" in result.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["questions"] == 2 and content["complete"] is False


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
        ("--temperature", "-1"),
        ("--budget", "x"),
        ("--max-tokens", "1"),
        ("--methods", "ar,hf", "--stop", "x"),
    ],
)
def test_bad_input_is_refused_before_loading(invoke, options):
    result = invoke(two_methods(), *options)
    assert isinstance(result.exception, InvalidInput) and result.loads == 0
