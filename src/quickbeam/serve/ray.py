"""The server as a Ray Serve application, with replicas: `serve run quickbeam.serve.ray:build`."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from quickbeam import hub
from quickbeam.config import LLMOptions, ReplicaOptions, ServerOptions
from quickbeam.errors import InvalidInput
from quickbeam.serve.actors import connect, environment, reason_of
from quickbeam.serve.fingerprint import name_of
from quickbeam.serve.replicas import Front, PrefixRouter, Replica

REPLICAS_A_FRONT = 4  # a front, one process, passes on some 1,000 events a second
HEALTH_PERIOD = 2.0  # seconds between checks of a replica's heartbeat


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
    """Return the application of a model's replicas and the fronts before them."""
    names = server.served_names or (name_of(options.source or hub.DEFAULT),)
    server = replace(server, served_names=names)
    # beyond its limits the replica's own gate refuses requests
    most_requests = options.max_running + server.max_waiting
    replica = serve.deployment(
        name="replica",
        num_replicas=replicas.replicas,
        ray_actor_options={
            "num_cpus": replicas.cpus,
            "num_gpus": replicas.gpus,
            "runtime_env": environment(replicas.threads),
        },
        max_ongoing_requests=most_requests,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"max_running": options.max_running},
        ),
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_timeout_s=server.drain_timeout,
        max_constructor_retry_count=2,
    )(Replica)
    front = serve.deployment(
        name="front",
        num_replicas=math.ceil(replicas.replicas / REPLICAS_A_FRONT),
        ray_actor_options={"num_cpus": 0, "runtime_env": environment(1)},
        max_ongoing_requests=replicas.replicas * most_requests,
        graceful_shutdown_timeout_s=server.drain_timeout,
    )(serve.ingress()(Front))
    return front.bind(replica.bind(vars(options), server), server)


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
