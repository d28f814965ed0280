"""The `quickbeam` command.

It draws on stderr and writes data to stdout. Everything else is the library's work.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import warnings


def main() -> None:
    """Run the command line and exit: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    gc.set_threshold(50_000)  # what imports make lives on: looking for garbage in it takes long
    if not sys.warnoptions and not os.environ.get("QUICKBEAM_DEBUG"):
        # warnings of libraries don't concern the user of the command
        warnings.simplefilter("ignore")
    if sys.stderr is not None:
        # Says which signal ends the process, and where. "Fatal Python error: Bus error" means that
        # a file of the model was cut while it was mapped (docs/troubleshooting.md).
        faulthandler.enable(all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal that lacks a character shows ? instead of failing
            stream.reconfigure(errors="replace")
    try:
        from quickbeam.cli.app import app

        app()
    except KeyboardInterrupt:  # while the command line itself is made
        sys.exit(130)
    except ImportError as error:
        if os.environ.get("QUICKBEAM_DEBUG"):
            raise
        sys.exit(f"error: {error}; install quickbeam again, with what it needs")
