"""The folder that models are kept in. What is made there appears complete or not at all.

It is made in a hidden place beside, under a lock, and renamed at the end. Whoever makes it next
removes what an interrupted process left there. What is made of a file is kept under its `file_key`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

WHOLE = 4 << 20  # bytes of a file that is hashed as a whole
SAMPLE = 4096  # bytes that are hashed at each of several positions of a larger file
APART = 1 << 20  # bytes from one position to the next, at least
SAMPLES = 512  # positions, at most
SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # the name of one of several files
SMALL = 64 << 10  # bytes of a tensor that is hashed as a whole, such as a norm's

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


def file_key(path: Path) -> str:
    """Return a hash that changes once the file under a path is another one.

    It is made of the path, the size, the inode, the times of modification and of change, and of
    content: all of a file of at most `WHOLE` bytes; of a larger one samples, evenly spread from its
    beginning to its end, and each small tensor of a `.safetensors` file. A `.gguf` model in several
    files has one key for all of them.

    No part is enough by itself. Archives, image layers and `cp -p` set any time of modification.
    Samples miss a small change; but where a file can be changed, each change sets the time of
    change, which no program can choose. Read-only images have no such time; there samples tell
    files apart that differ in more than a few numbers.

    A copy has another key than its original, so what is kept is made again for the copy. To hash
    all of a large file at each start would cost more. Raises `OSError` for a file that can't be
    read.
    """
    digest = hashlib.sha256()
    for part in split_files(path):
        with open(part, "rb", buffering=0) as file:
            state = os.fstat(file.fileno())
            about = (state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns)
            digest.update(f"{part.resolve()} {about}".encode())
            for first, count in _hashed(file, part.suffix, state.st_size):
                file.seek(first)
                digest.update(file.read(count))
    return digest.hexdigest()


def split_files(path: Path) -> list[Path]:
    """Return a file; of a `.gguf` model in several files (`NAME-00001-of-00003.gguf`), all."""
    name = SPLIT.fullmatch(path.name)
    if name is None:
        return [path]
    every = re.compile(rf"{re.escape(name[1])}-\d{{5}}-of-{name[2]}\.gguf")
    return sorted(one for one in path.parent.iterdir() if every.fullmatch(one.name))


def _hashed(file: BinaryIO, suffix: str, size: int) -> Iterator[tuple[int, int]]:
    """Yield which parts of a file are hashed: the first byte of each, and how many."""
    if size <= WHOLE:
        yield 0, size
        return
    apart = max(APART, size // SAMPLES)
    for first in range(0, size - SAMPLE, apart):
        yield first, SAMPLE
    yield size - SAMPLE, SAMPLE
    if suffix == ".safetensors":
        yield from _small_tensors(file, size)


def _small_tensors(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    file.seek(0)
    begin = 8 + int.from_bytes(file.read(8), "little")
    try:
        tensors = json.loads(file.read(min(begin, size) - 8))
        tensors.pop("__metadata__", None)
        spans = [one["data_offsets"] for one in tensors.values()]
        small = sorted((first, last - first) for first, last in spans if last - first <= SMALL)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # a broken file: what reads its tensors says so
    for first, count in small:
        yield begin + first, max(0, count)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
