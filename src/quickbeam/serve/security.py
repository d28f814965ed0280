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

from quickbeam.config import ServerOptions
from quickbeam.serve.admission import TENANT
from quickbeam.serve.errors import Refused, response

OPEN = ("/", "/health")  # paths that need no key
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names of this machine
NO_KEY = (
    "a key is needed, as Authorization: Bearer KEY or x-api-key: KEY, and this one is not known or "
    "missing"
)
# encodings of bodies, and whether they compress
ENCODINGS = {"": False, "identity": False, "gzip": True, "x-gzip": True, "deflate": True}
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # that change nothing


class Guard:
    """An ASGI middleware that refuses what the options do not allow.

    With API keys it requires one of them. Without keys, it refuses web pages of other sites, whose
    name may be made to point to this machine. It refuses bodies that are too large or too slow, and
    decompresses the others. HEAD is answered as GET. A URL, or a slash at the end of a path, is
    answered as the plain path. `TENANT` becomes the key's hash or the client's address.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._key_hashes = [sha256(key.encode()).digest() for key in options.api_keys]
        self._max_body = options.max_body_bytes
        self._open = OPEN if options.protect_metrics else (*OPEN, "/metrics")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _plain(scope)
        headers = Headers(scope=scope)
        key_hash = self._accepted_key(headers)
        encoding = headers.get("content-encoding", "").strip().lower()
        error: Refused | None
        if self._key_hashes:
            error = self._wrong_key(scope["path"], key_hash)
        else:
            error = self._foreign_page(headers, scope["method"])
        error = error or self._wrong_body(headers.get("content-length", "0"), encoding)
        if error is not None:
            await response(error, scope)(scope, receive, send)
            return
        client = scope.get("client")
        TENANT.set(key_hash if self._key_hashes else client and client[0])
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        receive = self._limited(receive)
        if ENCODINGS[encoding]:
            receive = self._decompressed(receive)
        await self._app({**scope, "method": method}, receive, send)

    def _accepted_key(self, headers: Headers) -> bytes | None:
        """Return the hash of the key that lets a request in; None if it has none.

        Clients of OpenAI's API send it as `Authorization`, those of Anthropic's also as
        `x-api-key`.
        """
        scheme, _, key = headers.get("authorization", "").partition(" ")
        keys = [key if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        accepted = None
        for key in keys:
            key_hash = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            # all are compared, by hashes of equal length, so that it takes the same time for any
            equal = [hmac.compare_digest(key_hash, each) for each in self._key_hashes]
            if any(equal):
                accepted = key_hash
        return accepted

    def _wrong_key(self, path: str, key_hash: bytes | None) -> Refused | None:
        """Return the error for a request without an accepted key; None if it is let in."""
        if key_hash is not None or path in self._open:
            return None
        return Refused(NO_KEY, code="invalid_api_key")

    def _wrong_body(self, length: str, encoding: str) -> Refused | None:
        """Return the error for a body by its headers; None if it may be read."""
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_body):
            return self._too_large()
        if encoding not in ENCODINGS:
            return Refused(
                "the body's Content-Encoding is not known here: send gzip, deflate or none",
                code="unsupported_encoding",
            )
        return None

    def _foreign_page(self, headers: Headers, method: str) -> Refused | None:
        """Return the error for a request that another site's page sends; None if it is let in."""
        options = self._options
        host = headers.get("host", "").lower()
        if options.loopback:
            name, _ = _split(host)
            accepted = (*LOOPBACK, options.host, *options.allowed_hosts)
            # without any it is no browser but, say, a load balancer that asks for /health
            if host and not any(fnmatchcase(name, pattern.lower()) for pattern in accepted):
                return Refused(
                    f"this server is not asked by the name {name[:100]!r}: use localhost, or have "
                    "it started with --allowed-host",
                    code="unknown_host",
                )
        origin = headers.get("origin")
        if origin is None or method in SAFE_METHODS or "*" in options.cors_origins:
            return None
        if origin not in options.cors_origins and _split(origin)[1] != host:
            return Refused(
                f"web pages of {origin[:100]!r} may not ask: have the server started with "
                "--cors-origin",
                code="unknown_origin",
            )
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Return a `receive` that ends with the limits of size, which is counted, and of time."""
        limit = self._options.read_timeout
        deadline = asyncio.get_running_loop().time() + limit
        seen = 0  # bytes
        complete = False

        async def counted() -> Message:
            nonlocal seen, complete
            if complete:  # what comes next is that the client leaves
                return await receive()
            remaining = deadline - asyncio.get_running_loop().time()
            try:
                with anyio.fail_after(max(remaining, 0.001)):
                    message = await receive()
            except TimeoutError:
                raise Refused(
                    f"the request's body took longer than {limit:g} seconds to arrive",
                    code="request_timeout",
                ) from None
            seen += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if seen > self._max_body:
                raise self._too_large()
            return message

        return counted

    def _decompressed(self, receive: Receive) -> Receive:
        """Return a `receive` that decompresses a body, to no more than the limit of size."""
        decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip's header or zlib's
        size = 0  # bytes, decompressed
        complete = False

        async def decompressed() -> Message:
            nonlocal size, complete
            message = await receive()
            if complete or message["type"] != "http.request":
                return message
            complete = not message.get("more_body", False)
            try:
                body = decoder.decompress(message.get("body", b""), self._max_body - size + 1)
            except zlib.error as error:
                raise Refused(f"the body can't be decompressed: {error}") from None
            size += len(body)
            if size > self._max_body:
                raise self._too_large()
            if decoder.unused_data or (complete and not decoder.eof):
                raise Refused("the body can't be decompressed: it is cut short or goes on")
            return {**message, "body": body}

        return decompressed

    def _too_large(self) -> Refused:
        return Refused(
            f"the request's body is larger than {self._max_body} bytes, this server's limit",
            code="body_too_large",
        )


def _plain(scope: Scope) -> Scope:
    """Return a request's scope with its path alone where it names a URL, as to a proxy.

    The URL's host then stands in for the header (RFC 9112, 3.2.2). A slash at the path's end is
    removed.
    """
    path = scope["path"]
    headers = scope["headers"]
    url = re.match("https?://([^/]*)", path, re.IGNORECASE)
    if url is not None:
        path = path[url.end() :]
        others = [(name, value) for name, value in headers if name != b"host"]
        headers = [(b"host", url[1].encode("latin-1", "replace")), *others]
    return {**scope, "path": path.rstrip("/") or "/", "headers": headers}


def _split(address: str) -> tuple[str, str]:
    """Return the host's name in a Host header or a URL, and the name with its port."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", ""
