"""Tool calls of a request: the tools that a model is shown, and the calls in its answers.

Calls are found while an answer arrives. This module knows nothing of HTTP.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import NamedTool, Tool, ToolMode
from quickbeam.serve.tool_formats import ToolFormat, forcing_grammar, strict_grammar, tool_format

CALLS, CONTENT = "tool_calls", "content"  # fields of a response template
# white space that is held back as what stands before a call; the parser reads it anew each time
MOST_SPACE = 64


class Call(NamedTuple):
    """A tool call that a model wrote."""

    id: str
    name: str
    arguments: str  # JSON


class Calling(NamedTuple):
    """What a request asks for in tool calls. Without a `form`, its answers hold none."""

    form: ToolFormat | None = None
    tools: list[Tool] = []  # noqa: RUF012 (never changed)
    several: bool = True
    grammar: Any = None  # forces calls, or makes them follow schemas; None: neither
    keeps_special: bool = False  # calls can only be found if special tokens stay in the text

    @property
    def shown(self) -> list[Tool] | None:
        """The tools that the model is shown."""
        return self.tools or None

    def reader(self) -> CallReader | TextReader:
        """Return a reader of calls for one answer."""
        if self.form is None:
            return TextReader()
        return CallReader(self.form, self.tools, self.several)


def calling(
    tools: list[Tool] | None,
    choice: ToolMode | NamedTool | None,
    several: bool | None,
    tokenizer: Any,
) -> Calling:
    """Return what a request's `tools`, `tool_choice` and `parallel_tool_calls` ask for.

    For an answer without calls the model is not shown the tools. Raises `Refused` for what this
    model can't do.
    """
    if not tools or choice == "none":
        return Calling()
    form = tool_format(tokenizer)
    special = any(token and token in form.marker for token in tokenizer.all_special_tokens)
    if choice in (None, "auto"):
        several = several is not False
        lark = _strict(form, tools, several, tokenizer)
    else:
        forced = [
            tool
            for tool in tools
            if choice == "required" or tool.function.name == choice.function.name  # type: ignore[union-attr]
        ]
        # Several only if asked for: a model may not know when to end what a grammar lets go on.
        several = several is True and choice == "required"
        lark = forcing_grammar(form, forced, several, tokenizer)
    return Calling(form, tools, several, _grammar(lark), special)


def _strict(form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str | None:
    """Return the grammar of an answer that may hold calls; None if no tool is strict.

    Raises `Refused` if this model's calls can't be made to follow schemas in this way.
    """
    strict = [number for number, tool in enumerate(tools) if tool.function.strict]
    if not strict:
        return None
    if (lark := strict_grammar(form, tools, several, tokenizer)) is None:
        where = f"tools[{strict[0]}].function.strict"
        raise Refused(
            f"{where}: this model's calls keep to a schema only where they are forced: leave it "
            "out, or force one by tool_choice",
            where,
        )
    return lark


def _grammar(lark: str | None) -> Any:
    if lark is None:
        return None
    from quickbeam.grammar import Grammar

    return Grammar.lark(lark)


class TextReader:
    """Reads an answer without calls."""

    found = False

    def feed(self, text: str) -> list[str | Call]:
        return [text] if text else []

    def finish(self) -> list[str | Call]:
        return []


class CallReader:
    """Separates tool calls from text while an answer arrives.

    Text that may be part of a call is held back. If it turns out not to be a call of one of the
    given tools, it is returned as the text that it is; this includes a call that was cut short. If
    `several` is False, calls after the first are left out.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], several: bool = True) -> None:
        self._form, self._several, self._found = form, several, 0
        self._names = {tool.function.name for tool in tools}
        # JSON gives arguments their types. In other formats, types come from the tools' schemas.
        self._typed = (
            []
            if form.field.get("content") == "json"
            else [tool.model_dump(exclude_none=True) for tool in tools]
        )
        self._begin()

    def _begin(self) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        fields = {CALLS: self._form.field, CONTENT: {"content": "text"}}
        self._parser = ResponseParser(
            {"start_anchor": " ", "fields": fields}, prefix="", tools=self._typed
        )
        self._held = ""  # text that the parser has not given back as content

    def feed(self, text: str) -> list[str | Call]:
        """Return the text and the calls that are certain after `text`, in order."""
        # one character at a time, so that after an error the rest is read anew
        return list(_joined(piece for character in text for piece in self._step(character)))

    def finish(self) -> list[str | Call]:
        """Return the rest, at the end of the answer."""
        return list(_joined(self._step(None)))

    @property
    def found(self) -> bool:
        """Whether there was a call."""
        return self._found > 0

    def _step(self, character: str | None) -> Iterator[str | Call]:
        """Read one character, or the end of the answer if it is None, and yield what is certain."""
        self._held += character or ""
        try:
            events = (
                self._parser.feed(character)
                if character is not None
                else self._parser.finalize()[1]
            )
        # what looked like a call can't be read
        except (ValueError, KeyError, TypeError, RecursionError):
            yield self._held
            self._begin()
            return
        if len(self._held) > MOST_SPACE and self._held.isspace():
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
                    yield from known[: None if self._several else max(0, 1 - self._found)]
                    self._found += len(known)
                self._held = ""

    def _call(self, value: Any) -> Call | None:
        """Return the call that was read; None if it is not a call of one of the tools."""
        function = value.get("function") if isinstance(value, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(name := function.get("name"), str)
            or name not in self._names
        ):
            return None
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, dict):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except ValueError:  # NaN, infinite numbers and half surrogate pairs, which JSON lacks
            return None
        return Call(call_id(self._form), name, text)


def call_id(form: ToolFormat) -> str:
    """Return a random id for a call."""
    letters = string.ascii_letters + string.digits
    return (
        "".join(secrets.choice(letters) for _ in range(9))
        if form.short_ids
        else f"call_{secrets.token_hex(12)}"
    )


def _joined(pieces: Iterable[str | Call]) -> Iterator[str | Call]:
    """Yield the pieces, with neighbouring texts joined."""
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            yield text
        text = ""
        yield piece
    if text:
        yield text
