"""A `.gguf` file: its metadata, and its tensors as they are stored.

The layout is that of ggml's `gguf.md`, versions 2 and 3, little-endian. A model may be split over
several files, of which the first holds the metadata.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.native.library import FORMATS, Kernels
from quickbeam.models.native.quantised import BlockRows, Weight, dense_rows

LETTERS = "BbHhIif?..QqdX"  # struct's letters by type; 8 is a string, 9 an array
STRING, ARRAY = 8, 9
DIMENSIONS = 4  # most that a tensor has
BLOCKS = {  # formats of blocks
    block_format.file_type: name
    for name, block_format in FORMATS.items()
    if block_format.file_type is not None
}
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
READ = (
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, "
    "IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0 and MXFP4"
)
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")  # the name of one of several files, without .gguf


class StoredTensor(NamedTuple):
    """Where a tensor is.

    `shape`: outputs before inputs. `offset`, `bytes`: in the file. `bytes` is 0 for a format that
    is not read.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int
    bytes: int


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model by the first one's name: `NAME-00001-of-00003.gguf`, or `path`.

    Raises `InvalidInput` for another file than the first, and for files that are missing.
    """
    match = PART.fullmatch(path.stem)
    if match is None or int(match[3]) < 2:
        return [path]
    name = match[1]
    number, count = int(match[2]), int(match[3])
    paths = [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if number != 1:
        raise InvalidInput(f"{path} is part {number} of {count}: give {paths[0].name}")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise InvalidInput(
            f"{path} is one of {count} files of a model, and beside it there is no "
            f"{', '.join(missing[:4])}: download all of them into one folder"
        )
    return paths


class GgufFile:
    """A mapped file, or several. `metadata`: values by key. `tensors`: by name.

    Raises `InvalidInput`, which names the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first, *others = (_Part(part) for part in parts_of(path))
        self.metadata, self.tensors = first.metadata, first.tensors
        self._parts = dict.fromkeys(first.tensors, first)
        count, number = self._count("split.count"), self._count("split.no")
        if number > 0:
            raise InvalidInput(
                f"{path} is part {number + 1} of {count} files of a model by its metadata: give "
                "the first one, and the files the names that they had"
            )
        if count > 1 and len(others) + 1 != count:
            raise InvalidInput(
                f"{path} is the first of {count} files of a model: give them their names again, "
                f"such as {path.stem}-00001-of-{count:05}.gguf, in one folder"
            )
        for part in others:
            repeated = part.tensors.keys() & self.tensors.keys()
            if repeated:
                raise InvalidInput(
                    f"{part.path} holds {min(repeated)} once more: download it again"
                )
            self.tensors |= part.tensors
            self._parts |= dict.fromkeys(part.tensors, part)

    def _count(self, key: str) -> int:
        """Return a whole number of the metadata; 0 where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) else 0

    def __getitem__(self, name: str) -> Weight:
        """Return a tensor as it is stored: in blocks, or dense. It is mapped, not read."""
        self.refuse_formats([name])
        stored = self.tensors[name]
        data = self._parts[name].bytes[stored.offset : stored.offset + stored.bytes]
        if stored.kind in BLOCKS:
            return BlockRows(data.view(*stored.shape[:-1], -1), BLOCKS[stored.kind])
        if stored.offset % 4:
            data = data.clone()
        return data.view(DENSE[stored.kind]).view(stored.shape)

    def forget(self) -> None:
        """Drop the pages that were read into memory (`MADV_DONTNEED`)."""
        for part in set(self._parts.values()):
            part.forget()

    def refuse_formats(self, names: Iterable[str]) -> None:
        """Raise `InvalidInput` for tensors in a format that is not read."""
        for name in names:
            kind = self.tensors[name].kind
            if kind not in BLOCKS and kind not in DENSE:
                raise InvalidInput(
                    f"{self.path}: the weight {name[:80]} is stored as "
                    f"{kind_name(kind)}, which is not read; read are {READ}: "
                    "take a file of the same model in one of these, such as Q4_K_M or Q3_K_M"
                )


class _Part:
    """A mapped file. Raises `InvalidInput`, which names the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} can't be read: {error}") from error
        self.size = len(self._map)
        self._position = 0  # of the next byte to read
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read()
        except InvalidInput:
            raise
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise InvalidInput(
                f"{path} is no whole .gguf file: {error} (download it again, or take another)"
            ) from error
        self.bytes = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    def forget(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    # --- reading ---

    def _read(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError("it doesn't begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            if version in (2 << 24, 3 << 24):
                raise InvalidInput(
                    f"{self.path} is big-endian, and little-endian files are read: take such a "
                    "file, or convert it by llama.cpp's gguf_convert_endian.py"
                )
            raise ValueError(f"version {version} of the layout; 2 and 3 are read")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._number("I"))
        headers = [self._header() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment}, which is no power of 2")
        first = -(-self._position // alignment) * alignment
        for name, kind, shape, offset in headers:
            self.tensors[name] = self._located(name, kind, shape, first + offset)

    def _take(self, size: int) -> bytes:
        if size > self.size - self._position:
            raise ValueError(f"it ends at byte {self.size}, in the middle of its metadata")
        self._position += size
        return self._map[self._position - size : self._position]

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _strings(self, count: int) -> list[str]:
        # a vocabulary has 200,000 of them, so this doesn't call `_string`
        texts = []
        data, position = self._map, self._position
        for _ in range(count):
            first = position + 8
            position = first + int.from_bytes(data[position:first], "little")
            texts.append(data[first:position])
            if position > self.size:
                raise ValueError("a text in its metadata is longer than the file")
        self._position = position
        return [text.decode() for text in texts]

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner == STRING:
                return self._strings(count)
            dtype = np.dtype(LETTERS[inner]).newbyteorder("<")
            return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        return self._number(LETTERS[kind])

    def _header(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._number("I")
        if not 0 < dimensions <= DIMENSIONS:
            raise ValueError(f"{name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, self._number("I"), shape, self._number("Q")

    def _located(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> StoredTensor:
        if kind in DENSE:
            inputs, block_bytes = 1, DENSE[kind].itemsize
        elif kind in BLOCKS:
            block_format = FORMATS[BLOCKS[kind]]
            inputs, block_bytes = block_format.inputs, block_format.bytes
        else:
            return StoredTensor(kind, shape, offset, 0)
        if shape[-1] % inputs or (len(shape) < 2 and inputs > 1):
            raise ValueError(f"{name[:80]!r} has shape {shape}, not of whole blocks")
        size = math.prod(shape) // inputs * block_bytes
        if size == 0 or offset + size > self.size:
            raise ValueError(
                f"{name[:80]!r} should be at bytes {offset} to {offset + size} of {self.size}"
            )
        return StoredTensor(kind, shape, offset, size)


def widened(weight: Weight, kernels: Kernels | None) -> torch.Tensor:
    """Return a weight's numbers in float32.

    Blocks are widened by the kernels, or without them by the package `gguf`, to the same bits.
    """
    if isinstance(weight, torch.Tensor):
        return weight.float()
    if kernels is not None:
        return dense_rows(kernels, weight)
    from gguf import GGMLQuantizationType, dequantize

    file_type = FORMATS[weight.name].file_type
    assert file_type is not None
    return torch.from_numpy(dequantize(weight.data.numpy(), GGMLQuantizationType(file_type)))


def kind_name(kind: int) -> str:
    """Return what the package `gguf` calls a format."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(kind).name if kind in [*GGMLQuantizationType] else f"type {kind}"
