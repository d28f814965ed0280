"""Tool calls: how a model's chat template writes them, found in its answers as they come, or forced by a grammar.

What a call looks like is the tokenizer's own `response_template` of transformers, or known from the words of the chat template. A template
that says neither is refused. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import NamedTool, Tool, ToolMode

CALLS, CONTENT = "tool_calls", "content"  # fields of a response template


class Writing(NamedTuple):
    """The text around calls: `before`, a call, `between`, a call, …, `after`. A call: its name and its arguments between three `parts`."""

    before: str
    parts: tuple[str, str, str]
    between: str | None  # None: an answer holds one call at most
    after: str


class ToolFormat(NamedTuple):
    """How calls are read (a field of a response template of transformers) and written (None: not known)."""

    field: dict[str, Any]
    writing: Writing | None
    marker: str  # the first text of a call
    short_ids: bool = False  # ids of nine letters and digits, which the template insists on


class Call(NamedTuple):
    """A call that a model wrote."""

    id: str
    name: str
    arguments: str  # JSON


NO_ARGUMENTS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
FUNCTION = {"type": "function", "function": "{content}"}
HERMES = ToolFormat(
    {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": FUNCTION},
    Writing("", ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "\n", ""),
    "<tool_call>",
)
LLAMA3 = ToolFormat(
    {
        "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{)",  # the whole answer is a call, or it holds none
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
    },
    Writing("", ('{"name": "', '", "parameters": ', "}"), None, ""),
    "<|python_tag|>",
)
MISTRAL = ToolFormat(
    {
        "open_pattern": r"\s*\[TOOL_CALLS\]",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    Writing("[TOOL_CALLS] [", ('{"name": "', '", "arguments": ', "}"), ", ", "]"),
    "[TOOL_CALLS]",
    short_ids=True,
)


def tool_format(tokenizer: Any) -> ToolFormat:
    """How calls are written with this tokenizer's chat template. Raises `Refused` where that is not known."""
    template = _chat_template(tokenizer)
    if not re.search(r"\btools\b", template):
        raise Refused(
            "tools: this model's chat template does not take tools; ask without, or serve a model that was trained to call them", "tools"
        )
    known = _known(template)
    if (spec := getattr(tokenizer, "response_template", None)) and (field := spec["fields"].get(CALLS)):
        return ToolFormat(
            field,
            known and known.writing,
            str(field.get("open") or field.get("open_pattern", "").replace("\\", "")),
            bool(known and known.short_ids),
        )
    if known is None:
        raise Refused(
            "tools: this server does not know how this model's chat template writes calls; it knows Hermes and Qwen, Llama 3, Mistral, and "
            "tokenizers with a response_template",
            "tools",
        )
    return known


class Calling(NamedTuple):
    """What a request asks of calls."""

    form: ToolFormat
    tools: list[Tool]
    several: bool
    grammar: Any  # that forces calls, or None
    keeps_special: bool  # special tokens have to stay in the text for calls to be found in it

    def reader(self) -> CallReader:
        """For one answer."""
        return CallReader(self.form, self.tools, self.several)


def calling(tools: list[Tool] | None, choice: ToolMode | NamedTool | None, several: bool | None, tokenizer: Any) -> Calling | None:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` ask for; None: an answer without calls, for which tools are not
    shown to the model. Raises `Refused` for what this model can't do."""
    if not tools or choice == "none":
        return None
    form, several = tool_format(tokenizer), several is not False
    special = any(token and token in form.marker for token in tokenizer.all_special_tokens)
    if choice in (None, "auto"):
        return Calling(form, tools, several, None, special)
    forced = [tool for tool in tools if choice == "required" or tool.function.name == choice.function.name]  # type: ignore[union-attr]
    from quickbeam.grammar import Grammar

    lark = forcing_grammar(form, forced, several and choice == "required", tokenizer)
    return Calling(form, tools, several, Grammar.lark(lark), special)


def _chat_template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=[{}]))
    except ValueError:  # there is none
        return ""


def _known(template: str) -> ToolFormat | None:
    """What a chat template's own words say."""
    if "<tool_call>" in template and "<function=" not in template and '"arguments"' in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None


def forcing_grammar(form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """A Lark grammar, as llguidance reads it, of one or more calls of these tools, with arguments by their schemas. Raises `Refused` for a
    format that is not known well enough."""
    if (writing := form.writing) is None:
        raise Refused("tool_choice: this server reads this model's calls but can't force them: give auto or none", "tool_choice")
    begin, middle, end = writing.parts
    calls = [
        f"call{i}: {_terminals(begin + tool.function.name + middle, tokenizer)} arguments{i} {_terminals(end, tokenizer)}\n"
        f"arguments{i}: %json {json.dumps({'type': 'object', **(tool.function.parameters or NO_ARGUMENTS)})}"
        for i, tool in enumerate(tools)
    ]
    more = f" ({_terminals(writing.between, tokenizer)} call)*" if several and writing.between is not None else ""
    start = f"start: {_terminals(writing.before, tokenizer)} call{more} {_terminals(writing.after, tokenizer)}"
    return "\n".join([start, f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}", *calls, ""])


def _terminals(text: str, tokenizer: Any) -> str:
    """Text as terminals of a grammar. Tokens that were added to a vocabulary stand by their ids: their letters alone are not them."""
    added: dict[str, int] = tokenizer.get_added_vocab()
    pattern = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if added else [text]
    return " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part)


class CallReader:
    """Tells calls from text as an answer comes. What may be a call is held back; what turns out not to be one of a tool that was given, a
    call cut short included, is text as it was written. `several` False: calls after the first are left out."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], several: bool = True) -> None:
        self._form, self._several, self._found = form, several, 0
        self._names = {tool.function.name for tool in tools}
        # Arguments in JSON have types; in other ways of writing they get them from the schemas.
        self._typed = [] if form.field.get("content") == "json" else [tool.model_dump(exclude_none=True) for tool in tools]
        self._begin()

    def _begin(self) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        fields = {CALLS: self._form.field, CONTENT: {"content": "text"}}
        self._parser = ResponseParser({"start_anchor": " ", "fields": fields}, prefix="", tools=self._typed)
        self._held = ""  # text that the parser has not given back as content

    def feed(self, text: str) -> list[str | Call]:
        """What `text` makes certain, in order."""
        return list(_joined(piece for character in text for piece in self._step(character)))  # one by one: an error then belongs to one

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
            events = self._parser.feed(character) if character is not None else self._parser.finalize()[1]
        except (ValueError, KeyError, TypeError, RecursionError):  # what looked like a call can't be read
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
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or name not in self._names:
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
    return "".join(secrets.choice(letters) for _ in range(9)) if form.short_ids else f"call_{secrets.token_hex(12)}"


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
