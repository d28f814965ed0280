"""What a request asks for in tool calls, and the grammars that hold its answers to that."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from quickbeam.grammar.spec import Grammar
from quickbeam.serve.calls import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    CallSyntax,
    ToolCallParser,
    ToolFormat,
)
from quickbeam.serve.errors import Refused
from quickbeam.serve.thoughts import opens_thought
from quickbeam.serve.tool_fields import NamedTool, Tool, ToolRequest

# schema of a call's arguments, without free white space, which a weak model could write endlessly
OBJECT = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
NO_ARGUMENTS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
# llguidance tells JSON and a call that begin alike apart if both have the same terminals
JSON_TERMINALS = r'"[^"]*"|[{}\[\]]|[,:] '


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
    by_words = _format_by_words(template)
    spec = getattr(tokenizer, "response_template", None)
    field = spec["fields"].get("tool_calls") if spec else None
    if field:
        return ToolFormat(
            marker=str(field.get("open") or field.get("open_pattern", "").replace("\\", "")),
            syntax=by_words.syntax if by_words else None,
            short_ids=by_words is not None and by_words.short_ids,
            field=field,
        )
    if by_words is None:
        raise Refused(
            "tools: this server does not know how this model's chat template writes calls; it "
            "knows Hermes and Qwen, Llama 3, Mistral, and tokenizers with a response_template",
            "tools",
        )
    return by_words


def _format_by_words(template: str) -> ToolFormat | None:
    """Return how a chat template writes calls by the words in it; None if they don't tell."""
    if "<tool_call>" in template and "<function=" not in template and '"arguments"' in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        if "[CALL_ID]" in template:
            return MISTRAL_NAMED._replace(syntax=None)  # a grammar can't make up ids
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None


def forcing_grammar(form: ToolFormat, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """Return a Lark grammar of calls of these tools, whose arguments follow their schemas.

    `several`: more than one. Raises `Refused` if it is not known how calls are written.
    """
    syntax = form.syntax
    if syntax is None:
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
    syntax = form.syntax
    if syntax is None:
        return None
    added = tokenizer.get_added_vocab()
    begin = syntax.before + syntax.parts[0]
    marker = max((token for token in added if begin.startswith(token)), key=len, default=None)
    if marker is None:
        return None
    has_close = form.close or not {"close", "close_pattern"}.isdisjoint(form.field or ())
    after_text = "(calls text)*" if several else "(calls text)?"
    if not has_close:  # text after the calls would be read as part of them
        after_text = "calls?"
    text = f"text: <[^{added[marker]}]>*"
    calls = _calls(syntax, _loosened(tools), several, tokenizer)
    return f"start: text {after_text}\n{text}\n{calls}"


def answer_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    several: bool,
    tokenizer: Any,
    field: str,
    answer: Grammar,
) -> str:
    """Return a Lark grammar of calls, those of `strict` tools by their schemas, or else an answer.

    `answer`: a JSON schema, of an answer without calls, that the request's `field` gives. Raises
    `Refused` if it is not known how calls are written.
    """
    syntax = form.syntax
    if syntax is None:
        raise Refused(
            f"{field}: this server reads this model's calls but can't write a grammar of them, so "
            "it can't hold an answer to a schema where a call may come instead: leave out "
            f"{field} or tools, or give tool_choice none",
            field,
        )
    schema = {"x-guidance": OBJECT["x-guidance"], **json.loads(answer.text)}
    calls = _calls(syntax, _loosened(tools), several, tokenizer)
    return f"start: calls | answer\nanswer: %json {json.dumps(schema)}\n{calls}"


def _loosened(tools: Sequence[Tool]) -> list[Tool]:
    """Return tools of which only the `strict` ones have a schema."""
    copies = [tool.model_copy(deep=True) for tool in tools]
    for tool in copies:
        if not tool.function.strict:
            tool.function.parameters = {"type": "object"}
    return copies


def _calls(syntax: CallSyntax, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """Return the rule `calls` and the rules that it needs."""
    added: dict[str, int] = tokenizer.get_added_vocab()
    begin, middle, end = syntax.parts
    more = ""
    if several and syntax.between is not None:
        more = f" ({_terminals(syntax.between, added)} call)*"
    before = _terminals(syntax.before, added)
    after = _terminals(syntax.after, added)
    rules = [
        f"calls: {before} call{more} {after}",
        f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}",
    ]
    for i, tool in enumerate(tools):
        opening = _terminals(begin + tool.function.name + middle, added)
        rules.append(f"call{i}: {opening} arguments{i} {_terminals(end, added)}")
        rules.append(f"arguments{i}: %json {arguments_grammar(tool).text}")
    return "\n".join([*rules, ""])


def arguments_grammar(tool: Tool) -> Grammar:
    """Return the grammar of the arguments of a tool's calls."""
    return Grammar.json_schema({**OBJECT, **(tool.function.parameters or NO_ARGUMENTS)})


def _terminals(text: str, added: Mapping[str, int]) -> str:
    """Return text as terminals of a grammar: added tokens by their ids, others as characters."""
    tokens = [re.escape(token) for token in sorted(added, key=len, reverse=True)]
    parts = re.split(f"({'|'.join([*tokens, JSON_TERMINALS])})", text)
    return " ".join(
        f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part
    )


class ToolUse(NamedTuple):
    """What a request asks for in tool calls. Without a `form`, its answers hold none.

    - `tools`: those that the model is shown.
    - `several`: whether an answer may hold more than one call.
    - `grammar`: forces calls, or makes them follow schemas; None: neither.
    - `keeps_special`: whether calls can only be found if special tokens stay in the text.
    - `ignored`: notes for `BaseRequest.ignore`.
    - `schemas`: those that are parts of `grammar`, by the fields that give them.
    - `either`: whether, by the grammar, an answer is calls or a text, not both.
    """

    form: ToolFormat | None = None
    tools: Sequence[Tool] = ()
    several: bool = True
    grammar: Grammar | None = None
    keeps_special: bool = False
    ignored: Sequence[str] = ()
    schemas: Mapping[str, Grammar] = {}
    either: bool = False

    def parser(self, prompt: Sequence[int], tokenizer: Any) -> ToolCallParser:
        """Return a parser of calls for one answer to a prompt, given as token ids."""
        thinking = self.form is not None and not self.either and opens_thought(prompt, tokenizer)
        return ToolCallParser(self.form, self.tools, self.several, thinking, self.either)


NO_TOOLS = ToolUse()


def tool_use(request: ToolRequest, tokenizer: Any) -> ToolUse:
    """Return what a request's fields about tools ask for. Raises `Refused` for what can't be.

    Takes seconds the first time, where transformers reads the calls.
    """
    tools = request.shown_tools
    choice = request.choice
    if not tools or choice == "none":
        return NO_TOOLS
    form = tool_format(tokenizer)
    if form.field is not None:
        import_module("transformers.utils.chat_parsing")
    schemas = dict[str, Grammar]()
    ignored = list[str]()
    lark = None
    held = list[int]()  # the numbers of the tools whose calls are held to their schemas
    either = False
    if choice in (None, "auto"):
        several = request.several_calls is not False
        held = [i for i, tool in enumerate(tools) if tool.function.strict]
        grammars = request.grammars
        if grammars:  # one, which `check_tools` accepts
            param, make, value = grammars[0]
            answer = make(value)
            schemas[param] = answer
            lark = answer_grammar(form, tools, several, tokenizer, param, answer)
            either = True
        elif held:
            lark = strict_grammar(form, tools, several, tokenizer)
            if lark is None:  # calls keep to schemas only where they are forced
                ignored = [f"tools[{i}].{request.strict_field}" for i in held]
    else:
        name = choice.function.name if isinstance(choice, NamedTool) else None
        held = [i for i, tool in enumerate(tools) if name in (None, tool.function.name)]
        # Several only if asked for: a model may not know when to end what a grammar lets go on.
        several = request.several_calls is True and choice == "required"
        lark = forcing_grammar(form, [tools[i] for i in held], several, tokenizer)
    if lark is not None:
        schemas |= _argument_schemas(tools, held, request.schema_field)
        for field, schema in schemas.items():
            ignored += [f"{field.partition(' ')[0]} ({note})" for note in schema.left_out]
    return ToolUse(
        form=form,
        tools=tools,
        several=several,
        grammar=None if lark is None else Grammar.lark(lark),
        keeps_special=any(mark and mark in form.marker for mark in tokenizer.all_special_tokens),
        ignored=ignored,
        schemas=schemas,
        either=either,
    )


def _argument_schemas(
    tools: Sequence[Tool], indices: Sequence[int], schema_field: str
) -> dict[str, Grammar]:
    """Return the schemas of the tools with these numbers, by their fields and the tools' names.

    `schema_field`: where a tool has its schema. Raises `Refused` if a strict tool's calls can't be
    held to all of it.
    """
    schemas = dict[str, Grammar]()
    for i in indices:
        function = tools[i].function
        field = f"tools[{i}].{schema_field}"
        schema = arguments_grammar(tools[i])
        schemas[f"{field} ({function.name})"] = schema
        if schema.left_out and function.strict:
            raise Refused(
                f"{field} ({function.name}): {', '.join(schema.left_out)}: calls can't be held to "
                "it: leave it out, or leave out strict",
                field,
            )
    return schemas
