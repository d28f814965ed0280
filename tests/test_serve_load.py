"""A server under load, with an oracle: every answer that is completed is the one that plain
decoding gives to nobody else. Clients come many at a time, some leave midway, memory is too small
for all; in the end nothing is left of any: no page, no place in the queue, no task, no connection.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from quickbeam import LLM, SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.engine.stream import Stream
from quickbeam.grammar.spec import Grammar
from quickbeam.serve.runner import Runner
from running import idle, serving, until

TEXTS = (
    "the cat sat on the mat and the cat",
    "one two three one two three one two",
    "Write a short poem about the sea.",
    "Name three rivers and say where they flow.",
    "def area(radius):\n    return",
)
FIELDS = {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
SCHEMA["additionalProperties"] = False
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
PARAMETERS = ("temperature", "top_p", "seed", "max_tokens", "n")


class Client(NamedTuple):
    """A request, and what its client does. `stays`: to the end; else it leaves after some pieces of
    the stream (`leaves`), gives up while the whole answer is made (`hurries`), or is gone as soon
    as it has asked (`vanishes`)."""

    path: str
    body: dict[str, Any]
    does: str


def crowd(count, methods, tokens, seed=0):
    """Clients of all kinds, a third of which do not stay."""
    rng, clients = random.Random(seed), list[Client]()
    for number in range(count):
        text = rng.choice(TEXTS) * rng.choice((1, 1, 1, 6))
        body = {
            "temperature": rng.choice((0, 0, 0.8)),
            "seed": rng.randrange(4),
            "n": rng.choice((1, 1, 2, 3)),
            "max_tokens": rng.randint(tokens // 3, tokens),
            "return_token_ids": True,
            "speculation": {"method": rng.choice(methods)},
        }
        if rng.random() < 0.5:
            body["speculation"]["budget"] = rng.choice((2, 5, 0))
        if rng.random() < 0.2:
            body["top_p"] = 0.9
        path = rng.choice(("/v1/chat/completions", "/v1/completions"))
        messages = {"messages": [{"role": "user", "content": text}]}
        body |= messages if "chat" in path else {"prompt": text}
        if "chat" in path and rng.random() < 0.3:
            body["response_format"] = FORMAT
        does = rng.choice(("leaves", "hurries", "vanishes")) if number % 3 == 1 else "stays"
        body["stream"] = does == "leaves" or (does != "hurries" and rng.random() < 0.5)
        clients.append(Client(path, body, does))
    return clients


async def vanish(base, client):
    host, port = base.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(client.body).encode()
    head = f"POST {client.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()


def streamed(lines, choices):
    assert lines[-1] == "[DONE]"
    ids, reasons = [list[int]() for _ in range(choices)], dict[int, str]()
    for chunk in map(json.loads, lines[:-1]):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice.get("token_ids") or []
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert sorted(reasons) == list(range(choices)) and set(reasons.values()) <= {"stop", "length"}
    return ids


async def ask(web, base, client, seen, rng):
    """Token ids of all choices where the client stays; it comes again where it is refused."""
    if client.does == "vanishes":
        await vanish(base, client)
        return None
    if client.does == "hurries":
        with suppress(httpx.TimeoutException):
            response = await web.post(client.path, json=client.body, timeout=rng.uniform(0.01, 0.3))
            seen[response.status_code] += 1
        return None
    while True:
        async with web.stream("POST", client.path, json=client.body) as response:
            seen[response.status_code] += 1
            if response.status_code in (429, 503):
                assert int(response.headers["retry-after"]) >= 1
                # sooner than told: the queue is to be full
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                continue
            if response.status_code != 200:
                raise AssertionError((await response.aread()).decode())
            if not client.body["stream"]:
                choices = json.loads(await response.aread())["choices"]
                choices.sort(key=lambda one: one["index"])
                return [choice["token_ids"] for choice in choices]
            lines = list[str]()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    lines.append(line.removeprefix("data: "))
                if client.does == "leaves" and len(lines) > 2:
                    return None
            return streamed(lines, client.body["n"])


async def load(base, clients, together):
    turns, seen, rng = asyncio.Semaphore(together), Counter[int](), random.Random(1)
    limits = httpx.Limits(max_connections=together)
    async with httpx.AsyncClient(base_url=base, timeout=300, limits=limits) as web:

        async def come(client):
            async with turns:
                return await ask(web, base, client, seen, rng)

        return list(await asyncio.gather(*map(come, clients))), seen


def alone(plain, client):
    body = client.body
    given = {name: body[name] for name in PARAMETERS if name in body}
    if "response_format" in body:
        given["grammar"] = Grammar.json_schema(SCHEMA)
    params = SamplingParams(**given)
    chat, prompt = body.get("messages"), body.get("prompt")
    answers = plain.chat(chat, params) if chat else plain.generate(prompt, params)
    return [one.token_ids for one in (answers if isinstance(answers, list) else [answers])]


def under_load(folder, methods, count, together, tokens, memory, **options):
    clients = crowd(count, methods, tokens)
    with LLM(folder, "auto", max_running=together // 2, kv_memory=memory, **options) as llm:
        runner = Runner(ServerOptions(max_waiting=together // 4, queue_timeout=300), llm)
        with serving(runner) as (base, loop):
            before = tasks(loop)
            got, seen = asyncio.run(load(base, clients, together))
            asyncio.run(until(lambda: idle(runner)))
            asyncio.run(until(lambda: tasks(loop) <= before))
            port = int(base.rsplit(":", 1)[1])
            asyncio.run(until(lambda: not connections(port)))
            assert not runner.unhealthy_reason and llm.engine.used == llm.engine.nodes == 0.0
            llm.reset()
            assert llm.model.pool.used == 0
            assert llm.prepare("auto") is None or llm.prepare("auto").pool.used == 0
    assert set(seen) <= {200, 429, 503} and seen[200] and seen[429], seen
    stayed = [pair for pair in zip(clients, got, strict=True) if pair[0].does == "stays"]
    assert all(answer is not None for _, answer in stayed)
    with LLM(folder, "ar", share_prefixes=False, **options) as plain:
        different = [client for client, answer in stayed if answer != alone(plain, client)]
    assert not different, f"{len(different)} of {len(stayed)}: {different[:2]}"


def tasks(loop):
    """Those of the server, but for the one that sse-starlette has on each loop."""
    return {task for task in asyncio.all_tasks(loop) if "_shutdown_watcher" not in repr(task)}


def connections(port):
    every = psutil.Process().net_connections("tcp")
    kinds = ("ESTABLISHED", "CLOSE_WAIT")
    return [one for one in every if one.laddr.port == port and one.status in kinds]


def test_every_completed_answer_is_the_one_given_alone(toy_folder):
    methods = ("ar", "pld", "logitspec", "auto")
    under_load(toy_folder, methods, count=45, together=12, tokens=24, memory=2**18)


@pytest.mark.long
def test_two_hundred_requests_of_the_default_model():
    methods = ("ar", "pld", "logitspec", "dyspec", "dynaspec", "auto", "auto", "auto")
    under_load(None, methods, count=200, together=32, tokens=48, memory=40 * 2**20)


def test_a_server_that_mixes_answers_up_is_found_out(toy_folder, monkeypatch):
    """The wrong version: now and then a token of an answer is another's."""
    whole, last = Stream.completion.fget, dict[int, Any]()

    def mixed(self):
        completion = whole(self)
        other, last[0] = last.get(0, completion.token_ids), completion.token_ids
        completion.token_ids = list(completion.token_ids[:-1]) + list(other[-1:])
        return completion

    monkeypatch.setattr(Stream, "completion", property(mixed))
    with pytest.raises(AssertionError, match="of "):
        under_load(toy_folder, ("ar",), count=24, together=8, tokens=12, memory=2**18)
