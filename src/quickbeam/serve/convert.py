"""Convert requests to the engine's terms: `SamplingParams` and jobs, with which it begins."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from quickbeam.errors import InvalidInput, did_you_mean, first_line
from quickbeam.grammar.spec import Grammar
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import TENANT, Ticket
from quickbeam.serve.answers import Streams
from quickbeam.serve.errors import TOO_LONG, Refused
from quickbeam.serve.messages import Conversation, TokenizeChat, TokenizeText, text_of
from quickbeam.serve.prompts import encode_conversation, estimate_conversation, knows_effort
from quickbeam.serve.runner import Job, Runner
from quickbeam.serve.schemas import BaseRequest, Speculation
from quickbeam.serve.skeletons import call_skeletons
from quickbeam.serve.tool_fields import ToolRequest
from quickbeam.serve.tools import NO_TOOLS, ToolUse, tool_use

OTHER_FIELDS = {
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "grammar",
    "coupling",
    "prediction",
}
# fields that mean the same in SamplingParams
SAME_FIELDS = [field.name for field in fields(SamplingParams) if field.name not in OTHER_FIELDS]
NO_LIMIT = 2**31  # tokens, until the prompt's length tells how many there may be
MAX_CONTEXTS = 32  # a prompt of so many times the context, as estimated, can't fit
SEED_BITS = 53  # every JSON reader keeps integers of this size exactly


async def begin_conversation(
    runner: Runner, request: ToolRequest, conversation: Conversation
) -> tuple[Streams, ToolUse]:
    """Have the engine begin to answer a conversation. Return its answers and their use of tools."""
    llm = runner.llm
    with named(request):
        tools = await asyncio.to_thread(tool_use, request, llm.tokenizer)
    for note in tools.ignored:
        request.ignore(note)
    if not knows_effort(str(llm.tokenizer.chat_template), conversation.reasoning_effort):
        request.ignore(request.effort_field)
    answers = await begin(
        runner,
        request,
        lambda: [encode_conversation(llm, conversation, tools.tools)],
        estimate_conversation(conversation, tools.tools),
        tools,
        images=bool(conversation.images),
    )
    return answers, tools


async def begin(
    runner: Runner,
    request: BaseRequest,
    encode: Callable[[], Iterable[list[int]]],
    tokens: int,
    tools: ToolUse = NO_TOOLS,
    images: bool = False,
) -> Streams:
    """Have the engine begin with a request, and return its answers.

    The request waits in the queue, for prompts of about `tokens` tokens; then `encode` returns
    their ids, in a thread. `images`: whether there are any in the prompts. Raises `InvalidInput`,
    `Busy` and `Unavailable`.
    """
    with named(request):
        check_model(runner, request.model)
        llm = runner.llm
        check_method(llm, request.speculation)
        context = llm.room(0)
        if tokens > MAX_CONTEXTS * request.prompt_count * context:  # not worth tokenising
            why = f"and about {tokens} can't fit: shorten it"
            raise too_long(context, why, request.prompt_field)
        # in a thread: a schema may be large
        params = await asyncio.to_thread(sampling, request, tools, runner.defaults)
        with runner.gate.enter(tokens, request.prompt_count * params.n, TENANT.get()) as ticket:
            with runner.in_time(ticket):
                prompts, lengths = await runner.tokenise(
                    lambda: _encode_prompts(llm, request, encode), tokens, ticket.tenant, images
                )
            if params.grammar is not None:
                await _compile(runner, params.grammar, tools, ticket)
            seeds = _seeds(request, params, len(prompts))
            skeletons: Sequence[str] = ()
            if tools.form is not None:
                skeletons = await asyncio.to_thread(call_skeletons, tools.form, tools.tools)
            jobs = _jobs(request, params, prompts, lengths, seeds, skeletons)
            return Streams(await runner.begin(jobs, ticket), prompts, seeds)


def _seeds(request: BaseRequest, params: SamplingParams, count: int) -> list[int | None]:
    """Return a seed for each of `count` prompts; None where nothing is drawn.

    With a shared seed, the same prompt given twice would see the same noise and get the same
    answer.
    """
    seeds: list[int | None] = getattr(request, "seeds", None) or [params.seed] * count
    if params.greedy:
        return seeds
    return [secrets.randbits(SEED_BITS) if seed is None else seed for seed in seeds]


def _jobs(
    request: BaseRequest,
    params: SamplingParams,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    seeds: Sequence[int | None],
    skeletons: Sequence[str],
) -> list[Job]:
    """Return the answers to compute, those to the first prompt first.

    `lengths`: the number of tokens that an answer to each prompt may have. `skeletons`: see
    `LLM.stream`.
    """
    speculation = request.speculation or Speculation()
    trace = bool(getattr(request, "trace", False))
    jobs = list[Job]()
    for ids, length, seed in zip(prompts, lengths, seeds, strict=True):
        first = replace(params, max_tokens=length, seed=seed)
        # the first answer scores the prompt for all, where they have any text
        later = replace(first, prompt_logprobs=None) if length else first
        for choice in range(params.n):
            job = Job(
                ids,
                later if choice else first,
                choice,
                method=speculation.method,
                budget=speculation.budget,
                trace=trace,
                skeletons=skeletons,
            )
            jobs.append(job)
    return jobs


async def _compile(runner: Runner, grammar: Grammar, tools: ToolUse, ticket: Ticket) -> None:
    """Compile a request's grammar. Raises `Refused`, which names a schema that can't be used."""
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
        message = str(error)
        if isinstance(request, BaseRequest):
            message = message.replace("max_tokens", request.length_limit[0])
        raise Refused(message, _field_of(message, request)) from error


def _field_of(message: str, request: BaseRequest | TokenizeText | TokenizeChat) -> str:
    """Return the field that a message begins with, or that of the prompt."""
    word = re.split("[^a-zA-Z_]", message, maxsplit=1)[0]
    if isinstance(request, BaseRequest) and word in ("json_schema", "regex", "lark", "grammar"):
        return request.grammars[0].param if request.grammars else "tools"
    if word in type(request).model_fields:
        return word
    return "speculation.budget" if word == "budget" else request.prompt_field


def check_model(runner: Runner, model: str | None) -> None:
    """Raise `Refused` (404) unless `model` is a name of the served model, or None."""
    if model not in (None, *runner.names):
        raise Refused(
            f"the model {model!r} does not exist: this server has {', '.join(runner.names)}",
            "model",
            "model_not_found",
        )


def check_method(llm: LLM, speculation: Speculation | None) -> None:
    """Raise `Refused` unless the method that a request names, if any, is one of the model's."""
    method = speculation.method if speculation else None
    if method is None:
        return
    methods = llm.methods
    if method not in methods:
        raise Refused(
            f"no method {method!r} here; this server runs {', '.join(methods)}"
            f"{did_you_mean(method, methods)}",
            "speculation.method",
        )


def sampling(request: BaseRequest, tools: ToolUse, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the request's sampling parameters; its length is not final where no limit is given."""
    values = dict(defaults)
    for name in SAME_FIELDS:
        value = getattr(request, name, None)
        if value is not None:
            values[name] = value
    if values.get("top_k") == -1:  # vLLM's value for off
        values["top_k"] = 0
    if request.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    prediction = getattr(request, "prediction", None)
    if prediction is not None:
        values["prediction"] = text_of(prediction.content)
    if tools.keeps_special:
        values["skip_special_tokens"] = False
    _, limit = request.length_limit
    return SamplingParams(
        max_tokens=NO_LIMIT if limit is None else limit,  # min_tokens is checked against it
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        grammar=tools.grammar or _grammar(request),
        **values,
    )


def _grammar(request: BaseRequest) -> Grammar | None:
    """Return the grammar that a request gives, and note what of it answers are not held to."""
    for field in request.grammars:  # at most one
        grammar = field.make(field.value)
        for note in grammar.left_out:
            request.ignore(f"{field.param} ({note})")
        return replace(grammar, left_out=())  # or the engine would log the notes, too
    return None


def _encode_prompts(
    llm: LLM, request: BaseRequest, encode: Callable[[], Iterable[list[int]]]
) -> tuple[list[list[int]], list[int]]:
    """Return each prompt's token ids, and the number of tokens that its answer may have."""
    name, limit = request.length_limit
    least = 1 if limit is None or request.cuts_length else limit
    asked = f"{least}" if least == limit else f"at least {least}"
    method = request.speculation.method if request.speculation else None
    prompts = list[list[int]]()
    lengths = list[int]()
    for ids in encode():  # those behind one that is refused are not encoded
        prompts.append(ids)
        if not ids:
            raise Refused("an empty prompt: give at least one token", request.prompt_field)
        available = llm.room(len(ids), method)
        if least > available:
            raise too_long(
                available + len(ids),
                f"of which the prompt has {len(ids)} and {name} asks for {asked}: shorten the "
                f"prompt{' or ask for less' if least > 1 else ''}",
                name if least > 1 and available > 0 else request.prompt_field,
            )
        lengths.append(available if limit is None else min(limit, available))
    return prompts, lengths


def too_long(context: int, why: str, param: str) -> Refused:
    """Return the error for a prompt that is too long for the context."""
    message = f"This model's maximum context length is {context} tokens, {why}"
    return Refused(message, param, TOO_LONG)
