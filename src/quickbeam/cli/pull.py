"""`quickbeam pull`: the embedded models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from quickbeam import hub
from quickbeam.cli.common import progress_bar, strict_json
from quickbeam.errors import InvalidInput


def pull(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(hub.EMBEDDED)}.")] = hub.DEFAULT,
    listed: Annotated[
        bool, typer.Option("--list", help="Fetch nothing: say what is in the cache.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: as a JSON list.")] = False,
) -> None:
    """Fetch an embedded model into the cache, unless it is there, and print its folder."""
    if as_json and not listed:
        raise InvalidInput("--json: add --list")
    if as_json:
        print(strict_json([asdict(info) for info in hub.models()]))
    elif listed:
        for info in hub.models():
            size = f"{info.bytes / 1e6:.0f} MB" if info.pulled else "not pulled"
            print(f"{info.name}: {size}, {info.license}\n  {info.summary}\n  {info.path}")
    else:
        with progress_bar(f"looking for {name}") as report:
            folder = hub.pull(name, report)
        print(folder)
