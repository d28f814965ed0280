"""Answer requests, a limited number at a time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from quickbeam.batch.journal import Journal
from quickbeam.batch.requests import Request, read
from quickbeam.errors import InvalidInput


class Reply(NamedTuple):
    """An endpoint's reply to a request: HTTP status and body."""

    status: int
    body: dict[str, Any]


# called with an endpoint's path and a request's body
Answer = Callable[[str, dict[str, Any]], Awaitable[Reply]]


def check(source: Path, journal: Journal) -> int:
    """Return the number of requests in a file.

    Raises `InvalidInput` if two have the same `custom_id`, if the journal has answers to others, or
    if it is the file itself.
    """
    if source.exists() and source.samefile(journal.path):
        raise InvalidInput(f"{source}: the answers must go to another file")
    seen = dict[str, int]()
    for request in read(source):
        name = request.custom_id
        if name in seen:
            raise InvalidInput(
                f"{source}: lines {seen[name]} and {request.line} both have the "
                f"custom_id {name!r}; give each its own"
            )
        seen[name] = request.line
        if journal.done.get(name, request.id) != request.id:
            raise InvalidInput(
                f"{source}, line {request.line}: {journal.path} answers another request with "
                f"custom_id {name!r}; "
                "give another output, or the requests as they were"
            )
    if unasked := sorted(journal.done.keys() - seen.keys()):
        more = f" and {len(unasked) - 1} more" if len(unasked) > 1 else ""
        raise InvalidInput(
            f"{journal.path} answers custom_id {unasked[0]!r}{more}, which {source} "
            "doesn't have; give another output"
        )
    return len(seen)


async def run(
    requests: Iterable[Request],
    answer: Answer,
    journal: Journal,
    window: int,
    answered: Callable[[], object],
) -> None:
    """Answer all requests that are not `done` in the journal, `window` at a time, in order.

    `answered` is called after each. An error that `answer` raises ends the run; what was written
    stays, and the next run continues from there.
    """
    asked = dict[asyncio.Future[Reply], Request]()

    async def take() -> None:
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        # errors come last, so that answers that arrived with them are written first
        for one in sorted(done, key=lambda one: one.exception() is not None):
            journal.write(_record(asked.pop(one), one.result()))
            answered()

    try:
        for request in requests:
            if request.custom_id in journal.done:
                continue
            if request.fault is not None:
                journal.write(_record(request, None))
                answered()
                continue
            asked[asyncio.ensure_future(answer(request.url, request.body))] = request
            if len(asked) >= window:
                await take()
        while asked:
            await take()
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def _record(request: Request, reply: Reply | None) -> dict[str, Any]:
    """Return OpenAI's record of a reply; None stands for a line that is not a valid request."""
    error = response = None
    if reply is None:
        error = {"code": "invalid_request", "message": request.fault}
    else:
        number = f"req_{uuid.uuid4().hex}"
        response = {"status_code": reply.status, "request_id": number, "body": reply.body}
    own = {"id": request.id, "custom_id": request.custom_id}
    return {**own, "response": response, "error": error}
