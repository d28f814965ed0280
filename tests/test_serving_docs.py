"""What docs/serving.md tells the reader to do works: its requests are answered, its options, paths and metrics are those of the server.

pytest tests/test_serving_docs.py
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main

from quickbeam import LLM
from quickbeam.cli.app import app
from quickbeam.serve.app import create_app
from quickbeam.serve.runner import Runner
from quickbeam.serve.settings import ServeSettings
from running import serving

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- not run by tests: needs [^\n]+ -->\n)?```(\w*)\n(.*?)```", PAGE, re.DOTALL)
RUN = [line for skipped, kind, body in BLOCKS if kind == "bash" and not skipped for line in body.splitlines()]


@pytest.fixture(scope="module")
def address(smollm2):
    with LLM() as llm, serving(Runner(ServeSettings(), llm)) as (base, _):
        yield base


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("line", RUN, ids=lambda line: line[:70])
def test_a_command_is_answered(line, address):
    asked = subprocess.run(shlex.split(line.replace("http://127.0.0.1:8000", address)), capture_output=True, text=True, timeout=120)
    assert asked.returncode == 0 and asked.stdout
    if "/v1/" not in line:
        return
    body = json.loads(asked.stdout)
    content = body["choices"][0]["message"]["content"]
    assert content
    if "json_schema" in line:
        assert set(json.loads(content)) == {"name", "colour"}


@pytest.mark.slow
@pytest.mark.parametrize("code", [body for _, kind, body in BLOCKS if kind == "python"])
def test_python_is_answered(code, address, capsys):
    small = re.sub(r"max_tokens=\d+", "max_tokens=8", code.replace("http://127.0.0.1:8000", address))
    exec(compile(small, "serving.md", "exec"), {"__name__": "serving"})
    assert len(capsys.readouterr().out.split()) > 8


def test_options_are_those_of_the_command():
    command = typer.main.get_command(app).commands["serve"]
    known = {option for parameter in command.params for option in parameter.opts}
    lines = [line for _, _, body in BLOCKS for line in body.splitlines() if line.startswith("quickbeam serve")]
    named = set(re.findall(r"`(--[\w-]+)", PAGE)) | {word for line in lines for word in re.findall(r"--[\w-]+", line)}
    assert named <= known, named - known
    defaults = {option: parameter.default for parameter in command.params for option in parameter.opts}
    told = dict(re.findall(r"^\| `(--[\w-]+) (\S+)` \|", PAGE, re.MULTILINE))
    assert told and {option: str(defaults[option]) for option in told} == told


def test_paths_and_metrics_are_those_of_the_server(toy_folder):
    with LLM(toy_folder, "ar") as llm:
        runner = Runner(ServeSettings(), llm)
        paths = {"/", *create_app(runner).openapi()["paths"]}
        exposed = runner.metrics.expose("")[0].decode()
    table = PAGE.split("| path | what it is |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(/[\w/]*)`", table)) <= paths
    assert all(name in exposed for name in re.findall(r"`((?:vllm|quickbeam):\w+)`", PAGE))


def test_files_that_it_names_are_there():
    for name in re.findall(r"\]\(([\w./-]+)\)", PAGE):
        assert (ROOT / "docs" / name).exists(), name
    for name in re.findall(r"`((?:src|deploy)/[\w./-]+)`", PAGE):
        assert (ROOT / name).exists(), name
