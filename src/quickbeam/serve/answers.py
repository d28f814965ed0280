"""The answers to one request while they are computed: parts, whole answers, counts, streaming."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import Self

from quickbeam.aio import AsyncStream
from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Delta
from quickbeam.serve.errors import Interrupted, problem
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import GenerationRequest, StreamOptions

DONE = {"data": "[DONE]"}


class Part(NamedTuple):
    """A new part of one of the answers."""

    number: int  # index of the answer
    delta: Delta | None  # None: the answer is complete


class Answers:
    """The answers to one request while they are computed, `n` to each of the `prompts`.

    The answers to the first prompt come first. Answers without text may share a stream. `prompts`
    holds token ids, `seeds` one seed for each prompt. Leaving the `with` block ends the answers.
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

    def __len__(self) -> int:
        return len(self.streams)

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the parts of all answers as they arrive.

        Raises the error that ended an answer, and `Interrupted` for an answer that the server cut
        short.
        """
        parts = asyncio.Queue[Part | BaseException](maxsize=len(self.streams))
        first = {id(one): i for i, one in reversed([*enumerate(self.streams)])}
        tasks = [asyncio.ensure_future(self._follow(index, parts)) for index in first.values()]
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
            for i, one in enumerate(self.streams):
                if one is stream:
                    await parts.put(Part(i, None))

    async def finished(self) -> list[Completion]:
        """Wait until all answers are complete, and return them. Raises as `parts` does."""
        async for _ in self.parts():
            pass
        return self.completions

    @property
    def completions(self) -> list[Completion]:
        """The answers, as far as they have come."""
        return [stream.completion for stream in self.streams]

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far in the form of chats and completions.

        `prompt_tokens` counts each prompt once. `cached_tokens` are those of them that were not
        computed anew. `accepted_prediction_tokens` and `rejected_prediction_tokens` count drafted
        tokens. `steps` counts passes over a draft tree.
        """
        counts = self.counts()
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.new,
            "total_tokens": counts.prompt + counts.new,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            "completion_tokens_details": counts.details,
            "steps": counts.steps,
        }

    def counts(self) -> Counts:
        """Return the counts so far, over all answers."""
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

    @property
    def details(self) -> dict[str, int]:
        """OpenAI's details of the new tokens."""
        return {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.rejected,
        }


class Form:
    """What responses and chunks of chats and completions have in common.

    `prefix` begins the response's id, and `kind` is its `object`.
    """

    def __init__(
        self, runner: Runner, request: GenerationRequest, answers: Answers, prefix: str, kind: str
    ) -> None:
        self._answers, self._request = answers, request
        self._options = request.stream_options or StreamOptions()
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": runner.name,
            "system_fingerprint": runner.fingerprint,
            "seed": answers.seeds[0] if len(set(answers.seeds)) == 1 else None,
        }

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response object."""
        return {**self._head, "choices": choices, "usage": self._answers.usage()}

    def shows(self, delta: Delta) -> bool:
        """Whether there is anything to send of a part, beside its text."""
        ids = delta.token_ids and self._request.return_token_ids
        return bool(delta.steps or delta.logprobs or ids)

    def chunk(self, choice: dict[str, Any], delta: Delta | None = None) -> dict[str, Any]:
        """Return the chunk with a choice; `delta` is what is new of its answer."""
        chunk = {**self._head, "choices": [choice]}
        if self._options.include_usage:
            each = self._options.continuous_usage_stats
            chunk["usage"] = self._answers.usage() if each else None
        if delta is not None and delta.steps:
            method = self._answers.streams[choice["index"]].completion.method
            chunk["quickbeam"] = {"steps": delta.steps, "method": method}
        return chunk

    def last(self) -> list[dict[str, Any]]:
        """Return the chunks that end a stream: the usage, if it is asked for."""
        return [self.whole([])] if self._options.include_usage else []


async def done_events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, str]]:
    """Yield chunks as server-sent events, and then `[DONE]`.

    If an error ends the chunks, its error object is sent in place of the rest.
    """
    try:
        async for chunk in chunks:
            yield {"data": json.dumps(chunk)}
    except Exception as error:
        yield {"data": json.dumps(problem(error).body)}
    yield DONE
