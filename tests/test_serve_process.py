"""`quickbeam serve` as a process of its own: signals, and what a supervisor does."""

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

BODY = {"model": "smollm2-135m", "prompt": "Once upon a time"}


@pytest.fixture
def port():
    with closing(socket.create_server(("127.0.0.1", 0))) as one:
        return one.getsockname()[1]


def start(port, *options):
    command = [sys.executable, "-m", "quickbeam", "serve", "--port", str(port)]
    return subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)


def health(port):
    """The status that it tells, or 0. A port that listens is not enough: the server takes signals
    only once its loop runs."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code
    except httpx.TransportError:
        return 0


def wait(condition, seconds=300):
    """How long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.1)
    return time.monotonic() - began


def finish(server):
    server.kill()
    server.wait()
    server.stderr.close()


@pytest.mark.long
@pytest.mark.parametrize("again", (False, True))
def test_a_process_drains_on_sigterm_and_ends_at_once_on_the_second(smollm2, port, again):
    server = start(port, "--drain-timeout", "120")
    try:
        wait(lambda: health(port) == 200)
        address = f"http://127.0.0.1:{port}/v1/completions"
        body = {**BODY, "max_tokens": 150, "ignore_eos": True, "stream": True}
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
    finally:
        finish(server)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_behind_stderr_ends_nothing():
    """As a program of its own, since its end writes what is left, too."""
    program = "import sys; from quickbeam.cli.common import say; say('ready'); print('on')"
    with open("/dev/full", "w") as full:
        how = dict(stderr=full, stdout=subprocess.PIPE, text=True)
        found = subprocess.run([sys.executable, "-c", program], **how)
    assert found.stdout == "on\n" and found.returncode in (0, 120)


@pytest.mark.long
def test_a_process_that_loads_can_be_ended(smollm2, port):
    server = start(port)
    try:
        wait(lambda: health(port) == 503)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        finish(server)
