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
from quickbeam.models.memory import map_file, memory_for_weights
from quickbeam.models.native import build
from quickbeam.models.weights.tensor_files import read_into

ALIGNED = 4096  # bytes: the weights begin there, and reads past the page cache at multiples of it
SPARE = 64 << 20  # bytes that are left free on the disk
ORDER = 3  # version of the order in which weights follow one another, and of how files are read
# files in a model's folder that its weights depend on
CHECKPOINT = ("*.json", "*.safetensors", "*.bin")
# sources that define what the bytes mean and how weights are rounded
LAYOUT = (
    "formats.h",
    "bytes.h",
    "quantise.h",
    "blocks.h",
    "grids.py",
    "quantised.py",
    "operands.py",
)


class PackedFile:
    """The file with one model's packed weights: a safetensors file of one tensor of bytes.

    `path`: where it is; None if nothing is kept. `is_mapped`: whether the weights that were read
    are mapped. `progress(stage, fraction)` is called while weights are packed.
    """

    def __init__(self, path: Path | None, progress: ReportProgress | None = None) -> None:
        self.path, self.is_mapped = path, False
        self.progress = progress or (lambda stage, fraction: None)

    @classmethod
    def for_checkpoint(
        cls,
        folder: str,
        commit: str | None,
        kind: str,
        progress: ReportProgress | None,
        base: Path | None = None,
    ) -> PackedFile:
        """Return the file of a checkpoint.

        `folder`: a folder or file, whose files are told from others by `file_key`, or a Hugging
        Face id at a `commit`. `kind`: the format of the packed weights. Another state of the
        checkpoint, or another version of the layout, has another file, which replaces this one.
        Nothing is kept of an id without a commit. `base`: for an adapter in `folder`, the folder of
        the model that it changes.
        """
        path = Path(folder)
        if not path.exists() and commit is None:
            return cls(None, progress)
        identity = str(path.resolve()) if path.exists() else folder
        name = "".join(
            letter if letter.isalnum() or letter in "-._" else "-" for letter in path.name
        )
        base_state = [] if base is None else _state(base)
        state = _digest([str(commit), *_state(path), *base_state, *_layout()])
        file = f"{name}-{kind}-{_digest([identity])}-{state}.safetensors"
        return cls(cache_folder() / "weights" / file, progress)

    def is_complete(self, size: int) -> bool:
        """Whether the file is there, with `size` bytes of weights.

        Raises `QuickbeamError` if it can't be read.
        """
        if self.path is None:
            return False
        try:
            with open(self.path, "rb") as file:
                has_size = os.fstat(file.fileno()).st_size == ALIGNED + size
                return has_size and file.read(ALIGNED) == _header(size)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise QuickbeamError(
                f"{self.path} can't be read: {error.strerror or error}; delete it to have it made "
                "again"
            ) from error

    def read(self, size: int, memory: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the weights, `[size]` uint8; None if there is no file with that many bytes.

        They are read into `memory`. Where that is None, they are mapped if that is as fast to use
        (`memory.map_file`), else read into new memory.
        """
        if self.path is None or not self.is_complete(size):
            return None
        mapped = map_file(self.path) if memory is None else None
        self.is_mapped = mapped is not None
        if mapped is not None:
            return mapped[ALIGNED:]
        weights = memory_for_weights(size) if memory is None else memory
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
        lock = self.path.with_name(f".{self.path.name}.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with alone(lock, self._report_waiting):
                if not self.is_complete(size):
                    self._write(self.path, size, pieces, stage)
        except OSError as error:
            raise QuickbeamError(
                f"packed weights ({size / 1e6:.0f} MB) can't be kept in {folder} "
                f"({error.strerror or error}): free some space there, or set QUICKBEAM_CACHE to "
                "another folder"
            ) from error

    def _report_waiting(self) -> None:
        self.progress("waiting for another process that packs its weights", None)

    def _write(
        self, path: Path, size: int, pieces: Callable[[], Iterable[torch.Tensor]], stage: str
    ) -> None:
        """Write the file. The caller holds its lock."""
        sweep(path)
        free = shutil.disk_usage(path.parent).free
        if free < size + SPARE:
            raise OSError(f"{free / 1e6:.0f} MB are free there")
        part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        done = 0
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
    length = ALIGNED - 8
    fields = json.dumps({"weights": field}).encode()
    return length.to_bytes(8, "little") + fields.ljust(length)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).flatten().numpy().data


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _state(folder: Path) -> Iterator[str]:
    """Yield what tells this state of a checkpoint from others."""
    paths = [folder] if folder.is_file() else []
    if folder.is_dir():
        paths = sorted({path for pattern in CHECKPOINT for path in folder.glob(pattern)})
    yield from map(file_key, paths)


def _layout() -> Iterator[str]:
    """Yield what tells this layout of packed weights from others."""
    yield str(ORDER)
    for name in LAYOUT:
        yield hashlib.sha256((build.HERE / name).read_bytes()).hexdigest()
