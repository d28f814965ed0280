"""`quickbeam batch`: answer a file of requests into another file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from quickbeam.batch.journal import Journal
from quickbeam.batch.requests import read
from quickbeam.batch.run import Answer, check, run
from quickbeam.cli.loading import Loading, Replicas
from quickbeam.errors import InvalidInput

AHEAD = 2  # requests under way for each answer that is computed at a time


def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="A request a line: OpenAI's batch format, or messages or prompt with parameters "
            "beside.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl",
            help="Answers, as they come. What is there already is not asked again.",
        ),
    ],
    loading: Loading,
    replicas: Replicas,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="Answers made side by side.")
    ] = 32,
    served_name: Annotated[
        str | None,
        typer.Option("--served-name", metavar="NAME", help="What requests call the model."),
    ] = None,
) -> None:
    """Answer a file of requests. Broken off at any moment, the same command goes on: no answer is
    lost, and none is made twice.

    Exit code 1: some requests could not be answered; their records say why.
    """
    if not source.is_file():
        raise InvalidInput(f"{source}: there is no such file")
    with Journal(output) as journal:
        total = check(source, journal)
        try:
            if len(journal.done) < total:
                replicas.check(loading)
                answers = (on_ray if replicas.ray else here)(
                    loading, replicas, max_running, served_name
                )
                with tqdm(
                    total=total,
                    initial=len(journal.done),
                    unit="answer",
                    disable=not sys.stderr.isatty(),
                ) as bar:
                    asyncio.run(
                        follow(
                            answers,
                            source,
                            journal,
                            AHEAD * max_running * replicas.replicas,
                            bar.update,
                        )
                    )
        except KeyboardInterrupt:
            print(
                f"stopped: {len(journal.done)} of {total} answers are in {output}; the same "
                "command goes on",
                file=sys.stderr,
            )
            raise typer.Exit(130) from None
        failed = f", {journal.failed} of them errors" if journal.failed else ""
        print(f"{len(journal.done)} of {total} answers are in {output}{failed}", file=sys.stderr)
        if journal.failed:
            raise typer.Exit(1)


async def follow(
    answers: AbstractAsyncContextManager[Answer],
    source: Path,
    journal: Journal,
    window: int,
    told: Callable[[], object],
) -> None:
    """Answer all requests that have no answer yet."""
    async with answers as answer:
        await run(read(source), answer, journal, window, told)


def here(
    loading: Loading, replicas: Replicas, running: int, name: str | None
) -> AbstractAsyncContextManager[Answer]:
    """Return a context manager of a function that answers with a model in this process.

    Raises `InvalidInput` if the packages of the extra `serve` are missing.
    """
    try:
        from quickbeam.batch.answers import answering
    except ImportError as error:
        raise InvalidInput(
            f"answering requests needs {error.name}: pip install 'quickbeam[serve]'"
        ) from error
    return answering(loading.load(max_running=running), name)


def on_ray(
    loading: Loading, replicas: Replicas, running: int, name: str | None
) -> AbstractAsyncContextManager[Answer]:
    """Return a context manager of a function that answers with replicas on Ray.

    Raises `InvalidInput` if the packages of the extras `ray` and `serve` are missing.
    """
    try:
        from quickbeam.batch import ray
    except ImportError as error:
        raise InvalidInput(
            f"--ray needs {error.name}: pip install 'quickbeam[ray,serve]'"
        ) from error
    wanted = {**loading.arguments(), "max_running": running}
    return ray.replicas(replicas.replicas, name, wanted, replicas.threads)
