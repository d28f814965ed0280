"""The folder of a built-in model: it is fetched and converted once, into the cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from quickbeam import hub
from quickbeam.config import ReportProgress
from quickbeam.errors import InvalidInput, QuickbeamError, did_you_mean
from quickbeam.hub.cache import alone, cache_folder, is_complete, sweep


def resolve(model: str | None, progress: ReportProgress | None = None) -> str:
    """Return what `model` names, as something that transformers can load.

    - `None` is the default model.
    - The name of a built-in model becomes its folder, which is pulled first if needed.
    - Anything else (a folder, a `.gguf` file, a Hugging Face id) is returned as it is.

    Raises as `pull` does.
    """
    if model is None or model in hub.EMBEDDED:
        return str(pull(model or hub.DEFAULT, progress or hub.quiet))
    return model


def pull(name: str = hub.DEFAULT, progress: ReportProgress = hub.quiet) -> Path:
    """Return the folder of a built-in model; fetch and convert it first if the cache lacks it.

    Raises `InvalidInput` for another name, and `QuickbeamError` if download, check or disk fails.
    """
    if name not in hub.EMBEDDED:
        hint = did_you_mean(name, hub.EMBEDDED)
        raise InvalidInput(
            f"unknown built-in model {name!r}; known: {', '.join(hub.EMBEDDED)}{hint}"
        )
    entry = hub.EMBEDDED[name]
    folder = cache_folder() / name
    if is_complete(folder):
        return folder

    def waiting() -> None:
        progress(f"waiting for another process that pulls {name}", None)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_name(f".{folder.name}.lock"), waiting):
            if not is_complete(folder):
                _make(folder, entry, progress)
    except OSError as error:
        raise QuickbeamError(
            f"can't keep {name} in {folder.parent}: {error.strerror or error}; {hub.ADVICE}"
        ) from error
    return folder


def _make(folder: Path, entry: hub.Embedded, progress: ReportProgress) -> None:
    """Fetch and convert a built-in model to `folder`, which appears complete or not at all."""
    shutil.rmtree(folder, ignore_errors=True)
    sweep(folder)
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    work.mkdir()
    try:
        gguf = hub.fetch(entry, folder, work, progress)
        converted = work / "model"
        from quickbeam.models.weights.gguf.convert import convert

        progress(f"converting {folder.name}, once", None)
        convert(gguf, converted, entry.end_tokens)
        for file in converted.iterdir():  # otherwise a power cut leaves empty files in the folder
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        os.replace(converted, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
