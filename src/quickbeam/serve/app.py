"""The server's application: its paths, and the way from a request to its response."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quickbeam import __version__
from quickbeam.batch.run import Answer, Reply
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve import completions, errors, responses
from quickbeam.serve.admission import BYTES_A_TOKEN, TENANT, RetryableError
from quickbeam.serve.convert import check_model, encode_conversation, named
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import (
    ChatRequest,
    CompletionRequest,
    Detokenize,
    Tokenize,
    TokenizeText,
    offered_tools,
)
from quickbeam.serve.responses import ResponsesRequest
from quickbeam.serve.runner import AnsweredRequest, Json, Runner
from quickbeam.serve.schemas import BaseRequest
from quickbeam.serve.security import Guard
from quickbeam.serve.settings import ServeSettings
from quickbeam.serve.tools import tool_format

T = TypeVar("T")
adapter = cache(TypeAdapter)
Handler = Callable[[Runner, Request], Awaitable[Response | Json]]
NEVER = 10**9  # seconds
IGNORED = "X-Quickbeam-Ignored"  # a header of responses
MOST_IGNORED = 1000  # characters of that header's value
LARGE = 16_384  # bytes; a body of more is parsed and checked in a thread
PAGE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class Endpoint(NamedTuple):
    """What an API's requests hold, and what has the engine begin with one.

    `begin` raises `InvalidInput` for a request that can't be answered, `Busy` and `Unavailable`.
    """

    kind: Any
    begin: Callable[[Runner, Any], Awaitable[AnsweredRequest]]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, completions.begin_chat),
    "/v1/completions": Endpoint(CompletionRequest, completions.begin_text),
    "/v1/responses": Endpoint(ResponsesRequest, responses.begin),
}


def create_app(runner: Runner) -> Starlette:
    """Return the HTTP application for a runner, which it closes when it ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await runner.close()

    settings, every = runner.settings, ["*"]
    posts: dict[str, Handler] = {
        path: partial(respond, endpoint) for path, endpoint in ENDPOINTS.items()
    }
    posts |= {"/tokenize": tokenize, "/detokenize": detokenize}
    routes = [Route(path, guarded(runner, handler)) for path, handler in GET.items()]
    routes += [Route(path, guarded(runner, one), methods=["POST"]) for path, one in posts.items()]
    middleware = [Middleware(Guard, settings=settings)]
    if settings.cors_origins:  # before the keys, as a browser asks first without one
        allowed: Json = {"allow_origins": settings.cors_origins, "allow_methods": every}
        allowed |= {"allow_headers": every, "expose_headers": [IGNORED]}
        middleware.insert(0, Middleware(CORSMiddleware, **allowed))
    known = ", ".join([*posts, *GET])

    def failed(_: Request, error: HTTPException) -> Response:
        """Report an unknown path in the form of the other errors, too."""
        if error.status_code == 404:
            error = HTTPException(404, f"there is no such path: this server has {known}")
        return errors.response(error)

    handlers: Any = {HTTPException: failed}
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan
    )


class InProcessServer:
    """Answers requests without HTTP, and without limits on how many wait.

    An instance belongs to one event loop. As a context manager it gives `answer`, and ends the
    answers under way. `name` is what responses call the model.
    """

    def __init__(self, llm: LLM, name: str | None = None) -> None:
        unbounded = ServeSettings(
            served_name=name, max_waiting=2**40, max_waiting_tokens=2**40, queue_timeout=NEVER
        )
        self._runner = Runner(unbounded, llm)

    async def answer(self, path: str, body: Json) -> Reply:
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


async def _whole(runner: Runner, endpoint: Endpoint, request: Any) -> Json:
    reply = await _begin(runner, endpoint, request)
    with reply.answers:
        return await reply.whole()


async def _begin(runner: Runner, endpoint: Endpoint, request: BaseRequest) -> AnsweredRequest:
    """Have the engine begin with a request, and log what its answer goes without."""
    reply = await endpoint.begin(runner, request)
    for value in ignored_header(request).values():
        runner.log_ignored(value)
    return reply


async def respond(endpoint: Endpoint, runner: Runner, http: Request) -> Response:
    """Respond to a request of an endpoint, with one object or a stream of events."""
    request = await read(http, endpoint.kind)
    if not request.stream:
        whole = await unless_disconnected(http, _whole(runner, endpoint, request))
        return await asyncio.to_thread(JSONResponse, whole, headers=ignored_header(request))
    # The engine has begun before the response does, so that a refusal has its own status.
    reply = await unless_disconnected(http, _begin(runner, endpoint, request))
    return EventSourceResponse(
        reply.events(),
        headers=ignored_header(request),
        sep="\n",
        ping=runner.settings.keep_alive,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
    )


def ignored_header(request: BaseRequest) -> dict[str, str]:
    """Return the header that names what the answer goes without; none if there is nothing.

    Its value is the request's notes, separated by commas. It is printable ASCII and has at most
    `MOST_IGNORED` characters: what can't be in a header or would look like a further note is
    replaced by `?`, and a value that is too long ends in `...`.
    """
    if not request.ignored:
        return {}
    value = ", ".join(re.sub(r"[^ -+\--~]", "?", note) for note in request.ignored)
    if len(value) > MOST_IGNORED:
        value = f"{value[: MOST_IGNORED - 3]}..."
    return {IGNORED: value}


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


def guarded(runner: Runner, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Answer all errors: the logs of the libraries would quote them, and with them a prompt."""

    async def handle(http: Request) -> Response:
        try:
            answer = await handler(runner, http)
            return answer if isinstance(answer, Response) else JSONResponse(answer)
        except (ClientDisconnected, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            if isinstance(error, RetryableError) and http.method == "POST":
                runner.metrics.refused(error)
            return errors.response(error)

    return handle


class ClientDisconnected(QuickbeamError):
    """The client has left."""


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client leaves first, it is cancelled, and
    `ClientDisconnected` raised."""
    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected("the client has left")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


@cache
def page() -> tuple[bytes, str]:
    """Return the HTML of the page at `/`, and the value of its Content-Security-Policy header.

    The policy admits scripts and styles by their hashes, so they run only as they are in the file.
    The page may connect to this server only, and no site may frame it.
    """
    html = files("quickbeam.serve").joinpath("page/index.html").read_text(encoding="utf-8")
    sources = {}
    for kind in ("script", "style"):  # elements of the file have no attributes
        texts = re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        hashes = (b64encode(sha256(text.encode()).digest()).decode() for text in texts)
        sources[kind] = " ".join(f"'sha256-{one}'" for one in hashes)
    rules = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html.encode(), rules


async def index(runner: Runner, http: Request) -> Response:
    html, policy = page()
    headers = {**PAGE, "Content-Security-Policy": policy}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


async def health(runner: Runner, http: Request) -> Response:
    """200 if requests are answered, else 503 with the reason."""
    unhealthy_reason = runner.unhealthy_reason
    if unhealthy_reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": unhealthy_reason}, 503, {"Retry-After": "5"})


async def metrics(runner: Runner, http: Request) -> Response:
    content, kind = await asyncio.to_thread(runner.metrics.expose, http.headers.get("accept", ""))
    return Response(content, media_type=kind)


async def version(runner: Runner, http: Request) -> Json:
    return {"version": __version__}


async def models(runner: Runner, http: Request) -> Json:
    return {"object": "list", "data": [_model(runner, name) for name in runner.names]}


async def model(runner: Runner, http: Request) -> Json:
    name = http.path_params["name"]
    check_model(runner, name)
    return _model(runner, name)


def _model(runner: Runner, name: str) -> Json:
    """Return OpenAI's model object, with vLLM's fields and the methods of `speculation`."""
    llm = runner.llm
    return {
        "id": name,
        "object": "model",
        "created": runner.started,
        "owned_by": "quickbeam",
        "root": runner.name,
        "max_model_len": llm.room(0),
        "quickbeam": {"methods": llm.methods, "default_method": llm.method},
    }


async def tokenize(runner: Runner, http: Request) -> Response:
    """Return the tokens of a text, or of the prompt of a conversation (by the chat template)."""
    request = await read(http, Tokenize)
    tokenizer = runner.llm.tokenizer
    tools = [one.shown for one in offered_tools(getattr(request, "tools", None))]

    def work() -> Response:
        if isinstance(request, TokenizeText):
            special = request.add_special_tokens is not False
            ids = list(tokenizer(request.prompt, add_special_tokens=special)["input_ids"])
        else:
            ids = encode_conversation(runner.llm, request, tools)
        texts = tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        about = {"count": len(ids), "max_model_len": runner.llm.room(0)}
        return JSONResponse({**about, "tokens": ids, "token_strs": texts})

    with named(request):
        check_model(runner, request.model)
        if isinstance(request, TokenizeText):
            tokens = len(request.prompt) // BYTES_A_TOKEN
        else:
            if tools:
                tool_format(tokenizer)  # raises if the chat template doesn't take tools
            tokens = completions.estimate(request, tools)
        return await runner.tokenise(work, tokens, TENANT.get())


async def detokenize(runner: Runner, http: Request) -> Json:
    """Return the text of tokens, special ones included."""
    request = await read(http, Detokenize)
    check_model(runner, request.model)
    size = runner.llm.model.vocab_size
    if outside := [token for token in request.tokens if not 0 <= token < size]:
        raise Refused(
            f"tokens: {outside[0]} is not an id of this model: they go from 0 to {size - 1}",
            "tokens",
        )
    return {"prompt": await asyncio.to_thread(runner.llm.tokenizer.decode, request.tokens)}


GET: dict[str, Handler] = {
    "/": index,
    "/health": health,
    "/metrics": metrics,
    "/version": version,
    "/v1/models": models,
    "/v1/models/{name:path}": model,
}
