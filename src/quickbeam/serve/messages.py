"""Requests to chats, completions and about tokens. Knows nothing of models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator
from typing_extensions import Self

from quickbeam.serve.schemas import (
    NAME,
    Body,
    Few,
    GenerationRequest,
    GrammarField,
    Ids,
    LenientBody,
    Many,
    Object,
    Root,
    Some,
    refuse,
    text_part,
)


class Function(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None
    # in the Responses API alone, where they may have one value
    allowed_callers: Few[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


ToolMode = Literal["none", "auto", "required"]
# fields that hold an answer to a schema, but not the tool calls that may come instead
ANSWER_FORMATS = ("response_format", "text")


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


def check_tools(
    tools: list[Tool] | None, choice: ToolMode | NamedTool | None, grammars: list[GrammarField]
) -> None:
    """Raise a validation error if tools, tool choice and grammars don't fit together."""
    names = [tool.function.name for tool in tools or []]
    if choice not in (None, "none", "auto") and not names:
        raise refuse("there are no tools to choose from: give tools, too", "tool_choice")
    if len(set(names)) < len(names):
        raise refuse("two have the same name", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise refuse(f"{choice.function.name!r} is not among the tools", "tool_choice")
    if names and choice != "none" and grammars and grammars[0].param not in ANSWER_FORMATS:
        raise refuse(
            f"an answer that keeps to a grammar can't call tools: leave it out, give a schema in "
            f"{' or '.join(ANSWER_FORMATS)} instead, or give tool_choice none",
            grammars[0].param,
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Some[Annotated[TextPart, text_part("text")]]


def text_of(content: str | list[Any] | None) -> str:
    """Return the text of a content, with each of its parts on a line of its own."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or [])


class CalledFunction(LenientBody):
    name: str
    arguments: str


class ToolCall(LenientBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class UserMessage(Body):
    role: Literal["user", "system", "developer"]
    content: Content
    name: str | None = None


class AssistantMessage(LenientBody):
    """A message of the assistant. `reasoning` is what vLLM calls `reasoning_content`."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Few[ToolCall] | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    # they would say something to a model
    refusal: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise refuse("give content or tool_calls")
        return self


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Conversation(Body):
    """What a chat template makes a prompt from."""

    prompt_field: ClassVar[str] = "messages"

    messages: Some[Message]
    tools: Few[Tool] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.add_generation_prompt is bool(self.continue_final_message):
            raise refuse(
                "an answer either continues the final message or is a message of its own: leave "
                "it out",
                "add_generation_prompt",
            )
        return self


class Prediction(Body):
    """A guess at the answer. It may only change how long an answer takes, and here does not."""

    type: Literal["content"]
    content: Content


class ChatRequest(Conversation, GenerationRequest):
    length_fields: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Few[Literal["text"]] | None = None
    prediction: Prediction | None = None
    verbosity: Literal["medium"] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refuse("needs logprobs: true", "top_logprobs")
        lengths = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(lengths) > 1:
            raise refuse("differs from max_completion_tokens: give one of them", "max_tokens")
        check_tools(self.tools, self.tool_choice, self.grammars)
        return self

    @property
    def scores(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# the most log-probabilities for each token of a prompt: they take memory, and prompts are long
MOST_OF_PROMPTS = 20


class CompletionRequest(GenerationRequest):
    length: ClassVar[int | None] = 16  # as in OpenAI's API

    prompt: str | Some[str] | Annotated[Ids, Field(min_length=1)] | Some[Ids]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_OF_PROMPTS)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    # one for each prompt
    seeds: Many[Annotated[int, Field(ge=-(2**63), lt=2**64)]] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def count(self) -> int:
        return len(self.prompts)

    @property
    def scores(self) -> int | None:
        return self.logprobs

    @property
    def prompt_scores(self) -> int | None:
        """An echo gets as many as `logprobs` says, and without an answer at least 0."""
        if not self.echo or self.prompt_logprobs is not None:
            return self.prompt_logprobs
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        prompts, seeds = self.prompts, self.seeds
        echo, scored = bool(self.echo), self.logprobs is not None
        given = 0 if seeds is None else len(seeds)
        rules = {
            f"{given} seeds for {len(prompts)} prompts: give one for each": (
                "seeds", seeds is not None and given != len(prompts)
            ),
            "given with seed: give one of them": ("seeds", None not in (seeds, self.seed)),
            "needs a prompt of text: give no token ids, or no suffix": (
                "suffix", self.suffix and not all(isinstance(one, str) for one in prompts)
            ),
            "an echo with logprobs is of the prompt's tokens, which hold the suffix and marks "
            "around it: leave out one of suffix, echo and logprobs": (
                "suffix", self.suffix and echo and scored
            ),
            "no more answers are drawn than are given: leave it out, or give the value of n": (
                "best_of", self.best_of not in (None, self.n or 1)
            ),
            "not given in a stream: leave out stream, or give echo and logprobs instead": (
                "prompt_logprobs", self.stream and self.prompt_logprobs is not None
            ),
            f"at most {MOST_OF_PROMPTS} with echo: give fewer": (
                "logprobs", echo and (self.logprobs or 0) > MOST_OF_PROMPTS
            ),
            "logprobs with echo are those of the prompt, too: give one of them": (
                "prompt_logprobs", echo and scored and self.prompt_logprobs is not None
            ),
        }  # fmt: skip
        for what, (param, broken) in rules.items():
            if broken:
                raise refuse(what, param)
        return self


class TokenizeChat(Root, Conversation):
    return_token_strs: bool | None = None


class TokenizeText(Root):
    prompt_field: ClassVar[str] = "prompt"

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    chat = isinstance(body, dict) and body.get("messages") is not None
    return "chat" if chat else "text"


Tokenize = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeChat, Tag("chat")],
    Discriminator(_kind),
]


class Detokenize(Root):
    tokens: Ids
