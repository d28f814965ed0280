"""What an answer may be asked to follow. Knows nothing of tokens: `compiler.py` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quickbeam.errors import InvalidInput

KINDS = ("json_schema", "regex", "lark")


@dataclass(frozen=True)
class Grammar:
    """A language that an answer has to be of, for `SamplingParams(grammar=…)`. Made by one of its
    class methods.

    What llguidance makes of it is the meaning of it: see its documentation for the keywords of JSON
    schema, the syntax of regular expressions (Rust's, without look-around) and its dialect of Lark.
    What can't be used is told when a request begins. `kind`: one of `KINDS`; `text`: the schema,
    expression or grammar. `any_whitespace`: of JSON; see `json_schema`.
    """

    kind: str
    text: str
    any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"unknown kind of grammar {self.kind!r}; known: {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise InvalidInput(f"{self.kind}={self.text!r}: must be text")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str, *, any_whitespace: bool = False
    ) -> Grammar:
        """JSON that fits a schema, given as a mapping or as text.

        It is written as Python's `json.dumps` writes it: `": "` after keys and `", "` between
        items. So what stands between two values is forced, and needs no thought of the model.
        `any_whitespace` leaves that to the model, which may then indent, or write blanks for ever.
        What the schema has as its own `x-guidance` goes before that. Raises `InvalidInput` for what
        is not JSON.
        """
        if not isinstance(schema, str | Mapping):
            raise InvalidInput(f"json_schema={schema!r}: must be a mapping, or a schema as text")
        try:
            text = json.dumps(json.loads(schema) if isinstance(schema, str) else dict(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"json_schema: not JSON ({error})") from error
        return cls("json_schema", text, any_whitespace)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that an expression matches from its first character to its last."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A context-free grammar whose first rule is `start`."""
        return cls("lark", grammar)
