"""The server as a Ray Serve application, with replicas: `serve run quickbeam.serve.ray:build`."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from starlette.applications import Starlette

from quickbeam import hub
from quickbeam.config import LLMOptions, ReplicaOptions, ServerOptions
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve.actors import connect, environment, reason_of
from quickbeam.serve.app import create_app
from quickbeam.serve.fingerprint import name_of
from quickbeam.serve.runner import Runner
from quickbeam.serve.server import prepare

HEALTH_PERIOD = 2.0  # seconds between checks of a replica's heartbeat


class Replica:
    """An engine with its server's application."""

    def __init__(self, options: dict[str, Any], server: ServerOptions) -> None:
        self.runner = Runner(server)
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

    `args` are the fields of `LLMOptions` and `ReplicaOptions`, which may be text, and `settings`:
    the fields of `ServerOptions` without the address. Raises `InvalidInput` for arguments that
    can't be used.
    """
    # Requests come through Ray's proxy, which may be reached under any name. This host turns off
    # the check of the Host header.
    server: dict[str, Any] = {"host": "0.0.0.0"}
    model, replicas = dict[str, Any](), dict[str, Any]()
    groups = dict.fromkeys(LLMOptions.__dataclass_fields__, model)
    groups |= dict.fromkeys(ReplicaOptions.__dataclass_fields__, replicas)
    for name, text in args.items():
        value = _json_value(text)
        if name == "settings":
            server.update(value)
        elif name in groups:
            groups[name][name] = value
        else:
            names = ", ".join([*groups, "settings"])
            raise InvalidInput(f"unknown argument {name!r}; names: {names}")
    try:
        server_options = ServerOptions(**server)
    except TypeError as error:
        raise InvalidInput(f"settings: {error}") from error
    return application(LLMOptions(**model), server_options, ReplicaOptions(**replicas))


def application(
    options: LLMOptions, server: ServerOptions, replicas: ReplicaOptions
) -> serve.Application:
    """Return the application of a model's replicas."""
    names = server.served_names or (name_of(options.source or hub.DEFAULT),)
    deployment = serve.deployment(
        name="quickbeam",
        num_replicas=replicas.replicas,
        ray_actor_options={
            "num_cpus": replicas.cpus,
            "num_gpus": replicas.gpus,
            "runtime_env": environment(replicas.threads),
        },
        # beyond its limits the replica's own gate refuses requests
        max_ongoing_requests=options.max_running + server.max_waiting,
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_timeout_s=server.drain_timeout,
        max_constructor_retry_count=2,
    )(serve.ingress()(Replica))
    return deployment.bind(vars(options), replace(server, served_names=names))


def _json_value(value: Any) -> Any:
    """Return what a text stands for in JSON, such as a number; other texts as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def run(
    options: LLMOptions,
    server: ServerOptions,
    replicas: ReplicaOptions,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve `application` at the address of `server` until Ctrl-C or SIGTERM.

    Runs on the cluster that `RAY_ADDRESS` names, or here. Raises `InvalidInput` if it can't.
    """
    connect()
    # set after that, as Ray sets a handler of its own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(http_options={"host": server.host, "port": server.port})
        serve.run(application(options, server, replicas), name="quickbeam")
        ready()
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        raise InvalidInput(f"Ray can't bring the server up: {reason_of(error)}") from error
    finally:
        serve.shutdown()
        ray.shutdown()
