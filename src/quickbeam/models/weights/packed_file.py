"""Packed weights on disk, so that the next load need not pack them again.

This module does not know what the bytes mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from quickbeam.config import ReportProgress
from quickbeam.errors import QuickbeamError
from quickbeam.hub.cache import alone, cache_folder, file_key, sweep
from quickbeam.models.memory import map_file, room_for_weights
from quickbeam.models.native import build
from quickbeam.models.weights.tensor_files import read_into

ALIGNED = 4096  # bytes: the weights begin there, and reads past the page cache at multiples of it
SPARE = 64 << 20  # bytes that are left free on the disk
ORDER = 3  # version of the order in which weights follow one another, and of how files are read
# files in a model's folder that its weights depend on
CHECKPOINT = ("*.json", "*.safetensors", "*.bin")
# sources that define what the bytes mean and how weights are rounded
LAYOUT = ("formats.h", "bytes.h", "quantise.h", "blocks.h", "quantised.py", "operands.py")


class WeightFile:
    """The file with one model's weights of one kind: a safetensors file of one tensor of bytes.

    `path`: where it is; None if nothing is kept. `progress(stage, fraction)` is called while
    weights are packed.
    """

    def __init__(self, path: Path | None, progress: ReportProgress | None = None) -> None:
        self.path, self.mapped = path, False  # whether what was read is mapped
        self.progress = progress or (lambda stage, fraction: None)

    @classmethod
    def of(
        cls,
        folder: str,
        commit: str | None,
        kind: str,
        progress: ReportProgress | None,
        base: Path | None = None,
    ) -> WeightFile:
        """Return the file of a checkpoint.

        `folder`: a folder or file, whose files are told from others by `file_key`, or a Hugging
        Face id at a `commit`. Another state of the checkpoint, or another version of the
        layout, has another file, which replaces this one. Nothing is kept of an id without a
        commit. `base`: for an adapter in `folder`, the folder of the model that it changes.
        """
        place = Path(folder)
        if not place.exists() and commit is None:
            return cls(None, progress)
        where = str(place.resolve()) if place.exists() else folder
        name = "".join(
            letter if letter.isalnum() or letter in "-._" else "-" for letter in place.name
        )
        of_base = [] if base is None else _state(base)
        state = _digest([str(commit), *_state(place), *of_base, *_layout()])
        file = f"{name}-{kind}-{_digest([where])}-{state}.safetensors"
        return cls(cache_folder() / "weights" / file, progress)

    def is_whole(self, size: int) -> bool:
        """Whether the file is there, with `size` bytes of weights.

        Raises `QuickbeamError` if it can't be read.
        """
        if self.path is None:
            return False
        try:
            with open(self.path, "rb") as file:
                whole = os.fstat(file.fileno()).st_size == ALIGNED + size
                return whole and file.read(ALIGNED) == _header(size)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise QuickbeamError(
                f"{self.path} can't be read: {error.strerror or error}; delete it to have it made "
                "again"
            ) from error

    def read(self, size: int) -> torch.Tensor | None:
        """Return the weights, `[size]` uint8; None if there is no file with that many bytes.

        They are mapped where that is as fast to use (`memory.map_file`), else read.
        """
        if self.path is None or not self.is_whole(size):
            return None
        mapped = map_file(self.path)
        self.mapped = mapped is not None
        if mapped is not None:
            return mapped[ALIGNED:]
        weights = room_for_weights(size)
        with open(self.path, "rb", buffering=0) as file:
            done = read_into(_bytes(weights), file.fileno(), ALIGNED)
        return weights if done == size else None

    def write(self, size: int, pieces: Callable[[], Iterable[torch.Tensor]], stage: str) -> None:
        """Keep weights of `size` bytes, unless the file is there; one process at a time.

        `pieces()` yields tensors that are written one after the other. `stage`: words for the
        progress. The file appears in one rename, so that no reader finds a part of it. Files of
        earlier states and layouts are deleted, and so is what interrupted processes left. Raises
        `QuickbeamError` if the disk has no room for it or refuses it.
        """
        if self.path is None:
            return
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with alone(
                self.path.with_name(f".{self.path.name}.lock"),
                lambda: self.progress("waiting for another process that packs its weights", None),
            ):
                if not self.is_whole(size):
                    self._write(self.path, size, pieces, stage)
        except OSError as error:
            raise QuickbeamError(
                f"packed weights ({size / 1e6:.0f} MB) can't be kept in {folder} "
                f"({error.strerror or error}): free some space there, or set QUICKBEAM_CACHE to "
                "another folder"
            ) from error

    def _write(
        self, path: Path, size: int, pieces: Callable[[], Iterable[torch.Tensor]], stage: str
    ) -> None:
        """Write the file. The caller holds its lock."""
        sweep(path)
        free = shutil.disk_usage(path.parent).free
        if free < size + SPARE:
            raise OSError(f"{free / 1e6:.0f} MB are free there")
        part, done = path.with_name(f".{path.name}.{os.getpid()}.tmp"), 0
        try:
            with open(part, "wb") as file:
                file.write(_header(size))
                for piece in pieces():
                    self.progress(stage, done / size)
                    done += file.write(_bytes(piece))
                assert done == size, (done, size)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*{path.suffix}"):
            if other != path:  # of an earlier state or layout
                other.unlink(missing_ok=True)


def _header(size: int) -> bytes:
    """Return the beginning of the file: safetensors' header, with spaces up to byte `ALIGNED`."""
    field = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    return (ALIGNED - 8).to_bytes(8, "little") + json.dumps({"weights": field}).encode().ljust(
        ALIGNED - 8
    )


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).flatten().numpy().data


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _state(folder: Path) -> Iterator[str]:
    paths = [folder] if folder.is_file() else []
    if folder.is_dir():
        paths = sorted({path for pattern in CHECKPOINT for path in folder.glob(pattern)})
    yield from map(file_key, paths)


def _layout() -> Iterator[str]:
    yield str(ORDER)
    for name in LAYOUT:
        yield hashlib.sha256((build.HERE / name).read_bytes()).hexdigest()
