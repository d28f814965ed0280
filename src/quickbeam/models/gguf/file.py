"""A `.gguf` file: its metadata, and its tensors as they are stored.

The layout is that of ggml's `gguf.md`, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.native.library import FORMATS
from quickbeam.models.native.quantised import BlockRows, Weight

NUMBERS = "BbHhIif?..QqdX"  # struct's letters by type; 8 is a string, 9 an array
STRING, ARRAY = 8, 9
DIMENSIONS = 4  # most that a tensor has
KINDS = {of.file_type: name for name, of in FORMATS.items() if of.file_type is not None}
WHOLE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
READ = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL and MXFP4"


class StoredTensor(NamedTuple):
    """Where a tensor is. `shape`: outputs before inputs. `offset`, `bytes`: in the file."""

    kind: int
    shape: tuple[int, ...]
    offset: int
    bytes: int


class GgufFile:
    """A mapped file. `metadata`: values by key. `tensors`: by name.

    Raises `InvalidInput`, which names the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} can't be read: {error}") from error
        self.size, self._at = len(self._map), 0
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
        self._bytes = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    def __getitem__(self, name: str) -> Weight:
        """Return a tensor as it is stored: blocks, or numbers. Mapped, not read."""
        of = self.tensors[name]
        data = self._bytes[of.offset : of.offset + of.bytes]
        if of.kind in KINDS:
            return BlockRows(data.view(*of.shape[:-1], -1), KINDS[of.kind])
        if of.offset % 4:
            data = data.clone()
        return data.view(WHOLE[of.kind]).view(of.shape)

    def forget(self) -> None:
        """Let go of what was read into memory; it comes again from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    # --- reading ---

    def _read(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError("it doesn't begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version} of the layout; 2 and 3 are read, little-endian")
        tensors, pairs = self._number("Q"), self._number("Q")
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._number("I"))
        headers = [self._about() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        begin = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in headers:
            self.tensors[name] = self._placed(name, kind, shape, begin + offset)

    def _take(self, size: int) -> bytes:
        if size > self.size - self._at:
            raise ValueError(f"it ends at byte {self.size}, in the middle of its metadata")
        taken = self._map[self._at : self._at + size]
        self._at += size
        return taken

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _strings(self, count: int) -> list[str]:
        texts, whole, at, take = [], self._map, self._at, int.from_bytes
        for _ in range(count):
            begin = at + 8
            at = begin + take(whole[at:begin], "little")
            texts.append(whole[begin:at])
            if at > self.size:
                raise ValueError("a text in its metadata is longer than the file")
        self._at = at
        return [one.decode() for one in texts]

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner == STRING:
                return self._strings(count)
            dtype = np.dtype(NUMBERS[inner]).newbyteorder("<")
            return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        return self._number(NUMBERS[kind])

    def _about(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._number("I")
        if not 0 < dimensions <= DIMENSIONS:
            raise ValueError(f"{name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, self._number("I"), shape, self._number("Q")

    def _placed(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> StoredTensor:
        if kind in WHOLE:
            inputs, bytes_of = 1, WHOLE[kind].itemsize
        elif kind in KINDS:
            inputs, bytes_of = FORMATS[KINDS[kind]].inputs, FORMATS[KINDS[kind]].bytes
        else:
            raise InvalidInput(
                f"{self.path}: the weight {name[:80]} is stored as "
                f"{_kind_name(kind)}, which is not read; read are {READ}: "
                "take a file of the same model in one of these, such as Q4_K_M"
            )
        if shape[-1] % inputs or (len(shape) < 2 and inputs > 1):
            raise ValueError(f"{name[:80]!r} has shape {shape}, not of whole blocks")
        size = math.prod(shape) // inputs * bytes_of
        if size == 0 or offset + size > self.size:
            raise ValueError(
                f"{name[:80]!r} should be at bytes {offset} to {offset + size} of {self.size}"
            )
        return StoredTensor(kind, shape, offset, size)


def _kind_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(kind).name if kind in [*GGMLQuantizationType] else f"type {kind}"
