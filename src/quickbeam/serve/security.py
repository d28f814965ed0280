"""Access to the server: hosts, origins, API keys, bodies, and whose a request is."""

from __future__ import annotations

import asyncio
import hmac
import re
import zlib
from fnmatch import fnmatchcase
from hashlib import sha256
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quickbeam.config import parse_bytes
from quickbeam.serve.admission import TENANT
from quickbeam.serve.errors import Refused, response
from quickbeam.serve.settings import ServeSettings

OPEN = ("/", "/health")  # paths that need no key
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names of this machine
KEY = "a key is needed, as Authorization: Bearer KEY, and this one is not known or missing"
# of bodies, and whether they are compressed
CODINGS = {"": False, "identity": False, "gzip": True, "x-gzip": True, "deflate": True}
READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


class Guard:
    """An ASGI middleware that lets through what the settings allow.

    With API keys it requires one of them. Without, it refuses web pages of others, whose own name
    may be made to point to this machine. It refuses bodies that are too large or too slow, and
    decompresses the others. HEAD is answered as GET, and a whole URL or a slash at the end of a
    path as the plain path. `TENANT` becomes the key's hash or the client's address.
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
        scope = _plain(scope)
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
        coding = headers.get("content-encoding", "").strip().lower()
        if coding not in CODINGS:
            why = "the body's Content-Encoding is not known here: send gzip, deflate or none"
            error = error or Refused(why, code="unsupported_encoding")
        if error is not None:
            await response(error)(scope, receive, send)
            return
        TENANT.set(digest if self._keys else client and client[0])
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        receive = self._limited(receive)
        if CODINGS[coding]:
            receive = self._decompressed(receive)
        await self._app({**scope, "method": method}, receive, send)

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

    def _decompressed(self, receive: Receive) -> Receive:
        """Return a `receive` that decompresses a body, to no more than the limit of size."""
        decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip's header or zlib's
        size, complete = 0, False

        async def decompressed() -> Message:
            nonlocal size, complete
            message = await receive()
            if complete or message["type"] != "http.request":
                return message
            complete = not message.get("more_body", False)
            try:
                body = decoder.decompress(message.get("body", b""), self._most - size + 1)
            except zlib.error as error:
                raise Refused(f"the body can't be decompressed: {error}") from None
            size += len(body)
            if size > self._most:
                raise self._too_large()
            if decoder.unused_data or (complete and not decoder.eof):
                raise Refused("the body can't be decompressed: it is cut short or goes on")
            return {**message, "body": body}

        return decompressed

    def _too_large(self) -> Refused:
        most = f"{self._most} bytes, this server's limit"
        return Refused(f"the request's body is larger than {most}", code="body_too_large")


def _plain(scope: Scope) -> Scope:
    """Return a request's scope with its path alone where it names a whole URL, as to a proxy.

    The URL's host then stands in for the header (RFC 9112, 3.2.2). A slash at the path's end goes.
    """
    path, headers = scope["path"], scope["headers"]
    if url := re.match("https?://([^/]*)", path, re.IGNORECASE):
        path = path[url.end() :]
        others = [pair for pair in headers if pair[0] != b"host"]
        headers = [(b"host", url[1].encode("latin-1", "replace")), *others]
    return {**scope, "path": path.rstrip("/") or "/", "headers": headers}


def _split(address: str) -> tuple[str, str]:
    """Return the host's name in a Host header or a URL, and the name with its port."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", ""
