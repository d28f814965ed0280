"""`quickbeam batch`: answer a file of requests into another file."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import typer
from tqdm import tqdm

from quickbeam.batch.journal import Journal
from quickbeam.batch.requests import read
from quickbeam.batch.run import Answer, check, run
from quickbeam.cli.common import say
from quickbeam.cli.loading import Loading, Replicas, needs
from quickbeam.errors import InvalidInput

AHEAD = 2  # requests under way for each answer that is computed at a time


@dataclass(frozen=True)
class Files:
    """What is answered, and where answers go."""

    source: Path = field(metadata={"argument": True, "metavar": "IN.jsonl"})
    """A request a line: OpenAI's batch format, or messages or prompt with parameters beside."""
    output: Path = field(metadata={"argument": True, "metavar": "OUT.jsonl"})
    """Answers, as they come. What is there already is not asked again."""
    served_name: str | None = field(default=None, metadata={"metavar": "NAME"})
    """What requests call the model."""


def batch(files: Files, loading: Loading, replicas: Replicas) -> None:
    """Answer a file of requests. Broken off at any moment, the same command goes on: no answer is
    lost, and none is made twice.

    Exit code 1: some requests could not be answered; their records say why.
    """
    if not files.source.is_file():
        raise InvalidInput(f"{files.source}: there is no such file")
    with Journal(files.output) as journal:
        total = check(files.source, journal)
        try:
            if len(journal.done) < total:
                replicas.check(loading)
                asyncio.run(answer(files, journal, total, loading, replicas))
        except KeyboardInterrupt:
            done = f"{len(journal.done)} of {total} answers are in {files.output}"
            say(f"stopped: {done}; the same command goes on")
            raise typer.Exit(130) from None
        failed = f", {journal.failed} of them errors" if journal.failed else ""
        say(f"{len(journal.done)} of {total} answers are in {files.output}{failed}")
        if journal.failed:
            raise typer.Exit(1)


async def answer(
    files: Files, journal: Journal, total: int, loading: Loading, replicas: Replicas
) -> None:
    """Answer all requests that have no answer yet."""
    shown = {"unit": "answer", "disable": not sys.stderr.isatty()}
    async with answering(loading, replicas, files.served_name) as one:
        with tqdm(total=total, initial=len(journal.done), **shown) as bar:
            window = AHEAD * replicas.max_running * replicas.replicas
            await run(read(files.source), one, journal, window, bar.update)


def answering(
    loading: Loading, replicas: Replicas, name: str | None
) -> AbstractAsyncContextManager[Answer]:
    """Return a context manager of a function that answers, with a model here or replicas on Ray."""
    running = replicas.max_running
    if not replicas.ray:
        with needs("serve", "answering requests"):
            from quickbeam.batch.answers import Answering
        return Answering(loading.load(max_running=running), name)
    with needs("ray,serve", "--ray"):
        from quickbeam.batch import ray
    wanted = {**loading.arguments(), "max_running": running}
    return ray.replicas(replicas.replicas, name, wanted, replicas.threads)
