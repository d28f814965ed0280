"""The server's application: its paths, and the way from a request to its response."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, TypeVar

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
from quickbeam.config import ServerOptions
from quickbeam.errors import QuickbeamError, did_you_mean
from quickbeam.serve import anthropic, errors
from quickbeam.serve.admission import BYTES_A_TOKEN, TENANT, RetryableError
from quickbeam.serve.answers import Json
from quickbeam.serve.anthropic_request import CountRequest
from quickbeam.serve.convert import check_model, named
from quickbeam.serve.endpoints import (
    ENDPOINTS,
    IGNORED,
    Endpoint,
    begin,
    check,
    complete,
    ignored_header,
)
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import Detokenize, Tokenize, TokenizeChat, TokenizeText
from quickbeam.serve.metrics import expose
from quickbeam.serve.prompts import encode_conversation, estimate_conversation
from quickbeam.serve.runner import Runner
from quickbeam.serve.security import Guard
from quickbeam.serve.tool_fields import offered_tools
from quickbeam.serve.tools import tool_format

T = TypeVar("T")
Handler = Callable[[Runner, Request], Awaitable[Response | Json]]
LARGE_BODY = 16_384  # bytes; a body of more is parsed and checked in a thread
PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def create_app(runner: Runner, checked: bool = True) -> Starlette:
    """Return the HTTP application for a runner, which it closes when it ends.

    `checked`: whether it checks access itself (`checks`). Else who calls it has done so.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await runner.close()

    routes = [Route(path, guarded(runner, handler)) for path, handler in GET.items()]
    for path, handler in POST.items():
        routes.append(Route(path, guarded(runner, handler), methods=["POST"]))
    handlers: Any = {HTTPException: failed}
    return Starlette(
        routes=routes,
        middleware=checks(runner.options) if checked else None,
        exception_handlers=handlers,
        lifespan=lifespan,
    )


def checks(options: ServerOptions) -> list[Middleware]:
    """Return the middleware that checks access: origins, then the rest (`Guard`)."""
    middleware = [Middleware(Guard, options=options)]
    if options.cors_origins:  # before the keys, as a browser asks first without one
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED],
        )
        middleware.insert(0, cors)
    return middleware


def failed(request: Request, error: HTTPException) -> Response:
    """Report an unknown path, or a wrong method, in the form of the other errors."""
    if error.status_code == 404:
        paths = [path for path in (*POST, *GET) if "{" not in path]  # without patterns of routes
        hint = did_you_mean(request.url.path, paths)
        error = HTTPException(
            404, f"there is no such path: this server has {', '.join(paths)}{hint}"
        )
    return errors.response(error, request.scope)


def responder(endpoint: Endpoint) -> Handler:
    """Return the handler of an endpoint, which responds with one object or a stream of events."""

    async def respond(runner: Runner, http: Request) -> Response:
        request = await read(http, endpoint.kind)
        if not request.stream:
            response = await unless_disconnected(http, complete(runner, endpoint, request))
            headers = ignored_header(request)
            return await asyncio.to_thread(JSONResponse, response, headers=headers)
        # The engine has begun before the response does, so that a refusal has its own status.
        reply = await unless_disconnected(http, begin(runner, endpoint, request))
        return EventSourceResponse(
            reply.events(),
            headers=ignored_header(request),
            sep="\n",
            ping=runner.options.keep_alive,
            ping_message_factory=lambda: ServerSentEvent(**reply.keep_alive, sep="\n"),
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
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(parse, body, kind)
    return parse(body, kind)


def parse(body: bytes, kind: Any) -> Any:
    """Return the request that the bytes of a body hold. Raises as `read` does."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    return check(value, kind)


def guarded(runner: Runner, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a route, which answers errors, too.

    The logs of the libraries would quote an error, and a prompt with it.
    """

    async def handle(http: Request) -> Response:
        try:
            answer = await handler(runner, http)
            return answer if isinstance(answer, Response) else JSONResponse(answer)
        except (ClientDisconnected, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            if isinstance(error, RetryableError) and http.method == "POST":
                runner.metrics.refused(error)
            return errors.response(error, http.scope)

    return handle


class ClientDisconnected(QuickbeamError):
    """The client has left."""


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client leaves first, it is cancelled, and
    `ClientDisconnected` raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected("the client has left")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(http: Request) -> None:
    """Wait until the client leaves."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


@cache
def page() -> tuple[bytes, str]:
    """Return the HTML of the page at `/`, and the value of its Content-Security-Policy header.

    The policy admits scripts and styles by their hashes, so they run only as they are in the file.
    The page may connect to this server only, and no site may frame it.
    """
    html = files("quickbeam.serve").joinpath("page/index.html").read_text(encoding="utf-8")
    rules = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; "
        f"style-src {_hashes(html, 'style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), rules


def _hashes(html: str, element: str) -> str:
    """Return the hashes of the texts of a page's elements, as the policy names them."""
    sources = list[str]()
    for text in re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL):  # no attributes
        digest = sha256(text.encode()).digest()
        sources.append(f"'sha256-{b64encode(digest).decode()}'")
    return " ".join(sources)


async def index(runner: Runner, http: Request) -> Response:
    html, policy = page()
    headers = {**PAGE_HEADERS, "Content-Security-Policy": policy}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


async def health(runner: Runner, http: Request) -> Response:
    """200 if requests are answered, else 503 with the reason."""
    unhealthy_reason = runner.unhealthy_reason
    if unhealthy_reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": unhealthy_reason}, 503, {"Retry-After": "5"})


async def metrics(runner: Runner, http: Request) -> Response:
    accept = http.headers.get("accept", "")
    content, kind = await asyncio.to_thread(expose, runner.metrics.registry, accept)
    return Response(content, media_type=kind)


async def version(runner: Runner, http: Request) -> Json:
    return {"version": __version__}


async def models(runner: Runner, http: Request) -> Json:
    if errors.asks_anthropic(http.scope):
        return anthropic.models(runner)
    return {"object": "list", "data": [_model(runner, name) for name in runner.names]}


async def model(runner: Runner, http: Request) -> Json:
    name = http.path_params["name"]
    check_model(runner, name)
    if errors.asks_anthropic(http.scope):
        return anthropic.model(runner, name)
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
    request: TokenizeText | TokenizeChat = await read(http, Tokenize)
    llm = runner.llm
    tools = [tool.shown for tool in offered_tools(getattr(request, "tools", None))]

    def encode() -> Response:
        if isinstance(request, TokenizeText):
            special = request.add_special_tokens is not False
            ids = list(llm.tokenizer(request.prompt, add_special_tokens=special)["input_ids"])
        else:
            ids = encode_conversation(llm, request, tools)
        texts = llm.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": llm.room(0),
                "tokens": ids,
                "token_strs": texts,
            }
        )

    with named(request):
        check_model(runner, request.model)
        images = False
        if isinstance(request, TokenizeText):
            tokens = len(request.prompt) // BYTES_A_TOKEN
        else:
            if tools:
                tool_format(llm.tokenizer)  # raises if the chat template doesn't take tools
            tokens = estimate_conversation(request, tools)
            images = bool(request.images)
        return await runner.tokenise(encode, tokens, TENANT.get(), images)


async def count_tokens(runner: Runner, http: Request) -> Json:
    return await anthropic.count_tokens(runner, await read(http, CountRequest))


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
POST: dict[str, Handler] = {path: responder(endpoint) for path, endpoint in ENDPOINTS.items()}
POST[f"{errors.MESSAGES}/count_tokens"] = count_tokens
POST["/tokenize"] = tokenize
POST["/detokenize"] = detokenize
