"""The tool calls in a model's answer, read while it arrives, however it is cut into pieces."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from quickbeam.serve.thoughts import (
    CLOSING_MARKS,
    LONGEST_MARK,
    MAX_SPACE,
    THOUGHT_BEGINS,
    THOUGHT_ENDS,
)
from quickbeam.serve.tool_fields import Tool

# fields of a response template
CALLS = "tool_calls"
CONTENT = "content"
ID_CHARACTERS = string.ascii_letters + string.digits  # of short ids
SHORT_ID = 9  # characters
ARGUMENT_KEYS = ("arguments", "parameters")  # that models use
OTHER_KEYS = ("name", "id", "type")  # of a call

MAX_OPENING = 256  # characters of a call before its JSON
SPACE = re.compile(rf"\s{{0,{MAX_SPACE}}}")
JOINT = re.compile(rf"{SPACE.pattern}(?:;{SPACE.pattern})?")  # between calls without markers
BARE_KEY = re.compile(rf'{{{SPACE.pattern}"(?:{"|".join([*OTHER_KEYS, *ARGUMENT_KEYS])})"')
BARE_BEGINS = re.compile(rf'{JOINT.pattern}(?:{{{SPACE.pattern}(?:"[a-z]{{0,10}})?)?')
BETWEEN_STRINGS = re.compile(r"[ \t\r\n0-9+\-.,:Eaeflnrstu]*")  # of JSON, without brackets
IN_STRING = re.compile(r'[^"\\]*')
LENIENT = json.JSONDecoder(strict=False)  # takes line breaks in strings


class CallSyntax(NamedTuple):
    """How calls are written: `before`, a call, `between`, a call, …, `after`.

    A call is the first of the `parts`, the tool's name, the second part, the arguments, and the
    third part. Without a `between`, an answer holds at most one call.
    """

    before: str
    parts: tuple[str, str, str]
    between: str | None
    after: str


class ToolFormat(NamedTuple):
    """How tool calls are read and written.

    - `marker`: the first text of a call.
    - `syntax`: how calls are written; None if it is not known.
    - `close`: the text that may end a call.
    - `bare`: whether an answer may begin with calls that have no marker.
    - `short_ids`: whether ids have nine letters and digits, as the template demands.
    - `field`: how a response template of transformers reads calls; None: `JsonCalls` does.
    """

    marker: str
    syntax: CallSyntax | None
    close: str = ""
    bare: bool = False
    short_ids: bool = False
    field: dict[str, Any] | None = None


HERMES = ToolFormat(
    "<tool_call>",
    CallSyntax("", ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "\n", ""),
    close="</tool_call>",
)
LLAMA3 = ToolFormat(
    "<|python_tag|>",
    CallSyntax("", ('{"name": "', '", "parameters": ', "}"), None, ""),
    bare=True,
)
MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    CallSyntax("[TOOL_CALLS] [", ('{"name": "', '", "arguments": ', "}"), ", ", "]"),
    short_ids=True,
)
# as newer models of Mistral write them
MISTRAL_NAMED = ToolFormat(
    "[TOOL_CALLS]", CallSyntax("", ("[TOOL_CALLS]", "[ARGS]", ""), "", ""), short_ids=True
)


class ParsedCall(NamedTuple):
    """A tool call that a model wrote."""

    id: str
    name: str
    arguments: str  # JSON


class WrittenCalls(NamedTuple):
    """Tool calls, and the text that they were written as.

    `calls` is empty for a mark or white space next to calls.
    """

    calls: list[ParsedCall]
    text: str


Piece = str | WrittenCalls


class ToolCallParser:
    """Separates tool calls from text while an answer arrives; `count` is the number of calls.

    Text that may be part of a call is held back. What turns out to be no call of one of the tools,
    as a call that was cut short, is text.

    A call in a thought is a draft: it is text once the thought closes, and a call if the thought
    never does. From a call in a thought on, all is held back.

    - `several`: whether calls after the first are given, too.
    - `thinking`: whether the prompt opened a thought.
    - `either`: whether the answer is calls or text, as its grammar says. What looks like a call in
      an answer of text is text.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Sequence[Tool],
        several: bool = True,
        thinking: bool = False,
        either: bool = False,
    ) -> None:
        self._several = several
        self._thinking = thinking
        self._either = either
        self.count = 0
        self._reader: TemplateCalls | JsonCalls | None = None
        if form is not None:
            reader = JsonCalls if form.field is None else TemplateCalls
            self._reader = reader(form, tools)
        self._in_text = False  # whether text has come that is more than white space
        self._tail = ""  # the last characters of the text, which may begin a mark of thoughts
        self._drafts = list[Piece]()  # a thought from its first call on

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Return the text and the calls that are certain after `text`, in order."""
        if self._reader is None:
            return [text] if text else []
        return self._joined(self._decided(self._reader.read(text)))

    def finish(self) -> list[str | ParsedCall]:
        """Return the text and the calls that were held back, at the end of the answer."""
        if self._reader is None:
            return []
        pieces = [*self._decided(self._reader.read(None)), *self._drafts]
        self._drafts = []
        return self._joined(pieces)

    def _decided(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces of which it is certain whether they are calls."""
        for piece in pieces:
            if isinstance(piece, str):
                self._in_text = self._in_text or not piece.isspace()
                if self._closes_thought(piece):
                    texts = [each if isinstance(each, str) else each.text for each in self._drafts]
                    yield "".join(texts)
                    self._drafts = []
            elif self._either and self._in_text:
                piece = piece.text
            else:
                self._tail = ""
            if self._drafts or (self._thinking and not isinstance(piece, str)):
                self._drafts.append(piece)
            else:
                yield piece

    def _closes_thought(self, text: str) -> bool:
        """Follow thoughts through further text, and return whether one ends in it."""
        text = self._tail + text
        at = 0
        closes = False
        while True:
            mark = (THOUGHT_ENDS if self._thinking else THOUGHT_BEGINS).search(text, at)
            if mark is None:
                break
            closes = closes or self._thinking
            self._thinking = not self._thinking
            at = mark.end()
        self._tail = text[max(at, len(text) - LONGEST_MARK + 1) :]
        return closes

    def _joined(self, pieces: Iterable[Piece]) -> list[str | ParsedCall]:
        """Return pieces as text and calls, with texts that follow each other as one."""
        joined = list[str | ParsedCall]()
        texts = list[str]()
        for piece in pieces:
            if isinstance(piece, str):
                texts.append(piece)
                continue
            calls = piece.calls if self._several else piece.calls[: max(0, 1 - self.count)]
            self.count += len(piece.calls)
            if calls and any(texts):
                joined.append("".join(texts))
                texts = []
            joined += calls
        if any(texts):
            joined.append("".join(texts))
        return joined


class PossibleCall:
    """What may be a call: finds where its JSON ends, and reads each part of it once.

    Positions count from where the call begins, with the white space before it.

    - `name`: the tool's name, if it stands before the JSON.
    - `resume`: where reading goes on if this is no call.
    - `begin`, `end`: of the JSON, as far as it was read.
    - `ended`: whether the JSON ends there, or breaks off because it is none.
    """

    def __init__(self, name: str, resume: int, begin: int) -> None:
        self.name = name
        self.resume = resume
        self.begin = begin
        self.end = begin
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str, at: int = 0) -> None:
        """Read further text, from `at` on, up to where the JSON ends."""
        begin = at
        while at < len(text) and not self.ended:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            at = _skip(IN_STRING if self._in_string else BETWEEN_STRINGS, text, at)
            if at < len(text):
                self._read_mark(text[at])
                at += 1
        self.end += at - begin

    def _read_mark(self, mark: str) -> None:
        if mark == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._escaped = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.ended = self._depth == 0
        else:
            self.ended = True


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where the text that a pattern matches at `at` ends. The pattern may match nothing."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


class JsonCalls:
    """Reads calls that are JSON, and leaves other text as it is.

    A call begins with the format's marker; those of `bare` formats may also begin the answer, or
    follow a call or a thought. Then comes an object with the tool's name and its arguments, a list
    of such objects, or the name and behind it the arguments. White space next to calls is left out.

    Reading takes time in proportion to the text. What turns out to be no call is read again from
    behind its marker, but a character belongs to at most two possible calls: JSON has no marker
    beside its strings, and of two possible calls one is in a string where the other is not.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool]) -> None:
        self._form = form
        self._names = {tool.function.name for tool in tools}
        self._thought_ends = CLOSING_MARKS if form.bare else ()
        stops = [re.escape(mark) for mark in (form.marker, *self._thought_ends)]
        self._stop = re.compile("|".join(stops))
        self._opening = re.compile(
            rf"\s*;?\s*(?P<markers>(?:{re.escape(form.marker)}\s*)*)(?P<name>[\w-]*)\s*"
            r"(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?"
        )
        self._opening_marks = (form.marker, "[CALL_ID]", "[ARGS]")
        self._marks = (form.marker, form.close, *self._thought_ends)
        self._longest_mark = max(len(mark) for mark in self._marks)
        self._longest_opening_mark = max(len(mark) for mark in self._opening_marks)
        self._unread = list[str]()  # parts of the text that has not been given back
        self._possible: PossibleCall | None = None  # with which that text begins
        self._after_call = False
        self._may_be_bare = form.bare

    def read(self, text: str | None) -> Iterator[Piece]:
        """Read further text, or the end of the answer if it is None, and yield what is certain."""
        last = text is None
        self._unread.append(text or "")
        if self._possible is not None:
            self._possible.read(text or "")
            if not (last or self._possible.ended):
                return
        unread = "".join(self._unread)
        at = 0
        while at < len(unread):
            step = self._step(unread, at, last)
            if step is None:
                break
            piece, at = step
            self._possible = None
            self._after_call = isinstance(piece, WrittenCalls)
            ends_thought = isinstance(piece, str) and piece.endswith(self._thought_ends)
            self._may_be_bare = self._form.bare and (self._after_call or ends_thought)
            yield piece
        self._unread = [unread[at:]]

    def _step(self, text: str, at: int, last: bool) -> tuple[Piece, int] | None:
        """Return the piece that begins at `at`, and its end. None: it depends on further text."""
        if self._possible is not None:
            return self._call(text, at, last)
        if self._after_call:
            end = self._end_of_call(text, at, last)
            if end > at:
                return WrittenCalls([], text[at:end]), end
        if self._begins_bare(text, at):
            return self._call(text, at, last)
        stop = self._stop.search(text, at)
        if stop is None:
            end = len(text) if last else self._held_from(text, at)
            return (text[at:end], end) if end > at else None
        if stop[0] != self._form.marker:
            return text[at : stop.end()], stop.end()
        begin = self._space_from(text, at, stop.start())
        return (text[at:begin], begin) if begin > at else self._call(text, at, last)

    def _end_of_call(self, text: str, at: int, last: bool) -> int:
        """Return where what belongs to the call before `at` ends: its closing mark, or white space.

        White space belongs to it at the end of the answer.
        """
        end = _skip(SPACE, text, at)
        if self._form.close and text.startswith(self._form.close, end):
            return end + len(self._form.close)
        return end if last and end == len(text) else at

    def _begins_bare(self, text: str, at: int) -> bool:
        """Whether a call without a marker may begin at `at`."""
        joint = JOINT if self._after_call else SPACE
        return self._may_be_bare and BARE_KEY.match(text, _skip(joint, text, at)) is not None

    def _held_from(self, text: str, at: int) -> int:
        """Return the position from which on the text may belong to a call."""
        if self._may_be_bare and BARE_BEGINS.fullmatch(text, at):
            return at
        end = max(at, len(text) - self._longest_mark)
        while not any(mark.startswith(text[end:]) for mark in self._marks):
            end += 1
        return self._space_from(text, at, end)

    def _space_from(self, text: str, at: int, end: int) -> int:
        """Return where the white space before a call begins, or what joins it to the call before.

        The call begins at `end`.
        """
        if self._may_be_bare and self._after_call and JOINT.fullmatch(text, at, end):
            return at
        space = text[max(at, end - MAX_SPACE) : end]
        return end - len(space) + len(space.rstrip())

    def _call(self, text: str, at: int, last: bool) -> tuple[Piece, int] | None:
        """Return the calls that begin at `at`, or their marker as text, as `_step` does."""
        call = self._possible
        if call is None:
            opening = self._opening.match(text, at, at + MAX_OPENING)
            assert opening is not None
            name = opening["name"]
            begin = opening.end()
            following = text[begin : begin + self._longest_opening_mark]
            fits = begin < at + MAX_OPENING and any(each.startswith(name) for each in self._names)
            in_mark = any(
                mark.startswith(following) and mark != following for mark in self._opening_marks
            )
            if fits and in_mark and not last:
                return None
            length = len(self._form.marker) if opening["markers"] else 1
            resume = opening.start("markers") + length
            if not fits or name not in ("", *self._names) or following[:1] not in ("{", "["):
                return text[at:resume], resume
            call = PossibleCall(name, resume - at, begin - at)
            call.read(text, begin)
        if not (call.ended or last):
            self._possible = call
            return None
        calls = self._parsed(text[at + call.begin : at + call.end], call.name)
        if calls:
            return WrittenCalls(calls, text[at : at + call.end]), at + call.end
        return text[at : at + call.resume], at + call.resume

    def _parsed(self, text: str, name: str) -> list[ParsedCall]:
        """Return the calls that JSON holds; none if it is not made of calls of the tools."""
        try:
            value = LENIENT.decode(text)
        except (ValueError, RecursionError):
            return []
        if name:
            value = {"name": name, "arguments": value}
        return parsed_calls(value, self._names, self._form.short_ids)


class TemplateCalls:
    """Reads calls by a tokenizer's response template, with transformers' parser."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool]) -> None:
        self._form = form
        self._names = {tool.function.name for tool in tools}
        assert form.field is not None
        self._schemas = list[dict[str, Any]]()
        # JSON gives arguments their types. In other formats, types come from the tools' schemas.
        if form.field.get("content") != "json":
            self._schemas = [tool.model_dump(exclude_none=True) for tool in tools]
        self._begin()

    def _begin(self) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._held = ""  # text that the parser has not given back as content
        fields = {CALLS: self._form.field, CONTENT: {"content": "text"}}
        template = {"start_anchor": " ", "fields": fields}
        self._parser = ResponseParser(template, prefix="", tools=self._schemas)

    def read(self, text: str | None) -> Iterator[Piece]:
        """Read further text, or the end of the answer if it is None, and yield what is certain."""
        # one character at a time, so that after an error the others are read anew
        characters: Iterable[str | None] = [None] if text is None else text
        for character in characters:
            yield from self._step(character)

    def _step(self, character: str | None) -> Iterator[Piece]:
        self._held += character or ""
        # the parser reads white space before a call anew with each character
        is_text = len(self._held) > MAX_SPACE and self._held.isspace()
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
                yield self._calls(event["value"])
                self._held = ""

    def _calls(self, value: Any) -> Piece:
        values = value if isinstance(value, list) else [value]
        functions = [each.get("function") if isinstance(each, dict) else None for each in values]
        calls = parsed_calls(functions, self._names, self._form.short_ids)
        return WrittenCalls(calls, self._held) if calls else self._held


def parsed_calls(value: Any, names: Collection[str], short_ids: bool) -> list[ParsedCall]:
    """Return the calls that a value is, one or a list; none if not all are calls of the tools."""
    calls = list[ParsedCall]()
    for each in value if isinstance(value, list) else [value]:
        call = parsed_call(each, names, short_ids)
        if call is None:
            return []
        calls.append(call)
    return calls


def parsed_call(value: Any, names: Collection[str], short_ids: bool) -> ParsedCall | None:
    """Return the call that was read; None if it is not a call of one of the tools."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    key = next((key for key in ARGUMENT_KEYS if key in value), None)
    if key is None and not value.keys() <= {*OTHER_KEYS}:  # of unknown meaning
        return None
    arguments = value[key] if key else {}
    try:
        if isinstance(arguments, str) and arguments:
            arguments = LENIENT.decode(arguments)
        if not isinstance(arguments or {}, dict):
            return None
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        text.encode()
    # what is not JSON; NaN, infinite numbers and half surrogate pairs, which JSON lacks
    except (ValueError, RecursionError):
        return None
    if short_ids:
        call_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(SHORT_ID))
    else:
        call_id = f"call_{secrets.token_hex(12)}"
    return ParsedCall(call_id, name, text)


def split(pieces: Iterable[str | ParsedCall]) -> tuple[str, list[ParsedCall]]:
    """Return the joined text of the pieces, and their tool calls."""
    texts = list[str]()
    calls = list[ParsedCall]()
    for piece in pieces:
        if isinstance(piece, ParsedCall):
            calls.append(piece)
        else:
            texts.append(piece)
    return "".join(texts), calls
