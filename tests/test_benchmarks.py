"""Every script of benchmarks/ prints a Markdown table and writes a summary, on a tiny model."""

import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from gguf import GGUFReader
from transformers import Qwen3Config

from docs import ROOT, commands, save_drafter
from models import SIZES
from quickbeam.errors import InvalidInput
from quickbeam.models.native import library
from scripts import FOLDER, script

PARTS = {"common", "model_shapes", "peer_cases", "random_gguf", "servers"}  # of scripts
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - PARTS)
FEW = ["--limit", "2", "--max-tokens", "8"]
TRACES = str(FOLDER / "traces.json")
# by script: its arguments, and the key of the summary that holds its figures
RUNS = {
    "acceptance": ([*FEW, "--temperatures", "0,1"], "temperatures"),
    "agents": (["--limit", "2", "--rounds", "1", "--max-tokens", "8"], "memory_of_answers"),
    "heads": (["--shapes", "512x32", "--repeats", "1", "--rows", "1,2"], "heads"),
    "memory": ([*FEW, "--memory", "20000", "--methods", "ar,dyspec:8"], "methods"),
    "passes": (["--contexts", "8,20", "--widths", "1,4", "--repeats", "1"], "contexts"),
    "simulate": (["--traces", TRACES, "--loads", "1,64", "--shape", "30b-a3b"], "table"),
    "structured": (["--limit", "1", "--answers", "1", "--max-tokens", "8"], "structured"),
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
    """Run a script. Returns what it prints, and its summary."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--json", str(out)])
    script(name).main()
    return capsys.readouterr().out, json.loads(out.read_text())


def test_every_script_is_run_here():
    assert set(NAMES) == {*RUNS, "peers", "first_byte", "recall", "shapes"}
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path


@pytest.mark.parametrize("name", RUNS)
def test_a_script_prints_a_table_and_writes_a_summary(
    name, toy_folder, drafter, tmp_path, monkeypatch, capsys
):
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words", "key"),
    [
        ("peers", ["--limit", "2", "--max-tokens", "4", "--clients", "1,2"], "cases"),
        ("first_byte", ["--tokens", "60", "--rounds", "1"], "milliseconds"),
    ],
)
def test_servers_are_asked(name, words, key, toy_folder, tmp_path, monkeypatch, capsys):
    asked = tmp_path / "questions.jsonl"
    one = {"question_id": 1, "category": "c", "turns": ["one two three"]}
    asked.write_text("\n".join(json.dumps({**one, "question_id": i}) for i in range(2)))
    more = ["--serve", f"--model {toy_folder}"]
    if name == "peers":
        more = ["--questions", str(asked), toy_folder]
    shown, summary = run(name, [*words, *more], tmp_path / "out.json", monkeypatch, capsys)
    assert "| " in shown and summary[key]


def test_a_server_that_does_not_come_up_is_an_error():
    servers = script("servers")
    with pytest.raises(InvalidInput, match="can't start"), servers.Serving("x", "no-such-program"):
        pass
    command = f"{sys.executable} -c 'raise SystemExit(\"no model here\")'"
    with pytest.raises(Exception, match="no model here"), servers.Serving("x", command):
        pass


def peers_of(case, **more):
    """The commands of the servers that are asked about a case."""
    given = {"llama": None, "llama_options": "", "vllm": None, "transformers": True}
    given |= {"methods": "auto,ar", "speculations": "all", "work": Path("work")} | more
    commands = script("peer_cases").Case(case, Namespace(**given)).servers(4)
    return {name: " ".join(command) for name, command in commands}


def test_a_case_is_given_to_the_servers_that_read_it(toy_folder, tmp_path):
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
    with pytest.raises(InvalidInput, match="BITS are 16, 8 or 4"):
        peers_of(f"{file}:5")
    with pytest.raises(InvalidInput, match="llama-quantize"):
        peers_of(f"{file}:8")


def test_the_fastest_speculation_is_named(monkeypatch, capsys):
    """Of peers, and a server that fails is left out."""
    peers, speeds = script("peers"), {"a": 2.0, "llama.cpp": 1.0, "llama.cpp x": 3.0}

    class One:
        name = "m"

        def servers(self, clients):
            return [(name, []) for name in (*speeds, "llama.cpp y", "bad")]

    def ask(self, name, command, clients, given):
        if name == "bad":
            raise InvalidInput("is not here")
        self.seconds, self.answers = 1.0, [peers.Served("", int(speeds.get(name, 4) * clients), 0)]

    monkeypatch.setattr(peers.Measured, "ask", ask)
    measured = peers.measure([One()], Namespace(rounds=1, clients="1,2"))
    assert "m, 2 at a time, bad: left out: is not here" in capsys.readouterr().err
    *rows, last = peers.summary(measured)
    assert rows == [
        {"tokens/s": "a", "m: 1": "2.0", "m: 2": "4.0"},
        {"tokens/s": "llama.cpp", "m: 1": "1.0", "m: 2": "2.0"},
    ]
    fastest = {"m: 1": "4.0 (y)", "m: 2": "8.0 (y)"}
    assert last == {"tokens/s": "llama.cpp, its fastest speculation", **fastest}


# --- figures ---


def test_trees_are_held_against_the_first_by_answers():
    own, first = [[3.0, 4.0], [2.0]], [[2.0, 3.0], [3.0]]
    tokens, gap, error = script("trees").difference(own, first)
    assert (tokens, gap) == (3.0, pytest.approx(1 / 3))
    # sqrt(G / (G - 1) * sum of squared deviations of the answers' sums) / places
    assert error == pytest.approx((2 * ((4 / 3) ** 2 + (4 / 3) ** 2)) ** 0.5 / 3)
    assert script("trees").difference([[1.0]], [[1.0]])[2] is None


def test_a_step_is_the_same_wherever_it_is_asked_for(toy_folder):
    """The first step after a part of a plain answer emits what the plain answer has there."""
    from quickbeam import LLM, SamplingParams

    trees, params = script("trees"), SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(toy_folder, "dyspec", dtype="float32", drafter=toy_folder) as llm:
        (*texts,) = trees.places(llm, [3, 4, 5], params, 5)
        assert [len(text) for text in texts] == [3, 8, 13, 18, 23]
        for text in texts:
            # a model that drafts for itself is always right, down to the depth of the chain
            assert trees.first_step(llm, text, "chain", 4, params) == 4
            assert trees.first_step(llm, text, "ar", 1, params) == 1


def test_a_trace_is_walked_from_place_to_place(toy_folder):
    """A walk takes as many steps as decoding does, and cut to its root a tree gives one token."""
    from quickbeam import LLM, SamplingParams

    traces = script("traces")
    given, params = Namespace(max_tokens=24, temperature=0.0, seed=0), SamplingParams(max_tokens=24)
    with LLM(toy_folder, "chain", dtype="float32", drafter=toy_folder) as llm:
        answer = llm.generate([3, 4, 5], params, method="ar").token_ids
        texts = list(script("trees").places(llm, [3, 4, 5], params, 1))
        steps = [traces.first_step(llm, text, "chain", 4, given) for text in texts]
    right = list(traces.walk(steps, traces.first(4)))  # the model drafts for itself
    assert right == [(4, 4, 3)] * -(-(len(answer) - 2) // 4)
    assert traces.entry([steps], traces.first(3)) == (3, 3, 2)
    assert list(traces.walk(steps, traces.first(1))) == [(1, 1, 0)] * (len(answer) - 2)


def test_a_roofline_is_what_its_formula_says():
    simulate = script("simulate")
    device = simulate.Device(bandwidth=1000.0, arithmetic=1e6, host=0.5)
    shape = simulate.Shape(dense=400.0, expert=1600.0, share=0.25, kept=8.0, drafter=40.0)
    seconds = simulate.roofline(device, shape, context=100)
    assert seconds((1.0, 1.0, 0.0), 1) == pytest.approx((2 * (400 + 400) + 800) / 800 + 0.5)
    woken = 1600 * (1 - 0.75**2)  # two rows seldom want the same experts
    one = (2 * (400 + woken) + 800) / 800 + 0.5 + 2 * (2 * 40 / 800 + 0.5)
    assert seconds((2.0, 2.0, 2.0), 1) == pytest.approx(one)
    many = simulate.roofline(device, shape, context=0)  # bound by arithmetic
    assert many((1.0, 1.0, 0.0), 10**6) == pytest.approx(2 * 1e6 * 800 / (0.6 * 1e6) + 0.5)
    assert simulate.best([(9.0, 1.1, 3.0)], 10**6, many)[0] == simulate.PLAIN
    assert simulate.best([[2.0, 1.9, 0.0]], 1, seconds)[0] == (2.0, 1.9, 0.0)


def test_a_simulation_of_this_machine_is_set_beside_its_decoding(
    toy_folder, tmp_path, monkeypatch, capsys
):
    words = ["--traces", TRACES, "--machine", "here", "--loads", "1,2", *FEW]
    given = ["--model", toy_folder, "--drafter", toy_folder, *words]
    _, summary = run("simulate", given, tmp_path / "out.json", monkeypatch, capsys)
    assert [one["requests"] for one in summary["table"]] == [1, 1, 1, 2, 2, 2]
    assert all(float(one["ratio"]) > 0 for one in summary["table"])


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
