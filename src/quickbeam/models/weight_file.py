"""Quantised weights on disk, so that the next load need not quantise again.

This module does not know what the bytes mean.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quickbeam.cache import alone, cache_folder, sweep
from quickbeam.models.memory import room_for_weights
from quickbeam.models.native import build

logger = logging.getLogger(__name__)

NAME = "weights"
# files in a model's folder that its weights depend on
CHECKPOINT = ("*.json", "*.safetensors", "*.bin")
# sources that define what the bytes mean and how weights are rounded
LAYOUT = ("quantised.h", "bytes.h", "quantised.py")


class WeightFile:
    """The file with one model's weights of one kind.

    `path`: where it is; None if nothing is kept. `progress(stage, fraction)` is called while
    weights are quantised.
    """

    def __init__(
        self, path: Path | None, progress: Callable[[str, float | None], None] | None = None
    ) -> None:
        self.path = path
        self.progress = progress or (lambda stage, fraction: None)

    @classmethod
    def of(
        cls,
        folder: str,
        commit: str | None,
        weights: str,
        progress: Callable[[str, float | None], None] | None,
    ) -> WeightFile:
        """Return the file of a checkpoint.

        `folder`: a folder, which is identified by the sizes and times of its files, or a Hugging
        Face id at a `commit`. `weights`: the kind. Another checkpoint, or another version of the
        layout, has another file. Nothing is kept of an id without a commit. Nothing is kept of an
        adapter either, as the model that it belongs to may change elsewhere.
        """
        place = Path(folder)
        if (not place.is_dir() and commit is None) or (place / "adapter_config.json").exists():
            return cls(None, progress)
        name = "".join(
            letter if letter.isalnum() or letter in "-._" else "-" for letter in place.name
        )
        checkpoint = _digest([folder, str(commit), *_state(place)])
        return cls(
            cache_folder()
            / "weights"
            / f"{name}-{weights}-{checkpoint}-{_digest(_layout())}.safetensors",
            progress,
        )

    def read(self, size: int) -> torch.Tensor | None:
        """Return the weights, `[size]` uint8.

        Returns None if there is no file, or none with that many bytes. Logs a warning and returns
        None if the file can't be read.
        """
        if self.path is None or not self.path.is_file():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                found = file.get_tensor(NAME)
                if found.dtype is torch.uint8 and found.numel() == size:
                    return room_for_weights(size, torch.uint8).copy_(found)
        except (OSError, SafetensorError) as error:
            logger.warning(
                "quantised weights in %s can't be read (%s): quantising again", self.path, error
            )
        return None

    def write(self, weights: torch.Tensor) -> None:
        """Keep the weights in the file.

        The file appears in one rename, so that no reader finds a part of it. Files of earlier
        layouts are deleted, and so is what interrupted processes left. If writing fails, a warning
        says so.
        """
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with alone(
                self.path.with_name(f".{self.path.name}.lock"),
                lambda: self.progress("waiting for another process that keeps its weights", None),
            ):
                self._write(self.path, weights)
        except (OSError, SafetensorError) as error:
            logger.warning(
                "quantised weights (%.0f MB) can't be kept in %s (%s): the next load quantises "
                "again; "
                "free some space there, or set QUICKBEAM_CACHE to another folder",
                weights.nbytes / 1e6,
                self.path.parent,
                error,
            )

    @staticmethod
    def _write(path: Path, weights: torch.Tensor) -> None:
        """Write the file. The caller holds its lock."""
        sweep(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            save_file({NAME: weights}, part)
            with open(part, "rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.safetensors"):
            if other != path:  # of an earlier layout
                other.unlink(missing_ok=True)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _state(folder: Path) -> Iterator[str]:
    for path in (
        sorted({path for pattern in CHECKPOINT for path in folder.glob(pattern)})
        if folder.is_dir()
        else ()
    ):
        seen = path.stat()
        yield f"{path.resolve()} {seen.st_size} {seen.st_mtime_ns}"


def _layout() -> Iterator[str]:
    for name in LAYOUT:
        yield hashlib.sha256((build.HERE / name).read_bytes()).hexdigest()
