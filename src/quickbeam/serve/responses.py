"""The endpoint `/v1/responses`, without state: each request holds its whole conversation."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from quickbeam.aio import NOTHING
from quickbeam.engine.result import Completion, Logprob
from quickbeam.serve.completions import begin_conversation, chat_logprobs
from quickbeam.serve.errors import problem
from quickbeam.serve.messages import (
    AssistantMessage,
    Conversation,
    Message,
    NamedTool,
    Tool,
    ToolMessage,
    ToolMode,
    UserMessage,
    check_tools,
)
from quickbeam.serve.runner import AnsweredRequest, Json, Runner, Streams
from quickbeam.serve.schemas import (
    BaseRequest,
    Body,
    Few,
    GrammarField,
    Object,
    PlainFormat,
    Schema,
    Some,
    format_grammars,
    refuse,
)
from quickbeam.serve.tools import ParsedCall, ToolUse, tool_use
from quickbeam.token_texts import TokenTexts

LOGPROBS = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


def _content(value: Any) -> Any:
    """Return an item's content as that of a message, with what it says beside its text left out."""
    if not isinstance(value, list):
        return value
    parts = list[Any]()
    for part in value:
        match part:
            case {"type": "output_text", "text": text}:
                parts.append({"type": "text", "text": text})
            case {"type": "input_text"}:
                parts.append({**part, "type": "text"})
            case _:
                parts.append(part)
    return parts


def _message(item: Any) -> Any:
    """Return an item as the message that it is in a chat, which is checked as such."""
    if not isinstance(item, dict):
        return item
    match item.get("type"):
        case None | "message":
            own = {name: item[name] for name in item if name not in ("id", "status", "type")}
            return {**own, "content": _content(own["content"])} if "content" in own else own
        case "function_call":
            if item.get("call_id") is None:
                raise refuse("a function_call without call_id: give it")
            function = {name: item[name] for name in ("name", "arguments") if name in item}
            call = {"id": item["call_id"], "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            own = {"tool_call_id": item.get("call_id"), "name": item.get("name")}
            return {"role": "tool", "content": _content(item.get("output")), **own}
    raise refuse(f"an item of type {item['type']!r} is not supported by this server: leave it out")


Item = Annotated[Message, BeforeValidator(_message)]


def _nested(value: Any) -> Any:
    """Return a tool, or the choice of one, in the form of chats."""
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {name: value[name] for name in value if name != "type"}}


def _flat(tool: Json) -> Json:
    return {"type": "function", **tool["function"]}


class JsonSchemaFormat(Schema):
    type: Literal["json_schema"]


class TextConfig(Body):
    format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """`summary` and `context` are accepted because a response without reasoning has none."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(BaseRequest):
    """The body of `/v1/responses`. Nothing is stored: each request holds the whole conversation."""

    prompt_field: ClassVar[str] = "input"
    length_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: str | Some[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Few[Annotated[Tool, BeforeValidator(_nested)]] | None = None
    tool_choice: ToolMode | Annotated[NamedTool, BeforeValidator(_nested)] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    # encrypted reasoning is accepted without effect, as there is no reasoning
    include: Few[Include] | None = None
    chat_template_kwargs: Object | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    reasoning: Reasoning | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("it is for streams: set stream, too", "stream_options")
        check_tools(self.tools, self.tool_choice, self.grammars)
        return self

    @property
    def grammars(self) -> list[GrammarField]:
        form = self.text.format if self.text else None
        return [*format_grammars("text", form), *super().grammars]

    @property
    def scores(self) -> int | None:
        scored = self.top_logprobs is not None or LOGPROBS in (self.include or [])
        return (self.top_logprobs or 0) if scored else None

    @property
    def conversation(self) -> Conversation:
        """The input as a conversation; tool calls become part of the message before them."""
        messages = list[UserMessage | AssistantMessage | ToolMessage]()
        if self.instructions is not None:
            messages.append(UserMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(UserMessage(role="user", content=self.input))
        for one in self.input if not isinstance(self.input, str) else ():
            last = messages[-1] if messages else None
            calls = one.tool_calls if isinstance(one, AssistantMessage) else None
            if calls and isinstance(last, AssistantMessage):
                every = [*(last.tool_calls or []), *calls]
                messages[-1] = last.model_copy(update={"tool_calls": every})
            else:
                messages.append(one)
        return Conversation.model_construct(  # of parts that are checked
            messages=messages,
            tools=self.tools,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


FIXED: Json = {"object": "response", "background": False, "error": None, "store": False}
FIXED |= {"previous_response_id": None, "service_tier": "default", "truncation": "disabled"}
# fields of the request that a response repeats, with their defaults
ECHOED: Json = {"instructions": None, "max_output_tokens": None, "metadata": {}, "user": None}
ECHOED |= {"tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0}
ECHOED |= {"reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}}}
ECHOED |= {"temperature": 1.0, "top_p": 1.0}


async def begin(runner: Runner, request: ResponsesRequest) -> Responses:
    conversation, tokenizer = request.conversation, runner.llm.tokenizer
    wanted = request.tools, request.tool_choice, request.parallel_tool_calls, tokenizer
    calls = await asyncio.to_thread(tool_use, *wanted)
    answers = await begin_conversation(runner, request, conversation, calls)
    return Responses(runner, request, answers, calls)


class Responses(AnsweredRequest):
    """A request to the Responses API while it is answered."""

    def __init__(
        self, runner: Runner, request: ResponsesRequest, answers: Streams, calls: ToolUse
    ) -> None:
        self.answers, self._runner, self._request = answers, runner, request
        self._parser = calls.parser()
        scored = request.scores is not None
        self._items = Items(TokenTexts(runner.llm.tokenizer) if scored else None)
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())

    def response(self, completions: Sequence[Completion]) -> Json:
        for _ in self._events(completions[0].text, completions[0].logprobs or [], completions[0]):
            pass
        return self._response(completions[0])

    async def chunks(self) -> AsyncIterator[Json]:
        with self.answers as answers:
            for kind in ("response.created", "response.in_progress"):
                yield {"type": kind, "response": self._response(None)}
            async for _, delta in answers.parts():
                new, end = delta or NOTHING, None if delta else answers.completions[0]
                for event in self._events(new.text, new.logprobs, end):
                    yield event
            response = self._response(answers.completions[0])
            yield {"type": f"response.{response['status']}", "response": response}

    async def events(self) -> AsyncIterator[dict[str, str]]:
        """Yield the events with numbers, as server-sent events; an error becomes the last one."""
        number = 0
        try:
            async for event in self.chunks():
                numbered = {**event, "sequence_number": number}
                yield {"event": event["type"], "data": json.dumps(numbered)}
                number += 1
        except Exception as error:
            about = problem(error)
            event = {"type": "error", "code": about.code or about.type, "message": about.message}
            event |= {"param": about.param, "sequence_number": number}
            yield {"event": "error", "data": json.dumps(event)}

    def _events(
        self, text: str, logprobs: Sequence[Logprob], completion: Completion | None = None
    ) -> Iterator[Json]:
        """Yield the events of new text. `completion` is given if there will be no more text."""
        pieces = [*self._parser.feed(text), *(self._parser.finish() if completion else [])]
        yield from self._items.add(pieces, logprobs)
        if completion is not None:
            yield from self._items.end(completion.finish_reason == "length")

    def _response(self, completion: Completion | None) -> Json:
        """Return the response object; `completion` is None while the answer is not complete."""
        cut = completion is not None and completion.finish_reason == "length"
        repeated = self._request.model_dump(
            by_alias=True, exclude_none=True, include={*ECHOED, "tools"}
        )
        repeated["tools"] = [*map(_flat, repeated.get("tools", ()))]
        if isinstance(choice := repeated.get("tool_choice"), dict):
            repeated["tool_choice"] = _flat(choice)
        defaults = self._runner.defaults
        return {
            **FIXED,
            **ECHOED,
            **{name: defaults[name] for name in ("temperature", "top_p") if name in defaults},
            **repeated,
            "id": self._id,
            "created_at": self._created,
            "status": "in_progress" if completion is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._runner.name,
            "output": [] if completion is None else self._items.output,
            "usage": None if completion is None else self._usage(),
            "system_fingerprint": self._runner.fingerprint,
            "seed": self.answers.seeds[0],
        }

    def _usage(self) -> Json:
        usage = self.answers.usage("input", "output")
        usage["input_tokens_details"]["cache_write_tokens"] = 0
        return usage


class Items:
    """The output items of a response, and the events by which they grow. `texts`: for logprobs."""

    def __init__(self, texts: TokenTexts | None) -> None:
        self.output = list[Json]()
        self._texts = texts
        self._open: Json | None = None  # the message that text is added to
        self._logprobs = list[Json]()  # of tokens whose text has not come yet

    def add(self, pieces: list[str | ParsedCall], logprobs: Sequence[Logprob]) -> Iterator[Json]:
        """Add text and tool calls, and yield their events."""
        if self._texts is not None:
            self._logprobs += chat_logprobs(logprobs, self._texts)["content"]
        for i, piece in enumerate(pieces):
            if isinstance(piece, ParsedCall):
                yield from self._call(piece)
            else:
                # what comes after it has log-probabilities of its own
                last = i == len(pieces) - 1
                yield from self._text(piece, None if last else len(piece.encode()))

    def end(self, cut: bool) -> Iterator[Json]:
        """End the output, and yield the events of that. `cut`: by its length limit."""
        if self._open is None and not self.output:
            yield from self._begin()
        yield from self._close("incomplete" if cut else "completed")

    def _text(self, text: str, size: int | None) -> Iterator[Json]:
        """Add text. It takes the log-probabilities of `size` bytes; None stands for all."""
        if self._open is None:
            yield from self._begin()
        assert self._open is not None
        part, logprobs = self._open["content"][0], self._take(size)
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._event("output_text.delta", delta=text, logprobs=logprobs)

    def _begin(self) -> Iterator[Json]:
        own = {"id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        item: Json = {"type": "message", **own, "status": "in_progress", "content": []}
        self.output.append(item)
        yield self._about_item("added")
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        self._open = item
        yield self._event("content_part.added", part={**part, "logprobs": []})

    def _close(self, status: str = "completed") -> Iterator[Json]:
        if (item := self._open) is None:
            return
        part = item["content"][0]
        part["logprobs"] += self._take()
        item["status"] = status
        yield self._event("output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._event("content_part.done", part=part)
        yield self._about_item("done")
        self._open = None

    def _call(self, call: ParsedCall) -> Iterator[Json]:
        self._take()  # drops the log-probabilities of the call's tokens
        yield from self._close()
        own = {"id": f"fc_{secrets.token_hex(12)}", "call_id": call.id, "name": call.name}
        item = {"type": "function_call", **own, "arguments": "", "status": "in_progress"}
        self.output.append(item)
        yield self._about_item("added")
        where = {"item_id": item["id"], "output_index": len(self.output) - 1}
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", "delta": call.arguments, **where}
        yield {"type": f"{kind}.done", "name": call.name, "arguments": call.arguments, **where}
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._about_item("done")

    def _about_item(self, what: str) -> Json:
        """Return an event with a copy of the last item, as the item itself grows further."""
        last = self.output[-1].items()
        item = {name: [*value] if isinstance(value, list) else value for name, value in last}
        where = {"output_index": len(self.output) - 1}
        return {"type": f"response.output_item.{what}", **where, "item": item}

    def _event(self, kind: str, **more: Any) -> Json:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
        return {"type": f"response.{kind}", **where, "content_index": 0, **more}

    def _take(self, size: int | None = None) -> list[Json]:
        """Take the log-probabilities of the first tokens, which have `size` bytes, or all."""
        end = seen = 0
        while end < len(self._logprobs) and (size is None or seen < size):
            seen += len(self._logprobs[end]["bytes"])
            end += 1
        taken, self._logprobs = self._logprobs[:end], self._logprobs[end:]
        return taken
