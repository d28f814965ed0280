"""`quickbeam serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quickbeam import hub
from quickbeam.cli import options
from quickbeam.cli.common import load
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.serve.runner import Runner
    from quickbeam.serve.settings import ServeSettings

KEY = "QUICKBEAM_API_KEY"


def serve(
    model: options.Model = None,
    method: options.Method = "auto",
    budget: options.Budget = None,
    drafter: options.Drafter = None,
    vocab: options.Vocab = None,
    shortlist: options.Shortlist = None,
    exact: options.Exact = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    weights: options.Weights = options.WeightsKind.bfloat16,
    draft_weights: options.DraftWeights = options.WeightsKind.bfloat16,
    memory: options.Memory = None,
    device: options.DeviceOption = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_memory: options.KVMemory = None,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes/--no-share-prefixes",
            help="Share the computed beginning of prompts that begin alike.",
        ),
    ] = True,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to listen at. Default: only this machine can connect."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port to listen at; 0: any that is free.")
    ] = 8000,
    served_name: Annotated[
        list[str],
        typer.Option(
            "--served-name",
            metavar="NAME",
            help="What clients call the model. May be repeated, for other names.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    default_temperature: Annotated[
        float | None,
        typer.Option(
            "--default-temperature",
            help="Temperature of requests that name none. Default: 1, as OpenAI's.",
        ),
    ] = None,
    api_key: Annotated[
        list[str],
        typer.Option(
            "--api-key",
            metavar="KEY",
            help=f"Clients must send this key. May be repeated. {KEY} "
            "(comma-separated) keeps keys out of `ps`.",
        ),
    ] = [],  # noqa: B006
    protect_metrics: Annotated[
        bool, typer.Option("--protect-metrics", help="/metrics needs a key, too.")
    ] = False,
    cors_origin: Annotated[
        list[str],
        typer.Option(
            "--cors-origin",
            metavar="URL",
            help="Let web pages of this origin send requests. May be repeated; *: of any.",
        ),
    ] = [],  # noqa: B006
    allowed_host: Annotated[
        list[str],
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Another name that a server on this machine is reached by, say a proxy's. May be "
            "repeated.",
        ),
    ] = [],  # noqa: B006
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="Answers made side by side.")
    ] = 32,
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting",
            help="Requests that may wait beside the running ones; further ones get a 429.",
        ),
    ] = 128,
    max_waiting_tokens: Annotated[
        int,
        typer.Option(
            "--max-waiting-tokens", help="Most tokens of all waiting prompts, estimated by length."
        ),
    ] = 262_144,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-tokens", help="Longest prompt. Default: what the model's context takes."
        ),
    ] = None,
    max_body: Annotated[
        str,
        typer.Option(
            "--max-body", metavar="SIZE", help="Largest request, as in 8MB; larger ones get a 413."
        ),
    ] = "8MB",
    queue_timeout: Annotated[
        float,
        typer.Option(
            "--queue-timeout",
            metavar="SECONDS",
            help="How long a request may wait; then it gets a 503.",
        ),
    ] = 60,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            metavar="SECONDS",
            help="How long answers under way may take when the server is told to end.",
        ),
    ] = 30,
    heartbeat_limit: Annotated[
        float,
        typer.Option(
            "--heartbeat-limit",
            metavar="SECONDS",
            help="/health fails when the engine is silent for longer.",
        ),
    ] = 60,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write every prompt to stderr.")
    ] = False,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm/--no-warm", help="Measure costs and answer once before the first request."
        ),
    ] = True,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Serve by replicas of the model on Ray, on this machine or a cluster."
        ),
    ] = False,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="With --ray: how many.")] = 1,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="With --ray: of each replica.")
    ] = 1,
) -> None:
    """Serve a model over HTTP to OpenAI's clients; a page to try it is at /. Ctrl-C or SIGTERM
    finishes what is under way."""
    if replicas > 1 and not ray:
        raise InvalidInput(f"--replicas {replicas}: they run on Ray; add --ray")
    try:
        from quickbeam.serve import server
        from quickbeam.serve.runner import Runner, name_of
        from quickbeam.serve.settings import ServeSettings
        from quickbeam.target.memory import parse_bytes
    except ImportError as error:
        raise InvalidInput(
            f"the server needs {error.name}: pip install 'quickbeam[serve]'"
        ) from error
    if default_temperature is not None:
        SamplingParams(temperature=default_temperature)  # raises if it is not valid
    nodes, names = options.nodes(budget), served_name or [name_of(model or hub.DEFAULT)]
    settings = ServeSettings(
        host=host,
        port=port,
        served_name=names[0],
        aliases=tuple(names[1:]),
        default_temperature=default_temperature,
        api_keys=(*api_key, *keys_of(os.environ.get(KEY, ""))),
        protect_metrics=protect_metrics,
        cors_origins=tuple(cors_origin),
        allowed_hosts=tuple(allowed_host),
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_body_bytes=parse_bytes(max_body),
        queue_timeout=queue_timeout,
        drain_timeout=drain_timeout,
        heartbeat_limit=heartbeat_limit,
        log_prompts=log_prompts,
    )
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if log_prompts:
        logging.getLogger("quickbeam.serve").setLevel(logging.INFO)

    wanted: dict[str, Any] = {
        "model": model,
        "method": method,
        "dtype": dtype,
        "weights": weights,
        "draft_weights": draft_weights.value,
        "memory": memory,
        "device": device,
        "budget": nodes,
        "exact": exact,
        "drafter": drafter,
        "vocab": vocab,
        "shortlist": shortlist,
        "trust_remote_code": trust_remote_code,
        "kv_memory": kv_memory,
        "max_running": max_running,
        "share_prefixes": share_prefixes,
    }
    if ray:
        on_ray(settings, wanted | {"replicas": replicas, "threads": threads, "warm": warm})
        return
    runner = Runner(settings)
    server.run(
        runner,
        lambda: load(**wanted),
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
    place = wanted["device"].value if wanted["device"] else None
    address = f"http://{settings.host}:{settings.port}"
    run(
        settings,
        wanted
        | {"dtype": wanted["dtype"].value, "weights": wanted["weights"].value, "device": place},
        lambda: say(f"{settings.served_name} at {address}, on Ray"),
    )


def keys_of(text: str) -> list[str]:
    """Return the API keys in a comma-separated text."""
    return [key.strip() for key in text.split(",") if key.strip()]


def greeting(runner: Runner, address: str) -> str:
    """Return a text that says where the server is, what it serves, and how to send it a request."""
    body = json.dumps({"model": runner.name, "messages": [{"role": "user", "content": "Hello"}]})
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
