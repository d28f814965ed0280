"""The endpoints that answer requests for text, with HTTP (`app.py`) or without."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from quickbeam.batch.run import CHAT, COMPLETIONS, RESPONSES, Answer, Reply
from quickbeam.config import ServerOptions
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve import anthropic, completions, errors, responses
from quickbeam.serve.answers import AnsweredRequest, Json
from quickbeam.serve.anthropic_request import MessagesRequest
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import ChatRequest, CompletionRequest
from quickbeam.serve.responses_request import ResponsesRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import BaseRequest

adapter = cache(TypeAdapter)
NEVER = 10**9  # seconds
IGNORED = "X-Quickbeam-Ignored"  # a header of responses
MAX_IGNORED = 1000  # characters of that header's value


class Endpoint(NamedTuple):
    """The class of an endpoint's requests, and the function that has the engine begin with one.

    `begin` raises `InvalidInput` for a request that can't be answered, `Busy` and `Unavailable`.
    """

    kind: Any
    begin: Callable[[Runner, Any], Awaitable[AnsweredRequest]]


ENDPOINTS = {
    CHAT: Endpoint(ChatRequest, completions.begin_chat),
    COMPLETIONS: Endpoint(CompletionRequest, completions.begin_text),
    RESPONSES: Endpoint(ResponsesRequest, responses.begin),
    errors.MESSAGES: Endpoint(MessagesRequest, anthropic.begin),
}


async def complete(runner: Runner, endpoint: Endpoint, request: BaseRequest) -> Json:
    """Return the response object to a request, once it is answered."""
    reply = await begin(runner, endpoint, request)
    with reply.answers:
        return await reply.complete()


async def begin(runner: Runner, endpoint: Endpoint, request: BaseRequest) -> AnsweredRequest:
    """Have the engine begin with a request, and log what its answer goes without."""
    reply = await endpoint.begin(runner, request)
    for value in ignored_header(request).values():
        runner.log_ignored(value)
    return reply


def ignored_header(request: BaseRequest) -> dict[str, str]:
    """Return the header that names what the answer goes without; none if there is nothing.

    Its value is the request's notes, separated by commas. It is printable ASCII and has at most
    `MAX_IGNORED` characters: what can't be in a header or would look like a further note is
    replaced by `?`, and a value that is too long ends in `...`.
    """
    if not request.ignored:
        return {}
    value = ", ".join(re.sub(r"[^ -+\--~]", "?", note) for note in request.ignored)
    if len(value) > MAX_IGNORED:
        value = f"{value[: MAX_IGNORED - 3]}..."
    return {IGNORED: value}


def check(value: Any, kind: Any) -> Any:
    """Return the request that a JSON value stands for. Raises `Refused` if it can't be served."""
    if not isinstance(value, dict):
        raise Refused("the body must be a JSON object")
    try:
        return adapter(kind).validate_python(value)
    except ValidationError as error:
        raise errors.invalid(error, value) from None


class InProcessServer:
    """Answers requests without HTTP, and without limits on how many wait.

    An instance belongs to one event loop. As a context manager it gives `answer`, and ends the
    answers under way. `name` is what responses call the model.
    """

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        unbounded = ServerOptions(
            served_names=() if name is None else (name,),
            max_waiting=2**40,
            max_waiting_tokens=2**40,
            queue_timeout=NEVER,
        )
        self._runner = Runner(unbounded, llm)

    async def answer(self, path: str, body: Json) -> Reply:
        """Return the endpoint's reply, which is an error for a request that can't be answered.

        Raises `QuickbeamError` if the engine can't answer any more.
        """
        endpoint = ENDPOINTS[path]
        try:
            request = check(body, endpoint.kind)
            return Reply(200, await complete(self._runner, endpoint, request))
        except Exception as error:
            unhealthy_reason = self._runner.unhealthy_reason
            if unhealthy_reason is not None:
                raise QuickbeamError(f"no more answers: {unhealthy_reason}") from error
            problem = errors.problem(error)
            return Reply(problem.status, problem.body)

    async def __aenter__(self) -> Answer:
        return self.answer

    async def __aexit__(self, *_: object) -> None:
        await self._runner.close()
