"""The scripts of benchmarks/, as modules, and other programs."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"


def script(name):
    """Import a script of benchmarks/ by its name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name)


def captured(command, **options):
    """Run a program. What it gives has `returncode`, `stdout` and `stderr`, both text."""
    return subprocess.run(command, capture_output=True, text=True, **options)
