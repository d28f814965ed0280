"""Requests to the Responses API: what they may hold, and how their items become messages.

Knows nothing of models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.serve.messages import (
    AssistantMessage,
    CalledFunction,
    Conversation,
    Function,
    FunctionName,
    Message,
    NamedTool,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    ToolMode,
    UserMessage,
    check_tools,
)
from quickbeam.serve.schemas import (
    NAME,
    Body,
    JsonObject,
    JsonSchema,
    Request,
    Schema,
    TextFormat,
    Unsupported,
    only,
    refuse,
    text_part,
)

LOGPROBS = "message.output_text.logprobs"


class ItemText(Body):
    """A text part of an item.

    The fields after `text` are accepted because clients send back output items, which have them.
    """

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, only(None, [])] = None
    logprobs: Any = None


ItemContent = (
    str
    | Annotated[
        list[Annotated[ItemText, text_part("input_text", "output_text")]], Field(min_length=1)
    ]
)


class Item(Body):
    """The fields that any item may have."""

    id: str | None = None
    status: str | None = None
    caller: Unsupported = None
    namespace: Unsupported = None


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    phase: Unsupported = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent
    name: str | None = None


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, only(None, ["direct"])] = None
    defer_loading: Annotated[Any, only(None, False)] = None
    output_schema: Unsupported = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class JsonSchemaFormat(Schema):
    type: Literal["json_schema"]


class TextConfig(Body):
    format: (
        Annotated[TextFormat | JsonObject | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Annotated[Any, only(None, "medium")] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[Any, only(None, False)] = None


class ResponsesRequest(Request):
    """The body of `/v1/responses`. Nothing is stored: each request holds the whole conversation."""

    input: str | Annotated[list[AnyItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolMode | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    # encrypted reasoning is accepted without effect, as there is no reasoning
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Annotated[Any, only(None, "disabled")] = None
    background: Annotated[Any, only(None, False)] = None
    reasoning: Annotated[Any, only(None, {})] = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None
    context_management: Unsupported = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("it is for streams: set stream, too", "stream_options")
        if len(given := self.grammars) > 1:
            raise refuse(
                f"given with {given[0]}, but an answer keeps to one grammar: give one of them",
                given[1],
            )
        check_tools(self.chat_tools, self.choice, self.grammars)
        return self

    @property
    def grammars(self) -> list[str]:
        return ["text" if name == "response_format" else name for name in super().grammars]

    @property
    def response_format(self) -> JsonObject | JsonSchema | None:
        """`text.format` in the form of chats; None for plain text."""
        asked = self.text and self.text.format
        if isinstance(asked, JsonSchemaFormat):
            schema = Schema(name=asked.name, schema=asked.schema_, strict=asked.strict)
            return JsonSchema(type="json_schema", json_schema=schema)
        return asked if isinstance(asked, JsonObject) else None

    @property
    def chat_tools(self) -> list[Tool]:
        """The tools in the form of chats."""
        kept = {"name", "description", "parameters", "strict"}
        return [
            Tool(type="function", function=Function(**tool.model_dump(include=kept)))
            for tool in self.tools or []
        ]

    @property
    def choice(self) -> ToolMode | NamedTool | None:
        """`tool_choice` in the form of chats."""
        chosen = self.tool_choice
        return (
            NamedTool(type="function", function=FunctionName(name=chosen.name))
            if isinstance(chosen, FunctionChoice)
            else chosen
        )

    def to_conversation(self) -> Conversation:
        """Return the input as a conversation.

        Tool calls become part of the assistant's message directly before them, or else a message of
        their own.
        """
        found = list[Message]()
        if self.instructions is not None:
            found.append(SystemMessage(role="system", content=self.instructions))
        items = (
            [MessageItem(role="user", content=self.input)]
            if isinstance(self.input, str)
            else self.input
        )
        for item in items:
            if isinstance(item, CallItem):
                called = CalledFunction(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, type="function", function=called)
                if found and isinstance(last := found[-1], AssistantMessage):
                    last.tool_calls = [*(last.tool_calls or []), call]
                else:
                    found.append(AssistantMessage(role="assistant", tool_calls=[call]))
            elif isinstance(item, OutputItem):
                found.append(
                    ToolMessage(
                        role="tool",
                        content=_text(item.output),
                        tool_call_id=item.call_id,
                        name=item.name,
                    )
                )
            elif item.role == "assistant":
                found.append(AssistantMessage(role="assistant", content=_text(item.content)))
            elif item.role == "user":
                found.append(UserMessage(role="user", content=_text(item.content)))
            else:
                found.append(SystemMessage(role=item.role, content=_text(item.content)))
        return Conversation(messages=found, chat_template_kwargs=self.chat_template_kwargs)


def _text(content: ItemContent) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
