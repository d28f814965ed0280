"""The weight files of a model's folder: tensors by name and row, as they are stored.

The files are safetensors, or where there are none, PyTorch's `pytorch_model.bin`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import threading
import weakref
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput, QuickbeamError, first_line
from quickbeam.hub.mtp import INDEX, SINGLE, index_of
from quickbeam.models.families.reading import NotDescribed

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# a file of several that hold a model's weights together
SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.(?:safetensors|bin)")
OTHERS = ("adapter", "consolidated")  # how files begin that hold something else
# what is raised for files that hold something else than they should
BROKEN = (ValueError, LookupError, TypeError, AttributeError)
# the same for pickles
BROKEN_PICKLE = (*BROKEN, OSError, EOFError, RuntimeError, pickle.UnpicklingError)
_position_lock = threading.Lock()  # of a file, where it has to be set before reading


def read_into(buffer: memoryview, file: int, offset: int, least: int | None = None) -> int:
    """Fill a buffer, or at least its first `least` bytes, from byte `offset` of an open file on.

    Returns how many bytes were read, fewer only where the file ends. Several threads may read one
    file. Raises `OSError`.
    """
    done = 0
    while done < (len(buffer) if least is None else least):
        if hasattr(os, "preadv"):
            count = os.preadv(file, [buffer[done:]], offset + done)
        else:  # Windows can't read elsewhere than at the file's position
            with _position_lock:
                os.lseek(file, offset + done, os.SEEK_SET)
                data = os.read(file, len(buffer) - done)
            count = len(data)
            buffer[done : done + count] = data
        if not count:
            break
        done += count
    return done


class _StoredTensor(NamedTuple):
    """Where a tensor is: bytes `first` to `last` (excluded) of a file that is open as `fd`."""

    path: Path
    fd: int
    kind: str
    shape: list[int]
    first: int
    last: int

    def rows(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows `first` to `last` (excluded). Raises `OSError`."""
        row_shape = self.shape[1:]
        row_bytes = dtype.itemsize * math.prod(row_shape)
        data = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        if read_into(data.numpy().data, self.fd, self.first + first * row_bytes) < len(data):
            raise OSError("the file ends too early")
        return data.view(dtype).view(last - first, *row_shape)

    def mapped(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor, whose rows are read as they are needed.

        Raises `OSError` and `RuntimeError`.
        """
        if self.first % dtype.itemsize:
            return self.rows(0, self.shape[0], dtype)
        path = str(self.path)
        data = torch.from_file(path, shared=False, size=self.last, dtype=torch.uint8)
        return data[self.first :].view(dtype).view(self.shape)


class _PickledTensor(NamedTuple):
    """A tensor of a `.bin` file, which PyTorch has mapped."""

    path: Path
    tensor: torch.Tensor

    @property
    def kind(self) -> str:
        return KINDS.get(self.tensor.dtype, str(self.tensor.dtype))

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of rows `first` to `last` (excluded)."""
        tensor = self.tensor if self.tensor.dim() else self.tensor.view(1)
        return tensor[first:last].clone(memory_format=torch.contiguous_format)

    def mapped(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor, whose rows are read as they are needed."""
        return self.tensor.contiguous()


class TensorFiles:
    """All tensors of a folder, by their `names`.

    Safetensors files are read past PyTorch's memory maps, whose pages would count as memory of the
    process, and are slow to come.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files.

        Raises `InvalidInput` without any, and for broken ones. Nothing but tensors is unpickled.
        """
        self._tensors = dict[str, _StoredTensor | _PickledTensor]()
        files = weight_files(folder)
        if not files:
            raise InvalidInput(
                f"{folder} has no weights: no {SINGLE}, no {INDEX}, no numbered shards and no "
                f"{PICKLED}; download it again, with all of its files"
            )
        for path in files:
            try:
                if path.suffix == ".bin":
                    self._load(path)
                else:
                    self._open(path)
            except (*BROKEN_PICKLE, RecursionError) as error:
                reason = first_line(error)
                if isinstance(error, pickle.UnpicklingError):  # whose words advise to run its code
                    reason = "it is damaged, or holds more than tensors"
                raise InvalidInput(f"{path} can't be read ({reason}): download it again") from error
        self.names = self._tensors.keys()

    def _open(self, path: Path) -> None:
        """Add the tensors of a safetensors file. Raises one of `BROKEN` for another file."""
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            end = os.fstat(file.fileno()).st_size
            if not 0 < size < end:
                raise ValueError("it is no safetensors file")
            header = json.loads(file.read(size))
            fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, fd)
        header.pop("__metadata__", None)
        spans = list[tuple[Any, str]]()
        for name, entry in header.items():
            kind, shape = str(entry["dtype"]), entry["shape"]
            first, last = entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
                raise ValueError(f"{name[:80]!r} of shape {shape} at {first} to {last}")
            spans.append(((first, last), name))
            first, last = 8 + size + first, 8 + size + last
            itemsize = DTYPES[kind].itemsize if kind in DTYPES else 0
            if last > end or (itemsize and math.prod(shape) * itemsize != last - first):
                raise ValueError(f"{name[:80]!r} of shape {shape} at bytes {first} to {last}")
            self._tensors[name] = _StoredTensor(path, fd, kind, shape, first, last)
        for ((_, end_of_name), name), ((begin, _), other) in pairwise(sorted(spans)):
            if begin < end_of_name:
                raise ValueError(f"{name[:80]!r} and {other[:80]!r} lie in the same place")

    def _load(self, path: Path) -> None:
        """Add the tensors of a `.bin` file. Raises one of `BROKEN_PICKLE` for another file."""
        # files of PyTorch before 1.6 are no archives, and can't be mapped
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}, and no tensors by name")
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{str(name)[:80]!r} is a {type(tensor).__name__}, and no tensor")
            self._tensors[str(name)] = _PickledTensor(path, tensor.detach())

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name].shape)

    def kind(self, name: str) -> str:
        """Return the type of a tensor's elements, as safetensors writes it (`BF16`)."""
        return self._tensors[name].kind

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor's elements. Raises `NotDescribed` for one that isn't read."""
        kind = self.kind(name)
        if kind not in DTYPES:
            raise NotDescribed(
                f"{name} has numbers of type {kind}; read are {', '.join(DTYPES)}: take another "
                "checkpoint"
            )
        return DTYPES[kind]

    def like(self, name: str, memory: bool) -> torch.Tensor:
        """Return a tensor of the same shape and type, uninitialised. Raises as `dtype` does."""
        device = "cpu" if memory else "meta"
        return torch.empty(self.shape(name), dtype=self.dtype(name), device=device)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows `first` to `last` (excluded) of a tensor.

        Raises `QuickbeamError` naming the file where it can't be read, and as `dtype` does.
        """
        tensor, dtype = self._tensors[name], self.dtype(name)
        try:
            return tensor.rows(first, last, dtype)
        except OSError as error:
            raise QuickbeamError(
                f"{tensor.path}: {name} can't be read ({error}): download it again"
            ) from error

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, a single number as `[1]`. Raises as `rows` does."""
        return self.rows(name, 0, (self.shape(name) or [1])[0])

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor whose rows are read from its file as they are needed.

        Raises `QuickbeamError` naming the file where it can't be read.
        """
        tensor, dtype = self._tensors[name], self.dtype(name)
        try:
            return tensor.mapped(dtype)
        except (OSError, RuntimeError) as error:
            raise QuickbeamError(f"{tensor.path}: {name} can't be mapped ({error})") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights; none where there are no such files.

    The files are those of the index, or `SINGLE`, or without both all shards of a numbered set.
    Without safetensors files, `.bin` files are looked for in the same way. Raises `InvalidInput`
    for an index that can't be read, and for a set that is not complete.
    """
    files = _weight_files(folder, SINGLE, INDEX)
    return files or _weight_files(folder, PICKLED, PICKLED_INDEX)


def _weight_files(folder: Path, single: str, index: str) -> list[Path]:
    if not any((folder / name).is_file() for name in (single, index)):
        return _shards(folder, Path(single).suffix, index)
    try:
        file_of_tensor = index_of(folder, single, index)
        names = [single] if file_of_tensor is None else sorted(set(file_of_tensor.values()))
        return [folder / name for name in names]
    except (OSError, *BROKEN) as error:
        raise InvalidInput(
            f"the weights in {folder} can't be read ({error}): download them again"
        ) from error


def _shards(folder: Path, suffix: str, index: str) -> list[Path]:
    """Return the shards of a folder without an index."""
    sets = dict[tuple[str, int], dict[int, Path]]()
    for path in sorted(folder.glob(f"*{suffix}")):
        matched = SHARD.fullmatch(path.name)
        if matched and not path.name.startswith(OTHERS):
            shard_set = matched[1], int(matched[3])
            sets.setdefault(shard_set, {})[int(matched[2])] = path
    if not sets:
        return []
    if len(sets) > 1:
        kinds = ", ".join(f"{stem} of {count}" for stem, count in sets)
        raise InvalidInput(
            f"{folder} holds shards of several sets ({kinds}), and no {index} says which: keep one"
        )
    (stem, count), shards = next(iter(sets.items()))
    missing = [number for number in range(1, count + 1) if number not in shards]
    if missing:
        raise InvalidInput(
            f"{folder} lacks part {missing[0]} of {count} of {stem}: download it again, with all "
            "of its files"
        )
    return list(shards.values())
