"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A fair lock.

    `threading.Lock` may be taken again by the thread that just released it, before a waiting thread
    has woken up. The thread that holds this lock may enter it again.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._queue: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._guard:
            if self._owner == me or (self._owner is None and not self._queue):
                self._owner, self._depth = me, self._depth + 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # an interrupt while waiting
            with self._guard:
                waiting = (me, turn) in self._queue
                if waiting:
                    self._queue.remove((me, turn))
            if not waiting:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._queue:
                self._owner, turn = self._queue.popleft()
                self._depth = 1
                turn.release()

    def take_if_free(self) -> bool:
        """Take the lock if no thread holds it, this one included. Returns whether it was taken.

        It never waits, so finalizers, which may run anywhere, can call it.
        """
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._owner is not None or self._queue:
                return False
            self._owner, self._depth = threading.get_ident(), 1
            return True
        finally:
            self._guard.release()

    def leave(self) -> None:
        """Release the lock after `take_if_free`."""
        self.__exit__()
