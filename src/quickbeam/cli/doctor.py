"""`quickbeam doctor`: look at the machine, and say what is slow on it and why.

This module avoids imports that a broken installation may lack, so that it runs where the other
commands don't.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from quickbeam import doctor as library
from quickbeam.doctor.base import NOTE, OK, PROBLEM, Finding

PLAIN_WIDTH = 160  # columns if the output is not a terminal
COLOURS = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON record.")] = False,
) -> None:
    """Look at the machine: kernels, exactness, what is slow here and why. Exit code 1 where models
    can't run."""
    progress, found = Console(file=sys.stderr), list[Finding]()
    with ExitStack() as stack:
        status = stack.enter_context(progress.status("looking")) if progress.is_terminal else None
        for finding in library.findings(
            lambda name: status.update(f"looking at: {name}") if status else None
        ):
            found.append(finding)
    if as_json:
        print(json.dumps(library.record(found), allow_nan=False))
    else:
        out = Console(highlight=False)
        if not out.is_terminal:
            out.width = PLAIN_WIDTH
        show(out, found)
    if not library.can_run(found):
        raise typer.Exit(1)


def show(out: Console, found: list[Finding]) -> None:
    table = Table.grid(
        Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0)
    )
    for finding in found:
        text = Text(finding.text)
        if finding.todo:
            text.append(
                f"\n→ {finding.todo}",
                style="dim" if finding.status == OK else COLOURS[finding.status],
            )
        table.add_row(
            Text(finding.status, style=COLOURS[finding.status]),
            Text(finding.check, style="bold"),
            text,
        )
    out.print(table)
    counts = {status: sum(one.status == status for one in found) for status in COLOURS}
    out.print(
        Text(
            f"{counts[OK]} ok, {counts[NOTE]} to note, {counts[PROBLEM]} that keep models "
            "from running"
        )
    )


def alone(arguments: list[str]) -> None:
    """Run this command without the others, for when packages that they import are missing."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(doctor)
    app(arguments, prog_name="quickbeam doctor")
