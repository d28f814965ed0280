"""Reads parts of a file ahead of the code that uses them, into a few buffers.

Reads bypass the page cache (`O_DIRECT`). Where the file system refuses that, they go through it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from quickbeam.errors import QuickbeamError
from quickbeam.models.weights.packed_file import ALIGNED
from quickbeam.models.weights.tensor_files import read_into

BINARY = getattr(os, "O_BINARY", 0)  # Windows would read text otherwise
READERS = 2  # threads: one reads while the other hands over its buffer


def aligned(size: int) -> torch.Tensor:
    """Return `size` uninitialised bytes (uint8) at an address that is a multiple of `ALIGNED`."""
    memory = torch.empty(size + ALIGNED, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNED
    return memory[begin : begin + size]


class File:
    """A file that is read past the page cache, if the file system allows it (`direct`)."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `QuickbeamError` if it can't be read."""
        self.path = path
        try:
            direct = _direct(path)
            self._fd = os.open(path, os.O_RDONLY | BINARY) if direct is None else direct
        except OSError as error:
            raise QuickbeamError(f"{path} can't be read: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._fd)
        self.direct, self._size = direct is not None, os.fstat(self._fd).st_size

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, bytes at an aligned address, from byte `offset` on.

        Bytes beyond the end of the file stay as they are. Raises `QuickbeamError`, which names the
        file, if reading fails or the file is shorter than it was.
        """
        size = min(len(buffer), self._size - offset)
        try:
            # the whole buffer: direct reads are of full pages, also where the file ends before
            done = read_into(buffer.numpy().data, self._fd, offset, size)
        except OSError as error:
            raise QuickbeamError(
                f"reading {self.path} at byte {offset} failed: {error.strerror or error}"
            ) from error
        if done < size:
            raise QuickbeamError(f"{self.path} ends at byte {offset + done}: load the model again")


def _direct(path: Path) -> int | None:
    """Open a file for reads past the page cache; None where that can't be."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        os.preadv(fd, [aligned(ALIGNED).numpy().data], 0)
    except OSError:
        os.close(fd)
        return None
    return fd


class Extent(NamedTuple):
    """Bytes `first` to `last` (excluded) of a file, multiples of `ALIGNED`."""

    first: int
    last: int


class Ring:
    """Reads the same extents in every round, one after the other.

    `begin` a round, `take` each extent, and `release` it before the next. Meanwhile free buffers
    are filled with what follows, the next round included. `parts(i, round)` returns the parts of
    extent i that are needed in a round; None as long as that is not known.
    """

    def __init__(
        self,
        file: File,
        extents: Sequence[Extent],
        buffers: int,
        parts: Callable[[int, int], Sequence[Extent] | None],
    ) -> None:
        self._file, self._extents = file, extents
        self._parts_of = parts
        self.size = buffers * max(extent.last - extent.first for extent in extents)
        self._buffers = list(aligned(self.size).view(buffers, -1))
        self._pool: ThreadPoolExecutor | None = None
        self.round = 0
        self._ended = True  # whether the last round is over
        self._clear()
        self._lock = threading.Lock()
        self._reading = 0  # reads under way, since `_since`
        self._since = self._seconds = 0.0
        self.bytes = 0  # that were read in all
        self.waited = 0.0  # seconds that `take` waited in all

    @property
    def rate(self) -> float:
        """Bytes per second, over the time in which anything was read; 0 before the first read."""
        with self._lock:
            seconds = self._seconds
            if self._reading:
                seconds += time.perf_counter() - self._since
        return self.bytes / seconds if seconds else 0.0

    def begin(self) -> None:
        """Begin a round. Reading starts anew if the one before was broken off or failed."""
        if not self._ended:
            self.close()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, "weights")
        self._ended = False
        self.read_ahead()

    def take(self) -> torch.Tensor:
        """Return the next extent's bytes, once they are there.

        Raises `QuickbeamError`, which names the file, if they can't be read.
        """
        self.read_ahead()
        buffer, future = self._ahead.popleft()
        began = time.perf_counter()
        future.result()
        self.waited += time.perf_counter() - began
        self._taken = buffer
        return buffer

    def release(self) -> None:
        """Free the buffer of the extent that was taken last."""
        self._free.append(self._taken)
        self.read_ahead()

    def end(self) -> None:
        """End a round."""
        self._ended, self.round = True, self.round + 1

    def close(self) -> None:
        """Stop reading, until the next round. Waits for the reads that are under way."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._clear()

    def _clear(self) -> None:
        self._free = deque(self._buffers)
        self._ahead = deque[tuple[torch.Tensor, Future[None]]]()
        self._next = self.round * len(self._extents)  # counted over all rounds

    def read_ahead(self) -> None:
        """Have free buffers filled, as far as it is known with what."""
        assert self._pool is not None
        while self._free:
            number, extent = divmod(self._next, len(self._extents))
            parts = self._parts_of(extent, number)
            if parts is None:
                return
            buffer = self._free.popleft()
            begin = self._extents[extent].first
            future = self._pool.submit(self._read, parts, begin, buffer)
            self._ahead.append((buffer, future))
            self._next += 1

    def _read(self, parts: Sequence[Extent], begin: int, buffer: torch.Tensor) -> None:
        with self._lock:
            if not self._reading:
                self._since = time.perf_counter()
            self._reading += 1
        try:
            for part in parts:
                self._file.read(part.first, buffer[part.first - begin : part.last - begin])
        finally:
            with self._lock:
                self._reading -= 1
                self.bytes += sum(part.last - part.first for part in parts)
                if not self._reading:
                    self._seconds += time.perf_counter() - self._since
