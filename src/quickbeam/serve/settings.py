"""The settings of a server: where it listens, who may use it, and its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from ipaddress import ip_address

from quickbeam.config import parse_bytes
from quickbeam.errors import InvalidInput

COUNTS = ("max_waiting", "max_waiting_tokens", "max_prompt_tokens")
SECONDS = ("read_timeout", "queue_timeout", "keep_alive", "heartbeat_limit", "drain_timeout")


@dataclass(frozen=True)
class ServeSettings:
    """Where a server listens, who may use it, and its limits.

    Raises `InvalidInput` for values that can't be used.
    """

    host: str = field(default="127.0.0.1", metadata={"common": True})
    """Address to listen at. Default: only this machine can connect."""
    port: int = field(default=8000, metadata={"common": True})
    """Port to listen at; 0: any that is free."""
    served_name: str | None = field(default=None, metadata={"option": False})
    """What clients call the model. None: the name that it was loaded by."""
    aliases: tuple[str, ...] = field(default=(), metadata={"option": False})
    """Other names for it."""
    default_temperature: float | None = None
    """Temperature of requests that name none. Default: the model's own (generation_config), else
    1."""
    api_keys: tuple[str, ...] = field(default=(), metadata={"metavar": "KEY", "common": True})
    """Key that clients must send; any of several. QUICKBEAM_API_KEY (comma-separated) keeps keys
    out of `ps`. Without keys, everybody may use the server."""
    protect_metrics: bool = False
    """Ask for a key at /metrics, too."""
    cors_origins: tuple[str, ...] = field(default=(), metadata={"metavar": "URL"})
    """Let web pages of this origin send requests; *: those of any origin."""
    allowed_hosts: tuple[str, ...] = field(default=(), metadata={"metavar": "NAME"})
    """Another name that the server is reached by, say a proxy's. Names are checked only where it
    listens on this machine alone and asks for no key, which keeps out web pages whose own DNS name
    points to this machine."""
    max_waiting: int = 128
    """Answers that may wait beside the running ones; further requests get a 429."""
    max_waiting_tokens: int = 262_144
    """Most tokens of all waiting prompts together, estimated by length."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens. Default: what the model's context takes."""
    max_body: str = field(default="8MB", metadata={"metavar": "SIZE"})
    """Largest request, as in 8MB; larger ones get a 413."""
    read_timeout: float = field(default=20, metadata={"metavar": "SECONDS"})
    """How long a client may take to send a request's body; then it gets a 408. A connection is
    closed after as long without a request."""
    queue_timeout: float = field(default=60, metadata={"metavar": "SECONDS"})
    """How long a request may wait; then it gets a 503."""
    drain_timeout: float = field(default=30, metadata={"metavar": "SECONDS"})
    """How long answers under way may take when the server is told to end."""
    keep_alive: float = field(default=15, metadata={"option": False})
    """Seconds between comments in a stream that has nothing else to send."""
    heartbeat_limit: float = field(default=60, metadata={"metavar": "SECONDS"})
    """/health fails when the engine is silent for longer, so the longest step (a part of a long
    prompt, say) must be shorter."""
    log_prompts: bool = False
    """Write every prompt to the log."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port={self.port}: must be between 0 and 65535 (0: any free one)")
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name}={value}: must be at least 1")
        parse_bytes(self.max_body, "max_body")
        for name in SECONDS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise InvalidInput(f"{name}={value}: must be a number of seconds of at least 0")
        for model_name in (self.served_name, *self.aliases):
            if model_name is not None and not model_name.strip():
                raise InvalidInput(f"the model's name {model_name!r} is empty: give another")
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or key.split() != [key]:
                raise InvalidInput(
                    "an API key is empty or holds what a header can't carry: use letters and digits"
                )
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise InvalidInput(
                    f"CORS origin {origin!r}: must be * or begin with http:// or https://"
                )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
