"""The server as a process: its socket, its signals, and loading a model while it listens."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus

from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.serve.app import create_app
from quickbeam.serve.fingerprint import fingerprint_of
from quickbeam.serve.runner import Runner

SHUTDOWN_SECONDS = 5  # to send responses after their answers are over
BACKLOG = 1024  # connections that the operating system may queue
WARM_UP = SamplingParams(max_tokens=16, ignore_eos=True)


def config(runner: Runner) -> uvicorn.Config:
    """Return how uvicorn serves a runner's application."""
    return uvicorn.Config(
        create_app(runner),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


class Server(uvicorn.Server):
    """A uvicorn server that drains after a first signal, and ends at once after a second one."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        # otherwise sse-starlette cancels open streams as soon as the server begins to end
        AppStatus.enable_automatic_graceful_drain = False
        super().__init__(config(runner))
        self._draining: Future[None] | None = None
        # connections without a request under way, with their last requests, since when
        self._idle: dict[Any, float] = {}

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None:
            os._exit(128 + sig)
        loop = asyncio.get_running_loop()  # this thread's, which the signal interrupts
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(), loop)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # each second
            self._close_idle()
        return await super().on_tick(counter) or not self.runner.alive

    def _close_idle(self) -> None:
        """Close connections on which no request has begun for `read_timeout` seconds."""
        now = time.monotonic()
        idle: dict[Any, float] = {}
        for connection in list[Any](self.server_state.connections):
            request = connection.cycle
            if request is None or request.response_complete:
                key = (connection, request)
                idle[key] = self._idle.get(key, now)
        self._idle = idle
        for (connection, _), since in idle.items():
            if now - since > self.runner.options.read_timeout:
                connection.transport.close()  # what it is still being sent comes to its end

    async def _drain(self) -> None:
        if not await self.runner.drain():
            await self.runner.close()
        self.should_exit = True


def run(
    runner: Runner, load: Callable[[], LLM], ready: Callable[[str], None] = lambda address: None
) -> None:
    """Serve until a signal ends the server; it listens already while `load` runs.

    `ready` is called with the server's address. Raises `InvalidInput` for an address that can't be
    used, what `load` raises, and `QuickbeamError` if the engine's thread ends by itself.
    """
    listener = listen(runner.options.host, runner.options.port)
    allow_connections()
    server = Server(runner)
    if not asyncio.run(serve(server, listener, lambda: prepare(load), ready)):
        os._exit(0)  # a thread is still loading the model, and it can't be stopped


async def serve(
    server: Server,
    listener: socket.socket,
    load: Callable[[], tuple[LLM, str]],
    ready: Callable[[str], None] = lambda address: None,
) -> bool:
    """Do the work of `run` on an event loop; `load` returns what `prepare` returns.

    Returns False if the server ended while `load` was running.
    """
    runner = server.runner
    serving = asyncio.create_task(server.serve([listener]))
    # in an executor of its own, as asyncio waits for the default one at its end
    loading = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), load)
    tasks: list[asyncio.Future[Any]] = [serving, loading]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        await serving
        return False
    if loading.exception() is None and not serving.done():
        runner.attach(*loading.result())
        if runner.unhealthy_reason is None:
            ready(url(listener))
    else:
        server.should_exit = True
    await serving
    loading.result()
    if not runner.alive:
        raise QuickbeamError("the engine's thread has ended, by a fault of quickbeam's")
    return True


def prepare(load: Callable[[], LLM]) -> tuple[LLM, str]:
    """Load a model and its drafter, measure its costs and answer once.

    Returns the model and its fingerprint.
    """
    llm = load()
    _ = llm.engine.budget
    _ = llm.methods  # loads the drafter, so that no request waits for that
    llm.generate("Hello", WARM_UP)
    llm.thread.call(llm.engine.forget)  # files of prefixes stay in use
    return llm, fingerprint_of(llm)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises `InvalidInput` if it can't be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidInput(
            f"can't listen at {host}, port {port} ({error.strerror}): give another --host or --port"
        ) from error


def allow_connections() -> None:
    """Have as many open files as the system allows, because each connection is one."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def url(listener: socket.socket) -> str:
    """Return the URL by which a browser on this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"
