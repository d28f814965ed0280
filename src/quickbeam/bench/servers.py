"""Peers that serve many requests, each in a process of its own behind OpenAI's interface: llama.cpp's server and vLLM."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from quickbeam.bench.throughput import Answered, Cell
from quickbeam.errors import InvalidInput, QuickbeamError

START = 600.0  # seconds that a server may take to come up
KINDS = ("llama-cpp", "vllm")


@dataclass(frozen=True)
class Server:
    """`command`: what starts it; `{port}` stands for the port that it is to listen on."""

    name: str
    command: tuple[str, ...]


def parse_server(text: str) -> Server:
    """`NAME=COMMAND`, such as `llama-cpp=python -m llama_cpp.server --model FILE.gguf --port {port}` or `vllm=vllm serve MODEL --port
    {port}`. Raises `InvalidInput` for others."""
    name, found, command = text.partition("=")
    if not found or not name.strip() or "{port}" not in command:
        raise InvalidInput(
            f"--server {text!r}: must be NAME=COMMAND with {{port}} in it, such as "
            "'llama-cpp=python -m llama_cpp.server --model FILE.gguf --port {port}' or 'vllm=vllm serve MODEL --port {port}'"
        )
    try:
        return Server(name.strip(), tuple(shlex.split(command)))
    except ValueError as error:
        raise InvalidInput(f"--server {text!r}: {error}") from error


def measure_server(server: Server, prompts: list[str], running: int, max_tokens: int, raw: bool) -> Cell:
    """Greedy answers to all prompts, `running` clients at a time. Raises `QuickbeamError` where the server does not come up."""
    port = _free_port()
    command = [part.replace("{port}", str(port)) for part in server.command]
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        except OSError as error:
            raise InvalidInput(f"--server {server.name}: can't start {command[0]!r} ({error.strerror})") from error
        try:
            base = f"http://127.0.0.1:{port}/v1"
            model = _wait(base, process, server.name, log)
            began = time.perf_counter()
            with ThreadPoolExecutor(running) as clients:
                answers = list(clients.map(lambda prompt: _ask(base, model, prompt, max_tokens, raw, began), prompts))
            return Cell(time.perf_counter() - began, answers=answers)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(base: str, process: subprocess.Popen[bytes], name: str, log: Any) -> str:
    """The name of the model that the server has, once it answers."""
    until = time.perf_counter() + START
    while time.perf_counter() < until:
        if process.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise QuickbeamError(f"--server {name}: it ended before it served: {lines[-1] if lines else 'no output'}")
        try:
            with urlopen(f"{base}/models", timeout=5) as response:
                return str(json.load(response)["data"][0]["id"])
        except (OSError, KeyError, IndexError, ValueError):
            time.sleep(0.2)
    raise QuickbeamError(f"--server {name}: it did not answer within {START:.0f} seconds")


def _ask(base: str, model: str, prompt: str, max_tokens: int, raw: bool, began: float) -> Answered:
    """One streamed answer; a piece of the stream counts as a token, as these servers send one a token."""
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    answered = Answered((), time.perf_counter() - began)
    where = f"{base}/{'completions' if raw else 'chat/completions'}"
    try:
        with urlopen(Request(where, json.dumps(body).encode(), {"Content-Type": "application/json"})) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                piece = choice.get("text") if raw else choice["delta"].get("content")
                if piece:
                    answered.last = time.perf_counter() - began
                    answered.first = answered.first or answered.last
                    answered.token_ids.append(-1)
                    answered.text += piece
    except HTTPError as error:
        raise QuickbeamError(f"the server refuses a request: {error.read()[:200].decode(errors='replace')}") from error
    return answered
