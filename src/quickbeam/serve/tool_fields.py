"""The fields about tools: those that a client offers, and the choice of one. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.serve.schemas import (
    NAME,
    BaseRequest,
    Body,
    Few,
    LenientBody,
    Object,
    refuse,
)


class BaseFunction(Body):
    """The fields that functions and custom tools share."""

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
    """A tool that takes one text. A model is shown it as a function with one argument."""

    type: Literal["custom"]
    custom: CustomFunction


class HostedTool(LenientBody):
    """A tool that another server would run. It is left out."""

    type: str


CHOICE_KINDS = ("function", "custom", "allowed_tools")


def nested(value: Any) -> Any:
    """Return a tool, or the choice of one, in the form of chats: `{"type": TYPE, TYPE: {…}}`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in CHOICE_KINDS or kind in value:
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
    is_json = isinstance(value, dict)
    kind = value.get("type", "function") if is_json else getattr(value, "type", "function")
    return f"{kind} tool" if kind in ("function", "custom", "namespace") else "hosted tool"


def _kind_in_namespace(value: Any) -> str:
    kind = _kind_of_tool(value)
    return "hosted tool" if kind == "namespace tool" else kind


FUNCTION_TAG = Tag("function tool")
CUSTOM_TAG = Tag("custom tool")
HOSTED_TAG = Tag("hosted tool")
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


INPUT = "input"  # the argument of a custom tool, which is shown as a function
INPUT_SCHEMA = {
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
    if isinstance(tool, CustomTool):
        function = Function(
            name=tool.custom.name, description=tool.custom.description, parameters=INPUT_SCHEMA
        )
    else:
        function = tool.function
    shown = function.model_copy(update={"name": name_shown(function.name, namespace)})
    return OfferedTool(
        Tool(type="function", function=shown),
        function.name,
        namespace,
        isinstance(tool, CustomTool),
    )


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool's call from the arguments of a function's call.

    It is all arguments, as they are, where a model gave others than it was asked for.
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
ANSWER_FORMATS = ("response_format", "text", "output_config")


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
    """The choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _nested_choice(value: Any) -> Any:
    """Return the choice of a tool in the form of chats. Refuse one of another server's tools."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in CHOICE_KINDS:
        raise refuse(
            f"this server runs no {kind[:64]!r}: choose a function, or give auto, required or none"
        )
    return nested(value)


ToolChoice = Annotated[
    ToolMode | NamedTool | NamedCustomTool | AllowedTools, BeforeValidator(_nested_choice)
]


class ToolRequest(BaseRequest):
    """What a request asks for in tool calls, in whatever fields its API has for that."""

    effort_field: ClassVar[str]  # says how much to reason
    # fields of a tool, by which errors name them
    schema_field: ClassVar[str] = "function.parameters"
    strict_field: ClassVar[str] = "function.strict"

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that a model may call, as it is shown them."""
        raise NotImplementedError

    @property
    def choice(self) -> ToolMode | NamedTool | None:
        """The choice among `shown_tools`, by the names that the model knows."""
        raise NotImplementedError

    @property
    def several_calls(self) -> bool | None:
        """Whether an answer may hold several calls; None if the request doesn't say."""
        raise NotImplementedError

    def check_tools(self) -> None:
        """Raise a validation error if tools, tool choice and grammars don't fit together."""
        names = [tool.function.name for tool in self.shown_tools]
        choice = self.choice
        grammars = self.grammars
        if choice not in (None, "none", "auto") and not names:
            raise refuse("there are no tools to choose from: give tools, too", "tool_choice")
        if len(set(names)) < len(names):
            raise refuse("two have the same name", "tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise refuse(f"{choice.function.name!r} is not among the tools", "tool_choice")
        if names and choice != "none" and grammars and grammars[0].param not in ANSWER_FORMATS:
            raise refuse(
                f"an answer that keeps to a grammar can't call tools: leave it out, give a schema "
                f"in {' or '.join(ANSWER_FORMATS)} instead, or give tool_choice none",
                grammars[0].param,
            )


class OpenAIToolRequest(ToolRequest):
    """The fields about tools that chats and the Responses API share."""

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
        return {tool.shown.function.name: tool for tool in self._allowed}

    @property
    def shown_tools(self) -> list[Tool]:
        return [tool.shown for tool in self._allowed]

    @property
    def _allowed(self) -> list[OfferedTool]:
        offered = offered_tools(self.tools)
        if not isinstance(self.tool_choice, AllowedTools):
            return offered
        names = self.tool_choice.allowed_tools.names
        return [tool for tool in offered if names & {tool.name, tool.namespace}]

    @property
    def choice(self) -> ToolMode | NamedTool | None:
        match self.tool_choice:
            case AllowedTools(allowed_tools=allowed):
                return allowed.mode
            case NamedTool(function=named) | NamedCustomTool(custom=named):
                shown = FunctionName(name=name_shown(named.name, named.namespace))
                return NamedTool(type="function", function=shown)
            case mode:
                return mode

    @property
    def several_calls(self) -> bool | None:
        return self.parallel_tool_calls
