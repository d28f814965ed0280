"""The server as a Ray Serve application, with replicas.

Start it with `quickbeam serve --ray`, or with `serve run quickbeam.serve.ray:build replicas=2`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve

from quickbeam import hub
from quickbeam.batch.ray import CPUS, environment
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.llm import LLM
from quickbeam.serve.app import create_app
from quickbeam.serve.runner import Runner, name_of
from quickbeam.serve.server import prepare
from quickbeam.serve.settings import ServeSettings

HEALTH_PERIOD = 2.0  # seconds between checks of a replica's heartbeat
OWN = {"replicas", "threads", "cpus", "gpus", "warm", "settings"}  # arguments that `LLM` lacks


class Arguments(BaseModel):
    """The arguments of `build`. Values may also be given as text.

    `settings` holds arguments of `ServeSettings`, but not the address, which belongs to Ray.
    `replicas` is the number of replicas. `cpus` and `gpus` are what Ray reserves for each,
    `threads` is the number of threads that each computes with. `warm` is that of `prepare`. The
    other arguments are those of `LLM`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    method: str = "auto"
    dtype: str = "bfloat16"
    weights: str = "bfloat16"
    draft_weights: str = "bfloat16"
    memory: str | None = None
    device: str | None = None
    budget: int | None = None
    drafter: str | None = None
    vocab: str | None = None
    shortlist: int | None = None
    exact: bool | None = None
    kv_memory: str | None = None
    max_running: int = Field(32, ge=1)
    share_prefixes: bool = True
    trust_remote_code: bool = False
    replicas: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    cpus: float = Field(CPUS, ge=0)
    gpus: float = Field(0, ge=0)
    warm: bool = True
    settings: dict[str, Any] = {}


class Replica:
    """An engine with its server's application."""

    def __init__(self, options: dict[str, Any], settings: dict[str, Any], warm: bool) -> None:
        self.runner = Runner(ServeSettings(**settings))
        self.runner.attach(*prepare(lambda: LLM(**options), warm))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application. Ray calls this once the replica is made."""
        return create_app(self.runner)

    def check_health(self) -> None:
        """Raise if requests are not answered.

        Ray calls this regularly, and replaces a replica that raises.
        """
        if (ailment := self.runner.ailment) is not None:
            raise QuickbeamError(ailment)


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application, for `serve run`, `serve build` or `serve.run`.

    Raises `InvalidInput` for arguments that can't be used.
    """
    try:
        asked = Arguments.model_validate(args)
    except ValidationError as error:
        wrong = error.errors()[0]
        known = ", ".join(Arguments.model_fields)
        raise InvalidInput(
            f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}; known arguments: {known}"
        ) from error
    # Requests come through Ray's proxy, which may be reached under any name. This host turns off
    # the check of the Host header.
    address = {"host": "0.0.0.0", "served_name": name_of(asked.model or hub.DEFAULT)}
    try:
        settings = ServeSettings(**{**address, **asked.settings})
    except TypeError as error:
        raise InvalidInput(f"settings: {error}") from error
    deployment = serve.deployment(
        name="quickbeam",
        num_replicas=asked.replicas,
        ray_actor_options={
            "num_cpus": asked.cpus,
            "num_gpus": asked.gpus,
            "runtime_env": environment(asked.threads),
        },
        # beyond its limits the replica's own gate refuses requests
        max_ongoing_requests=asked.max_running + settings.max_waiting,
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        max_constructor_retry_count=2,
    )(serve.ingress()(Replica))
    return deployment.bind(asked.model_dump(exclude=OWN), {**address, **asked.settings}, asked.warm)


def run(
    settings: ServeSettings, options: dict[str, Any], ready: Callable[[], None] = lambda: None
) -> None:
    """Serve `build(options)` at the address of `settings` until Ctrl-C or SIGTERM.

    The replicas run on the cluster that `RAY_ADDRESS` names, or on this machine. `ready` is called
    once all of them answer. Raises `InvalidInput` if the application can't be started.
    """
    given = {name: value for name, value in asdict(settings).items() if name != "port"}
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    # set after ray.init, which sets a handler of its own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        serve.run(build(options | {"settings": given}), name="quickbeam")
        ready()
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        raise InvalidInput(
            f"Ray can't bring the server up: {str(error).strip().splitlines()[-1]}"
        ) from error
    finally:
        serve.shutdown()
        ray.shutdown()
