"""The answers to one request while they are computed: parts, whole answers, counts, streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import Self

from quickbeam.aio import AsyncStream
from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Delta
from quickbeam.serve.errors import Interrupted, problem

Json = dict[str, Any]


class Part(NamedTuple):
    """A new part of one of the answers."""

    number: int  # index of the answer
    delta: Delta | None  # None: the answer is complete


class Answers:
    """The answers to one request while they are computed, `n` to each of the `prompts`.

    Those to the first prompt come first. `seeds`: one for each prompt. Leaving the `with` block
    ends the answers.
    """

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

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the parts of all answers as they arrive. Raises what ended one of them."""
        parts = asyncio.Queue[Part | BaseException](maxsize=len(self.streams))
        tasks = [asyncio.ensure_future(self._follow(i, parts)) for i in range(len(self.streams))]
        try:
            running = len(self.streams)
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

    @property
    def completions(self) -> list[Completion]:
        """The answers, as far as they have come."""
        return [stream.completion for stream in self.streams]

    def usage(self, given: str, made: str) -> Json:
        """Return the counts so far in OpenAI's form; `given`, `made`: its prompts and answers."""
        every = [one.statistics for one in self.completions]
        sources = [source for one in every for source in one.sources.values()]
        accepted = sum(source.accepted for source in sources)
        read, new = sum(map(len, self.prompts)), sum(one.new_tokens for one in every)
        return {
            f"{given}_tokens": read,
            f"{made}_tokens": new,
            "total_tokens": read + new,
            f"{given}_tokens_details": {
                "cached_tokens": sum(one.cached_tokens for one in every[:: self.n])
            },
            f"{made}_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(one.drafted for one in sources) - accepted,
            },
            "steps": sum(one.steps for one in every),
        }


class Reply:
    """A request while it is answered."""

    answers: Answers

    async def whole(self) -> Json:
        """Wait until all answers are complete, and return the response object."""
        async for _ in self.answers.parts():
            pass
        # in a thread, because many log-probabilities take time
        return await asyncio.to_thread(self.response, self.answers.completions)

    def response(self, completions: Sequence[Completion]) -> Json:
        """Return the response object with these whole answers."""
        raise NotImplementedError

    def chunks(self) -> AsyncIterator[Json]:
        """Yield the parts of a stream as the answers arrive. Leaving it ends the answers."""
        raise NotImplementedError

    async def events(self) -> AsyncIterator[dict[str, str]]:
        """Yield chunks as server-sent events, the error object of what ends them, and `[DONE]`."""
        try:
            async for chunk in self.chunks():
                yield {"data": json.dumps(chunk)}
        except Exception as error:
            yield {"data": json.dumps(problem(error).body)}
        yield {"data": "[DONE]"}
