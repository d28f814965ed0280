"""Reads the source of a grammar for the texts that it writes, and the tokens that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from quickbeam.grammar.spec import Grammar

# Of llguidance's dialect of Lark. What is not closed goes on to the end, so that a search takes
# time in proportion to the text.
LEXEME = re.compile(
    r"""
      (?P<comment> (?: \# | // ) [^\n]* )
    | (?P<string> " (?: \\. | [^"\\\n] )* "? )
    | (?P<regex> / (?: \\. | [^/\\] )+ /? )
    | (?P<json> %json \s* )
    | < \[ (?P<ids> [\d^*,-]* ) \] >
    | (?P<name> < [^<>\s]* >? )
    """,
    re.VERBOSE | re.DOTALL,
)
# Of a regular expression: what is no character of the text (sets, counts, groups, other signs), and
# the characters.
ATOM = re.compile(
    r"""
      \[ \^? \]? (?: \\. | [^\]\\] )* \]?
    | \{ [\d,]* \}
    | \( \? (?: P?<\w+> | <?[=!] | [a-zA-Z-]* [:)] )
    | \\ (?: [pP]\{[^{}\\]*\} | [dDwWsSbBAzZpP] )
    | [().|*+?^$]
    | \\ [xuU] \{ (?P<braced> [0-9a-fA-F]{1,6} ) \}
    | \\ (?: x(?P<two> [0-9a-fA-F]{2} ) | u(?P<four> [0-9a-fA-F]{4} ) )
    | \\ (?P<control> [nrtfva0] )
    | \\? (?P<character> . )
    """,
    re.VERBOSE | re.DOTALL,
)
CONTROLS = dict(zip("nrtfva0", "\n\r\t\f\v\a\0", strict=True))
ANNOTATIONS = ("title", "description", "default", "examples", "$comment")


class LarkSource(NamedTuple):
    """What a Lark grammar holds.

    - `texts`: the texts that it writes.
    - `names`: the tokens that it names by their texts: `<think>`.
    - `ids`: the ids that it names or leaves out, as ranges `(first, last)`: `<[5-7]>`, `<[^5]>`.
    - `takes_others`: whether it takes all ids but some, or all: `<[^5]>`, `<[*]>`.
    """

    texts: Sequence[str] = ()
    names: Set[str] = frozenset()
    ids: Sequence[tuple[int, int]] = ()
    takes_others: bool = False


def read_lark(text: str) -> LarkSource:
    """Return what a Lark grammar holds. Other text is read in the same way, and is no error."""
    texts = list[str]()
    names = set[str]()
    ids = list[tuple[int, int]]()
    takes_others = False
    start = 0
    while (match := LEXEME.search(text, start)) is not None:
        start = match.end()
        kind = match.lastgroup
        if kind == "string":
            texts.append(_unquoted(match["string"]))
        elif kind == "regex":
            texts.append(pattern_text(match["regex"].strip("/")))
        elif kind == "json":
            try:
                schema, start = json.JSONDecoder().raw_decode(text, start)
                texts += schema_texts(schema)
            except (ValueError, RecursionError):  # llguidance reports it
                break
        elif kind == "ids":
            takes_others = takes_others or match["ids"].startswith(("^", "*"))
            for first, last in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?", match["ids"]):
                ids.append((int(first), int(last or first)))
        elif kind == "name":
            names.add(match["name"])
    return LarkSource(texts, names, ids, takes_others)


def grammar_texts(grammar: Grammar) -> Sequence[str]:
    """Return the texts that a grammar writes."""
    if grammar.kind == "regex":
        return [pattern_text(grammar.text)]
    if grammar.kind == "lark":
        return read_lark(grammar.text).texts
    try:
        return list(schema_texts(json.loads(grammar.text)))
    except (ValueError, RecursionError):  # llguidance reports it
        return []


def schema_texts(schema: Any) -> Iterator[str]:
    """Yield the texts that a JSON schema writes, encoded as JSON."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        if not isinstance(part, Mapping):
            continue
        for keyword, value in part.items():
            match keyword, value:
                case (("const" | "enum" | "required"), _):
                    yield json.dumps(value, ensure_ascii=False)
                case "pattern", str():
                    yield json.dumps(pattern_text(value), ensure_ascii=False)
                case "properties", Mapping():
                    yield json.dumps(list(value), ensure_ascii=False)
                    stack += value.values()
                case "patternProperties", Mapping():
                    for pattern in value:
                        yield json.dumps(pattern_text(pattern), ensure_ascii=False)
                    stack += value.values()
                case _ if keyword not in ANNOTATIONS:
                    stack.append(value)


def pattern_text(pattern: str) -> str:
    """Return the characters that stand in a regular expression for themselves, outside of sets."""
    text = ""
    for atom in ATOM.finditer(pattern):
        code = atom["braced"] or atom["two"] or atom["four"]
        if code is not None:
            text += chr(min(int(code, 16), 0x10FFFF))
        elif atom["control"] is not None:
            text += CONTROLS[atom["control"]]
        else:
            text += atom["character"] or ""
    return text


def _unquoted(string: str) -> str:
    try:
        return str(json.loads(string))
    except ValueError:
        return string
