"""The scripts of benchmarks/, as modules."""

import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"


def script(name):
    """Import a script of benchmarks/ by its name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name)
