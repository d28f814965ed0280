"""Who may ask, how much, from where, and what is written down of it. `pytest
tests/test_serve_security.py`"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket

import pytest

from quickbeam import LLM
from quickbeam.serve import security
from quickbeam.serve.settings import ServeSettings
from running import served

SECRET = "the cat that nobody may know of"


@pytest.fixture(scope="module")
def llm(toy_folder):
    with LLM(toy_folder, "pld") as found:
        yield found


def ask(llm, *requests: tuple, **settings):
    """Responses to requests, `(method, path, {…})`, of a server with these settings."""

    async def main() -> list:
        async with served(llm, served_name="tiny", **settings) as (_, client):
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(main())


def completion(prompt: str = "hello", **headers: str) -> tuple:
    return (
        "POST",
        "/v1/completions",
        {"json": {"model": "tiny", "prompt": prompt, "max_tokens": 4}, "headers": headers},
    )


def test_without_keys_everybody_may_ask(llm):
    (found,) = ask(llm, completion())
    assert found.status_code == 200


@pytest.mark.parametrize(
    "header",
    (
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer first2",
        "Bearer first second",
        "Basic first",
        "first",
    ),
)
def test_a_wrong_key_opens_nothing(llm, header):
    (found,) = ask(
        llm,
        completion(**({"Authorization": header} if header else {})),
        api_keys=("first", "second"),
    )
    assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
    error = found.json()["error"]
    assert error["code"] == "invalid_api_key" and error.keys() == {
        "message",
        "type",
        "param",
        "code",
    }
    assert "first" not in found.text and "second" not in found.text


@pytest.mark.parametrize("header", ("Bearer first", "bearer second", "Bearer  first"))
def test_any_of_the_keys_opens(llm, header):
    (found,) = ask(llm, completion(Authorization=header), api_keys=("first", "second"))
    assert found.status_code == 200


def test_all_keys_are_looked_at_in_constant_time(llm, monkeypatch):
    compared = list[tuple[int, int]]()

    def compare(given, known):
        compared.append((len(given), len(known)))
        return compare_digest(given, known)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    for header in ("Bearer a", "Bearer ccc", "Bearer " + "x" * 1000):
        compared.clear()
        ask(llm, completion(Authorization=header), api_keys=("a", "bb", "ccc"))
        assert compared == [(32, 32)] * 3


@pytest.mark.parametrize("protect", (False, True))
def test_what_is_open(llm, protect):
    paths = [
        "/",
        "/health",
        "/metrics",
        "/v1/models",
        "/version",
        "/openapi.json",
        "/tokenize",
        "/nowhere",
        "/health/",
        "/metrics/x",
    ]
    found = ask(
        llm, *(("GET", path, {}) for path in paths), api_keys=("key",), protect_metrics=protect
    )
    assert [one.status_code for one in found] == [200, 200, 401 if protect else 200, *[401] * 7]


def test_pages_that_load_from_elsewhere_are_off(llm):
    found = ask(llm, ("GET", "/docs", {}), ("GET", "/redoc", {}))
    assert [one.status_code for one in found] == [404, 404]


def test_a_large_body_is_refused_unread(llm):
    body = b'{"model": "tiny", "prompt": "' + b"x" * 2000 + b'"}'

    async def chunks():
        for i in range(0, len(body), 100):
            read.append(i)
            yield body[i : i + 100]

    read = list[int]()
    headers = {"Content-Type": "application/json"}
    small = (
        "POST",
        "/v1/completions",
        {"json": {"model": "tiny", "prompt": "x" * 400, "max_tokens": 1}},
    )
    known = ("POST", "/v1/completions", {"content": body, "headers": headers})
    chunked = ("POST", "/v1/completions", {"content": chunks(), "headers": headers})
    lying = (
        "POST",
        "/v1/completions",
        {"content": chunks(), "headers": headers | {"Content-Length": "10"}},
    )
    fine, *found = ask(llm, small, known, chunked, lying, max_body_bytes=1000)
    assert fine.status_code == 200
    for one in found:
        assert (
            one.status_code == 413
            and "1000 bytes" in one.json()["error"]["message"]
            and one.headers["connection"] == "close"
        )


def test_reading_stops_at_the_limit():
    """The application gets no more than the limit, and hears of it while it reads."""
    messages = [{"type": "http.request", "body": b"x" * 400, "more_body": True} for _ in range(10)]
    seen = list[int]()

    async def app(scope, receive, send):
        while True:
            seen.append(len((await receive())["body"]))

    async def receive():
        return messages.pop()

    with pytest.raises(security.TooLarge) as error:
        asyncio.run(security.BodyLimit(app, 1000)({"type": "http", "headers": []}, receive, None))
    assert error.value.status_code == 413 and seen == [400, 400] and len(messages) == 7


def test_web_pages_of_others_may_not_ask_unless_told(llm):
    preflight = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    asked = [
        ("OPTIONS", "/v1/completions", {"headers": preflight}),
        completion(Origin="https://a.example", Authorization="Bearer key"),
    ]
    for one in ask(llm, *asked, api_keys=("key",)):
        assert not [name for name in one.headers if name.startswith("access-control")]
    for origins, allowed in ((("https://a.example",), "https://a.example"), (("*",), "*")):
        # a preflight has no key
        for one in ask(llm, *asked, api_keys=("key",), cors_origins=origins):
            assert one.status_code == 200 and one.headers["access-control-allow-origin"] == allowed
    (other, _) = ask(llm, *asked, cors_origins=("https://b.example",))
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_names_of_others_do_not_lead_here(llm):
    """A web page whose name was made to point to this machine can't ask a server that nothing else
    protects."""

    def with_host(name: str) -> tuple:
        return completion(Host=name)

    names = [
        "localhost:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "LOCALHOST",
        "evil.example:8000",
        "evil.example",
        "localhost.evil.example",
        "",
    ]
    codes = [one.status_code for one in ask(llm, *map(with_host, names))]
    assert codes == [200] * 4 + [400] * 4
    assert [
        one.status_code
        for one in ask(llm, with_host("proxy.example"), allowed_hosts=("proxy.example",))
    ] == [200]
    assert [one.status_code for one in ask(llm, with_host("any.example"), host="0.0.0.0")] == [200]
    # whoever knows the key is no stranger
    key = completion(Host="any.example", Authorization="Bearer key")
    assert [one.status_code for one in ask(llm, key, api_keys=("key",))] == [200]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("a.b", False),
    ],
)
def test_which_addresses_are_this_machine_alone(host, loopback):
    assert ServeSettings(host=host).loopback is loopback


def test_prompts_are_not_logged_unless_told(llm, caplog):
    caplog.set_level(logging.DEBUG)
    bad = (
        "POST",
        "/v1/completions",
        {"json": {"model": "tiny", "prompt": SECRET, "no_such_field": 1}},
    )
    long = completion(SECRET * 100)
    broken = (
        "POST",
        "/v1/completions",
        {
            "content": f'{{"prompt": "{SECRET}'.encode(),
            "headers": {"Content-Type": "application/json"},
        },
    )
    found = ask(llm, completion(SECRET), bad, long, broken)
    assert [one.status_code for one in found] == [200, 400, 400, 400]
    assert SECRET not in caplog.text
    ask(llm, completion(SECRET), log_prompts=True)
    assert SECRET in caplog.text


def test_nothing_is_read_or_fetched_for_a_request(llm, monkeypatch, tmp_path):
    """Files and addresses that a request names stay untouched: they are refused, or are text."""
    (secret := tmp_path / "secret.txt").write_text(SECRET)
    opened, connected = list[str](), list[object]()
    address = f"file://{secret}"

    def audit(event: str, arguments: tuple) -> None:
        if watching:
            if event == "open" and str(secret) in str(arguments[0]):
                opened.append(str(arguments[0]))
            if event == "socket.getaddrinfo":
                connected.append(arguments)

    import sys

    watching = True
    sys.addaudithook(audit)
    connect = socket.socket.connect
    monkeypatch.setattr(
        socket.socket, "connect", lambda *given: connected.append(given) or connect(*given)
    )

    def chat(content: object) -> tuple:
        return (
            "POST",
            "/v1/chat/completions",
            {
                "json": {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 4,
                }
            },
        )

    image = [
        {"type": "image_url", "image_url": {"url": url}}
        for url in (address, "http://127.0.0.1:1/x.png")
    ]
    files = [
        {"type": "file", "file": {"file_data": address}},
        {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
    ]
    try:
        found = ask(
            llm,
            *(chat([part]) for part in [*image, *files]),
            chat(address),
            completion(address),
            completion(str(secret)),
        )
    finally:
        watching = False
    assert [one.status_code for one in found] == [400, 400, 400, 400, 200, 200, 200]
    assert opened == [] and connected == []
    assert all(SECRET not in one.text for one in found)
