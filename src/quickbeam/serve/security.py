"""Access to the server: ASGI middlewares for hosts, origins, API keys and bodies."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quickbeam.serve.errors import Refused, response

OPEN = ("/", "/health")  # paths that need no key
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names of this machine
READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
CLOSE = {"Connection": "close"}


class Origins:
    """Refuses web pages of others where no key keeps them out.

    A page may send a request to any address that its browser reaches. `hosts` are the names that
    the server may be asked by, or patterns of them (None: any), because a page's own name may be
    made to point to this machine. `origins` are those of pages that may ask, beside the server's
    own.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]
    ) -> None:
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if self._hosts is not None:
            name = _split(host)[0]
            if not any(fnmatchcase(name, one.lower()) for one in self._hosts):
                return Refused(
                    f"this server is not asked by the name {name[:100]!r}: use localhost, or have "
                    "it started with --allowed-host",
                    code="unknown_host",
                )
        if origin is None or scope["method"] in READING or "*" in self._origins:
            return None
        if origin not in self._origins and _split(origin)[1] != host:
            return Refused(
                f"web pages of {origin[:100]!r} may not ask: have the server started with "
                "--cors-origin",
                code="unknown_origin",
                status=403,
            )
        return None


def _split(address: str) -> tuple[str, str]:
    """Return the host's name in a Host header or a URL, and the name with its port."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", ""


class Keys:
    """Requires one of several API keys, sent as `Authorization: Bearer KEY`.

    The paths in `open` need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open: Collection[str] = OPEN) -> None:
        self._app, self._open = app, frozenset(open)
        self._keys = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in self._open
            and not self._known(Headers(scope=scope).get("authorization", ""))
        ):
            error = Refused(
                "a key is needed, as Authorization: Bearer KEY, and this one is not known or "
                "missing",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, header: str) -> bool:
        """Whether the header has a known key.

        The check takes the same time for any key: all keys are compared, by hashes of equal length.
        """
        scheme, _, given = header.partition(" ")
        digest = sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return any(matches) and scheme.lower() == "bearer"


class BodyLimit:
    """Refuses bodies of more than `limit` bytes, and those that take longer than `seconds`.

    It checks the Content-Length header first. It also counts the bytes that are read, because the
    header may be missing or wrong.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limit):
            await response(self._too_large())(scope, receive, send)
            return
        seen, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Message:
            nonlocal seen, complete
            if complete:  # what comes next is that the client leaves
                return await receive()
            left = deadline - asyncio.get_running_loop().time()
            try:
                with anyio.fail_after(max(left, 0.001)):
                    message = await receive()
            except TimeoutError:
                raise Refused(
                    f"the request's body took longer than {self._seconds:g} seconds to arrive",
                    code="request_timeout",
                    status=408,
                    headers=CLOSE,
                ) from None
            seen += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if seen > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> Refused:
        return Refused(
            f"the request's body is larger than {self._limit} bytes, this server's limit",
            code="body_too_large",
            status=413,
            headers=CLOSE,
        )
