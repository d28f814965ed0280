"""Streams: answers piece by piece, and answers run to their ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from quickbeam.engine.loop import Client, EngineThread
from quickbeam.engine.result import Completion, Logprob
from quickbeam.engine.sequence import SequenceState, Times

T = TypeVar("T")


class Delta(NamedTuple):
    """The new part of an answer."""

    text: str  # text that became certain; it may lag behind the tokens
    token_ids: list[int]
    logprobs: list[Logprob]  # one for each token if they are asked for, else none
    steps: list[dict[str, Any]]  # records as in a trace, if one is kept

    def plus(self, later: Delta) -> Delta:
        """Return this part and a later one as one."""
        return Delta(
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            steps=self.steps + later.steps,
        )


class StreamEvents:
    """Wakes the thread that waits for a stream."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self.ended = threading.Event()

    def notify(self, sequences: Sequence[SequenceState]) -> None:
        if sequences[0].over:
            self.ended.set()
        self.changed.set()


class Stream(Iterator[str]):
    """The pieces of an answer's text as they come.

    The engine's thread makes the answer, whether or not anybody reads it. Any number of streams may
    be open at once, in any threads. A stream that is dropped ends its answer.
    """

    def __init__(
        self,
        thread: EngineThread,
        sequence: SequenceState,
        model: str,
        method: str,
        client: Client | None = None,
    ) -> None:
        self._thread = thread
        self.sequence = sequence
        self._model = model
        self._method = method
        self._returned = 0  # how many tokens `new` has returned
        self._events = StreamEvents()
        # before the request is put into the queue, so that an interrupt in between ends it
        weakref.finalize(self, thread.cancel, sequence).atexit = False
        thread.submit(sequence, [self._events] if client is None else [self._events, client])

    def __next__(self) -> str:
        if piece := self._wait_for(self.sequence.output.take):
            return piece
        raise StopIteration

    def wait(self, tokens: int) -> None:
        """Wait until the answer has so many tokens, or is over. Raises the error that ended it."""
        self._wait_for(lambda: len(self.token_ids) >= tokens)

    def _wait_for(self, look: Callable[[], T]) -> T | None:
        """Return the first true result of `look`; None at the end. Raises the answer's error."""
        while True:
            self._events.changed.clear()
            over = self._events.ended.is_set()  # before the look: there may be more until then
            if result := look():
                return result
            if over:
                if self.error is not None:
                    raise self.error
                return None
            self._thread.check()
            self._events.changed.wait()

    def result(self) -> Completion:
        """Wait for the whole answer and return it. Raises the error that ended it."""
        if not self._events.ended.is_set():
            self._thread.check()
            self._events.ended.wait()
        if self.error is not None:
            raise self.error
        return self.completion

    def close(self) -> None:
        """Stop here. The answer ends as `interrupted` unless it had ended.

        Waits for the step that is under way. In an observer it returns at once.
        """
        self.cancel()
        if not self._thread.inside:
            self._events.ended.wait()

    def cancel(self) -> None:
        """Do as `close` does, but never wait."""
        self._thread.cancel(self.sequence)

    def new(self) -> Delta:
        """Return the new part of the answer since the last call, without waiting."""
        sequence = self.sequence
        start = self._returned
        text = sequence.output.take()
        ids = sequence.output.token_ids[start:]
        self._returned += len(ids)
        logprobs = (sequence.logprobs or [])[start : self._returned]
        return Delta(text, ids, logprobs, steps=[])

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids of the answer so far."""
        return self.sequence.output.token_ids

    @property
    def times(self) -> Times:
        """When the request arrived, was taken up, and had its first token."""
        return self.sequence.times

    @property
    def error(self) -> BaseException | None:
        """The error that ended the answer, or None."""
        return self.sequence.error

    @property
    def completion(self) -> Completion:
        """The answer so far. Its `finish_reason` is `interrupted` unless it came to its end."""
        sequence = self.sequence
        output = sequence.output
        return Completion(
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason or "interrupted",
            statistics=sequence.statistics,
            model=self._model,
            method=self._method,
            logprobs=sequence.logprobs,
            seed=None if sequence.params.greedy else sequence.seed,
            prompt_logprobs=sequence.prompt_logprobs,
            stop_string=output.stop_string,
        )
