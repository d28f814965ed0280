"""Replicas on Ray answer as plain decoding alone, whichever of them die."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cases import refuses
from quickbeam import LLM, QuickbeamError, SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.serve.affinity import ranked
from scripts import cli
from serving import chunks
from test_batch import all_forty, command, forty

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    ray = pytest.importorskip("ray")
    from quickbeam.serve.actors import QuickbeamActor
    from quickbeam.serve.ray import build
    from quickbeam.serve.replicas import PrefixRouter, Replica

pytestmark = pytest.mark.filterwarnings("ignore")  # likewise
PORT = 8917
GREEDY = SamplingParams(max_tokens=6)


def replicas_of(process, name):
    """Ray's processes that run an actor of this name, below a process."""
    replicas = []
    for child in process.children(recursive=True):
        try:
            if child.cmdline()[:1] and name in child.cmdline()[0]:
                replicas.append(child)
        except psutil.Error:
            continue
    return replicas


@pytest.mark.parametrize(("asked", "why"), [
    ({"replicsa": "2"}, "replicsa.*replicas"), ({"replicas": "two"}, "replicas"),
    ({"settings": {"max_wating": 1}}, "max_wating"),
    ({"settings": {"max_waiting": 0}}, "max_waiting"), ({"replicas": 0}, "replicas"),
])  # fmt: skip
def test_arguments_that_are_refused(asked, why):
    refuses(why, build, asked)


def test_arguments_come_as_text():
    asked = {"replicas": "2", "threads": "3", "cpus": "0.25", "max_running": "4"}
    front = build(asked)._bound_deployment
    deployment = front.init_args[0]._bound_deployment
    assert (front.num_replicas, front.max_ongoing_requests) == (1, 2 * (4 + 128))
    assert build({**asked, "replicas": "9"})._bound_deployment.num_replicas == 3
    assert (deployment.num_replicas, deployment.max_ongoing_requests) == (2, 4 + 128)
    options = deployment.ray_actor_options
    assert options["num_cpus"] == 0.25
    assert options["runtime_env"] == {"env_vars": {"OMP_NUM_THREADS": "3"}}


def test_a_replica_is_healthy_while_it_answers(toy_folder):
    replica = Replica(
        {"model": toy_folder, "dtype": "float32"}, ServerOptions(served_names=("toy",))
    )
    replica.check_health()
    replica.runner.gate.phase = "draining"
    refuses("draining", replica.check_health, error=QuickbeamError)


@pytest.mark.parametrize("column", ["prompt", "text", "messages", "input"])
def test_the_actor_of_ray_data_without_ray(toy_folder, column):
    llm, messages = LLM(toy_folder, dtype="float32"), [{"role": "user", "content": "abc"}]
    value = messages if column == "messages" else "abc"
    length = "max_output_tokens" if column == "input" else "max_tokens"
    actor = QuickbeamActor(column, {length: 6, "temperature": 0}, model=toy_folder, dtype="float32")
    rows = actor({column: [value, value], "other": [1, 2]})
    chat = column in ("messages", "input")
    alone = (llm.chat(messages, GREEDY) if chat else llm.generate("abc", GREEDY)).text
    given = {column: [value, value], "other": [1, 2]}
    assert rows == {**given, "answer": [alone] * 2, "error": [None] * 2}
    bad = actor({column: [value, 5]})
    assert bad["answer"] == [alone, None] and bad["error"][0] is None and bad["error"][1]


def end_ray():
    for left in replicas_of(psutil.Process(), "ray"):
        left.kill()


@pytest.mark.long
def test_a_batch_goes_on_whichever_process_dies(toy_folder, tmp_path):
    source, output = forty(tmp_path), tmp_path / "out.jsonl"
    asked = [sys.executable, "-m", "quickbeam", *command(source, output, toy_folder)]
    asked += ["--max-running", "2", "--ray", "--replicas", "2"]
    for end in ("driver", "replica"):
        before = output.stat().st_size if output.exists() else 0
        child = subprocess.Popen(asked, start_new_session=True)
        try:
            while child.poll() is None and (not output.exists() or output.stat().st_size <= before):
                time.sleep(0.01)
            driver = psutil.Process(child.pid)
            (driver if end == "driver" else replicas_of(driver, "Replica")[0]).kill()
            code = child.wait(timeout=300)
        finally:
            end_ray()
    assert code == 0
    all_forty(source, output, toy_folder)


@pytest.mark.long
def test_the_command_serves_by_replicas_until_it_is_told_to_end(toy_folder):
    options = f"--port {PORT} --max-waiting 5 --ray --replicas 2 --model {toy_folder}"
    asked = [sys.executable, "-m", "quickbeam", "serve", *options.split()]
    child = subprocess.Popen(asked, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
            for _ in range(300):
                assert child.poll() is None
                with suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.5)
            body = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
            response = client.post("/v1/completions", json=body).json()
        child.terminate()
        assert child.wait(timeout=120) == 0
    finally:
        end_ray()
    with LLM(toy_folder, "ar") as llm:
        assert response["choices"][0]["text"] == llm.generate("abc", GREEDY).text


@pytest.mark.parametrize("asked", [["serve"], ["batch", __file__, "out.jsonl"]])
def test_replicas_need_ray(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli(*asked, "--replicas", "2")
    assert result.exit_code == 2 and "add --ray" in result.stderr


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.serve.shutdown()
    ray.shutdown()


@pytest.mark.long
def test_two_replicas_of_the_default_model_serve(smollm2, cluster):
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(build({"replicas": 2, "max_running": 4}), name="quickbeam")
    llm, given = LLM(), {"max_tokens": 12, "temperature": 0.7}
    prompts = [f"Count from {i} to ten:" for i in range(8)]

    def ask():
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
            assert client.get("/health").json() == {"status": "ok"}
            post = partial(client.post, "/v1/completions")
            bodies = [{**given, "prompt": prompt, "seed": i} for i, prompt in enumerate(prompts)]
            bad = post(json={"prompt": "a", "max_tokens": "b"})
            assert bad.status_code == 400 and bad.json()["error"]["param"] == "max_tokens"
            events = chunks(post(json={**bodies[0], "stream": True}))
            texts = [post(json=body).json()["choices"][0]["text"] for body in bodies]
            assert texts[0] == "".join(event["choices"][0]["text"] for event in events)
            return texts

    def running():
        return replicas_of(psutil.Process(), "ServeReplica:quickbeam:replica")

    every = [SamplingParams(**given, seed=i) for i in range(8)]
    alone = [llm.generate(*asked, method="ar").text for asked in zip(prompts, every, strict=True)]
    assert ask() == alone
    before = {one.pid for one in running()}
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    end = time.monotonic() + 240
    while len(now := {one.pid for one in running()}) < 2 or min(before) in now:
        assert time.monotonic() < end
        time.sleep(0.5)
    while (state := serve.status().applications["quickbeam"]).status.value != "RUNNING":
        assert time.monotonic() < end, state
        time.sleep(0.5)
    assert ask() == alone
    serve.delete("quickbeam")


@pytest.mark.parametrize(("requests", "groups"), [
    ([0, 0, 0], [[0], [1], [2], [0, 1, 2]]), ([1, 0, 0], [[0], [1], [2], [0, 1, 2]]),
    ([2, 1, 0], [[1], [2], [0, 1, 2]]), ([None, 2, 5], [[0], [0, 1, 2]]), ([2, 3, 2], [[0, 1, 2]]),
])  # fmt: skip
@pytest.mark.parametrize("session", ["abc", ""])
def test_the_first_that_is_not_busy_is_asked(requests, groups, session):
    names = ranked(session or "request", "abc")  # the first is the conversation's
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(max_running=2)
    by_name = dict(zip(names, requests, strict=True))
    router._replica_queue_len_cache = SimpleNamespace(get=lambda each: by_name[each.unique_id])
    metadata = SimpleNamespace(session_id=session, internal_request_id="request")
    pending = SimpleNamespace(metadata=metadata, routing_context=SimpleNamespace())
    chosen = asyncio.run(router.choose_replicas(replicas[::-1], pending))
    right = groups if session else [[0, 1, 2]]
    assert chosen == [[replicas[i] for i in group] for group in right]
    assert pending.routing_context.should_backoff


class Conversation:
    """Turns of one conversation, each asked with the answers before it."""

    def __init__(self, client, number):
        self._client = client
        text = f"{number} is the question. " * 10
        self._messages = [{"role": "user", "content": text}]

    def body(self, **fields):
        return {"messages": self._messages, "max_tokens": 6, "temperature": 0, **fields}

    def ask(self):
        """The prompt's tokens that were kept, once the next turn is answered."""
        answer = self._client.post("/v1/chat/completions", json=self.body()).json()
        message = answer["choices"][0]["message"]
        said = {"role": "assistant", "content": message["content"]}
        self._messages += [said, {"role": "user", "content": "Go on."}]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def by_replica(client, name):
    """The values of a metric by the replica's name, summed over other labels."""
    values = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                replica = sample.labels["replica"]
                values[replica] = values.get(replica, 0) + sample.value
    return values


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(toy_folder, cluster):
    """A client of two replicas that run one request at a time, as their options have it."""
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    settings = {"served_names": ["toy"], "max_body": 300_000, "api_keys": ["a", "b"]}
    asked = {"model": toy_folder, "dtype": "float32", "replicas": 2, "max_running": 1}
    serve.run(build({**asked, "settings": settings}), name="pair")
    url, headers = f"http://127.0.0.1:{PORT}", {"authorization": "Bearer a"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        yield client
    serve.delete("pair")


@pytest.mark.long
def test_a_conversation_stays_where_its_prefix_is(pair):
    before = by_replica(pair, "vllm:request_success_total")
    conversations = [Conversation(pair, number) for number in range(8)]
    kept = [[each.ask() for each in conversations] for _ in range(3)]
    assert all(count > 100 for turn in kept[1:] for count in turn)
    after = by_replica(pair, "vllm:request_success_total")
    assert len(after) == 2 and all(after[name] > before.get(name, 0) for name in after)


@pytest.mark.long
def test_a_busy_replica_is_passed_over(pair):
    conversation = Conversation(pair, 100)
    conversation.ask()
    assert conversation.ask() > 100

    def asked_beside_a_long_answer():
        long = conversation.body(max_tokens=200, n=20, stream=True, ignore_eos=True)
        with pair.stream("POST", "/v1/chat/completions", json=long) as response:
            next(response.iter_lines())
            return conversation.ask()

    # again where the long answer was over before its first event came
    assert any(asked_beside_a_long_answer() == 0 for _ in range(5))
    until(lambda: conversation.ask() > 100)


@pytest.mark.long
def test_a_client_that_leaves_ends_its_answer(pair):
    def running():
        return sum(by_replica(pair, "vllm:num_requests_running").values())

    body = {"prompt": "abc", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with pair.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    with suppress(httpx.TimeoutException):
        pair.post("/v1/completions", json={**body, "stream": False}, timeout=0.05)
    until(lambda: running() == 0)
    ended = text_string_to_metric_families(pair.get("/metrics").text)
    reasons = {
        sample.labels["finished_reason"]
        for family in ended
        for sample in family.samples
        if sample.name == "vllm:request_success_total" and sample.value
    }
    assert "abort" in reasons


@pytest.mark.long
def test_the_front_checks_requests(pair):
    body = {"prompt": "abc", "max_tokens": 4}
    keys = {"authorization": "Bearer c"}
    for path in ("/v1/completions", "/metrics"):
        refused = pair.request("POST" if "v1" in path else "GET", path, headers=keys, json=body)
        assert refused.status_code == (401 if "v1" in path else 200)
    large = pair.post("/v1/completions", json={"prompt": "a" * 400_000})
    assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
    wide = pair.post("/v1/completions", json={**body, "prompt": ["a" * 100] * 2000})
    assert wide.status_code == 400 and "error" in wide.json()
    packed = gzip.compress(json.dumps(body).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = pair.post("/v1/completions", content=packed, headers=headers)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert pair.get("/v1/model").status_code == 404 and "/v1/models" in pair.get("/v1/model").text
    assert pair.head("/health").status_code == 200


@pytest.mark.long
def test_a_replica_that_dies_loses_no_request(pair):
    conversations = [Conversation(pair, 200 + number) for number in range(6)]
    for each in conversations:
        each.ask()
    running = replicas_of(psutil.Process(), "ServeReplica:pair:replica")
    assert len(running) == 2
    running[0].kill()
    for each in conversations:
        each.ask()
    assert all(each.ask() > 100 for each in conversations)


@pytest.mark.long
def test_ray_data_answers_a_folder_of_prompts(toy_folder, tmp_path, cluster):
    folder = tmp_path / "prompts"
    folder.mkdir()
    prompts = [f"abc {i}" for i in range(20)]
    for i in range(4):
        (folder / f"{i}.txt").write_text("\n".join(prompts[i * 5 : i * 5 + 5]))
    params = {"max_tokens": 6, "temperature": 0}
    options = {"column": "text", "params": params, "model": toy_folder, "dtype": "float32"}
    sizes = {"concurrency": 2, "num_cpus": 0.5, "batch_size": 8}
    data = ray.data.read_text(str(folder))
    data = data.map_batches(QuickbeamActor, fn_constructor_kwargs=options, **sizes)
    rows = data.take_all()
    llm = LLM(toy_folder, dtype="float32")
    right = {prompt: llm.generate(prompt, GREEDY, method="ar").text for prompt in prompts}
    assert {row["text"]: row["answer"] for row in rows} == right
    assert len(rows) == 20 and all(row["error"] is None for row in rows)
