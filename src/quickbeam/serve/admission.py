"""Admission control: which requests may wait for an answer. Used on one event loop.

The size of a request is estimated, so that refusing it costs nothing. A request that the engine has
started is never refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Hashable
from contextvars import ContextVar

from typing_extensions import Self

from quickbeam.config import ServerOptions
from quickbeam.errors import InvalidInput, QuickbeamError

BYTES_A_TOKEN = 4  # roughly, for English text
# seconds after which a client is told to ask again
SOON = 5
LATER = 60
# whose the request is that is answered; tenants take turns in the engine
TENANT: ContextVar[Hashable] = ContextVar("tenant", default=None)


class RetryableError(QuickbeamError):
    """A request that is refused for now. It may be sent again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Busy(RetryableError):
    """Too many answers or prompt tokens wait already."""

    status = 429
    code = "rate_limit_exceeded"


class Unavailable(RetryableError):
    """The server is starting or shutting down, or the request waited for too long."""

    status = 503
    code = "unavailable"


class Ticket:
    """The admission of one request: `choices` answers to prompts of about `tokens` tokens.

    The tokens count as waiting until the engine starts the first answer. Leaving the `with` block
    ends the answers that were not `taken`. For each that was taken, `begin` and then `end` must be
    called.
    """

    def __init__(self, gate: Gate, tokens: int, choices: int, tenant: Hashable) -> None:
        self.gate = gate
        self.tokens = tokens
        self.tenant = tenant
        self.entered = time.perf_counter()
        self.taken = 0
        self._choices = choices
        self._unfinished = choices

    def weigh(self, tokens: int) -> None:
        """Count `tokens` of the prompts while these wait. 0: the prompts wait no longer."""
        if self.tokens:
            self.gate.waiting_tokens += tokens - self.tokens
            self.tokens = tokens

    def begin(self) -> None:
        """Record that the engine has started an answer, or that it is over before that."""
        self.gate.waiting -= 1
        self.weigh(0)

    def end(self) -> None:
        """Record that an answer is over."""
        self._unfinished -= 1
        if not self._unfinished:
            self.weigh(0)
        self.gate.leave(self.tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(self._choices - self.taken):
            self.gate.waiting -= 1
            self.end()


class Gate:
    """Lets requests in or turns them away; an eighth of the queue is left to other tenants.

    - `max_running`: answers that the engine computes at a time.
    - `phase`: "starting", then "ready", then "draining".
    - `inside`: the number of answers that are not over.
    - `waiting`: those of them that the engine has not started.
    - `waiting_tokens`: the tokens of their prompts.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.max_running = 0
        self.phase = "starting"
        self.inside = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self._inside_by_tenant = Counter[Hashable]()
        self.empty = asyncio.Event()
        self.empty.set()

    def enter(self, tokens: int, choices: int = 1, tenant: Hashable = None) -> Ticket:
        """Let a request in, and return its ticket.

        Raises `Unavailable` if the server is not ready, `InvalidInput` for more answers than can
        ever be let in, and `Busy`. A prompt of more than `max_waiting_tokens` is let in if none is
        waiting.
        """
        self.check()
        max_inside = self.max_running + self.options.max_waiting
        if choices > max_inside:
            raise InvalidInput(
                f"{choices} answers in one request: this server takes at most {max_inside}; ask "
                "for fewer"
            )
        if self.inside + choices > max_inside:
            raise _busy(
                f"{self.waiting} requests wait for their turn, and {self.options.max_waiting} "
                f"may; this one asks for {choices}"
            )
        of_tenant = self._inside_by_tenant[tenant]
        max_of_tenant = max_inside - self.options.max_waiting // 8
        if tenant is not None and choices <= max_of_tenant < of_tenant + choices:
            raise _busy(
                f"{of_tenant} requests of this client are under way, and {max_of_tenant} may be; "
                f"this one asks for {choices}"
            )
        max_tokens = self.options.max_waiting_tokens
        if self.waiting_tokens and self.waiting_tokens + tokens > max_tokens:
            raise _busy(
                f"prompts of about {self.waiting_tokens} tokens wait for their turn, and "
                f"{max_tokens} may; this one has about {tokens}"
            )
        self.inside += choices
        self.waiting += choices
        self._inside_by_tenant[tenant] += choices
        self.waiting_tokens += tokens
        self.empty.clear()
        return Ticket(self, tokens, choices, tenant)

    def check(self) -> None:
        """Raise `Unavailable` if the server is not ready."""
        if self.phase == "starting":
            raise Unavailable("the server is starting: the model is being loaded", SOON)
        if self.phase == "draining":
            raise Unavailable(
                "the server is ending: it finishes what it has begun and takes nothing new", LATER
            )

    def leave(self, tenant: Hashable) -> None:
        """Count one answer of a tenant as over."""
        self.inside -= 1
        self._inside_by_tenant[tenant] -= 1
        if not self._inside_by_tenant[tenant]:
            del self._inside_by_tenant[tenant]
        if not self.inside:
            self.empty.set()


def _busy(why: str) -> Busy:
    return Busy(f"{why}: come back later", SOON)
