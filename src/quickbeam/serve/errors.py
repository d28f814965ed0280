"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import reprlib
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from quickbeam.errors import InvalidInput, QuickbeamError

INVALID = "invalid_request_error"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
MOST = 1000  # characters of a message; a part of the request that is quoted may be long
_log = logging.getLogger(__name__)


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
        message, param = self.message, self.param
        if len(message) > MOST:
            message = f"{message[: MOST // 2]} … {message[-MOST // 2 :]}"
        if len(param or "") > MOST:  # a name that the client made up
            param = None
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}


# status and headers of refusals, by their code; the others have a 400
CODES: dict[str | None, tuple[int, dict[str, str]]] = {
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
        status, headers = CODES.get(code, (400, {}))
        self.problem = Problem(status, message, INVALID, param, code, headers)


class Interrupted(QuickbeamError):
    """An answer that the server cut short."""

    status, code = 503, "interrupted"


def problem(error: BaseException) -> Problem:
    """Return what a client is told of an error. An unknown kind is logged without its message."""
    if isinstance(error, Refused):
        return error.problem
    if isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        return Problem(status, str(error.detail), TYPES.get(status, INVALID), headers=headers)
    if isinstance(error, QuickbeamError):
        status = getattr(error, "status", 400 if isinstance(error, InvalidInput) else 500)
        again, code = getattr(error, "retry_after", None), getattr(error, "code", None)
        headers = {} if again is None else {"Retry-After": str(again)}
        return Problem(status, str(error), TYPES.get(status, INVALID), None, code, headers)
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("a request failed with %s at:\n%s", type(error).__name__, where)
    message = "the server failed to answer this request; its log says why"
    return Problem(500, message, TYPES[500], code="internal_error")


def response(error: BaseException) -> JSONResponse:
    """Return the HTTP response to an error."""
    about = problem(error)
    return JSONResponse(about.body, about.status, headers=about.headers)


def invalid(error: ValidationError, body: Any) -> Refused:
    """Return the most helpful of the errors that a body was refused for: the deepest."""
    telling = ("unsupported", "too_short", "too_long")

    def rank(one: tuple[list[str | int], Any]) -> tuple[bool, int, bool]:
        return one[1]["type"] == "too_long", len(one[0]), one[1]["type"] in telling

    errors = error.errors(include_url=False)
    path, first = max(((_path(one, body), one) for one in errors), key=rank)
    kind, about = first["type"], first.get("ctx") or {}
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    name = about.get("param") or where.removeprefix(".")  # such as messages[0].content
    message = first["msg"].removeprefix("Value error, ")
    if kind == "union_tag_not_found":  # a missing field that says which kind of object it is
        field = str(about["discriminator"]).strip("'")
        name, message = f"{name}.{field}", "Field required"
    elif kind == "too_short":
        message = "empty: give at least one"
    elif kind == "too_long":
        message = f"more than {about['max_length']}, the most that there may be"
    elif kind == "extra_forbidden":
        message = "not supported by this server: leave it out"
    elif kind not in ("unsupported", "missing") and not isinstance(first["input"], dict | list):
        message += f", not {reprlib.repr(first['input'])}"
    return Refused(f"{name}: {message}" if name else message, name or None)


def _path(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Return where in the body an error is, without the type names that pydantic inserts."""
    parts, value, path = list(error["loc"]), body, list[str | int]()
    for i, part in enumerate(parts):
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        ):
            path.append(part)
            value = value[part]
        elif i == len(parts) - 1 and error["type"] == "missing":
            path.append(part)
    return path
