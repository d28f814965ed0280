"""Convert requests to the engine's terms: prompts as token ids, `SamplingParams`, jobs.

Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from quickbeam.errors import InvalidInput
from quickbeam.grammar.spec import Grammar
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import BYTES_A_TOKEN, TENANT
from quickbeam.serve.answers import Answers
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import Conversation, Message, TokenizeText, Tool, ToolMessage, text_of
from quickbeam.serve.runner import Job, Runner
from quickbeam.serve.schemas import Request, Speculation

OTHER = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "grammar", "coupling"}
# fields that mean the same in SamplingParams
SAME = [field.name for field in fields(SamplingParams) if field.name not in OTHER]
# What stands before a prefix, between it and a suffix, and behind that, in the models that fill in.
INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek-Coder)
)
MOST_LOGPROBS = 2**20  # of one response that is no stream; more would take a second to write
SEED_BITS = 53  # every JSON reader keeps integers of this size exactly


class Prompts(NamedTuple):
    """The prompts of a request, before they are encoded, and what their tools ask of its answers.

    - `encode`: returns the prompts' token ids; it runs in a thread.
    - `size`: their length in characters, from which their place in the queue is estimated, unless
      `tokens`, their number of tokens, is known. `number` is how many there are.
    - `grammar`: takes precedence over the request's own.
    - `keep_special`: special tokens stay in the text.
    """

    encode: Callable[[], list[list[int]]]
    size: int
    tokens: int | None = None
    number: int = 1
    grammar: Grammar | None = None
    keep_special: bool = False


async def begin(runner: Runner, request: Request, given: Prompts) -> Answers:
    """Have the engine begin with a request, and return its answers.

    The request first takes a place in the queue; then its prompts are encoded. Raises
    `InvalidInput` for a request that can't be answered, `Busy` and `Unavailable`.
    """
    try:
        check_model(runner, request.model)
        return await _begun(runner, request, given)
    except Refused:
        raise
    except InvalidInput as error:  # named by the request's field that it is about
        message = str(error).replace("max_tokens", request.asked_length[0])
        param = field_of(message, request)
        if message.startswith(("json_schema", "regex", "lark", "grammar")):
            param = request.grammars[0].param if request.grammars else "tools"
        raise Refused(message, param) from error


async def _begun(runner: Runner, request: Request, given: Prompts) -> Answers:
    asked = request.speculation or Speculation()
    if asked.method not in (None, *(methods := runner.llm.methods)):
        raise Refused(
            f"unknown method {asked.method!r}; this server runs {', '.join(methods)}",
            "speculation.method",
        )
    params = sampling(request, given, runner.defaults)
    tokens = -(-given.size // BYTES_A_TOKEN) if given.tokens is None else given.tokens
    with runner.gate.enter(tokens, given.number * params.n, TENANT.get()) as ticket:
        prompts, lengths = await asyncio.to_thread(_measured, runner.llm, request, given)
        if params.grammar is not None:
            await runner.compile_grammar(params.grammar)
        _check_logprobs(request, params, len(prompts), max(lengths))
        # Each prompt gets a seed of its own. With a shared seed, the same prompt given twice would
        # see the same noise and get the same answer.
        seeds: list[int | None] = getattr(request, "seeds", None) or [params.seed] * len(prompts)
        if not params.greedy:
            seeds = [secrets.randbits(SEED_BITS) if seed is None else seed for seed in seeds]
        how = (asked.method, asked.budget, bool(getattr(request, "trace", False)))
        jobs = []
        for ids, most, seed in zip(prompts, lengths, seeds, strict=True):
            own = replace(params, max_tokens=most, seed=seed)
            for choice in range(params.n):
                # the first scores the prompt for all, where they have any text
                scores = not choice or not most
                asks = own if scores else replace(own, prompt_logprobs=None)
                jobs.append(Job(ids, asks, choice, *how))
        return Answers(await runner.begin(jobs, ticket), prompts, seeds)


def _check_logprobs(request: Request, params: SamplingParams, prompts: int, length: int) -> None:
    """Raise `Refused` for more log-probabilities than one response can hold."""
    each = 0 if params.logprobs is None else params.logprobs + 1
    if not request.stream and each * prompts * params.n * length > MOST_LOGPROBS:
        raise Refused(
            f"{each} log-probabilities for each of up to {prompts * params.n * length} tokens: "
            "ask for a stream, fewer answers, or shorter ones",
            "top_logprobs" if hasattr(request, "top_logprobs") else "logprobs",
        )


def field_of(message: str, request: Request | Conversation | TokenizeText) -> str:
    """Return which of a request's fields an error is about.

    Messages begin with its name; the others are about the prompt.
    """
    word = message[: len(message) - len(message.lstrip(string.ascii_letters + "_"))]
    within = {"budget": "speculation.budget", "reasoning_effort": "reasoning.effort"}
    return word if word in type(request).model_fields else within.get(word, request.prompt_field)


def check_model(runner: Runner, model: str | None) -> None:
    """Raise `Refused` (404) unless `model` is a name of the served model, or None."""
    if model not in (None, *runner.names):
        raise Refused(
            f"the model {model!r} does not exist: this server has {', '.join(runner.names)}",
            "model",
            "model_not_found",
        )


def sampling(request: Request, prompts: Prompts, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the request's sampling parameters; its length is not final where no limit is given."""
    given = {name: value for name in SAME if (value := getattr(request, name, None)) is not None}
    given = {**defaults, **given}
    if given.get("top_k") == -1:  # vLLM's value for off
        given["top_k"] = 0
    if request.logit_bias:
        given["logit_bias"] = {int(name): bias for name, bias in request.logit_bias.items()}
    if prompts.keep_special:
        given["skip_special_tokens"] = False
    # SamplingParams checks min_tokens against max_tokens. Where no limit is given, the real one is
    # set later, from the room in the context.
    length = request.asked_length[1]
    return SamplingParams(
        max_tokens=2**31 if length is None else length,
        logprobs=request.scores,
        prompt_logprobs=request.prompt_scores,
        grammar=prompts.grammar or next((one.make(one.value) for one in request.grammars), None),
        **given,
    )


def _measured(llm: LLM, request: Request, given: Prompts) -> tuple[list[list[int]], list[int]]:
    """Return each prompt's token ids, and the number of tokens that its answer may have."""
    (name, asked), param = request.asked_length, request.prompt_field
    method = request.speculation.method if request.speculation else None
    if given.tokens is None:
        check_size(llm, given.size, param, given.number)
    prompts, lengths = given.encode(), list[int]()
    for ids in prompts:
        if not ids:
            raise Refused("an empty prompt: give at least one token", param)
        room = llm.room(len(ids), method)
        if (1 if asked is None else asked) > room:
            raise too_long(
                room + len(ids),
                f"of which the prompt has {len(ids)} and {name} asks for "
                f"{'at least 1' if asked is None else asked}: shorten the prompt"
                f"{' or ask for less' if asked else ''}",
                name if asked and room > 0 else param,
            )
        lengths.append(room if asked is None else asked)
    return prompts, lengths


def check_size(llm: LLM, size: int, param: str, prompts: int = 1) -> None:
    """Raise `Refused` for texts that can't fit: a token may stand for twice its characters at
    most."""
    room = llm.room(0)
    if size > 2 * room * _longest_token(llm.tokenizer) * prompts:
        raise too_long(room, f"and {size} characters can't fit: shorten the prompt", param)


def too_long(most: int, why: str, param: str) -> Refused:
    message = f"This model's maximum context length is {most} tokens, {why}"
    return Refused(message, param, "context_length_exceeded")


@lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


def encode_conversation(
    llm: LLM, asked: Conversation, tools: Sequence[Tool] | None = None
) -> list[int]:
    """Return the token ids of a conversation's prompt."""
    arguments = asked.chat_template_kwargs or {}
    own = {
        *inspect.signature(LLM.encode_chat).parameters,
        *inspect.signature(llm.tokenizer.apply_chat_template).parameters,
    }
    if taken := sorted(arguments.keys() & own):
        raise Refused(
            f"chat_template_kwargs: {taken[0]!r} is the server's own; give variables of "
            "the template",
            "chat_template_kwargs",
        )
    left = {"function": {"strict"}}
    return llm.encode_chat(
        template_messages(asked.messages),
        tools=[tool.model_dump(exclude_none=True, exclude=left) for tool in tools or []] or None,
        continue_final_message=bool(asked.continue_final_message),
        **{**_effort(str(llm.tokenizer.chat_template), asked.reasoning_effort), **arguments},
    )


def _effort(template: str, effort: str | None) -> dict[str, Any]:
    """Return the variables by which a chat template is told how much to reason."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort == "none":
        return {"enable_thinking": False} if "enable_thinking" in template else {}
    raise InvalidInput(
        f"reasoning_effort={effort!r}: this model's chat template knows no efforts; leave it out, "
        "or give none"
    )


def encode_infill(llm: LLM, prompt: str, suffix: str) -> list[int]:
    """Return the token ids that ask for the text between `prompt` and `suffix`."""
    known = llm.tokenizer.get_added_vocab()
    marks = next((marks for marks in INFILL if known.keys() >= {*marks}), None)
    if marks is None:
        raise Refused(
            "suffix: this model's tokenizer has no tokens for filling in; leave it out, or serve a "
            "model that was trained for that, such as Qwen2.5-Coder or StarCoder2",
            "suffix",
        )
    before, between, behind = marks
    return list(llm.tokenizer(f"{before}{prompt}{between}{suffix}{behind}")["input_ids"])


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates take.

    Content becomes one text, `developer` becomes `system`, the arguments of tool calls become
    objects, and a tool's answer gets the tool's name. Raises `Refused` for arguments that are not a
    JSON object.
    """
    shown, names = list[dict[str, Any]](), dict[str, str]()
    for number, message in enumerate(messages):
        one = {**message.model_dump(exclude_none=True), "content": text_of(message.content)}
        if message.role == "developer":
            one["role"] = "system"
        for i, call in enumerate(one.get("tool_calls", ())):
            names[call["id"]] = call["function"]["name"]
            where = f"messages[{number}].tool_calls[{i}].function.arguments"
            call["function"]["arguments"] = _arguments(call["function"]["arguments"], where)
        if isinstance(message, ToolMessage) and message.tool_call_id in names:
            one.setdefault("name", names[message.tool_call_id])
        shown.append(one)
    return shown


def size_of(messages: Sequence[Message]) -> int:
    """Return the number of characters of all messages."""
    return sum(len(text_of(message.content)) for message in messages)


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{where}: not a JSON object", where)
    return arguments
