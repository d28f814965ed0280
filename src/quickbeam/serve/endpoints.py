"""The endpoints that answer with text: from a request to its response, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from sse_starlette import EventSourceResponse, ServerSentEvent

from quickbeam.batch.run import Answer, Reply
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve import answers, completions, errors, responses
from quickbeam.serve.admission import TurnedAway
from quickbeam.serve.errors import Refused
from quickbeam.serve.items import ResponsesRequest
from quickbeam.serve.messages import ChatRequest, CompletionRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.settings import ServeSettings

T = TypeVar("T")
adapter = cache(TypeAdapter)
Handler = Callable[[Request], Awaitable[Response]]
NEVER = 10**9  # seconds
LARGE = 16_384  # bytes; a body of more is parsed and checked in a thread


class Endpoint(NamedTuple):
    """What an API's requests hold, and what has the engine begin with one.

    `begin` raises `InvalidInput` for a request that can't be answered, `Busy` and `Unavailable`.
    """

    kind: Any
    begin: Callable[[Runner, Any], Awaitable[answers.Reply]]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, completions.begin_chat),
    "/v1/completions": Endpoint(CompletionRequest, completions.begin_text),
    "/v1/responses": Endpoint(ResponsesRequest, responses.begin),
}


class Answering:
    """Answers requests without HTTP, and without limits on how many wait.

    An instance belongs to one event loop. As a context manager it gives `answer`, and ends the
    answers under way. `name` is what responses call the model.
    """

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        unbounded = ServeSettings(
            served_name=name, max_waiting=2**40, max_waiting_tokens=2**40, queue_timeout=NEVER
        )
        self._runner = Runner(unbounded, llm)

    async def answer(self, path: str, body: dict[str, Any]) -> Reply:
        """Return the endpoint's reply, which is an error for a request that can't be answered.

        Raises `QuickbeamError` if the engine can't answer any more.
        """
        try:
            request = check(body, ENDPOINTS[path].kind)
            return Reply(200, await _whole(self._runner, ENDPOINTS[path], request))
        except Exception as error:
            if (unhealthy_reason := self._runner.unhealthy_reason) is not None:
                raise QuickbeamError(f"no more answers: {unhealthy_reason}") from error
            about = errors.problem(error)
            return Reply(about.status, about.body)

    async def __aenter__(self) -> Answer:
        return self.answer

    async def __aexit__(self, *_: object) -> None:
        await self._runner.close()


async def _whole(runner: Runner, endpoint: Endpoint, request: Any) -> dict[str, Any]:
    reply = await endpoint.begin(runner, request)
    with reply.answers:
        return await reply.whole()


def responder(endpoint: Endpoint) -> Handler:
    """Return what responds to requests of an endpoint, with one object or a stream of events."""

    async def respond(http: Request) -> Response:
        runner: Runner = http.app.state.runner
        request = await read(http, endpoint.kind)
        if not request.stream:
            whole = await unless_gone(http, _whole(runner, endpoint, request))
            return await asyncio.to_thread(JSONResponse, whole)
        # The engine has begun before the response does, so that a refusal has its own status.
        reply = await unless_gone(http, endpoint.begin(runner, request))
        return EventSourceResponse(
            reply.events(),
            sep="\n",
            ping=runner.settings.keep_alive,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        )

    return respond


async def read(http: Request, kind: Any) -> Any:
    """Return the request that a body holds; `kind` is a model, or a union of models."""
    # A web page may send any other type to any address without asking the server first.
    media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise Refused(
            "the body must be a JSON object, sent with the header Content-Type: application/json",
            code="unsupported_media_type",
        )
    body = await http.body()
    return await asyncio.to_thread(parse, body, kind) if len(body) > LARGE else parse(body, kind)


def parse(body: bytes, kind: Any) -> Any:
    """Return the request that the bytes of a body hold. Raises as `read` does."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    return check(value, kind)


def check(value: Any, kind: Any) -> Any:
    """Return the request that a JSON value stands for. Raises `Refused` if it can't be served."""
    if not isinstance(value, dict):
        raise Refused("the body must be a JSON object")
    try:
        return adapter(kind).validate_python(value)
    except ValidationError as error:
        raise errors.invalid(error, value) from None


def guarded(handler: Handler) -> Handler:
    """Answer all errors: the logs of the libraries would quote them, and with them a prompt."""

    async def handle(http: Request) -> Response:
        try:
            return await handler(http)
        except Gone:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            if isinstance(error, TurnedAway):
                http.app.state.runner.metrics.refused(error)
            return errors.response(error)

    return handle


class Gone(QuickbeamError):
    """The client has left."""


async def unless_gone(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client leaves first, cancel it and raise `Gone`."""
    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Gone("the client has left")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
