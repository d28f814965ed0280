"""The endpoint `/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Delta
from quickbeam.llm import LLM
from quickbeam.serve import convert
from quickbeam.serve.answers import Answers, Form, Part
from quickbeam.serve.convert import Wanted, encode_infill
from quickbeam.serve.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import CompletionRequest

LENGTH = 16  # default length of an answer in tokens, as in OpenAI's API
NOTHING = Delta("", [], [], [])


async def begin(runner: Runner, request: CompletionRequest) -> Texts:
    """Have the engine begin with a request, and return its reply."""
    llm, prompts = runner.llm, request.prompts
    ids = [one for one in prompts if not isinstance(one, str)]
    answers = await convert.begin(
        runner,
        request,
        Wanted(
            lambda: [_encode(llm, one, request.suffix) for one in prompts],
            sum(len(one) + len(request.suffix or "") for one in prompts),
            {"max_tokens": request.max_tokens},
            tokens=sum(map(len, ids)) if ids else None,
            prompts=len(prompts),
            length=LENGTH,
            logprobs=request.logprobs,
            prompt_logprobs=_prompt_logprobs(request),
            trace=bool(request.trace),
        ),
    )
    echoes = [_text(llm, one) if request.echo else "" for one in prompts]
    return Texts(runner, request, answers, echoes)


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
        self._form = Form(runner, request, answers, "cmpl", "text_completion")
        self._echoes = [echo for echo in echoes for _ in range(answers.n)]
        self._texts = TokenTexts(runner.llm.tokenizer)
        self._scored = bool(request.echo) and request.logprobs is not None
        self._logprobs = [
            CompletionLogprobs(self._texts, len(echo), self._prompt(index))
            if self._scored
            else CompletionLogprobs(self._texts)
            for index, echo in enumerate(self._echoes)
        ]

    async def whole(self) -> dict[str, Any]:
        """Wait until all answers are complete, and return the response object."""
        completions = await self.answers.finished()
        # in a thread, because log-probabilities of long prompts take time
        return self._form.whole(await asyncio.to_thread(self._choices, completions))

    def _choices(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        return [
            self._choice(
                index,
                Delta(self._echoes[index] + one.text, one.token_ids, one.logprobs or [], []),
                one.finish_reason,
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
                    yield self._form.chunk(
                        self._choice(index, NOTHING._replace(text=echo), first=True)
                    )
                    first[index] = False
            async for index, delta in self._after_scores():
                if self._scored and first[index]:  # the prompt is read by now
                    echoed = NOTHING._replace(text=self._echoes[index])
                    choice = await asyncio.to_thread(self._choice, index, echoed, first=True)
                    yield self._form.chunk(choice)
                    first[index] = False
                if delta is None:
                    reason = answers.streams[index].completion.finish_reason
                    yield self._form.chunk(self._choice(index, NOTHING, reason))
                elif delta.text or self._form.shows(delta):
                    yield self._form.chunk(self._choice(index, delta, first=first[index]), delta)
                    first[index] = False
            for chunk in self._form.last():
                yield chunk

    async def _after_scores(self) -> AsyncIterator[Part]:
        """Yield the parts of all answers.

        If prompts are scored, those of a prompt come after the first part of its first answer,
        which scores it.
        """
        n = self.answers.n
        held = {prompt: list[Part]() for prompt in range(len(self._echoes) // n)}
        async for part in self.answers.parts():
            prompt = part.number // n
            if not self._scored or part.number % n == 0 or prompt not in held:
                yield part
                for late in held.pop(prompt, []):
                    yield late
            else:
                held[prompt].append(part)

    def _choice(
        self, index: int, delta: Delta, reason: str | None = None, first: bool = False
    ) -> dict[str, Any]:
        """Return what is new of an answer. The `first` part tells of its prompt, too."""
        prompt, choice = self._prompt(index), dict[str, Any](index=index, text=delta.text)
        choice |= {"logprobs": None, "finish_reason": reason}
        choice["seed"] = self.answers.seeds[index // self.answers.n]
        scorer = self.answers.streams[index - index % self.answers.n]
        scores = scorer.completion.prompt_logprobs if first else None
        if self.request.logprobs is not None:
            form = self._logprobs[index]
            echoed = form.add(prompt, scores) if scores and self._scored else {}
            given = form.add(delta.token_ids, delta.logprobs)
            choice["logprobs"] = {name: echoed.get(name, []) + given[name] for name in given}
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores or [], self._texts)
        if self.request.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = prompt
        return choice
