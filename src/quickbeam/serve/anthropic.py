"""Anthropic's API: `/v1/messages`, whole or as a stream of events, and what belongs to it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime, timezone
from typing import ClassVar

from quickbeam.engine.result import Completion
from quickbeam.serve import convert
from quickbeam.serve.admission import TENANT
from quickbeam.serve.answers import AnsweredRequest, Json, Streams
from quickbeam.serve.anthropic_request import CountRequest, MessagesRequest
from quickbeam.serve.calls import ParsedCall
from quickbeam.serve.errors import problem
from quickbeam.serve.prompts import encode_conversation, estimate_conversation
from quickbeam.serve.runner import Runner
from quickbeam.serve.thoughts import Part, ThoughtParser, opens_thought
from quickbeam.serve.tools import ToolUse, tool_use

UNSIGNED = "unsigned"  # the signature of thoughts, which nobody verifies


async def begin(runner: Runner, request: MessagesRequest) -> AnsweredMessage:
    """Have the engine begin with a request to `/v1/messages`."""
    answers, tools = await convert.begin_conversation(runner, request, request.conversation)
    return AnsweredMessage(runner, request, answers, tools)


async def count_tokens(runner: Runner, request: CountRequest) -> Json:
    """Return the number of tokens of a request's prompt."""
    llm = runner.llm
    conversation = request.conversation
    with convert.named(request):
        convert.check_model(runner, request.model)
        tools = (await asyncio.to_thread(tool_use, request, llm.tokenizer)).tools
        ids = await runner.tokenise(
            lambda: encode_conversation(llm, conversation, tools),
            estimate_conversation(conversation, tools),
            TENANT.get(),
            bool(conversation.images),
        )
    return {"input_tokens": len(ids)}


def models(runner: Runner) -> Json:
    """Return Anthropic's list of models: the served one by each of its names."""
    names = runner.names
    return {
        "data": [model(runner, name) for name in names],
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
    }


def model(runner: Runner, name: str) -> Json:
    """Return Anthropic's model object."""
    context = runner.llm.room(0)
    started = datetime.fromtimestamp(runner.started, timezone.utc)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": started.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


class AnsweredMessage(AnsweredRequest):
    """A request to Anthropic's API while it is answered."""

    keep_alive: ClassVar[Json] = {"event": "ping", "data": '{"type": "ping"}'}

    def __init__(
        self, runner: Runner, request: MessagesRequest, answers: Streams, tools: ToolUse
    ) -> None:
        self.answers = answers
        self._max_tokens = request.max_tokens
        tokenizer = runner.llm.tokenizer
        (prompt,) = answers.prompts
        self._parser = tools.parser(prompt, tokenizer)
        # an answer that keeps to a grammar has no thought, whatever the prompt ends with
        self._blocks = Blocks(opens_thought(prompt, tokenizer) and not request.grammars)
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": runner.name,
            "system_fingerprint": runner.fingerprint,
            "seed": answers.seeds[0],
        }

    def response(self, completions: Sequence[Completion]) -> Json:
        (completion,) = completions
        for _ in self._blocks.add([*self._parser.feed(completion.text), *self._parser.finish()]):
            pass
        for _ in self._blocks.end():
            pass
        content = {"content": self._blocks.content}
        return {**self._head, **content, **self._stop(completion), "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[Json]:
        with self.answers as answers:
            empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._head, **empty, "usage": self._usage()}
            yield {"type": "message_start", "message": message}
            async for _, delta in answers.parts():
                if delta is not None:
                    for event in self._blocks.add(self._parser.feed(delta.text)):
                        yield event
            for event in self._blocks.add(self._parser.finish()):
                yield event
            for event in self._blocks.end():
                yield event
            (completion,) = answers.completions
            stop = self._stop(completion)
            yield {"type": "message_delta", "delta": stop, "usage": self._usage()}
            yield {"type": "message_stop"}

    async def events(self) -> AsyncIterator[dict[str, str]]:
        """Yield the events as server-sent events; an error becomes the last one."""
        try:
            async for event in self.chunks():
                yield {"event": event["type"], "data": json.dumps(event)}
        except Exception as error:
            yield {"event": "error", "data": json.dumps(problem(error).anthropic_body())}

    def _stop(self, completion: Completion) -> Json:
        """Return why an answer ended. Where it calls tools, the client has to run them first."""
        sequence = None
        if completion.finish_reason == "length":
            is_cut = len(completion.token_ids) < self._max_tokens
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif self._parser.count:
            reason = "tool_use"
        elif completion.stop_string is not None:
            reason = "stop_sequence"
            sequence = completion.stop_string
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> Json:
        """Return the counts so far. The tokens of the prompt that were cached count apart."""
        usage = self.answers.usage("input", "output")
        cached = usage["input_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["input_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["output_tokens"],
            "steps": usage["steps"],
        }


class Blocks:
    """The content blocks of a message, and the events that tell how they grow.

    `thinking`: whether the prompt opened a thought.
    """

    def __init__(self, thinking: bool) -> None:
        self.content = list[Json]()
        self._thoughts = ThoughtParser(thinking)
        self._open: Json | None = None  # the last block, if text may be added to it

    def add(self, pieces: Sequence[str | ParsedCall]) -> Iterator[Json]:
        """Add text and tool calls, and yield their events."""
        for piece in pieces:
            if isinstance(piece, ParsedCall):
                yield from self._add_parts(self._thoughts.flush())
                yield from self._add_call(piece)
            else:
                yield from self._add_parts(self._thoughts.feed(piece))

    def end(self) -> Iterator[Json]:
        """End the content, and yield the events of that."""
        yield from self._add_parts(self._thoughts.flush())
        if not self.content:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end_block()

    def _add_parts(self, parts: Sequence[Part]) -> Iterator[Json]:
        for kind, text in parts:
            if self._open is None or self._open["type"] != kind:
                yield from self._end_block()
                signature = {"signature": ""} if kind == "thinking" else {}
                yield from self._begin({"type": kind, kind: "", **signature})
            assert self._open is not None
            self._open[kind] += text
            yield self._delta(f"{kind}_delta", kind, text)

    def _add_call(self, call: ParsedCall) -> Iterator[Json]:
        yield from self._end_block()
        yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        assert self._open is not None
        self._open["input"] = json.loads(call.arguments)
        yield self._delta("input_json_delta", "partial_json", call.arguments)
        yield from self._end_block()

    def _begin(self, block: Json) -> Iterator[Json]:
        self.content.append(block)
        self._open = block
        # a copy, as the block itself grows further
        yield {**self._event("content_block_start"), "content_block": {**block}}

    def _end_block(self) -> Iterator[Json]:
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            self._open["signature"] = UNSIGNED
            yield self._delta("signature_delta", "signature", UNSIGNED)
        self._open = None
        yield self._event("content_block_stop")

    def _delta(self, kind: str, field: str, value: str) -> Json:
        return {**self._event("content_block_delta"), "delta": {"type": kind, field: value}}

    def _event(self, kind: str) -> Json:
        """Return an event about the last block."""
        return {"type": kind, "index": len(self.content) - 1}
