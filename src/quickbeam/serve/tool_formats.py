"""How models write tool calls: what their chat templates say about it, and grammars of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import Tool


class Writing(NamedTuple):
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
    writing: Writing | None
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
    Writing("", ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "\n", ""),
    "<tool_call>",
)
LLAMA3 = ToolFormat(
    # either the whole answer is a call, or it holds no call
    {**JSON, "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{)"}
    | {"transform": function("{content.name}", "{content.parameters}")},
    Writing("", ('{"name": "', '", "parameters": ', "}"), None, ""),
    "<|python_tag|>",
)
MISTRAL = ToolFormat(
    {**JSON, "open_pattern": r"\s*\[TOOL_CALLS\]", "transform_each": True}
    | {"transform": function("{name}", "{arguments}")},
    Writing("[TOOL_CALLS] [", ('{"name": "', '", "arguments": ', "}"), ", ", "]"),
    "[TOOL_CALLS]",
    short_ids=True,
)


def tool_format(tokenizer: Any) -> ToolFormat:
    """Return how this tokenizer's chat template writes calls. Raises `Refused` if nothing tells."""
    template = _chat_template(tokenizer)
    if not re.search(r"\btools\b", template):
        raise Refused(
            "tools: this model's chat template does not take tools; ask without, or serve a model "
            "that was trained to call them",
            "tools",
        )
    known = _known(template)
    if (spec := getattr(tokenizer, "response_template", None)) and (
        field := spec["fields"].get("tool_calls")
    ):
        return ToolFormat(
            field,
            known and known.writing,
            str(field.get("open") or field.get("open_pattern", "").replace("\\", "")),
            bool(known and known.short_ids),
        )
    if known is None:
        raise Refused(
            "tools: this server does not know how this model's chat template writes calls; it "
            "knows Hermes and Qwen, Llama 3, Mistral, and "
            "tokenizers with a response_template",
            "tools",
        )
    return known


def _chat_template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=[{}]))
    except ValueError:  # there is none
        return ""


def _known(template: str) -> ToolFormat | None:
    """Return the format that words in the chat template point to; None if there is none."""
    if "<tool_call>" in template and "<function=" not in template and '"arguments"' in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None


def forcing_grammar(form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """Return a Lark grammar of calls of these tools, whose arguments follow their schemas.

    `several`: more than one. Raises `Refused` if it is not known how calls are written.
    """
    if (writing := form.writing) is None:
        raise Refused(
            "tool_choice: this server reads this model's calls but can't force them: "
            "give auto or none",
            "tool_choice",
        )
    return f"start: calls\n{_calls(writing, tools, several, tokenizer)}"


def strict_grammar(
    form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any
) -> str | None:
    """Return a Lark grammar of any text with calls, those of `strict` tools by their schemas.

    None if it is not known how calls are written, or if they don't begin with an added token,
    because text and calls then can't be told apart while they are written.
    """
    if (writing := form.writing) is None:
        return None
    begin = writing.before + writing.parts[0]
    marker = max(
        (token for token in tokenizer.get_added_vocab() if begin.startswith(token)),
        key=len,
        default=None,
    )
    if marker is None:
        return None
    loose = [tool if tool.function.strict else _any_arguments(tool) for tool in tools]
    # without a closing mark, text after the calls would be read as part of them
    goes_on = "close" in form.field or "close_pattern" in form.field
    rest = f"(calls text){'*' if several else '?'}" if goes_on else "calls?"
    text = f"text: <[^{tokenizer.get_added_vocab()[marker]}]>*"
    return f"start: text {rest}\n{text}\n{_calls(writing, loose, several, tokenizer)}"


def _any_arguments(tool: Tool) -> Tool:
    return tool.model_copy(
        update={"function": tool.function.model_copy(update={"parameters": {"type": "object"}})}
    )


def _calls(writing: Writing, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """Return the rule `calls` and the rules that it needs."""

    def terminals(text: str) -> str:
        return _terminals(text, tokenizer)

    begin, middle, end = writing.parts
    more = ""
    if several and writing.between is not None:
        more = f" ({terminals(writing.between)} call)*"
    rules = [
        f"calls: {terminals(writing.before)} call{more} {terminals(writing.after)}",
        f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}",
    ]
    for i, tool in enumerate(tools):
        opening = terminals(begin + tool.function.name + middle)
        schema = json.dumps({**OBJECT, **(tool.function.parameters or NO_ARGUMENTS)})
        rules.append(f"call{i}: {opening} arguments{i} {terminals(end)}")
        rules.append(f"arguments{i}: %json {schema}")
    return "\n".join([*rules, ""])


def _terminals(text: str, tokenizer: Any) -> str:
    """Return text as terminals of a grammar: added tokens by their ids, others as characters."""
    added: dict[str, int] = tokenizer.get_added_vocab()
    pattern = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if added else [text]
    return " ".join(
        f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part
    )
