"""The command line as a whole, and the place where errors become a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quickbeam import __version__
from quickbeam.cli import bench, fields
from quickbeam.cli.demo import demo
from quickbeam.cli.doctor import doctor, pull
from quickbeam.cli.generate import chat, generate
from quickbeam.cli.inspect import inspect
from quickbeam.cli.serve import batch, serve
from quickbeam.cli.train import train
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.models.native.choice import describe_kernels


class Commands(TyperGroup):
    """Reports every error in one line, and exits with 2 for bad input and 1 for a failure.

    `QUICKBEAM_DEBUG=1` shows the traceback instead.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        extra |= {"standalone_mode": False, "prog_name": "quickbeam"}
        try:
            code = super().main(*args, **extra)
        except typer.Abort:
            code = 130
        except Exception as error:
            # the parser's errors about options have this method
            usage = getattr(error, "format_message", None)
            if usage is None and os.environ.get("QUICKBEAM_DEBUG"):
                raise
            code = 2 if usage or isinstance(error, InvalidInput) else 1
            text = usage().replace("Value error, ", "") if usage else describe(error)
            print(f"error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def describe(error: Exception) -> str:
    """Return an error as one line, with a hint if it is none that quickbeam raises on purpose."""
    if isinstance(error, QuickbeamError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, ImportError):
        return f"{error}; `quickbeam doctor` says what is missing, and what to do"
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
    if threading.current_thread() is threading.main_thread():
        # what a scheduler sends before it kills counts as Ctrl-C: nothing that was made is lost
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if version:
        print(f"{__version__}\nkernels: {describe_kernels()}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


for command in (generate, chat, serve, batch, train, inspect, pull, demo, doctor):
    app.command(cls=fields.Command)(fields.command(command))
app.add_typer(bench.commands, name="bench")
