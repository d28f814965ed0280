"""Requests to the Responses API: what they may hold, and how their items become messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from quickbeam.serve.messages import (
    AssistantMessage,
    Conversation,
    Function,
    FunctionName,
    Message,
    NamedTool,
    Tool,
    ToolMessage,
    ToolMode,
    UserMessage,
    check_tools,
)
from quickbeam.serve.schemas import (
    AskedGrammar,
    Body,
    Few,
    Object,
    PlainFormat,
    Request,
    Schema,
    Some,
    format_grammars,
    refuse,
)

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
            function = {name: item[name] for name in ("name", "arguments") if name in item}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            own = {"tool_call_id": item.get("call_id"), "name": item.get("name")}
            return {"role": "tool", "content": _content(item.get("output")), **own}
    raise refuse(f"an item of type {item['type']!r} is not supported by this server: leave it out")


Item = Annotated[Message, BeforeValidator(_message)]


class OfFunction(Body):
    type: Literal["function"]


class FunctionTool(Function, OfFunction):
    allowed_callers: Few[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class FunctionChoice(FunctionName, OfFunction):
    pass


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


class ResponsesRequest(Request):
    """The body of `/v1/responses`. Nothing is stored: each request holds the whole conversation."""

    prompt_field: ClassVar[str] = "input"
    length_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: str | Some[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Few[FunctionTool] | None = None
    tool_choice: ToolMode | FunctionChoice | None = None
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
        check_tools(self.chat_tools, self.choice, self.grammars)
        return self

    @property
    def grammars(self) -> list[AskedGrammar]:
        form = self.text.format if self.text else None
        return [*format_grammars("text", form), *super().grammars]

    @property
    def scores(self) -> int | None:
        scored = self.top_logprobs is not None or LOGPROBS in (self.include or [])
        return (self.top_logprobs or 0) if scored else None

    @property
    def chat_tools(self) -> list[Tool]:
        """The tools in the form of chats."""
        return [Tool(type="function", function=tool) for tool in self.tools or []]

    @property
    def choice(self) -> ToolMode | NamedTool | None:
        """`tool_choice` in the form of chats."""
        chosen = self.tool_choice
        if not isinstance(chosen, FunctionChoice):
            return chosen
        return NamedTool(type="function", function=FunctionName(name=chosen.name))

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
        return Conversation.model_validate(
            {
                "messages": messages,
                "tools": self.chat_tools,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        )
