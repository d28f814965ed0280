"""The bodies of requests to `/v1/messages` and `/v1/messages/count_tokens`, as conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.errors import InvalidInput
from quickbeam.grammar.spec import Grammar
from quickbeam.models.vision.image import check_data_url
from quickbeam.serve.messages import (
    AssistantMessage,
    CalledFunction,
    Content,
    Conversation,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
    text_of,
)
from quickbeam.serve.schemas import (
    Body,
    Few,
    GrammarField,
    LenientBody,
    Many,
    Object,
    ShortTexts,
    Some,
    part_of,
    refuse,
)
from quickbeam.serve.tool_fields import (
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolMode,
    ToolRequest,
)

TOOL_NAME = r"^[a-zA-Z0-9_-]{1,128}$"  # they need no escaping in a grammar
# what Claude Code puts before its instructions: it changes with each request, and no prefix that
# begins with it is in the cache
BILLING = "x-anthropic-billing-header:"
# blocks of an answer that stand for what other servers do
LEFT_OUT = (
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
)
KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}


class ImageSource(LenientBody):
    type: Literal["base64"]
    media_type: str
    data: str


class Image(LenientBody):
    type: Literal["image"]
    source: ImageSource

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        try:
            check_data_url(self._url)
        except InvalidInput as error:
            raise refuse(str(error)) from error
        return self

    @property
    def _url(self) -> str:
        return f"data:{self.source.media_type};base64,{self.source.data}"

    @property
    def part(self) -> ImagePart:
        """The block as a part of a chat's message."""
        url = ImageURL.model_construct(url=self._url, detail=None)  # which is checked
        return ImagePart.model_construct(type="image_url", image_url=url)


ResultBlock = Annotated[
    Annotated[TextPart | Image, Field(discriminator="type")], part_of("text", "image")
]


class ToolResult(LenientBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[ResultBlock] | None = None
    is_error: bool | None = None

    @property
    def images(self) -> list[ImagePart]:
        """The images in the result, for a message of the user's behind it."""
        blocks = self.content if isinstance(self.content, list) else []
        return [block.part for block in blocks if isinstance(block, Image)]

    @property
    def message(self) -> ToolMessage:
        """The result as a chat's message. Chats have no mark of an error, so it is a word."""
        text = text_of(self.content)
        if self.is_error:
            text = f"Error: {text}"
        return ToolMessage(role="tool", tool_call_id=self.tool_use_id, content=text)


class ToolUse(LenientBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Object

    @property
    def call(self) -> ToolCall:
        """The block as a chat's call."""
        function = CalledFunction(name=self.name, arguments=json.dumps(self.input))
        return ToolCall(id=self.id, function=function)


class Thinking(LenientBody):
    type: Literal["thinking"]
    thinking: str


class LeftOut(LenientBody):
    """A block that no prompt is made from."""

    type: str


def _kind_of_block(block: Any) -> str:
    """Return the tag of a block. No tag is a field's name, so that errors name the right field."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("thinking", "tool_use"):
        return f"{kind} block"
    return "left out" if kind in LEFT_OUT else "text block"


UserBlock = Annotated[
    Annotated[TextPart | Image | ToolResult, Field(discriminator="type")],
    part_of("text", "image", "tool_result"),
]
AssistantBlock = Annotated[
    Annotated[TextPart, Tag("text block")]
    | Annotated[Thinking, Tag("thinking block")]
    | Annotated[ToolUse, Tag("tool_use block")]
    | Annotated[LeftOut, Tag("left out")],
    Discriminator(_kind_of_block),
    part_of("text", "thinking", "tool_use", *LEFT_OUT),
]


def _texts(content: str | Iterable[object]) -> list[TextPart]:
    """Return the text of a content as parts. Other blocks are left out."""
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [block for block in content if isinstance(block, TextPart)]


def _parts(content: str | Iterable[object]) -> list[TextPart | ImagePart]:
    """Return the text and the images of a content as parts of a chat's message."""
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    parts = list[TextPart | ImagePart]()
    for block in content:
        if isinstance(block, Image):
            parts.append(block.part)
        elif isinstance(block, TextPart | ImagePart):
            parts.append(block)
    return parts


def _user_message(parts: Sequence[TextPart | ImagePart]) -> UserMessage:
    return UserMessage.model_construct(role="user", content=parts)  # which are checked


class UserInput(Body):
    role: Literal["user"]
    content: str | Some[UserBlock]

    @property
    def chat_messages(self) -> Iterator[Message]:
        """The messages of a chat that this one stands for."""
        blocks = _texts(self.content) if isinstance(self.content, str) else self.content
        for are_results, same_kind in groupby(blocks, lambda block: isinstance(block, ToolResult)):
            if not are_results:
                yield _user_message(_parts(same_kind))
                continue
            results = [block for block in same_kind if isinstance(block, ToolResult)]
            yield from (result.message for result in results)
            images = [image for result in results for image in result.images]
            if images:
                yield _user_message(images)


class SystemInput(Body):
    """What the system says in the midst, where many chat templates take no such message."""

    role: Literal["system"]
    content: Content

    @property
    def chat_messages(self) -> Iterator[Message]:
        """The messages of a chat that this one stands for."""
        text = f"<system>\n{text_of(self.content)}\n</system>"
        yield _user_message([TextPart(type="text", text=text)])


class AssistantInput(LenientBody):
    role: Literal["assistant"]
    content: str | Many[AssistantBlock]

    @property
    def blocks(self) -> Sequence[AssistantBlock]:
        return _texts(self.content) if isinstance(self.content, str) else self.content

    @property
    def chat_messages(self) -> Iterator[Message]:
        """The messages of a chat that this one stands for."""
        blocks = self.blocks
        thoughts = [block.thinking for block in blocks if isinstance(block, Thinking)]
        yield AssistantMessage.model_construct(  # of parts that are checked
            role="assistant",
            content=_texts(blocks),
            tool_calls=[block.call for block in blocks if isinstance(block, ToolUse)],
            reasoning_content="\n\n".join(thoughts) or None,
        )


InputMessage = Annotated[UserInput | SystemInput | AssistantInput, Field(discriminator="role")]


def _client_tool(tool: Any) -> Any:
    """Refuse a tool that Anthropic's server would run, or whose schema only its models know."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise refuse(
            f"a tool of type {kind[:64]!r}: this server runs no tools, and gives models no schema "
            "of their own: leave it out, or give a tool with a name and an input_schema"
        )
    return tool


class ClientTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    input_schema: Object
    strict: bool | None = None
    allowed_callers: Few[str] | None = None
    # each tool is shown, as there is no search for those that are deferred
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Many[Object] | None = None

    @property
    def is_called(self) -> bool:
        """Whether a model may call the tool itself, and not only by programs that it writes."""
        return self.allowed_callers is None or "direct" in self.allowed_callers

    @property
    def shown(self) -> Tool:
        """The tool as a model is shown it."""
        function = Function.model_construct(  # of parts that are checked
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool.model_construct(type="function", function=function)


class Choice(Body):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _is_of_one_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise refuse("give a name with the type 'tool', and with no other one")
        return self


class ThinkingConfig(Body):
    """How to think. How long, and what is shown of it, can't be chosen here."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


def _none_empty(texts: list[str]) -> list[str]:
    if not all(texts):
        raise refuse("one of them is empty: leave it out")
    return texts


class CountRequest(ToolRequest):
    """The body of a request to `/v1/messages/count_tokens`: what a prompt is made from."""

    effort_field: ClassVar[str] = "output_config.effort"
    schema_field: ClassVar[str] = "input_schema"
    strict_field: ClassVar[str] = "strict"
    prompt_field: ClassVar[str] = "messages"
    cuts_length: ClassVar[bool] = True

    messages: Some[InputMessage]
    system: str | Many[Annotated[TextPart, part_of("text")]] | None = None
    tools: Few[Annotated[ClientTool, BeforeValidator(_client_tool)]] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    stop: Annotated[ShortTexts, AfterValidator(_none_empty)] | None = Field(
        default=None, alias="stop_sequences"
    )
    chat_template_kwargs: Object | None = None
    context_management: Object | None = None
    diagnostics: Object | None = None
    inference_geo: str | None = None
    speed: str | None = None
    # notes of the caller, without effect
    metadata: Object | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.check_tools()
        self._name_what_is_left_out()
        last = self.conversation.messages[-1]
        if isinstance(last, AssistantMessage) and last.tool_calls:
            raise refuse("the last one calls tools: give their results, too", "messages")
        return self

    def _name_what_is_left_out(self) -> None:
        for number, tool in enumerate(self.tools or []):
            if not tool.is_called:
                self.ignore(f"tools[{number}].allowed_callers")
        for number, message in enumerate(self.messages):
            blocks = message.blocks if isinstance(message, AssistantInput) else ()
            for position, block in enumerate(blocks):
                if isinstance(block, LeftOut):
                    self.ignore(f"messages[{number}].content[{position}] ({block.type})")
        if self.thinking is not None:
            self.ignore_unless("thinking.budget_tokens", self.thinking.budget_tokens)
            self.ignore_unless("thinking.display", self.thinking.display, "summarized")
            if self.thinking.type == "between_tools":
                self.ignore("thinking.type")
        kept = {"edits": [KEEP_THINKING]}
        self.ignore_unless("context_management", self.context_management, {"edits": []}, kept, {})
        self.ignore_unless("diagnostics", self.diagnostics)
        self.ignore_unless("inference_geo", self.inference_geo)
        self.ignore_unless("speed", self.speed, "standard")

    @property
    def shown_tools(self) -> list[Tool]:
        return [tool.shown for tool in self.tools or [] if tool.is_called]

    @property
    def choice(self) -> ToolMode | NamedTool | None:
        if self.tool_choice is None:
            return None
        match self.tool_choice.type:
            case "tool":
                name = FunctionName(name=self.tool_choice.name or "")
                return NamedTool(type="function", function=name)
            case "any":
                return "required"
            case mode:
                return mode

    @property
    def several_calls(self) -> bool | None:
        disabled = self.tool_choice.disable_parallel_tool_use if self.tool_choice else None
        return None if disabled is None else not disabled

    @property
    def grammars(self) -> list[GrammarField]:
        output = self.output_config.format if self.output_config else None
        grammars = super().grammars
        if output is None:
            return grammars
        return [GrammarField("output_config", Grammar.json_schema, output.schema_), *grammars]

    @property
    def num_logprobs(self) -> int | None:
        return None

    @cached_property
    def conversation(self) -> Conversation:
        """The request as a conversation. A last message of the assistant is continued, if it has
        any text."""
        messages = self._chat_messages()
        last = messages[-1]
        thinking = self.thinking.type if self.thinking else None
        effort = self.output_config.effort if self.output_config else None
        variables = {"enable_thinking": True} if thinking == "enabled" else {}
        return Conversation.model_construct(  # of parts that are checked
            messages=messages,
            continue_final_message=last.role == "assistant" and bool(text_of(last.content)),
            reasoning_effort="none" if thinking == "disabled" else effort,
            chat_template_kwargs={**variables, **(self.chat_template_kwargs or {})},
        )

    def _chat_messages(self) -> list[Message]:
        """Return a chat's messages. Those of one role that follow each other are one."""
        inputs = list(self.messages)
        system = [part for part in _texts(self.system or []) if not part.text.startswith(BILLING)]
        while inputs and isinstance(inputs[0], SystemInput):
            system += _texts(inputs.pop(0).content)
        messages = list[Message]()
        if system:
            messages.append(UserMessage.model_construct(role="system", content=system))
        translated = (message for each in inputs for message in each.chat_messages)
        for _, same_role in groupby(translated, lambda message: message.role):
            messages += _joined(list(same_role))
        return messages


def _joined(messages: list[Message]) -> list[Message]:
    """Return messages of the same role as one; results of tools stay as they are."""
    if isinstance(messages[0], UserMessage):
        return [_user_message([part for each in messages for part in _parts(each.content or [])])]
    content = [part for message in messages for part in _texts(message.content or [])]
    answers = [message for message in messages if isinstance(message, AssistantMessage)]
    if not answers:
        return messages
    thoughts = [answer.reasoning_content for answer in answers if answer.reasoning_content]
    return [
        AssistantMessage.model_construct(
            role="assistant",
            content=content,
            tool_calls=[call for answer in answers for call in answer.tool_calls or []],
            reasoning_content="\n\n".join(thoughts) or None,
        )
    ]


class MessagesRequest(CountRequest):
    """The body of a request to `/v1/messages`."""

    max_tokens: int
