"""`quickbeam bench plan`: measure the documents' figures anew."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from rich.text import Text

from quickbeam.cli.bench import INTERRUPTED
from quickbeam.cli.common import stdout
from quickbeam.errors import InvalidInput, QuickbeamError


def bench_plan(
    path: Annotated[
        Path, typer.Argument(metavar="PLAN", help="The plan: commands by name, in YAML.")
    ] = Path("benchmarks/plan.yaml"),
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where records are kept. Default: beside the plan."
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAME,…", help="These entries alone.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="All entries, also those whose figures are of this code."),
    ] = False,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Fills {NAME} in commands, as the variable QUICKBEAM_BENCH_NAME does.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    render: Annotated[
        bool,
        typer.Option("--render", help="Measure nothing; write the documents from the records."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Measure nothing; exit code 1 where figures are missing or old."
        ),
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Measure nothing; show the entries.")
    ] = False,
) -> None:
    """Measure the entries of a plan whose figures are missing or older than the code, one after the
    other. Their records are kept, and tables and plots are written into the plan's documents.
    Entries with a {NAME} that nothing fills are left out. An entry that fails doesn't stop the
    others. Ctrl-C keeps those that are done; the same command goes on from there."""
    from quickbeam.bench import documents
    from quickbeam.bench.plan import VARIABLE, read_plan

    if sum((render, check, listed)) > 1:
        raise InvalidInput("--render, --check, --list: give one of them")
    if everything and only is not None:
        raise InvalidInput("--all, --only: give one of them")
    plan = read_plan(path)
    entries = (
        list(plan.entries)
        if only is None
        else plan.only(part.strip() for part in only.split(",") if part.strip())
    )
    blanks = {blank for entry in plan.entries for blank in entry.blanks}
    values = {
        blank: value for blank in blanks if (value := os.environ.get(f"{VARIABLE}{blank.upper()}"))
    } | _settings(settings, blanks)
    documents.check(plan)
    place = path.parent if out is None else out
    if check:
        if lines := list(documents.wrong(plan, place, entries)):
            _say("\n".join(lines))
            raise QuickbeamError(
                f"{len(lines)} of the plan's tables are missing or old; `make report` measures them"
            )
        _say(f"{len(entries)} entries: all figures are there and of this code")
        return
    if listed:
        for entry in entries:
            why = documents.due(plan, entry, place) or "measured with this code"
            _say(f"{entry.name}: {entry.title} (about {entry.minutes:g} min; {why})")
            _say(f"    {entry.command}")
        _say(f"{len(entries)} entries, about {sum(entry.minutes for entry in entries):g} min")
        return
    if any(entry.plot for entry in plan.entries) and importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput(
            "the plan has plots, which need matplotlib: pip install 'quickbeam[bench]'"
        )
    failed, interrupted = list[str](), False
    if not render:
        if only is None and not everything:
            due = [entry for entry in entries if documents.due(plan, entry, place)]
            if left := len(entries) - len(due):
                _say(f"{left} of {len(entries)} entries are of this code; --all measures them too")
            entries = due
        runnable = [entry for entry in entries if all(blank in values for blank in entry.blanks)]
        for entry in entries:
            if entry not in runnable and only is not None:
                entry.words(values)  # raises the error for the missing value
            elif entry not in runnable:
                _say(
                    f"{entry.name}: left out, as nothing fills "
                    f"{{{next(blank for blank in entry.blanks if blank not in values)}}}"
                )
        for entry in runnable:
            try:
                takes_file(entry.words(values))
            except InvalidInput as error:
                raise InvalidInput(f"{path}: entry {entry.name}: {error}") from error
        place.mkdir(parents=True, exist_ok=True)
        failed, interrupted = _run(plan, runnable, values, place)
    for written in documents.render(plan, place):
        _say(f"wrote {os.path.relpath(written)}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if failed:
        raise QuickbeamError(f"{len(failed)} of {len(entries)} entries failed: {', '.join(failed)}")


def _run(
    plan: Any, entries: Sequence[Any], values: dict[str, str], out: Path
) -> tuple[list[str], bool]:
    """Run the entries, and return the names of those that failed and whether Ctrl-C ended the run.

    Nothing is drawn while an entry is measured.
    """
    from quickbeam.bench.plan_run import run

    failed = list[str]()
    for number, entry in enumerate(entries, 1):
        _say(f"{number}/{len(entries)} {entry.name} (about {entry.minutes:g} min): {entry.command}")
        try:
            seconds = run(plan, entry, values, takes_file, out)
            _say(f"    done in {int(seconds // 60)} min {seconds % 60:.0f} s")
        except QuickbeamError as error:
            failed.append(entry.name)
            _say(f"    failed: {error}")
        except KeyboardInterrupt:
            _say(f"    interrupted; {number - 1} of {len(entries)} done before are kept")
            return failed, True
    return failed, False


def takes_file(words: Sequence[str]) -> bool:
    """Whether the option `--json` of `quickbeam WORDS` takes a file; otherwise it prints.

    Raises `InvalidInput` for words that the command line doesn't know, and for a command without
    `--json`.
    """
    command, rest = _commands(), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    try:
        context = command.make_context("quickbeam", rest)
    except Exception as error:
        said = getattr(error, "format_message", None)  # the parser's errors have it
        if said is None:
            raise
        raise InvalidInput(f"`quickbeam {' '.join(words)}`: {' '.join(said().split())}") from error
    # words that a group takes for the name of a command
    if left := [*context.args, *getattr(context, "_protected_args", [])]:
        raise InvalidInput(f"`quickbeam {' '.join(words)}`: unknown command {left[0]!r}")
    option = next((parameter for parameter in command.params if "--json" in parameter.opts), None)
    if option is None:
        raise InvalidInput(f"`quickbeam {' '.join(words)}` writes no record: it has no --json")
    return not option.is_flag


@cache
def _commands() -> Any:
    """Return the whole command line."""
    from quickbeam.cli.app import app

    return typer.main.get_command(app)


def _settings(given: Sequence[str], blanks: set[str]) -> dict[str, str]:
    """Return the values given as NAME=VALUE.

    Raises `InvalidInput` for a text in another form, or for a name that no command of the plan has.
    """
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not value or name not in blanks:
            known = ", ".join(f"{{{blank}}}" for blank in sorted(blanks)) or "none"
            raise InvalidInput(
                f"--set {text!r}: must be NAME=VALUE for a {{NAME}} of the plan; known: {known}"
            )
        found[name] = value
    return found


def _say(text: str) -> None:
    """Print lines as they are, without markup or wrapping."""
    console = stdout()
    console.print(Text(text), soft_wrap=True)
    console.file.flush()
