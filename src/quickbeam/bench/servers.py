"""Servers with OpenAI's interface, each in a process of its own.

Our own server is one of them. Others are peers such as llama.cpp's and vLLM.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from typing_extensions import Self

from quickbeam.bench.throughput import Answered, Cell
from quickbeam.errors import InvalidInput, QuickbeamError

START = 600.0  # seconds that a server may take to start
UNKNOWN = -1  # the id of a token that the server does not name


@dataclass(frozen=True)
class Server:
    """A server to start with `command`, in which `{port}` stands for the port to listen on."""

    name: str
    command: tuple[str, ...]


def parse_server(text: str) -> Server:
    """Read `NAME=COMMAND`, where the command has `{port}` in it.

    Examples are `llama-cpp=python -m llama_cpp.server --model FILE.gguf --port {port}` and
    `vllm=vllm serve MODEL --port {port}`. Raises `InvalidInput` for anything else.
    """
    name, found, command = text.partition("=")
    if not found or not name.strip() or "{port}" not in command:
        raise InvalidInput(
            f"--server {text!r}: must be NAME=COMMAND with {{port}} in it, such as "
            "'llama-cpp=python -m llama_cpp.server --model FILE.gguf --port {port}' or 'vllm=vllm "
            "serve MODEL --port {port}'"
        )
    try:
        return Server(name.strip(), tuple(shlex.split(command)))
    except ValueError as error:
        raise InvalidInput(f"--server {text!r}: {error}") from error


class Serving:
    """A running server, for as long as the `with` block lasts.

    `base` is the address of its interface, and `model` the name of the model that it serves.
    Entering raises `InvalidInput` where the command can't be started, and `QuickbeamError` where
    the server ends or does not answer within `START` seconds.
    """

    def __init__(self, server: Server) -> None:
        self.server, port = server, _free_port()
        self.base = f"http://127.0.0.1:{port}/v1"
        self._command = [part.replace("{port}", str(port)) for part in server.command]

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        except OSError as error:
            self._log.close()
            raise InvalidInput(
                f"--server {self.server.name}: can't start {self._command[0]!r} ({error.strerror})"
            ) from error
        try:
            self.model = _wait(self.base, self._process, self.server.name, self._log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def measure(
        self,
        prompts: Sequence[str],
        running: int,
        max_tokens: int,
        raw: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> Cell:
        """Return greedy answers to all prompts, from `running` clients at a time.

        `raw`: prompts are sent without a chat template. `extra`: fields that each request has
        beside the prompt, for a server that knows them. Raises `QuickbeamError` where the server
        refuses a request.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        body |= {"stream_options": {"include_usage": True}, **(extra or {})}
        where, began = (
            f"{self.base}/{'completions' if raw else 'chat/completions'}",
            time.perf_counter(),
        )

        def ask(prompt: str) -> Answered:
            asked = (
                {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
            )
            return _ask(where, body | asked, began)

        with ThreadPoolExecutor(running) as clients:
            answers = list(clients.map(ask, prompts))
        return Cell(time.perf_counter() - began, answers=answers)


def ourselves(options: Sequence[str]) -> Server:
    """Return `quickbeam serve` with these options, run by this Python."""
    return Server(
        "quickbeam", (sys.executable, "-m", "quickbeam", "serve", "--port", "{port}", *options)
    )


def speculation(method: str, budget: int | None) -> dict[str, Any]:
    """Return the fields by which a request tells our own server how to answer it.

    They also ask for token ids, which the comparison needs.
    """
    return {
        "speculation": {"method": method, **({} if budget is None else {"budget": budget})},
        "return_token_ids": True,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(base: str, process: subprocess.Popen[bytes], name: str, log: Any) -> str:
    """Wait until the server answers, and return the name of its model."""
    until = time.perf_counter() + START
    while time.perf_counter() < until:
        if process.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise QuickbeamError(
                f"--server {name}: it ended before it served: {lines[-1] if lines else 'no output'}"
            )
        try:
            with urlopen(f"{base}/models", timeout=5) as response:
                return str(json.load(response)["data"][0]["id"])
        except (OSError, KeyError, IndexError, ValueError):
            time.sleep(0.2)
    raise QuickbeamError(f"--server {name}: it did not answer within {START:.0f} seconds")


def _ask(where: str, body: Mapping[str, Any], began: float) -> Answered:
    """Get one streamed answer, with times in seconds since `began`.

    Its tokens are the ids that the server names. Where it names none, there are as many unknown
    tokens as the server counts. Where it does not count, each piece of the stream is one token.
    """
    answered = Answered((), time.perf_counter() - began)
    pieces = 0
    try:
        with urlopen(
            Request(where, json.dumps(body).encode(), {"Content-Type": "application/json"})
        ) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise QuickbeamError(f"the server ends a request: {chunk['error']}")
                for choice in chunk["choices"]:
                    piece = choice.get("text") or choice.get("delta", {}).get("content")
                    ids = choice.get("token_ids") or []
                    answered.token_ids += ids
                    if piece or ids:
                        answered.last = time.perf_counter() - began
                        answered.first = answered.first or answered.last
                    if piece:
                        pieces += 1
                        answered.text += piece
                if usage := chunk.get("usage"):
                    pieces = usage["completion_tokens"]
                    answered.steps = usage.get("steps", 0)
                    details = usage.get("completion_tokens_details") or {}
                    drafted = ("accepted_prediction_tokens", "rejected_prediction_tokens")
                    answered.nodes = (
                        answered.steps + sum(details.get(name) or 0 for name in drafted)
                        if answered.steps
                        else 0
                    )
    except HTTPError as error:
        raise QuickbeamError(
            f"the server refuses a request: {error.read()[:200].decode(errors='replace')}"
        ) from error
    if not answered.token_ids:
        answered.token_ids = [UNKNOWN] * pieces
    return answered
