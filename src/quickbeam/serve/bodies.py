"""From the bytes of a request's body to a checked request."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from quickbeam.serve.errors import Refused, invalid

LARGE = 16_384  # bytes; a body of more is parsed and checked in a thread


async def read(http: Request, kind: Any) -> Any:
    """Return the request that a body holds; `kind` is a model, or a union of models.

    Raises `Refused` for what is not JSON, and for a request that can't be served.
    """
    # A web page may send any other type to any address without asking the server first.
    media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise Refused(
            "the body must be a JSON object, sent with the header Content-Type: application/json",
            code="unsupported_media_type",
            status=415,
        )
    body = await http.body()
    if len(body) > LARGE:
        return await asyncio.to_thread(parse, body, kind)
    return parse(body, kind)


def parse(body: bytes, kind: Any) -> Any:
    """Return the request that the bytes of a body hold. Raises as `read` does."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise Refused("the body is nested too deep") from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    return check(value, kind)


def check(value: Any, kind: Any) -> Any:
    """Return the request that a JSON value stands for. Raises `Refused` if it can't be served."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise invalid(error, value) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
