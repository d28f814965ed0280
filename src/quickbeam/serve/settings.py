"""The settings of a server: where it listens, who may use it, and its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from ipaddress import ip_address

from quickbeam.errors import InvalidInput


@dataclass(frozen=True)
class ServeSettings:
    """Settings of a server. Raises `InvalidInput` for values that can't be used.

    `served_name` is what clients call the model; None means the name that it was loaded by.
    `aliases` are other names for it. `default_temperature` is for requests that give none; None
    means 1, as in OpenAI's API.

    Each of the `api_keys` gives access to the API; without keys everybody may use it. With
    `protect_metrics`, `/metrics` needs a key, too. `cors_origins` are the origins whose web pages
    may send requests from a browser. `allowed_hosts` are names, beside `host`, that the server may
    be reached by. They are checked only if the server listens on this machine alone and asks for no
    key. This check keeps out web pages whose own DNS name points to this machine.

    `max_waiting` is the number of answers that may wait beside those that the engine is computing;
    a request for `n` answers counts as `n`. `max_waiting_tokens` limits the tokens of the prompts
    that wait. `max_prompt_tokens` limits one prompt; None means what the model's context allows.
    `max_body_bytes` limits a request's body.

    Times are in seconds. A request that the engine has not started after `queue_timeout` is
    refused. `drain_timeout` is the time for answers under way when the server is told to end.
    `keep_alive` is the time between comments in a stream that has nothing else to send. An engine
    that is silent for longer than `heartbeat_limit` counts as unhealthy, so the longest step (a
    part of a long prompt, say) must be shorter than this.

    `log_prompts` writes every prompt to the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    aliases: tuple[str, ...] = ()
    default_temperature: float | None = None
    api_keys: tuple[str, ...] = ()
    protect_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_waiting: int = 128
    max_waiting_tokens: int = 262_144
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 8 * 2**20
    queue_timeout: float = 60.0
    drain_timeout: float = 30.0
    keep_alive: float = 15.0
    heartbeat_limit: float = 60.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput(
                f"port={self.port}: must be between 0 and 65535 (0: any that is free)"
            )
        for name in ("max_waiting", "max_waiting_tokens", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise InvalidInput(f"max_prompt_tokens={self.max_prompt_tokens}: must be at least 1")
        for name in ("queue_timeout", "keep_alive", "heartbeat_limit"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidInput(
                    f"{name}={getattr(self, name)}: must be a number of seconds above 0"
                )
        if not (math.isfinite(self.drain_timeout) and self.drain_timeout >= 0):
            raise InvalidInput(
                f"drain_timeout={self.drain_timeout}: must be a number of seconds of at least 0"
            )
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise InvalidInput(
                    "an API key is empty or holds what a header can't carry: use "
                    "letters, digits and signs"
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
