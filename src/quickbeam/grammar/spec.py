"""A grammar that an answer may be asked to follow. `compiler.py` compiles it for a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quickbeam.errors import InvalidInput
from quickbeam.grammar.json_schema import enforceable

MOST_NAMED = 5  # keywords in an error message
KINDS = ("json_schema", "regex", "lark")


@dataclass(frozen=True)
class Grammar:
    """A formal language that an answer has to belong to, for `SamplingParams(grammar=…)`.

    Make one with a class method. llguidance defines its meaning. See llguidance's documentation for
    the keywords of JSON schema, the syntax of regular expressions (Rust's, without look-around) and
    its dialect of Lark. What llguidance can't use is reported when a request begins.

    - `kind`: one of `KINDS`.
    - `text`: the schema, expression or grammar.
    - `any_whitespace`: for JSON; see `json_schema`.
    - `left_out`: the keywords of a schema that answers are not held to, at most 100:
      `uniqueItems at #/properties/tags`.

    Raises `InvalidInput` for an unknown kind, and if `text` is not text.
    """

    kind: str
    text: str
    any_whitespace: bool = False
    left_out: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"unknown kind of grammar {self.kind!r}; known: {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise InvalidInput(f"{self.kind}={self.text!r}: must be text")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str, *, any_whitespace: bool = False, strict: bool = False
    ) -> Grammar:
        """JSON that fits a schema, given as a mapping or as text.

        The answer is written as Python's `json.dumps` writes it: `": "` after keys and `", "`
        between items. So the text between two values is forced. `any_whitespace` leaves whitespace
        to the model, which may then indent, or write blanks for ever. An `x-guidance` entry of the
        schema itself takes precedence over both.

        No grammar can hold an answer to some keywords (`uniqueItems`, `if`, most look-around in a
        `pattern`). These keywords are left out. `left_out` names them, and the log does when an
        answer begins. With `strict` they are refused. A `format` that llguidance lacks is an
        annotation.

        Raises `InvalidInput` for what is not JSON, and with `strict` for such keywords.
        """
        if not isinstance(schema, str | Mapping):
            raise InvalidInput(f"json_schema={schema!r}: must be a mapping, or a schema as text")
        try:
            document = schema if isinstance(schema, str) else json.dumps(dict(schema))
            rewritten, left_out = enforceable(json.loads(document))
            text = json.dumps(rewritten)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"json_schema: not JSON ({error})") from error
        if left_out and strict:
            keywords = ", ".join(left_out[:MOST_NAMED])
            if len(left_out) > MOST_NAMED:
                keywords += ", …"
            raise InvalidInput(
                f"json_schema: {keywords}: answers can't be held to it: leave it out, or leave out "
                "strict"
            )
        return cls("json_schema", text, any_whitespace, tuple(left_out))

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from the first character to the last."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A context-free grammar whose first rule is `start`."""
        return cls("lark", grammar)
