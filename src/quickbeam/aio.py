"""The Python interface for asyncio: answers as asynchronous iterators, any number side by side."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from typing_extensions import Self

from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import Times
from quickbeam.engine.stream import Delta, Stream
from quickbeam.engine.trace import StepRecord, Trace
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM, Message, Observer, Prompt
from quickbeam.params import SamplingParams

BEAT = 1.0  # seconds between two updates of `AsyncLLM.beat` while there is nothing to do
NOTHING = Delta("", [], [], [])


class Closed(QuickbeamError):
    """An `AsyncLLM` that begins no more answers."""


class News(NamedTuple):
    """What happened to an answer since its event loop was last told of it."""

    delta: Delta
    begun: bool  # whether the engine has taken it up
    over: bool
    error: BaseException | None


class Answer:
    """The state of an answer that is waited for, shared by the engine's thread and the event loop.

    The engine's thread calls `look`; the event loop calls everything else. An `Answer` has no
    reference to its `AsyncStream`, so that only the user keeps the stream alive.
    """

    def __init__(self, stream: Stream, trace: Trace | None, text: Callable[[int], str]) -> None:
        self.stream, self._trace, self._text = stream, trace, text
        self.loop, self.begun, self.changed = (
            asyncio.get_running_loop(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.delta, self.over = NOTHING, False
        self.error: BaseException | None = None
        self.on_begun: Callable[[], None] = lambda: None
        self.on_over: Callable[[Stream], None] = lambda _: None
        self._told = False  # whether `look` has reported that it was taken up

    def look(self) -> News | None:
        """Return what is new since the last call, or None."""
        # read this first: another thread's step may end the answer meanwhile
        over = self.stream.over
        delta, begun = self.stream.new(), over or self.stream.times.began is not None
        if self._trace is not None and (steps := self._trace.take(self._text)):
            delta = delta._replace(steps=steps)
        fresh = begun and not self._told
        self._told = begun
        return (
            News(delta, begun, over, self.stream.error if over else None)
            if fresh or over or any(delta)
            else None
        )

    def hear(self, news: News) -> None:
        """Store the news and wake whoever waits for the answer."""
        if news.begun and not self.begun.is_set():
            self.begun.set()
            self.on_begun()
        self.delta = self.delta.plus(news.delta)
        if news.over:
            self.over, self.error = True, news.error
            self.on_over(self.stream)
        self.changed.set()

    async def next(self) -> Delta | None:
        """Return everything new as soon as there is something; None at the end.

        Raises the error that ended the answer.
        """
        while not any(self.delta):
            if self.error is not None:
                raise self.error
            if self.over:
                return None
            self.changed.clear()
            await self.changed.wait()
        delta, self.delta = self.delta, NOTHING
        return delta


class AsyncStream(AsyncIterator[str]):
    """The pieces of an answer's text as they come, for `async for`.

    `deltas` gives the tokens too. `completion` may be read at any time. Dropping the stream, as
    when the loop is left early, ends the answer; so does `close`. The answer's memory is freed
    after the next step.
    """

    def __init__(self, answer: Answer, drop: Callable[[Answer], None]) -> None:
        self._answer = answer
        self._finalizer = weakref.finalize(self, drop, answer)

    async def __anext__(self) -> str:
        while (delta := await self._next()) is not None:
            if delta.text:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what is new in the answer, step by step.

        If steps come faster than they are taken, one delta holds several of them.
        """
        while (delta := await self._next()) is not None:
            yield delta

    async def _next(self) -> Delta | None:
        try:
            return await self._answer.next()
        except asyncio.CancelledError:
            self.close()
            raise

    def watch(self, begun: Callable[[], None], over: Callable[[Stream], None]) -> None:
        """Set two callbacks, each of which is called once, on the stream's event loop.

        `begun` is called when the engine has taken the answer up. `over` is called with the
        answer's stream when the answer is over, however it ends. Call `watch` right after the
        stream was begun.
        """
        self._answer.on_begun, self._answer.on_over = begun, over

    async def begun(self) -> None:
        """Wait until the engine has taken the answer up, or the answer is over.

        Raises the error that ended it, if there is one by then.
        """
        await self._answer.begun.wait()
        if self._answer.error is not None:
            raise self._answer.error

    def close(self) -> None:
        """Stop here. The answer ends as `interrupted` unless it had ended."""
        self._finalizer()
        self._answer.over = True
        self._answer.changed.set()

    async def aclose(self) -> None:
        """Do the same as `close`, for `contextlib.aclosing`."""
        self.close()

    @property
    def times(self) -> Times:
        """When the request arrived, was taken up, and had its first token."""
        return self._answer.stream.times

    @property
    def completion(self) -> Completion:
        """The answer so far. Its `finish_reason` is `interrupted` unless it came to its end."""
        return self._answer.stream.completion


class AsyncLLM:
    """`LLM` for asyncio. Takes the same arguments, or a loaded `llm`.

    A thread of its own runs the engine's steps while there is something to answer. `stream` and
    `chat_stream` return iterators of text; `generate` and `chat` wait for whole answers. A task
    that is cancelled while it waits ends its answer. With `trace=True` the deltas of a stream carry
    its steps.

    `beat` is the time (`time.monotonic`) at which the thread last looked for work. It is updated
    before every step, and every second while there is nothing to do.
    """

    def __init__(self, *arguments: Any, llm: LLM | None = None, **options: Any) -> None:
        self.llm = llm or LLM(*arguments, **options)
        self.beat = time.monotonic()
        self._wake = threading.Condition()
        self._followed: dict[Answer, None] = {}
        self._dropped: deque[Answer] = deque()
        self._closing = self._broken = False
        self._texts: dict[int, str] = {}  # the text of each token, for traces
        self._thread = threading.Thread(target=self._run, name="quickbeam-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """Continue a prompt piece by piece, as `LLM.stream` does.

        Raises `QuickbeamError` if this `AsyncLLM` is closed or its thread has ended.
        """
        return await self._begin(partial(self.llm.stream, prompt, params), **options)

    async def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """Answer a conversation piece by piece, as `LLM.chat_stream` does.

        Raises `QuickbeamError` if this `AsyncLLM` is closed or its thread has ended.
        """
        return await self._begin(partial(self.llm.chat_stream, messages, params), **options)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Return the whole answer to one prompt.

        For several answers, gather several calls: they share the engine's passes.
        """
        return await self._finish(await self.stream(prompt, params, **options))

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Return the whole answer to one conversation."""
        return await self._finish(await self.chat_stream(messages, params, **options))

    async def _begin(
        self,
        start: Callable[..., Stream],
        *,
        trace: bool = False,
        observer: Observer | None = None,
        **options: Any,
    ) -> AsyncStream:
        self._require_open()
        kept = Trace() if trace else None
        # in a thread, because it may load a drafter
        stream = await asyncio.to_thread(start, observer=_both(kept, observer), **options)
        answer = Answer(stream, kept, self._text)
        try:
            self._follow(answer)
        except Closed:
            await asyncio.to_thread(stream.close)  # in a thread, because a step may be under way
            raise
        return AsyncStream(answer, self._drop)

    @staticmethod
    async def _finish(stream: AsyncStream) -> Completion:
        async for _ in stream:
            pass
        return stream.completion

    @property
    def alive(self) -> bool:
        """False if the thread that runs the steps was ended by an error of its own."""
        return not self._broken

    def close(self) -> None:
        """End all answers that are under way, and the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self.llm.close()
        self._deliver()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self.llm.tokenizer.decode([token]))
        return self._texts[token]

    def _require_open(self) -> None:
        if self._closing:
            raise Closed("this AsyncLLM is closed: make another one")
        if self._broken:
            raise Closed(
                "the engine's thread has ended, by a fault of quickbeam's: make another AsyncLLM"
            )

    def _follow(self, answer: Answer) -> None:
        """Have the event loop of `answer` told of every step.

        Raises `Closed` if there will be no more steps.
        """
        with self._wake:
            self._require_open()
            self._followed[answer] = None
            self._wake.notify()

    def _drop(self, answer: Answer) -> None:
        """Mark an answer that nobody waits for any more. Never blocks: a finalizer may call it."""
        self._dropped.append(answer)

    def _run(self) -> None:
        try:
            while self._wait():
                self._take_step()
                self._deliver()
        except BaseException as error:  # no request's fault: everyone who waits must be told
            with self._wake:
                self._broken = True
                followed = list(self._followed)
            self._tell([(answer, News(NOTHING, True, True, error)) for answer in followed])
            raise

    def _take_step(self) -> None:
        """Close the answers that nobody waits for, then run a step if the engine has work."""
        while self._dropped:
            self._dropped.popleft().stream.close()
        if self.llm.engine.busy:
            with suppress(Exception):  # each sequence holds the error as its own
                self.llm.engine.step()

    def _wait(self) -> bool:
        """Wait for something to do. Returns False if the thread is to end."""
        with self._wake:
            self.beat = time.monotonic()
            while not (self._closing or self._followed):
                self._wake.wait(BEAT)
                self.beat = time.monotonic()
            return not self._closing

    def _deliver(self) -> None:
        """Pass what is new on to the event loops."""
        found = [
            (answer, news) for answer in list(self._followed) if (news := answer.look()) is not None
        ]
        for answer, news in found:
            if news.over:
                self._followed.pop(answer, None)
        self._tell(found)

    def _tell(self, every: Sequence[tuple[Answer, News]]) -> None:
        """Deliver all news of one event loop in a single call, because each call wakes the loop
        up."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Answer, News]]] = {}
        for answer, news in every:
            batches.setdefault(answer.loop, []).append((answer, news))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_hear_all, batch)
            except RuntimeError:  # the loop is closed
                for answer, news in batch:
                    if not news.over:
                        self._drop(answer)


def _hear_all(batch: Sequence[tuple[Answer, News]]) -> None:
    for answer, news in batch:
        answer.hear(news)


def _both(first: Observer | None, second: Observer | None) -> Observer | None:
    """Return one observer that calls both."""
    if first is None or second is None:
        return first or second

    def tell(record: StepRecord) -> None:
        first(record)
        second(record)

    return tell
