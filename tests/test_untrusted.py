"""What a checkpoint, a model or a trace says is not taken at its word."""

import io
import json
import math
from contextlib import redirect_stdout

import pytest

import fake_llm
from cases import refuses
from checkpoints import DRAFT, LLAMA, eagle3, read, write
from quickbeam.cli import common
from quickbeam.cli.common import harmless, strict_json
from quickbeam.drafters.layouts import EAGLE, is_kind
from quickbeam.engine.result import Logprob

EVIL, SHOWN = "a\x1b[31m\x9bb\r\x00\x7f\n\tc", "a\\x1b[31m\\x9bb\\x0d\\x00\\x7f\n\tc"

OUTSIDE = ["../elsewhere.safetensors", "/elsewhere.safetensors", "a/../../x", "..\\elsewhere"]


@pytest.mark.parametrize("name", [*OUTSIDE, "C:\\x", "\\\\host\\x"])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    config, state = LLAMA | {"draft_vocab_size": DRAFT}, eagle3()
    folder = write(tmp_path / "drafter", config, state, "sharded")
    assert is_kind(folder, EAGLE) and read(folder) is not None
    (tmp_path / "elsewhere.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("b.safetensors", json.dumps(name)[1:-1]))
    refuses("can't be read as weights", read, folder)


def test_json_is_strict_and_control_characters_are_shown():
    plain = {"c": "Infinity", "d": None, "e": True, "f": 7}
    record = {"a": [-math.inf, (math.nan, 1.5)], "b": {3: math.inf}, **plain}
    assert json.loads(strict_json(record)) == {"a": [None, [None, 1.5]], "b": {"3": None}, **plain}
    assert harmless(EVIL) == SHOWN
    assert harmless("ä\u3000\u200d🙂\n") == "ä\u3000\u200d🙂\n"


def test_log_probabilities_of_banned_tokens_are_null(faked, monkeypatch):
    banned = lambda token, *_: Logprob(token, -math.inf, {5: -math.inf, 6: -0.5})  # noqa: E731
    monkeypatch.setattr(fake_llm, "Logprob", banned)
    shown = faked("generate", "hi", "--json", "--logprobs", "1").stdout
    record = json.loads(shown, parse_constant=pytest.fail)
    assert record["logprobs"][0]["logprob"] is None
    assert record["logprobs"][0]["top"] == {"5": None, "6": -0.5}


@pytest.mark.parametrize(("terminal", "expected"), [(True, SHOWN), (False, EVIL)])
def test_a_terminal_is_shown_what_a_pipe_is_given(terminal, expected):
    out = io.StringIO()
    out.isatty = lambda: terminal
    with redirect_stdout(out):
        common.write(EVIL)
    assert out.getvalue() == expected


def test_a_trace_does_not_command_the_terminal(faked, tmp_path):
    path = tmp_path / "trace.json"
    assert faked("generate", "hi", "--trace", path).exit_code == 0
    trace = json.loads(path.read_text())
    trace["answer"]["model"] = "m\x1b[2Jm"
    trace["steps"][0]["nodes"][1]["source"] = "s\x9b2Js"
    path.write_text(json.dumps(trace))
    shown = faked("inspect", path).stdout
    assert "m\\x1b[2Jm" in shown and "s\\x9b2Js" in shown
    assert not set(shown) & {"\x1b", "\x9b"}
