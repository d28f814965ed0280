"""Reads a file of requests, in OpenAI's batch format or a short one, and answers them."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quickbeam.batch.journal import Journal
from quickbeam.errors import InvalidInput

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
URLS = (CHAT, COMPLETIONS, RESPONSES)
URL_OF_SHORT_LINE = {"messages": CHAT, "prompt": COMPLETIONS}  # by the field that it has
ENVELOPE = {"method", "url", "body"}


class BatchRequest(NamedTuple):
    """One line of a file of requests; `id` is a hash of everything that it asks."""

    line: int  # from 1
    custom_id: str
    id: str
    url: str
    body: dict[str, Any]
    fault: str | None = None  # why the line is not a valid request


def read(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file in order. Raises `InvalidInput` if the file can't be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise InvalidInput(f"{path}: written in UTF-16; save it in UTF-8")
                # a file that others were joined to has marks in its middle, too
                line = line.removeprefix(codecs.BOM_UTF8).rstrip()
                if line:
                    yield parse(number, line)
    except OSError as error:
        raise InvalidInput(f"{path}: can't be read ({error.strerror})") from error


def parse(number: int, line: bytes) -> BatchRequest:
    """Return the request of one line: OpenAI's, or a short one.

    A short one has `messages` or `prompt`, and parameters in the same object. A request without a
    `custom_id` is named after its line. A request without a seed gets one derived from what it
    asks, and one for each of several prompts, so that equal prompts have different answers.
    """
    name = f"line-{number}"
    try:
        fields = json.loads(line.decode(), parse_constant=_refuse_constant)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        custom_id = fields.pop("custom_id", name)
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError(f"custom_id {json.dumps(custom_id)}: must be a text that is not empty")
        custom_id.encode()  # half of a surrogate pair is no character
        name = custom_id
        json.dumps(fields, ensure_ascii=False).encode()
        url, body = _endpoint_and_body(fields)
        digest = _digest(name, url, body)
    except (ValueError, RecursionError) as error:
        digest = _digest(name, hashlib.sha256(line.strip()).hexdigest())
        return BatchRequest(number, name, digest, "", {}, f"line {number}{_fault(error)}")
    if body.get("seed") is None and body.get("seeds") is None:
        body = {**body, **_seeds(digest, body.get("prompt") if url == COMPLETIONS else None)}
    return BatchRequest(number, name, digest, url, body)


def _fault(error: ValueError | RecursionError) -> str:
    """Return the end of a message about a line: the column of the fault, and the reason."""
    if isinstance(error, json.JSONDecodeError):
        return f", column {error.colno}: not JSON ({error.msg[:1].lower()}{error.msg[1:]})"
    if isinstance(error, UnicodeDecodeError):
        before = error.object[: error.start].decode(errors="replace")
        return f", column {len(before) + 1}: not UTF-8"
    if isinstance(error, UnicodeEncodeError):
        half = error.object[error.start : error.end].encode("unicode_escape").decode()
        return f": {half} is half of a character (a surrogate), and no text"
    if isinstance(error, RecursionError):
        return ": nested too deeply"
    return f": {error}"


def _endpoint_and_body(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the endpoint and the body that a line names. Raises `ValueError` if it is wrong."""
    if not fields.keys() & ENVELOPE:
        names = [name for name in URL_OF_SHORT_LINE if name in fields]
        if len(names) != 1:
            raise ValueError(
                "neither a request (custom_id, method, url, body) nor a short one, which has "
                "either messages or prompt"
            )
        fields = {"url": URL_OF_SHORT_LINE[names[0]], "body": fields}
    if unknown := sorted(fields.keys() - ENVELOPE):
        raise ValueError(f"unknown field {unknown[0]!r} beside custom_id, method, url and body")
    if fields.get("method", "POST") != "POST":
        raise ValueError(f"method {json.dumps(fields['method'])}: must be POST")
    url = fields.get("url")
    if url not in URLS:
        raise ValueError(f"url {json.dumps(url)}: must be one of {', '.join(URLS)}")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise ValueError("body: must be a JSON object")
    if body.get("stream"):
        raise ValueError("stream: a batch gives whole answers; leave it out")
    return url, body


def _seeds(digest: str, prompt: Any) -> dict[str, Any]:
    """Return the field that gives a request its seed, or each of its prompts a seed."""
    if not isinstance(prompt, list) or len(prompt) < 2 or isinstance(prompt[0], int):
        return {"seed": int(digest[-8:], 16)}
    hashes = [hashlib.sha256(f"{digest} {i}".encode()).digest() for i in range(len(prompt))]
    return {"seeds": [int.from_bytes(prompt_hash[:4], "big") for prompt_hash in hashes]}


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True).encode()
    return f"batch_req_{hashlib.sha256(text).hexdigest()[:32]}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Reply(NamedTuple):
    """An endpoint's reply to a request: HTTP status and body."""

    status: int
    body: dict[str, Any]


# called with an endpoint's path and a request's body
Answer = Callable[[str, dict[str, Any]], Awaitable[Reply]]


def check(source: Path, journal: Journal) -> dict[str, int]:
    """Return the line (from 1) of each request in a file, by its `custom_id`.

    Raises `InvalidInput` if two requests have the same `custom_id`, if the journal has answers to
    other requests, or if the journal is the file itself.
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
                f"custom_id {name!r}; give another output, or the requests as they were"
            )
    if unasked := sorted(journal.done.keys() - seen.keys()):
        more = f" and {len(unasked) - 1} more" if len(unasked) > 1 else ""
        raise InvalidInput(
            f"{journal.path} answers custom_id {unasked[0]!r}{more}, which {source} "
            "doesn't have; give another output"
        )
    return seen


async def run(
    requests: Iterable[BatchRequest],
    answer: Answer,
    journal: Journal,
    window: int,
    answered: Callable[[], object],
) -> None:
    """Answer all requests that are not `done` in the journal, `window` at a time, in order.

    `answered` is called after each. An error that `answer` raises ends the run; what was written
    stays, and the next run continues from there.
    """
    pending = dict[asyncio.Future[Reply], BatchRequest]()

    async def write_completed() -> None:
        completed, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        # errors come last, so that answers that arrived with them are written first
        for task in sorted(completed, key=lambda task: task.exception() is not None):
            journal.write(_record(pending.pop(task), task.result()))
            answered()

    try:
        for request in requests:
            if request.custom_id in journal.done:
                continue
            if request.fault is not None:
                journal.write(_record(request, None))
                answered()
                continue
            task = asyncio.ensure_future(answer(request.url, request.body))
            pending[task] = request
            if len(pending) >= window:
                await write_completed()
        while pending:
            await write_completed()
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _record(request: BatchRequest, reply: Reply | None) -> dict[str, Any]:
    """Return OpenAI's record of a reply; None stands for a line that is not a valid request."""
    error = None
    response = None
    if reply is None:
        error = {"code": "invalid_request", "message": request.fault}
    else:
        response = {
            "status_code": reply.status,
            "request_id": f"req_{uuid.uuid4().hex}",
            "body": reply.body,
        }
    return {
        "id": request.id,
        "custom_id": request.custom_id,
        "response": response,
        "error": error,
    }
