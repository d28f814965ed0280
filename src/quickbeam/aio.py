"""The Python face for asyncio: answers as asynchronous iterators, any number side by side."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from typing_extensions import Self

from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Stream
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM, Message, Prompt
from quickbeam.sampling import SamplingParams

Piece = str | BaseException | None  # of an answer's text; None at its end


class AsyncStream(AsyncIterator[str]):
    """Pieces of an answer's text as they come, for `async for`; `completion` at any time. Leaving the loop early and dropping the stream,
    or `close`, ends the answer, and its memory is free with the next step."""

    def __init__(self, stream: Stream, owner: AsyncLLM) -> None:
        self._stream, self._owner = stream, owner
        self._loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()
        owner._follow(stream, partial(_hand_over, self._loop, self._pieces))
        self._finalizer = weakref.finalize(self, owner._drop, stream)

    async def __anext__(self) -> str:
        try:
            piece = await self._pieces.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(piece, str):
            return piece
        self._pieces.put_nowait(piece)  # whoever asks again gets the same
        if piece is None:
            raise StopAsyncIteration
        raise piece

    def close(self) -> None:
        """Stop here; the answer ends as `interrupted` unless it had ended."""
        self._finalizer()
        self._pieces.put_nowait(None)

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    @property
    def completion(self) -> Completion:
        """The answer so far; its `finish_reason` is `interrupted` where it didn't come to its end."""
        return self._stream.completion


class AsyncLLM:
    """`LLM` for asyncio. Takes the same arguments, or a loaded `llm`.

    A thread of its own takes the engine's steps while there is something to answer. `stream` and `chat_stream` give iterators of text,
    `generate` and `chat` wait for whole answers. A task that is cancelled while it waits ends its answer.
    """

    def __init__(self, *arguments: Any, llm: LLM | None = None, **options: Any) -> None:
        self.llm = llm or LLM(*arguments, **options)
        self._wake = threading.Condition()
        self._followed: dict[Stream, Callable[[Piece], None]] = {}
        self._dropped: deque[Stream] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="quickbeam-engine", daemon=True)
        self._thread.start()

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> AsyncStream:
        """As `LLM.stream`."""
        return await self._begin(partial(self.llm.stream, prompt, params, **options))

    async def chat_stream(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> AsyncStream:
        """As `LLM.chat_stream`."""
        return await self._begin(partial(self.llm.chat_stream, messages, params, **options))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer to one prompt. For several, gather them: they share the engine's passes."""
        return await self._finish(await self.stream(prompt, params, **options))

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer to one conversation."""
        return await self._finish(await self.chat_stream(messages, params, **options))

    async def _begin(self, start: Callable[[], Stream]) -> AsyncStream:
        if self._closing:
            raise QuickbeamError("this AsyncLLM is closed: make another one")
        stream = await asyncio.to_thread(start)  # it may load a drafter
        return AsyncStream(stream, self)

    @staticmethod
    async def _finish(stream: AsyncStream) -> Completion:
        async for _ in stream:
            pass
        return stream.completion

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

    def _follow(self, stream: Stream, give: Callable[[Piece], None]) -> None:
        """Have `give` called with each piece of an answer, and with how it ends."""
        with self._wake:
            self._followed[stream] = give
            self._wake.notify()

    def _drop(self, stream: Stream) -> None:
        """Nobody waits for it any more. Never waits: a finalizer may call it."""
        self._dropped.append(stream)

    def _run(self) -> None:
        engine = self.llm.engine
        while True:
            with self._wake:
                while not (self._closing or self._followed):
                    self._wake.wait()
                if self._closing:
                    return
            while self._dropped:
                stream = self._dropped.popleft()
                stream.close()
                self._followed.pop(stream, None)
            if engine.busy:
                with suppress(Exception):  # each sequence has it as its own error
                    engine.step()
            self._deliver()

    def _deliver(self) -> None:
        """Hand on what is new."""
        for stream, give in list(self._followed.items()):
            try:
                if piece := stream.taken():
                    give(piece)
                if stream.over:
                    self._followed.pop(stream, None)
                    give(stream.error)
            except RuntimeError:  # its event loop is closed
                self._drop(stream)


def _hand_over(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Piece], piece: Piece) -> None:
    loop.call_soon_threadsafe(pieces.put_nowait, piece)
