"""The gate: who may wait for an answer. Knows neither HTTP nor models.

What a request weighs is guessed before anything is computed for it, so that turning it away costs
nothing. What the engine has taken up is never turned away. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from enum import Enum

from typing_extensions import Self

from quickbeam.errors import QuickbeamError
from quickbeam.serve.settings import ServeSettings

BYTES_A_TOKEN = 4  # about, of text in English
LONGEST_WAIT = 60  # seconds that a client is told to wait, at most
SEEN = 64  # requests of late whose rate says how long one will wait


class TurnedAway(QuickbeamError):
    """A request that may come again. `retry_after`: in so many seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Busy(TurnedAway):
    """Too many wait already (HTTP 429)."""


class Unavailable(TurnedAway):
    """The server is starting or ending, or the request has waited for too long (HTTP 503)."""


class Phase(str, Enum):
    starting = "starting"
    ready = "ready"
    draining = "draining"


class Place:
    """One answer's place: it waits, runs, and is over."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._waits = self._inside = True

    def begin(self) -> None:
        """The engine has taken it up."""
        if self._waits and self._inside:
            self._ticket.gate.began()
            self._ticket.lighten()
            self._stop_waiting()

    def end(self) -> None:
        """It is over, or will never be."""
        if self._inside:
            self._inside = False
            self._stop_waiting()
            self._ticket.left()

    def _stop_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._ticket.gate.waiting -= 1


class Ticket:
    """One request's: `choices` answers to prompts of about `tokens` tokens, which count as waiting
    until the first answer is taken up. Leaving its `with` block ends what was not handed on by
    `place`."""

    def __init__(self, gate: Gate, tokens: int, choices: int) -> None:
        self.gate, self.tokens = gate, tokens
        self.entered = time.perf_counter()
        self._free = [Place(self) for _ in range(choices)]
        self._inside = choices  # places that are not over

    def place(self) -> Place:
        """One of its places; whoever takes it ends it. Raises `IndexError` for more answers than
        were asked for."""
        return self._free.pop()

    def weigh(self, tokens: int) -> None:
        """How many tokens its prompts really have."""
        if self.tokens:
            self.gate.waiting_tokens += tokens - self.tokens
            self.tokens = tokens

    def lighten(self) -> None:
        """Its prompts wait no longer."""
        self.gate.waiting_tokens -= self.tokens
        self.tokens = 0

    def left(self) -> None:
        """One of its answers is over."""
        self._inside -= 1
        if not self._inside:
            self.lighten()
        self.gate.left()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._free:
            self._free.pop().end()


class Gate:
    """Lets requests in. `phase` says whether any may come; `places`: how many answers the engine
    makes side by side.

    `inside`: answers that are not over; `waiting`: those of them that the engine has not taken up;
    `waiting_tokens`: of their prompts.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.phase, self.places = settings, Phase.starting, 0
        self.inside = self.waiting = self.waiting_tokens = 0
        self._began = deque[float](maxlen=SEEN)
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self, tokens: int, choices: int = 1) -> Ticket:
        """Raises `Unavailable` where the server is not ready, `Busy` where too much waits already.

        A prompt that is longer than all that may wait is let in where no other waits: its turn
        would never come otherwise.
        """
        self.check()
        settings = self.settings
        if self.inside + choices > self.places + settings.max_waiting:
            raise Busy(
                f"{self.waiting} requests wait for their turn, and {settings.max_waiting} may; "
                f"this one asks for {choices}: "
                "come back later",
                self.retry_after(choices),
            )
        if self.waiting_tokens and self.waiting_tokens + tokens > settings.max_waiting_tokens:
            raise Busy(
                f"prompts of about {self.waiting_tokens} tokens wait for their turn, and "
                f"{settings.max_waiting_tokens} may; "
                f"this one has about {tokens}: come back later",
                self.retry_after(choices),
            )
        self.inside += choices
        self.waiting += choices
        self.waiting_tokens += tokens
        self._empty.clear()
        return Ticket(self, tokens, choices)

    def check(self) -> None:
        """Raise `Unavailable` where the server is not ready."""
        if self.phase is Phase.starting:
            raise Unavailable("the server is starting: the model is being loaded", 5)
        if self.phase is Phase.draining:
            raise Unavailable(
                "the server is ending: it finishes what it has begun and takes nothing new",
                LONGEST_WAIT,
            )

    def retry_after(self, choices: int = 1) -> int:
        """Seconds until as many answers as wait now will have been taken up, by the rate of
        late."""
        now = time.perf_counter()
        recent = [at for at in self._began if now - at < LONGEST_WAIT]
        if len(recent) < 2:
            return 1
        pace = (now - recent[0]) / (len(recent) - 1)
        return max(
            1,
            min(
                LONGEST_WAIT,
                math.ceil(pace * min(self.waiting + choices, self.settings.max_waiting)),
            ),
        )

    def began(self) -> None:
        """An answer was taken up."""
        self._began.append(time.perf_counter())

    def left(self) -> None:
        """An answer is over."""
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    async def emptied(self) -> None:
        """Wait until all answers are over."""
        await self._empty.wait()
