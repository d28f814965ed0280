"""A served model: the gate in front of it, the engine's thread, and the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import anyio

from quickbeam import hub
from quickbeam.aio import AsyncLLM, AsyncStream, Closed
from quickbeam.config import ServerOptions
from quickbeam.engine.stream import Stream
from quickbeam.errors import InvalidInput
from quickbeam.grammar.spec import Grammar
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import LATER, SOON, Gate, Ticket, Unavailable
from quickbeam.serve.fingerprint import fingerprint_of, name_of
from quickbeam.serve.metrics import Metrics, RequestMetrics

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_LOGGED = 1000  # log lines about what answers go without


class Job(NamedTuple):
    """One answer to compute, with arguments of `AsyncLLM.stream`."""

    prompt: list[int]
    params: SamplingParams
    choice: int | None = None
    method: str | None = None
    budget: int | Literal["auto"] | None = None
    trace: bool = False
    skeletons: Sequence[str] = ()


class FairThread:
    """A thread for work that takes long, so that it holds up no other requests.

    Tenants take turns.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._locks = WeakValueDictionary[Hashable, asyncio.Lock]()

    async def run(self, tenant: Hashable, work: Callable[[], T]) -> T:
        """Return what `work` returns."""
        # of each tenant one piece of work waits for the thread, and the others for that one
        lock = self._locks.setdefault(tenant, asyncio.Lock())
        async with lock:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Runner:
    """Answers requests with one model, on one event loop; `starting` until it has an `llm`."""

    def __init__(self, options: ServerOptions, llm: LLM | None = None) -> None:
        self.options = options
        self.gate = Gate(options)
        self.started = int(time.time())
        loaded_name = name_of(hub.DEFAULT if llm is None else llm.name)
        self.names = options.served_names or (loaded_name,)
        self.name = self.names[0]
        self.fingerprint = ""
        # parameters of requests that don't give them
        self.defaults: dict[str, Any] = {"temperature": 1.0}
        self._aio: AsyncLLM | None = None
        self.under_way = dict[RequestMetrics, AsyncStream]()  # answers, kept until they are over
        self._compiling = FairThread("quickbeam-grammar")
        self._tokenising = FairThread("quickbeam-tokens")
        self.metrics = Metrics(self.name, self.gate)
        self._logged_ignored = set[str]()
        if llm is not None:
            self.attach(llm, fingerprint_of(llm))

    def attach(self, llm: LLM, fingerprint: str) -> None:
        """Begin to answer with `llm`, unless the server was told to end in the meantime."""
        self._aio = AsyncLLM(llm=llm)
        self.fingerprint = fingerprint
        self.defaults.update(llm.sampling_defaults)
        if self.options.default_temperature is not None:
            self.defaults["temperature"] = self.options.default_temperature
        logger.info("sampling of requests that don't say: %s", self.defaults)
        self.gate.max_running = llm.engine.scheduler.max_running
        self.metrics.watch(llm.engine, lambda: self.heartbeat)
        if self.gate.phase == "starting":
            self.gate.phase = "ready"

    def log_ignored(self, notes: str) -> None:
        """Log what an answer goes without.

        The same notes are logged once, as clients ask again and again. Each request may have notes
        of its own, so at most `MAX_LOGGED` lines are written.
        """
        if notes not in self._logged_ignored and len(self._logged_ignored) < MAX_LOGGED:
            self._logged_ignored.add(notes)
            logger.warning("left out of what a request asks for: %s", notes)

    @property
    def loaded(self) -> AsyncLLM:
        """The model's interface. Raises `Unavailable` if none is loaded yet."""
        if self._aio is None:
            self.gate.check()
        assert self._aio is not None
        return self._aio

    @property
    def llm(self) -> LLM:
        """The model. Raises `Unavailable` if none is loaded yet."""
        return self.loaded.llm

    async def compile_grammar(self, grammar: Grammar, ticket: Ticket) -> None:
        """Compile a grammar; tenants take turns. Raises `InvalidInput`, and `Unavailable`."""
        llm = self.llm
        with self.in_time(ticket):
            await self._compiling.run(ticket.tenant, lambda: llm.compile_grammar(grammar))

    async def tokenise(
        self, work: Callable[[], T], tokens: int, tenant: Hashable, images: bool = False
    ) -> T:
        """Return what `work` returns in a thread. It makes about `tokens` tokens of text.

        Longer texts than the context take seconds, and so may `images`: tenants take turns to have
        them read.
        """
        if not images and tokens <= self.llm.room(0):
            return await asyncio.to_thread(work)
        return await self._tokenising.run(tenant, work)

    @contextmanager
    def in_time(self, ticket: Ticket) -> Iterator[None]:
        """Raise `Unavailable` where a request waits for more than `queue_timeout`."""
        limit = self.options.queue_timeout
        waited = time.perf_counter() - ticket.entered
        try:
            with anyio.fail_after(max(limit - waited, 0.001)):
                yield
        except TimeoutError:
            raise Unavailable(
                f"the request has waited for {limit:g} seconds: come back later", SOON
            ) from None

    async def begin(self, jobs: Sequence[Job], ticket: Ticket) -> list[AsyncStream]:
        """Return the streams of the jobs' answers, as soon as the engine has started the first one.

        Raises `InvalidInput` for a job that is refused, `Unavailable` after `queue_timeout`, and
        what ended the first answer.
        """
        prompts = {id(job.prompt): job.prompt for job in jobs}.values()
        for ids in prompts:
            await self._check_prompt(ids)
        ticket.weigh(sum(len(ids) for ids in prompts))
        streams = list[AsyncStream]()
        try:
            for job in jobs:
                streams.append(await self._start(job, ticket))
            with self.in_time(ticket):
                await streams[0].begun()
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    async def _check_prompt(self, ids: list[int]) -> None:
        """Refuse a prompt that is too long for this server; log it where that is asked for."""
        limit = self.options.max_prompt_tokens
        if limit is not None and len(ids) > limit:
            raise InvalidInput(f"a prompt of {len(ids)} tokens: this server takes at most {limit}")
        if self.options.log_prompts:
            logger.info("prompt: %r", await asyncio.to_thread(self.llm.tokenizer.decode, ids))

    async def _start(self, job: Job, ticket: Ticket) -> AsyncStream:
        counting = RequestMetrics(self.metrics, job.params, len(job.prompt), ticket.entered)
        try:
            stream = await self.loaded.stream(
                job.prompt,
                job.params,
                choice=job.choice,
                method=job.method,
                budget=job.budget,
                trace=job.trace,
                skeletons=job.skeletons,
                observer=counting.step,
                tenant=ticket.tenant,
            )
        except Closed as error:
            why = self.unhealthy_reason or error
            raise Unavailable(f"the server can't answer: {why}", LATER) from error

        def over(answer: Stream) -> None:
            self.under_way.pop(counting, None)
            ticket.end()
            counting.over(answer.completion, answer.times)

        ticket.taken += 1
        self.under_way[counting] = stream
        stream.watch(ticket.begin, over)
        return stream

    @property
    def alive(self) -> bool:
        """False if the engine's thread has ended through an error of its own."""
        return self._aio is None or self._aio.llm.thread.alive

    @property
    def heartbeat(self) -> float:
        """Seconds since the engine's thread began its latest step; 0 while it is idle."""
        return 0.0 if self._aio is None else self._aio.llm.thread.seconds_since_step

    @property
    def unhealthy_reason(self) -> str | None:
        """Why requests are not answered; None if they are."""
        if self.gate.phase != "ready":
            return self.gate.phase
        if not self.alive:
            return "the engine's thread has ended"
        seconds_since_step = self.heartbeat
        limit = self.options.heartbeat_limit
        if seconds_since_step <= limit:
            return None
        return f"the engine has been silent for {seconds_since_step:.1f} s (limit {limit:g})"

    async def drain(self) -> bool:
        """Refuse new requests; return whether those under way finish in `drain_timeout` seconds."""
        self.gate.phase = "draining"
        with anyio.move_on_after(self.options.drain_timeout):
            await self.gate.empty.wait()
        return self.gate.empty.is_set()

    async def close(self) -> None:
        """End all answers under way, and the engine's thread."""
        self.gate.phase = "draining"
        self._compiling.close()
        self._tokenising.close()
        if self._aio is not None:
            await asyncio.to_thread(self._aio.close)
