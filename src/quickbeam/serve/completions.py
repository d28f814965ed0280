"""The endpoints `/v1/chat/completions` and `/v1/completions`, whole or as streams of chunks."""

from __future__ import annotations

import asyncio
import codecs
import json
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from typing import Any

from quickbeam.engine.result import Completion, Logprob
from quickbeam.engine.stream import Delta
from quickbeam.grammar.token_texts import TokenTexts
from quickbeam.llm import LLM
from quickbeam.serve import convert
from quickbeam.serve.admission import BYTES_A_TOKEN
from quickbeam.serve.calls import ParsedCall, split
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    Tool,
    ToolRequest,
    custom_input,
    text_of,
)
from quickbeam.serve.runner import AnsweredRequest, Json, Runner, Streams
from quickbeam.serve.schemas import GenerationRequest, StreamOptions
from quickbeam.serve.tools import ToolUse, tool_use

# What stands before a prefix, between it and a suffix, and behind that, in the models that fill in.
INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek-Coder)
)
LOWEST = -9999.0  # in place of minus infinity, which JSON does not have


async def begin_chat(runner: Runner, request: ChatRequest) -> ChatCompletion:
    several, tokenizer = request.parallel_tool_calls, runner.llm.tokenizer
    wanted = request.shown_tools, request.choice, several, request.grammars, tokenizer
    with convert.named(request):
        calls = await asyncio.to_thread(tool_use, *wanted)
    answers = await begin_conversation(runner, request, request, calls)
    return ChatCompletion(runner, request, answers, calls)


async def begin_conversation(
    runner: Runner, request: ToolRequest, conversation: Conversation, calls: ToolUse
) -> Streams:
    """Have the engine begin to answer a conversation."""
    for note in calls.ignored:
        request.ignore(note)
    template = str(runner.llm.tokenizer.chat_template)
    if not convert.knows_effort(template, conversation.reasoning_effort):
        request.ignore(request.effort_field)
    tokens = estimate(conversation, calls.tools)
    return await convert.begin(
        runner,
        request,
        lambda: [convert.encode_conversation(runner.llm, conversation, calls.tools)],
        tokens,
        calls,
    )


def estimate(conversation: Conversation, tools: Sequence[Tool] | None) -> int:
    """Return about how many tokens a conversation's prompt has."""
    length = len(json.dumps(conversation.chat_template_kwargs))
    length += sum(len(tool.model_dump_json()) for tool in tools or ())
    for one in conversation.messages:
        made = getattr(one, "tool_calls", None) or ()
        length += len(text_of(one.content)) + sum(len(call.function.arguments) for call in made)
    return length // BYTES_A_TOKEN + 1


async def begin_text(runner: Runner, request: CompletionRequest) -> TextCompletion:
    llm, prompts, suffix = runner.llm, request.prompts, request.suffix
    tokens = sum(
        (len(one) + len(suffix or "")) // BYTES_A_TOKEN + 1 if isinstance(one, str) else len(one)
        for one in prompts
    )
    answers = await convert.begin(
        runner, request, lambda: (encode_text(llm, one, suffix) for one in prompts), tokens
    )
    return TextCompletion(runner, request, answers)


def encode_text(llm: LLM, prompt: str | list[int], suffix: str | None) -> list[int]:
    """Return a prompt's token ids; with a `suffix` those that ask for the text before it."""
    if not isinstance(prompt, str):
        return prompt
    if suffix:
        known = llm.tokenizer.get_added_vocab()
        marks = next((marks for marks in INFILL if known.keys() >= {*marks}), None)
        if marks is None:
            raise Refused(
                "suffix: this model's tokenizer has no tokens for filling in; leave it out, or "
                "serve a model that was trained for that, such as Qwen2.5-Coder or StarCoder2",
                "suffix",
            )
        prompt = f"{marks[0]}{prompt}{marks[1]}{suffix}{marks[2]}"
    return list(llm.tokenizer(prompt)["input_ids"])


class Choices(AnsweredRequest):
    """The reply of chats and completions. `prefix` begins its id, `kind` is its `object`."""

    def __init__(
        self, runner: Runner, request: GenerationRequest, answers: Streams, prefix: str, kind: str
    ) -> None:
        self.answers, self.with_ids = answers, bool(request.return_token_ids)
        self.texts = TokenTexts(runner.llm.tokenizer)
        self.at_once = False  # whether a stream gives each answer as one part
        self.about_prompt: Json = {}  # fields of the whole response and of the first chunks
        self._options = request.stream_options or StreamOptions()
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": runner.name,
            "system_fingerprint": runner.fingerprint,
            "seed": answers.seeds[0] if len(set(answers.seeds)) == 1 else None,
        }

    def opening(self, index: int) -> Iterable[Json]:
        """Return the choices that the stream of an answer begins with."""
        raise NotImplementedError

    def new(self, index: int, delta: Delta | None) -> Iterable[Json]:
        """Return the choices that tell a part of an answer; `delta` is None at its end."""
        raise NotImplementedError

    def choice(self, index: int, completion: Completion) -> Json:
        """Return the choice that tells a whole answer."""
        raise NotImplementedError

    async def chunks(self) -> AsyncIterator[Json]:
        with self.answers:
            if self.at_once:
                for choice in (await self.whole())["choices"]:
                    yield self._chunk(choice)
            else:
                for index in range(len(self.answers.streams)):
                    for choice in self.opening(index):
                        yield {**self._chunk(choice), **self.about_prompt}
                async for index, delta in self.answers.parts():
                    for choice in self.new(index, delta):
                        yield self._chunk(choice, delta)
            if self._options.include_usage:
                yield {**self._head, "choices": [], "usage": self._usage()}

    def response(self, completions: Sequence[Completion]) -> Json:
        choices = [self.choice(index, one) for index, one in enumerate(completions)]
        return {**self._head, "choices": choices, "usage": self._usage(), **self.about_prompt}

    def reason(self, index: int) -> str:
        return self.answers.streams[index].completion.finish_reason

    def shows(self, delta: Delta) -> bool:
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
        self, runner: Runner, request: ChatRequest, answers: Streams, calls: ToolUse
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(runner, request, answers, "chatcmpl", kind)
        tokenizer = runner.llm.tokenizer
        self._parsers = [calls.parser(answers.prompts[0], tokenizer) for _ in answers.streams]
        self._called = [0] * len(answers.streams)  # tool calls of each answer that were sent
        self._tools = request.offered
        self._scored = bool(request.logprobs)
        if self.with_ids:
            self.about_prompt = {"prompt_token_ids": answers.prompts[0]}

    def choice(self, index: int, completion: Completion) -> Json:
        parser = self._parsers[index]
        content, calls = split([*parser.feed(completion.text), *parser.finish()])
        message: Json = {"role": "assistant", "content": content or None if calls else content}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        choice = {"index": index, "message": message}
        choice["logprobs"] = self._logprobs(completion.logprobs or [])
        choice["finish_reason"] = self.reason(index)
        return {**choice, "token_ids": completion.token_ids} if self.with_ids else choice

    def opening(self, index: int) -> Iterable[Json]:
        return [_part(index, {"role": "assistant", "content": ""})]

    def new(self, index: int, delta: Delta | None) -> Iterator[Json]:
        parser = self._parsers[index]
        if delta is None:
            if rest := parser.finish():
                yield _part(index, self._delta(index, rest))
            yield _part(index, {}, self.reason(index))
        elif (pieces := parser.feed(delta.text)) or self.shows(delta):
            choice = _part(index, self._delta(index, pieces))
            choice["logprobs"] = self._logprobs(delta.logprobs)
            yield {**choice, "token_ids": delta.token_ids} if self.with_ids else choice

    def _delta(self, index: int, pieces: Iterable[str | ParsedCall]) -> Json:
        content, calls = split(pieces)
        delta: Json = {"content": content} if content or not calls else {}
        if calls:
            numbered = enumerate(calls, self._called[index])
            delta["tool_calls"] = [
                {"index": number, **self._call(call)} for number, call in numbered
            ]
            self._called[index] += len(calls)
        return delta

    def _call(self, call: ParsedCall) -> Json:
        tool = self._tools[call.name]
        if tool.custom:
            custom = {"name": tool.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

    def reason(self, index: int) -> str:
        reason = super().reason(index)
        return "tool_calls" if self._parsers[index].count and reason == "stop" else reason

    def _logprobs(self, entries: Sequence[Logprob]) -> Json | None:
        return chat_logprobs(entries, self.texts) if self._scored else None


def _part(index: int, delta: Json, reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


class TextCompletion(Choices):
    """A completions request while it is answered."""

    def __init__(self, runner: Runner, request: CompletionRequest, answers: Streams) -> None:
        super().__init__(runner, request, answers, "cmpl", "text_completion")
        self._request, decode = request, runner.llm.tokenizer.decode
        hidden = set[int]()  # tokens that the text leaves out
        if request.logprobs is not None and request.skip_special_tokens is not False:
            added = runner.llm.tokenizer.added_tokens_decoder
            hidden = {token for token, one in added.items() if one.special}
        echoes = [
            "" if not request.echo else one if isinstance(one, str) else str(decode(one))
            for one in request.prompts
        ]
        self._echoes = [echo for echo in echoes for _ in range(answers.n)]
        # Prompts are scored, too: the first answer to each has the scores for all.
        self.at_once = bool(request.echo) and request.logprobs is not None
        self._logprobs = [
            CompletionLogprobs(self.texts, hidden, len(echo), self._prompt(index))
            if self.at_once
            else CompletionLogprobs(self.texts, hidden)
            for index, echo in enumerate(self._echoes)
        ]

    def _prompt(self, index: int) -> list[int]:
        return self.answers.prompts[index // self.answers.n]

    def choice(self, index: int, completion: Completion) -> Json:
        n, ids = self.answers.n, completion.token_ids
        logprobs: list[Logprob | None] = [*(completion.logprobs or [])]
        scores = self.answers.streams[index - index % n].completion.prompt_logprobs or []
        if self.at_once:
            ids, logprobs = [*self._prompt(index), *ids], [*scores, *logprobs]
        choice = self._choice(index, self._echoes[index] + completion.text, ids, logprobs)
        choice["finish_reason"] = completion.finish_reason
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores, self.texts)
        if self.with_ids:
            choice |= {"token_ids": completion.token_ids, "prompt_token_ids": self._prompt(index)}
        return choice

    def opening(self, index: int) -> Iterator[Json]:
        if self._echoes[index] or self.with_ids:
            choice = self._choice(index, self._echoes[index])
            yield {**choice, "prompt_token_ids": self._prompt(index)} if self.with_ids else choice

    def new(self, index: int, delta: Delta | None) -> Iterator[Json]:
        if delta is None:
            yield {**self._choice(index), "finish_reason": self.reason(index)}
        elif delta.text or self.shows(delta):
            yield self._choice(index, delta.text, delta.token_ids, delta.logprobs)

    def _choice(
        self,
        index: int,
        text: str = "",
        ids: Sequence[int] = (),
        logprobs: Sequence[Logprob | None] = (),
    ) -> Json:
        choice: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        choice["seed"] = self.answers.seeds[index // self.answers.n]
        if self._request.logprobs is not None:
            choice["logprobs"] = self._logprobs[index].add(ids, logprobs)
        return {**choice, "token_ids": list(ids)} if self.with_ids else choice


def chat_logprobs(entries: Sequence[Logprob], texts: TokenTexts) -> dict[str, Any]:
    """Return log-probabilities in the form of chats."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = {"token": texts.text_of(token), "bytes": list(texts.bytes_of(token))}
        return {**spelled, "logprob": max(logprob, LOWEST)}

    content = [
        one(entry.token, entry.logprob)
        | {"top_logprobs": [one(*pair) for pair in entry.top.items()]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    entries: Sequence[Logprob | None], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt's tokens in vLLM's form.

    The form is `[None, {"<token id>": {"logprob", "rank", "decoded_token"}}]`. A token that is none
    of the likeliest that are given has the rank None.
    """

    def one(entry: Logprob) -> dict[str, Any]:
        ranks = {token: rank for rank, token in enumerate(entry.top, 1)}
        return {
            str(token): {
                "logprob": max(logprob, LOWEST),
                "rank": ranks.get(token),
                "decoded_token": texts.text_of(token),
            }
            for token, logprob in {entry.token: entry.logprob, **entry.top}.items()
        }

    return [None if entry is None else one(entry) for entry in entries]


class CompletionLogprobs:
    """Log-probabilities in the form of completions, piece by piece.

    The form is `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`. A token's offset is
    the number of characters that are complete before it. `hidden`: tokens that an answer's text
    leaves out. `echo` is the text in front of the answer and `prompt` its tokens. Where these spell
    more, as with a token that begins a text, what is too much counts as standing before the text.
    """

    def __init__(
        self,
        texts: TokenTexts,
        hidden: Collection[int] = (),
        echo: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        self._texts, self._hidden, self._of_prompt = texts, hidden, len(prompt)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        spelled = b"".join(map(texts.bytes_of, prompt)).decode(errors="replace")
        self._offset = echo - len(spelled)

    def add(self, tokens: Sequence[int], entries: Sequence[Logprob | None]) -> dict[str, Any]:
        """Return the log-probabilities of further tokens; a prompt's first one has None."""
        offsets = []
        for token in tokens:
            offsets.append(max(self._offset, 0))
            if self._of_prompt > 0 or token not in self._hidden:
                self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
            self._of_prompt -= 1
        return {
            "tokens": [self._texts.text_of(token) for token in tokens],
            "token_logprobs": [entry and max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob) -> dict[str, float]:
        """Return log-probabilities by text; of equal texts the most probable."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top.items(), (entry.token, entry.logprob)]:
            top.setdefault(self._texts.text_of(token), max(logprob, LOWEST))
        return top
