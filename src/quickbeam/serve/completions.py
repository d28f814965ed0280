"""The endpoints `/v1/chat/completions` and `/v1/completions`, whole or as streams of chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from quickbeam.engine.result import Completion, Logprob
from quickbeam.engine.stream import Delta
from quickbeam.grammar.token_texts import TokenTexts
from quickbeam.serve import convert
from quickbeam.serve.answers import AnsweredRequest, Json, Streams
from quickbeam.serve.calls import ParsedCall, split
from quickbeam.serve.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from quickbeam.serve.messages import ChatRequest, CompletionRequest
from quickbeam.serve.prompts import encode_text, estimate_tokens
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import GenerationRequest, StreamOptions
from quickbeam.serve.tool_fields import custom_input
from quickbeam.serve.tools import ToolUse


async def begin_chat(runner: Runner, request: ChatRequest) -> ChatCompletion:
    """Have the engine begin with a request to `/v1/chat/completions`."""
    answers, tools = await convert.begin_conversation(runner, request, request)
    return ChatCompletion(runner, request, answers, tools)


async def begin_text(runner: Runner, request: CompletionRequest) -> TextCompletion:
    """Have the engine begin with a request to `/v1/completions`."""
    llm = runner.llm
    suffix = request.suffix
    tokens = 0
    for prompt in request.prompts:
        if isinstance(prompt, str):
            tokens += estimate_tokens(prompt + (suffix or ""))
        else:
            tokens += len(prompt)
    answers = await convert.begin(
        runner,
        request,
        lambda: (encode_text(llm, prompt, suffix) for prompt in request.prompts),
        tokens,
    )
    return TextCompletion(runner, request, answers)


class Choices(AnsweredRequest):
    """The reply of chats and completions.

    - `id_prefix`: what the reply's id begins with.
    - `kind`: the reply's `object`.
    - `in_one_chunk`: whether a stream gives each answer as one chunk.
    - `prompt_fields`: fields of the response and of the first chunks.
    """

    def __init__(
        self,
        runner: Runner,
        request: GenerationRequest,
        answers: Streams,
        id_prefix: str,
        kind: str,
    ) -> None:
        self.answers = answers
        self.with_ids = bool(request.return_token_ids)
        self.texts = TokenTexts(runner.llm.tokenizer)
        self.in_one_chunk = False
        self.prompt_fields: Json = {}
        self._options = request.stream_options or StreamOptions()
        self._head = {
            "id": f"{id_prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": runner.name,
            "system_fingerprint": runner.fingerprint,
            "seed": answers.seeds[0] if len(set(answers.seeds)) == 1 else None,
        }

    def first_choices(self, index: int) -> Iterable[Json]:
        """Return the choices that the stream of an answer begins with."""
        raise NotImplementedError

    def next_choices(self, index: int, delta: Delta | None) -> Iterable[Json]:
        """Return the choices for a part of an answer; `delta` is None at the answer's end."""
        raise NotImplementedError

    def choice(self, index: int, completion: Completion) -> Json:
        """Return the choice for a complete answer."""
        raise NotImplementedError

    async def chunks(self) -> AsyncIterator[Json]:
        with self.answers:
            if self.in_one_chunk:
                response = await self.complete()
                for choice in response["choices"]:
                    yield self._chunk(choice)
            else:
                for index in range(len(self.answers.streams)):
                    for choice in self.first_choices(index):
                        yield {**self._chunk(choice), **self.prompt_fields}
                async for index, delta in self.answers.parts():
                    for choice in self.next_choices(index, delta):
                        yield self._chunk(choice, delta)
            if self._options.include_usage:
                yield {**self._head, "choices": [], "usage": self._usage()}

    def response(self, completions: Sequence[Completion]) -> Json:
        choices = [self.choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "choices": choices, "usage": self._usage(), **self.prompt_fields}

    def finish_reason(self, index: int) -> str:
        """Return how an answer ended."""
        return self.answers.streams[index].completion.finish_reason

    def has_more(self, delta: Delta) -> bool:
        """Whether there is anything to send of a part, beside its text."""
        return bool(delta.steps or delta.logprobs or (delta.token_ids and self.with_ids))

    def _usage(self) -> Json:
        return self.answers.usage("prompt", "completion")

    def _chunk(self, choice: Json, delta: Delta | None = None) -> Json:
        chunk = {**self._head, "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = self._usage() if self._options.continuous_usage_stats else None
        if delta is not None and delta.steps:
            method = self.answers.streams[choice["index"]].completion.method
            chunk["quickbeam"] = {"steps": delta.steps, "method": method}
        return chunk


class ChatCompletion(Choices):
    """A chat request while it is answered."""

    def __init__(
        self, runner: Runner, request: ChatRequest, answers: Streams, tools: ToolUse
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(runner, request, answers, "chatcmpl", kind)
        (prompt,) = answers.prompts
        tokenizer = runner.llm.tokenizer
        self._parsers = [tools.parser(prompt, tokenizer) for _ in answers.streams]
        self._sent_calls = [0] * len(answers.streams)  # of each answer
        self._tools = request.offered
        self._scored = bool(request.logprobs)
        if self.with_ids:
            self.prompt_fields = {"prompt_token_ids": prompt}

    def choice(self, index: int, completion: Completion) -> Json:
        parser = self._parsers[index]
        content, calls = split([*parser.feed(completion.text), *parser.finish()])
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [self._call(call) for call in calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs or []),
            "finish_reason": self.finish_reason(index),
        }
        if self.with_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def first_choices(self, index: int) -> Iterable[Json]:
        return [_delta_choice(index, {"role": "assistant", "content": ""})]

    def next_choices(self, index: int, delta: Delta | None) -> Iterator[Json]:
        parser = self._parsers[index]
        if delta is None:
            pieces = parser.finish()
            if pieces:
                yield _delta_choice(index, self._delta(index, pieces))
            yield {**_delta_choice(index, {}), "finish_reason": self.finish_reason(index)}
            return
        pieces = parser.feed(delta.text)
        if pieces or self.has_more(delta):
            choice = _delta_choice(index, self._delta(index, pieces))
            choice["logprobs"] = self._logprobs(delta.logprobs)
            if self.with_ids:
                choice["token_ids"] = delta.token_ids
            yield choice

    def _delta(self, index: int, pieces: Iterable[str | ParsedCall]) -> Json:
        content, calls = split(pieces)
        delta: Json = {"content": content} if content or not calls else {}
        if calls:
            numbered = enumerate(calls, self._sent_calls[index])
            delta["tool_calls"] = [
                {"index": number, **self._call(call)} for number, call in numbered
            ]
            self._sent_calls[index] += len(calls)
        return delta

    def _call(self, call: ParsedCall) -> Json:
        tool = self._tools[call.name]
        if tool.custom:
            custom = {"name": tool.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

    def finish_reason(self, index: int) -> str:
        reason = super().finish_reason(index)
        return "tool_calls" if self._parsers[index].count and reason == "stop" else reason

    def _logprobs(self, entries: Sequence[Logprob]) -> Json | None:
        if not self._scored:
            return None
        return {"content": chat_logprobs(entries, self.texts), "refusal": None}


def _delta_choice(index: int, delta: Json) -> Json:
    """Return the choice of a chat's chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class TextCompletion(Choices):
    """A completions request while it is answered."""

    def __init__(self, runner: Runner, request: CompletionRequest, answers: Streams) -> None:
        super().__init__(runner, request, answers, "cmpl", "text_completion")
        self._request = request
        tokenizer = runner.llm.tokenizer
        self._echoes = [""] * len(answers.streams)
        if request.echo:
            texts = [
                prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt))
                for prompt in request.prompts
            ]
            self._echoes = [text for text in texts for _ in range(answers.n)]
        hidden = set[int]()  # tokens that the text leaves out
        if request.logprobs is not None and request.skip_special_tokens is not False:
            added = tokenizer.added_tokens_decoder
            hidden = {token for token, details in added.items() if details.special}
        # Prompts are scored, too: the first answer to each has the scores for all.
        self.in_one_chunk = bool(request.echo) and request.logprobs is not None
        self._logprobs = [CompletionLogprobs(self.texts, hidden) for _ in answers.streams]
        if self.in_one_chunk:
            self._logprobs = [
                CompletionLogprobs(self.texts, hidden, len(echo), answers.prompt_of(index))
                for index, echo in enumerate(self._echoes)
            ]

    def choice(self, index: int, completion: Completion) -> Json:
        prompt = self.answers.prompt_of(index)
        ids = completion.token_ids
        logprobs: list[Logprob | None] = [*(completion.logprobs or [])]
        first = index - index % self.answers.n
        scores = self.answers.streams[first].completion.prompt_logprobs or []
        if self.in_one_chunk:
            ids = [*prompt, *ids]
            logprobs = [*scores, *logprobs]
        choice = self._choice(index, self._echoes[index] + completion.text, ids, logprobs)
        choice["finish_reason"] = completion.finish_reason
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores, self.texts)
        if self.with_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt
        return choice

    def first_choices(self, index: int) -> Iterator[Json]:
        if self._echoes[index] or self.with_ids:
            choice = self._choice(index, self._echoes[index])
            if self.with_ids:
                choice["prompt_token_ids"] = self.answers.prompt_of(index)
            yield choice

    def next_choices(self, index: int, delta: Delta | None) -> Iterator[Json]:
        if delta is None:
            yield {**self._choice(index), "finish_reason": self.finish_reason(index)}
        elif delta.text or self.has_more(delta):
            yield self._choice(index, delta.text, delta.token_ids, delta.logprobs)

    def _choice(
        self,
        index: int,
        text: str = "",
        ids: Sequence[int] = (),
        logprobs: Sequence[Logprob | None] = (),
    ) -> Json:
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "seed": self.answers.seed_of(index),
        }
        if self._request.logprobs is not None:
            choice["logprobs"] = self._logprobs[index].add(ids, logprobs)
        if self.with_ids:
            choice["token_ids"] = list(ids)
        return choice
