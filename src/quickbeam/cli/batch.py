"""`quickbeam batch`: answer a file of requests into another file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from quickbeam.batch.journal import Journal
from quickbeam.batch.requests import read
from quickbeam.batch.run import Answer, check, run
from quickbeam.cli import options
from quickbeam.cli.common import load
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
    model: options.Model = None,
    method: options.Method = "auto",
    budget: options.Budget = None,
    drafter: options.Drafter = None,
    vocab: options.Vocab = None,
    shortlist: options.Shortlist = None,
    exact: options.Exact = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    weights: options.Weights = options.WeightsKind.bfloat16,
    draft_weights: options.DraftWeights = options.WeightsKind.bfloat16,
    memory: options.Memory = None,
    device: options.DeviceOption = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_memory: options.KVMemory = None,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="Answers made side by side.")
    ] = 32,
    served_name: Annotated[
        str | None,
        typer.Option("--served-name", metavar="NAME", help="What requests call the model."),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Answer by replicas of the model on a Ray cluster, or on this machine."
        ),
    ] = False,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="With --ray: how many.")] = 1,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="With --ray: of each replica.")
    ] = 1,
) -> None:
    """Answer a file of requests. Broken off at any moment, the same command goes on: no answer is
    lost, and none is made twice.

    Exit code 1: some requests could not be answered; their records say why.
    """
    if replicas > 1 and not ray:
        raise InvalidInput(f"--replicas {replicas}: they run on Ray; add --ray")
    if not source.is_file():
        raise InvalidInput(f"{source}: there is no such file")

    wanted: dict[str, Any] = {
        "model": model,
        "method": method,
        "dtype": dtype,
        "weights": weights,
        "draft_weights": draft_weights.value,
        "memory": memory,
        "device": device,
        "budget": options.nodes(budget),
        "exact": exact,
        "drafter": drafter,
        "vocab": vocab,
        "shortlist": shortlist,
        "trust_remote_code": trust_remote_code,
        "kv_memory": kv_memory,
        "max_running": max_running,
    }
    with Journal(output) as journal:
        total = check(source, journal)
        try:
            if len(journal.done) < total:
                answers = (
                    on_ray(replicas, threads, served_name, wanted)
                    if ray
                    else here(served_name, wanted)
                )
                with tqdm(
                    total=total,
                    initial=len(journal.done),
                    unit="answer",
                    disable=not sys.stderr.isatty(),
                ) as bar:
                    asyncio.run(
                        follow(answers, source, journal, AHEAD * max_running * replicas, bar.update)
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


def here(name: str | None, wanted: dict[str, Any]) -> AbstractAsyncContextManager[Answer]:
    """Return a context manager of a function that answers with a model in this process.

    Raises `InvalidInput` if the packages of the extra `serve` are missing.
    """
    try:
        from quickbeam.batch.answers import answering
    except ImportError as error:
        raise InvalidInput(
            f"answering requests needs {error.name}: pip install 'quickbeam[serve]'"
        ) from error
    return answering(load(**wanted), name)


def on_ray(
    count: int, threads: int, name: str | None, wanted: dict[str, Any]
) -> AbstractAsyncContextManager[Answer]:
    """Return a context manager of a function that answers with replicas on Ray.

    Raises `InvalidInput` if the packages of the extras `ray` and `serve` are missing.
    """
    try:
        from quickbeam.batch.ray import replicas
    except ImportError as error:
        raise InvalidInput(
            f"--ray needs {error.name}: pip install 'quickbeam[ray,serve]'"
        ) from error
    return replicas(
        count,
        name,
        {key: value.value if isinstance(value, Enum) else value for key, value in wanted.items()},
        threads,
    )
