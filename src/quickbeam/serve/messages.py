"""The bodies of requests to chats, completions and about tokens. Knows no model."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from typing_extensions import Self

from quickbeam.errors import InvalidInput
from quickbeam.models.vision.image import check_data_url
from quickbeam.serve.schemas import (
    Body,
    Few,
    GenerationRequest,
    Ids,
    LenientBody,
    Many,
    Object,
    Root,
    Some,
    part_of,
    refuse,
)
from quickbeam.serve.tool_fields import INPUT, AnyTool, OpenAIToolRequest


class TextPart(LenientBody):
    type: Literal["text"]
    text: str


def _data_url(url: str) -> str:
    try:
        check_data_url(url)
    except InvalidInput as error:
        raise refuse(str(error)) from error
    return url


class ImageURL(Body):
    url: Annotated[str, AfterValidator(_data_url)]
    detail: str | None = None


class ImagePart(LenientBody):
    """An image, as a `data:` URL: this server follows no other."""

    type: Literal["image_url"]
    image_url: ImageURL


def _refusal_as_text(part: Any) -> Any:
    match part:
        case {"type": "refusal", "refusal": text}:
            return {"type": "text", "text": text}
    return part


Part = Annotated[TextPart, part_of("text"), BeforeValidator(_refusal_as_text)]
Content = str | Some[Part]
UserPart = Annotated[
    Annotated[TextPart | ImagePart, Field(discriminator="type")],
    part_of("text", "image_url"),
    BeforeValidator(_refusal_as_text),
]
# of an earlier answer, whatever it was: an empty list is an empty text
PastContent = str | Many[Part]


def text_of(content: str | list[Any] | None) -> str:
    """Return the text of a content, with each of its parts on a line of its own."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or [] if isinstance(part, TextPart))


def images_of(message: Message) -> list[ImagePart]:
    """Return the images in a message."""
    content = message.content
    if not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, ImagePart)]


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class CalledFunction(LenientBody):
    """What a model called. Its arguments need not be JSON, as models make mistakes."""

    name: str
    arguments: Annotated[str, BeforeValidator(_as_text)] = ""


class ToolCall(LenientBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, call: Any) -> Any:
        match call:
            case {"type": "custom", "custom": {"name": name, "input": text}, **more}:
                return {**more, "function": {"name": name, "arguments": {INPUT: text}}}
        return call


class UserMessage(Body):
    role: Literal["user", "system", "developer"]
    content: str | Some[UserPart]
    name: str | None = None

    @model_validator(mode="after")
    def _has_images_as_user(self) -> Self:
        if self.role != "user" and images_of(self):
            raise refuse("images are read in the user's messages alone", "messages")
        return self


class AssistantMessage(LenientBody):
    """A message of the assistant. `reasoning` is what vLLM calls `reasoning_content`."""

    role: Literal["assistant"]
    content: PastContent | None = None
    name: str | None = None
    tool_calls: Few[ToolCall] | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    # other values are refused, as they would say something to a model
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, body: Any) -> Any:
        """Take a refusal as content; check that there is a field which may hold an answer."""
        if not isinstance(body, dict):
            return body
        if not body.keys() & ANSWER_FIELDS:
            raise refuse("give content or tool_calls")
        if body.get("content") is None and isinstance(body.get("refusal"), str):
            return {**body, "content": body["refusal"]}
        return body


# fields of an assistant's message one of which is given, even if it is empty
ANSWER_FIELDS = {
    "content",
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "refusal",
    "function_call",
}


class ToolMessage(LenientBody):
    role: Literal["tool"]
    content: PastContent | None = None
    tool_call_id: str
    name: str | None = None


Message = Annotated[UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Conversation(Body):
    """What a chat template makes a prompt from."""

    prompt_field: ClassVar[str] = "messages"

    messages: Some[Message]
    tools: Few[AnyTool] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None

    @property
    def images(self) -> list[ImagePart]:
        """The images in all messages."""
        return [part for message in self.messages for part in images_of(message)]

    @model_validator(mode="after")
    def _has_one_ending(self) -> Self:
        if self.add_generation_prompt is bool(self.continue_final_message):
            raise refuse(
                "an answer either continues the final message or is a message of its own: leave "
                "it out",
                "add_generation_prompt",
            )
        return self


class Prediction(Body):
    """A guess at the answer. It may only change how long an answer takes."""

    type: Literal["content"]
    content: Content


class ChatRequest(OpenAIToolRequest, Conversation, GenerationRequest):
    effort_field: ClassVar[str] = "reasoning_effort"
    length_fields: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    modalities: Few[Literal["text"]] | None = None
    prediction: Prediction | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    web_search_options: Object | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refuse("needs logprobs: true", "top_logprobs")
        lengths = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(lengths) > 1:
            raise refuse("differs from max_completion_tokens: give one of them", "max_tokens")
        self.check_tools()
        self.ignore_unless("verbosity", self.verbosity, "medium")
        self.ignore_unless("web_search_options", self.web_search_options)
        for image in self.images:
            self.ignore_unless("image_url.detail", image.image_url.detail, "auto")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# log-probabilities for each token of a prompt: they take memory, and prompts are long
MAX_PROMPT_LOGPROBS = 20


class CompletionRequest(GenerationRequest):
    default_length: ClassVar[int | None] = 16  # as in OpenAI's API

    prompt: str | Some[str] | Annotated[Ids, Field(min_length=1)] | Some[Ids]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None
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
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo gets as many as `logprobs` says, and without an answer at least 0."""
        if not self.echo or self.prompt_logprobs is not None:
            return self.prompt_logprobs
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self._check_seeds()
        self._check_suffix()
        if self.best_of not in (None, self.n or 1):
            raise refuse(
                "no more answers are drawn than are given: leave it out, or give the value of n",
                "best_of",
            )
        self._check_logprobs()
        return self

    def _check_seeds(self) -> None:
        if self.seeds is None:
            return
        if len(self.seeds) != len(self.prompts):
            raise refuse(
                f"{len(self.seeds)} seeds for {len(self.prompts)} prompts: give one for each",
                "seeds",
            )
        if self.seed is not None:
            raise refuse("given with seed: give one of them", "seeds")

    def _check_suffix(self) -> None:
        if not self.suffix:
            return
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise refuse("needs a prompt of text: give no token ids, or no suffix", "suffix")
        if self.echo and self.logprobs is not None:
            raise refuse(
                "an echo with logprobs is of the prompt's tokens, which hold the suffix and marks "
                "around it: leave out one of suffix, echo and logprobs",
                "suffix",
            )

    def _check_logprobs(self) -> None:
        if self.stream and self.prompt_logprobs is not None:
            raise refuse(
                "not given in a stream: leave out stream, or give echo and logprobs instead",
                "prompt_logprobs",
            )
        if not self.echo or self.logprobs is None:
            return
        if self.logprobs > MAX_PROMPT_LOGPROBS:
            raise refuse(f"at most {MAX_PROMPT_LOGPROBS} with echo: give fewer", "logprobs")
        if self.prompt_logprobs is not None:
            raise refuse(
                "logprobs with echo are those of the prompt, too: give one of them",
                "prompt_logprobs",
            )


class TokenizeChat(Root, Conversation):
    return_token_strs: bool | None = None


class TokenizeText(Root):
    prompt_field: ClassVar[str] = "prompt"

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    has_messages = isinstance(body, dict) and body.get("messages") is not None
    return "chat" if has_messages else "text"


Tokenize = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeChat, Tag("chat")],
    Discriminator(_kind),
]


class Detokenize(Root):
    tokens: Ids
