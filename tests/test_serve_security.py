"""Who may ask, how much, from where, and what is written down of it."""

import asyncio
import gzip
import logging
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from quickbeam.config import ServerOptions
from quickbeam.grammar.spec import Grammar
from quickbeam.serve.endpoints import ENDPOINTS
from quickbeam.serve.runner import Runner
from running import served, serving, until
from serving import ScriptedRunner, send
from serving import ask as serving_ask

SECRET = "the cat that nobody may know of"
WRONG = ("", "Bearer", "Bearer ", "Bearer wrong", "Bearer first2", "Bearer first second")


def ask(llm, *requests, **settings):
    """Responses to requests, `(method, path, {…})`, of a server with these settings."""
    return send(Runner(ServerOptions(served_names=("tiny",), **settings), llm), *requests)


def completion(prompt="hello", **headers):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
    return "POST", "/v1/completions", {"json": body, "headers": headers}


def codes(responses):
    return [one.status_code for one in responses]


def test_keys(llm):
    assert codes(ask(llm, completion())) == [200]
    headers = [*WRONG, "Basic first", "first"]
    asked = [completion(**({"Authorization": one} if one else {})) for one in headers]
    for response in ask(llm, *asked, api_keys=("first", "second")):
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert error["code"] == "invalid_api_key"
        assert error.keys() == {"message", "type", "param", "code"}
        assert "first" not in response.text and "second" not in response.text
    good = ("Bearer first", "bearer second", "Bearer  first")
    asked = [completion(Authorization=one) for one in good]
    assert codes(ask(llm, *asked, api_keys=("first", "second"))) == [200] * 3


@pytest.mark.parametrize("protect", (False, True))
def test_what_is_open(llm, protect):
    paths = "/ /health /metrics /v1/models /version /openapi.json /tokenize /nowhere /health/"
    asked = [("GET", path, {}) for path in (*paths.split(), "/metrics/x")]
    statuses = codes(ask(llm, *asked, api_keys=("key",), protect_metrics=protect))
    assert statuses == [200, 200, 401 if protect else 200, *[401] * 5, 200, 401]
    # pages that would load scripts from elsewhere
    assert codes(ask(llm, ("GET", "/docs", {}), ("GET", "/redoc", {}))) == [404, 404]


def test_a_large_body_is_refused_unread(llm):
    body = b'{"model": "tiny", "prompt": "' + b"x" * 2000 + b'"}'

    async def chunks():
        for i in range(0, len(body), 100):
            yield body[i : i + 100]

    headers = {"Content-Type": "application/json"}
    lying = headers | {"Content-Length": "10"}
    asked = [{"content": body}, {"content": chunks()}, {"content": chunks(), "headers": lying}]
    large = [("POST", "/v1/completions", {"headers": headers, **one}) for one in asked]
    fine, *refused = ask(llm, completion("x" * 400), *large, max_body="1kB")
    assert fine.status_code == 200
    for one in refused:
        error = one.json()["error"]
        assert one.status_code == 413 and one.headers["connection"] == "close"
        assert "1000 bytes" in error["message"] and error["code"] == "body_too_large"


def test_compressed_bodies_are_read(llm):
    body = b'{"model": "tiny", "prompt": "hello", "max_tokens": 1}'
    bomb = b'{"model": "tiny", "prompt": "hello", "x": "' + b"x" * 2000 + b'"}'
    limit = {"max_body": "1kB"}

    def asked(content, coding):
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        return "POST", "/v1/completions", {"content": content, "headers": headers}

    async def pieces():
        for byte in gzip.compress(body):
            yield bytes([byte])

    fine = [
        (gzip.compress(body), "gzip"),
        (pieces(), "X-GZip"),
        (zlib.compress(body), "deflate"),
        (body, "identity"),
    ]
    assert codes(ask(llm, *(asked(*one) for one in fine), **limit)) == [200] * 4
    too_large = asked(gzip.compress(bomb), "gzip"), asked(zlib.compress(bomb), "deflate")
    for response in ask(llm, *too_large, **limit):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
    broken = (body, gzip.compress(body)[:-9], gzip.compress(body) + b"x", b"")
    for response in ask(llm, *(asked(one, "gzip") for one in broken), **limit):
        assert response.status_code == 400 and "decompress" in response.text
    for response in ask(llm, *(asked(body, one) for one in ("br", "zstd", "gzip, gzip"))):
        assert (
            response.status_code == 415 and response.headers["accept-encoding"] == "gzip, deflate"
        )
        assert response.json()["error"]["code"] == "unsupported_encoding"


def test_whole_urls_and_slashes_at_the_end_are_as_without(llm):
    paths = ["/v1/models", "/v1/models/tiny", "/version", "/health", "/"]
    plain = [one.content for one in ask(llm, *(("GET", path, {}) for path in paths))]
    slashed = [("GET", f"{path.rstrip('/')}/", {}) for path in paths]
    assert [one.content for one in ask(llm, *slashed)] == plain
    method, path, fields = completion()
    for same in (f"{path}/", f"{path}//"):
        assert codes(ask(llm, (method, same, fields))) == [200]


def exchange_raw(runner, *heads):
    """The statuses of responses to requests with these heads, over a socket."""

    def exchange(address, head):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        return int(answer.split()[1])

    with serving(runner) as (address, _):
        return [exchange(address, head) for head in heads]


def test_targets_that_are_whole_urls(llm):
    """Their host counts, and not the header's; no path is open for the URL that it stands in."""
    targets = (
        ("http://localhost/v1/models", 200),
        ("HTTP://LocalHost:80/v1/models/?x=1", 200),
        ("http://localhost", 200),
        ("http://evil.example/v1/models", 400),
        ("http://localhost/nowhere", 404),
    )
    heads = [f"GET {target} HTTP/1.1\r\nHost: localhost" for target, _ in targets]
    heads.append("GET http://localhost/health HTTP/1.1\r\nHost: evil.example")
    runner = ScriptedRunner(ServerOptions(), llm)
    assert exchange_raw(runner, *heads) == [*(status for _, status in targets), 200]
    keyed = ScriptedRunner(ServerOptions(api_keys=("key",)), llm)
    paths = ("health", "v1/models", "health/../v1/models", "", "/health")
    heads = [f"GET http://localhost/{path} HTTP/1.1\r\nHost: localhost" for path in paths]
    assert exchange_raw(keyed, *heads) == [200, 401, 401, 200, 401]


def test_clients_that_send_half_a_body_are_left(llm):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    runner = ScriptedRunner(ServerOptions(read_timeout=1, keep_alive=0.1), llm)
    runner.script, runner.piece, runner.pause = "one two", 7, 1.5

    def exchange(body):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head + body)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    with serving(runner) as (address, _), ThreadPoolExecutor() as threads:
        bodies = (
            b'Content-Length: 100\r\n\r\n{"prompt": ',
            b'Connection: close\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}',
        )
        half, whole = threads.map(exchange, bodies)
    assert b" 408 " in half and b"request_timeout" in half
    assert b" 200 " in whole and b"one two" in whole


def test_bodies_that_any_page_may_send_are_not_read(llm):
    """A form and a body without a type are sent to any address without asking its server."""
    wrong = (None, "text/plain", "application/x-www-form-urlencoded", "json", "")
    right = ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json")
    for path in (*ENDPOINTS, "/tokenize", "/detokenize"):
        for types, status, words in ((wrong, 415, "the header Content-Type"), (right, 400, "JSON")):
            headers = [{} if kind is None else {"Content-Type": kind} for kind in types]
            asked = [("POST", path, {"content": "{", "headers": one}) for one in headers]
            for one in ask(llm, *asked):
                assert one.status_code == status and words in one.text


def test_pages_of_other_origins_may_not_ask(llm):
    others = ("https://a.example", "null", "http://localhost:81", "http://localhost.a.example")
    origins = ("http://localhost", *others, "http://[", "")
    own, *rest = [completion(Origin=one, Host="localhost") for one in origins]
    first, *refused = ask(llm, own, *rest)
    assert first.status_code == 200 and codes(refused) == [403] * 6
    assert {one.json()["error"]["code"] for one in refused} == {"unknown_origin"}
    asked = completion(Origin="https://a.example", Host="b.example")
    wide = {"host": "0.0.0.0"}
    assert codes(ask(llm, asked, **wide)) == [403]
    same = completion(Origin="https://b.example", Host="b.example")  # behind a proxy for TLS
    assert codes(ask(llm, same, **wide)) == [200]
    for origins in (("https://a.example",), ("*",)):
        assert codes(ask(llm, asked, cors_origins=origins, **wide)) == [200]
    read = ("GET", "/v1/models", {"headers": {"Origin": "https://a.example"}})
    assert codes(ask(llm, read)) == [200]
    keyed = completion(Origin="https://a.example", Authorization="Bearer key")
    assert codes(ask(llm, keyed, api_keys=("key",))) == [200]


def test_web_pages_of_others_may_not_ask_unless_told(llm):
    asks = {"Access-Control-Request-Method": "POST"}
    preflight = {"Origin": "https://a.example", **asks}
    preflight["Access-Control-Request-Headers"] = "authorization"
    asked = [
        ("OPTIONS", "/v1/completions", {"headers": preflight}),
        completion(Origin="https://a.example", Authorization="Bearer key"),
    ]
    for one in ask(llm, *asked, api_keys=("key",)):
        assert not [name for name in one.headers if name.startswith("access-control")]
    for allowed in ("https://a.example", "*"):
        # a preflight has no key
        for one in ask(llm, *asked, api_keys=("key",), cors_origins=(allowed,)):
            assert one.status_code == 200 and one.headers["access-control-allow-origin"] == allowed
    (other, _) = ask(llm, *asked, cors_origins=("https://b.example",))
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_names_of_others_do_not_lead_here(llm):
    own = ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "")
    others = ("evil.example:8000", "evil.example", "localhost.evil.example", "[")
    responses = ask(llm, *(completion(Host=name) for name in (*own, *others)))
    assert codes(responses) == [200] * 5 + [400] * 4
    assert all(one.json()["error"]["code"] == "unknown_host" for one in responses[5:])
    asked = completion(Host="proxy.example")
    for settings in ({"allowed_hosts": ("proxy.example",)}, {"host": "0.0.0.0"}):
        assert codes(ask(llm, asked, **settings)) == [200]
    # whoever knows the key is no stranger
    key = completion(Host="any.example", Authorization="Bearer key")
    assert codes(ask(llm, key, api_keys=("key",))) == [200]


def test_prompts_are_not_logged_unless_told(llm, caplog):
    caplog.set_level(logging.DEBUG)
    headers = {"Content-Type": "application/json"}
    asked = [
        {"json": {"model": "tiny", "prompt": SECRET, "no_such_field": 1}},
        {"json": {"model": "tiny", "prompt": SECRET * 100}},
        {"content": f'{{"prompt": "{SECRET}'.encode(), "headers": headers},
    ]
    bad = [("POST", "/v1/completions", one) for one in asked]
    assert codes(ask(llm, completion(SECRET), *bad)) == [200, 400, 400, 400]
    assert SECRET not in caplog.text
    ask(llm, completion(SECRET), log_prompts=True)
    assert SECRET in caplog.text


def test_what_a_request_says_makes_no_line_of_the_log(llm, caplog):
    """Neither an error's message, which may quote it, nor a grammar that a warning quotes."""
    caplog.set_level(logging.INFO)
    scripted = ScriptedRunner(ServerOptions(), llm)
    evil = f"\x1b[31m{SECRET}\n2026-01-01 WARNING all is well"
    scripted.end = ValueError(evil)
    for stream in (False, True):
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
            serving_ask(scripted, path, {**body, "stream": stream})
    assert caplog.text.count("a request failed with ValueError") == 4
    assert SECRET not in caplog.text and "test_serve" not in caplog.text
    schema = {"type": "string", "format": evil}
    fields = {"prompt": "x", "max_tokens": 1, "guided_json": schema, "temperature": 0}
    ask(llm, ("POST", "/v1/completions", {"json": fields}))
    for one in caplog.records:
        assert "\x1b" not in one.getMessage() and evil not in one.getMessage()
        assert SECRET not in one.getMessage() or one.levelno <= logging.INFO


@pytest.mark.parametrize("kind", ("grammar", "text", "tokens"))
def test_grammars_and_texts_that_take_long_hold_up_nobody_else(llm, monkeypatch, kind):
    go, tokenise = threading.Event(), type(llm.tokenizer).__call__
    most = 8 * llm.room(0)

    def slow(grammar):
        go.wait()
        return "it takes too long"

    def tokenise_slowly(tokenizer, text, **more):
        assert len(text) < most or go.wait()
        return tokenise(tokenizer, text, **more)

    monkeypatch.setattr("quickbeam.grammar.trial.failure", slow)
    monkeypatch.setattr(type(llm.tokenizer), "__call__", tokenise_slowly)

    async def main():
        async with served(llm) as (runner, client):
            post, body = partial(client.post, "/v1/completions"), {"prompt": "x", "max_tokens": 1}
            if kind == "tokens":
                asked = [client.post("/tokenize", json={"prompt": "x" * most}) for _ in range(40)]
            else:
                long = [{"regex": f"a{{{i}}}"} for i in range(1, 41)]
                long = long if kind == "grammar" else [{"prompt": "x" * most}] * 40
                asked = [post(json={**body, **one}) for one in long]
            others = [asyncio.create_task(one) for one in asked]
            if kind == "tokens":
                await asyncio.sleep(0.2)
            else:
                await until(lambda: runner.gate.inside == 40)
            try:  # which would never end if it had to wait for them
                assert (await post(json=body)).status_code == 200
                runner.options = replace(runner.options, queue_timeout=0.2)
                if kind != "tokens":
                    late = await post(json={**body, **long[0]})
                    assert late.status_code == 503 and "0.2 seconds" in late.text
            finally:
                go.set()
            return codes(await asyncio.gather(*others))

    assert asyncio.run(main()) == [200 if kind == "tokens" else 400] * 40


def test_tenants_take_turns_to_have_grammars_compiled(llm, monkeypatch):
    go, compiled = threading.Event(), []

    def slow(grammar):
        go.wait()
        compiled.append(grammar.text)

    async def main():
        async with served(llm) as (runner, _):
            monkeypatch.setattr(llm, "compile_grammar", slow)
            asked = [("a", f"a{i}") for i in range(9)] + [("b", "b0"), ("b", "b1")]
            tickets = [runner.gate.enter(1, tenant=tenant) for tenant, _ in asked]
            grammars = [Grammar("regex", text) for _, text in asked]
            waits = map(runner.compile_grammar, grammars, tickets)
            tasks = [asyncio.create_task(one) for one in waits]
            await asyncio.sleep(0)
            go.set()
            await asyncio.gather(*tasks)
            for ticket in tickets:
                with ticket:
                    pass

    asyncio.run(main())
    assert compiled[:4] == ["a0", "b0", "a1", "b1"] and len(compiled) == 11


def test_a_client_that_leaves_in_the_midst_of_a_body_is_no_error(llm, caplog):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(ScriptedRunner(ServerOptions(), llm)) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(head + b'Content-Length: 100\r\n\r\n{"a": ')
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            end = b"Host: localhost\r\nConnection: close\r\n\r\n"
            connection.sendall(b"GET /health HTTP/1.1\r\n" + end)
            assert b" 200 " in connection.recv(4096)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
