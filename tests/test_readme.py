"""What README.md tells the reader to do works: its commands run, its tables and its file tree are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from quickbeam.cli.app import app
from quickbeam.presets import PRESETS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- not run by tests: needs [^\n]+ -->\n)?```(\w*)\n(.*?)```", README, re.DOTALL)

SMALL = {"generate": ["--max-tokens", "8"], "bench": ["--limit", "1", "--max-tokens", "4"], "demo": ["--max-tokens", "8"]}
SMALL["bench passes"] = ["--repeats", "1"]


def lines(skipped: bool) -> list[list[str]]:
    text = "".join(body for mark, language, body in BLOCKS if language == "bash" and bool(mark) == skipped)
    return [shlex.split(line, comments=True) for line in text.splitlines()]


def commands(skipped: bool) -> list[list[str]]:
    return [line[1:] for line in lines(skipped) if line[0] == "quickbeam"]


def test_every_line_is_of_a_kind_that_is_tested():
    assert {line[0] for skipped in (False, True) for line in lines(skipped)} <= {"make", "pip", "quickbeam"}


def test_make_targets_and_extras_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {line[1] for line in lines(False) if line[0] == "make"} == {"demo", "test"} <= targets
    extras = set(re.findall(r"\w+", " ".join(re.findall(r"'?\.\[([\w,]+)\]", README))))
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert extras and extras <= set(re.findall(r"^(\w+) = \[", declared, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", commands(False), ids=" ".join)
def test_command_runs(arguments, smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smaller = SMALL.get(" ".join(arguments[:2])) or SMALL.get(arguments[0], [])
    result = CliRunner().invoke(app, [*arguments, *smaller], input="Hello\n/exit\n", catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("arguments", commands(True), ids=" ".join)
def test_options_of_commands_that_are_not_run_exist(arguments):
    command = typer.main.get_command(app)
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.slow
@pytest.mark.parametrize("code", [body for mark, language, body in BLOCKS if language == "python" and not mark])
def test_python_runs(code, smollm2, capsys):
    small, changed = re.subn(r"max_tokens=\d+", "max_tokens=8", code)
    assert changed
    exec(compile(small, "README.md", "exec"), {"__name__": "readme"})
    assert len(capsys.readouterr().out.split()) > 8


def test_the_table_of_methods_is_that_of_the_presets():
    table = README.split("## Methods\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w[\w-]*)` \| (.+) \|$", table, re.MULTILINE)
    assert rows == [(name, preset.summary) for name, preset in PRESETS.items()]


def test_the_file_tree_is_there():
    ((_, _, tree),) = [block for block in BLOCKS if block[1] == ""]
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            assert folder.is_dir(), name
        else:
            assert (folder / name).exists(), name
