"""`quickbeam batch`: a file of requests, answered into another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from quickbeam.batch.journal import Journal
from quickbeam.batch.requests import read
from quickbeam.batch.run import check, run
from quickbeam.cli import options
from quickbeam.cli.common import load
from quickbeam.errors import InvalidInput

if TYPE_CHECKING:
    from quickbeam.batch.answers import Answering

AHEAD = 2  # requests that are asked, for each that is answered at a time


def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="A request a line: OpenAI's batch format, or messages or prompt with parameters beside.",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers, as they come. What is there already is not asked again.")],
    model: options.Model = None,
    method: options.Method = "auto",
    budget: options.Budget = None,
    drafter: options.Drafter = None,
    vocab: options.Vocab = None,
    shortlist: options.Shortlist = None,
    exact: options.Exact = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    device: options.DeviceOption = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_memory: options.KVMemory = None,
    max_running: Annotated[int, typer.Option("--max-running", min=1, help="Answers made side by side.")] = 32,
    served_name: Annotated[str | None, typer.Option("--served-name", metavar="NAME", help="What requests call the model.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Answer by replicas of the model on a Ray cluster, or on this machine.")] = False,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="With --ray: how many.")] = 1,
    threads: Annotated[int, typer.Option("--threads", min=1, help="With --ray: of each replica.")] = 1,
) -> None:
    """Answer a file of requests. Broken off at any moment, the same command goes on: no answer is lost, and none is made twice.

    Exit code 1: some requests could not be answered; their records say why.
    """
    if replicas > 1 and not ray:
        raise InvalidInput(f"--replicas {replicas}: they run on Ray; add --ray")
    if not source.is_file():
        raise InvalidInput(f"{source}: there is no such file")

    try:
        from quickbeam.batch.answers import Answering
    except ImportError as error:
        raise InvalidInput(f"answering requests needs {error.name}: pip install 'quickbeam[serve]'") from error

    with Journal(output) as journal:
        total = check(source, journal)
        try:
            if len(journal.done) < total:
                arguments = (model, method, dtype, device, options.nodes(budget), exact, drafter, vocab, shortlist)
                llm = load(*arguments, trust_remote_code, kv_memory, max_running=max_running)
                with tqdm(total=total, initial=len(journal.done), unit="answer", disable=not sys.stderr.isatty()) as bar:
                    asyncio.run(here(lambda: Answering(llm, served_name), source, journal, AHEAD * max_running, bar.update))
        except KeyboardInterrupt:
            print(f"stopped: {len(journal.done)} of {total} answers are in {output}; the same command goes on", file=sys.stderr)
            raise typer.Exit(130) from None
        failed = f", {journal.failed} of them errors" if journal.failed else ""
        print(f"{len(journal.done)} of {total} answers are in {output}{failed}", file=sys.stderr)
        if journal.failed:
            raise typer.Exit(1)


async def here(begin: Callable[[], Answering], source: Path, journal: Journal, window: int, told: Callable[[], Any]) -> None:
    """Answer by a model in this process. What `begin` makes belongs to the event loop."""
    answering = begin()
    try:
        await run(read(source), answering.answer, journal, window, told)
    finally:
        await answering.close()
