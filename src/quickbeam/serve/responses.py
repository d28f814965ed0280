"""The endpoint `/v1/responses`, without state: each request holds its whole conversation."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.aio import NOTHING
from quickbeam.engine.result import Completion, Logprob
from quickbeam.grammar.token_texts import TokenTexts
from quickbeam.serve import convert
from quickbeam.serve.calls import ParsedCall
from quickbeam.serve.completions import begin_conversation, chat_logprobs
from quickbeam.serve.errors import problem
from quickbeam.serve.messages import (
    INPUT,
    AssistantMessage,
    Conversation,
    Message,
    OfferedTool,
    ToolRequest,
    UserMessage,
    check_tools,
    custom_input,
    flat,
    flat_tools,
    name_shown,
    text_of,
)
from quickbeam.serve.runner import AnsweredRequest, Json, Runner, Streams
from quickbeam.serve.schemas import (
    Body,
    Few,
    GrammarField,
    LenientBody,
    Object,
    PlainFormat,
    Schema,
    Some,
    format_grammars,
    refuse,
)
from quickbeam.serve.tools import ToolUse, tool_use

LOGPROBS = "message.output_text.logprobs"
# what a response may include; there is no reasoning, so nothing of it is left out
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


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
        case "function_call" | "custom_tool_call" as kind:
            if item.get("call_id") is None:
                raise refuse(f"a {kind} without call_id: give it")
            function = {name: item[name] for name in ("name", "arguments") if name in item}
            if kind == "custom_tool_call":
                function["arguments"] = {INPUT: item.get("input")}
            if isinstance(name := item.get("name"), str):
                function["name"] = name_shown(name, item.get("namespace"))
            call = {"id": item["call_id"], "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output" | "custom_tool_call_output":
            own = {"tool_call_id": item.get("call_id"), "name": item.get("name")}
            return {"role": "tool", "content": _content(item.get("output")), **own}
        case "item_reference":
            if str(item.get("id")).startswith("rs_"):
                return {"type": "reasoning"}
            raise refuse(
                "an item_reference: nothing is stored here, so send the item itself, as clients do "
                "with store: false"
            )
        case kind if kind in LEFT_OUT:
            return item
    raise refuse(f"an item of type {item['type']!r} is not supported by this server: leave it out")


# items of what other servers reason and of the tools that they run
LEFT_OUT = (
    *("reasoning", "web_search_call", "file_search_call", "image_generation_call"),
    *("code_interpreter_call", "computer_call", "computer_call_output", "mcp_list_tools"),
    *("mcp_call", "mcp_approval_request", "mcp_approval_response", "tool_search_call"),
    *("tool_search_output", "local_shell_call", "local_shell_call_output", "shell_call"),
    *("shell_call_output", "apply_patch_call", "apply_patch_call_output", "program"),
    *("program_output", "additional_tools"),
)


class LeftOut(LenientBody):
    """An item that no prompt is made from."""

    type: str


def _kind_of_item(value: Any) -> str:
    return "left out" if isinstance(value, dict) and value.get("type") in LEFT_OUT else "message"


Item = Annotated[
    Annotated[Message, Tag("message")] | Annotated[LeftOut, Tag("left out")],
    Discriminator(_kind_of_item),
    BeforeValidator(_message),
]


class JsonSchemaFormat(Schema):
    type: Literal["json_schema"]


class TextConfig(Body):
    format: Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """How much to reason, and what to say of it, which is nothing here."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesRequest(ToolRequest):
    """The body of `/v1/responses`. Nothing is stored: each request holds the whole conversation."""

    effort_field: ClassVar[str] = "reasoning.effort"
    prompt_field: ClassVar[str] = "input"
    length_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: str | Some[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that this server would run
    text: TextConfig | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    include: Few[str] | None = None
    chat_template_kwargs: Object | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: Few[Object] | None = None
    background: Literal[False] | None = None
    reasoning: Reasoning | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("it is for streams: set stream, too", "stream_options")
        check_tools(self.shown_tools, self.choice, self.grammars)
        self._name_what_is_left_out()
        if not self.conversation.messages:
            raise refuse("no message is left: give one", "input")
        return self

    def _name_what_is_left_out(self) -> None:
        self.ignore_unless("truncation", self.truncation, "disabled")
        self.ignore_unless("context_management", self.context_management, [])
        if self.text is not None:
            self.ignore_unless("text.verbosity", self.text.verbosity, "medium")
        if self.stream_options is not None:
            obfuscated = self.stream_options.include_obfuscation
            self.ignore_unless("stream_options.include_obfuscation", obfuscated, False)
        if self.reasoning is not None:
            self.ignore_unless("reasoning.summary", self.reasoning.summary, "auto")
            generated = self.reasoning.generate_summary
            self.ignore_unless("reasoning.generate_summary", generated, "auto")
            self.ignore_unless("reasoning.context", self.reasoning.context, "auto")
            self.ignore_unless("reasoning.mode", self.reasoning.mode, "standard")
        for number, name in enumerate(self.include or []):
            self.ignore_unless(f"include[{number}] ({name[:64]})", name, *INCLUDED)
        for number, item in enumerate(self.input):
            if isinstance(item, LeftOut):
                self.ignore(f"input[{number}] ({item.type})")

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
        """The input as a conversation; tool calls become part of the message before them.

        Instructions and what the first items say in the system's or developer's name are one
        message, as many chat templates take no second one.
        """
        messages, items = list[Message](), list[Message]()
        if self.instructions is not None:
            messages.append(UserMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            items.append(UserMessage(role="user", content=self.input))
        else:
            items += [one for one in self.input if not isinstance(one, LeftOut)]
        while items and items[0].role in SYSTEM:
            messages.append(items.pop(0))
        if len(messages) > 1:
            text = "\n\n".join(text_of(one.content) for one in messages)
            messages = [UserMessage(role="system", content=text)]
        for one in items:
            last = messages[-1] if messages else None
            calls = one.tool_calls if isinstance(one, AssistantMessage) else None
            if calls and isinstance(last, AssistantMessage):
                every = [*(last.tool_calls or []), *calls]
                messages[-1] = last.model_copy(update={"tool_calls": every})
            else:
                messages.append(one)
        return Conversation.model_construct(  # of parts that are checked
            messages=messages,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


SYSTEM = ("system", "developer")  # roles
FIXED: Json = {"object": "response", "background": False, "error": None, "store": False}
FIXED |= {"previous_response_id": None, "service_tier": "default", "truncation": "disabled"}
# fields of the request that a response repeats, with their defaults
ECHOED: Json = {"instructions": None, "max_output_tokens": None, "metadata": {}, "user": None}
ECHOED |= {"tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0}
ECHOED |= {"reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}}}
ECHOED |= {"temperature": 1.0, "top_p": 1.0}


async def begin(runner: Runner, request: ResponsesRequest) -> Responses:
    several, tokenizer = request.parallel_tool_calls, runner.llm.tokenizer
    wanted = request.shown_tools, request.choice, several, request.grammars, tokenizer
    with convert.named(request):
        calls = await asyncio.to_thread(tool_use, *wanted)
    answers = await begin_conversation(runner, request, request.conversation, calls)
    return Responses(runner, request, answers, calls)


class Responses(AnsweredRequest):
    """A request to the Responses API while it is answered."""

    def __init__(
        self, runner: Runner, request: ResponsesRequest, answers: Streams, calls: ToolUse
    ) -> None:
        self.answers, self._runner, self._request = answers, runner, request
        self._parser = calls.parser(answers.prompts[0], runner.llm.tokenizer)
        scored = request.scores is not None
        texts = TokenTexts(runner.llm.tokenizer) if scored else None
        self._items = Items(texts, request.offered)
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
        repeated["tools"] = flat_tools(repeated.get("tools", ()))
        if isinstance(choice := repeated.get("tool_choice"), dict):
            repeated["tool_choice"] = flat(choice)
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
    """The output items of a response, and the events by which they grow. `texts`: for logprobs.

    `tools`: those that may be called, by the names that the model knows.
    """

    def __init__(self, texts: TokenTexts | None, tools: Mapping[str, OfferedTool]) -> None:
        self.output = list[Json]()
        self._texts, self._tools = texts, tools
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
        tool = self._tools[call.name]
        kind, field, text = "function_call", "arguments", call.arguments
        if tool.custom:
            kind, field, text = "custom_tool_call", "input", custom_input(call.arguments)
        event = f"response.{kind}_{field}"
        prefix = "ctc" if tool.custom else "fc"
        item: Json = {"type": kind, "id": f"{prefix}_{secrets.token_hex(12)}"}
        item |= {"call_id": call.id, "name": tool.name, field: "", "status": "in_progress"}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self.output.append(item)
        yield self._about_item("added")
        where = {"item_id": item["id"], "output_index": len(self.output) - 1}
        yield {"type": f"{event}.delta", "delta": text, **where}
        yield {"type": f"{event}.done", "name": tool.name, field: text, **where}
        item |= {field: text, "status": "completed"}
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
