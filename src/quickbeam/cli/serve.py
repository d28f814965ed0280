"""`quickbeam serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quickbeam import hub
from quickbeam.cli.loading import Loading, Replicas
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams
from quickbeam.serve.settings import ServeSettings

if TYPE_CHECKING:
    from quickbeam.serve.runner import Runner

KEY = "QUICKBEAM_API_KEY"


def serve(
    loading: Loading,
    settings: ServeSettings,
    replicas: Replicas,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes/--no-share-prefixes",
            help="Share the computed beginning of prompts that begin alike.",
        ),
    ] = True,
    served_name: Annotated[
        list[str],
        typer.Option(
            "--served-name",
            metavar="NAME",
            help="What clients call the model. May be repeated, for other names.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="Answers made side by side.")
    ] = 32,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm/--no-warm", help="Measure costs and answer once before the first request."
        ),
    ] = True,
) -> None:
    """Serve a model over HTTP to OpenAI's clients; a page to try it is at /. Ctrl-C or SIGTERM
    finishes what is under way."""
    replicas.check(loading)
    if settings.default_temperature is not None:
        SamplingParams(temperature=settings.default_temperature)  # raises if it is not valid
    try:
        from quickbeam.serve import server
        from quickbeam.serve.runner import Runner, name_of
    except ImportError as error:
        raise InvalidInput(
            f"the server needs {error.name}: pip install 'quickbeam[serve]'"
        ) from error
    names = served_name or [name_of(loading.model or hub.DEFAULT)]
    settings = replace(
        settings,
        served_name=names[0],
        aliases=tuple(names[1:]),
        api_keys=(*settings.api_keys, *keys_of(os.environ.get(KEY, ""))),
    )
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if settings.log_prompts:
        logging.getLogger("quickbeam.serve").setLevel(logging.INFO)
    more = {"max_running": max_running, "share_prefixes": share_prefixes}
    if replicas.ray:
        on_ray(settings, {**loading.arguments(), **more, **asdict(replicas), "warm": warm})
        return
    runner = Runner(settings)
    server.run(
        runner,
        lambda: loading.load(**more),
        warm=warm,
        ready=lambda address: say(greeting(runner, address)),
    )


def on_ray(settings: ServeSettings, wanted: dict[str, Any]) -> None:
    """Serve with replicas until a signal ends it.

    Raises `InvalidInput` if the packages of the extras `ray` and `serve` are missing.
    """
    try:
        from quickbeam.serve.ray import run
    except ImportError as error:
        raise InvalidInput(
            f"--ray needs {error.name}: pip install 'quickbeam[ray,serve]'"
        ) from error
    del wanted["ray"]
    address = f"http://{settings.host}:{settings.port}"
    run(settings, wanted, lambda: say(f"{settings.served_name} at {address}, on Ray"))


def keys_of(text: str) -> list[str]:
    """Return the API keys in a comma-separated text."""
    return [key.strip() for key in text.split(",") if key.strip()]


def greeting(runner: Runner, address: str) -> str:
    """Return a text that says where the server is, what it serves, and how to send it a request."""
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": runner.name, "messages": messages, "temperature": 0})
    key = f' -H "Authorization: Bearer ${KEY}"' if runner.settings.api_keys else ""
    warning = (
        f"warning: everybody who can reach {runner.settings.host} may use it: add "
        f"--api-key, or set {KEY}\n"
    )
    return (
        f"{'' if key or runner.settings.loopback else warning}"
        f"{runner.name} at {address} (method {runner.llm.method}, kernels: "
        f"{runner.llm.describe()})\n"
        f"try it: curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d "
        f"{shlex.quote(body)}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
