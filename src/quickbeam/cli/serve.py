"""`quickbeam serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from quickbeam import hub
from quickbeam.cli.common import say
from quickbeam.cli.fields import split
from quickbeam.cli.loading import Loading, Replicas, needs
from quickbeam.params import SamplingParams
from quickbeam.serve.settings import ServeSettings

if TYPE_CHECKING:
    from quickbeam.serve.runner import Runner

KEY = "QUICKBEAM_API_KEY"


@dataclass(frozen=True)
class Served:
    """What is served, and how it starts."""

    served_name: Sequence[str] = field(default=(), metadata={"metavar": "NAME"})
    """What clients call the model, and other names for it."""
    share_prefixes: bool = True
    """Share the computed beginning of prompts that begin alike."""
    warm: bool = True
    """Measure costs and answer once before the first request."""


def serve(loading: Loading, settings: ServeSettings, replicas: Replicas, given: Served) -> None:
    """Serve a model over HTTP to OpenAI's clients; a page to try it is at /. Ctrl-C or SIGTERM
    finishes what is under way."""
    replicas.check(loading)
    if settings.default_temperature is not None:
        SamplingParams(temperature=settings.default_temperature)  # raises if it is not valid
    with needs("serve", "the server"):
        from quickbeam.serve import server
        from quickbeam.serve.runner import Runner, name_of
    name, *aliases = given.served_name or [name_of(loading.model or hub.DEFAULT)]
    keys = (*settings.api_keys, *split(os.environ.get(KEY, "")))
    settings = replace(settings, served_name=name, aliases=tuple(aliases), api_keys=keys)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form)
    if settings.log_prompts:
        logging.getLogger("quickbeam.serve").setLevel(logging.INFO)
    more = {"max_running": replicas.max_running, "share_prefixes": given.share_prefixes}
    if replicas.ray:
        with needs("ray,serve", "--ray"):
            from quickbeam.serve.ray import run
        wanted = {**loading.arguments(), **more, **asdict(replicas), "warm": given.warm}
        del wanted["ray"]
        said = f"{name} at http://{settings.host}:{settings.port}, on Ray"
        return run(settings, wanted, lambda: say(said))
    runner = Runner(settings)
    server.run(
        runner,
        lambda: loading.load(**more),
        warm=given.warm,
        ready=lambda address: say(greeting(runner, address)),
    )


def greeting(runner: Runner, address: str) -> str:
    """Return a text that says where the server is, what it serves, and how to send it a request."""
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": runner.name, "messages": messages, "temperature": 0})
    key = f' -H "Authorization: Bearer ${KEY}"' if runner.settings.api_keys else ""
    host, llm = runner.settings.host, runner.llm
    warning = f"warning: everybody who can reach {host} may use it: add --api-key, or set {KEY}\n"
    return (
        f"{'' if key or runner.settings.loopback else warning}"
        f"{runner.name} at {address} (method {llm.method}, kernels: {llm.describe()})\n"
        f"try it: curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d "
        f"{shlex.quote(body)}"
    )
