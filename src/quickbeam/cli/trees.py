"""`quickbeam bench trees`: tree policies at equal budgets, on the same text."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from quickbeam.bench.files import check_output
from quickbeam.bench.questions import load_questions, spread
from quickbeam.cli import options
from quickbeam.cli.acceptance import parse_temperatures
from quickbeam.cli.bench import INTERRUPTED
from quickbeam.cli.common import load, progress_bar, save_record, stdout
from quickbeam.errors import InvalidInput
from quickbeam.params import RESIDUAL, SamplingParams

if TYPE_CHECKING:
    from quickbeam.bench.trees import Results

# `quickbeam.trees.DRAFTED`, whose import would make every command wait for torch
TREES = ("greedy", "greedy-printed", "threshold", "drafted-chain", "specinfer", "sequoia", "eagle2")


def bench_trees(
    questions: Annotated[
        Path | None,
        typer.Option("--questions", help="Spec-Bench lines. Default: a set of our own."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Questions to ask, spread evenly over the categories."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=3, help="Longest answer, in tokens.")
    ] = 48,
    every: Annotated[
        int, typer.Option("--every", min=1, help="Grow trees at every N-th token of the answers.")
    ] = 4,
    trees: Annotated[
        str,
        typer.Option(
            "--trees",
            help=f"Of {', '.join(TREES)}, each alone or with +{RESIDUAL}, comma-separated; the "
            "others are compared with the first.",
        ),
    ] = ",".join(TREES),
    budgets: Annotated[
        str, typer.Option("--budgets", help="Nodes of a tree, the root counted, comma-separated.")
    ] = "8,16,32,64",
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Those to measure, comma-separated.")
    ] = "0,0.6",
    seed: Annotated[
        int, typer.Option("--seed", help="Question i is sampled with this seed + i.")
    ] = 0,
    coupling: options.CouplingOption = None,
    draws: Annotated[
        int,
        typer.Option(
            "--draws",
            min=1,
            help="Random noises that coupled trees are averaged over at each place.",
        ),
    ] = 4,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    device: options.DeviceOption = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Expected tokens of a step, by tree policy and budget, at the same places of the same answers.
    Above temperature 0 randomness is averaged out: over several noises, or over the acceptance
    probabilities where children are drawn (--coupling residual, or NAME+residual), so that policies
    can be compared at any temperature. Ctrl-C shows the figures so far."""
    from quickbeam.bench.trees import Results, measure, parse_budgets, parse_trees

    names, sizes = parse_trees(trees, options.coupling(coupling)), parse_budgets(budgets)
    items = [(name, size) for name in names for size in sizes]
    requests = [
        SamplingParams(max_tokens=max_tokens, temperature=value, seed=seed)
        for value in parse_temperatures(temperatures)
    ]
    asked = spread(load_questions(questions), limit)
    if json_path is not None:
        check_output("--json", json_path)
    llm = load(model, "dyspec", dtype, device, None, drafter=drafter)
    from quickbeam.bench.environment import environment

    results = Results({request.temperature: {item: [] for item in items} for request in requests})
    interrupted = True
    try:
        with suppress(KeyboardInterrupt), progress_bar("answers") as progress:
            for done, _ in enumerate(
                measure(llm, asked, requests, items, every, results, draws), 1
            ):
                progress("answers", done / (len(asked) * len(requests)))
            interrupted = False
    finally:
        results.drop_unfinished()
        if any(results.places(temperature) for temperature in results.tokens):
            for temperature in results.tokens:
                stdout().print(table(results, temperature, names, sizes))
            stdout().print(
                Text(
                    f"in brackets: less that of {names[0]}, and the standard error of "
                    "the difference, by answers"
                )
            )
            if json_path is not None:
                settings = {
                    "questions": "built-in" if questions is None else str(questions),
                    "limit": limit,
                    "max_tokens": max_tokens,
                }
                settings |= {"every": every, "seed": seed, "draws": draws, "drafter": drafter}
                where = environment(str(llm.model.device), dtype.value)
                save(
                    json_path,
                    results,
                    names,
                    sizes,
                    {"environment": where, "model": llm.name, "settings": settings},
                )
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not results.prompts:
        raise InvalidInput(f"no prompt could be answered; the first: {results.skipped[0].reason}")


def table(results: Results, temperature: float, names: list[str], sizes: list[int]) -> Table:
    """Return a table with a row for each policy and a column for each budget."""
    found = Table(
        "tree",
        title=f"tokens a step at temperature {temperature:g}, {results.places(temperature)} places",
    )
    for size in sizes:
        found.add_column(str(size), justify="right")
    if results.places(temperature):
        for name in names:
            cells = []
            for size in sizes:
                gap, error = results.difference(temperature, (name, size), (names[0], size))
                beside = (
                    ""
                    if name == names[0]
                    else f" ({gap:+.3f})"
                    if error is None
                    else f" ({gap:+.3f} ± {error:.3f})"
                )
                cells.append(f"{results.mean(temperature, (name, size)):.3f}{beside}")
            found.add_row(name, *cells)
    return found


def save(
    path: Path, results: Results, names: list[str], sizes: list[int], record: dict[str, object]
) -> None:
    """Write the record with the results. Raises `QuickbeamError` if the file can't be written."""
    record["complete"], record["prompts"] = results.complete, results.prompts
    record["temperatures"] = [
        {
            "temperature": temperature,
            "places": results.places(temperature),
            "trees": [
                {
                    "tree": name,
                    "budget": size,
                    "tokens": results.mean(temperature, (name, size)),
                    "difference": dict(
                        zip(
                            ("mean", "error"),
                            results.difference(temperature, (name, size), (names[0], size)),
                            strict=True,
                        )
                    ),
                }
                for name in names
                for size in sizes
            ],
        }
        for temperature in results.tokens
        if results.places(temperature)
    ]
    save_record(path, record)
