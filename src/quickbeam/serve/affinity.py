"""Which replica keeps the prefix of a request: of one conversation always the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import sha256
from typing import Any

from pydantic_core import from_json, to_json

HEAD = 1 << 17  # bytes of a body that are read for its first words
FIRST_WORDS = 1 << 10  # bytes of a conversation's first words, or of a prompt, that name it


def conversation_key(tenant: Hashable, body: bytes) -> str:
    """Return a name for the conversation that a request goes on with; "" if it has none.

    `body` is the request's JSON. Requests of one tenant have the same name if their first user
    messages, or prompts, begin with the same `FIRST_WORDS` bytes. What stands before the first user
    message has no say: conversations with the same system prompt have different names, so that they
    spread over the replicas. Only the body's first `HEAD` bytes are read.
    """
    try:
        request = from_json(body[:HEAD], allow_partial="trailing-strings")
    except ValueError:
        return ""
    first_words = _first_words(request)
    if first_words is None:
        return ""
    digest = sha256(repr(tenant).encode())
    digest.update(to_json(first_words)[:FIRST_WORDS])
    return digest.hexdigest()


def _first_words(request: Any) -> Any:
    """Return the prompt of a request, or its first user message; None if it has neither."""
    if not isinstance(request, dict):
        return None
    for name in ("prompt", "messages", "input"):
        value = request.get(name)
        if value:
            return _first_user_message(value)
    return None


def _first_user_message(value: Any) -> Any:
    """Return the first user message of a list of messages; other values as they are."""
    if not isinstance(value, list) or not isinstance(value[0], dict):
        return value
    from_user = (message for message in value if message.get("role") == "user")
    return next(from_user, None)


def ranked(key: str, replicas: Iterable[str]) -> list[str]:
    """Return the names of replicas, that of the conversation `key` first.

    This is rendezvous hashing (Thaler and Ravishankar 1998): each pair of a key and a name has a
    hash, and the smallest is first. Where a replica goes, only its own conversations move.
    """
    return sorted(replicas, key=lambda name: sha256(f"{key} {name}".encode()).digest())
