"""Tool calls: how models write them, what a request asks for, and the calls in its answers."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

from quickbeam.grammar.spec import Grammar
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import NamedTool, Tool, ToolMode

CALLS, CONTENT = "tool_calls", "content"  # fields of a response template
# white space that is held back as what stands before a call; the parser reads it anew each time
MOST_SPACE = 64
LETTERS = string.ascii_letters + string.digits  # of short ids


class CallSyntax(NamedTuple):
    """Text around calls: `before`, a call, `between`, a call, …, `after`.

    A call is the first of the `parts`, the tool's name, the second, the arguments, and the third.
    """

    before: str
    parts: tuple[str, str, str]
    between: str | None  # None: an answer holds at most one call
    after: str


class ToolFormat(NamedTuple):
    """How tool calls are read (`field` of a response template of transformers) and written."""

    field: dict[str, Any]
    syntax: CallSyntax | None
    marker: str  # the first text of a call
    short_ids: bool = False  # ids have nine letters and digits, as the template demands


# schema of a call's arguments, without free white space, which a weak model could write endlessly
OBJECT = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
NO_ARGUMENTS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
JSON = {"content": "json"}  # what is read as a call


def function(name: str, arguments: str) -> dict[str, Any]:
    """Return how a response template makes a call from what was read."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


HERMES = ToolFormat(
    {**JSON, "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True}
    | {"transform": {"type": "function", "function": "{content}"}},
    CallSyntax("", ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "\n", ""),
    "<tool_call>",
)
LLAMA3 = ToolFormat(
    # either the whole answer is a call, or it holds no call
    {**JSON, "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{)"}
    | {"transform": function("{content.name}", "{content.parameters}")},
    CallSyntax("", ('{"name": "', '", "parameters": ', "}"), None, ""),
    "<|python_tag|>",
)
MISTRAL = ToolFormat(
    {**JSON, "open_pattern": r"\s*\[TOOL_CALLS\]", "transform_each": True}
    | {"transform": function("{name}", "{arguments}")},
    CallSyntax("[TOOL_CALLS] [", ('{"name": "', '", "arguments": ', "}"), ", ", "]"),
    "[TOOL_CALLS]",
    short_ids=True,
)


def tool_format(tokenizer: Any) -> ToolFormat:
    """Return how this tokenizer's chat template writes calls. Raises `Refused` if nothing tells."""
    try:
        template = str(tokenizer.get_chat_template(tools=[{}]))
    except ValueError:  # there is none
        template = ""
    if not re.search(r"\btools\b", template):
        raise Refused(
            "tools: this model's chat template does not take tools; ask without, or serve a model "
            "that was trained to call them",
            "tools",
        )
    known = None  # by words in the template
    if "<tool_call>" in template and "<function=" not in template and '"arguments"' in template:
        known = HERMES
    elif "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        known = MISTRAL
    elif "<|start_header_id|>" in template and '"parameters"' in template:
        known = LLAMA3
    spec = getattr(tokenizer, "response_template", None)
    if field := spec and spec["fields"].get("tool_calls"):
        marker = str(field.get("open") or field.get("open_pattern", "").replace("\\", ""))
        return ToolFormat(field, known and known.syntax, marker, bool(known and known.short_ids))
    if known is None:
        raise Refused(
            "tools: this server does not know how this model's chat template writes calls; it "
            "knows Hermes and Qwen, Llama 3, Mistral, and tokenizers with a response_template",
            "tools",
        )
    return known


def forcing_grammar(form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """Return a Lark grammar of calls of these tools, whose arguments follow their schemas.

    `several`: more than one. Raises `Refused` if it is not known how calls are written.
    """
    if (syntax := form.syntax) is None:
        raise Refused(
            "tool_choice: this server reads this model's calls but can't force them: "
            "give auto or none",
            "tool_choice",
        )
    return f"start: calls\n{_calls(syntax, tools, several, tokenizer)}"


def strict_grammar(
    form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any
) -> str | None:
    """Return a Lark grammar of any text with calls, those of `strict` tools by their schemas.

    None if it is not known how calls are written, or if they don't begin with an added token,
    because text and calls then can't be told apart while they are written.
    """
    if (syntax := form.syntax) is None:
        return None
    added, begin = tokenizer.get_added_vocab(), syntax.before + syntax.parts[0]
    marker = max((token for token in added if begin.startswith(token)), key=len, default=None)
    if marker is None:
        return None
    loose = [tool.model_copy(deep=True) for tool in tools]
    for tool in loose:
        if not tool.function.strict:
            tool.function.parameters = {"type": "object"}
    # without a closing mark, text after the calls would be read as part of them
    goes_on = "close" in form.field or "close_pattern" in form.field
    rest = f"(calls text){'*' if several else '?'}" if goes_on else "calls?"
    text = f"text: <[^{added[marker]}]>*"
    return f"start: text {rest}\n{text}\n{_calls(syntax, loose, several, tokenizer)}"


def _calls(syntax: CallSyntax, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """Return the rule `calls` and the rules that it needs."""
    terminals = partial(_terminals, tokenizer=tokenizer)
    begin, middle, end = syntax.parts
    more = ""
    if several and syntax.between is not None:
        more = f" ({terminals(syntax.between)} call)*"
    rules = [
        f"calls: {terminals(syntax.before)} call{more} {terminals(syntax.after)}",
        f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}",
    ]
    for i, tool in enumerate(tools):
        opening = terminals(begin + tool.function.name + middle)
        rules.append(f"call{i}: {opening} arguments{i} {terminals(end)}")
        rules.append(f"arguments{i}: %json {arguments_grammar(tool).text}")
    return "\n".join([*rules, ""])


def arguments_grammar(tool: Tool) -> Grammar:
    """Return the grammar of the arguments of a tool's calls."""
    return Grammar.json_schema({**OBJECT, **(tool.function.parameters or NO_ARGUMENTS)})


def _terminals(text: str, tokenizer: Any) -> str:
    """Return text as terminals of a grammar: added tokens by their ids, others as characters."""
    added: dict[str, int] = tokenizer.get_added_vocab()
    pattern = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if added else [text]
    return " ".join(
        f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part
    )


class ParsedCall(NamedTuple):
    """A tool call that a model wrote."""

    id: str
    name: str
    arguments: str  # JSON


class ToolUse(NamedTuple):
    """What a request asks for in tool calls. Without a `form`, its answers hold none."""

    form: ToolFormat | None = None
    tools: Sequence[Tool] = ()  # that the model is shown
    several: bool = True
    grammar: Grammar | None = None  # forces calls, or makes them follow schemas; None: neither
    keeps_special: bool = False  # calls can only be found if special tokens stay in the text
    ignored: Sequence[str] = ()  # notes for `BaseRequest.ignore`
    arguments: Mapping[str, Grammar] = {}  # of the calls in `grammar`, by the tools

    def parser(self) -> ToolCallParser:
        """Return a parser of calls for one answer."""
        return ToolCallParser(self.form, self.tools, self.several)


def tool_use(
    tools: list[Tool] | None,
    choice: ToolMode | NamedTool | None,
    several: bool | None,
    tokenizer: Any,
) -> ToolUse:
    """Return what a request's fields about tools ask for. Raises `Refused` for what can't be.

    Takes seconds the first time, as what reads calls is imported.
    """
    if not tools or choice == "none":
        return ToolUse()
    import_module("transformers.utils.chat_parsing")
    form = tool_format(tokenizer)
    special = any(token and token in form.marker for token in tokenizer.all_special_tokens)
    ignored = list[str]()
    if choice in (None, "auto"):
        several = several is not False
        lark = None
        held = [i for i, tool in enumerate(tools) if tool.function.strict]
        if held:
            lark = strict_grammar(form, tools, several, tokenizer)
            if lark is None:  # calls keep to schemas only where they are forced
                ignored = [f"tools[{i}].function.strict" for i in held]
    else:
        name = choice.function.name if isinstance(choice, NamedTool) else None
        held = [i for i, tool in enumerate(tools) if name in (None, tool.function.name)]
        # Several only if asked for: a model may not know when to end what a grammar lets go on.
        several = several is True and choice == "required"
        lark = forcing_grammar(form, [tools[i] for i in held], several, tokenizer)
    if lark is None:
        return ToolUse(form, tools, several, None, special, ignored)
    arguments = dict[str, Grammar]()
    for i in held:
        place, function = f"tools[{i}].function.parameters", tools[i].function
        own = arguments[f"{place} ({function.name})"] = arguments_grammar(tools[i])
        if own.left_out and function.strict:
            raise Refused(
                f"{place} ({function.name}): {', '.join(own.left_out)}: calls can't be held to it: "
                "leave it out, or leave out strict",
                place,
            )
        ignored += [f"{place} ({note})" for note in own.left_out]
    return ToolUse(form, tools, several, Grammar.lark(lark), special, ignored, arguments)


class ToolCallParser:
    """Separates tool calls from text while an answer arrives; `count` is their number.

    Text that may be part of a call is held back; what turns out to be no call of a given tool, as
    one that was cut short, is text. Unless `several`, calls after the first are left out.
    """

    def __init__(
        self, form: ToolFormat | None, tools: Sequence[Tool], several: bool = True
    ) -> None:
        self._form, self._several, self.count = form, several, 0
        self._names = {tool.function.name for tool in tools}
        # JSON gives arguments their types. In other formats, types come from the tools' schemas.
        typed = form is not None and form.field.get("content") != "json"
        self._typed = [tool.model_dump(exclude_none=True) for tool in tools if typed]
        self._begin()

    def _begin(self) -> None:
        self._held = ""  # text that the parser has not given back as content
        if self._form is not None:
            from transformers.utils.chat_parsing import ResponseParser

            fields = {CALLS: self._form.field, CONTENT: {"content": "text"}}
            template = {"start_anchor": " ", "fields": fields}
            self._parser = ResponseParser(template, prefix="", tools=self._typed)

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Return the text and the calls that are certain after `text`, in order."""
        if self._form is None:
            return [text] if text else []
        # one character at a time, so that after an error the rest is read anew
        return self._read(text)

    def finish(self) -> list[str | ParsedCall]:
        """Return the rest, at the end of the answer."""
        return [] if self._form is None else self._read([None])

    def _read(self, characters: Iterable[str | None]) -> list[str | ParsedCall]:
        pieces = list[str | ParsedCall]()
        for piece in chain.from_iterable(map(self._step, characters)):
            if pieces and isinstance(piece, str) and isinstance(pieces[-1], str):
                pieces[-1] += piece
            elif piece:
                pieces.append(piece)
        return pieces

    def _step(self, character: str | None) -> Iterator[str | ParsedCall]:
        """Read one character, or the end of the answer if it is None, and yield what is certain."""
        self._held += character or ""
        is_text = len(self._held) > MOST_SPACE and self._held.isspace()
        parser = self._parser
        try:
            events = parser.finalize()[1] if character is None else parser.feed(character)
        except (ValueError, KeyError, TypeError, RecursionError):  # it looked like a call
            is_text = True
        if is_text:
            yield self._held
            self._begin()
            return
        for event in events:
            if event["field"] == CONTENT and event["type"] == "region_chunk":
                yield event["text"]
                self._held = self._held.removeprefix(event["text"])
            elif event["field"] == CALLS and event["type"] == "region_close":
                value = event["value"]
                calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
                known = [call for call in calls if call is not None]
                if not known or len(known) < len(calls):
                    yield self._held
                else:
                    yield from known[: None if self._several else max(0, 1 - self.count)]
                    self.count += len(known)
                self._held = ""

    def _call(self, value: Any) -> ParsedCall | None:
        """Return the call that was read; None if it is not a call of one of the tools."""
        match value:
            case {"function": {"name": str(name), **more}} if name in self._names:
                arguments = more.get("arguments") or {}
            case _:
                return None
        if not isinstance(arguments, dict):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except ValueError:  # NaN, infinite numbers and half surrogate pairs, which JSON lacks
            return None
        short = self._form is not None and self._form.short_ids
        own = "".join(secrets.choice(LETTERS) for _ in range(9))
        return ParsedCall(own if short else f"call_{secrets.token_hex(12)}", name, text)


def split(pieces: Iterable[str | ParsedCall]) -> tuple[str, list[ParsedCall]]:
    """Return the joined text of the pieces, and their tool calls."""
    every = list(pieces)
    calls = [piece for piece in every if isinstance(piece, ParsedCall)]
    return "".join(piece for piece in every if isinstance(piece, str)), calls
