"""The endpoint `/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from quickbeam.aio import NOTHING
from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Delta
from quickbeam.llm import LLM
from quickbeam.models.token_texts import TokenTexts
from quickbeam.serve import convert
from quickbeam.serve.answers import Answers, Choices, Json, Part
from quickbeam.serve.convert import Prompts, encode_infill
from quickbeam.serve.logprobs import CompletionLogprobs, prompt_logprobs
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import CompletionRequest


async def begin(runner: Runner, request: CompletionRequest) -> Texts:
    """Have the engine begin with a request, and return its reply."""
    llm, prompts = runner.llm, request.prompts
    ids = [one for one in prompts if not isinstance(one, str)]
    given = Prompts(
        lambda: [_encode(llm, one, request.suffix) for one in prompts],
        sum(len(one) + len(request.suffix or "") for one in prompts),
        tokens=sum(map(len, ids)) if ids else None,
        number=len(prompts),
    )
    answers = await convert.begin(runner, request, given)
    echoes = [_text(llm, one) if request.echo else "" for one in prompts]
    return Texts(runner, request, answers, echoes)


def _encode(llm: LLM, prompt: str | list[int], suffix: str | None) -> list[int]:
    if isinstance(prompt, str) and suffix:
        return encode_infill(llm, prompt, suffix)
    return list(llm.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt


def _text(llm: LLM, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(llm.tokenizer.decode(prompt))


class Texts(Choices):
    """A completions request while it is answered. `echoes`: what answers to each prompt begin
    with."""

    def __init__(
        self, runner: Runner, request: CompletionRequest, answers: Answers, echoes: Sequence[str]
    ) -> None:
        super().__init__(runner, request, answers, "cmpl", "text_completion")
        self._request, self._texts = request, TokenTexts(runner.llm.tokenizer)
        self._echoes = [echo for echo in echoes for _ in range(answers.n)]
        self._untold = set(range(len(self._echoes)))  # answers of whose prompt nothing was told
        self._scored = bool(request.echo) and request.logprobs is not None
        self._logprobs = [
            CompletionLogprobs(self._texts, len(echo), self._prompt(index))
            if self._scored
            else CompletionLogprobs(self._texts)
            for index, echo in enumerate(self._echoes)
        ]

    def _prompt(self, index: int) -> list[int]:
        return self.answers.prompts[index // self.answers.n]

    def choice(self, index: int, completion: Completion) -> Json:
        text, logprobs = self._echoes[index] + completion.text, completion.logprobs or []
        delta = Delta(text, completion.token_ids, logprobs, [])
        return self._choice(index, delta, completion.finish_reason)

    def opening(self) -> Iterator[Json]:
        for index, echo in enumerate(self._echoes):
            if echo and not self._scored:
                yield self._choice(index, NOTHING._replace(text=echo))

    async def told(self) -> AsyncIterator[tuple[Delta | None, Json]]:
        """Yield the parts of all answers as choices.

        If prompts are scored, those of a prompt come after the first part of its first answer,
        which scores it; and an answer begins with its echo.
        """
        n = self.answers.n
        held = {prompt: list[Part]() for prompt in range(len(self.answers.prompts))}
        async for part in self.answers.parts():
            prompt = part.number // n
            if self._scored and part.number % n and prompt in held:
                held[prompt].append(part)
                continue
            for one in (part, *held.pop(prompt, [])):
                if self._scored and one.number in self._untold:
                    echo = NOTHING._replace(text=self._echoes[one.number])
                    # in a thread, because log-probabilities of long prompts take time
                    yield None, await asyncio.to_thread(self._choice, one.number, echo)
                for choice in self.new(*one):
                    yield one.delta, choice

    def new(self, index: int, delta: Delta | None) -> Iterator[Json]:
        if delta is None:
            reason = self.answers.streams[index].completion.finish_reason
            yield self._choice(index, NOTHING, reason)
        elif delta.text or self.shows(delta):
            yield self._choice(index, delta)

    def _choice(self, index: int, delta: Delta, reason: str | None = None) -> Json:
        """Return what is new of an answer. The first part tells of its prompt, too."""
        first = index in self._untold
        self._untold.discard(index)
        prompt, n, choice = self._prompt(index), self.answers.n, Json(index=index, text=delta.text)
        choice |= {"logprobs": None, "finish_reason": reason}
        choice["seed"] = self.answers.seeds[index // n]
        scorer = self.answers.streams[index - index % n]
        scores = scorer.completion.prompt_logprobs if first else None
        if self._request.logprobs is not None:
            form = self._logprobs[index]
            echoed = form.add(prompt, scores) if scores and self._scored else {}
            given = form.add(delta.token_ids, delta.logprobs)
            choice["logprobs"] = {name: echoed.get(name, []) + given[name] for name in given}
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores or [], self._texts)
        if self.with_ids:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = prompt
        return choice
