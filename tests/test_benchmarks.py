"""Every script of benchmarks/ prints a Markdown table and writes a summary, on a tiny model."""

import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from gguf import GGUFReader
from transformers import Qwen3Config

from cases import refuses
from docs import ROOT, commands, save_drafter
from models import SIZES
from quickbeam.errors import InvalidInput
from quickbeam.models.native import library
from scripts import FOLDER, script

PARTS = {
    "common",
    "gpu_parts",
    "model_shapes",
    "peer_cases",
    "random_gguf",
    "servers",
}  # of scripts
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - PARTS)
FEW = ["--limit", "2", "--max-tokens", "8"]
TRACES = str(FOLDER / "traces.json")
# by script: its arguments, and the key of the summary that holds its figures
RUNS = {
    "acceptance": ([*FEW, "--temperatures", "0,1"], "temperatures"),
    "agents": (["--limit", "2", "--rounds", "1", "--max-tokens", "8"], "memory_of_answers"),
    "compare_drafters": (
        ["ar", "auto", "dyspec:4", "auto-ngram", *FEW, "--temperature", "1"],
        "drafters",
    ),
    "contexts": (["--lengths", "60", "--limit", "1", "--max-tokens", "6"], "contexts"),
    "heads": (["--shapes", "512x32", "--repeats", "1", "--rows", "1,2"], "heads"),
    "learn": (["--taught", "3", "--asked", "2", *FEW], "learn"),
    "mapped": (["--max-tokens", "6"], "seconds"),
    "memory": ([*FEW, "--memory", "20000", "--methods", "ar,dyspec:8"], "methods"),
    "passes": (["--contexts", "8,20", "--widths", "1,4", "--repeats", "1"], "contexts"),
    "simulate": (["--traces", TRACES, "--loads", "1,64", "--shape", "30b-a3b"], "table"),
    "structured": (["--limit", "1", "--answers", "1", "--max-tokens", "8"], "structured"),
    "tool_calls": (["--limit", "1", "--rounds", "1", "--max-tokens", "6"], "tool_calls"),
    "traces": (["--limit", "1", "--max-tokens", "6"], "curves"),
    "trees": ([*FEW, "--budgets", "4", "--temperatures", "0,1", "--draws", "1"], "temperatures"),
    "vocabulary": ([*FEW, "--vocabs", "frequency,router", "--shares", "40"], "points"),
    "weights": ([*FEW, "--widths", "1,2", "--repeats", "1", "--context", "8"], "weights"),
}


@pytest.fixture(scope="module")
def drafter(toy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(folder, 257, 32, 2)
    return str(folder)


def run(name, words, out, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--json", str(out)])
    script(name).main()
    return capsys.readouterr().out, json.loads(out.read_text())


def test_every_script_is_run_here():
    servers = {"peers", "first_byte", "cold_start"}
    others = {"gpu", "recall", "shapes", "second_stream"}
    assert set(NAMES) == {*RUNS, *servers, *others}


@pytest.mark.parametrize("name", RUNS)
def test_a_script_prints_and_writes(name, toy_folder, drafter, tmp_path, monkeypatch, capsys):
    words, key = RUNS[name]
    given = ["--model", toy_folder, "--drafter", drafter, *words]
    shown, summary = run(name, given, tmp_path / "out.json", monkeypatch, capsys)
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(table) > 2 and len({line.count("|") for line in table}) == 1
    assert re.search(rf"^\d{{4}}-\d\d-\d\d, .*: `{name}\.py ", shown, re.MULTILINE)
    assert summary[key] and summary["environment"]["date"] and summary["settings"]["seed"] == "0"


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
def test_shapes_are_measured_and_written_for_llama_cpp(tmp_path, monkeypatch, capsys):
    shapes, config = script("shapes"), Qwen3Config(**SIZES, head_dim=8)
    monkeypatch.setattr(shapes, "MEGABYTES", 1)
    monkeypatch.setitem(shapes.CONFIGS, "tiny", config)
    words = ["--models", "tiny", "--prompt", "20", "--prompts", "1", "--repeats", "1"]
    shown, summary = run("shapes", words, tmp_path / "out.json", monkeypatch, capsys)
    assert "| tiny" in shown and summary["shapes"]["tiny"]["prompt_tokens_per_second"] > 0
    parameters = shapes.RandomParameters(config)
    shapes.write(tmp_path / "tiny.gguf", config, parameters.shapes, "bfloat16")
    written = {one.name for one in GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert len(written) == len(parameters.shapes) and "blk.2.attn_q.weight" in written


@pytest.mark.parametrize("has_model", [True, False])
def test_the_parts_for_a_gpu_run_on_a_cpu(has_model, toy_folder, drafter, tmp_path, monkeypatch):
    gpu, out = script("gpu"), tmp_path / "part.json"
    words = ["--model", toy_folder, "--drafter", drafter] if has_model else []
    parts = ("methods", "host") if has_model else set(gpu.LIMITS) - {"tests", "model"}
    for part in parts:
        options = ["--part", part, "--small", "--device", "cpu", "--json", str(out)]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *options, *words])
        gpu.main()
        found = json.loads(out.read_text())
        tables = [one for one in found.values() if isinstance(one, list)]
        assert (tables and gpu.shown(part, found).startswith(f"## {part}")) or part == "kernels"
        if part == "bits":
            ways = {one["way"]: one["classes"] for one in found["ways"]}
            assert [*ways] == ["library", "triton", "padded to 4", "padded to 8"]
            assert ways["padded to 4"] in ("4", "none"), "one size, in which rows agree or not"
        if part == "methods":
            assert all(one["identical"] == "2 of 2" for one in found["tokens/s"])
            names = {one["method"] for one in found["tokens/s"]}
            assert names >= {"ar", "logitspec", "auto"} and ("dyspec" in names) == has_model


def test_a_part_for_a_gpu_that_fails_or_takes_long_leaves_the_others(tmp_path, monkeypatch, capsys):
    gpu, out = script("gpu"), tmp_path / "out.json"
    monkeypatch.setattr(gpu, "LEAST", 0)
    monkeypatch.setitem(gpu.LIMITS, "kernels", 0.01)
    words = ["--parts", "kernels,passes,environment", "--small", "--device", "nowhere"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, "--json", str(out)])
    gpu.main()
    found = json.loads(out.read_text())
    assert [*found] == ["kernels", "passes", "environment"]
    assert found["kernels"]["error"].startswith("stopped after")
    assert "'nowhere' can't be used" in found["passes"]["error"]
    assert found["environment"]["missing"] == [] and "error" not in found["environment"]
    assert "## environment" in capsys.readouterr().out


def test_pieces_of_a_wheel_are_joined(tmp_path):
    pieces, whole = tmp_path / "pieces", tmp_path / "whole"
    pieces.mkdir()
    whole.mkdir()
    for ending, content in (("ab", b"second"), ("aa", b"first")):
        (pieces / f"some.whl.piece-{ending}").write_bytes(content)
    script("gpu").join_pieces(pieces, whole)
    assert (whole / "some.whl").read_bytes() == b"firstsecond"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words", "key"),
    [
        ("peers", ["--limit", "2", "--max-tokens", "4", "--clients", "1,2"], "cases"),
        ("first_byte", ["--tokens", "60", "--rounds", "1"], "milliseconds"),
        ("cold_start", ["--limit", "2", "--max-tokens", "4", "--rounds", "2"], "gains"),
    ],
)
def test_servers_are_asked(name, words, key, toy_folder, tmp_path, monkeypatch, capsys):
    asked = tmp_path / "questions.jsonl"
    one = {"question_id": 1, "category": "c", "turns": ["one two three"]}
    asked.write_text("\n".join(json.dumps({**one, "question_id": i}) for i in range(2)))
    server = [toy_folder] if name == "peers" else ["--serve", f"--model {toy_folder}"]
    words = [*words, "--questions", str(asked), *server]
    shown, summary = run(name, words, tmp_path / "out.json", monkeypatch, capsys)
    assert "| " in shown and summary[key]


def test_a_server_that_does_not_come_up_is_an_error():
    servers = script("servers")
    with pytest.raises(InvalidInput, match="can't start"), servers.ServerProcess("x", "nowhere"):
        pass
    command = f"{sys.executable} -c 'raise SystemExit(\"no model here\")'"
    with pytest.raises(Exception, match="no model here"), servers.ServerProcess("x", command):
        pass


def peers_of(case, **more):
    given = {"llama": None, "llama_options": "", "vllm": None, "transformers": True}
    given |= {"methods": "auto,ar", "speculations": "all", "work": Path("work")} | more
    commands = script("peer_cases").Case(case, Namespace(**given)).servers(4)
    return {name: " ".join(command) for name, command in commands}


def test_a_case_is_given_to_the_servers_that_read_it(toy_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where copies are made
    file = tmp_path / "big.gguf"
    file.touch()
    asked = peers_of(f"{toy_folder}:8", vllm="vllm")
    assert list(asked) == ["quickbeam auto", "quickbeam ar"]  # the others read 16 bits
    assert asked["quickbeam ar"].endswith(f"--model {toy_folder} --weights int8 --method ar")
    assert [*peers_of(toy_folder, vllm="vllm")][2:] == ["vLLM", "vLLM n-grams", "transformers"]
    assert "draft-simple" not in " ".join(peers_of(str(file), llama=tmp_path))
    asked = peers_of(f"{file}::small.gguf", llama=tmp_path, llama_options="--no-repack")
    assert f"-m {file} -np 4 -c 16384" in asked["llama.cpp"] and "--no-repack" in asked["llama.cpp"]
    assert "--spec-type draft-simple -md small.gguf" in asked["llama.cpp draft-simple"]
    assert asked["quickbeam auto"].endswith(f"--model {file} --method auto --drafter small.gguf")
    assert asked["quickbeam ar"].endswith("--method ar")  # which takes no drafter
    refuses("BITS are 16, 8 or 4", peers_of, f"{file}:5")
    refuses("llama-quantize", peers_of, f"{file}:8")


def test_a_share_of_the_vocabulary_is_kept_with_errors_over_questions():
    common = script("common")
    value, pulls = common.ratio([(4.0, 2.0), (2.0, 2.0)])
    assert value == 1.5 and pulls == [0.25, -0.25]
    assert common.error(pulls) == pytest.approx(0.5) and common.error([0.0]) is None


def test_commands_of_the_documents_have_arguments_that_scripts_take(monkeypatch, capsys):
    named = [one.words for one in commands() if one.words[:1] == ["python"]]
    assert len(named) > 5
    for words in named:
        path = ROOT / words[1]
        assert path.is_file(), words
        monkeypatch.setattr(sys, "argv", [path.name, "--help"])
        with pytest.raises(SystemExit):
            script(path.stem).main()
        shown = capsys.readouterr().out
        assert all(word in shown for word in words if word.startswith("--")), words
