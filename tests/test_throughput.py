"""`bench throughput`: arrivals, cancellations, and what is counted.

pytest tests/test_throughput.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from quickbeam import LLM, InvalidInput, SamplingParams
from quickbeam.bench import throughput
from quickbeam.bench.methods import parse_methods
from quickbeam.bench.servers import Server, Serving, parse_server, speculation
from quickbeam.bench.throughput import Answered, Cell, measure, ratios, requests
from quickbeam.cli import common
from quickbeam.cli.app import app
from quickbeam.errors import QuickbeamError

PROMPTS = [([5, 6, 7, 8, 5, 6, 7][: 3 + i % 4] * (1 + i), "words") for i in range(9)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def test_requests_arrive_at_once_or_at_random():
    assert {one.arrives for one in requests(PROMPTS, None, 0.0, 12)} == {0.0}
    many = requests(PROMPTS * 200, 50.0, 0.0, 12)
    arrivals = [one.arrives for one in many]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(many) == pytest.approx(1 / 50, rel=0.1)


def test_a_share_of_them_leaves():
    leaving = [one.leaves_after for one in requests(PROMPTS * 10, None, 1 / 3, 12)]
    assert sum(after is not None for after in leaving) == 30
    assert all(1 <= after <= 6 for after in leaving if after is not None)


@pytest.mark.parametrize(("rate", "cancel"), [(None, 0.0), (300.0, 0.0), (None, 0.4), (300.0, 0.4)])
def test_every_answer_is_the_one_given_alone(toy_folder, rate, cancel):
    with LLM(toy_folder, "pld") as llm:
        items = parse_methods("ar,pld:8,logitspec")
        cells = measure(llm, requests(PROMPTS, rate, cancel, 12), items, [1, 3], PARAMS, rounds=2)
    for by_name in cells.values():
        assert list(by_name) == ["ar", "pld:8", "logitspec"]
        for name, cell in by_name.items():
            found = cell.to_json()
            assert found["identical"] == found["prompts"] == 18
            assert found["tokens_per_second"] > 0 and found["p50_ttft_ms"] <= found["p95_ttft_ms"]
            # a tree of any width may be a whole answer
            assert name == "logitspec" or (found["cancelled"] > 0) == (cancel > 0)
    assert cells[1]["ar"].to_json()["mean_accepted_tokens"] == 1.0
    assert ratios(cells)[1]["ar"] == 1.0


def test_sampled_answers_are_those_given_alone_where_they_are_coupled(toy_folder):
    """`ar+residual` draws its tokens otherwise: its answers are others, and need not be the
    same."""
    params = SamplingParams(max_tokens=12, temperature=0.6, seed=3, ignore_eos=True)
    with LLM(toy_folder, "dyspec", dtype="float32", drafter=toy_folder) as llm:
        items = parse_methods("ar,pld,dyspec:8,ar+residual", drafter=toy_folder)
        asked = requests(PROMPTS[:5], None, 0.2, 12)
        cells = measure(llm, asked, items, [1, 3], params)
        assert [[cell.identical for cell in by_name.values()] for by_name in cells.values()] == [
            [5, 5, 5, None]
        ] * 2
        plain, drawn = (
            {one.prompt: one.token_ids for one in cells[3][name].answers if not one.cancelled}
            for name in ("ar", "ar+residual")
        )
        assert plain != drawn
        wrong = {tuple(ids): [1] * 12 for ids, _ in PROMPTS}
        assert measure(llm, asked, items[:1], [2], params, alone=wrong)[2]["ar"].identical == 0
        for other in (replace(params, seed=None), replace(params, coupling="residual")):
            assert measure(llm, asked, items[:1], [2], other)[2]["ar"].identical is None
        found = measure(
            llm, asked, parse_methods("ar,pld+coupled"), [2], replace(params, coupling="residual")
        )[2]
        assert (found["ar"].identical, found["pld+coupled"].identical) == (None, 5)


def test_another_answer_is_not_identical(toy_folder, monkeypatch):
    """The wrong version: an engine that gives one sequence another's token now and then."""
    with LLM(toy_folder, "ar") as llm:
        known = {tuple(ids): [1] * 12 for ids, _ in PROMPTS}
        cells = measure(
            llm, requests(PROMPTS, None, 0.0, 12), parse_methods("ar"), [2], PARAMS, alone=known
        )
    assert cells[2]["ar"].identical == 0


def test_figures_of_a_cell():
    answers = [
        Answered((1,), 0.0, first=1.0, last=3.0, token_ids=[1, 2, 3], steps=1, nodes=4),
        Answered((2,), 1.0, cancelled=True),
    ]
    found = Cell(seconds=4.0, answers=answers, decoding_seconds=2.0, decoding_tokens=3).to_json()
    assert found["tokens_per_second"] == 0.75 and found["decoding_tokens_per_second"] == 1.5
    assert found["p50_ttft_ms"] == 1000.0 and found["p95_tpot_ms"] == 1000.0
    assert (
        found["mean_accepted_tokens"] == 2.0
        and found["nodes_per_step"] == 4.0
        and found["cancelled"] == 1
    )


def test_the_command(toy_folder, tmp_path):
    record, questions = tmp_path / "record.json", tmp_path / "questions.jsonl"
    turns = ["the cat sat", "one two three", "far too long " * 50]
    questions.write_text(
        "\n".join(
            json.dumps({"question_id": i, "category": "c", "turns": [turn]})
            for i, turn in enumerate(turns)
        )
    )
    options = [
        "--model",
        toy_folder,
        "--methods",
        "ar,pld",
        "--concurrency",
        "1,2",
        "--max-tokens",
        "4",
        "--raw",
        "--questions",
        str(questions),
    ]
    result = CliRunner().invoke(
        app, ["bench", "throughput", *options, "--json", str(record)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.stderr
    assert "2 at a time" in result.stdout
    found = json.loads(record.read_text())
    assert found["concurrency"]["2"]["pld"]["identical"] == 2
    assert found["settings"]["skipped"] == 1 and found["complete"]
    for coupling, same in (("coupled", 2), ("residual", None)):
        given = ["--temperature", "0.6", "--coupling", coupling, "--json", str(record)]
        result = CliRunner().invoke(
            app, ["bench", "throughput", *options, *given], catch_exceptions=False
        )
        assert result.exit_code == 0, result.stderr
        sampled = json.loads(record.read_text())
        assert (
            sampled["concurrency"]["2"]["pld"]["identical"] == same
            and sampled["settings"]["coupling"] == coupling
        )
    assert set(found) >= {"environment", "model", "settings", "concurrency", "over_ar"}


def test_filters_and_biases_reach_the_answers(toy_folder, tmp_path, monkeypatch):
    record, served, seen = tmp_path / "record.json", throughput.serve, []

    def watched(*args):
        for answered in served(*args):
            seen.append(answered.token_ids)
            yield answered

    monkeypatch.setattr(throughput, "serve", watched)
    asked = ["--model", toy_folder, "--methods", "ar,pld", "--concurrency", "2", "--raw"]
    asked += ["--limit", "2", "--max-tokens", "4", "--temperature", "1", "--seed", "1"]
    filters = {"top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    for name, value in filters.items():
        asked += [f"--{name.replace('_', '-')}", str(value)]

    def tokens(*biases):
        seen.clear()
        given = [word for bias in biases for word in ("--logit-bias", bias)]
        result = CliRunner().invoke(
            app, ["bench", "throughput", *asked, *given, "--json", str(record)]
        )
        assert result.exit_code == 0, result.stderr
        found = json.loads(record.read_text())
        assert found["settings"]["logit_bias"] == list(biases)
        assert {name: found["settings"][name] for name in filters} == filters
        drafted = found["concurrency"]["2"]["pld"]
        assert drafted["identical"] == drafted["prompts"] > 0
        return {token for ids in seen for token in ids}

    free = tokens()
    assert tokens("7=1e9") == {7}
    banned = [f"{token}=-inf" for token in sorted(free)]
    assert not tokens(*banned) & free


@pytest.mark.parametrize(
    "options",
    [
        ["--methods", "hf"],
        ["--rate", "0"],
        ["--concurrency", "none"],
        ["--server", "vllm"],
        ["--served", "--rate", "3"],
        ["--server", "toy=toy {port}", "--temperature", "0.6"],
        ["--server", "toy=toy {port}", "--rate", "3"],
        ["--server", "toy=toy {port}", "--logit-bias", "5=1"],
        ["--logit-bias", "5"],
        ["--logit-bias", "five=1"],
        ["--logit-bias", "5=1", "--logit-bias", "5=2"],
        ["--logit-bias", "5=nan"],
        ["--top-p", "2"],
        ["--server", "toy=toy {port}", "--cancel", "0.1"],
        ["--json", "no-such-folder/record.json"],
    ],
)
def test_bad_options_are_refused_in_a_line(options, monkeypatch):
    monkeypatch.setattr("quickbeam.llm.LLM", None)  # nothing is loaded before
    result = CliRunner().invoke(app, ["bench", "throughput", *options])
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
    assert options[0] in result.stderr or options[0][2:].replace("-", "_") in result.stderr


def test_ctrl_c_keeps_what_was_measured(toy_folder, tmp_path, monkeypatch):
    """`serve` is asked to warm two methods up, then for four cells; the third is interrupted."""
    served, calls = throughput.serve, []

    def interrupted(*args):
        calls.append(args)
        for answered in served(*args):
            if len(calls) == interrupt:
                raise KeyboardInterrupt
            yield answered

    monkeypatch.setattr(throughput, "serve", interrupted)
    record, options = tmp_path / "record.json", ["--model", toy_folder, "--methods", "ar,pld"]
    options += ["--concurrency", "1,2", "--limit", "2", "--max-tokens", "4", "--raw"]
    for interrupt, kept in ((5, {"1": ["ar", "pld"]}), (4, {"1": ["ar"]}), (3, None)):  # noqa: B007
        calls.clear()
        record.unlink(missing_ok=True)
        result = CliRunner().invoke(
            app, ["bench", "throughput", *options, "--json", str(record)], standalone_mode=False
        )
        assert result.exit_code == 130 or (kept is None and result.exit_code != 0)
        assert record.exists() == (kept is not None)
        if kept is not None:
            found = json.loads(record.read_text())
            cells = found["concurrency"]
            assert {load: list(by_name) for load, by_name in cells.items()} == kept
            plain = cells["1"]["ar"]
            assert not found["complete"] and plain["identical"] == plain["prompts"] > 0
            assert "1 at a time" in result.stdout and "2 at a time" not in result.stdout


def test_nothing_is_lost_when_a_peer_fails_or_the_disk_is_full(toy_folder, tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    given = ["--methods", "ar", "--concurrency", "1", "--limit", "1", "--max-tokens", "2", "--raw"]
    given += ["--model", toy_folder, "--json", str(record)]
    server = f"toy={sys.executable} -c raise(SystemExit(3)) {{port}}"
    result = CliRunner().invoke(app, ["bench", "throughput", *given, "--server", server])
    assert result.exit_code == 1 and "ended before it served" in result.stderr
    assert "1 at a time" in result.stdout
    assert list(json.loads(record.read_text())["concurrency"]["1"]) == ["ar"]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(common, "save", full)
    result = CliRunner().invoke(app, ["bench", "throughput", *given])
    assert result.exit_code == 1 and "1 at a time" in result.stdout
    assert f"--json {record}: not written (No space left on device)" in result.stderr


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self): self.reply(json.dumps({"data": [{"id": "toy"}]}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = {"token_ids": [4, 5]} if asked.get("return_token_ids") else {}
        words = ("one ", "two ", "three")
        pieces = [{"choices": [{"delta": {"content": word}, **ids}]} for word in words]
        if sys.argv[2:]:
            details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}
            usage = {"completion_tokens": 7, "steps": 3, "completion_tokens_details": details}
            pieces.append({"choices": [], "usage": usage})
        lines = [json.dumps(piece).encode() for piece in pieces] + [b"[DONE]"]
        self.reply(b"".join(b"data: " + line + b"\\n\\n" for line in lines))
    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


def test_a_server_is_measured_in_a_process_of_its_own(script):
    with Serving(parse_server(f"toy={sys.executable} {script} {{port}}")) as serving:
        found = serving.measure(["a", "b", "c"], 2, 8, False)
    assert [one.text for one in found.answers] == ["one two three"] * 3
    assert [len(one.token_ids) for one in found.answers] == [3] * 3 and not found.named
    assert found.to_json()["identical"] is None and found.tokens_per_second > 0


def test_tokens_are_those_that_a_server_counts_or_names(script):
    """Ours sends several in a piece."""
    with Serving(parse_server(f"toy={sys.executable} {script} {{port}} counts")) as serving:
        (found,) = serving.measure(["a"], 1, 8, False).answers
        assert (len(found.token_ids), found.steps, found.nodes) == (7, 3, 10)
        named = serving.measure(["a"], 1, 8, False, speculation("auto", 4))
        assert named.answers[0].token_ids == [4, 5, 4, 5, 4, 5] and named.named


def test_what_is_served_stands_beside_what_is_not(toy_folder, script):
    with (
        LLM(toy_folder, "ar") as llm,
        Serving(parse_server(f"toy={sys.executable} {script} {{port}}")) as serving,
    ):
        asked = requests(PROMPTS[:3], None, 0.0, 12)
        others = {
            "served": lambda some, load: serving.measure(
                ["a"] * len(some), load, 12, False, speculation("ar", None)
            ),
            "peer": lambda some, load: serving.measure(["a"] * len(some), load, 12, False),
        }
        cells = measure(llm, asked, parse_methods("ar"), [1, 2], PARAMS, others=others)
    assert all(list(by_name) == ["ar", "served", "peer"] for by_name in cells.values())
    assert [cell.identical for cell in cells[2].values()] == [3, 0, None], (
        "a server that names other tokens is found out"
    )


def test_a_server_that_does_not_come_up_is_an_error():
    with (
        pytest.raises(QuickbeamError, match="ended before it served: no model here"),
        Serving(
            Server("toy", (sys.executable, "-c", "raise SystemExit('no model here')  # {port}"))
        ),
    ):
        pass
    with (
        pytest.raises(InvalidInput, match="can't start"),
        Serving(Server("toy", ("no-such-program", "{port}"))),
    ):
        pass
