"""Errors in the form of OpenAI's API, `{"error": {"message", "type", "param", "code"}}`, or, for
requests to Anthropic's, `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

import logging
import reprlib
import secrets
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from quickbeam.errors import InvalidInput, QuickbeamError

INVALID = "invalid_request_error"
TYPES = {
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
MESSAGES = "/v1/messages"  # Anthropic's path
ANTHROPIC_VERSION = "anthropic-version"  # a header that clients of Anthropic's API send
OVERLOADED = 529  # Anthropic's status for what others report as a 503
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    OVERLOADED: "overloaded_error",
}
TOO_LONG = "context_length_exceeded"  # the code of a prompt that the context can't hold
MAX_MESSAGE = 1000  # characters; a part of the request that is quoted may be long
logger = logging.getLogger(__name__)


class Problem(NamedTuple):
    """What a client is told of an error."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 (never changed)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        message = _shortened(self.message)
        param = self.param
        if param is not None and len(param) > MAX_MESSAGE:  # a name that the client made up
            param = None
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    @property
    def anthropic_status(self) -> int:
        """The status in Anthropic's API."""
        return OVERLOADED if self.status == 503 else self.status

    def anthropic_body(self) -> dict[str, Any]:
        """Return Anthropic's error object, with a new id."""
        message = _shortened(self.message)
        if self.code == TOO_LONG:  # by these words agents see that they have to shorten it
            message = f"prompt is too long: {message}"
        return {
            "type": "error",
            "error": {
                "type": ANTHROPIC_TYPES.get(self.anthropic_status, INVALID),
                "message": message,
            },
            "request_id": f"req_{secrets.token_hex(12)}",
        }


def _shortened(message: str) -> str:
    """Return a message of at most about `MAX_MESSAGE` characters."""
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]} … {message[-half:]}"


# status and headers of refusals, by their code; other refusals have a 400
STATUS_OF_CODE: dict[str | None, tuple[int, dict[str, str]]] = {
    "invalid_api_key": (401, {"WWW-Authenticate": "Bearer"}),
    "unknown_origin": (403, {}),
    "model_not_found": (404, {}),
    "request_timeout": (408, {"Connection": "close"}),
    "body_too_large": (413, {"Connection": "close"}),
    "unsupported_media_type": (415, {}),
    "unsupported_encoding": (415, {"Accept-Encoding": "gzip, deflate"}),
}


class Refused(InvalidInput):
    """A request that can't be served, with the fields of OpenAI's error object."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        status, headers = STATUS_OF_CODE.get(code, (400, {}))
        self.problem = Problem(status, message, INVALID, param, code, headers)


class Interrupted(QuickbeamError):
    """An answer that the server cut short."""

    status = 503
    code = "interrupted"


def problem(error: BaseException) -> Problem:
    """Return what a client is told of an error. An unknown kind is logged without its message."""
    if isinstance(error, Refused):
        return error.problem
    if isinstance(error, HTTPException):
        return _problem(error.status_code, str(error.detail), None, dict(error.headers or {}))
    if isinstance(error, QuickbeamError):
        status = getattr(error, "status", 400 if isinstance(error, InvalidInput) else 500)
        retry_after = getattr(error, "retry_after", None)
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return _problem(status, str(error), getattr(error, "code", None), headers)
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a request failed with %s at:\n%s", type(error).__name__, where)
    message = "the server failed to answer this request; its log says why"
    return _problem(500, message, "internal_error", {})


def _problem(status: int, message: str, code: str | None, headers: dict[str, str]) -> Problem:
    return Problem(status, message, TYPES.get(status, INVALID), None, code, headers)


def response(error: BaseException, request: Scope) -> JSONResponse:
    """Return the HTTP response to an error, in the form of the API that the request is to."""
    about = problem(error)
    if not asks_anthropic(request):
        return JSONResponse(about.body, about.status, headers=about.headers)
    body = about.anthropic_body()
    headers = {**about.headers, "request-id": body["request_id"]}
    return JSONResponse(body, about.anthropic_status, headers=headers)


def asks_anthropic(request: Scope) -> bool:
    """Whether a request is one to Anthropic's API, by its path or a header of its clients."""
    path = f"{request['path']}/"
    return path.startswith(f"{MESSAGES}/") or ANTHROPIC_VERSION in Headers(scope=request)


def invalid(error: ValidationError, body: Any) -> Refused:
    """Return the most helpful of the errors that a body was refused for: the deepest."""
    errors = [
        (_path(details["loc"], details["type"], body), details)
        for details in error.errors(include_url=False)
    ]
    path, details = max(errors, key=_helpfulness)
    kind = details["type"]
    context = details.get("ctx") or {}
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    name = context.get("param") or where.removeprefix(".")  # such as messages[0].content
    message = details["msg"].removeprefix("Value error, ")
    if kind == "union_tag_not_found":  # a missing field that says which kind of object it is
        field = str(context["discriminator"]).strip("'")
        name = f"{name}.{field}"
        message = "Field required"
    elif kind == "too_short":
        message = "empty: give at least one"
    elif kind == "too_long":
        message = f"more than {context['max_length']}, the most that there may be"
    elif kind == "extra_forbidden":
        message = "not supported by this server: leave it out"
    elif kind not in ("unsupported", "missing") and not isinstance(details["input"], dict | list):
        message += f", not {reprlib.repr(details['input'])}"
    return Refused(f"{name}: {message}" if name else message, name or None)


def _helpfulness(error: tuple[Sequence[str | int], ErrorDetails]) -> tuple[bool, int, bool]:
    path, details = error
    kind = details["type"]
    return kind == "too_long", len(path), kind in ("unsupported", "too_short", "too_long")


def _path(location: Sequence[str | int], kind: str, body: Any) -> list[str | int]:
    """Return where in the body an error is, without the type names that pydantic inserts."""
    path = list[str | int]()
    value = body
    for i, part in enumerate(location):
        in_object = isinstance(value, dict) and part in value
        in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if in_object or in_list:
            path.append(part)
            value = value[part]
        elif i == len(location) - 1 and kind == "missing":
            path.append(part)
    return path
