"""The folder that models are kept in. What is made there appears complete or not at all.

It is made in a hidden place beside, under a lock, and renamed at the end. Whoever makes it next
removes what an interrupted process left there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

Progress = Callable[[str, "float | None"], None]
"""Called with what is going on, in a few words, and how far it is, from 0 to 1 (None: unknown)."""


def cache_folder() -> Path:
    """Return the folder that models are kept in.

    It is the environment variable `QUICKBEAM_CACHE`, or the platform's folder for caches.
    """
    return Path(
        os.environ.get("QUICKBEAM_CACHE") or user_cache_dir("quickbeam", appauthor=False)
    ).expanduser()


def is_complete(folder: Path) -> bool:
    return all(
        (folder / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json")
    )


@contextmanager
def alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`. If another process holds it, call `waiting` once, then wait."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


def sweep(made: Path) -> None:
    """Remove what interrupted processes left that were making `made`, a file or a folder.

    The caller holds its lock, so no living process works on it.
    """
    work = re.compile(rf"\.{re.escape(made.name)}\.\d+\.tmp")
    for path in made.parent.iterdir():
        if work.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
