"""The Python face for asyncio: answers as asynchronous iterators, any number side by side."""

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

BEAT = 1.0  # seconds between two beats of an idle engine's heart
NOTHING = Delta("", [], [], [])


class News(NamedTuple):
    """What became of an answer since its event loop last heard of it."""

    delta: Delta
    begun: bool  # it was taken up
    over: bool
    error: BaseException | None


class Answer:
    """What the engine's thread (`look`) and the event loop (all else) know of an answer that is
    waited for. It knows nothing of the `AsyncStream`, so that nobody but its user keeps that one
    alive."""

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
        self._told = False  # that it was taken up

    def look(self) -> News | None:
        """What is new."""
        over = self.stream.over  # first, since another thread's step may end it now
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
        """Let those know who wait for it."""
        if news.begun and not self.begun.is_set():
            self.begun.set()
            self.on_begun()
        self.delta = self.delta.plus(news.delta)
        if news.over:
            self.over, self.error = True, news.error
            self.on_over(self.stream)
        self.changed.set()

    async def next(self) -> Delta | None:
        """All that is new, as soon as there is something; None at the end. Raises what ended it."""
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
    """Pieces of an answer's text as they come, for `async for`; or `deltas`, with its tokens.
    `completion` may be read at any time. To leave the loop early and drop the stream, or to `close`
    it, ends the answer; its memory is free after the next step."""

    def __init__(self, answer: Answer, drop: Callable[[Answer], None]) -> None:
        self._answer = answer
        self._finalizer = weakref.finalize(self, drop, answer)

    async def __anext__(self) -> str:
        while (delta := await self._next()) is not None:
            if delta.text:
                return delta.text
        raise StopAsyncIteration

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new of the answer, step by step; of several steps at once where they come faster
        than they are taken."""
        while (delta := await self._next()) is not None:
            yield delta

    async def _next(self) -> Delta | None:
        try:
            return await self._answer.next()
        except asyncio.CancelledError:
            self.close()
            raise

    def watch(self, begun: Callable[[], None], over: Callable[[Stream], None]) -> None:
        """Have `begun` called, on its event loop, when the engine has taken it up, and `over` with
        the answer when it is over, however it ends; each once. To be called right after the stream
        was begun."""
        self._answer.on_begun, self._answer.on_over = begun, over

    async def begun(self) -> None:
        """Wait until the engine has taken it up, or it is over. Raises what ended it by then."""
        await self._answer.begun.wait()
        if self._answer.error is not None:
            raise self._answer.error

    def close(self) -> None:
        """Stop here; the answer ends as `interrupted` unless it had ended."""
        self._finalizer()
        self._answer.over = True
        self._answer.changed.set()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    @property
    def times(self) -> Times:
        """When it came, was taken up, and had its first token."""
        return self._answer.stream.times

    @property
    def completion(self) -> Completion:
        """The answer so far; its `finish_reason` is `interrupted` where it didn't come to its
        end."""
        return self._answer.stream.completion


class AsyncLLM:
    """`LLM` for asyncio. Takes the same arguments, or a loaded `llm`.

    A thread of its own takes the engine's steps while there is something to answer. `stream` and
    `chat_stream` give iterators of text, `generate` and `chat` wait for whole answers. A task that
    is cancelled while it waits ends its answer. With `trace=True` the deltas of a stream carry its
    steps. `beat`: when that thread last was where it should be (`time.monotonic`); it is there
    every second when idle.
    """

    def __init__(self, *arguments: Any, llm: LLM | None = None, **options: Any) -> None:
        self.llm = llm or LLM(*arguments, **options)
        self.beat = time.monotonic()
        self._wake = threading.Condition()
        self._followed: dict[Answer, None] = {}
        self._dropped: deque[Answer] = deque()
        self._closing = self._broken = False
        self._texts: dict[int, str] = {}  # of tokens, for traces
        self._thread = threading.Thread(target=self._run, name="quickbeam-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """As `LLM.stream`."""
        return await self._begin(partial(self.llm.stream, prompt, params), **options)

    async def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """As `LLM.chat_stream`."""
        return await self._begin(partial(self.llm.chat_stream, messages, params), **options)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The whole answer to one prompt. For several, gather them: they share the engine's
        passes."""
        return await self._finish(await self.stream(prompt, params, **options))

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The whole answer to one conversation."""
        return await self._finish(await self.chat_stream(messages, params, **options))

    async def _begin(
        self,
        start: Callable[..., Stream],
        *,
        trace: bool = False,
        observer: Observer | None = None,
        **options: Any,
    ) -> AsyncStream:
        if self._closing:
            raise QuickbeamError("this AsyncLLM is closed: make another one")
        if not self.alive:
            raise QuickbeamError(
                "the engine's thread has ended, by a fault of quickbeam's: make another AsyncLLM"
            )
        kept = Trace() if trace else None
        # it may load a drafter
        stream = await asyncio.to_thread(start, observer=_both(kept, observer), **options)
        answer = Answer(stream, kept, self._text)
        self._follow(answer)
        return AsyncStream(answer, self._drop)

    @staticmethod
    async def _finish(stream: AsyncStream) -> Completion:
        async for _ in stream:
            pass
        return stream.completion

    @property
    def alive(self) -> bool:
        """False where the thread that takes steps has ended by an error of its own."""
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

    def _follow(self, answer: Answer) -> None:
        """Have its event loop hear of it, step by step."""
        with self._wake:
            self._followed[answer] = None
            self._wake.notify()

    def _drop(self, answer: Answer) -> None:
        """Nobody waits for it any more. Never waits: a finalizer may call it."""
        self._dropped.append(answer)

    def _run(self) -> None:
        try:
            while self._wait():
                self._take_step()
                self._deliver()
        except BaseException as error:  # no request's fault: all who wait must hear of it
            self._broken = True
            self._tell([(answer, News(NOTHING, True, True, error)) for answer in self._followed])
            raise

    def _take_step(self) -> None:
        """Of the engine, where there is something to do; first let go of what nobody waits for."""
        while self._dropped:
            self._dropped.popleft().stream.close()
        if self.llm.engine.busy:
            with suppress(Exception):  # each sequence has it as its own error
                self.llm.engine.step()

    def _wait(self) -> bool:
        """Wait for something to do; False: it is to end."""
        with self._wake:
            self.beat = time.monotonic()
            while not (self._closing or self._followed):
                self._wake.wait(BEAT)
                self.beat = time.monotonic()
            return not self._closing

    def _deliver(self) -> None:
        """Hand on what is new."""
        found = [
            (answer, news) for answer in list(self._followed) if (news := answer.look()) is not None
        ]
        for answer, news in found:
            if news.over:
                self._followed.pop(answer, None)
        self._tell(found)

    def _tell(self, every: Sequence[tuple[Answer, News]]) -> None:
        """All of an event loop's in one call: each call wakes it up."""
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
    """One observer that tells both."""
    if first is None or second is None:
        return first or second

    def tell(record: StepRecord) -> None:
        first(record)
        second(record)

    return tell
