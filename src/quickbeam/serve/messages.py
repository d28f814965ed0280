"""Requests to chats, completions and about tokens. Knows nothing of models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.serve.schemas import (
    NAME,
    BaseRequest,
    Body,
    Few,
    GenerationRequest,
    GrammarField,
    Ids,
    LenientBody,
    Many,
    Object,
    Root,
    Some,
    refuse,
    text_part,
)


class BaseFunction(Body):
    """What all tools have that a client runs."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    allowed_callers: Few[str] | None = None
    # each tool is shown, as there is no search for those that are deferred
    defer_loading: bool | None = None


class Function(BaseFunction):
    parameters: Object | None = None
    strict: bool | None = None
    output_schema: Object | None = None  # of what a program would read


class Tool(Body):
    type: Literal["function"]
    function: Function


class CustomFunction(BaseFunction):
    format: Object | None = None


class CustomTool(Body):
    """A function of one text, which a client gives and gets back in a form of its own."""

    type: Literal["custom"]
    custom: CustomFunction


class HostedTool(LenientBody):
    """A tool that another server would run. It is left out."""

    type: str


def nested(value: Any) -> Any:
    """Return a tool, or the choice of one, in the form of chats: `{"type": TYPE, TYPE: {…}}`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("function", "custom", "allowed_tools") or kind in value:
        return value
    return {"type": kind, kind: {name: value[name] for name in value if name != "type"}}


def flat(value: dict[str, Any]) -> dict[str, Any]:
    """Return a tool, or the choice of one, in the form of the Responses API."""
    kind = value["type"]
    if kind == "namespace":
        return {**value, "tools": flat_tools(value["tools"])}
    return {"type": kind, **value[kind]} if kind in value else value


def flat_tools(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in the form of the Responses API, without those that are left out."""
    return [flat(tool) for tool in tools if tool.keys() != HostedTool.model_fields.keys()]


def _kind_of_tool(value: Any) -> str:
    """Return the tag of a tool, given as JSON or, when it is dumped, as an object."""
    given = isinstance(value, dict)
    kind = value.get("type", "function") if given else getattr(value, "type", "function")
    return f"{kind} tool" if kind in ("function", "custom", "namespace") else "hosted tool"


def _kind_in_namespace(value: Any) -> str:
    kind = _kind_of_tool(value)
    return "hosted tool" if kind == "namespace tool" else kind


FUNCTION_TAG, CUSTOM_TAG, HOSTED_TAG = map(Tag, ("function tool", "custom tool", "hosted tool"))
ToolInNamespace = Annotated[
    Annotated[Tool, FUNCTION_TAG]
    | Annotated[CustomTool, CUSTOM_TAG]
    | Annotated[HostedTool, HOSTED_TAG],
    Discriminator(_kind_in_namespace),
    BeforeValidator(nested),
]


class Namespace(Body):
    """Tools that share the first part of their names."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    tools: Few[ToolInNamespace]


AnyTool = Annotated[
    Annotated[Tool, FUNCTION_TAG]
    | Annotated[CustomTool, CUSTOM_TAG]
    | Annotated[Namespace, Tag("namespace tool")]
    | Annotated[HostedTool, HOSTED_TAG],
    Discriminator(_kind_of_tool),
    BeforeValidator(nested),
]


class OfferedTool(NamedTuple):
    """A tool as a model is shown it, and how the client names it."""

    shown: Tool
    name: str
    namespace: str | None
    custom: bool


# the argument of a custom tool, which is shown as a function
INPUT = "input"
ONE_TEXT = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def name_shown(name: str, namespace: str | None) -> str:
    """Return the name by which a model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def offered_tool(tool: Tool | CustomTool, namespace: str | None = None) -> OfferedTool:
    """Return a tool as a model is shown it."""
    if isinstance(tool, Tool):
        function, custom = tool.function, False
    else:
        function = Function(name=tool.custom.name, parameters=ONE_TEXT)
        function.description, custom = tool.custom.description, True
    shown = function.model_copy(update={"name": name_shown(function.name, namespace)})
    return OfferedTool(Tool(type="function", function=shown), function.name, namespace, custom)


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool's call from the arguments of a function's call.

    All arguments, as they are, where a model gave others than it was asked for.
    """
    text = json.loads(arguments).get(INPUT)
    return text if isinstance(text, str) else arguments


def offered_tools(
    tools: Sequence[AnyTool] | None, namespace: str | None = None
) -> list[OfferedTool]:
    """Return the tools that a model is shown."""
    offered = list[OfferedTool]()
    for tool in tools or []:
        if isinstance(tool, Namespace):
            offered += offered_tools(tool.tools, tool.name)
        elif not isinstance(tool, HostedTool) and is_called(tool):
            offered.append(offered_tool(tool, namespace))
    return offered


def is_called(tool: Tool | CustomTool) -> bool:
    """Return whether a model may call a tool itself, and not only by programs that it writes."""
    callers = (tool.function if isinstance(tool, Tool) else tool.custom).allowed_callers
    return callers is None or "direct" in callers


def ignored_tools(tools: Sequence[AnyTool] | None, where: str = "tools") -> Iterator[str]:
    """Yield notes on what of the tools is left out."""
    for number, tool in enumerate(tools or []):
        name = f"{where}[{number}]"
        if isinstance(tool, HostedTool):
            yield f"{name} ({tool.type[:64]})"
        elif isinstance(tool, Namespace):
            yield from ignored_tools(tool.tools, f"{name}.tools")
        elif not is_called(tool):
            yield f"{name}.allowed_callers"
        elif isinstance(tool, CustomTool) and (tool.custom.format or {}).get("type") == "grammar":
            yield f"{name}.format"


ToolMode = Literal["none", "auto", "required"]
# fields that hold an answer to a schema, but not the tool calls that may come instead
ANSWER_FORMATS = ("response_format", "text")


class FunctionName(Body):
    name: str
    namespace: str | None = None


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class NamedCustomTool(Body):
    type: Literal["custom"]
    custom: FunctionName


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Few[Object]

    @property
    def names(self) -> set[str]:
        """The names of the tools, and of namespaces."""
        names = set[str]()
        for tool in self.tools:
            match tool:
                case (
                    {"function": {"name": str(name)}}
                    | {"custom": {"name": str(name)}}
                    | {"name": str(name)}
                ):
                    names.add(name)
        return names


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
        raise refuse(
            f"this server runs no {kind[:64]!r}: choose a function, or give auto, required or none"
        )
    return nested(value)


ToolChoice = Annotated[
    ToolMode | NamedTool | NamedCustomTool | AllowedTools, BeforeValidator(_choice)
]


def check_tools(
    tools: list[Tool] | None, choice: ToolMode | NamedTool | None, grammars: list[GrammarField]
) -> None:
    """Raise a validation error if tools, tool choice and grammars don't fit together."""
    names = [tool.function.name for tool in tools or []]
    if choice not in (None, "none", "auto") and not names:
        raise refuse("there are no tools to choose from: give tools, too", "tool_choice")
    if len(set(names)) < len(names):
        raise refuse("two have the same name", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise refuse(f"{choice.function.name!r} is not among the tools", "tool_choice")
    if names and choice != "none" and grammars and grammars[0].param not in ANSWER_FORMATS:
        raise refuse(
            f"an answer that keeps to a grammar can't call tools: leave it out, give a schema in "
            f"{' or '.join(ANSWER_FORMATS)} instead, or give tool_choice none",
            grammars[0].param,
        )


class TextPart(LenientBody):
    type: Literal["text"]
    text: str


def _refusal_as_text(part: Any) -> Any:
    match part:
        case {"type": "refusal", "refusal": text}:
            return {"type": "text", "text": text}
    return part


Part = Annotated[TextPart, text_part("text"), BeforeValidator(_refusal_as_text)]
Content = str | Some[Part]
# of what was said before, whatever it was: an empty list is an empty text
PastContent = str | Many[Part]


def text_of(content: str | list[Any] | None) -> str:
    """Return the text of a content, with each of its parts on a line of its own."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or [])


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class CalledFunction(LenientBody):
    """What a model called. Its arguments need not be JSON, as models make mistakes."""

    name: str
    arguments: Annotated[str, BeforeValidator(_as_text)] = ""


class ToolCall(LenientBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, call: Any) -> Any:
        match call:
            case {"type": "custom", "custom": {"name": name, "input": text}, **more}:
                return {**more, "function": {"name": name, "arguments": {INPUT: text}}}
        return call


class UserMessage(Body):
    role: Literal["user", "system", "developer"]
    content: Content
    name: str | None = None


class AssistantMessage(LenientBody):
    """A message of the assistant. `reasoning` is what vLLM calls `reasoning_content`."""

    role: Literal["assistant"]
    content: PastContent | None = None
    name: str | None = None
    tool_calls: Few[ToolCall] | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    # they would say something to a model
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, body: Any) -> Any:
        """Take a refusal as content; check that there is a field which may hold what was said."""
        if not isinstance(body, dict):
            return body
        if not body.keys() & SAYING:
            raise refuse("give content or tool_calls")
        if body.get("content") is None and isinstance(body.get("refusal"), str):
            return {**body, "content": body["refusal"]}
        return body


# fields of an assistant's message one of which is given, even if it is empty
SAYING = {"content", "tool_calls", "reasoning_content", "reasoning", "refusal", "function_call"}


class ToolMessage(LenientBody):
    role: Literal["tool"]
    content: PastContent | None = None
    tool_call_id: str
    name: str | None = None


Message = Annotated[UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Conversation(Body):
    """What a chat template makes a prompt from."""

    prompt_field: ClassVar[str] = "messages"

    messages: Some[Message]
    tools: Few[AnyTool] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.add_generation_prompt is bool(self.continue_final_message):
            raise refuse(
                "an answer either continues the final message or is a message of its own: leave "
                "it out",
                "add_generation_prompt",
            )
        return self


class ToolRequest(BaseRequest):
    """The fields about tools that chats and the Responses API share."""

    effort_field: ClassVar[str]  # says how much to reason

    tools: Few[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _names_tools_left_out(self) -> Self:
        for note in ignored_tools(self.tools):
            self.ignore(note)
        return self

    @property
    def offered(self) -> dict[str, OfferedTool]:
        """The tools that a model may call, by the names that it knows."""
        return {one.shown.function.name: one for one in self._allowed}

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that a model may call, as it is shown them."""
        return [one.shown for one in self._allowed]

    @property
    def _allowed(self) -> list[OfferedTool]:
        every = offered_tools(self.tools)
        if not isinstance(self.tool_choice, AllowedTools):
            return every
        names = self.tool_choice.allowed_tools.names
        return [one for one in every if names & {one.name, one.namespace}]

    @property
    def choice(self) -> ToolMode | NamedTool | None:
        """What is chosen of `shown_tools`."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode
        if not isinstance(choice, NamedTool | NamedCustomTool):
            return choice
        named = choice.function if isinstance(choice, NamedTool) else choice.custom
        shown = FunctionName(name=name_shown(named.name, named.namespace))
        return NamedTool(type="function", function=shown)


class Prediction(Body):
    """A guess at the answer. It may only change how long an answer takes, and here does not."""

    type: Literal["content"]
    content: Content


class ChatRequest(ToolRequest, Conversation, GenerationRequest):
    effort_field: ClassVar[str] = "reasoning_effort"
    length_fields: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    modalities: Few[Literal["text"]] | None = None
    prediction: Prediction | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    web_search_options: Object | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refuse("needs logprobs: true", "top_logprobs")
        lengths = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(lengths) > 1:
            raise refuse("differs from max_completion_tokens: give one of them", "max_tokens")
        check_tools(self.shown_tools, self.choice, self.grammars)
        self.ignore_unless("verbosity", self.verbosity, "medium")
        self.ignore_unless("web_search_options", self.web_search_options)
        return self

    @property
    def scores(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# the most log-probabilities for each token of a prompt: they take memory, and prompts are long
MOST_OF_PROMPTS = 20


class CompletionRequest(GenerationRequest):
    length: ClassVar[int | None] = 16  # as in OpenAI's API

    prompt: str | Some[str] | Annotated[Ids, Field(min_length=1)] | Some[Ids]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_OF_PROMPTS)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    # one for each prompt
    seeds: Many[Annotated[int, Field(ge=-(2**63), lt=2**64)]] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def count(self) -> int:
        return len(self.prompts)

    @property
    def scores(self) -> int | None:
        return self.logprobs

    @property
    def prompt_scores(self) -> int | None:
        """An echo gets as many as `logprobs` says, and without an answer at least 0."""
        if not self.echo or self.prompt_logprobs is not None:
            return self.prompt_logprobs
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        prompts, seeds = self.prompts, self.seeds
        echo, scored = bool(self.echo), self.logprobs is not None
        given = 0 if seeds is None else len(seeds)
        rules = {
            f"{given} seeds for {len(prompts)} prompts: give one for each": (
                "seeds", seeds is not None and given != len(prompts)
            ),
            "given with seed: give one of them": ("seeds", None not in (seeds, self.seed)),
            "needs a prompt of text: give no token ids, or no suffix": (
                "suffix", self.suffix and not all(isinstance(one, str) for one in prompts)
            ),
            "an echo with logprobs is of the prompt's tokens, which hold the suffix and marks "
            "around it: leave out one of suffix, echo and logprobs": (
                "suffix", self.suffix and echo and scored
            ),
            "no more answers are drawn than are given: leave it out, or give the value of n": (
                "best_of", self.best_of not in (None, self.n or 1)
            ),
            "not given in a stream: leave out stream, or give echo and logprobs instead": (
                "prompt_logprobs", self.stream and self.prompt_logprobs is not None
            ),
            f"at most {MOST_OF_PROMPTS} with echo: give fewer": (
                "logprobs", echo and (self.logprobs or 0) > MOST_OF_PROMPTS
            ),
            "logprobs with echo are those of the prompt, too: give one of them": (
                "prompt_logprobs", echo and scored and self.prompt_logprobs is not None
            ),
        }  # fmt: skip
        for what, (param, broken) in rules.items():
            if broken:
                raise refuse(what, param)
        return self


class TokenizeChat(Root, Conversation):
    return_token_strs: bool | None = None


class TokenizeText(Root):
    prompt_field: ClassVar[str] = "prompt"

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    chat = isinstance(body, dict) and body.get("messages") is not None
    return "chat" if chat else "text"


Tokenize = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeChat, Tag("chat")],
    Discriminator(_kind),
]


class Detokenize(Root):
    tokens: Ids
