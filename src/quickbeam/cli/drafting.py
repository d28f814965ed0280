"""`quickbeam bench drafting`: what growing trees costs, without the drafter's calls."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from quickbeam.cli import options
from quickbeam.cli.common import stdout, strict_json
from quickbeam.errors import InvalidInput

LARGEST = 1024  # nodes


def drafting(
    vocab: Annotated[int, typer.Option("--vocab", min=2, help="Tokens of the vocabulary.")] = 49152,
    budgets: Annotated[
        str, typer.Option("--budgets", help=f"Tree nodes, comma-separated, 2 to {LARGEST}.")
    ] = "8,16,32,64",
    temperatures: Annotated[str, typer.Option("--temperatures", help="Comma-separated.")] = "0,0.6",
    coupling: options.CouplingOption = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Trees of each kind; the median counts.")
    ] = 25,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Empty the processor's caches in every call, as a real drafter does."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record.")] = False,
) -> None:
    """Milliseconds of a step that growing a tree takes apart from the drafter's calls, on made-up
    distributions; in brackets the number of calls."""
    sizes = _numbers("--budgets", budgets, 2, LARGEST)
    if not all(size.is_integer() for size in sizes):
        raise InvalidInput(f"--budgets {budgets!r}: must be whole numbers")
    heats = _numbers("--temperatures", temperatures, 0, 100)

    import torch

    from quickbeam.bench.drafting import measure
    from quickbeam.bench.environment import environment

    found = measure(
        vocab,
        [int(size) for size in sizes],
        heats,
        repeats,
        cold,
        coupling=options.coupling(coupling),
    )
    if as_json:
        settings = {
            "vocab": vocab,
            "coupling": options.coupling(coupling),
            "threads": torch.get_num_threads(),
        }
        settings |= {"repeats": repeats, "cold": cold}
        print(
            strict_json(
                {
                    "environment": environment("cpu", "float32"),
                    **settings,
                    "drafting": [asdict(one) for one in found],
                }
            )
        )
        return
    caches = ", cold caches" if cold else ""
    table = Table(
        title="milliseconds a step apart from the drafter's calls, vocabulary of "
        f"{vocab}{caches}; in brackets: calls a step"
    )
    table.add_column("tree policy")
    table.add_column("temperature", justify="right")
    for size in sizes:
        table.add_column(f"{size:g} nodes", justify="right")
    for start in range(0, len(found), len(sizes)):
        row = found[start : start + len(sizes)]
        table.add_row(
            row[0].policy,
            f"{row[0].temperature:g}",
            *(f"{one.milliseconds:.2f} ({one.calls:.1f})" for one in row),
        )
    stdout().print(table)


def _numbers(option: str, text: str, low: float, high: float) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(low <= number <= high for number in numbers):
        raise InvalidInput(
            f"{option} {text!r}: must be numbers from {low} to {high}, comma-separated"
        )
    return numbers
