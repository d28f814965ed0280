"""The safetensors files of a model's folder: tensors by name and row, as they are stored."""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.models.families.reading import NotDescribed
from quickbeam.mtp import INDEX, SINGLE

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}

BINARY = getattr(os, "O_BINARY", 0)  # Windows would read text otherwise
_one_at_a_time = threading.Lock()


def read_into(room: memoryview, file: int, at: int, least: int | None = None) -> int:
    """Fill `room`, or at least its first `least` bytes, with those of an open file from `at` on.

    Returns how many were read, fewer only where the file ends. Several threads may read one file.
    Raises `OSError`.
    """
    done = 0
    while done < (len(room) if least is None else least):
        if hasattr(os, "preadv"):
            count = os.preadv(file, [room[done:]], at + done)
        else:  # Windows can't read elsewhere than at the file's position
            with _one_at_a_time:
                os.lseek(file, at + done, os.SEEK_SET)
                data = os.read(file, len(room) - done)
            count = len(data)
            room[done : done + count] = data
        if not count:
            break
        done += count
    return done


class _Shard:
    """A safetensors file, whose tensors are read past PyTorch's memory maps.

    Mapped pages would count as memory of the process, and are slow to come.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `OSError` and `ValueError` where it can't be read."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | BINARY)
        weakref.finalize(self, os.close, self._fd)
        size = int.from_bytes(self._bytes(8, 0), "little")
        if not 0 < size < os.fstat(self._fd).st_size:
            raise ValueError("it is no safetensors file")
        self._begin = 8 + size
        self.tensors: dict[str, dict[str, Any]] = json.loads(self._bytes(size, 8))
        self.tensors.pop("__metadata__", None)

    def _bytes(self, size: int, at: int) -> bytes:
        data = bytearray(size)
        return bytes(data[: read_into(memoryview(data), self._fd, at)])

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows of a tensor as they are stored. Raises `OSError` where that fails."""
        about = self.tensors[name]
        dtype, shape = DTYPES[about["dtype"]], about["shape"] or [1]
        row = dtype.itemsize * math.prod(shape[1:])
        data = torch.empty((last - first) * row, dtype=torch.uint8)
        at = self._begin + about["data_offsets"][0] + first * row
        if read_into(data.numpy().data, self._fd, at) < len(data):
            raise OSError("the file ends too early")
        return data.view(dtype).view(last - first, *shape[1:])

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor whose rows are read as they are needed. Raises `OSError`."""
        about = self.tensors[name]
        first, last = about["data_offsets"]
        at, dtype = self._begin + first, DTYPES[about["dtype"]]
        if at % dtype.itemsize:
            return self.rows(name, 0, about["shape"][0])
        end = at + last - first
        data = torch.from_file(str(self.path), shared=False, size=end, dtype=torch.uint8)
        return data[at:].view(dtype).view(about["shape"])


class TensorFiles:
    """All tensors of a folder. `names`: of all of them."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises `NotDescribed` without any, `InvalidInput` for broken ones."""
        self._places = {name: one for one in _shards(folder) for name in one.tensors}
        self.names = self._places.keys()

    def shape(self, name: str) -> list[int]:
        return list(self._places[name].tensors[name]["shape"])

    def kind(self, name: str) -> str:
        """Return the type of a tensor's numbers, as the format writes it (`BF16`)."""
        return str(self._places[name].tensors[name]["dtype"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor's numbers. Raises `KeyError` for others than are read."""
        return DTYPES[self.kind(name)]

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows `first` to `last` (excluded) of a tensor.

        Raises `QuickbeamError` naming the file where it can't be read, and `NotDescribed` for
        numbers of other types than are read.
        """
        shard = self._places[name]
        try:
            return shard.rows(name, first, last)
        except KeyError as error:
            raise NotDescribed(f"{name} has numbers of type {error}") from error
        except OSError as error:
            raise QuickbeamError(
                f"{shard.path}: {name} can't be read ({error}): download it again"
            ) from error

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor, a single number as `[1]`. Raises as `rows` does."""
        return self.rows(name, 0, (self.shape(name) or [1])[0])

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor whose rows are read from its file as they are needed.

        Raises `QuickbeamError` naming the file where it can't be read.
        """
        shard = self._places[name]
        try:
            return shard.mapped(name)
        except (OSError, RuntimeError) as error:
            raise QuickbeamError(f"{shard.path}: {name} can't be mapped ({error})") from error


def _shards(folder: Path) -> list[_Shard]:
    files: Iterable[str] = [SINGLE] if (folder / SINGLE).is_file() else []
    try:
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            files = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f"the weights in {folder} can't be read ({error}): download them again"
        ) from error
    if not files:
        raise NotDescribed(f"{folder} has no {SINGLE} and no {INDEX}")
    shards = []
    for file in files:
        try:
            shards.append(_Shard(folder / file))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(
                f"{folder / file} can't be read ({error}): download it again"
            ) from error
    return shards
