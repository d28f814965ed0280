"""The server as a process: starting, health, signals, clients that leave, what a supervisor
does."""

import asyncio
import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from cases import raising, refuses
from quickbeam import LLM, AsyncLLM, InvalidInput, QuickbeamError, SamplingParams
from quickbeam.cli.serve import keys_of
from quickbeam.config import ServerOptions
from quickbeam.models.weights import digest
from quickbeam.serve import fingerprint
from quickbeam.serve.runner import Runner
from quickbeam.serve.server import Server, listen, run, serve, url
from running import LONG, begun, braked, idle, job, served, until
from scripts import cli
from serving import ScriptedRunner

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[1]
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
STREAM = BODY | {"stream": True}


class Listening(NamedTuple):
    runner: Runner
    server: Server
    address: str
    serving: asyncio.Task[bool]  # ends with it

    def stop(self):
        self.server.handle_exit(signal.SIGTERM, None)


@asynccontextmanager
async def listening(llm, load=None, kind=Runner, **settings):
    """With a client. The model may be used again afterwards."""
    runner = kind(ServerOptions(served_names=("tiny",), **settings))
    server, listener = Server(runner), listen("127.0.0.1", 0)
    address, loaded = url(listener), lambda: (load() if load else llm, "fp_tiny")
    serving = asyncio.create_task(serve(server, listener, loaded))
    await until(lambda: server.started and (load is not None or not runner.unhealthy_reason))
    one = Listening(runner, server, address, serving)
    try:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            yield one, client
    finally:
        if not serving.done():
            server.should_exit = True
            await asyncio.wait([serving])


async def lines(response):
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def text_of(chunks):
    assert chunks[-1] == "[DONE]"
    choices = [one for chunk in chunks[:-1] for one in json.loads(chunk)["choices"]]
    return "".join(one["text"] for one in choices)


def refused(runner):
    labels = {"model_name": runner.name, "reason": "unavailable"}
    return runner.metrics.registry.get_sample_value("quickbeam:refused_requests_total", labels)


async def test_it_listens_while_it_loads(llm):
    go = threading.Event()
    async with listening(llm, load=lambda: (go.wait(), llm)[1]) as (one, client):
        paths = ("/health", "/v1/models", "/metrics", "/")
        health, models, metrics, page = [await client.get(path) for path in paths]
        asked = await client.post("/v1/completions", json=BODY)
        assert [one.status_code for one in (health, asked, models)] == [503] * 3
        assert health.json() == {"status": "starting"} and int(asked.headers["retry-after"]) > 0
        assert metrics.status_code == page.status_code == 200
        # the request for an answer, and not the question what models there are
        assert refused(one.runner) == 1
        go.set()
        await until(lambda: not one.runner.unhealthy_reason)
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("loaded", (False, True))
async def test_a_signal_while_it_loads_ends_it(llm, loaded):
    """Also where the model comes just then: it is not begun with."""
    go, may_end = threading.Event(), not loaded
    async with listening(llm, load=lambda: (go.wait(), llm)[1]) as (one, client):
        one.server.on_tick = lambda _: asyncio.sleep(0, one.server.should_exit and may_end)
        one.stop()
        await until(lambda: one.runner.unhealthy_reason == "draining")
        if loaded:
            go.set()
            await until(lambda: one.runner.fingerprint == "fp_tiny")
            assert (await client.get("/health")).json() == {"status": "draining"}
            may_end = True
        assert await one.serving is loaded
        go.set()


def test_a_model_that_can_not_be_loaded_ends_it(llm):
    seen, load = list[str](), raising(InvalidInput("no such model"))
    refuses("no such model", run, Runner(ServerOptions(port=0)), load, ready=seen.append)
    assert not seen


def test_a_server_may_have_all_connections_that_the_system_allows():
    resource = pytest.importorskip("resource")
    fewer, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, most), most))
    try:
        load = raising(InvalidInput("no such model"))
        refuses("no such model", run, Runner(ServerOptions(port=0)), load)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fewer, most))


async def test_a_signal_lets_answers_end_and_takes_no_others(llm):
    alone = llm.generate("hello", LONG, method="ar").text
    async with listening(llm) as (one, client):
        with braked(llm.engine) as brake:
            brake.release(3)
            async with client.stream("POST", "/v1/completions", json=STREAM) as streamed:
                got = lines(streamed)
                chunks = [await anext(got)]
                whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await until(lambda: one.runner.gate.inside == 2)
                one.stop()
                await until(lambda: one.runner.unhealthy_reason == "draining")
                health = await client.get("/health")
                late = await client.post("/v1/completions", json=BODY)
                assert health.status_code == late.status_code == 503
                assert health.json() == {"status": "draining"}
                assert int(late.headers["retry-after"]) >= 1 and not one.serving.done()
                brake.release()
                chunks += [chunk async for chunk in got]
        assert text_of(chunks) == alone == (await whole).json()["choices"][0]["text"]
        assert await one.serving and one.runner.gate.inside == 0


async def test_a_response_is_sent_to_its_end_after_the_answer_is_over(llm):
    async with listening(llm, kind=ScriptedRunner) as (one, client):
        one.runner.script, one.runner.piece, one.runner.pause = "a tale", 1, 0.1
        async with client.stream("POST", "/v1/completions", json=STREAM) as streamed:
            got = lines(streamed)
            chunks = [await anext(got)]
            one.stop()  # nothing is left to compute, so it begins to end at once
            await until(lambda: one.server.should_exit)
            chunks += [chunk async for chunk in got]
        assert text_of(chunks) == "a tale"
        assert await one.serving


async def test_what_takes_too_long_to_end_is_ended(llm):
    async with listening(llm, drain_timeout=0.1) as (one, client):
        with braked(llm.engine) as brake:
            brake.release(3)
            async with client.stream("POST", "/v1/completions", json=STREAM) as streamed:
                got = lines(streamed)
                await anext(got)
                one.stop()
                await until(lambda: one.runner.loaded.closed)
                brake.release(1)  # the step that is under way
                rest = [chunk async for chunk in got]
            assert any("error" in json.loads(chunk) for chunk in rest if chunk != "[DONE]")
        assert await one.serving and not llm.engine.busy


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("steps", (0, 4))
async def test_a_client_that_leaves_frees_its_answer(llm, stream, steps):
    async with listening(llm) as (one, client):
        with braked(llm.engine) as brake:
            asked = BODY | {"stream": stream, "n": 2, "temperature": 1}
            task = asyncio.create_task(client.post("/v1/completions", json=asked))
            await until(brake.waits.is_set)
            # the second answer was begun, too
            await until(lambda: len(one.runner.under_way) == one.runner.gate.inside == 2)
            if steps:
                brake.release(steps)
                await until(lambda: any(s.started for s in llm.engine.scheduler.active))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for tries in range(150):  # answers need 200 steps
                brake.release(1)
                await asyncio.sleep(0.01 if tries < 20 else 0.2)
                if idle(one.runner):
                    break
            assert idle(one.runner)
        llm.reset()
        assert llm.model.pool.used == 0


async def test_connections_on_which_nothing_is_asked_are_closed(llm):
    async with listening(llm, kind=ScriptedRunner, read_timeout=1) as (one, client):
        one.runner.script, one.runner.piece, one.runner.pause = "one two", 7, 4
        slow = asyncio.create_task(client.post("/v1/completions", json=BODY))
        host, port = one.address.removeprefix("http://").split(":")
        for head in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: "):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert (await slow).status_code == 200


async def test_a_client_that_leaves_as_its_answer_begins_frees_it(llm):
    """A wait with a time limit may end at that very moment, and must not keep the cancellation."""
    async with served(llm) as (runner, _):
        for wait in range(8):
            with braked(llm.engine) as brake:
                task = asyncio.create_task(begun(runner, job(llm)))
                await until(brake.waits.is_set)
                brake.release(1)
                while runner.gate.waiting:  # until the engine has begun
                    await asyncio.sleep(0)
                for _ in range(wait):
                    await asyncio.sleep(0)
                left = task.cancel()
                await asyncio.wait([task])
                assert task.cancelled() == left
                if not left:
                    task.result()[0].close()
                brake.release(2)  # an answer needs 200 steps
                await until(lambda: idle(runner))


async def test_health_fails_when_the_engine_is_silent(llm):
    async with served(llm, heartbeat_limit=0.5) as (runner, client):
        await asyncio.sleep(0)
        with braked(llm.engine) as brake:
            task = asyncio.create_task(begun(runner, job(llm)))
            await until(brake.waits.is_set)
            await until(lambda: bool(runner.unhealthy_reason))
            response = await client.get("/health")
            assert response.status_code == 503
            assert re.search(r"silent for \d\.\d s \(limit 0\.5\)", response.json()["status"])
            brake.release()
            for stream in await task:
                stream.close()
            await until(lambda: not runner.unhealthy_reason)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_ends_is_told(toy_folder):
    async def main(llm):
        async with listening(llm) as (one, client):
            with braked(llm.engine) as brake:
                task = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await until(brake.waits.is_set)
                llm.thread.cancel(None)  # what is no sequence fails, and not in a step
                brake.release(1)
                assert (await task).status_code == 500
                with pytest.raises(QuickbeamError, match="thread has ended"):
                    await one.serving

    asyncio.run(main(LLM(toy_folder, "pld")))


async def test_a_request_that_begins_while_it_closes_is_turned_away(llm, monkeypatch):
    waits, go, begin = threading.Event(), threading.Event(), llm.stream

    def late(*given, **options):
        waits.set()
        go.wait()
        return begin(*given, **options)

    async with served(llm) as (runner, client):
        monkeypatch.setattr(llm, "stream", late)
        body = BODY | {"model": runner.name}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.to_thread(waits.wait)
        await runner.close()
        go.set()
        response = await asked
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert refused(runner) == 1 and runner.gate.inside == 0


async def test_an_answer_is_over_when_its_last_step_is(llm):
    """Not before the step is counted and traced, though its tokens are there by then."""
    inside, go, ends = threading.Event(), threading.Event(), list[int]()

    def hold(record):
        if len(stream.completion.token_ids) == 3:
            inside.set()
            go.wait()

    async with AsyncLLM(llm=llm) as face:
        with braked(llm.engine) as brake:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            stream = await face.stream("hello", params, method="ar", observer=hold)
            stream.watch(lambda: None, lambda one: ends.append(one.completion.statistics.steps))
            brake.release()
            inside.wait()  # which holds the event loop up, too
            for _ in range(10):
                await asyncio.sleep(0)
            early = list(ends)
            go.set()
        assert "".join([piece async for piece in stream]) == stream.completion.text
        assert ends == [2] and early == []


def test_fingerprints_tell_models_apart(llm, toy_folder, tmp_path, monkeypatch, cache):
    of, first = fingerprint.digest_of, fingerprint.fingerprint_of(llm)
    assert re.fullmatch(r"fp_[0-9a-f]{16}", first)
    with monkeypatch.context() as patch:
        patch.setattr(digest, "BLOCK_BYTES", "none")  # known files are not read as a whole
        assert fingerprint.fingerprint_of(llm) == first
    with LLM(toy_folder, "ar", dtype="float32") as other:
        assert fingerprint.fingerprint_of(other) != first
    with LLM(toy_folder, "logitspec") as other:
        assert fingerprint.fingerprint_of(other) == first  # no method changes an answer
    copy = shutil.copytree(toy_folder, tmp_path / "copy")
    assert of(str(copy)) == of(toy_folder)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))
    changed = of(str(copy))
    content[-1] ^= 2
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))  # of the same size and time
    assert len({of(toy_folder), changed, of(str(copy))}) == 3
    assert of("nobody/knows-this") == "nobody/knows-this"


def test_an_address_that_can_not_be_had_is_one_line(monkeypatch):
    monkeypatch.delenv("QUICKBEAM_DEBUG", raising=False)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        refuses(f"port {port}", listen, "127.0.0.1", port)
        for option, value, words in (
            ("port", str(port), f"port {port} ("),
            ("host", "no.such.host.invalid", "no.such.host.invalid"),
            ("max-waiting", "0", "--max-waiting 0: "),
            ("max-body", "much", "--max-body 'much': "),
            ("default-temperature", "-1", "--default-temperature -1.0: "),
        ):
            result = cli("serve", f"--{option}", value)
            assert result.exit_code == 2 and words in result.stderr
            assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_listening_to_all_without_a_key_is_warned_of(llm, monkeypatch):
    def run(runner, load, ready):
        assert runner.options.api_keys == tuple(keys_of(os.environ["QUICKBEAM_API_KEY"]))
        runner.attach(llm, "fp_x")
        ready("http://127.0.0.1:8000")

    monkeypatch.setattr("quickbeam.serve.server.run", run)
    every = "0.0.0.0"
    for host, key, warned in ((every, "", True), (every, "a,b", False), ("127.0.0.1", "", False)):
        monkeypatch.setenv("QUICKBEAM_API_KEY", key)
        shown = cli("serve", "--host", host, catch_exceptions=False)
        assert ("warning: everybody who can reach 0.0.0.0" in shown.stderr) is warned


def test_the_unit_and_the_image_are_as_they_should_be():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(ROOT / "deploy" / "quickbeam.service")
    service = unit["Service"]
    drain = int(re.search(r"--drain-timeout (\d+)", service["ExecStart"])[1])
    assert int(service["TimeoutStopSec"]) > drain + 5
    assert service["Restart"] == "always" and service["KillSignal"] == "SIGTERM"
    assert service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"
    options = cli("serve", "--help", terminal_width=300).stdout
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", image, re.M)[1])
    for line in (shlex.split(service["ExecStart"]), entry):
        assert line[0].endswith("quickbeam") and line[1] == "serve"
        assert all(option in options for option in line if option.startswith("--"))
    last = image.split("\nFROM ")[-1]
    assert "HEALTHCHECK" in last and "/health" in last
    assert 0 < last.index("\nUSER quickbeam\n") < last.index("\nENTRYPOINT ")


@pytest.fixture
def port():
    with closing(socket.create_server(("127.0.0.1", 0))) as one:
        return one.getsockname()[1]


@contextmanager
def started(port, *options):
    command = [sys.executable, "-m", "quickbeam", "serve", "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def health(port):
    """The status, or 0: signals are taken once the server's loop runs, later than it listens."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code
    except httpx.TransportError:
        return 0


def wait(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("again", (False, True))
def test_a_process_drains_on_sigterm_and_ends_at_once_on_the_second(smollm2, port, again):
    with started(port, "--drain-timeout", "120") as server:
        wait(lambda: health(port) == 200)
        address = f"http://127.0.0.1:{port}/v1/completions"
        body = STREAM | {"model": "smollm2-135m", "max_tokens": 150}
        with httpx.stream("POST", address, json=body, timeout=120) as response:
            got = response.iter_lines()
            next(got)
            server.send_signal(signal.SIGTERM)
            wait(lambda: httpx.post(address, json=body, timeout=30).status_code == 503)
            if again:
                server.send_signal(signal.SIGTERM)
                assert server.wait(30) == 128 + signal.SIGTERM
                return
            *_, last, done = [line.removeprefix("data: ") for line in got if "data: " in line]
            assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
        assert server.wait(60) == 0
        assert "try it: curl" in server.stderr.read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_behind_stderr_ends_nothing():
    """As a program of its own, since its end writes what is left, too."""
    program = "import sys; from quickbeam.cli.common import say; say('ready'); print('on')"
    with open("/dev/full", "w") as full:
        how = dict(stderr=full, stdout=subprocess.PIPE, text=True)
        done = subprocess.run([sys.executable, "-c", program], **how)
    assert done.stdout == "on\n" and done.returncode in (0, 120)


@pytest.mark.long
def test_a_process_that_loads_can_be_ended(smollm2, port):
    with started(port) as server:
        wait(lambda: health(port) == 503)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
