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
    """A formal language that an answer has to belong to, for `SamplingParams(grammar=…)`.

    Make one with a class method. llguidance defines its meaning. See llguidance's documentation for
    the keywords of JSON schema, the syntax of regular expressions (Rust's, without look-around) and
    its dialect of Lark. What llguidance can't use is reported when a request begins.

    - `kind`: one of `KINDS`.
    - `text`: the schema, expression or grammar.
    - `any_whitespace`: for JSON; see `json_schema`.

    Raises `InvalidInput` for an unknown kind, and if `text` is not text.
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

        The answer is written as Python's `json.dumps` writes it: `": "` after keys and `", "`
        between items. So what stands between two values is forced, and the model need not choose
        it. `any_whitespace` leaves whitespace to the model, which may then indent, or write blanks
        for ever. An `x-guidance` entry of the schema itself takes precedence over both.

        Raises `InvalidInput` for what is not JSON.
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
        """Text that a regular expression matches from the first character to the last."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A context-free grammar whose first rule is `start`."""
        return cls("lark", grammar)
