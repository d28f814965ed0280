"""`quickbeam serve`, an OpenAI-compatible server, and `quickbeam batch`, which answers a file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import typer
from tqdm import tqdm

from quickbeam import hub
from quickbeam.batch.journal import Journal
from quickbeam.batch.run import Answer, check, read, run
from quickbeam.cli.common import LoadOptions, RayOptions, harmless, needs, say
from quickbeam.config import ServerOptions
from quickbeam.errors import InvalidInput

if TYPE_CHECKING:
    from quickbeam.serve.runner import Runner

KEY = "QUICKBEAM_API_KEY"
MOST_NAMED = 10  # lines of a batch that failed
REASON = 200  # characters of the reason
AHEAD = 2  # requests under way for each answer that is computed at a time


def serve(loading: LoadOptions, options: ServerOptions, replicas: RayOptions) -> None:
    """Serve a model over HTTP to OpenAI's clients.

    A page to try it is at /. Ctrl-C or SIGTERM finishes what is under way.
    """
    replicas.check(loading)
    with needs("serve", "the server"):
        from quickbeam.serve import server
        from quickbeam.serve.fingerprint import name_of
        from quickbeam.serve.runner import Runner
    names = options.served_names or (name_of(loading.source or hub.DEFAULT),)
    keys = (*options.api_keys, *keys_of(os.environ.get(KEY, "")))
    options = replace(options, served_names=names, api_keys=keys)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form)
    if options.log_prompts:
        logging.getLogger("quickbeam.serve").setLevel(logging.INFO)
    if replicas.ray:
        with needs("ray,serve", "--ray"):
            from quickbeam.serve import ray
        where = f"{names[0]} at http://{options.host}:{options.port}, on Ray"
        return ray.run(loading, options, replicas, lambda: say(where))
    runner = Runner(options)
    server.run(runner, loading.load, ready=lambda address: say(greeting(runner, address)))


def keys_of(text: str) -> list[str]:
    """Return comma-separated API keys."""
    return [key.strip() for key in text.split(",") if key.strip()]


def greeting(runner: Runner, address: str) -> str:
    """Return a text that says where the server is, what it serves, and how to send it a request."""
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": runner.name, "messages": messages, "temperature": 0})
    key = f' -H "Authorization: Bearer ${KEY}"' if runner.options.api_keys else ""
    host, llm = runner.options.host, runner.llm
    warning = f"warning: everybody who can reach {host} may use it: add --api-key, or set {KEY}\n"
    return (
        f"{'' if key or runner.options.loopback else warning}"
        f"{runner.name} at {address} (method {llm.method}, kernels: {llm.describe()})\n"
        f"try it: curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d "
        f"{shlex.quote(body)}"
    )


@dataclass(frozen=True)
class BatchFiles:
    """What is answered, and where answers go."""

    source: Path = field(metadata={"argument": True, "metavar": "IN.jsonl"})
    """File of requests, one a line: OpenAI's batch format, or messages or prompt with parameters
    beside."""
    output: Path = field(metadata={"argument": True, "metavar": "OUT.jsonl"})
    """File of answers, as they come. What it answers already is not asked again."""
    served_name: str | None = field(default=None, metadata={"metavar": "NAME", "common": True})
    """Name of the model in the requests. Default: the name that it is loaded by."""


def batch(files: BatchFiles, loading: LoadOptions, replicas: RayOptions) -> None:
    """Answer a file of requests.

    Broken off at any moment, the same command goes on: no answer is lost, and none is made twice.

    Exit code 1: some requests could not be answered; their records say why.
    """
    if not files.source.is_file():
        raise InvalidInput(f"{files.source}: there is no such file")
    with Journal(files.output) as journal:
        lines = check(files.source, journal)
        total = len(lines)
        try:
            if len(journal.done) < total:
                replicas.check(loading)
                asyncio.run(answer(files, journal, total, loading, replicas))
        except KeyboardInterrupt:
            done = f"{len(journal.done)} of {total} answers are in {files.output}"
            say(f"stopped: {done}; the same command goes on")
            raise typer.Exit(130) from None
        failed = f", {len(journal.failed)} of them errors:" if journal.failed else ""
        say(f"{len(journal.done)} of {total} answers are in {files.output}{failed}")
        if journal.failed:
            say("\n".join(failures(journal.failed, lines)))
            raise typer.Exit(1)


def failures(failed: Mapping[str, str], lines: Mapping[str, int]) -> list[str]:
    """Return a text for each request that failed, in the order of its line, or the first ones.

    `failed`: the reason, by `custom_id`. `lines`: the line of each request, by `custom_id`.
    """
    named = sorted(failed, key=lambda name: lines[name])
    texts = list[str]()
    for name in named[:MOST_NAMED]:
        where, reason = f"line {lines[name]}", shorten(failed[name], REASON, placeholder=" …")
        custom_id = f" ({name})" if name != f"line-{lines[name]}" else ""
        # a line that is no request says so itself
        where = f"{where}{custom_id}: " if not reason.startswith(where) else ""
        texts.append(harmless(f"  {where}{reason}"))
    if len(named) > MOST_NAMED:
        texts.append(f"  and {len(named) - MOST_NAMED} more; their records say why")
    return texts


async def answer(
    files: BatchFiles, journal: Journal, total: int, loading: LoadOptions, replicas: RayOptions
) -> None:
    """Answer all requests that have no answer yet, with a model here or replicas on Ray."""
    answering: AbstractAsyncContextManager[Answer]
    if replicas.ray:
        with needs("ray,serve", "--ray"):
            from quickbeam.serve import actors
        answering = actors.replicated(loading, files.served_name, replicas)
    else:
        with needs("serve", "answering requests"):
            from quickbeam.serve.endpoints import InProcessServer
        answering = InProcessServer(loading.load(), files.served_name)
    shown = {"unit": "answer", "disable": not sys.stderr.isatty()}
    async with answering as answer_request:
        with tqdm(total=total, initial=len(journal.done), **shown) as bar:
            window = AHEAD * loading.max_running * replicas.replicas
            await run(read(files.source), answer_request, journal, window, bar.update)
