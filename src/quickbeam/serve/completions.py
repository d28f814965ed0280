"""The endpoint `/v1/completions`. `answer` and `stream` can be called without HTTP, too."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quickbeam.engine.result import Logprob
from quickbeam.engine.stream import Delta
from quickbeam.llm import LLM
from quickbeam.serve.answers import Answers, event_stream
from quickbeam.serve.convert import Wanted, begin
from quickbeam.serve.disconnect import unless_gone
from quickbeam.serve.logprobs import CompletionLogprobs, TokenTexts
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import CompletionRequest

LENGTH = 16  # default length of an answer in tokens, as in OpenAI's API

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def create(request: CompletionRequest, http: Request) -> Response:
    """Continue a text, or several, with one object or as a stream of chunks."""
    runner: Runner = http.app.state.runner
    if request.stream:
        return event_stream(runner, await unless_gone(http, stream(runner, request)))
    return JSONResponse(await unless_gone(http, answer(runner, request)))


async def answer(runner: Runner, request: CompletionRequest) -> dict[str, Any]:
    """Return the response object.

    Raises `InvalidInput` for a request that can't be answered, `Busy` and `Unavailable` for one
    that is turned away, and the error that ended an answer.
    """
    made = await _begin(runner, request)
    with made.answers:
        return await made.whole()


async def stream(runner: Runner, request: CompletionRequest) -> AsyncIterator[dict[str, Any]]:
    """Wait until the engine has begun, and return the chunks.

    Until then it raises what `answer` raises. Later errors are raised while the chunks are read.
    """
    return (await _begin(runner, request)).chunks()


async def _begin(runner: Runner, request: CompletionRequest) -> Texts:
    llm, prompts = runner.llm, _prompts(request.prompt)
    tokens = None if any(isinstance(one, str) for one in prompts) else sum(map(len, prompts))
    answers = await begin(
        runner,
        request,
        lambda: [
            list(llm.tokenizer(one)["input_ids"]) if isinstance(one, str) else one
            for one in prompts
        ],
        Wanted({"max_tokens": request.max_tokens}, LENGTH, request.logprobs),
        size=sum(map(len, prompts)),
        prompts=len(prompts),
        tokens=tokens,
        trace=bool(request.trace),
    )
    return Texts(
        runner,
        request,
        answers,
        [_text(llm, one) for one in prompts] if request.echo else [""] * len(prompts),
    )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _text(llm: LLM, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(llm.tokenizer.decode(prompt))


class Texts:
    """A completions request while it is answered.

    `echoes` holds, for each prompt, the text that its answers begin with.
    """

    def __init__(
        self, runner: Runner, request: CompletionRequest, answers: Answers, echoes: Sequence[str]
    ) -> None:
        self.request, self.answers = request, answers
        self._echoes = [echo for echo in echoes for _ in range(answers.n)]
        texts = TokenTexts(runner.llm.tokenizer)
        self._logprobs = [CompletionLogprobs(texts) for _ in self._echoes]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": runner.name,
            "system_fingerprint": runner.fingerprint,
            "seed": answers.seeds[0] if len(set(answers.seeds)) == 1 else None,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait until all answers are complete, and return the response object."""
        completions = await self.answers.finished()
        choices = [
            self._choice(
                index,
                self._echoes[index] + one.text,
                one.finish_reason,
                one.logprobs or [],
                one.token_ids,
                first=True,
            )
            for index, one in enumerate(completions)
        ]
        return {**self._head, "choices": choices, "usage": self.answers.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks of all answers as they arrive, the usage last."""
        with self.answers as answers:
            first = [True] * len(answers)
            for index, echo in enumerate(self._echoes):
                if echo:
                    yield self._chunk(index, echo, first=True)
                    first[index] = False
            async for index, delta in answers.parts():
                if delta is None:
                    yield self._chunk(index, reason=answers.streams[index].completion.finish_reason)
                elif (
                    delta.text
                    or delta.steps
                    or delta.logprobs
                    or (delta.token_ids and self.request.return_token_ids)
                ):
                    yield self._part(index, delta, first[index])
                    first[index] = False
            if (options := self.request.stream_options) and options.include_usage:
                yield {**self._head, "choices": [], "usage": answers.usage()}

    def _part(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        chunk = self._chunk(index, delta.text, None, delta.logprobs, delta.token_ids, first)
        if delta.steps:
            chunk["quickbeam"] = {
                "steps": delta.steps,
                "method": self.answers.streams[index].completion.method,
            }
        return chunk

    def _chunk(
        self,
        index: int,
        text: str = "",
        reason: str | None = None,
        logprobs: Sequence[Logprob] = (),
        token_ids: Sequence[int] = (),
        first: bool = False,
    ) -> dict[str, Any]:
        chunk = {
            **self._head,
            "choices": [self._choice(index, text, reason, logprobs, token_ids, first)],
        }
        if (options := self.request.stream_options) and options.include_usage:
            chunk["usage"] = self.answers.usage() if options.continuous_usage_stats else None
        return chunk

    def _choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[Logprob],
        token_ids: Sequence[int],
        first: bool,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
        }
        choice["seed"] = self.answers.seeds[index // self.answers.n]
        if self.request.logprobs is not None:
            choice["logprobs"] = self._logprobs[index].add(logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if first:
                choice["prompt_token_ids"] = self.answers.prompts[index // self.answers.n]
        return choice
