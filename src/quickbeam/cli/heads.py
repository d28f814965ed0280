"""`quickbeam bench heads`: what a drafter's head costs, by how many tokens it scores."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, stdout, strict_json
from quickbeam.cli.passes import numbers
from quickbeam.errors import InvalidInput


def heads(
    shapes: Annotated[
        str,
        typer.Option(
            "--shapes",
            help="VOCABxSIZE, comma-separated. Default: those of "
            "SmolLM2, Llama-3-8B, Qwen3-4B and Gemma-3-270M.",
        ),
    ] = "",
    rows: Annotated[
        str,
        typer.Option("--rows", help="Nodes that a call of the drafter scores, comma-separated."),
    ] = "1,8",
    shares: Annotated[
        str,
        typer.Option("--shares", help="Tokens scored, in % of the vocabulary, comma-separated."),
    ] = "1,2,4,6",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Timed calls of each kind; the median counts.")
    ] = 15,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    device: options.DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record.")] = False,
) -> None:
    """Milliseconds of a head and its softmax alone, on random weights and cold caches: the target's
    whole head, the same as a drafter keeps it, a shortlist's, and the router beside it."""
    from quickbeam.bench.environment import environment
    from quickbeam.bench.heads import SHAPES, measure
    from quickbeam.target.loading import parse_dtype, pick_device

    named = (
        dict(SHAPES)
        if not shapes
        else {part.strip(): _shape(part.strip()) for part in shapes.split(",")}
    )
    counts = numbers("--rows", rows, 1024)
    parts = _shares(shares)
    place = pick_device(device.value if device else None)
    table = Table(
        title=f"milliseconds of a head, {dtype.value} on {place.type}, cold caches; of full: "
        "listed without the router, routed with it"
    )
    for i, column in enumerate(
        (
            "head",
            "rows",
            "scored",
            "share",
            "full",
            "drafter's",
            "shortlist",
            "router",
            "listed",
            "routed",
        )
    ):
        table.add_column(column, justify="right" if i else "left")
    record = []
    with progress_bar("heads") as progress:
        for i, (name, (vocab, d)) in enumerate(named.items()):
            progress(f"{name} {vocab} x {d}", i / len(named))
            found = measure(vocab, d, counts, parts, parse_dtype(dtype.value), place, repeats)
            record += [
                {"name": name, **asdict(one), "listed": one.listed, "ratio": one.ratio}
                for one in found
            ]
            for one in found:
                times = (
                    f"{ms:.2f}"
                    for ms in (
                        one.full_ms,
                        one.drafter_ms,
                        one.head_ms,
                        one.router_ms,
                        one.listed,
                        one.ratio,
                    )
                )
                table.add_row(
                    f"{name} {vocab:,} x {d}",
                    str(one.rows),
                    f"{one.tokens:,}",
                    f"{one.tokens / vocab:.1%}",
                    *times,
                )
    if as_json:
        where = environment(str(place), dtype.value)
        print(
            strict_json(
                {"environment": where, "dtype": dtype.value, "device": place.type, "heads": record}
            )
        )
    else:
        stdout().print(table)


def _shape(text: str) -> tuple[int, int]:
    vocab, _, size = text.partition("x")
    if not (vocab.isdecimal() and size.isdecimal() and int(vocab) >= 1024 and int(size) >= 1):
        raise InvalidInput(
            f"--shapes: {text!r} must be VOCABxSIZE with a vocabulary of at least "
            "1024, as 128256x4096"
        )
    return int(vocab), int(size)


def _shares(text: str) -> list[float]:
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError:
        percents = []
    if not percents or not all(0 < one <= 100 for one in percents):
        raise InvalidInput(
            f"--shares {text!r}: must be numbers above 0 and at most 100, comma-separated"
        )
    return [one / 100 for one in percents]
