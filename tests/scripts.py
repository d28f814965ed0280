"""The scripts of benchmarks/, as modules, and other programs."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"


def script(name):
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name)


def captured(command, **options):
    """Run a program. What it gives has `returncode`, `stdout` and `stderr`, both text."""
    return subprocess.run(command, capture_output=True, text=True, **options)


def cli(*arguments, **more):
    """The result of `quickbeam` with these arguments, texts or paths, in this process."""
    from typer.testing import CliRunner

    from quickbeam.cli.app import app

    return CliRunner().invoke(app, [str(one) for one in arguments], **more)
