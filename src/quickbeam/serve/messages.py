"""Requests about conversations: messages, tools and the chat request. Knows nothing of models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from quickbeam.serve.schemas import (
    NAME,
    Body,
    GenerationRequest,
    Root,
    Unsupported,
    only,
    refuse,
    text_part,
)


class Function(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


ToolMode = Literal["none", "auto", "required"]


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


def check_tools(
    tools: list[Tool] | None, choice: ToolMode | NamedTool | None, grammars: list[str]
) -> None:
    """Raise a validation error if tools, tool choice and grammars don't fit together."""
    names = [tool.function.name for tool in tools or []]
    if choice not in (None, "none") and not names:
        raise refuse("there are no tools to choose from: give tools, too", "tool_choice")
    if len(set(names)) < len(names):
        raise refuse("two have the same name", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise refuse(f"{choice.function.name!r} is not among the tools", "tool_choice")
    if names and choice != "none" and grammars:
        raise refuse(
            "an answer that keeps to a grammar can't call tools: leave it out, or give "
            "tool_choice none",
            grammars[0],
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[Annotated[TextPart, text_part("text")]], Field(min_length=1)]


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Body):
    """A message of the assistant.

    `refusal` and the fields after it are accepted because OpenAI's client sends them back, empty.
    """

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: Unsupported = None
    annotations: Annotated[Any, only(None, [])] = None
    audio: Unsupported = None
    function_call: Unsupported = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Conversation(Body):
    """What a chat template makes a prompt from."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, Conversation):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    modalities: Annotated[Any, only(None, ["text"])] = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Annotated[Any, only(None, "medium")] = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("needs logprobs: true", "top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise refuse("differs from max_completion_tokens: give one of them", "max_tokens")
        check_tools(self.tools, self.tool_choice, self.grammars)
        return self


class TokenizeChat(Root, Conversation):
    return_token_strs: bool | None = None
