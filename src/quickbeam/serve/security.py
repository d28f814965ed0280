"""Access to the server: ASGI middlewares for API keys and for the size of bodies."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/", "/health")  # paths that need no key


def refusal(
    status: int, message: str, kind: str, code: str | None, headers: dict[str, str]
) -> JSONResponse:
    """Return an error response in the form that OpenAI's clients expect."""
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers
    )


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
            message = (
                "a key is needed, as Authorization: Bearer KEY, and this one is not known "
                "or missing"
            )
            answer = refusal(
                401,
                message,
                "invalid_request_error",
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )
            await answer(scope, receive, send)
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


class TooLarge(HTTPException):
    """A request body beyond the limit (HTTP 413)."""

    def __init__(self, limit: int) -> None:
        message = f"the request's body is larger than {limit} bytes, this server's limit"
        super().__init__(413, message, {"Connection": "close"})


class BodyLimit:
    """Refuses bodies of more than `limit` bytes.

    It checks the Content-Length header first. It also counts the bytes that are read, because the
    header may be missing or wrong.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._limit:
            error = TooLarge(self._limit)
            await refusal(
                413,
                error.detail,
                "invalid_request_error",
                "body_too_large",
                {"Connection": "close"},
            )(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise TooLarge(self._limit)
            return message

        await self._app(scope, counted, send)
