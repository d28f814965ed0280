"""A model's packed weights in one file, cut into segments that are read one after the other.

The file is a safetensors file whose data begin at byte `ALIGNED`. It has two tensors. `weights`
holds the segments in the order of a pass, each padded to a multiple of `ALIGNED` bytes, so that
they can be read past the page cache. `embedding` holds a bfloat16 row for each token. This module
knows nothing of layers.
"""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quickbeam.cache import Progress, alone, sweep
from quickbeam.errors import QuickbeamError
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import BLOCK
from quickbeam.models.native.quantised import BFLOAT16, Packer

ALIGNED = 4096  # bytes: reads past the page cache begin and end at multiples of it
PIECE = 16 << 20  # most bytes of a segment
PARTS = 16  # fewest segments of a small model, as far as its weights can be cut
SPARE = 64 << 20  # bytes that conversion leaves free on the disk
ROWS = 4096  # rows of the embedding that are kept in memory
READERS = 8  # rows of the embedding that are read at once

# Gives rows [first, last) of a weight, `[rows, inputs]`, as a list: of a gated weight the gates'
# rows and the other half's, otherwise one tensor.
Rows = Callable[[int, int], list[torch.Tensor]]


class WeightShape(NamedTuple):
    """The shape of a packed weight.

    `rows`: its outputs, or of a gated weight the outputs of each half. `name`: the format of its
    numbers.
    """

    inputs: int
    rows: int
    gated: bool
    name: str

    def block(self, kernels: Kernels) -> int:
        """Return the bytes of a block of 16 outputs."""
        return (
            2 * BLOCK * self.inputs
            if self.name == BFLOAT16
            else int(kernels.block_bytes(library.FORMATS.index(self.name), self.inputs))
        )

    @property
    def step(self) -> int:
        """How many blocks stay together: 2 of a gated weight, else 1."""
        return 2 if self.gated else 1

    @property
    def blocks(self) -> int:
        return -(-self.rows // BLOCK) * self.step


class Part(NamedTuple):
    """Some blocks of a weight in a segment.

    `weight`: its number. `first`, `blocks`: the first block, and how many. `offset`: bytes from the
    segment's beginning.
    """

    weight: int
    first: int
    blocks: int
    offset: int


class Segment(NamedTuple):
    """Bytes that are read at once.

    `offset`: bytes from the beginning of the weights. `size`: bytes, the padding included.
    """

    offset: int
    size: int
    parts: tuple[Part, ...]


class Plan:
    """How the weights of a model are cut into segments.

    `weights`: in the order of a pass. `embedding`: tokens and width.
    """

    def __init__(
        self, kernels: Kernels, weights: Sequence[WeightShape], embedding: tuple[int, int]
    ) -> None:
        self.kernels, self.weights, self.embedding = kernels, list(weights), embedding
        self.blocks = [weight.block(kernels) for weight in weights]
        self.bytes = sum(
            block * weight.blocks for block, weight in zip(self.blocks, weights, strict=True)
        )
        self.piece = padded(
            min(
                PIECE,
                max(
                    -(-self.bytes // PARTS),
                    max(b * w.step for b, w in zip(self.blocks, weights, strict=True)),
                ),
            )
        )
        self.segments = list(self._cut())
        self.size = self.segments[-1].offset + self.segments[-1].size  # of all segments

    @property
    def embedding_bytes(self) -> int:
        return 2 * self.embedding[0] * self.embedding[1]

    def _cut(self) -> Iterator[Segment]:
        parts, size, offset = list[Part](), 0, 0
        for number, (weight, block) in enumerate(zip(self.weights, self.blocks, strict=True)):
            first = 0
            while first < weight.blocks:
                count = min(
                    (self.piece - size) // (block * weight.step) * weight.step,
                    weight.blocks - first,
                )
                if not count:
                    yield Segment(offset, padded(size), tuple(parts))
                    offset, parts, size = offset + padded(size), [], 0
                    continue
                parts.append(Part(number, first, count, size))
                size, first = size + count * block, first + count
        yield Segment(offset, padded(size), tuple(parts))

    def pack(self, segment: Segment, rows: Sequence[Rows]) -> torch.Tensor:
        """Return the bytes of a segment, `[size]` uint8.

        `rows`: what gives the rows of each weight. Raises `InvalidInput` for weights that can't be
        quantised.
        """
        data = torch.zeros(segment.size, dtype=torch.uint8)
        for part in segment.parts:
            weight, block = self.weights[part.weight], self.blocks[part.weight]
            first, last = (
                part.first // weight.step * BLOCK,
                (part.first + part.blocks) // weight.step * BLOCK,
            )
            found = rows[part.weight](first, min(last, weight.rows))
            place = data[part.offset : part.offset + part.blocks * block]
            packer = Packer(self.kernels, weight.name)
            packer.pack(found, None, weight.gated, place.view(packer.dtype))
        return data

    @property
    def header(self) -> bytes:
        """The beginning of the file: safetensors' header, with spaces up to byte `ALIGNED`."""
        end = self.size + self.embedding_bytes
        fields = {
            "weights": {"dtype": "U8", "shape": [self.size], "data_offsets": [0, self.size]},
            "embedding": {
                "dtype": "BF16",
                "shape": list(self.embedding),
                "data_offsets": [self.size, end],
            },
        }
        text = json.dumps(fields).encode()
        return (ALIGNED - 8).to_bytes(8, "little") + text.ljust(ALIGNED - 8)

    @property
    def file_bytes(self) -> int:
        return ALIGNED + self.size + self.embedding_bytes


def padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def write(
    path: Path, plan: Plan, rows: Sequence[Rows], embedding: Rows, report: Callable[[float], None]
) -> None:
    """Write the file, segment by segment.

    `report(done)` is called with the share that is written, from 0 to 1. The file appears in one
    rename, when it is complete. Raises `QuickbeamError` if the disk has no room for it or refuses
    it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    needed, folder = plan.file_bytes, path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed + SPARE:
            raise QuickbeamError(
                f"weights that are read while computing take {needed / 1e6:.0f} MB in {folder}, "
                f"which has {free / 1e6:.0f} MB free; "
                "free some space there, or set QUICKBEAM_CACHE to a folder on another disk"
            )
        with open(part, "wb") as handle:
            handle.write(plan.header)
            for segment in plan.segments:
                report(segment.offset / (needed - ALIGNED))
                handle.write(_bytes(plan.pack(segment, rows)))
            tokens, width = plan.embedding
            some = max(1, PIECE // (2 * width))
            for first in range(0, tokens, some):
                report((plan.size + 2 * width * first) / (needed - ALIGNED))
                (found,) = embedding(first, min(first + some, tokens))
                handle.write(_bytes(found.to(torch.bfloat16).contiguous()))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    except OSError as error:
        raise QuickbeamError(
            f"weights that are read while computing ({needed / 1e6:.0f} MB) can't be kept in "
            f"{folder}: {error.strerror or error}; "
            "free some space there, or set QUICKBEAM_CACHE to a folder on another disk"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy().data


def make(
    path: Path, plan: Plan, rows: Sequence[Rows], embedding: Rows, progress: Progress, said: str
) -> None:
    """`write` the file unless it is there, one process at a time.

    What an interrupted process left is deleted, and so are files of earlier layouts. `said`: words
    for the progress. Raises as `write` does.
    """
    if is_whole(path, plan):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(
            path.with_name(f".{path.name}.lock"),
            lambda: progress("waiting for another process that packs the same weights", None),
        ):
            if is_whole(path, plan):
                return
            sweep(path)
            write(path, plan, rows, embedding, lambda done: progress(said, done))
            for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*{path.suffix}"):
                if other != path:  # of an earlier layout
                    other.unlink(missing_ok=True)
    except OSError as error:
        raise QuickbeamError(
            f"weights that are read while computing can't be kept in {path.parent}: "
            f"{error.strerror or error}; set QUICKBEAM_CACHE to a folder that you can write to"
        ) from error


def is_whole(path: Path, plan: Plan) -> bool:
    """Whether the file is there, with the header and the size that the plan says.

    Raises `QuickbeamError` if it can't be read.
    """
    try:
        with open(path, "rb") as handle:
            return (
                handle.read(ALIGNED) == plan.header
                and os.fstat(handle.fileno()).st_size == plan.file_bytes
            )
    except FileNotFoundError:
        return False
    except OSError as error:
        raise QuickbeamError(
            f"{path} can't be read: {error.strerror or error}; delete it to have it made again"
        ) from error


class EmbeddingRows:
    """The embedding in the file, read by row. About `ROWS` rows are kept in memory."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.tokens, self.width = plan.embedding
        self._path, self._begin = path, ALIGNED + plan.size
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._kept: dict[int, bytes] = {}

    def rows(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the rows of `tokens`, `[n, width]` bfloat16.

        Raises `QuickbeamError`, which names the file, if it can't be read.
        """
        missing = sorted({token for token in tokens if token not in self._kept})
        if len(missing) + len(self._kept) > ROWS:
            self._kept.clear()
            missing = sorted(set(tokens))
        if len(missing) < READERS:
            found = [self._row(token) for token in missing]
        else:
            with ThreadPoolExecutor(READERS) as pool:
                found = list(pool.map(self._row, missing))
        self._kept.update(zip(missing, found, strict=True))
        return self._tensor(b"".join(self._kept[token] for token in tokens))

    def all(self) -> torch.Tensor:
        """Return all rows, `[tokens, width]` bfloat16. Raises as `rows` does."""
        return torch.cat(
            [
                self._tensor(self._read(first, min(ROWS, self.tokens - first)))
                for first in range(0, self.tokens, ROWS)
            ]
        )

    def _tensor(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, self.width)

    def _row(self, token: int) -> bytes:
        return self._read(token, 1)

    def _read(self, token: int, count: int) -> bytes:
        size = 2 * self.width
        try:
            found = os.pread(self._fd, count * size, self._begin + token * size)
        except OSError as error:
            raise QuickbeamError(
                f"{self._path} can't be read: {error.strerror or error}"
            ) from error
        if len(found) < count * size:
            raise QuickbeamError(
                f"{self._path} ends before the embedding of token {token}: it was "
                "cut while in use; load the model again"
            )
        return found
