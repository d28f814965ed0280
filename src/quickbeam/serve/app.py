"""The server's application: its routes, and what each request passes before it gets there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quickbeam import __version__
from quickbeam.serve import endpoints, errors, tokens
from quickbeam.serve.page import page
from quickbeam.serve.runner import Runner
from quickbeam.serve.security import LOOPBACK, OPEN, BodyLimit, Keys, Origins
from quickbeam.serve.tenants import Tenants


def create_app(runner: Runner) -> FastAPI:
    """Return the HTTP application for a runner.

    The runner is closed when the application ends. Handlers find it as `request.app.state.runner`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await runner.close()

    # no documentation pages: they would load scripts from elsewhere
    app = FastAPI(
        title="quickbeam", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.runner = runner
    errors.install(app)
    endpoints.install(app)
    app.include_router(tokens.router)
    app.add_api_route("/", index, include_in_schema=False)
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics)
    protect(app, runner)
    return app


def protect(app: FastAPI, runner: Runner) -> None:
    """Add the middlewares that the settings ask for. A request passes the last one added first."""
    settings = runner.settings
    app.add_middleware(Tenants, keyed=bool(settings.api_keys))
    app.add_middleware(answer_head)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, seconds=settings.read_timeout)
    if settings.api_keys:
        app.add_middleware(
            Keys,
            keys=settings.api_keys,
            open=OPEN if settings.protect_metrics else (*OPEN, "/metrics"),
        )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    if not settings.api_keys:  # a web page can't know a key
        hosts = (*LOOPBACK, settings.host, *settings.allowed_hosts)
        app.add_middleware(
            Origins, hosts=hosts if settings.loopback else None, origins=settings.cors_origins
        )


def answer_head(app: ASGIApp) -> ASGIApp:
    """Return an application that answers HEAD as GET. What runs it leaves the body out."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await app(scope, receive, send)

    return call


async def index() -> Response:
    html, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


async def health(request: Request) -> Response:
    """200 if requests are answered, else 503 with the reason."""
    unhealthy_reason = request.app.state.runner.unhealthy_reason
    if unhealthy_reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": unhealthy_reason}, 503, {"Retry-After": "5"})


def metrics(request: Request) -> Response:
    content, kind = request.app.state.runner.metrics.expose(request.headers.get("accept", ""))
    return Response(content, media_type=kind)
