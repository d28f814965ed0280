"""`bench structured`: its tasks, what it counts, and that it counts what is wrong.

pytest tests/test_structured.py
"""

from __future__ import annotations

import json

import jsonschema
import pytest
from typer.testing import CliRunner

from quickbeam import LLM, SamplingParams
from quickbeam.bench import structured
from quickbeam.bench.methods import parse_methods
from quickbeam.bench.structured import BOUND, FREE, Task, measure, tasks
from quickbeam.cli import common
from quickbeam.cli.app import app
from quickbeam.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
TASK = Task("size", "one two three", SCHEMA)
PARAMS = SamplingParams(max_tokens=48, temperature=0.8)


@pytest.fixture(scope="module")
def llm(toy_folder):
    with LLM(toy_folder, "pld") as found:
        yield found


def test_the_tasks_have_schemas_that_an_answer_can_fit():
    found = tasks()
    assert len(found) == len({task.name for task in found}) == 10
    for task in found:
        jsonschema.Draft202012Validator.check_schema(dict(task.schema))
        assert task.prompt and Grammar.json_schema(task.schema).kind == "json_schema"


def test_answers_with_a_schema_fit_it_and_are_the_same_with_every_method(llm):
    rows = measure(llm, [TASK], parse_methods("ar,pld,logitspec"), 3, PARAMS)
    assert list(rows) == [
        (kind, name) for kind in (FREE, BOUND) for name in ("ar", "pld", "logitspec")
    ]
    for (kind, name), row in rows.items():
        assert row.answers == row.identical == 3 and row.tokens_per_second > 0
        assert row.valid == (3 if kind == BOUND else 0)
        assert kind == FREE or name == "ar" or row.steps < row.tokens, (
            "what the grammar forces takes no step of its own"
        )


def test_what_is_cut_short_or_differs_is_counted(llm, monkeypatch):
    assert (
        measure(llm, [TASK], parse_methods("ar"), 1, SamplingParams(max_tokens=4))[
            BOUND, "ar"
        ].valid
        == 0
    )
    answer = structured._answer

    def other(llm, task, item, params):
        found = answer(llm, task, item, params)
        if item.method == "pld":
            found.token_ids[-1] += 1
        return found

    monkeypatch.setattr(structured, "_answer", other)
    assert measure(llm, [TASK], parse_methods("ar,pld"), 2, PARAMS)[BOUND, "pld"].identical == 0


def test_the_command(toy_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(structured, "tasks", lambda: [TASK])
    record = tmp_path / "record.json"
    options = [
        "--model",
        toy_folder,
        "--methods",
        "ar,pld",
        "--answers",
        "2",
        "--max-tokens",
        "40",
        "--json",
        str(record),
    ]
    result = CliRunner().invoke(app, ["bench", "structured", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert "2 of 2" in result.stdout
    assert json.loads(record.read_text())["structured"][BOUND]["pld"]["valid"] == 2
    assert CliRunner().invoke(app, ["bench", "structured", "--methods", "hf"]).exit_code == 2


def test_a_record_that_cannot_be_written(toy_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(structured, "tasks", lambda: [TASK])
    options = ["--model", toy_folder, "--methods", "ar", "--answers", "1", "--max-tokens", "4"]
    options += ["--json", str(tmp_path / "record.json")]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(common, "save", full)
    result = CliRunner().invoke(app, ["bench", "structured", *options])
    assert result.exit_code == 1 and "tokens/s" in result.stdout
    assert "not written (No space left on device)" in result.stderr
    monkeypatch.setattr("quickbeam.llm.LLM", None)  # nothing is loaded before
    options[-1] = str(tmp_path)
    result = CliRunner().invoke(app, ["bench", "structured", *options])
    assert result.exit_code == 2 and "is a folder" in result.stderr
