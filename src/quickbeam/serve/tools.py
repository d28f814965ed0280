"""What a request asks for in tool calls, and the grammars that hold its answers to that."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
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
from quickbeam.serve.messages import NamedTool, Tool, ToolMode
from quickbeam.serve.schemas import GrammarField

# schema of a call's arguments, without free white space, which a weak model could write endlessly
OBJECT = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
NO_ARGUMENTS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
TOKENS_OF_MARK = 8  # at the end of a prompt, where the mark of a thought may stand
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
    known = None  # by words in the template
    if "<tool_call>" in template and "<function=" not in template and '"arguments"' in template:
        known = HERMES
    elif "[TOOL_CALLS]" in template and "[CALL_ID]" in template:
        known = MISTRAL_NAMED._replace(syntax=None)  # a grammar can't make up ids
    elif "[TOOL_CALLS]" in template:
        known = MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    elif "<|start_header_id|>" in template and '"parameters"' in template:
        known = LLAMA3
    spec = getattr(tokenizer, "response_template", None)
    if field := spec and spec["fields"].get("tool_calls"):
        marker = str(field.get("open") or field.get("open_pattern", "").replace("\\", ""))
        short_ids = known is not None and known.short_ids
        return ToolFormat(marker, known and known.syntax, short_ids=short_ids, field=field)
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
    # without a closing mark, text after the calls would be read as part of them
    goes_on = form.close or not {"close", "close_pattern"}.isdisjoint(form.field or ())
    rest = f"(calls text){'*' if several else '?'}" if goes_on else "calls?"
    text = f"text: <[^{added[marker]}]>*"
    calls = _calls(syntax, _loosened(tools), several, tokenizer)
    return f"start: text {rest}\n{text}\n{calls}"


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
    if (syntax := form.syntax) is None:
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
    loose = [tool.model_copy(deep=True) for tool in tools]
    for tool in loose:
        if not tool.function.strict:
            tool.function.parameters = {"type": "object"}
    return loose


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
    tokens = map(re.escape, sorted(added, key=len, reverse=True))
    parts = re.split(f"({'|'.join([*tokens, JSON_TERMINALS])})", text)
    return " ".join(
        f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part
    )


class ToolUse(NamedTuple):
    """What a request asks for in tool calls. Without a `form`, its answers hold none."""

    form: ToolFormat | None = None
    tools: Sequence[Tool] = ()  # that the model is shown
    several: bool = True
    grammar: Grammar | None = None  # forces calls, or makes them follow schemas; None: neither
    keeps_special: bool = False  # calls can only be found if special tokens stay in the text
    ignored: Sequence[str] = ()  # notes for `BaseRequest.ignore`
    # of the parts of `grammar`, by the fields that give them
    schemas: Mapping[str, Grammar] = {}
    either: bool = False  # by the grammar, an answer is calls or a text, not both

    def parser(self, prompt: Sequence[int], tokenizer: Any) -> ToolCallParser:
        """Return a parser of calls for one answer to a prompt, given as token ids."""
        thinking = self.form is not None and not self.either and opens_thought(prompt, tokenizer)
        return ToolCallParser(self.form, self.tools, self.several, thinking, self.either)


def opens_thought(prompt: Sequence[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with the mark that begins a thought, so that its answer is one."""
    end = str(tokenizer.decode(prompt[-TOKENS_OF_MARK:]))
    return end.rstrip().endswith(("<think>", "[THINK]"))


def tool_use(
    tools: list[Tool] | None,
    choice: ToolMode | NamedTool | None,
    several: bool | None,
    grammars: Sequence[GrammarField],
    tokenizer: Any,
) -> ToolUse:
    """Return what a request's fields about tools ask for. Raises `Refused` for what can't be.

    `grammars`: what an answer without calls has to follow, at most one, of a kind that
    `check_tools` accepts. Takes seconds the first time, where transformers reads the calls.
    """
    if not tools or choice == "none":
        return ToolUse()
    form = tool_format(tokenizer)
    if form.field is not None:
        import_module("transformers.utils.chat_parsing")
    special = any(token and token in form.marker for token in tokenizer.all_special_tokens)
    ignored = list[str]()
    schemas = dict[str, Grammar]()
    if choice in (None, "auto"):
        several = several is not False
        lark = None
        held = [i for i, tool in enumerate(tools) if tool.function.strict]
        if grammars:
            field, make, value = grammars[0]
            schemas[field] = make(value)
            lark = answer_grammar(form, tools, several, tokenizer, field, schemas[field])
        elif held:
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
    schemas |= _argument_schemas(tools, held)
    for field, schema in schemas.items():
        ignored += [f"{field.partition(' ')[0]} ({note})" for note in schema.left_out]
    grammar = Grammar.lark(lark)
    either = bool(grammars) and choice in (None, "auto")
    return ToolUse(form, tools, several, grammar, special, ignored, schemas, either)


def _argument_schemas(tools: Sequence[Tool], held: Sequence[int]) -> dict[str, Grammar]:
    """Return the schemas of the tools numbered `held`, by their fields and the tools' names.

    Raises `Refused` if a strict tool's calls can't be held to all of its schema.
    """
    schemas = dict[str, Grammar]()
    for i in held:
        place, function = f"tools[{i}].function.parameters", tools[i].function
        own = schemas[f"{place} ({function.name})"] = arguments_grammar(tools[i])
        if own.left_out and function.strict:
            raise Refused(
                f"{place} ({function.name}): {', '.join(own.left_out)}: calls can't be held to it: "
                "leave it out, or leave out strict",
                place,
            )
    return schemas
