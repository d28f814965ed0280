"""Servers with OpenAI's interface, ours and others, asked the same questions by many clients.

    python benchmarks/peers.py --questions Q --limit 16 --clients 1,4 --rounds 2 "NAME=COMMAND" ...

with commands such as

    llama.cpp=llama-server --port {port} -t 2 -c 4096 -m MODEL.gguf --spec-type ngram-simple
    vLLM=vllm serve MODEL --port {port}
    ours=quickbeam serve --port {port} --no-share-prefixes

Servers run one after the other, in turn for every round: each is started, asked one question that
is not counted, then the others, and ended. Answers are greedy and streamed; tokens are those that a
server counts. Tokens a second count prompts and HTTP. "Same text" counts the answers that are those
of the first server.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from common import arguments, finish, numbers, questions_of, script
from quickbeam.errors import InvalidInput, QuickbeamError

START = 600.0  # seconds that a server may take to start


class Served(NamedTuple):
    text: str
    tokens: int
    first: float  # seconds until the first piece


class Serving:
    """A running server, for as long as the `with` block lasts; its command has `{port}`."""

    def __init__(self, name: str, command: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.name, self.base = name, f"http://127.0.0.1:{port}/v1"
        self.command = shlex.split(command.replace("{port}", port))

    def __enter__(self) -> Serving:
        self.log = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        except OSError as failure:
            self.log.close()
            raise InvalidInput(f"{self.name}: can't start {self.command[0]} ({failure})") from None
        until = time.perf_counter() + START
        while time.perf_counter() < until and self.process.poll() is None:
            try:
                with urlopen(f"{self.base}/models", timeout=5) as response:
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
        self.log.close()

    def open(self, request: Request) -> Any:
        try:
            return urlopen(request, timeout=900)
        except HTTPError as failure:
            with failure:
                why = failure.read()[:200].decode(errors="replace")
            raise QuickbeamError(f"{self.name}: refuses a request: {why}") from None

    def ask(self, prompt: str, given: Namespace) -> Served:
        """Return a streamed greedy answer."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": given.max_tokens}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        messages = {"messages": [{"role": "user", "content": prompt}]}
        body |= {"prompt": prompt} if given.raw else messages
        where = f"{self.base}/{'completions' if given.raw else 'chat/completions'}"
        request = Request(where, json.dumps(body).encode(), {"Content-Type": "application/json"})
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
        return Served(text, tokens, first)


def main() -> None:
    parser = arguments(__doc__, limit=16, max_tokens=96)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND", help="{port} is filled in")
    parser.add_argument("--clients", default="1", help="at a time, comma-separated")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    texts = [question.turns[0] for question in questions_of(given)]
    answers: dict[tuple[int, str], list[Served]] = defaultdict(list)
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for _ in range(given.rounds):
        for server in given.servers:
            name, _, command = server.partition("=")
            with Serving(name, command) as serving:
                serving.ask(texts[0][:60], given)
                for clients in map(int, numbers(given.clients)):
                    began = time.perf_counter()
                    with ThreadPoolExecutor(clients) as pool:
                        own = list(pool.map(lambda text: serving.ask(text, given), texts))
                    seconds[clients, name] += time.perf_counter() - began
                    answers[clients, name] += own
    rows, figures = [], dict[int, dict[str, Any]]()
    reference = [one.text for one in answers[next(iter(answers))]]
    for clients, name in sorted(answers, key=lambda key: key[0]):
        own = answers[clients, name]
        rate = sum(one.tokens for one in own) / seconds[clients, name]
        same = sum(one.text == text for one, text in zip(own, reference, strict=True))
        wait, kept = 1000 * median(one.first for one in own), f"{same} of {len(own)}"
        row = {"clients": clients, "server": name, "tokens/s": f"{rate:.1f}"}
        rows.append(row | {"first piece ms": f"{wait:.0f}", "same text": kept})
        one = {"tokens_per_second": rate, "p50_ttft_ms": wait, "same_text": same}
        figures.setdefault(clients, {})[name] = one | {"prompts": len(own)}
    finish(given, rows, concurrency=figures)


if __name__ == "__main__":
    script(main)
