"""A file of requests is answered, each once, whatever ends the program."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from batches import echo, go, lines, records
from cases import refuses
from quickbeam import LLM, InvalidInput, QuickbeamError, SamplingParams
from quickbeam.batch.journal import Journal
from quickbeam.batch.run import CHAT, COMPLETIONS, RESPONSES, Reply, parse, read, run
from quickbeam.cli.serve import failures
from scripts import captured, cli

HELLO = {"messages": [{"role": "user", "content": "hello"}], "seed": 7}
LINES = [
    {"custom_id": "a", "method": "POST", "url": CHAT, "body": HELLO},
    {"prompt": "once upon", "max_tokens": 5},
    {"custom_id": "c", "messages": [{"role": "user", "content": "hi"}]},
    *({"custom_id": f"p{i}", "url": COMPLETIONS, "body": {"prompt": f"{i}"}} for i in range(20)),
]


@pytest.fixture
def source(tmp_path):
    return lines(tmp_path / "in.jsonl", LINES)


def whole(source, output):
    """Each request has one record in OpenAI's form, with its own answer."""
    asked = {one.custom_id: one for one in read(source)}
    written = records(output)
    assert sorted(one["custom_id"] for one in written) == sorted(asked)
    for one in written:
        request, response = asked[one["custom_id"]], one["response"]
        assert one == {**one, "id": request.id, "error": None} and len(one) == 4
        assert response.keys() == {"status_code", "request_id", "body"}
        assert response["status_code"] == 200
        assert response["body"] == {"url": request.url, "echo": request.body}


def test_each_request_is_answered(source, tmp_path):
    assert go(source, tmp_path / "out.jsonl") == (23, 23)
    whole(source, tmp_path / "out.jsonl")
    lines(source, [*LINES, {"custom_id": "new", "prompt": "x"}])  # further ones may follow
    assert go(source, tmp_path / "out.jsonl") == (24, 1)


def test_short_lines_and_seeds():
    lines_of = (json.dumps(line).encode() for line in LINES[:3])
    first, short, chat = (parse(i, line) for i, line in enumerate(lines_of, 1))
    assert (first.url, first.body["seed"], first.custom_id) == (CHAT, 7, "a")
    assert (short.url, short.body["max_tokens"], short.custom_id) == (COMPLETIONS, 5, "line-2")
    assert (chat.url, chat.custom_id, chat.body.keys()) == (CHAT, "c", {"messages", "seed"})
    # the order of fields asks for nothing
    assert short == parse(2, json.dumps(dict(reversed(LINES[1].items()))).encode())
    again = parse(3, json.dumps(LINES[1]).encode())
    assert again.body["seed"] != short.body["seed"] and 0 <= short.body["seed"] < 2**32


def test_each_prompt_of_a_line_gets_a_seed():
    def fields(**line):
        return parse(1, json.dumps(line).encode()).body

    seeds = fields(prompt=["abc"] * 3)["seeds"]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**32 for seed in seeds)
    assert fields(prompt=["abc"] * 3)["seeds"] == seeds != fields(prompt=["abd"] * 3)["seeds"]
    assert len(fields(prompt=[[1, 2], [1, 2]])["seeds"]) == 2
    for one in ("abc", ["abc"], [1, 2, 3], [[1, 2]], [], 5):
        assert "seed" in fields(prompt=one) and "seeds" not in fields(prompt=one)
    assert fields(prompt=["a", "b"], seed=7) == {"prompt": ["a", "b"], "seed": 7}
    assert fields(prompt=["a", "b"], seeds=[1, 2]) == {"prompt": ["a", "b"], "seeds": [1, 2]}
    assert "seed" in fields(messages=[], **{"custom_id": "x"})


@pytest.mark.parametrize(("line", "why"), [
    ("{", "line 3, column 2: not JSON (expecting"), ("[1]", "object"),
    ('{"custom_id": 5, "prompt": "x"}', "custom_id 5"),
    ('{"custom_id": ""}', "custom_id"),
    ('{"prompt": "x", "messages": []}', "neither"), ("{}", "neither"),
    ('{"url": "/v1/embeddings", "body": {}}', "/v1/embeddings"),
    ('{"url": "/v1/completions", "body": []}', "body"),
    ('{"method": "GET", "url": "/v1/completions", "body": {}}', "POST"),
    ('{"url": "/v1/completions", "body": {"prompt": "x", "stream": true}}', "stream"),
    ('{"prompt": "x", "seed": NaN}', "NaN"),
    ('{"url": "/v1/completions", "body": {}, "prompt": "x"}', "'prompt'"),
    ('{"prompt": "a",, "n": 1}', "line 3, column 16: not JSON"),
    ('  {"prompt": "ü",, "n": 1}', "line 3, column 18: not JSON"),
    ("[" * 100000, "line 3: nested too deeply"),
    ('{"prompt": "ü\udcff"}', "line 3, column 14: not UTF-8"),
    ('{"prompt": "\\ud800"}', "line 3: \\ud800 is half of a character"),
])  # fmt: skip
def test_a_bad_line_is_a_record_and_no_stop(tmp_path, line, why):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = line.encode(errors="surrogateescape")
    source.write_bytes(b'{"prompt": "a"}\n\n' + text + b'\n{"prompt": "b"}\n')
    assert go(source, output) == (3, 3)
    by_id = {record["custom_id"]: record for record in records(output)}
    assert by_id.keys() == {"line-1", "line-3", "line-4"}
    message = by_id["line-3"]["error"]["message"]
    assert by_id["line-3"]["response"] is None and why in message and "line 3" in message
    assert go(source, output) == (3, 0)
    with Journal(output) as journal:
        assert journal.failed == {"line-3": message}


def test_a_bad_line_keeps_its_name():
    one = parse(3, b'{"custom_id": "mine", "prompt": "\\ud800"}')
    assert one.custom_id == "mine" and "surrogate" in str(one.fault)
    assert parse(3, b'{"custom_id": "\\ud800", "prompt": "x"}').custom_id == "line-3"


def test_no_depth_of_a_line_stops_the_others():
    for depth in range(900, 1000):
        line = ('{"prompt": "x", "a": ' + "[" * depth + "]" * depth + "}").encode()
        assert parse(1, line).custom_id == "line-1"


def test_no_more_are_asked_at_a_time_and_no_line_is_read_ahead(tmp_path):
    running, most, seen = 0, 0, 0

    async def counted(url, body):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.001)
        running -= 1
        return Reply(200, {})

    def watched():
        nonlocal seen
        for request in read(lines(tmp_path / "in.jsonl", LINES)):
            seen += 1
            assert seen <= len(journal.done) + 5
            yield request

    with Journal(tmp_path / "out.jsonl") as journal:
        asyncio.run(run(watched(), counted, journal, 5, lambda: None))
        assert (most, len(journal.done)) == (5, 23)


def test_whatever_end_the_file_was_left_with_it_is_gone_on_with(source, tmp_path):
    first, output = tmp_path / "first.jsonl", tmp_path / "out.jsonl"
    go(source, first)
    text = first.read_bytes()
    start = sum(map(len, text.splitlines(keepends=True)[:-2]))  # of the last record but one
    last = [*range(start, start + 24), *range(start + 24, len(text), 37)]
    for size in [0, 1, 7, *last, len(text) - 1, len(text)]:
        for tail in (b"", b"\0" * 9):
            output.write_bytes(text[:size] + tail)
            assert go(source, output, window=30) == (23, 23 - text[:size].count(b"\n"))
            whole(source, output)
            assert output.read_bytes().startswith(text[: text[:size].rfind(b"\n") + 1])


@pytest.mark.parametrize(("change", "why"), [
    (lambda some: [*some[:3], {**some[3], "body": {"prompt": "other"}}, *some[4:]],
        "answers another request.*'p0'"),
    (lambda some: [{"prompt": "new"}, *some], "'line-2'.*doesn't have|another request"),
    (lambda some: some[1:], "custom_id 'a'"), (lambda some: [*some, some[5]],
        "lines 6 and 24 both have the custom_id 'p2'"),
])  # fmt: skip
def test_other_requests_than_were_answered_are_refused(source, tmp_path, change, why):
    output = tmp_path / "out.jsonl"
    go(source, output)
    before = output.read_bytes()
    refuses(why, go, lines(source, change(LINES)), output)
    assert output.read_bytes() == before


def test_places_that_are_refused_and_files_of_something_else_left_alone(source, tmp_path):
    empty, out = lines(tmp_path / "empty.jsonl", []), tmp_path / "out.jsonl"
    begun = '{"id": "batch_req_1", "custom_id": "zz"}\n{"id": "batch'
    for text in ("my notes", '{"a": 1}\n', begun, "\n"):
        out.write_text(text)
        refuses("another output", go, source, out)
        assert out.read_text() == text
    out.unlink()
    for asked, output, words in (
        (empty, empty, "another file"),
        (source, tmp_path, "must be a file"),
        (tmp_path / "nowhere.jsonl", out, "nowhere"),
        (source, tmp_path / "nowhere" / "out.jsonl", "no such folder"),
    ):
        refuses(words, go, asked, output)
    (tmp_path / "link.jsonl").symlink_to(out)
    for same in (out, tmp_path / "link.jsonl"):
        with Journal(out), pytest.raises(InvalidInput, match="another program"):
            Journal(same)
    go(source, out)
    out.write_bytes(out.read_bytes()[:-1])  # as an editor leaves it
    kept = out.read_bytes()
    refuses("doesn't have|another request", go, lines(source, [{"prompt": "new"}]), out)
    assert out.read_bytes() == kept


def test_a_full_disk_loses_nothing(source, tmp_path, monkeypatch):
    output, real, room = tmp_path / "out.jsonl", os.write, 3000

    def write(file, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(room, len(data), 100)
        room -= taken
        return real(file, bytes(data[:taken]))

    monkeypatch.setattr("quickbeam.batch.journal.os.write", write)
    refuses(r"No space left.*the \d+ answers before stay", go, source, output, error=QuickbeamError)
    assert 0 < len(records(output)) < 23 and output.read_bytes().endswith(b"\n")
    monkeypatch.undo()
    kept = len(records(output))
    assert go(source, output) == (23, 23 - kept)
    whole(source, output)


def test_answers_of_two_models_are_not_mixed(source, tmp_path):
    def named(fingerprint):
        async def answer(url, body):
            return Reply(200, {**(await echo(url, body)).body, "system_fingerprint": fingerprint})

        return answer

    output = tmp_path / "out.jsonl"
    go(lines(source, LINES[:9]), output, named("fp_one"))
    before = output.read_bytes()
    words = r"another model.*fp_one, this is fp_two.*another output"
    refuses(words, go, lines(source, LINES), output, named("fp_two"))
    assert output.read_bytes() == before
    assert go(source, output, named("fp_one")) == (23, 14)


def test_what_an_answer_raises_ends_the_run_and_keeps_the_others(source, tmp_path):
    async def dying(url, body):
        if body.get("prompt") == "6":
            raise QuickbeamError("the engine died")
        return await echo(url, body)

    refuses("died", go, source, tmp_path / "out.jsonl", dying, error=QuickbeamError)
    kept = len(records(tmp_path / "out.jsonl"))
    assert 0 < kept < 23 and go(source, tmp_path / "out.jsonl") == (23, 23 - kept)
    whole(source, tmp_path / "out.jsonl")


def test_killed_at_any_moment_each_is_answered_once(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines(source, [{"custom_id": f"r{i}", "prompt": "x" * (i % 7) * 3000} for i in range(400)])
    code = "import sys, batches; batches.killed(*sys.argv[1:3], *map(int, sys.argv[3:]))"
    for moment in ((0, 20), (60, 1), (100, 10**6)):
        command = [sys.executable, "-c", code, *map(str, (source, output, *moment))]
        child = subprocess.run(command, cwd=Path(__file__).parent)
        assert child.returncode == -signal.SIGKILL
    kept = output.read_bytes().count(b"\n")
    assert 161 <= kept < 400 and go(source, output) == (400, 400 - kept)
    whole(source, output)


def mapped_model(folder, source):
    """A copy of a model whose weights are stored as they are used, so that passes read the file."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    weights = {name: weight.bfloat16() for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return file


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="no such signal")
def test_a_model_file_that_is_cut_ends_the_process_and_the_same_command_goes_on(
    toy_folder, tmp_path
):
    file, output = mapped_model(tmp_path / "model", toy_folder), tmp_path / "out.jsonl"
    asked = {"max_tokens": 200, "ignore_eos": True}
    source = lines(tmp_path / "in.jsonl", [{"prompt": f"abc {i}", **asked} for i in range(16)])
    arguments = ["batch", source, output, "--model", file.parent, "--max-running", "1"]
    program = [sys.executable, "-m", "quickbeam", *map(str, arguments)]
    kept = file.read_bytes()
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as batch:
        while not output.exists() or output.read_bytes().count(b"\n") < 2:
            assert batch.poll() is None
            time.sleep(0.001)
        os.truncate(file, 0)
        errors = batch.communicate(timeout=120)[1]
    assert batch.returncode == -signal.SIGBUS
    assert errors.startswith("Fatal Python error: Bus error\n")
    before = output.read_bytes()
    assert 2 <= before.count(b"\n") < 16
    file.write_bytes(kept)
    done = captured(program, timeout=120)
    assert (done.returncode, done.stderr) == (0, f"16 of 16 answers are in {output}\n")
    assert output.read_bytes().startswith(before)
    ids = [one["custom_id"] for one in records(output)]
    assert len(ids) == 16 == len(set(ids))


USER = [{"role": "user", "content": "abc abc"}]
INPUT = {"input": "abc abc", "max_output_tokens": 9, "temperature": 0}
CHATTED = {"messages": USER, "max_completion_tokens": 9, "temperature": 0}
ASKED = [
    {"custom_id": "chat", "url": CHAT, "body": CHATTED},
    {"custom_id": "drawn", "messages": USER, "max_tokens": 9, "n": 2},
    {"custom_id": "seeded", "prompt": "abc", "max_tokens": 9, "seed": 5, "temperature": 0.8},
    {"custom_id": "response", "url": RESPONSES, "body": INPUT},
    {"custom_id": "field", "messages": USER, "tokens": 3},
    {"custom_id": "long", "prompt": "abc " * 500},
    "not json",
]


def plain_texts(llm, body, tokens):
    fields = {"temperature": 1.0, **body}
    asked = {name: fields[name] for name in ("temperature", "seed", "n") if name in fields}
    params = SamplingParams(max_tokens=tokens, **asked)
    ask, given = (llm.generate, body["prompt"]) if "prompt" in body else (llm.chat, USER)
    answers = ask(given, params, method="ar")
    return [one.text for one in (answers if isinstance(answers, list) else [answers])]


def texts_of(body):
    if "output" in body:
        return [body["output"][0]["content"][0]["text"]]
    return [one.get("text") or one["message"]["content"] for one in body["choices"]]


def command(source, output, folder):
    return ["batch", f"{source}", f"{output}", "--model", folder, "--dtype", "float32"]


def test_the_command_answers_as_plain_decoding_alone(toy_folder, tmp_path):
    source, output = lines(tmp_path / "in.jsonl", ASKED), tmp_path / "out.jsonl"
    asked = command(source, output, toy_folder)
    done = cli(*asked, "--max-running", "2")
    assert done.exit_code == 1
    first, *named = done.stderr.splitlines()[-4:]
    assert "7 of 7 answers" in first and first.endswith("3 of them errors:")
    assert named[0].startswith("  line 5 (field): tokens: ")
    assert named[1].startswith("  line 6 (long): ") and "context" in named[1]
    assert named[2] == "  line 7, column 1: not JSON (expecting value)"
    bodies = {one.custom_id: one.body for one in read(source)}
    by_id = {one["custom_id"]: one for one in records(output)}
    assert by_id.keys() == bodies.keys() and len(records(output)) == len(by_id)
    llm = LLM(toy_folder, dtype="float32")
    for name in ("chat", "drawn", "seeded", "response"):
        assert texts_of(by_id[name]["response"]["body"]) == plain_texts(llm, bodies[name], 9)
    assert [by_id[name]["response"]["status_code"] for name in ("field", "long")] == [400, 400]
    assert by_id["field"]["response"]["body"]["error"]["param"] == "tokens"
    assert by_id["line-7"]["error"]["code"] == "invalid_request"
    before = output.read_bytes()
    # nothing is left to do, so no model is needed
    assert cli(*asked, "--model", "/nowhere").exit_code == 1
    assert output.read_bytes() == before


def test_of_many_failed_lines_the_first_are_named():
    lines = {f"r{i}": i for i in range(1, 16)}
    failed = dict.fromkeys(reversed(lines), "why \x1b[2J\n" + "so " * 99)
    named = failures(failed, lines)
    assert [text.partition(":")[0] for text in named[:2]] == ["  line 1 (r1)", "  line 2 (r2)"]
    assert len(named) == 11 and named[-1] == "  and 5 more; their records say why"
    assert all(text.isprintable() and len(text) < 240 for text in named)


def test_commands_that_are_refused(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    for arguments, why in (
        ("nowhere.jsonl out.jsonl", "no such file"),
        ("in.jsonl in.jsonl", "another output"),
        ("in.jsonl out.jsonl --replicas 2", "--ray"),
        ("in.jsonl out.jsonl --method atuo", "atuo"),
    ):
        done = cli("batch", *arguments.split())
        assert (done.exit_code, done.stdout) == (2, "") and why in done.stderr


def forty(folder):
    every = [(f"r{i}", "abc " * (i % 5 + 1), 0.7 * (i % 2)) for i in range(40)]
    names = ("custom_id", "prompt", "temperature")
    asked = [{**dict(zip(names, one, strict=True)), "max_tokens": 30} for one in every]
    return lines(folder / "in.jsonl", asked)


def all_forty(source, output, folder):
    bodies = {one["custom_id"]: one["response"]["body"] for one in records(output)}
    assert len(records(output)) == len(bodies) == 40
    llm = LLM(folder, dtype="float32")
    for request in read(source):
        assert texts_of(bodies[request.custom_id]) == plain_texts(llm, request.body, 30)
