"""The endpoint `/v1/completions`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quickbeam.engine.result import Completion, Logprob
from quickbeam.engine.stream import Delta
from quickbeam.llm import LLM
from quickbeam.serve import convert
from quickbeam.serve.answers import Answers
from quickbeam.serve.convert import Wanted, encode_infill
from quickbeam.serve.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import CompletionRequest

LENGTH = 16  # default length of an answer in tokens, as in OpenAI's API


async def begin(runner: Runner, request: CompletionRequest) -> Texts:
    """Have the engine begin with a request, and return its reply."""
    llm, prompts = runner.llm, request.prompts
    tokens = None if any(isinstance(one, str) for one in prompts) else sum(map(len, prompts))
    answers = await convert.begin(
        runner,
        request,
        lambda: [_encode(llm, one, request.suffix) for one in prompts],
        Wanted(
            {"max_tokens": request.max_tokens},
            LENGTH,
            request.logprobs,
            _prompt_logprobs(request),
        ),
        size=sum(len(one) + len(request.suffix or "") for one in prompts),
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


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return `SamplingParams.prompt_logprobs`.

    An echo gets as many as `logprobs` says, and without an answer at least 0.
    """
    if not request.echo or request.prompt_logprobs is not None:
        return request.prompt_logprobs
    return 0 if request.logprobs is None and request.max_tokens == 0 else request.logprobs


def _encode(llm: LLM, prompt: str | list[int], suffix: str | None) -> list[int]:
    if isinstance(prompt, str) and suffix:
        return encode_infill(llm, prompt, suffix)
    return list(llm.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt


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
        self._texts = TokenTexts(runner.llm.tokenizer)
        self._scored = bool(request.echo) and request.logprobs is not None
        self._logprobs = [
            CompletionLogprobs(self._texts, len(echo), self._prompt(index))
            if self._scored
            else CompletionLogprobs(self._texts)
            for index, echo in enumerate(self._echoes)
        ]
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
        # in a thread, because log-probabilities of long prompts take time
        choices = await asyncio.to_thread(self._choices, completions)
        return {**self._head, "choices": choices, "usage": self.answers.usage()}

    def _choices(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        return [
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

    def _prompt(self, index: int) -> list[int]:
        """Return the token ids of the prompt of an answer."""
        return self.answers.prompts[index // self.answers.n]

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks of all answers as they arrive, the usage last."""
        with self.answers as answers:
            first = [True] * len(answers)
            for index, echo in enumerate(self._echoes):
                if echo and not self._scored:
                    yield self._chunk(index, echo, first=True)
                    first[index] = False
            async for index, delta in answers.parts():
                if self._scored and first[index]:  # the prompt is read by now
                    echo = self._echoes[index]
                    yield await asyncio.to_thread(self._chunk, index, echo, first=True)
                    first[index] = False
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
        prompt = self._prompt(index)
        scores = self.answers.streams[index].completion.prompt_logprobs if first else None
        if self.request.logprobs is not None:
            form = self._logprobs[index]
            echoed = form.add(prompt, scores) if scores and self._scored else {}
            given = form.add(token_ids, logprobs)
            choice["logprobs"] = {name: echoed.get(name, []) + given[name] for name in given}
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores or [], self._texts)
        if self.request.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if first:
                choice["prompt_token_ids"] = prompt
        return choice
