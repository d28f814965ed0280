"""Access to the server: hosts, origins, API keys, bodies, and whose a request is."""

from __future__ import annotations

import asyncio
import hmac
from fnmatch import fnmatchcase
from hashlib import sha256
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quickbeam.options import parse_bytes
from quickbeam.serve.admission import TENANT
from quickbeam.serve.errors import Refused, response
from quickbeam.serve.settings import ServeSettings

OPEN = ("/", "/health")  # paths that need no key
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names of this machine
KEY = "a key is needed, as Authorization: Bearer KEY, and this one is not known or missing"
READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


class Guard:
    """An ASGI middleware that lets through what the settings allow.

    With API keys it requires one of them. Without, it refuses web pages of others, whose own name
    may be made to point to this machine. It refuses bodies that are too large or too slow, has HEAD
    answered as GET, and sets `TENANT` to the key's hash or the client's address.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings
        self._keys = [sha256(key.encode()).digest() for key in settings.api_keys]
        self._most = parse_bytes(settings.max_body, "max_body")
        self._open = OPEN if settings.protect_metrics else (*OPEN, "/metrics")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, client = Headers(scope=scope), scope.get("client")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if self._keys:
            # all are compared, by hashes of equal length, so that it takes the same time for any
            same = [hmac.compare_digest(digest, one) for one in self._keys]
            known = any(same) and scheme.lower() == "bearer"
            allowed = known or scope["path"] in self._open
            error = None if allowed else Refused(KEY, code="invalid_api_key")
        else:
            error = self._foreign_page(headers, scope["method"])
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._most):
            error = error or self._too_large()
        if error is not None:
            await response(error)(scope, receive, send)
            return
        TENANT.set(digest if self._keys else client and client[0])
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._app({**scope, "method": method}, self._limited(receive), send)

    def _foreign_page(self, headers: Headers, method: str) -> Refused | None:
        settings = self._settings
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if settings.loopback:
            name, _ = _split(host)
            hosts = (*LOOPBACK, settings.host, *settings.allowed_hosts)
            # without any it is no browser but, say, a load balancer that asks for /health
            if host and not any(fnmatchcase(name, one.lower()) for one in hosts):
                why = f"this server is not asked by the name {name[:100]!r}: use localhost, or"
                return Refused(f"{why} have it started with --allowed-host", code="unknown_host")
        allowed = settings.cors_origins
        if origin is None or method in READING or "*" in allowed:
            return None
        if origin not in allowed and _split(origin)[1] != host:
            why = f"web pages of {origin[:100]!r} may not ask"
            why += ": have the server started with --cors-origin"
            return Refused(why, code="unknown_origin")
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Return a `receive` that ends with the limits of size, which is counted, and of time."""
        settings, seen, complete = self._settings, 0, False
        deadline = asyncio.get_running_loop().time() + settings.read_timeout

        async def counted() -> Message:
            nonlocal seen, complete
            if complete:  # what comes next is that the client leaves
                return await receive()
            try:
                with anyio.fail_after(max(deadline - asyncio.get_running_loop().time(), 0.001)):
                    message = await receive()
            except TimeoutError:
                why = f"the request's body took longer than {settings.read_timeout:g} seconds"
                raise Refused(f"{why} to arrive", code="request_timeout") from None
            seen += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if seen > self._most:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> Refused:
        most = f"{self._most} bytes, this server's limit"
        return Refused(f"the request's body is larger than {most}", code="body_too_large")


def _split(address: str) -> tuple[str, str]:
    """Return the host's name in a Host header or a URL, and the name with its port."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", ""
