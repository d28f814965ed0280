"""The command line as a whole, and the place where errors become a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quickbeam.cli import MISSING, bench, train
from quickbeam.cli.acceptance import acceptance
from quickbeam.cli.batch import batch
from quickbeam.cli.bench_plan import bench_plan
from quickbeam.cli.bench_report import bench_report
from quickbeam.cli.chat import chat
from quickbeam.cli.demo import demo
from quickbeam.cli.doctor import doctor
from quickbeam.cli.drafting import drafting
from quickbeam.cli.generate import generate
from quickbeam.cli.heads import heads
from quickbeam.cli.inspect import inspect
from quickbeam.cli.models import models, pull
from quickbeam.cli.passes import passes
from quickbeam.cli.recall import recall
from quickbeam.cli.serve import serve
from quickbeam.cli.structured import structured
from quickbeam.cli.throughput import throughput
from quickbeam.cli.train_all import train_all
from quickbeam.cli.trees import bench_trees
from quickbeam.cli.version import version as show_version
from quickbeam.cli.vocabulary import bench_vocabulary
from quickbeam.cli.weights import bench_weights
from quickbeam.errors import InvalidInput, QuickbeamError


class Commands(TyperGroup):
    """Reports every error in one line, and exits with 2 for bad input and 1 for a failure.

    `QUICKBEAM_DEBUG=1` shows the traceback instead.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *rest: Any,
        **extra: Any,
    ) -> Any:
        extra["standalone_mode"] = False
        try:
            code = super().main(args, prog_name or "quickbeam", *rest, **extra)
        except typer.Abort:
            code = 130
        except Exception as error:
            # the parser's errors about options have this method
            usage = getattr(error, "format_message", None)
            if usage is None and os.environ.get("QUICKBEAM_DEBUG"):
                raise
            code = 2 if usage or isinstance(error, InvalidInput) else 1
            print(
                f"error: {' '.join((usage() if usage else describe(error)).split())}",
                file=sys.stderr,
            )
        sys.exit(code if isinstance(code, int) else 0)


def describe(error: Exception) -> str:
    """Return an error as one line, with a hint if it is none that quickbeam raises on purpose."""
    if isinstance(error, QuickbeamError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, ImportError):
        return f"{error}; {MISSING}"
    return f"{type(error).__name__}: {error} (QUICKBEAM_DEBUG=1 shows where)"


app = typer.Typer(
    cls=Commands,
    name="quickbeam",
    help="Lossless speculative decoding: the same answer, sooner.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and the kernels used, and exit.")
    ] = False,
) -> None:
    if version:
        print(show_version())
    elif context.invoked_subcommand is None:
        print(context.get_help())


for command in (generate, chat, serve, batch, inspect, pull, models, demo, doctor):
    app.command()(command)
for measurement in (passes, acceptance, drafting, heads, recall):
    bench.commands.command()(measurement)
bench.commands.command()(throughput)
bench.commands.command()(structured)
bench.commands.command("vocabulary")(bench_vocabulary)
bench.commands.command("trees")(bench_trees)
bench.commands.command("weights")(bench_weights)
bench.commands.command("plan")(bench_plan)
bench.commands.command("report")(bench_report)
app.add_typer(bench.commands, name="bench")
train.commands.command("all")(train_all)
app.add_typer(train.commands, name="train")
