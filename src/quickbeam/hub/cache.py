"""The folder that models are kept in. A model appears there complete or not at all.

A process writes it under a hidden name, while it holds a lock, and renames it at the end. The next
process that writes it removes what an interrupted one left. What is derived from a file is kept
under the file's `file_key`.
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

SMALL_FILE = 4 << 20  # bytes of a file that is hashed completely
SAMPLE = 4096  # bytes that are hashed at each of several positions of a larger file
DISTANCE = 1 << 20  # bytes from one position to the next, at least
SAMPLES = 512  # positions, at most
SMALL_TENSOR = 64 << 10  # bytes of a tensor that is hashed completely, such as a norm's
SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # the name of one of several files


def cache_folder() -> Path:
    """Return the folder that models are kept in.

    It is the environment variable `QUICKBEAM_CACHE`, or the platform's folder for caches.
    """
    return Path(
        os.environ.get("QUICKBEAM_CACHE") or user_cache_dir("quickbeam", appauthor=False)
    ).expanduser()


def is_complete(folder: Path) -> bool:
    """Whether a folder has all files of a model."""
    files = ("config.json", "model.safetensors", "tokenizer.json")
    return all((folder / file).is_file() for file in files)


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


def sweep(target: Path) -> None:
    """Remove what interrupted processes left that were writing `target`, a file or a folder.

    The caller holds the lock of `target`, so no other process is writing it.
    """
    temporary = re.compile(rf"\.{re.escape(target.name)}\.\d+\.tmp")
    for path in target.parent.iterdir():
        if temporary.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def file_key(path: Path) -> str:
    """Return a hash that changes once the file under a path is another one.

    The hash is made of the path, the size, the inode, the times of modification and of change, and
    of content. Of a file of at most `SMALL_FILE` bytes this is all of it. Of a larger file it is
    samples, evenly spread from the beginning to the end, and each small tensor of a `.safetensors`
    file. A `.gguf` model in several files has one key for all of them.

    No part is enough by itself. Archives, image layers and `cp -p` set any time of modification.
    Samples miss a small change; but where a file can be changed, each change sets the time of
    change, which no program can choose. Read-only images have no such time; there samples tell
    files apart that differ in more than a few numbers.

    A copy has another key than its original, so what is derived from the file is made again for the
    copy. To hash all of a large file at each start would cost more. Raises `OSError` for a file
    that can't be read.
    """
    digest = hashlib.sha256()
    for part in split_files(path):
        with open(part, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            state = (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
            digest.update(f"{part.resolve()} {state}".encode())
            for begin, count in _hashed_parts(file, part.suffix, status.st_size):
                file.seek(begin)
                digest.update(file.read(count))
    return digest.hexdigest()


def split_files(path: Path) -> list[Path]:
    """Return a file; of a `.gguf` model in several files (`NAME-00001-of-00003.gguf`), all."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    name, count = match.groups()
    sibling = re.compile(rf"{re.escape(name)}-\d{{5}}-of-{count}\.gguf")
    return sorted(file for file in path.parent.iterdir() if sibling.fullmatch(file.name))


def _hashed_parts(file: BinaryIO, suffix: str, size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file that are hashed: the first byte of each, and its bytes."""
    if size <= SMALL_FILE:
        yield 0, size
        return
    distance = max(DISTANCE, size // SAMPLES)
    for begin in range(0, size - SAMPLE, distance):
        yield begin, SAMPLE
    yield size - SAMPLE, SAMPLE
    if suffix == ".safetensors":
        yield from _small_tensors(file, size)


def _small_tensors(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Yield where the small tensors of a `.safetensors` file are: first byte, and bytes."""
    file.seek(0)
    data_begin = 8 + int.from_bytes(file.read(8), "little")
    small = list[tuple[int, int]]()
    try:
        tensors = json.loads(file.read(min(data_begin, size) - 8))
        tensors.pop("__metadata__", None)
        for tensor in tensors.values():
            begin, end = tensor["data_offsets"]
            if end - begin <= SMALL_TENSOR:
                small.append((begin, end - begin))
        small.sort()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # a broken file, which is reported when its tensors are read
    for begin, count in small:
        yield data_begin + begin, max(0, count)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
