"""The endpoints that answer with text: from a request to its response, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from quickbeam.errors import QuickbeamError
from quickbeam.serve import bodies, chat, completions, errors, responses, tokens
from quickbeam.serve.answers import Answers, done_events
from quickbeam.serve.items import ResponsesRequest
from quickbeam.serve.messages import ChatRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import CompletionRequest

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Chunks = AsyncIterator[dict[str, Any]]


class Reply(Protocol):
    """A request while it is answered."""

    answers: Answers

    async def whole(self) -> dict[str, Any]:
        """Wait until all answers are complete, and return the response object."""

    def chunks(self) -> Chunks:
        """Yield the parts of a stream as the answers arrive. Leaving it ends the answers."""


class Endpoint(NamedTuple):
    """How one API is served.

    - `kind`: what requests hold.
    - `begin`: has the engine begin with a request. Raises `InvalidInput` for one that can't be
      answered, `Busy` and `Unavailable`.
    - `events`: writes the parts of a stream as server-sent events.
    """

    kind: Any
    begin: Callable[[Runner, Any], Awaitable[Reply]]
    events: Callable[[Chunks], AsyncIterator[dict[str, str]]]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, chat.begin, done_events),
    "/v1/completions": Endpoint(CompletionRequest, completions.begin, done_events),
    "/v1/responses": Endpoint(ResponsesRequest, responses.begin, responses.named_events),
}


async def answer(runner: Runner, path: str, body: Any) -> dict[str, Any]:
    """Return the response object to a request, without HTTP.

    Raises what `Endpoint.begin` does, and the error that ended an answer.
    """
    endpoint = ENDPOINTS[path]
    return await _whole(runner, endpoint, bodies.check(body, endpoint.kind))


async def _whole(runner: Runner, endpoint: Endpoint, request: Any) -> dict[str, Any]:
    reply = await endpoint.begin(runner, request)
    with reply.answers:
        return await reply.whole()


def install(app: FastAPI) -> None:
    """Add the endpoints to an application, which has a runner as `state.runner`."""
    handlers: dict[str, Handler] = {
        path: partial(respond, endpoint) for path, endpoint in ENDPOINTS.items()
    }
    handlers |= {"/tokenize": tokens.tokenize, "/detokenize": tokens.detokenize}
    for path, handler in handlers.items():
        app.add_api_route(path, guarded(handler), methods=["POST"], response_model=None)


async def respond(endpoint: Endpoint, http: Request) -> Response:
    """Return the response to a request, with one object or as a stream of events."""
    runner: Runner = http.app.state.runner
    request = await bodies.read(http, endpoint.kind)
    if not request.stream:
        whole = await unless_gone(http, _whole(runner, endpoint, request))
        return await asyncio.to_thread(JSONResponse, whole)
    # The engine has begun before the response does, so that a refusal has its own status.
    reply = await unless_gone(http, endpoint.begin(runner, request))
    return EventSourceResponse(
        endpoint.events(reply.chunks()),
        sep="\n",
        ping=runner.settings.keep_alive,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
    )


def guarded(handler: Handler) -> Handler:
    """Return a handler that answers the errors of another one.

    Nothing gets past it to the libraries, whose logs would quote the error and with it a prompt.
    """

    async def handle(http: Request) -> Response:
        try:
            return await handler(http)
        except Gone:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return errors.response(error)

    return handle


class Gone(QuickbeamError):
    """The client has left."""


async def unless_gone(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, unless the client leaves first.

    If the client leaves, `work` is cancelled and `Gone` is raised. The request's body must have
    been read before.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait(
            list[asyncio.Future[Any]]((working, leaving)), return_when=asyncio.FIRST_COMPLETED
        )
        if working.done():
            return working.result()
        raise Gone("the client has left")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
