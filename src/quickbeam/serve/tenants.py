"""Whose a request is: a key's, or without keys an address's. Tenants take turns in the engine."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

TENANT: ContextVar[Hashable] = ContextVar("tenant", default=None)


class Tenants:
    """An ASGI middleware that sets `TENANT` for what answers the request.

    `keyed`: whether clients have API keys. They are told apart by their keys then, otherwise by
    their addresses. Behind a proxy without keys all are one tenant.
    """

    def __init__(self, app: ASGIApp, keyed: bool) -> None:
        self._app, self._keyed = app, keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key, client = Headers(scope=scope).get("authorization", ""), scope.get("client")
            address = client[0] if client else None
            known = sha256(key.encode("utf-8", "surrogateescape")).digest()
            TENANT.set(known if self._keyed else address)
        await self._app(scope, receive, send)
