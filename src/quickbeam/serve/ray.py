"""The server as a Ray Serve application, with replicas: `quickbeam serve --ray`, or `serve run
quickbeam.serve.ray:build replicas=2`."""

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

HEALTH_PERIOD = 2.0  # seconds between looks at a replica's heartbeat
OWN = {"replicas", "threads", "cpus", "gpus", "warm", "settings"}  # arguments that are not of `LLM`


class Arguments(BaseModel):
    """What `build` takes, as text too. `settings`: of `ServeSettings`, the address apart, which is
    Ray's. The rest is of `LLM`.

    `cpus` and `gpus` are what Ray counts for a replica, `threads` what it computes with.
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
    """An engine and its server's application."""

    def __init__(self, options: dict[str, Any], settings: dict[str, Any], warm: bool) -> None:
        self.runner = Runner(ServeSettings(**settings))
        self.runner.attach(*prepare(lambda: LLM(**options), warm))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Asked by Ray once the replica is made."""
        return create_app(self.runner)

    def check_health(self) -> None:
        """Asked by Ray now and then; a replica that raises is replaced."""
        if (ailment := self.runner.ailment) is not None:
            raise QuickbeamError(ailment)


def build(args: dict[str, Any]) -> serve.Application:
    """The application, for `serve run`, `serve build` or `serve.run`. Raises `InvalidInput` for
    arguments that can't be used."""
    try:
        asked = Arguments.model_validate(args)
    except ValidationError as error:
        wrong = error.errors()[0]
        known = ", ".join(Arguments.model_fields)
        raise InvalidInput(
            f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}; known arguments: {known}"
        ) from error
    # Requests come by Ray's proxy, whatever name that is reached by.
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
        # the replica's own gate says what is too much
        max_ongoing_requests=asked.max_running + settings.max_waiting,
        health_check_period_s=HEALTH_PERIOD,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        max_constructor_retry_count=2,
    )(serve.ingress()(Replica))
    return deployment.bind(asked.model_dump(exclude=OWN), {**address, **asked.settings}, asked.warm)


def run(
    settings: ServeSettings, options: dict[str, Any], ready: Callable[[], None] = lambda: None
) -> None:
    """Serve `build(options)` at the address of `settings` until Ctrl-C or SIGTERM. `ready` is
    called once all replicas answer. They run on the cluster that `RAY_ADDRESS` names, or on this
    machine. Raises `InvalidInput` where the application can't be brought up."""
    given = {name: value for name, value in asdict(settings).items() if name != "port"}
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    # after Ray, which has a handler of its own
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
