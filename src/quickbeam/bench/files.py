"""The files that a benchmark writes: checked before anything is measured, and written as a whole.

Nothing here imports torch, so that the command line can check its options at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quickbeam.errors import InvalidInput

PLOT_FORMATS = (".png", ".svg", ".pdf")


def check_output(option: str, path: Path) -> None:
    """Raise `InvalidInput` where `path` can't be written. The error names `option`."""
    if path.is_dir():
        raise InvalidInput(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise InvalidInput(f"{option} {path}: folder {path.parent} does not exist")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidInput(f"{option} {path}: can't be written ({error.strerror})") from None


def check_plot(path: Path) -> None:
    """Raise `InvalidInput` where no plot can be drawn to `path`.

    The format may be unknown, matplotlib may be missing, or the file can't be written.
    """
    if path.suffix.lower() not in PLOT_FORMATS:
        raise InvalidInput(f"--plot {path}: the name must end in {', '.join(PLOT_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("--plot needs matplotlib: pip install 'quickbeam[bench]'")
    check_output("--plot", path)


def save(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON so that `path` always holds a complete record.

    It is the old one until the new one is complete. Raises `OSError` where the file can't be
    written, and `ValueError` for a number that is not finite.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp lets only the owner read the file
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
