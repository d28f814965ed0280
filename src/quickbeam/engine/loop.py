"""The engine's thread. It owns the engine and its loop; clients put requests into its queue.

Nothing is locked: whatever touches the engine is a command in the queue, and runs between two
steps. After each step the thread notifies those who wait for an answer.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol, TypeVar

from quickbeam.engine.engine import Engine
from quickbeam.engine.sequence import SequenceState
from quickbeam.errors import QuickbeamError
from quickbeam.machine import fulfil

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], object]


class Client(Protocol):
    """Whoever waits for answers."""

    def notify(self, sequences: Sequence[SequenceState]) -> None:
        """Note that these sequences may have changed.

        Called on the engine's thread, so it must not wait for anything.
        """


def refuse_copy(loaded: object) -> NoReturn:
    """Raise `TypeError`: the `__reduce__` of what can't be pickled or copied, as a loaded model."""
    raise TypeError(
        f"{type(loaded).__name__}: a loaded model can't be pickled or copied, because its weights "
        "and its thread belong to this process; load it in each process, or start "
        "`quickbeam serve` and ask it from all of them"
    )


class EngineLoop:
    """What the thread runs: commands of clients, then a step, over and over.

    It has no reference to `EngineThread`, so that the thread of one that is forgotten can end.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox: SimpleQueue[Command | None] = SimpleQueue()  # None ends the thread
        self.clients: dict[SequenceState, Sequence[Client]] = {}
        self.began: float | None = None  # when its latest work began; None while there is no work
        self.error: BaseException | None = None  # what ended the thread, if nobody asked for it

    def run(self) -> None:
        """Run until the queue says that this is the end."""
        try:
            while self._run_commands():
                self._step()
        except BaseException as error:
            self.error = error
            for sequence in self.clients:
                sequence.end("error", error)
            self._notify(list(self.clients))
            raise
        finally:
            self.began = None

    def _run_commands(self) -> bool:
        """Run the commands in the queue, and wait for one if there is nothing else to do.

        Returns False at the end.
        """
        while True:
            if not self.engine.busy:
                self.began = None
                while self.inbox.empty() and self.engine.use_idle_time():
                    pass
            try:
                command = self.inbox.get(block=not self.engine.busy)
            except Empty:
                return True
            self.began = time.monotonic()
            if command is None:
                return False
            command()
            del command  # it may keep a model alive while the thread waits

    def _step(self) -> None:
        self.began = time.monotonic()
        try:
            self.engine.step()
        except BaseException as error:  # of an observer, or each sequence that it ended holds it
            logger.info("a step failed: %s", error)
        self._notify([*self.engine.finished, *self.engine.scheduler.active])

    def start(self, sequence: SequenceState, clients: Sequence[Client]) -> None:
        self.clients[sequence] = clients
        self.engine.start(sequence)
        if sequence.over:
            self._notify([sequence])

    def cancel(self, sequence: SequenceState) -> None:
        self.engine.cancel(sequence)
        self._notify([sequence])

    def close(self) -> None:
        self.engine.close()
        self._notify(list(self.clients))

    def _notify(self, sequences: Sequence[SequenceState]) -> None:
        changed: dict[Client, list[SequenceState]] = {}
        for sequence in sequences:
            for client in self.clients.get(sequence, ()):
                changed.setdefault(client, []).append(sequence)
            if sequence.over:
                self.clients.pop(sequence, None)
        for client, sequences_of_client in changed.items():
            try:
                client.notify(sequences_of_client)
            except Exception:
                logger.exception("a client can't be notified")


class EngineThread:
    """The clients' side of the engine's thread. All methods may be called from any thread.

    The thread starts with the first request. It ends with `end`, when this object is forgotten, and
    when the interpreter exits. After `end` the next request starts it again, unless it is `closed`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self._loop = EngineLoop(engine)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # held while the thread starts or ends
        # an object that dies may be collected on any thread, this one included: nothing waits
        weakref.finalize(self, self._loop.inbox.put, None).atexit = False

    __reduce__ = refuse_copy

    def submit(self, sequence: SequenceState, clients: Sequence[Client]) -> None:
        """Put a request's sequence into the queue. `clients` are notified of what becomes of it.

        Raises `QuickbeamError` as `call` does.
        """
        loop = self._loop  # a command holds no `self`, whose thread ends when it is forgotten
        self._put(lambda: loop.start(sequence, clients))

    def cancel(self, sequence: SequenceState) -> None:
        """End a sequence as `interrupted` after the step that is under way, unless it is over.

        Never waits, so that finalizers may call it.
        """
        loop = self._loop
        loop.inbox.put(lambda: loop.cancel(sequence))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its result.

        Raises what it raises, and `QuickbeamError` if this is the engine's thread itself, if the
        thread has failed or was left behind by a fork, or after `close`.
        """
        self.check()
        result = Future[T]()
        self._put(lambda: fulfil(result, function))
        return result.result()

    def check(self) -> None:
        """Raise `QuickbeamError` where waiting for the thread would never end; see `call`."""
        if self.inside:
            raise QuickbeamError(
                "a step of this model is under way: an observer can't ask the same model for "
                "more; keep what it is told, and ask after the answer"
            )
        dead = self._thread is not None and not self._thread.is_alive()
        if dead or self._loop.error is not None:
            raise QuickbeamError(
                "the engine's thread has ended, by a fault of quickbeam's or because this process "
                "was forked (multiprocessing: start it with 'spawn'): load the model again"
            ) from self._loop.error

    @property
    def inside(self) -> bool:
        """Whether this is the engine's own thread, as in an observer."""
        return self._thread is threading.current_thread()

    @property
    def alive(self) -> bool:
        """False if the thread was ended by an error of its own."""
        return self._loop.error is None

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the thread began its latest step; 0 while there is nothing to do."""
        began = self._loop.began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Do as `end` does, and take no more requests."""
        self.closed = True
        self.end()

    def end(self) -> None:
        """End all answers and the thread, and give back what both hold. An observer must not."""
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                self._loop.inbox.put(self._loop.close)
                self._loop.inbox.put(None)
                self._thread.join()
            else:
                self.engine.close()
            self._thread = None

    def _put(self, command: Command) -> None:
        self.check()
        with self._starting:
            if self.closed:
                raise QuickbeamError("this model is closed: load it again")
            if self._thread is None:
                thread = threading.Thread(
                    target=self._loop.run, name="quickbeam-engine", daemon=True
                )
                thread.start()
                _inboxes[thread] = self._loop.inbox
                self._thread = thread  # alive by now, or `check` would take it for an ended one
            self._loop.inbox.put(command)


# of threads that run, those of forgotten models too, which may be about to free them
_inboxes = weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Command | None]]()


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter takes itself apart under them."""
    for thread, inbox in list(_inboxes.items()):
        inbox.put(None)
        thread.join()
