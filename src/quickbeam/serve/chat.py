"""The endpoint `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quickbeam.engine.result import Completion, Logprob
from quickbeam.engine.stream import Delta
from quickbeam.models.token_texts import TokenTexts
from quickbeam.serve import convert, tools
from quickbeam.serve.answers import Answers, Choices, Json
from quickbeam.serve.convert import Prompts, encode_conversation, size_of
from quickbeam.serve.items import ResponsesRequest
from quickbeam.serve.logprobs import chat_logprobs
from quickbeam.serve.messages import ChatRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.tools import Call, Calling, split


async def begin(runner: Runner, request: ChatRequest) -> Chat:
    """Have the engine begin with a request, and return its reply."""
    return Chat(runner, request, *await begin_conversation(runner, request))


async def begin_conversation(
    runner: Runner, request: ChatRequest | ResponsesRequest
) -> tuple[Answers, Calling]:
    """Have the engine begin to answer a conversation, and return what is asked in tool calls,
    too."""
    llm, asked = runner.llm, request.conversation
    several = request.parallel_tool_calls
    calling = tools.calling(asked.tools, request.choice, several, llm.tokenizer)
    prompts = Prompts(
        lambda: [encode_conversation(llm, asked, calling.tools)],
        size_of(asked.messages),
        grammar=calling.grammar,
        keep_special=calling.keeps_special,
    )
    return await convert.begin(runner, request, prompts), calling


class Chat(Choices):
    """A chat request while it is answered."""

    def __init__(
        self, runner: Runner, request: ChatRequest, answers: Answers, calling: Calling
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(runner, request, answers, "chatcmpl", kind)
        self._readers = [calling.reader() for _ in answers.streams]
        self._called = [0] * len(answers.streams)  # tool calls of each answer that were sent
        self._texts = TokenTexts(runner.llm.tokenizer) if request.logprobs else None
        if self.with_ids:
            self.about_prompt = {"prompt_token_ids": answers.prompts[0]}

    def choice(self, index: int, completion: Completion) -> Json:
        reader = self._readers[index]
        content, calls = split([*reader.feed(completion.text), *reader.finish()])
        message: Json = {"role": "assistant", "content": content or None if calls else content}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = [*map(_call, calls)]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs or []),
            "finish_reason": self._reason(index),
        }
        return {**choice, "token_ids": completion.token_ids} if self.with_ids else choice

    def opening(self) -> Iterator[Json]:
        for index in range(len(self._readers)):
            yield _part(index, {"role": "assistant", "content": ""})

    def new(self, index: int, delta: Delta | None) -> Iterator[Json]:
        reader = self._readers[index]
        if delta is None:
            if rest := reader.finish():
                yield _part(index, self._delta(index, rest))
            yield _part(index, {}, self._reason(index))
        elif (pieces := reader.feed(delta.text)) or self.shows(delta):
            choice = _part(index, self._delta(index, pieces))
            choice["logprobs"] = self._logprobs(delta.logprobs)
            yield {**choice, "token_ids": delta.token_ids} if self.with_ids else choice

    def _delta(self, index: int, pieces: Iterable[str | Call]) -> Json:
        content, calls = split(pieces)
        delta: Json = {"content": content} if content or not calls else {}
        if calls:
            numbered = enumerate(calls, self._called[index])
            delta["tool_calls"] = [{"index": number, **_call(call)} for number, call in numbered]
            self._called[index] += len(calls)
        return delta

    def _reason(self, index: int) -> str:
        reason = self.answers.streams[index].completion.finish_reason
        return "tool_calls" if self._readers[index].found and reason == "stop" else reason

    def _logprobs(self, entries: Sequence[Logprob]) -> Json | None:
        return None if self._texts is None else chat_logprobs(entries, self._texts)


def _part(index: int, delta: Json, reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
