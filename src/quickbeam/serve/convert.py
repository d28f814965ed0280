"""Convert requests to the engine's terms: prompts as token ids, `SamplingParams`, jobs."""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from quickbeam.errors import InvalidInput, did_you_mean, first_line
from quickbeam.grammar.spec import Grammar
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import TENANT, Ticket
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import (
    Conversation,
    Message,
    TokenizeChat,
    TokenizeText,
    Tool,
    ToolMessage,
    text_of,
)
from quickbeam.serve.runner import Job, Json, Runner, Streams
from quickbeam.serve.schemas import BaseRequest, Speculation
from quickbeam.serve.tools import ToolUse

OTHER = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "grammar", "coupling"}
# fields that mean the same in SamplingParams
SAME = [field.name for field in fields(SamplingParams) if field.name not in OTHER]
LONG = 32  # a prompt of so many times the context, as estimated, can't fit
SEED_BITS = 53  # every JSON reader keeps integers of this size exactly


async def begin(
    runner: Runner,
    request: BaseRequest,
    encode: Callable[[], Iterable[list[int]]],
    tokens: int,
    tools: ToolUse | None = None,
) -> Streams:
    """Have the engine begin with a request, and return its answers.

    The request takes a place in the queue, for prompts of about `tokens` tokens; then `encode`
    returns their ids, in a thread. Raises `InvalidInput`, `Busy` and `Unavailable`.
    """
    with named(request):
        check_model(runner, request.model)
        speculation = request.speculation or Speculation()
        asked = speculation.method
        if asked is not None and asked not in (methods := runner.llm.methods):
            raise Refused(
                f"no method {asked!r} here; this server runs {', '.join(methods)}"
                f"{did_you_mean(asked, methods)}",
                "speculation.method",
            )
        if tokens > LONG * request.count * (room := runner.llm.room(0)):  # not worth tokenising
            raise too_long(room, f"and about {tokens} can't fit: shorten it", request.prompt_field)
        params = sampling(request, tools or ToolUse(), runner.defaults)
        with runner.gate.enter(tokens, request.count * params.n, TENANT.get()) as ticket:
            work = partial(_encode_prompts, runner.llm, request, encode)
            with runner.in_time(ticket):
                prompts, lengths = await runner.tokenise(work, tokens, ticket.tenant)
            if params.grammar is not None:
                await _compile(runner, params.grammar, tools or ToolUse(), ticket)
            # Each prompt gets a seed of its own. With a shared seed, the same prompt given twice
            # would see the same noise and get the same answer.
            given = getattr(request, "seeds", None)
            seeds: list[int | None] = given or [params.seed] * len(prompts)
            if not params.greedy:
                seeds = [secrets.randbits(SEED_BITS) if one is None else one for one in seeds]
            options: Json = {"method": speculation.method, "budget": speculation.budget}
            options["trace"] = bool(getattr(request, "trace", False))
            jobs = list[Job]()
            for ids, most, seed in zip(prompts, lengths, seeds, strict=True):
                own = replace(params, max_tokens=most, seed=seed)
                # the first answer scores the prompt for all, where they have any text
                others = replace(own, prompt_logprobs=None) if most else own
                for i in range(params.n):
                    jobs.append(Job(ids, others if i else own, {**options, "choice": i}))
            return Streams(await runner.begin(jobs, ticket), prompts, seeds)


async def _compile(runner: Runner, grammar: Grammar, tools: ToolUse, ticket: Ticket) -> None:
    """Compile a request's grammar. Raises `Refused` by a schema in it that can't be used."""
    try:
        await runner.compile_grammar(grammar, ticket)
    except InvalidInput as failed:
        if not tools.schemas:
            raise
        for field, schema in tools.schemas.items():
            try:
                await runner.compile_grammar(schema, ticket)
            except InvalidInput as error:
                raise Refused(f"{field}: {error}", field.partition(" ")[0]) from error
        # only together: what llguidance says further quotes a grammar that no client has written
        why = first_line(failed).removeprefix("lark: ")
        raise Refused(f"tools: no grammar of calls of all of them: {why}", "tools") from failed


@contextmanager
def named(request: BaseRequest | TokenizeText | TokenizeChat) -> Iterator[None]:
    """Raise `InvalidInput` as `Refused`, by the field that its message begins with."""
    try:
        yield
    except Refused:
        raise
    except InvalidInput as error:
        message, param = str(error), request.prompt_field
        if isinstance(request, BaseRequest):
            message = message.replace("max_tokens", request.length_limit[0])
        word = re.match("[a-zA-Z_]*", message)[0]  # type: ignore[index]
        if word in type(request).model_fields:
            param = word
        elif word == "budget":
            param = "speculation.budget"
        if isinstance(request, BaseRequest) and word in ("json_schema", "regex", "lark", "grammar"):
            param = request.grammars[0].param if request.grammars else "tools"
        raise Refused(message, param) from error


def check_model(runner: Runner, model: str | None) -> None:
    """Raise `Refused` (404) unless `model` is a name of the served model, or None."""
    if model not in (None, *runner.names):
        raise Refused(
            f"the model {model!r} does not exist: this server has {', '.join(runner.names)}",
            "model",
            "model_not_found",
        )


def sampling(request: BaseRequest, tools: ToolUse, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the request's sampling parameters; its length is not final where no limit is given."""
    given = {name: value for name in SAME if (value := getattr(request, name, None)) is not None}
    given = {**defaults, **given}
    if given.get("top_k") == -1:  # vLLM's value for off
        given["top_k"] = 0
    if request.logit_bias:
        given["logit_bias"] = {int(name): bias for name, bias in request.logit_bias.items()}
    if tools.keeps_special:
        given["skip_special_tokens"] = False
    grammar = tools.grammar
    for param, make, value in () if grammar else request.grammars:
        grammar = make(value)
        for note in grammar.left_out:
            request.ignore(f"{param} ({note})")
    # SamplingParams checks min_tokens against max_tokens. Where no limit is given, the real one is
    # set later, from the room in the context.
    length = request.length_limit[1]
    return SamplingParams(
        max_tokens=2**31 if length is None else length,
        logprobs=request.scores,
        prompt_logprobs=request.prompt_scores,
        grammar=grammar,
        **given,
    )


def _encode_prompts(
    llm: LLM, request: BaseRequest, encode: Callable[[], Iterable[list[int]]]
) -> tuple[list[list[int]], list[int]]:
    """Return each prompt's token ids, and the number of tokens that its answer may have."""
    (name, limit), param = request.length_limit, request.prompt_field
    method = request.speculation.method if request.speculation else None
    prompts, lengths = list[list[int]](), list[int]()
    for ids in encode():  # those behind one that is refused are not encoded
        prompts.append(ids)
        if not ids:
            raise Refused("an empty prompt: give at least one token", param)
        room = llm.room(len(ids), method)
        if (1 if limit is None else limit) > room:
            raise too_long(
                room + len(ids),
                f"of which the prompt has {len(ids)} and {name} asks for "
                f"{'at least 1' if limit is None else limit}: shorten the prompt"
                f"{' or ask for less' if limit else ''}",
                name if limit and room > 0 else param,
            )
        lengths.append(room if limit is None else limit)
    return prompts, lengths


def too_long(most: int, why: str, param: str) -> Refused:
    message = f"This model's maximum context length is {most} tokens, {why}"
    return Refused(message, param, "context_length_exceeded")


def encode_conversation(
    llm: LLM, conversation: Conversation, tools: Sequence[Tool] | None = None
) -> list[int]:
    """Return the token ids of a conversation's prompt."""
    arguments = conversation.chat_template_kwargs or {}
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
    left = {"function": {"strict", "allowed_callers", "defer_loading", "output_schema"}}
    return llm.encode_chat(
        template_messages(conversation.messages),
        tools=[tool.model_dump(exclude_none=True, exclude=left) for tool in tools or []] or None,
        continue_final_message=bool(conversation.continue_final_message),
        **_effort(str(llm.tokenizer.chat_template), conversation.reasoning_effort) | arguments,
    )


def knows_effort(template: str, effort: str | None) -> bool:
    """Return whether a chat template can do what an effort to reason asks for."""
    return effort in (None, "none") or "reasoning_effort" in template


def _effort(template: str, effort: str | None) -> dict[str, Any]:
    """Return the variables by which a chat template is told how much to reason."""
    if effort is not None and "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False}
    return {}


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object, which chat templates need.

    Models make mistakes, and a history is what it is: what is no object becomes the only member
    of one, `arguments`. Nothing, and null, are an object without members.
    """
    try:
        value = json.loads(arguments.strip() or "null")
    except (ValueError, RecursionError):
        value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: contents as text, arguments as objects.

    `developer` becomes `system`, and a tool's answer gets the tool's name.
    """
    shown, names = list[dict[str, Any]](), dict[str, str]()
    for message in messages:
        one = {**message.model_dump(exclude_none=True), "content": text_of(message.content)}
        if message.role == "developer":
            one["role"] = "system"
        for call in one.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            call["function"]["arguments"] = arguments_object(call["function"]["arguments"])
        if not one.get("tool_calls"):  # some templates take the field for a call
            one.pop("tool_calls", None)
        if isinstance(message, ToolMessage) and message.tool_call_id in names:
            one.setdefault("name", names[message.tool_call_id])
        shown.append(one)
    return shown
