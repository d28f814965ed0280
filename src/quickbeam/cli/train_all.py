"""`quickbeam train all`: make a drafter with a shortlist for a model, and measure both."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from quickbeam.cli import bench, options, train
from quickbeam.cli.acceptance import acceptance
from quickbeam.cli.common import stderr

METHODS = "ar,logitspec,dyspec:4,dyspec,frspec,dynaspec,dynaspec+router"


def train_all(
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder of all that is made. A second run goes on from there."),
    ],
    model: options.Model = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1000, help="Tokens of text to write.")
    ] = 1_000_000,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Questions of your own; see train drafter.")
    ] = None,
    epochs: Annotated[
        float, typer.Option("--epochs", min=0.01, help="Times the drafter is trained on the text.")
    ] = 6,
    length: Annotated[
        int, typer.Option("--length", min=32, help="Longest conversation, in tokens.")
    ] = 512,
    slots: Annotated[
        int, typer.Option("--slots", min=1, help="Conversations written at a time.")
    ] = 128,
    quote: Annotated[
        float,
        typer.Option("--quote", min=0, max=1, help="Share of conversations about a longer text."),
    ] = 0.15,
    languages: Annotated[
        str,
        typer.Option("--languages", help="Of the text, comma-separated; see train drafter."),
    ] = "en",
    start: Annotated[
        Path | None,
        typer.Option("--start", help="Begin with the weights of this drafter (a folder)."),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(
            "--rows", min=1, help="Places of the text that the router is taught on, at most."
        ),
    ] = 200_000,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Questions of the bench at the end.")
    ] = 12,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=3, help="Longest answer of the bench.")
    ] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Repeats a run on the same machine.")] = 0,
) -> None:
    """Write text, train a drafter, make its shortlist, then measure: how well draft probabilities
    foretell acceptance, and how fast the methods are. Each stage can be run alone, with more
    options (`train drafter`, `train shortlist`).

    Ctrl-C keeps what there is; the same command goes on. Figures are left in OUT: training.json,
    router.json, acceptance.json, bench.json.
    """
    console = stderr()
    console.print("1 of 3: the drafter")
    train.drafter(
        out,
        model,
        tokens,
        prompts,
        epochs,
        length=length,
        slots=slots,
        quote=quote,
        languages=languages,
        start=start,
        seed=seed,
    )
    from accelerate import PartialState

    if not PartialState().is_main_process:  # several processes train the drafter, one does the rest
        return
    gc.collect()
    if older(out / "router.json", out / "model.safetensors"):
        console.print("2 of 3: its shortlist")
        train.shortlist(out, model, rows)
    gc.collect()
    console.print("3 of 3: what they are worth")
    acceptance(
        limit=limit,
        max_tokens=max_tokens,
        model=model,
        drafter=str(out),
        json_path=out / "acceptance.json",
        seed=seed,
    )
    context = typer.Context(typer.main.get_command(bench.commands))
    bench.bench(
        context,
        model=model,
        methods=METHODS,
        limit=limit,
        max_tokens=max_tokens,
        drafter=str(out),
        json_path=out / "bench.json",
    )


def older(path: Path, than: Path) -> bool:
    """Whether `path` is missing, or older than `than`."""
    return not path.is_file() or path.stat().st_mtime < than.stat().st_mtime
