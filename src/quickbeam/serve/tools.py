"""Tool calls of a request: which tools a model is shown, and calls found in its answers as they
come. Knows nothing of HTTP."""

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


class Call(NamedTuple):
    """A call that a model wrote."""

    id: str
    name: str
    arguments: str  # JSON


class Calling(NamedTuple):
    """What a request asks of calls."""

    form: ToolFormat
    tools: list[Tool]
    several: bool
    grammar: Any  # that forces calls or holds them to schemas, or None
    keeps_special: bool  # special tokens have to stay in the text for calls to be found in it

    def reader(self) -> CallReader:
        """For one answer."""
        return CallReader(self.form, self.tools, self.several)


def calling(
    tools: list[Tool] | None,
    choice: ToolMode | NamedTool | None,
    several: bool | None,
    tokenizer: Any,
) -> Calling | None:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` ask for; None: an answer
    without calls, for which tools are not shown to the model. Raises `Refused` for what this model
    can't do."""
    if not tools or choice == "none":
        return None
    form, several = tool_format(tokenizer), several is not False
    special = any(token and token in form.marker for token in tokenizer.all_special_tokens)
    if choice in (None, "auto"):
        lark = _strict(form, tools, several, tokenizer)
    else:
        forced = [
            tool
            for tool in tools
            if choice == "required" or tool.function.name == choice.function.name  # type: ignore[union-attr]
        ]
        lark = forcing_grammar(form, forced, several and choice == "required", tokenizer)
    return Calling(form, tools, several, _grammar(lark), special)


def _strict(form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str | None:
    """The grammar of an answer that may hold calls; None: no tool is strict."""
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


class CallReader:
    """Tells calls from text as an answer comes. What may be a call is held back; what turns out not
    to be one of a tool that was given, a call cut short included, is text as it was written.
    `several` False: calls after the first are left out."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], several: bool = True) -> None:
        self._form, self._several, self._found = form, several, 0
        self._names = {tool.function.name for tool in tools}
        # Arguments in JSON have types; in other ways of writing they get them from the schemas.
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
        """What `text` makes certain, in order."""
        # one by one: an error then belongs to one
        return list(_joined(piece for character in text for piece in self._step(character)))

    def finish(self) -> list[str | Call]:
        """The rest, at the end of the answer."""
        return list(_joined(self._step(None)))

    @property
    def found(self) -> bool:
        """Whether there was a call."""
        return self._found > 0

    def _step(self, character: str | None) -> Iterator[str | Call]:
        """`character`: None at the end."""
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
        """The call that was read, if it is one of the tools'."""
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
        except ValueError:  # numbers and halves of characters that only Python reads
            return None
        return Call(call_id(self._form), name, text)


def call_id(form: ToolFormat) -> str:
    """An id for a call."""
    letters = string.ascii_letters + string.digits
    return (
        "".join(secrets.choice(letters) for _ in range(9))
        if form.short_ids
        else f"call_{secrets.token_hex(12)}"
    )


def _joined(pieces: Iterable[str | Call]) -> Iterator[str | Call]:
    """The same, with neighbouring texts as one."""
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
