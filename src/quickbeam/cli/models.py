"""`quickbeam pull` and `quickbeam models`: the embedded models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from quickbeam import hub
from quickbeam.cli.common import progress_bar, strict_json


def pull(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(hub.EMBEDDED)}.")] = hub.DEFAULT,
) -> None:
    """Fetch an embedded model into the cache, unless it is there, and print its folder."""
    with progress_bar(f"looking for {name}") as report:
        folder = hub.pull(name, report)
    print(folder)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the embedded models and what of them is in the cache."""
    infos = hub.models()
    if as_json:
        print(strict_json([asdict(info) for info in infos]))
        return
    table = Table(
        "name",
        "on disk",
        "licence",
        "what it is",
        Column("folder", overflow="fold"),
        box=None,
        header_style="bold",
    )
    for info in infos:
        size = f"{info.bytes / 1e6:.0f} MB" if info.pulled else "not pulled"
        table.add_row(info.name, size, info.license, info.summary, info.path)
    Console(highlight=False).print(table)
