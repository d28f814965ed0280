"""Reads segments of a file over and over in their order, ahead of the code that uses them.

They are read into a few buffers, which are used again and again. Reads bypass the page cache
(`O_DIRECT`). Where the file system refuses that, they go through it, and it is told to drop what
was read.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quickbeam.errors import QuickbeamError

logger = logging.getLogger(__name__)

ALIGNED = 4096  # bytes: addresses, offsets and sizes of direct reads are multiples of it
READERS = 2  # threads: one reads while the other hands over its buffer
STILL = 0.05  # seconds between checks for Ctrl-C during the wait for a read


def aligned(size: int) -> torch.Tensor:
    """Return `size` uninitialised bytes (uint8) at an address that is a multiple of `ALIGNED`."""
    room = torch.empty(size + ALIGNED, dtype=torch.uint8)
    begin = -room.data_ptr() % ALIGNED
    return room[begin : begin + size]


class File:
    """A file that is read past the page cache, if the file system allows it (`direct`)."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `QuickbeamError` if it can't be read."""
        self.path = path
        try:
            self.direct = _direct(path)
            self.fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
            self._seen = self._state()
        except OSError as error:
            raise QuickbeamError(f"{path} can't be read: {error.strerror or error}") from error
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self.fd, fcntl.F_NOCACHE, 1)
        weakref.finalize(self, os.close, self.fd)

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self.fd)
        return state.st_size, state.st_mtime_ns

    def check(self) -> None:
        """Raise `QuickbeamError` if the file's size or time changed since it was opened."""
        if self._state() != self._seen:
            raise QuickbeamError(f"{self.path} was changed while in use: load the model again")

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from byte `offset` on.

        Raises `QuickbeamError`, which names the file, if that fails.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise QuickbeamError(
                    f"reading {self.path} at byte {offset + done} failed: {error.strerror or error}"
                ) from error
            if count == 0:
                raise QuickbeamError(
                    f"{self.path} ends at byte {offset + done}: it was cut while "
                    "in use; load the model again"
                )
            done += count
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, offset, len(buffer), os.POSIX_FADV_DONTNEED)


def _direct(path: Path) -> bool:
    """Whether the file system takes reads past the page cache; a warning is logged if not."""
    if not hasattr(os, "O_DIRECT"):
        return False
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [aligned(ALIGNED).numpy().data], 0)
    except OSError as error:
        if error.errno in _REFUSED:
            logger.warning(
                "%s can't be read past the page cache (%s): it is read through it",
                path,
                error.strerror,
            )
            return False
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    return True


_REFUSED = (22, 95)  # EINVAL, EOPNOTSUPP


class _Work:
    """What the reading threads share with the stream.

    The threads hold no reference to the stream itself, so that it can be freed.
    """

    def __init__(
        self, file: File, segments: Sequence[tuple[int, int]], buffers: Sequence[torch.Tensor]
    ) -> None:
        self.file, self.segments, self.buffers = file, segments, buffers
        self.changed = threading.Condition()
        # A turn is a segment's number plus the number of all segments for each round before.
        self.next = self.released = 0
        self.ready = set[int]()
        self.failed: Exception | None = None
        self.stopped = False
        self.reading, self.since, self.seconds, self.bytes = 0, 0.0, 0.0, 0

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def run(self) -> None:
        while True:
            with self.changed:
                while not self.stopped and (
                    self.failed is not None or self.next >= self.released + len(self.buffers)
                ):
                    self.changed.wait()
                if self.stopped:
                    return
                turn, self.next = self.next, self.next + 1
                if not self.reading:
                    self.since = time.perf_counter()
                self.reading += 1
            offset, size = self.segments[turn % len(self.segments)]
            failed: Exception | None = None
            try:
                self.file.read(offset, self.buffers[turn % len(self.buffers)][:size].numpy().data)
            except Exception as error:  # `take` raises it in the thread that waits
                failed = error
            with self.changed:
                self.reading -= 1
                if not self.reading:
                    self.seconds += time.perf_counter() - self.since
                self.bytes += size
                if failed is None:
                    self.ready.add(turn)
                else:
                    self.failed = self.failed or failed
                self.changed.notify_all()


class WeightStream:
    """Reads the segments of a file in their order, again and again.

    `take` each segment in its order, and `release` it before the next. Meanwhile free buffers are
    filled with the segments that follow, those of the next round included.

    `segments`: offset and size in the file, multiples of `ALIGNED`. `buffers`: how many there are,
    each as large as the largest segment. `begin` starts the threads, and starts them anew after
    `close` and in a forked process.
    """

    def __init__(self, path: Path, segments: Sequence[tuple[int, int]], buffers: int) -> None:
        self.file, self._segments = File(path), list(segments)
        most = max(size for _, size in segments)
        memory = aligned(buffers * most)
        self._room = [memory[i * most : (i + 1) * most] for i in range(buffers)]
        self._work: _Work | None = None
        self._threads: list[threading.Thread] = []
        self._stop: Any = None
        self._pid, self._taken = 0, 0
        self._seconds, self._bytes = 0.0, 0
        self.waited = 0.0  # seconds that `take` waited in all

    @property
    def bytes(self) -> int:
        """Bytes of all segments together."""
        return sum(size for _, size in self._segments)

    @property
    def buffer_bytes(self) -> int:
        return sum(room.numel() for room in self._room)

    @property
    def rate(self) -> float:
        """Bytes per second, over the time in which anything was read; 0 before the first read."""
        work, done, seconds = self._work, self._bytes, self._seconds
        if work is not None:
            with work.changed:
                done += work.bytes
                seconds += work.seconds + (
                    time.perf_counter() - work.since if work.reading else 0.0
                )
        return done / seconds if seconds else 0.0

    def begin(self) -> None:
        """Begin a pass: the first segment is next.

        Reading starts anew if the pass before was broken off or failed. Raises `QuickbeamError` if
        the file changed.
        """
        self.file.check()
        work = self._work
        broken_off = work is not None and (
            self._taken % len(self._segments) > 0 or work.released != self._taken
        )
        if work is None or self._pid != os.getpid() or work.failed is not None or broken_off:
            self.close()
            self._start()

    def end(self) -> None:
        """End a pass. Raises `QuickbeamError` if the file changed meanwhile."""
        self.file.check()

    def take(self, number: int) -> int:
        """Return the address of a segment's bytes, once they are there.

        `number`: of the segment, which must be the next in order. Raises `QuickbeamError`, which
        names the file, if the bytes can't be read.
        """
        work, turn = self._work, self._taken
        assert work is not None and turn % len(self._segments) == number
        began = time.perf_counter()
        with work.changed:
            while turn not in work.ready:
                if work.failed is not None:
                    raise QuickbeamError(str(work.failed)) from work.failed
                work.changed.wait(STILL)
            # first, so that `begin` sees that a pass was broken off here
            self._taken = turn + 1
            work.ready.discard(turn)
        self.waited += time.perf_counter() - began
        return int(self._room[turn % len(self._room)].data_ptr())

    def release(self) -> None:
        """Free the buffer of the segment that was taken last."""
        assert self._work is not None
        with self._work.changed:
            self._work.released = self._taken
            self._work.changed.notify_all()

    def close(self) -> None:
        """Stop reading. Waits some milliseconds for the reads that are under way."""
        work, self._work = self._work, None
        if work is None or self._pid != os.getpid():
            return
        self._stop()
        for thread in self._threads:
            thread.join()
        self._bytes, self._seconds = self._bytes + work.bytes, self._seconds + work.seconds

    def _start(self) -> None:
        self._work, self._pid, self._taken = (
            _Work(self.file, self._segments, self._room),
            os.getpid(),
            0,
        )
        self._stop = weakref.finalize(self, self._work.stop)
        self._threads = [
            threading.Thread(target=self._work.run, name="weights", daemon=True)
            for _ in range(READERS)
        ]
        for thread in self._threads:
            thread.start()
