"""Run the entries of a plan, each in a process of its own, and keep their records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from quickbeam.bench.files import save
from quickbeam.bench.origin import KEY, origin
from quickbeam.bench.plan import Entry, Plan
from quickbeam.bench.saved import kind_of
from quickbeam.errors import QuickbeamError

# whether the `--json` of a command takes a file; otherwise the command prints its record
Takes = Callable[[Sequence[str]], bool]
QUICKBEAM = (sys.executable, "-m", "quickbeam")
GRACE = 20.0  # seconds that an interrupted process has to end by itself


def run(plan: Plan, entry: Entry, values: Mapping[str, str], takes_file: Takes, out: Path) -> float:
    """Measure one entry, write its record to `out`/NAME.json, and return the seconds that it took.

    The file keeps its last figures until the new record is complete. Raises `InvalidInput` for a
    blank without a value and for a record of no known kind, `QuickbeamError` where the command
    fails, and `KeyboardInterrupt` once an interrupted command has ended.
    """
    words = entry.words(values)
    before, began = (
        origin(entry, plan.root, {blank: values[blank] for blank in entry.blanks}),
        perf_counter(),
    )
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "record.json"
        _measure(
            [*words, "--json", *([str(written)] if takes_file(words) else [])],
            written,
            takes_file(words),
            entry.environment,
        )
        try:
            content = json.loads(written.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise QuickbeamError(f"the command left no record ({error})") from error
    kind_of(content, entry.name)
    seconds = perf_counter() - began
    hidden = {values[blank]: f"{{{blank}}}" for blank in entry.blanks if os.sep in values[blank]}
    save(
        out / f"{entry.name}.json",
        {**_without(content, hidden), KEY: {**before, "seconds": seconds}},
    )
    return seconds


def _measure(
    words: Sequence[str], written: Path, takes_file: bool, environment: Mapping[str, str]
) -> None:
    """Run `quickbeam` with these words in this Python.

    What it prints goes to `written`, unless the words name that file (`takes_file`). `environment`
    is added to this process's.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        written.open("w", encoding="utf-8") as printed,
    ):
        process = subprocess.Popen(
            [*QUICKBEAM, *words],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if takes_file else printed,
            stderr=said,
            start_new_session=True,  # Ctrl-C does not reach it; `_stop` passes it on, once
        )
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        if code:
            said.seek(0)
            lines = [line.strip() for line in said if line.strip()]
            raise QuickbeamError(
                lines[-1].removeprefix("error: ")
                if lines
                else f"the command ended with code {code}"
            )


def _stop(process: subprocess.Popen[Any]) -> None:
    """Interrupt a process, then kill it and the processes that it started."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(GRACE)
    finally:  # also after a second Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _without(value: Any, hidden: Mapping[str, str]) -> Any:
    """A record in which the paths that filled blanks are replaced by the blanks."""
    if isinstance(value, dict):
        return {key: _without(item, hidden) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, hidden) for item in value]
    if isinstance(value, str):
        for filled, blank in hidden.items():
            value = value.replace(filled, blank)
    return value
