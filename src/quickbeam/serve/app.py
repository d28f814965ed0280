"""The server's application: its paths, and those that need no answer of the model."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware

from quickbeam import __version__
from quickbeam.serve import errors
from quickbeam.serve.convert import check_model, encode_conversation, named
from quickbeam.serve.endpoints import ENDPOINTS, guarded, read, responder
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import Detokenize, TokenizeChat, TokenizeText
from quickbeam.serve.runner import Runner
from quickbeam.serve.security import Guard
from quickbeam.serve.tools import tool_format

PAGE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def create_app(runner: Runner) -> FastAPI:
    """Return the HTTP application for a runner, which it closes when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await runner.close()

    # no documentation pages: they would load scripts from elsewhere
    app = FastAPI(
        title="quickbeam", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.runner, settings = runner, runner.settings
    errors.install(app)
    app.add_api_route("/", index, include_in_schema=False)
    for path, handler in GET.items():
        app.add_api_route(path, handler)
    texts = {path: responder(endpoint) for path, endpoint in ENDPOINTS.items()}
    for path, handler in {**texts, "/tokenize": tokenize, "/detokenize": detokenize}.items():
        app.add_api_route(path, guarded(handler), methods=["POST"], response_model=None)
    app.add_middleware(Guard, settings=settings)
    if settings.cors_origins:  # before the keys, as a browser asks first without one
        origins, every = settings.cors_origins, ["*"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every
        )
    return app


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


async def index() -> Response:
    html, policy = page()
    headers = {**PAGE, "Content-Security-Policy": policy}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


async def health(http: Request) -> Response:
    """200 if requests are answered, else 503 with the reason."""
    unhealthy_reason = http.app.state.runner.unhealthy_reason
    if unhealthy_reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": unhealthy_reason}, 503, {"Retry-After": "5"})


def metrics(http: Request) -> Response:
    content, kind = http.app.state.runner.metrics.expose(http.headers.get("accept", ""))
    return Response(content, media_type=kind)


def version() -> dict[str, str]:
    return {"version": __version__}


def models(http: Request) -> dict[str, Any]:
    runner: Runner = http.app.state.runner
    return {"object": "list", "data": [_model(runner, name) for name in runner.names]}


def model(name: str, http: Request) -> dict[str, Any]:
    runner: Runner = http.app.state.runner
    check_model(runner, name)
    return _model(runner, name)


def _model(runner: Runner, name: str) -> dict[str, Any]:
    """Return OpenAI's model object, with vLLM's fields and the methods of `speculation`."""
    llm = runner.loaded.llm
    return {
        "id": name,
        "object": "model",
        "created": runner.started,
        "owned_by": "quickbeam",
        "root": runner.name,
        "max_model_len": llm.room(0),
        "quickbeam": {"methods": llm.methods, "default_method": llm.method},
    }


async def tokenize(http: Request) -> Response:
    """Return the tokens of a text, or of the prompt of a conversation (by the chat template)."""
    runner: Runner = http.app.state.runner
    request = await read(http, TokenizeText | TokenizeChat)
    tokenizer = runner.llm.tokenizer
    with named(request):
        check_model(runner, request.model)
        if isinstance(request, TokenizeText):
            special = request.add_special_tokens is not False
            found = await asyncio.to_thread(tokenizer, request.prompt, add_special_tokens=special)
            ids = list(found["input_ids"])
        else:
            if request.tools:
                tool_format(tokenizer)  # raises if the chat template doesn't take tools
            tools = request.tools
            ids = await asyncio.to_thread(encode_conversation, runner.llm, request, tools)
    texts = tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
    room = runner.llm.room(0)
    return JSONResponse(
        {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": texts}
    )


async def detokenize(http: Request) -> Response:
    """Return the text of tokens, special ones included."""
    runner: Runner = http.app.state.runner
    request = await read(http, Detokenize)
    check_model(runner, request.model)
    size = runner.llm.model.vocab_size
    if outside := [token for token in request.tokens if not 0 <= token < size]:
        raise Refused(
            f"tokens: {outside[0]} is not an id of this model: they go from 0 to {size - 1}",
            "tokens",
        )
    text = await asyncio.to_thread(runner.llm.tokenizer.decode, request.tokens)
    return JSONResponse({"prompt": text})


GET: dict[str, Callable[..., Any]] = {
    "/health": health,
    "/metrics": metrics,
    "/version": version,
    "/v1/models": models,
    "/v1/models/{name:path}": model,
}
