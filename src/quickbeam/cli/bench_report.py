"""`quickbeam bench report`: one page from any records."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from quickbeam.errors import InvalidInput, QuickbeamError

PAGE = "index.html"


def bench_report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="Records that `quickbeam bench … --json` wrote."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The page goes there, as index.html.")
    ],
) -> None:
    """One HTML page of any records: speed by category, MAT against budget, accepted tokens by
    source, time by phase, calibration, and all tables. It needs no network and no script."""
    from quickbeam.bench.report_page import page
    from quickbeam.bench.saved import read

    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out {out}: is a file; name a folder")
    records = [read(path) for path in files]
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("bench report draws with matplotlib: pip install 'quickbeam[bench]'")
    text = page(records)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / PAGE).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise QuickbeamError(f"--out {out}: not written ({error.strerror})") from error
    print(out / PAGE)
