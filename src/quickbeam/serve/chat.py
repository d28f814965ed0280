"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from quickbeam.engine.result import Completion, Logprob
from quickbeam.serve import convert, tools
from quickbeam.serve.answers import Answers, Form
from quickbeam.serve.convert import Wanted, encode_conversation, size_of
from quickbeam.serve.logprobs import TokenTexts, chat_logprobs
from quickbeam.serve.messages import ChatRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.tools import Call, Calling


async def begin(runner: Runner, request: ChatRequest) -> Chat:
    """Have the engine begin with a request, and return its reply."""
    llm = runner.llm
    calling = tools.calling(
        request.tools, request.tool_choice, request.parallel_tool_calls, llm.tokenizer
    )
    answers = await convert.begin(
        runner,
        request,
        Wanted(
            lambda: [encode_conversation(llm, request, calling.shown)],
            size_of(request.messages),
            {
                "max_completion_tokens": request.max_completion_tokens,
                "max_tokens": request.max_tokens,
            },
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            grammar=calling.grammar,
            keep_special=calling.keeps_special,
            trace=bool(request.trace),
        ),
    )
    return Chat(runner, request, answers, calling)


class Chat:
    """A chat request while it is answered."""

    def __init__(
        self, runner: Runner, request: ChatRequest, answers: Answers, calling: Calling
    ) -> None:
        self.answers, self._with_ids = answers, bool(request.return_token_ids)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._form = Form(runner, request, answers, "chatcmpl", kind)
        self._readers = [calling.reader() for _ in range(len(answers))]
        self._called = [0] * len(answers)  # tool calls of each answer that were sent
        self._texts = TokenTexts(runner.llm.tokenizer) if request.logprobs else None

    async def whole(self) -> dict[str, Any]:
        """Wait until all answers are complete, and return the response object."""
        completions = await self.answers.finished()
        # in a thread, because many log-probabilities take time
        choices = await asyncio.to_thread(self._choices, completions)
        prompt = {"prompt_token_ids": self.answers.prompts[0]} if self._with_ids else {}
        return {**self._form.whole(choices), **prompt}

    def _choices(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        return [self._choice(index, one) for index, one in enumerate(completions)]

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        reader = self._readers[index]
        content, calls = split([*reader.feed(completion.text), *reader.finish()])
        message = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        choice = {
            "index": index,
            "message": {**message, "tool_calls": [*map(_call, calls)]} if calls else message,
            "logprobs": self._logprobs(completion.logprobs or []),
            "finish_reason": self._reason(index),
        }
        return {**choice, "token_ids": completion.token_ids} if self._with_ids else choice

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks of all answers as they arrive: the roles first, the usage last."""
        with self.answers as answers:
            prompt = {"prompt_token_ids": answers.prompts[0]} if self._with_ids else {}
            for index in range(len(answers)):
                delta: dict[str, Any] = {"role": "assistant", "content": ""}
                yield {**self._form.chunk(_part(index, delta)), **prompt}
            async for index, new in answers.parts():
                if new is None:
                    if rest := self._readers[index].finish():
                        yield self._form.chunk(_part(index, self._delta(index, rest)))
                    yield self._form.chunk(_part(index, {}, self._reason(index)))
                elif (pieces := self._readers[index].feed(new.text)) or self._form.shows(new):
                    choice = _part(index, self._delta(index, pieces))
                    choice["logprobs"] = self._logprobs(new.logprobs)
                    if self._with_ids:
                        choice["token_ids"] = new.token_ids
                    yield self._form.chunk(choice, new)
            for chunk in self._form.last():
                yield chunk

    def _delta(self, index: int, pieces: Iterable[str | Call]) -> dict[str, Any]:
        content, calls = split(pieces)
        delta: dict[str, Any] = {"content": content} if content or not calls else {}
        if calls:
            delta["tool_calls"] = [
                {"index": number, **_call(call)}
                for number, call in enumerate(calls, self._called[index])
            ]
            self._called[index] += len(calls)
        return delta

    def _reason(self, index: int) -> str:
        reason = self.answers.streams[index].completion.finish_reason
        return "tool_calls" if self._readers[index].found and reason == "stop" else reason

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any] | None:
        return None if self._texts is None else chat_logprobs(entries, self._texts)


def split(pieces: Iterable[str | Call]) -> tuple[str, list[Call]]:
    """Return the joined text of the pieces, and their tool calls."""
    every = list(pieces)
    return "".join(piece for piece in every if isinstance(piece, str)), [
        piece for piece in every if isinstance(piece, Call)
    ]


def _part(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
