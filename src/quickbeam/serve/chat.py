"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from quickbeam.engine.result import Completion, Logprob
from quickbeam.engine.stream import Delta
from quickbeam.serve import convert, tools
from quickbeam.serve.answers import Answers
from quickbeam.serve.convert import Wanted, encode_conversation, size_of
from quickbeam.serve.logprobs import TokenTexts, chat_logprobs
from quickbeam.serve.messages import ChatRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.tools import Call, Calling, CallReader


async def begin(runner: Runner, request: ChatRequest) -> Chat:
    """Have the engine begin with a request, and return its reply."""
    llm = runner.llm
    calling = tools.calling(
        request.tools, request.tool_choice, request.parallel_tool_calls, llm.tokenizer
    )
    wanted = Wanted(
        {"max_completion_tokens": request.max_completion_tokens, "max_tokens": request.max_tokens},
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=calling and calling.grammar,
        keep_special=calling is not None and calling.keeps_special,
    )
    answers = await convert.begin(
        runner,
        request,
        lambda: [encode_conversation(llm, request, calling and calling.tools)],
        wanted,
        size=size_of(request.messages),
        trace=bool(request.trace),
    )
    return Chat(runner, request, answers, calling)


class Chat:
    """A chat request while it is answered."""

    def __init__(
        self, runner: Runner, request: ChatRequest, answers: Answers, calling: Calling | None
    ) -> None:
        self.request, self.answers = request, answers
        self._readers = [calling and calling.reader() for _ in range(len(answers))]
        self._called = [0] * len(answers)  # tool calls of each answer that were sent
        self._texts = TokenTexts(runner.llm.tokenizer) if request.logprobs else None
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": runner.name,
            "system_fingerprint": runner.fingerprint,
            "seed": answers.seeds[0],
        }

    async def whole(self) -> dict[str, Any]:
        """Wait until all answers are complete, and return the response object."""
        completions = await self.answers.finished()
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        found: dict[str, Any] = {**self._head, "choices": choices, "usage": self.answers.usage()}
        if self.request.return_token_ids:
            found["prompt_token_ids"] = self.answers.prompts[0]
        return found

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        content, calls = split([*self._read(index, completion.text), *self._rest(index)])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs or []),
            "finish_reason": self._reason(index, completion),
        }
        return (
            {**choice, "token_ids": completion.token_ids}
            if self.request.return_token_ids
            else choice
        )

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks of all answers as they arrive: the roles first, the usage last."""
        with self.answers as answers:
            for index in range(len(answers)):
                chunk = self._chunk(index, {"role": "assistant", "content": ""})
                if self.request.return_token_ids:
                    chunk["prompt_token_ids"] = answers.prompts[0]
                yield chunk
            async for index, delta in answers.parts():
                if delta is not None:
                    for chunk in self._of(index, delta, self._read(index, delta.text)):
                        yield chunk
                    continue
                if rest := self._rest(index):
                    yield self._chunk(index, self._delta(index, rest))
                yield self._chunk(index, {}, self._reason(index, answers.streams[index].completion))
            if (options := self.request.stream_options) and options.include_usage:
                yield {**self._head, "choices": [], "usage": answers.usage()}

    def _of(
        self, index: int, delta: Delta, pieces: Sequence[str | Call]
    ) -> Iterable[dict[str, Any]]:
        """Yield the chunk for a part of an answer, if there is anything to send."""
        if not (
            pieces
            or delta.steps
            or delta.logprobs
            or (delta.token_ids and self.request.return_token_ids)
        ):
            return
        chunk = self._chunk(index, self._delta(index, pieces))
        if self._texts is not None:
            chunk["choices"][0]["logprobs"] = self._logprobs(delta.logprobs)
        if self.request.return_token_ids:
            chunk["choices"][0]["token_ids"] = delta.token_ids
        if delta.steps:
            chunk["quickbeam"] = {
                "steps": delta.steps,
                "method": self.answers.streams[index].completion.method,
            }
        yield chunk

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            **self._head,
            "choices": [
                {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
            ],
        }
        if (options := self.request.stream_options) and options.include_usage:
            chunk["usage"] = self.answers.usage() if options.continuous_usage_stats else None
        return chunk

    def _delta(self, index: int, pieces: Iterable[str | Call]) -> dict[str, Any]:
        content, calls = split(pieces)
        delta: dict[str, Any] = {"content": content} if content or not calls else {}
        if calls:
            delta["tool_calls"] = [
                {"index": self._called[index] + i, **_call(call)} for i, call in enumerate(calls)
            ]
            self._called[index] += len(calls)
        return delta

    def _read(self, index: int, text: str) -> list[str | Call]:
        """Return the text and the tool calls in new text of an answer."""
        reader: CallReader | None = self._readers[index]
        return reader.feed(text) if reader is not None else [text] if text else []

    def _rest(self, index: int) -> list[str | Call]:
        """Return what was held back of an answer, at its end."""
        reader = self._readers[index]
        return reader.finish() if reader is not None else []

    def _reason(self, index: int, completion: Completion) -> str:
        reader = self._readers[index]
        called = reader is not None and reader.found and completion.finish_reason == "stop"
        return "tool_calls" if called else completion.finish_reason

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any] | None:
        return None if self._texts is None else chat_logprobs(entries, self._texts)


def split(pieces: Iterable[str | Call]) -> tuple[str, list[Call]]:
    """Return the joined text of the pieces, and their tool calls."""
    every = list(pieces)
    return "".join(piece for piece in every if isinstance(piece, str)), [
        piece for piece in every if isinstance(piece, Call)
    ]


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
