"""The answers to one request while they are made: their parts as they come, whole answers, what
they took; and how they are streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from sse_starlette import EventSourceResponse, ServerSentEvent
from typing_extensions import Self

from quickbeam.aio import AsyncStream
from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Delta
from quickbeam.serve.errors import Interrupted, problem
from quickbeam.serve.runner import Runner

DONE = {"data": "[DONE]"}


class Part(NamedTuple):
    """What is new of one of the answers."""

    number: int  # of the answer
    delta: Delta | None  # None: it is complete


class Answers:
    """Answers under way, `n` to each of the `prompts`, those to the first prompt first. `seeds`: of
    each prompt. Leaving its `with` block ends them."""

    def __init__(
        self,
        streams: Sequence[AsyncStream],
        prompts: Sequence[list[int]],
        seeds: Sequence[int | None],
    ) -> None:
        self.streams, self.prompts, self.seeds = streams, prompts, seeds
        self.n = len(streams) // len(prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.close()

    def __len__(self) -> int:
        return len(self.streams)

    async def parts(self) -> AsyncIterator[Part]:
        """Parts of all answers as they come. Raises what ended one before its time."""
        parts = asyncio.Queue[Part | BaseException](maxsize=len(self.streams))
        tasks = [
            asyncio.ensure_future(self._follow(index, parts)) for index in range(len(self.streams))
        ]
        try:
            running = len(tasks)
            while running:
                part = await parts.get()
                if isinstance(part, BaseException):
                    raise part
                running -= part.delta is None
                yield part
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, index: int, parts: asyncio.Queue[Part | BaseException]) -> None:
        stream = self.streams[index]
        try:
            async for delta in stream.deltas():
                await parts.put(Part(index, delta))
            if stream.completion.finish_reason not in ("stop", "length"):
                raise Interrupted("the server is ending: this answer was cut short; ask again")
        except Exception as error:
            await parts.put(error)
        else:
            await parts.put(Part(index, None))

    async def finished(self) -> list[Completion]:
        """All of them, whole."""
        async for _ in self.parts():
            pass
        return self.completions

    @property
    def completions(self) -> list[Completion]:
        """What there is of them."""
        return [stream.completion for stream in self.streams]

    def usage(self) -> dict[str, Any]:
        """What they took so far, as chats and completions tell it. `prompt_tokens`: each prompt
        once, `cached_tokens`: of those, what was not computed anew, `accepted_prediction_tokens`
        and `rejected_prediction_tokens`: drafted tokens, `steps`: passes over a tree."""
        counts = self.counts()
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.new,
            "total_tokens": counts.prompt + counts.new,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": counts.accepted,
                "rejected_prediction_tokens": counts.rejected,
                "reasoning_tokens": 0,
            },
            "steps": counts.steps,
        }

    def counts(self) -> Counts:
        """What they took so far."""
        every = [one.statistics for one in self.completions]
        sources = [source for one in every for source in one.sources.values()]
        accepted = sum(source.accepted for source in sources)
        return Counts(
            prompt=sum(map(len, self.prompts)),
            new=sum(one.new_tokens for one in every),
            cached=sum(one.cached_tokens for one in every[:: self.n]),
            accepted=accepted,
            rejected=sum(source.drafted for source in sources) - accepted,
            steps=sum(one.steps for one in every),
        )


class Counts(NamedTuple):
    prompt: int
    new: int
    cached: int
    accepted: int
    rejected: int
    steps: int


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, str]]:
    try:
        async for chunk in chunks:
            yield {"data": json.dumps(chunk)}
    except Exception as error:
        yield {"data": json.dumps(problem(error).body)}
    yield DONE


def event_stream(runner: Runner, chunks: AsyncIterator[dict[str, Any]]) -> EventSourceResponse:
    """The response that streams `chunks`, then `[DONE]`. An error comes as its object in place of
    the rest. A comment keeps the connection when there is nothing to say."""
    return sse(runner, _events(chunks))


def sse(runner: Runner, events: AsyncIterator[dict[str, str]]) -> EventSourceResponse:
    """The response that streams server-sent events."""
    return EventSourceResponse(
        events,
        sep="\n",
        ping=runner.settings.keep_alive,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
    )
