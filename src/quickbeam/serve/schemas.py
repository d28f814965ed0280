"""What requests may hold. Knows nothing of models.

Each field either works, or its value is refused by name. Nothing is silently ignored. This module
checks types and shapes; `SamplingParams` checks the bounds of sampling parameters. `null` means the
same as leaving a field out.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from quickbeam.engine.budget import MOST_DEAR

# names as in OpenAI's API; they need no escaping in a grammar
NAME = r"^[a-zA-Z0-9_-]{1,64}$"


def refuse(what: str, param: str | None = None) -> PydanticCustomError:
    """Return the error for a value that is well formed but can't be served.

    `param` names the field, if it is not the one that is being read.
    """
    return PydanticCustomError("unsupported", "{what}", {"what": what, "param": param})


def only(*accepted: Any) -> BeforeValidator:
    """Accept only these values, which have no effect, and refuse any other."""

    def check(value: Any) -> Any:
        if not any(
            value is one or (value == one and not isinstance(value, bool | int)) for one in accepted
        ):
            kept = ", ".join(json.dumps(one) for one in accepted if one is not None)
            raise refuse(
                f"not supported by this server: leave it out{f', or give {kept}' if kept else ''}"
            )
        return value

    return BeforeValidator(check)


def text_part(*kinds: str) -> BeforeValidator:
    """Accept content parts of these kinds, which hold text. Refuse others, and say why."""

    def check(value: Any) -> Any:
        if (
            isinstance(value, dict)
            and isinstance(kind := value.get("type"), str)
            and kind not in kinds
        ):
            known = " or ".join(repr(one) for one in kinds)
            raise refuse(
                f"content part of type {kind!r}: this server reads text only and fetches "
                f"nothing; give parts of type {known}"
            )
        return value

    return BeforeValidator(check)


Unsupported = Annotated[Any, only(None)]


class Body(BaseModel):
    """An object in a request. Unknown fields are refused, and types are not converted."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Root(Body):
    """The body of a request."""

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, body: Any) -> Any:
        """Refuse what Python reads although JSON does not have it.

        This is NaN, infinite numbers, halves of surrogate pairs, and nesting that is too deep.
        """
        if not isinstance(body, dict):
            raise refuse("the body must be a JSON object, sent as application/json")
        try:
            json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise refuse("a string holds half of a surrogate pair, which is no character") from None
        except RecursionError:
            raise refuse("nested too deep") from None
        except (ValueError, TypeError) as error:
            raise refuse(f"not JSON: {error}") from None
        return body


class Speculation(Body):
    """How drafts are made for this answer. This never changes the answer."""

    method: str | None = None
    budget: Annotated[int, Field(ge=0, le=MOST_DEAR)] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, only(None, False)] = None


class Request(Root):
    """The fields that all requests for text share."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    lark: str | None = None
    speculation: Speculation | None = None
    # notes of the caller, without effect
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Annotated[Any, only(None, "auto", "default")] = None
    store: Annotated[Any, only(None, False)] = None
    # not served
    moderation: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Annotated[Any, only(None, "in_memory")] = None

    @property
    def grammars(self) -> list[str]:
        """The names of the fields that give a grammar."""
        given = {name: getattr(self, name, None) for name in ("response_format", "regex", "lark")}
        return [
            name
            for name, value in given.items()
            if value is not None and not isinstance(value, TextFormat)
        ]


class TextFormat(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class Schema(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # without effect: answers always follow the schema


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: Schema


ResponseFormat = Annotated[TextFormat | JsonObject | JsonSchema, Field(discriminator="type")]


class GenerationRequest(Request):
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
        if len(given := self.grammars) > 1:
            raise refuse(
                f"given with {given[0]}, but an answer keeps to one grammar: give one of them",
                given[1],
            )
        return self


class CompletionRequest(GenerationRequest):
    prompt: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    best_of: int | None = None
    suffix: Annotated[Any, only(None, "")] = None
    # one for each prompt
    seeds: list[Annotated[int, Field(ge=-(2**63), lt=2**64)]] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.seeds is not None:
            single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
            prompts = 1 if single else len(self.prompt)
            if len(self.seeds) != prompts:
                raise refuse(
                    f"{len(self.seeds)} seeds for {prompts} prompts: give one for each", "seeds"
                )
            if self.seed is not None:
                raise refuse("given with seed: give one of them", "seeds")
        if self.best_of not in (None, self.n or 1):
            raise refuse(
                "no more answers are drawn than are given: leave it out, or give the value of n",
                "best_of",
            )
        if self.echo and self.logprobs is not None:
            raise refuse(
                "log-probabilities of the prompt are not given: leave out echo or logprobs", "echo"
            )
        return self


class TokenizeText(Root):
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(Root):
    tokens: list[int]
