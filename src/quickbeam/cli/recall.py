"""`quickbeam bench recall`: compare ways to choose a part of the vocabulary, without decoding.

They are measured on the text that a drafter was trained on.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from quickbeam.bench.files import check_output
from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, save_record, stdout
from quickbeam.cli.vocabulary import percent
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT

HELD_OUT = 5  # one in this many conversations


def recall(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder of a drafter with its text and shortlist, as quickbeam train leaves it.",
        ),
    ],
    model: options.Model = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Places that routers are taught on, at most.")
    ] = 100_000,
    held_out: Annotated[
        int, typer.Option("--held-out", min=1, help="Places that are counted, at most.")
    ] = 20_000,
    depths: Annotated[int, typer.Option("--depths", min=1, max=12, help="Drafts ahead.")] = 3,
    shares: Annotated[
        str,
        typer.Option("--shares", help="Rows to choose, in % of the vocabulary, comma-separated."),
    ] = "3,6,12.5,25",
    listed: Annotated[
        int, typer.Option("--listed", min=1, help="Frequent tokens that stand beside clusters.")
    ] = 1024,
    only: Annotated[
        str,
        typer.Option(
            "--only", help="Ways whose names begin so, or lists, or tokens; comma-separated."
        ),
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="Repeats a run on the same machine.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """How often the token that is wanted of the drafter would be scored, by ways to choose as many
    rows of its head: lists, clusters and routers of several kinds, scorers of single tokens. On
    held-out text that the model wrote itself; routers are taught on the rest."""
    parts = percent(shares)
    if json_path is not None:
        check_output("--json", json_path)
    with progress_bar(f"loading {model or DEFAULT}") as progress, redirect_stderr(StringIO()):
        from quickbeam.bench.recall import Foretold, Trial
        from quickbeam.shortlist.artefact import Artefact
        from quickbeam.train.places import collect_places
        from quickbeam.train.shortlists import DrafterFolder

        artefact, folder = Artefact.load(out), DrafterFolder(model, out)
        if listed >= artefact.layout.vocab:
            raise InvalidInput(
                f"--listed {listed}: must be below {artefact.layout.vocab}, the "
                "tokens of the vocabulary"
            )
        found = {}
        for name, count, own in (("held out", held_out, True), ("taught", rows, False)):
            chosen = [i for i in range(len(folder.shards)) if (i % HELD_OUT == 0) is own]
            report = partial(progress, name)
            found[name] = collect_places(
                folder.network, folder.head, folder.shards, chosen, depths, count, seed, own, report
            )
    folder.to_cpu()
    sizes = [max(1, round(artefact.layout.vocab * part / 100)) for part in parts]
    trial = Trial(
        folder.network, folder.head, artefact, found["taught"], found["held out"], listed, sizes
    )
    names = [name.strip() for name in only.split(",") if name.strip()]
    table = Table(
        "chosen by",
        title=f"{len(trial.held.tokens):,} held-out places, "
        f"{len(trial.train.tokens):,} to learn from",
    )
    for column in ("rows", "recall", "alone", "of rare", "of the drafter's right"):
        table.add_column(column, justify="right")
    masses = Table(
        "router",
        title="Is the drafter's likeliest scored token the wanted one? Log loss, in nats a place",
    )
    for column in (
        "rows",
        "it is",
        "by its probability",
        "and the router's mass",
        "gain",
        "if it were known what is scored",
    ):
        masses.add_column(column, justify="right")
    lines, told = [], []
    with progress_bar("ways") as progress:
        for line in trial.run(names):
            if isinstance(line, Foretold):
                masses.add_row(
                    line.name,
                    f"{line.rows:,}",
                    f"{line.drafted:.4f}",
                    f"{line.probability:.4f}",
                    f"{line.mass:.4f}",
                    f"{line.gain[0]:+.4f} ± {line.gain[1]:.4f}",
                    f"{line.bound[0]:+.4f} ± {line.bound[1]:.4f}",
                )
                told.append(line._asdict())
                continue
            one = line.found
            table.add_row(
                line.name,
                f"{line.rows:,}",
                f"{one.recall:.4f}",
                f"{one.alone:.4f}",
                f"{one.rare_recall:.3f}",
                f"{one.right:.4f}",
            )
            lines.append({"name": line.name, "rows": line.rows, **one._asdict()})
            progress(line.name, None)
    stdout().print(table)
    if told:
        stdout().print(masses)
    if json_path is not None:
        settings = {
            "rows": rows,
            "held_out": held_out,
            "depths": depths,
            "listed": listed,
            "seed": seed,
            "only": only,
        }
        save_record(
            json_path,
            {"settings": settings, "text": folder.shards.tokens, "ways": lines, "foretold": told},
        )
