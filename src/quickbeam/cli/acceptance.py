"""`quickbeam bench acceptance`: draft probability against measured acceptance."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from quickbeam.bench.files import check_output, check_plot, save
from quickbeam.bench.methods import parse_methods
from quickbeam.bench.questions import load_questions, spread
from quickbeam.cli import options
from quickbeam.cli.bench import INTERRUPTED
from quickbeam.cli.common import load, progress_bar, stdout
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams
from quickbeam.presets import PRESETS, preset

if TYPE_CHECKING:
    from quickbeam.bench.acceptance import Results


def acceptance(
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="Spec-Bench lines (question_id, category, turns). Default: a set of our own.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help="Questions to ask, spread evenly over the categories. Default: all.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=3, help="Longest answer, in tokens.")
    ] = 64,
    model: options.Model = None,
    drafter: options.Drafter = None,
    method: Annotated[
        str,
        typer.Option(
            "--method", help=f"One of those that draft with a model: {', '.join(drafted())}."
        ),
    ] = "dyspec",
    budget: options.Budget = None,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Those to measure, comma-separated.")
    ] = "0,0.6,1",
    bins: Annotated[
        int,
        typer.Option("--bins", min=1, max=100, help="Bins of draft probability, of equal width."),
    ] = 10,
    seed: Annotated[
        int, typer.Option("--seed", help="Question i is sampled with this seed + i.")
    ] = 0,
    coupling: options.CouplingOption = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    device: options.DeviceOption = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the curves here (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """How often drafted tokens are accepted, by the drafter's probability and by depth. Ctrl-C
    shows the figures so far."""
    require_drafted(method, drafter, model)
    nodes = options.nodes(budget)
    if nodes == 1:
        raise InvalidInput(
            "--budget 1: a tree of its root alone drafts nothing; give at least 2 nodes, or auto"
        )
    drawn = SamplingParams(max_tokens=max_tokens, seed=seed, coupling=options.coupling(coupling))
    requests = [replace(drawn, temperature=value) for value in parse_temperatures(temperatures)]
    asked = spread(load_questions(questions), limit)
    if json_path is not None:
        check_output("--json", json_path)
    if plot_path is not None:
        check_plot(plot_path)
    llm = load(model, method, dtype, device, nodes, drafter=drafter)
    from quickbeam.bench import acceptance_report
    from quickbeam.bench.acceptance import Results, Tally, measure
    from quickbeam.bench.environment import environment

    results = Results({request.temperature: Tally() for request in requests})
    settings = {
        "questions": "built-in" if questions is None else str(questions),
        "limit": limit,
        "max_tokens": max_tokens,
        "drafter": drafter,
        "method": method,
        "budget": budget,
        "temperatures": list(results.tallies),
        "bins": bins,
        "seed": seed,
        "coupling": drawn.coupling,
    }
    interrupted = True
    try:
        with suppress(KeyboardInterrupt), progress_bar("answers") as progress:
            for done, _ in enumerate(measure(llm, asked, requests, results), 1):
                progress("answers", done / (len(asked) * len(requests)))
            interrupted = False
    finally:
        if results.tried:
            show(results, bins)
            where = environment(str(llm.model.device), dtype.value)
            write(
                results,
                bins,
                json_path,
                plot_path,
                acceptance_report.record(results, bins, where, llm.name, settings),
            )
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not results.prompts:
        raise InvalidInput(f"no prompt could be answered; the first: {results.skipped[0].reason}")
    if not results.tried:
        raise QuickbeamError(
            "no drafted token was tried: the answers ended at once; ask other "
            "questions, or use a larger --budget"
        )


def drafted() -> list[str]:
    """Return the methods that draft with a model."""
    return [name for name, entry in PRESETS.items() if "drafter" in entry.sources]


def require_drafted(method: str, drafter: str | None, model: str | None) -> None:
    """Raise `InvalidInput` if `method` can't be measured.

    That is a method that is unknown, has no draft probabilities, or lacks the drafter that it
    needs.
    """
    if "drafter" not in preset(method).sources:
        raise InvalidInput(
            f"--method {method}: drafts without a model, so there are no draft "
            f"probabilities; use {', '.join(drafted())}"
        )
    parse_methods(method, drafter=drafter, model=model)


def parse_temperatures(text: str) -> list[float]:
    """Return comma-separated numbers.

    Raises `InvalidInput` if there is none, if a part is not a number, or if one is given twice.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        values = [float(part) for part in parts]
    except ValueError:
        raise InvalidInput(
            f"--temperatures {text!r}: must be numbers of at least 0, "
            "comma-separated, such as 0,0.6,1"
        ) from None
    if len(set(values)) < len(values):
        raise InvalidInput(f"--temperatures {text!r}: names a temperature twice")
    return values


def show(results: Results, bins: int) -> None:
    from quickbeam.bench import acceptance_report

    console = stdout()
    for summary in acceptance_report.summaries(results, bins):
        console.print(acceptance_report.table(summary))
        console.print(Text("\n".join(acceptance_report.lines(summary)) + "\n"))
    console.print(Text("\n".join(acceptance_report.footer(results))))


def write(
    results: Results,
    bins: int,
    json_path: Path | None,
    plot_path: Path | None,
    record: dict[str, object],
) -> None:
    """Write the record and the plot, as far as they are asked for.

    Raises `QuickbeamError`, which names the file that could not be written.
    """
    from quickbeam.bench import acceptance_report

    option, path = "--json", json_path
    try:
        if json_path is not None:
            save(json_path, record)
        option, path = "--plot", plot_path
        if plot_path is not None:
            acceptance_report.plot(results, bins, plot_path)
    except OSError as error:
        raise QuickbeamError(
            f"{option} {path}: not written ({error.strerror}); see the tables instead"
        ) from error
