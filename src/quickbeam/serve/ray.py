"""The server as a Ray Serve application, with replicas: `serve run quickbeam.serve.ray:build`."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from inspect import signature
from typing import Any

import ray
from ray import serve
from starlette.applications import Starlette

from quickbeam import hub
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve.actors import CPUS, connect, environment, reason_of
from quickbeam.serve.app import create_app
from quickbeam.serve.fingerprint import name_of
from quickbeam.serve.runner import Runner
from quickbeam.serve.server import prepare
from quickbeam.serve.settings import ServeSettings

HEALTH_PERIOD = 2.0  # seconds between checks of a replica's heartbeat
# the arguments that `LLM` lacks, with their defaults
SERVER_DEFAULTS: dict[str, Any] = {
    "replicas": 1,
    "threads": 1,
    "cpus": CPUS,
    "gpus": 0,
    "settings": {},
}


class Replica:
    """An engine with its server's application."""

    def __init__(self, options: dict[str, Any], settings: dict[str, Any]) -> None:
        self.runner = Runner(ServeSettings(**settings))
        self.runner.attach(*prepare(lambda: LLM(**options)))

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application. Ray calls this once the replica is made."""
        return create_app(self.runner)

    def check_health(self) -> None:
        """Raise if requests are not answered; Ray then replaces the replica."""
        unhealthy_reason = self.runner.unhealthy_reason
        if unhealthy_reason is not None:
            raise QuickbeamError(unhealthy_reason)


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application, for `serve run`, `serve build` or `serve.run`.

    `args` are those of `LLM` and `SERVER_DEFAULTS`, which may be text: `settings` are those of
    `ServeSettings` without the address, `cpus` and `gpus` what Ray reserves for each replica,
    `threads` what it computes with. Raises `InvalidInput` for arguments that can't be used.
    """
    options = {name: param.default for name, param in signature(LLM).parameters.items()}
    options.update(SERVER_DEFAULTS)
    if unknown := sorted(args.keys() - options.keys()):
        raise InvalidInput(f"unknown argument {unknown[0]!r}; known: {', '.join(options)}")
    for name, value in args.items():
        options[name] = _json_value(value)
    for name in ("replicas", "threads", "max_running"):
        if not isinstance(options[name], int) or options[name] < 1:
            raise InvalidInput(f"{name}={options[name]!r}: must be a number of at least 1")
    server = {name: options.pop(name) for name in SERVER_DEFAULTS}
    # Requests come through Ray's proxy, which may be reached under any name. This host turns off
    # the check of the Host header.
    fields = {
        "host": "0.0.0.0",
        "served_name": name_of(options["model"] or hub.DEFAULT),
        **server["settings"],
    }
    try:
        settings = ServeSettings(**fields)
    except TypeError as error:
        raise InvalidInput(f"settings: {error}") from error
    deployment = serve.deployment(
        name="quickbeam",
        num_replicas=server["replicas"],
        ray_actor_options={
            "num_cpus": server["cpus"],
            "num_gpus": server["gpus"],
            "runtime_env": environment(server["threads"]),
        },
        # beyond its limits the replica's own gate refuses requests
        max_ongoing_requests=options["max_running"] + settings.max_waiting,
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        max_constructor_retry_count=2,
    )(serve.ingress()(Replica))
    return deployment.bind(options, fields)


def _json_value(value: Any) -> Any:
    """Return what a text stands for in JSON, such as a number; other texts as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def run(
    settings: ServeSettings, options: dict[str, Any], ready: Callable[[], None] = lambda: None
) -> None:
    """Serve `build(options)` at the address of `settings` until Ctrl-C or SIGTERM.

    Runs on the cluster that `RAY_ADDRESS` names, or here. Raises `InvalidInput` if it can't.
    """
    fields = asdict(settings)
    del fields["port"]
    connect()
    # set after that, as Ray sets a handler of its own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        serve.run(build({**options, "settings": fields}), name="quickbeam")
        ready()
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        raise InvalidInput(f"Ray can't bring the server up: {reason_of(error)}") from error
    finally:
        serve.shutdown()
        ray.shutdown()
