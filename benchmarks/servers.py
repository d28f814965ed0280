"""A running server with OpenAI's interface, and one streamed question to it: what `peers.py`,
`first_byte.py`, `cold_start.py` and `contexts.py` share."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from quickbeam.errors import InvalidInput, QuickbeamError

START = 600.0  # seconds that a server may take to start


class StreamedAnswer(NamedTuple):
    text: str
    tokens: int
    first: float  # seconds until the first piece


class ServerProcess:
    """A running server, for as long as the `with` block lasts; its command has `{port}`."""

    def __init__(self, name: str, command: str | Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.name, self.base = name, f"http://127.0.0.1:{port}"
        words = shlex.split(command) if isinstance(command, str) else command
        self.command = [word.replace("{port}", port) for word in words]

    def __enter__(self) -> ServerProcess:
        self.log = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        except OSError as failure:
            self.log.close()
            raise InvalidInput(f"{self.name}: can't start {self.command[0]} ({failure})") from None
        until = time.perf_counter() + START
        while time.perf_counter() < until and self.process.poll() is None:
            try:
                with urlopen(f"{self.base}/health", timeout=5):
                    pass  # an error until the model is loaded
                with urlopen(f"{self.base}/v1/models", timeout=5) as response:
                    self.model = json.load(response)["data"][0]["id"]
                return self
            except (OSError, KeyError, IndexError, ValueError):
                time.sleep(0.2)
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:]
        self.__exit__()
        raise QuickbeamError(f"{self.name}: ended or did not answer: {' '.join(last)}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def open(self, request: Request) -> Any:
        try:
            return urlopen(request, timeout=900)
        except HTTPError as failure:
            with failure:
                why = failure.read()[:200].decode(errors="replace")
            raise QuickbeamError(f"{self.name}: refuses a request: {why}") from None
        except OSError as failure:
            raise QuickbeamError(f"{self.name}: gone while it was asked ({failure})") from None

    def request(self, path: str, body: Mapping[str, Any]) -> Request:
        """Return a request in JSON."""
        data = json.dumps(body).encode()
        return Request(f"{self.base}{path}", data, {"Content-Type": "application/json"})

    def ask(self, prompt: str, given: Namespace) -> StreamedAnswer:
        body: dict[str, Any] = {"model": self.model, "max_tokens": given.max_tokens}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        messages = {"messages": [{"role": "user", "content": prompt}]}
        body |= {"prompt": prompt} if given.raw else messages
        request = self.request(f"/v1/{'completions' if given.raw else 'chat/completions'}", body)
        text, tokens, first, began = "", 0, 0.0, time.perf_counter()
        with self.open(request) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                for choice in chunk.get("choices") or ():
                    piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    first = first or (time.perf_counter() - began if piece else 0.0)
                    text, tokens = text + piece, tokens + bool(piece)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        return StreamedAnswer(text, tokens, first)
