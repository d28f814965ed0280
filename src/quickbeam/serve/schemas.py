"""What requests may hold: types and shapes. `SamplingParams` checks the bounds of its fields.

Each field either works, or its value is refused by name; `null` means the same as leaving it out.
Every list is bounded, and checking stops at the first thing that is wrong: a request of a few
megabytes may hold a million of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from quickbeam.engine.budget import MAX_NODES_SLOW
from quickbeam.errors import NOT_READ
from quickbeam.grammar.spec import Grammar

# names as in OpenAI's API; they need no escaping in a grammar
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
T = TypeVar("T")
Few = Annotated[list[T], Field(max_length=256, fail_fast=True)]
Many = Annotated[list[T], Field(max_length=4096, fail_fast=True)]
Some = Annotated[list[T], Field(min_length=1, max_length=4096, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=2**20, fail_fast=True)]
MAX_LETTERS = 8192  # of all stop strings, and of all bad words
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")  # here prefixes are cached unasked


def _integer(value: Any) -> Any:
    """Return a number without a fraction as an integer, other values as they are."""
    is_exact = isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
    return int(value) if is_exact else value


def refuse(what: str, param: str | None = None) -> PydanticCustomError:
    """Return the error for a value that can't be served. `param`: its field, if not this one."""
    return PydanticCustomError("unsupported", "{what}", {"what": what, "param": param})


def part_of(*kinds: str) -> BeforeValidator:
    """Accept content parts of these kinds. Refuse others, and say why."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            accepted = " or ".join(repr(each) for each in kinds)
            raise refuse(
                f"content part of type {kind!r}: give parts of type {accepted} here; {NOT_READ}"
            )
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """An object in a request. Unknown fields are refused, and types are not converted.

    A number without a fraction is an integer, as JSON does not tell 16.0 from 16.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, body: Any) -> Any:
        """Leave out nulls and marks for other servers' caches, and take 16.0 as 16."""
        if not isinstance(body, dict):
            return body
        return {
            name: _integer(value)
            for name, value in body.items()
            if value is not None and name not in CACHE_MARKS
        }


class LenientBody(Body):
    """A part of an answer, as clients send it back. Fields of their own are left out."""

    model_config = ConfigDict(extra="ignore")


class Root(Body):
    """The body of a request."""

    model: str | None = None


def _short(value: Any) -> Any:
    if sum(len(text) for text in value) > MAX_LETTERS:
        raise refuse(f"more than {MAX_LETTERS} characters in all, the most that there may be")
    return value


ShortTexts = Annotated[Few[str], AfterValidator(_short)]
Pairs = Annotated[dict[str, str], Field(max_length=64)]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise refuse("it holds a number that is not finite: leave it out") from None
    return value


Object = Annotated[dict[str, Any], AfterValidator(_finite)]  # any JSON object
Biases = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float]  # by token id


class Speculation(Body):
    """How drafts are made for this answer. This never changes the answer."""

    method: str | None = None
    budget: Annotated[int, Field(ge=0, le=MAX_NODES_SLOW)] | Literal["auto"] | None = None


Choice = Some[Annotated[str, Field(min_length=1)]]


def any_object(_: object) -> Grammar:
    """Return the grammar of an answer that is any JSON object."""
    return Grammar.json_object()


def one_of(texts: list[str]) -> Grammar:
    """Return the grammar of an answer that is one of these texts."""
    choices = [json.dumps(text, ensure_ascii=False) for text in texts]
    return Grammar.lark(f"start: {' | '.join(choices)}")


# grammars by vLLM's names
VLLM_KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": any_object,
    "regex": Grammar.regex,
    "choice": one_of,
    "grammar": Grammar.lark,
}


class StructuredOutputs(Body):
    """vLLM's way to give a grammar."""

    json_: Object | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None


class GrammarField(NamedTuple):
    """A grammar, by the field that gives it: what `make` makes of its `value`."""

    param: str
    make: Callable[[Any], Grammar]
    value: Any


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class BaseRequest(Root):
    """The fields that all requests for text share."""

    prompt_field: ClassVar[str] = "prompt"
    # fields that may limit the answer's length; the first that is given counts
    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)
    # the limit where none is given; None: as long as the context allows
    default_length: ClassVar[int | None] = None
    # whether a limit beyond the context is cut to what fits; otherwise the request is refused
    cuts_length: ClassVar[bool] = False

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[Biases, Field(max_length=16_384)] | None = None
    seed: int | None = None
    stop: str | ShortTexts | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: ShortTexts | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    lark: str | None = None
    guided_json: Object | str | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Speculation | None = None
    # notes of the caller, without effect; nothing is stored
    user: str | None = None
    metadata: Pairs | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Object | None = None
    client_metadata: Object | None = None
    service_tier: str | None = None
    store: bool | None = None
    moderation: Object | None = None

    _ignored: dict[str, None] = PrivateAttr(default_factory=dict)

    def ignore(self, note: str) -> None:
        """Note something that the request asks for and that its answer goes without.

        The response names all notes in the header `X-Quickbeam-Ignored`, and the log does. To add a
        note, call this in a validator of the mode "after" or in the endpoint's `begin`, before the
        answer begins. A note is the name of a field, as in errors (`truncation`), and what of it is
        left out, in parentheses: `tools[3] (web_search)`. The same note twice is one.
        """
        self._ignored[note] = None

    def ignore_unless(self, field: str, value: object, *served: object) -> None:
        """Note a field with a value, unless it is one of those `served`."""
        if value not in (None, *served):
            self.ignore(field)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The notes that `ignore` was given."""
        return tuple(self._ignored)

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        grammars = self.grammars
        if len(grammars) > 1:
            first, second, *_ = grammars
            raise refuse(
                f"given with {first.param}, but an answer keeps to one grammar: give one of them",
                second.param,
            )
        self.ignore_unless("service_tier", self.service_tier, "auto", "default", "standard_only")
        self.ignore_unless("moderation", self.moderation)
        return self

    @property
    def grammars(self) -> list[GrammarField]:
        """What the answer has to follow; after validation, at most one."""
        structured: dict[str, Any] = {}
        if self.structured_outputs is not None:
            structured = self.structured_outputs.model_dump(by_alias=True)
        fields = [
            GrammarField("regex", Grammar.regex, self.regex),
            GrammarField("lark", Grammar.lark, self.lark),
        ]
        for name, make in VLLM_KINDS.items():
            guided = f"guided_{name}"
            fields.append(GrammarField(guided, make, getattr(self, guided, None)))
            value = structured.get(name) or None
            fields.append(GrammarField(f"structured_outputs.{name}", make, value))
        return [field for field in fields if field.value is not None]

    @property
    def length_limit(self) -> tuple[str, int | None]:
        """The name of the field that limits the answer's length, and the limit in tokens."""
        for name in self.length_fields:
            limit = getattr(self, name)
            if limit is not None:
                return name, limit
        return self.length_fields[0], self.default_length

    @property
    def prompt_count(self) -> int:
        """The number of prompts."""
        return 1

    @property
    def num_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """`SamplingParams.prompt_logprobs`."""
        return None


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class Schema(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    schema_: Object = Field(alias="schema")
    strict: bool | None = None  # refuses what answers can't be held to, which is left out otherwise


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: Schema


def format_grammars(
    param: str, response_format: PlainFormat | JsonSchema | Schema | None
) -> list[GrammarField]:
    """Return the grammar of a response format; none if any text will do."""
    if response_format is None:
        return []
    if isinstance(response_format, PlainFormat):
        is_text = response_format.type == "text"
        return [] if is_text else [GrammarField(param, any_object, True)]
    schema = response_format
    if isinstance(schema, JsonSchema):
        schema = schema.json_schema
    make = strict_schema if schema.strict else Grammar.json_schema
    return [GrammarField(param, make, schema.schema_)]


def strict_schema(schema: dict[str, Any]) -> Grammar:
    """Return a schema's grammar. Raises `InvalidInput` for what answers can't be held to."""
    return Grammar.json_schema(schema, strict=True)


ResponseFormat = Annotated[PlainFormat | JsonSchema, Field(discriminator="type")]


class GenerationRequest(BaseRequest):
    """The fields that chats and completions share."""

    n: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    trace: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("stream_options", "trace"):
            if getattr(self, name) and not self.stream:
                raise refuse("it is for streams: set stream, too", name)
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            self.ignore("stream_options.include_obfuscation")
        return self

    @property
    def grammars(self) -> list[GrammarField]:
        return [*format_grammars("response_format", self.response_format), *super().grammars]
