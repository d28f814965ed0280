"""The answers to a request while they are computed, and what all endpoints' replies share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from typing_extensions import Self

from quickbeam.aio import AsyncStream
from quickbeam.drafters.prediction import Prediction
from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Delta
from quickbeam.serve.errors import Interrupted, problem

Json = dict[str, Any]
# an answer's index, and what is new of it; None at its end
Part = tuple[int, Delta | None]


class Streams:
    """The answers to one request while they are computed, `n` to each of the `prompts`.

    The answers to the first prompt come first. `seeds`: one for each prompt. Leaving the `with`
    block ends the answers.
    """

    def __init__(
        self,
        streams: Sequence[AsyncStream],
        prompts: Sequence[list[int]],
        seeds: Sequence[int | None],
    ) -> None:
        self.streams = streams
        self.prompts = prompts
        self.seeds = seeds
        self.n = len(streams) // len(prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.close()

    def prompt_of(self, index: int) -> list[int]:
        """Return the token ids of the prompt of an answer."""
        return self.prompts[index // self.n]

    def seed_of(self, index: int) -> int | None:
        """Return the seed of an answer's prompt."""
        return self.seeds[index // self.n]

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the parts of all answers as they arrive. Raises what ended one of them."""
        parts = asyncio.Queue[Part | BaseException](len(self.streams))
        tasks = [asyncio.ensure_future(self._follow(i, parts)) for i in range(len(self.streams))]
        try:
            running = len(self.streams)
            while running:
                part = await parts.get()
                if isinstance(part, BaseException):
                    raise part
                running -= part[1] is None
                yield part
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, index: int, parts: asyncio.Queue[Part | BaseException]) -> None:
        stream = self.streams[index]
        try:
            async for delta in stream.deltas():
                await parts.put((index, delta))
            if stream.completion.finish_reason not in ("stop", "length"):
                raise Interrupted("the server is ending: this answer was cut short; ask again")
        except Exception as error:
            await parts.put(error)
        else:
            await parts.put((index, None))

    @property
    def completions(self) -> list[Completion]:
        """The answers, as far as they have come."""
        return [stream.completion for stream in self.streams]

    def usage(self, prompt: str, answer: str) -> Json:
        """Return the counts so far in OpenAI's form.

        `prompt`, `answer`: what the endpoint calls them, as in `prompt_tokens`.
        """
        statistics = [completion.statistics for completion in self.completions]
        sources = [
            each.sources[Prediction.name] for each in statistics if Prediction.name in each.sources
        ]
        accepted = sum(source.accepted for source in sources)
        drafted = sum(source.drafted for source in sources)
        prompt_tokens = sum(len(ids) for ids in self.prompts)
        answer_tokens = sum(each.new_tokens for each in statistics)
        # the answers to one prompt read it once
        cached_tokens = sum(each.cached_tokens for each in statistics[:: self.n])
        return {
            f"{prompt}_tokens": prompt_tokens,
            f"{answer}_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
            f"{prompt}_tokens_details": {"cached_tokens": cached_tokens},
            f"{answer}_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
            "steps": sum(each.steps for each in statistics),
        }


class AnsweredRequest:
    """A request while it is answered.

    `keep_alive`: fields of the server-sent event that its stream holds where nothing else comes.
    """

    answers: Streams
    keep_alive: ClassVar[Json] = {"comment": "keep-alive"}

    async def complete(self) -> Json:
        """Wait until all answers are complete, and return the response object."""
        async for _ in self.answers.parts():
            pass
        # in a thread, because many log-probabilities take time
        return await asyncio.to_thread(self.response, self.answers.completions)

    def response(self, completions: Sequence[Completion]) -> Json:
        """Return the response object with these complete answers."""
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
