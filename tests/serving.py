"""A server in this process, for tests of the protocol: real requests over ASGI, without a socket.
And one whose answers are scripted."""

import asyncio
import json

import httpx
from hypothesis import strategies as st

from quickbeam.engine.result import Completion, Statistics
from quickbeam.engine.stream import Delta
from quickbeam.grammar.token_texts import TokenTexts
from quickbeam.serve.app import create_app
from quickbeam.serve.runner import Runner


def client(runner):
    transport = httpx.ASGITransport(create_app(runner), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


def send(runner, *requests):
    """Requests at once: method, path, and what `httpx` takes."""

    async def go():
        async with client(runner) as web:
            asked = [web.request(method, path, **more) for method, path, more in requests]
            return await asyncio.gather(*asked)

    return asyncio.run(go())


def ask(runner, path, body=None, method="POST"):
    return send(runner, (method, path, {"json": body}))[0]


def ask_raw(runner, path, text):
    headers = {"content-type": "application/json"}
    return send(runner, ("POST", path, {"content": text, "headers": headers}))[0]


def good(response):
    assert response.status_code == 200, response.text
    return response.json()


def refused(response, param, status=400):
    """The message of an error in OpenAI's form that names `param`."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return str(error["message"])


def anthropic_error(response, kind, begin=""):
    """The message of an error in Anthropic's form, which begins with these words."""
    assert response.status_code >= 400, response.text
    error = response.json()
    assert error.keys() == {"type", "error", "request_id"} and error["type"] == "error"
    assert error["request_id"] == response.headers["request-id"]
    assert error["error"].keys() == {"type", "message"} and error["error"]["type"] == kind, error
    assert error["error"]["message"].startswith(begin), error
    return str(error["error"]["message"])


def chunks(response):
    """The chunks of a stream, which ends with `[DONE]`."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.partition("data: ") for line in response.text.split("\n")]
    data = [text for before, _, text in lines if text and not before]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def events(response):
    """The events of a streamed response, each named as its type says."""
    assert response.status_code == 200, response.text
    blocks = [
        dict(line.split(": ", 1) for line in block.split("\n"))
        for block in response.text.strip().split("\n\n")
    ]
    events = [json.loads(block["data"]) for block in blocks]
    assert [block["event"] for block in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def message_of(response):
    """The message that the events of Anthropic's API make, each of them in its place."""
    assert response.status_code == 200, response.text
    named = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name.removeprefix("event: ") for name, _ in named] == [one["type"] for one in events]
    first, *rest, delta, stop = [one for one in events if one["type"] != "ping"]
    assert first["type"] == "message_start" and stop == {"type": "message_stop"}
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    closed = True
    for event in rest:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert closed and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        block = message["content"][event["index"]]
        assert event["index"] == len(message["content"]) - 1
        if kind == "delta":
            match event["delta"]:
                case {"type": "input_json_delta", "partial_json": text}:
                    assert block["input"] == {}
                    block["input"] = json.loads(text)
                case {"type": "text_delta", "text": text}:
                    block["text"] += text
                case {"type": "thinking_delta", "thinking": text}:
                    block["thinking"] += text
                case {"type": "signature_delta", "signature": text}:
                    block["signature"] = text
                case _:
                    raise AssertionError(event)
        closed = kind == "stop"
    assert closed and delta["type"] == "message_delta"
    return message | delta["delta"] | {"usage": delta["usage"]}


def junk(*names):
    """Any JSON, small, with these names among those of objects' fields."""
    keys = (st.sampled_from(names) if names else st.nothing()) | st.text(max_size=5)
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


class Texts(TokenTexts):
    """Texts of tokens 0, 1, …, given as bytes."""

    def __init__(self, *texts):
        self._cached = dict(enumerate(texts))


class ScriptedStream:
    """A known answer in pieces of so many characters, with a pause in seconds before each."""

    def __init__(self, text, piece, pause, end):
        self.text, self.piece, self.pause, self.end = text, piece, pause, end
        self.closed, self.given = False, ""

    async def deltas(self):
        for i in range(0, len(self.text), self.piece):
            await asyncio.sleep(self.pause)
            self.given += self.text[i : i + self.piece]
            yield Delta(self.text[i : i + self.piece], [i], [], [])
        if isinstance(self.end, Exception):
            raise self.end

    @property
    def completion(self):
        reason, count = self.end if isinstance(self.end, str) else "interrupted", len(self.given)
        return Completion(self.given, list(range(count)), reason, Statistics(new_tokens=count))

    def close(self):
        self.closed = True


class ScriptedRunner(Runner):
    """Answers what `script` says, whatever it is asked; keeps the `jobs`."""

    script, piece, pause = "", 3, 0.0
    end: str | Exception = "stop"

    async def begin(self, jobs, ticket):
        self.jobs = list(jobs)
        self.streams = [ScriptedStream(self.script, self.piece, self.pause, self.end) for _ in jobs]
        return self.streams
