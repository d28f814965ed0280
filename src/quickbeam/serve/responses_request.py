"""The body of requests to `/v1/responses`. Nothing is stored: it holds the conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.serve.messages import AssistantMessage, Conversation, Message, UserMessage, text_of
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
from quickbeam.serve.tool_fields import INPUT, OpenAIToolRequest, name_shown

LOGPROBS = "message.output_text.logprobs"
# what a response may include; there is no reasoning, so nothing of it is left out
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


def _content(value: Any, images: bool = False) -> Any:
    """Return an item's content in the form of a message's. `images`: whether it may hold some."""
    if not isinstance(value, list):
        return value
    parts = list[Any]()
    for part in value:
        match part:
            case {"type": "output_text", "text": text}:
                parts.append({"type": "text", "text": text})
            case {"type": "input_text"}:
                parts.append({**part, "type": "text"})
            case {"type": "input_image", "image_url": url} if images:
                image = {"url": url, "detail": part.get("detail")}
                parts.append({"type": "image_url", "image_url": image})
            case _:
                parts.append(part)
    return parts


def _message(item: Any) -> Any:
    """Return an item in the form of a chat's message, or as it is where no prompt is made from it.

    Raises a validation error for an item that is not supported.
    """
    if not isinstance(item, dict):
        return item
    match item.get("type"):
        case None | "message":
            message = {name: item[name] for name in item if name not in ("id", "status", "type")}
            if "content" in message:
                message["content"] = _content(message["content"], images=True)
            return message
        case "function_call" | "custom_tool_call":
            return {"role": "assistant", "tool_calls": [_call(item)]}
        case "function_call_output" | "custom_tool_call_output":
            return {
                "role": "tool",
                "content": _content(item.get("output")),
                "tool_call_id": item.get("call_id"),
                "name": item.get("name"),
            }
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


def _call(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item that is a call in the form of a message's calls."""
    kind = item["type"]
    if item.get("call_id") is None:
        raise refuse(f"a {kind} without call_id: give it")
    function = {name: item[name] for name in ("name", "arguments") if name in item}
    if kind == "custom_tool_call":
        function["arguments"] = {INPUT: item.get("input")}
    name = item.get("name")
    if isinstance(name, str):
        function["name"] = name_shown(name, item.get("namespace"))
    return {"id": item["call_id"], "type": "function", "function": function}


# items of what other servers reason and of the tools that they run
LEFT_OUT = (
    "reasoning",
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "tool_search_call",
    "tool_search_output",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "program",
    "program_output",
    "additional_tools",
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
    """How much to reason. Other fields ask for summaries of thoughts, which are not given here."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesRequest(OpenAIToolRequest):
    """The body of a request to `/v1/responses`."""

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
        self.check_tools()
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
        for image in self.conversation.images:
            self.ignore_unless("input_image.detail", image.image_url.detail, "auto")
        for number, name in enumerate(self.include or []):
            self.ignore_unless(f"include[{number}] ({name[:64]})", name, *INCLUDED)
        for number, item in enumerate(self.input):
            if isinstance(item, LeftOut):
                self.ignore(f"input[{number}] ({item.type})")

    @property
    def grammars(self) -> list[GrammarField]:
        text_format = self.text.format if self.text else None
        return [*format_grammars("text", text_format), *super().grammars]

    @property
    def num_logprobs(self) -> int | None:
        scored = self.top_logprobs is not None or LOGPROBS in (self.include or [])
        return (self.top_logprobs or 0) if scored else None

    @property
    def conversation(self) -> Conversation:
        """The input as a conversation; tool calls become part of the message before them.

        Instructions and what the first items say in the system's or developer's name are one
        message, as many chat templates take no second one.
        """
        system = list[Message]()
        if self.instructions is not None:
            system.append(UserMessage(role="system", content=self.instructions))
        items: list[Message]
        if isinstance(self.input, str):
            items = [UserMessage(role="user", content=self.input)]
        else:
            items = [item for item in self.input if not isinstance(item, LeftOut)]
        while items and items[0].role in ("system", "developer"):
            system.append(items.pop(0))
        if len(system) > 1:
            text = "\n\n".join(text_of(message.content) for message in system)
            system = [UserMessage(role="system", content=text)]
        messages = system
        for item in items:
            last = messages[-1] if messages else None
            calls = item.tool_calls if isinstance(item, AssistantMessage) else None
            if calls and isinstance(last, AssistantMessage):
                joined = [*(last.tool_calls or []), *calls]
                messages[-1] = last.model_copy(update={"tool_calls": joined})
            else:
                messages.append(item)
        return Conversation.model_construct(  # of parts that are checked
            messages=messages,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )
