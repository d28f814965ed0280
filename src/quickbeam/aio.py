"""The Python interface for asyncio: answers as asynchronous iterators, any number side by side."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from typing import Any

from typing_extensions import Self

from quickbeam.engine.loop import EngineThread, refuse_copy
from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import SequenceState, Times
from quickbeam.engine.stream import Delta, Stream
from quickbeam.engine.trace import StepRecord, Trace
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM, Observer
from quickbeam.models.text.prompts import Conversation, Prompt
from quickbeam.params import SamplingParams

NOTHING = Delta("", [], [], [])


class Closed(QuickbeamError):
    """An `AsyncLLM` that begins no more answers: it was closed, or its thread has ended."""


class AsyncStream(AsyncIterator[str]):
    """The pieces of an answer's text as they come, for `async for`; `deltas` gives the tokens too.

    Dropping the stream, as when the loop is left early, ends the answer; so does `close`. The
    answer's memory is freed after the next step.
    """

    def __init__(self, stream: Stream, trace: Trace | None, text: Callable[[int], str]) -> None:
        self._stream = stream
        self._trace = trace
        self._text = text
        self._begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._delta = NOTHING
        self._over = False
        self._closed = False
        self._on_begun: Callable[[], None] = lambda: None
        self._on_over: Callable[[Stream], None] = lambda _: None

    async def __anext__(self) -> str:
        while (delta := await self._next()) is not None:
            if delta.text:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what is new in the answer: a step, or several where they come faster."""
        while (delta := await self._next()) is not None:
            yield delta

    async def _next(self) -> Delta | None:
        while not any(self._delta):
            if self._over and self._stream.error is not None:
                raise self._stream.error
            if self._over or self._closed:
                return None
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        delta = self._delta
        self._delta = NOTHING
        return delta

    def update(self, over: bool) -> None:
        """Collect the new part of the answer, and wake the tasks that wait for it.

        `over`: whether the answer has ended.
        """
        if self._over:
            return
        if not self._begun.is_set() and (over or self._stream.times.began is not None):
            self._begun.set()
            self._on_begun()
        delta = self._stream.new()
        if self._trace is not None:
            delta = delta._replace(steps=self._trace.take(self._text))
        self._delta = self._delta.plus(delta)
        self._over = over
        if over:
            self._on_over(self._stream)
        self._changed.set()

    def watch(self, begun: Callable[[], None], over: Callable[[Stream], None]) -> None:
        """Set callbacks for when the engine takes the answer up, and for when the answer ends.

        Each callback is called once, on the event loop. Call `watch` right after the stream was
        begun, and keep a reference to the stream, which holds the callbacks.
        """
        self._on_begun = begun
        self._on_over = over

    async def begun(self) -> None:
        """Wait until the engine has taken the answer up. Raises the error that ended the answer."""
        await self._begun.wait()
        if self._over and self._stream.error is not None:
            raise self._stream.error

    def close(self) -> None:
        """Stop here. The answer ends as `interrupted` unless it had ended."""
        self._stream.cancel()
        self._closed = True
        self._changed.set()

    async def aclose(self) -> None:
        self.close()

    @property
    def times(self) -> Times:
        """When the request arrived, was taken up, and had its first token."""
        return self._stream.times

    @property
    def completion(self) -> Completion:
        """The answer so far. Its `finish_reason` is `interrupted` unless it came to its end."""
        return self._stream.completion


class Mailbox:
    """Passes notifications of the engine's thread to the streams of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: EngineThread) -> None:
        self._loop = loop
        self._thread = thread
        self.answers = weakref.WeakValueDictionary[SequenceState, AsyncStream]()
        # A sequence may end in the middle of a step, which counts and traces it afterwards. So the
        # engine's thread adds sequences that are over here between two steps.
        self._over = weakref.WeakSet[SequenceState]()

    def notify(self, sequences: Sequence[SequenceState]) -> None:
        """Have these answers updated, in a single call, because each wakes the event loop up."""
        self._over.update(sequence for sequence in sequences if sequence.over)
        try:
            self._loop.call_soon_threadsafe(self.update, sequences)
        except RuntimeError:  # the loop is closed
            for sequence in sequences:
                self._thread.cancel(sequence)

    def update(self, sequences: Sequence[SequenceState]) -> None:
        """Update answers, on the event loop."""
        for sequence in sequences:
            answer = self.answers.get(sequence)
            if answer is not None:
                over = sequence in self._over
                answer.update(over)
                if over:
                    del self.answers[sequence]


class AsyncLLM:
    """`LLM` for asyncio. Takes the same arguments, or a loaded `llm`.

    `stream` and `chat_stream` return iterators of text; `generate` and `chat` wait for complete
    answers. A task that is cancelled while it waits ends its answer. With `trace=True` the deltas
    of a stream carry its steps. `close` closes a model that was loaded here; an `llm` that was
    passed can still be used. `closed`: no more requests are accepted.
    """

    def __init__(self, *arguments: Any, llm: LLM | None = None, **options: Any) -> None:
        self.llm = llm or LLM(*arguments, **options)
        self._owns_llm = llm is None
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self.closed = False
        tokenizer = self.llm.tokenizer
        self._text = cache(lambda token: str(tokenizer.decode([token])))  # of a token, for traces

    __reduce__ = refuse_copy

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """Continue a prompt piece by piece, as `LLM.stream` does. Raises `Closed`."""
        return await self._begin(self.llm.stream, prompt, params, **options)

    async def chat_stream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """Answer a conversation piece by piece, as `LLM.chat_stream` does. Raises `Closed`."""
        return await self._begin(self.llm.chat_stream, messages, params, **options)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Return the whole answer to one prompt.

        For several answers, gather several calls: they share the engine's passes.
        """
        return await self._finish(await self.stream(prompt, params, **options))

    async def chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Return the whole answer to one conversation."""
        return await self._finish(await self.chat_stream(messages, params, **options))

    async def _begin(
        self,
        start: Callable[..., Stream],
        request: Prompt | Conversation,
        params: SamplingParams | None,
        *,
        trace: bool = False,
        observer: Observer | None = None,
        **options: Any,
    ) -> AsyncStream:
        self._require_open()
        loop = asyncio.get_running_loop()
        stream_trace = Trace() if trace else None
        for closed_loop in [loop for loop in self._mailboxes if loop.is_closed()]:
            del self._mailboxes[closed_loop]
        mailbox = self._mailboxes.setdefault(loop, Mailbox(loop, self.llm.thread))

        def observe(record: StepRecord) -> None:
            if stream_trace is not None:
                stream_trace(record)
            if observer is not None:
                observer(record)

        try:
            # in a thread, because it may load a drafter
            stream = await asyncio.to_thread(
                start, request, params, observer=observe, client=mailbox, **options
            )
        except QuickbeamError:
            self._require_open()
            raise
        if self.closed:
            stream.cancel()
            self._require_open()
        answer = AsyncStream(stream, stream_trace, self._text)
        mailbox.answers[stream.sequence] = answer
        # the part that came before the mailbox had the answer; later, so that the caller may
        # `watch` it first
        loop.call_soon(mailbox.update, [stream.sequence])
        return answer

    @staticmethod
    async def _finish(stream: AsyncStream) -> Completion:
        async for _ in stream:
            pass
        return stream.completion

    def close(self) -> None:
        """End all running answers and the engine's thread. No more requests are accepted."""
        self.closed = True
        if self._owns_llm:
            self.llm.close()
        else:
            self.llm.thread.end()

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"AsyncLLM({self.llm.name!r}, method={self.llm.method!r}{closed})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _require_open(self) -> None:
        if self.closed or self.llm.thread.closed:
            raise Closed("this AsyncLLM is closed: make another one")
        if not self.llm.thread.alive:
            raise Closed(
                "the engine's thread has ended, by a fault of quickbeam's: make another AsyncLLM"
            )
