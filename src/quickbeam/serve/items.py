"""Requests to the Responses API: what they may hold, and how their items become messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.serve.messages import (
    Conversation,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolMode,
    check_tools,
    text_of,
)
from quickbeam.serve.schemas import (
    AskedGrammar,
    Body,
    Few,
    Object,
    PlainFormat,
    Request,
    Returned,
    Schema,
    Some,
    format_grammars,
    refuse,
    text_part,
)

LOGPROBS = "message.output_text.logprobs"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Returned):
    type: Literal["output_text"]
    text: str


ItemText = Annotated[InputText | OutputText, Field(discriminator="type")]
ItemContent = str | Some[Annotated[ItemText, text_part("input_text", "output_text")]]


class Item(Body):
    """The fields that any item may have."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: ItemContent


class AnswerItem(Returned):
    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: ItemContent


class CallItem(Returned):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None  # it would say something to a model


class OutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent
    name: str | None = None


def _kind(item: Any) -> str:
    fields = item if isinstance(item, dict) else {}
    if (kind := fields.get("type", "message")) != "message":
        return str(kind)
    return "answer" if fields.get("role") == "assistant" else "message"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[AnswerItem, Tag("answer")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


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

    input: str | Some[AnyItem]
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
        messages = list[dict[str, Any]]()
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        for item in self.input if not isinstance(self.input, str) else ():
            if isinstance(item, CallItem):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, OutputItem):
                about = {"role": "tool", "tool_call_id": item.call_id, "name": item.name}
                messages.append({**about, "content": text_of(item.output)})
            else:
                messages.append({"role": item.role, "content": text_of(item.content)})
        return Conversation.model_validate(
            {
                "messages": messages,
                "tools": self.chat_tools,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        )
