"""A served model: the gate in front of it, the engine's thread, the metrics; and answers while they
are computed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import anyio
from huggingface_hub import snapshot_download
from typing_extensions import Self

from quickbeam import __version__, hub
from quickbeam.aio import AsyncLLM, AsyncStream, Closed
from quickbeam.engine.result import Completion
from quickbeam.engine.stream import Delta, Stream
from quickbeam.errors import InvalidInput
from quickbeam.grammar.spec import Grammar
from quickbeam.hub.cache import cache_folder, file_key, split_files
from quickbeam.llm import LLM
from quickbeam.models.weights.adapters import base_of
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import LATER, SOON, Gate, Ticket, Unavailable
from quickbeam.serve.errors import Interrupted, problem
from quickbeam.serve.metrics import Metrics, RequestMetrics
from quickbeam.serve.settings import ServeSettings

logger = logging.getLogger(__name__)
Json = dict[str, Any]
Part = tuple[int, Delta | None]
T = TypeVar("T")
# suffixes of files that answers depend on
DECIDES = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja")
BLOCK = 2**20  # bytes read at once
MOST_LOGGED = 1000  # log lines about what answers go without


class Job(NamedTuple):
    """One answer to compute. `options`: of `AsyncLLM.stream`."""

    prompt: list[int]
    params: SamplingParams
    options: Json


class TurnsThread:
    """A thread for what takes long, so that the others begin answers. Tenants take turns."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turns = WeakValueDictionary[Hashable, asyncio.Lock]()

    async def run(self, tenant: Hashable, work: Callable[[], T]) -> T:
        """Return what `work` returns."""
        # of each tenant one piece of work waits for the thread, and the others for that one
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Runner:
    """Answers requests with one model, on one event loop; `starting` until it has an `llm`."""

    def __init__(self, settings: ServeSettings, llm: LLM | None = None) -> None:
        self.settings, self.gate, self.started = settings, Gate(settings), int(time.time())
        self.name = settings.served_name or name_of(hub.DEFAULT if llm is None else llm.name)
        self.names = (self.name, *settings.aliases)
        self.fingerprint = ""
        # parameters of requests that don't give them
        self.defaults: dict[str, Any] = {"temperature": 1.0}
        self._aio: AsyncLLM | None = None
        self.under_way = dict[RequestMetrics, AsyncStream]()  # answers, kept until they are over
        self._compiling = TurnsThread("quickbeam-grammar")
        self._tokenising = TurnsThread("quickbeam-tokens")
        self.metrics = Metrics(self.name, self.gate)
        self._logged_ignored = set[str]()
        if llm is not None:
            self.attach(llm, fingerprint_of(llm))

    def attach(self, llm: LLM, fingerprint: str) -> None:
        """Begin to answer with `llm`, unless the server was told to end in the meantime."""
        self._aio, self.fingerprint = AsyncLLM(llm=llm), fingerprint
        self.defaults.update(llm.sampling_defaults)
        if self.settings.default_temperature is not None:
            self.defaults["temperature"] = self.settings.default_temperature
        logger.info("sampling of requests that don't say: %s", self.defaults)
        self.gate.max_running = llm.engine.scheduler.most
        self.metrics.watch(llm.engine, lambda: self.heartbeat)
        if self.gate.phase == "starting":
            self.gate.phase = "ready"

    def log_ignored(self, notes: str) -> None:
        """Log what an answer goes without. The same is said once, as clients ask again and again.

        Each request may have notes of its own, so that they are said up to `MOST_LOGGED` times.
        """
        if notes not in self._logged_ignored and len(self._logged_ignored) < MOST_LOGGED:
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
        with self.in_time(ticket):
            await self._compiling.run(ticket.tenant, partial(self.llm.compile_grammar, grammar))

    async def tokenise(self, work: Callable[[], T], tokens: int, tenant: Hashable) -> T:
        """Return what `work` returns in a thread. It makes about `tokens` tokens of text.

        Longer texts than the context take seconds: tenants take turns to have them tokenised.
        """
        if tokens <= self.llm.room(0):
            return await asyncio.to_thread(work)
        return await self._tokenising.run(tenant, work)

    @contextmanager
    def in_time(self, ticket: Ticket) -> Iterator[None]:
        """Raise `Unavailable` where a request waits for more than `queue_timeout`."""
        left = self.settings.queue_timeout - (time.perf_counter() - ticket.entered)
        try:
            with anyio.fail_after(max(left, 0.001)):
                yield
        except TimeoutError:
            why = f"the request has waited for {self.settings.queue_timeout:g} seconds"
            raise Unavailable(f"{why}: come back later", SOON) from None

    async def begin(self, jobs: Sequence[Job], ticket: Ticket) -> list[AsyncStream]:
        """Return the streams of the jobs' answers, as soon as the engine has started the first one.

        Raises `InvalidInput` for a job that is refused, `Unavailable` after `queue_timeout`, and
        what ended the first answer.
        """
        settings, prompts = self.settings, {id(job.prompt): job.prompt for job in jobs}.values()
        for ids in prompts:
            most = settings.max_prompt_tokens
            if most is not None and len(ids) > most:
                raise InvalidInput(
                    f"a prompt of {len(ids)} tokens: this server takes at most {most}"
                )
            if settings.log_prompts:
                logger.info("prompt: %r", await asyncio.to_thread(self.llm.tokenizer.decode, ids))
        ticket.weigh(sum(map(len, prompts)))
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

    async def _start(self, job: Job, ticket: Ticket) -> AsyncStream:
        prompt, params, options = job
        counting = RequestMetrics(self.metrics, params, len(prompt), ticket.entered)
        watch = {"observer": counting.step, "tenant": ticket.tenant}
        try:
            stream = await self.loaded.stream(prompt, params, **options, **watch)
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
        return 0.0 if self._aio is None else self._aio.llm.thread.silence

    @property
    def unhealthy_reason(self) -> str | None:
        """Why requests are not answered; None if they are."""
        if self.gate.phase != "ready":
            return self.gate.phase
        if not self.alive:
            return "the engine's thread has ended"
        silent, limit = self.heartbeat, self.settings.heartbeat_limit
        if silent <= limit:
            return None
        return f"the engine has been silent for {silent:.1f} s (limit {limit:g})"

    async def drain(self) -> bool:
        """Refuse new requests; return whether those under way finish in `drain_timeout` seconds."""
        self.gate.phase = "draining"
        with anyio.move_on_after(self.settings.drain_timeout):
            await self.gate.empty.wait()
        return self.gate.empty.is_set()

    async def close(self) -> None:
        """End all answers under way, and the engine's thread."""
        self.gate.phase = "draining"
        self._compiling.close()
        self._tokenising.close()
        if self._aio is not None:
            await asyncio.to_thread(self._aio.close)


class Streams:
    """The answers to one request while they are computed, `n` to each of the `prompts`.

    Those to the first prompt come first. `seeds`: one for each prompt. Leaving the `with` block
    ends the answers.
    """

    def __init__(
        self,
        streams: Sequence[AsyncStream],
        prompts: Sequence[list[int]],
        seeds: Sequence[int | None],
    ) -> None:
        self.streams, self.prompts, self.seeds = streams, prompts, seeds
        self.n = len(streams) // len(prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.close()

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the parts of all answers as they arrive: an answer's index, and what is new of it,
        None at its end. Raises what ended one of them."""
        parts = asyncio.Queue[Part | BaseException](len(self.streams))
        tasks = [asyncio.ensure_future(self._follow(i, parts)) for i in range(len(self.streams))]
        try:
            running = len(self.streams)
            while running:
                part = await parts.get()
                if isinstance(part, BaseException):
                    raise part
                running -= part[1] is None
                yield part
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, index: int, parts: asyncio.Queue[Part | BaseException]) -> None:
        stream = self.streams[index]
        try:
            async for delta in stream.deltas():
                await parts.put((index, delta))
            if stream.completion.finish_reason not in ("stop", "length"):
                raise Interrupted("the server is ending: this answer was cut short; ask again")
        except Exception as error:
            await parts.put(error)
        else:
            await parts.put((index, None))

    @property
    def completions(self) -> list[Completion]:
        """The answers, as far as they have come."""
        return [stream.completion for stream in self.streams]

    def usage(self, given: str, made: str) -> Json:
        """Return the counts so far in OpenAI's form; `given`, `made`: its prompts and answers."""
        every = [one.statistics for one in self.completions]
        sources = [source for one in every for source in one.sources.values()]
        accepted = sum(source.accepted for source in sources)
        read, new = sum(map(len, self.prompts)), sum(one.new_tokens for one in every)
        return {
            f"{given}_tokens": read,
            f"{made}_tokens": new,
            "total_tokens": read + new,
            f"{given}_tokens_details": {
                "cached_tokens": sum(one.cached_tokens for one in every[:: self.n])
            },
            f"{made}_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(one.drafted for one in sources) - accepted,
            },
            "steps": sum(one.steps for one in every),
        }


class AnsweredRequest:
    """A request while it is answered."""

    answers: Streams

    async def whole(self) -> Json:
        """Wait until all answers are complete, and return the response object."""
        async for _ in self.answers.parts():
            pass
        # in a thread, because many log-probabilities take time
        return await asyncio.to_thread(self.response, self.answers.completions)

    def response(self, completions: Sequence[Completion]) -> Json:
        """Return the response object with these whole answers."""
        raise NotImplementedError

    def chunks(self) -> AsyncIterator[Json]:
        """Yield the parts of a stream as the answers arrive. Leaving it ends the answers."""
        raise NotImplementedError

    async def events(self) -> AsyncIterator[dict[str, str]]:
        """Yield chunks as server-sent events, the error object of what ends them, and `[DONE]`."""
        try:
            async for chunk in self.chunks():
                yield {"data": json.dumps(chunk)}
        except Exception as error:
            yield {"data": json.dumps(problem(error).body)}
        yield {"data": "[DONE]"}


def name_of(model: str) -> str:
    """Return what clients call a model: its name, or the last part of a path."""
    return Path(model).name if Path(model).exists() else model


def fingerprint_of(llm: LLM) -> str:
    """Return a hash of version, model files, number format, kind of device and kernels.

    Two servers with the same one answer alike, bit for bit if the machine allows it.
    """
    model = llm.model
    parts = (__version__, digest_of(llm.folder), str(model.dtype), model.device.type, llm.kernels)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def digest_of(model: str) -> str:
    """Return a hash of a model's files, here or in Hugging Face's cache; its name without any."""
    path = Path(model)
    if not path.exists():
        try:
            path = Path(snapshot_download(model, local_files_only=True))
        except Exception:  # only the model's loader knows where it is
            return model
    files = split_files(path) if path.is_file() else sorted(path.iterdir())
    base = base_of(path)
    if base not in (None, path):
        files += sorted(base.iterdir())
    named = (f"{one.name}\0{_digest(one)}" for one in files if one.suffix in DECIDES)
    return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _digest(file: Path) -> str:
    """Return the hash of a file, which is kept in the cache folder by its `file_key`."""
    kept = cache_folder() / "digests" / file_key(file)
    if kept.exists() and (known := kept.read_text()):
        return known
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    with suppress(OSError):  # or the file is read again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(digest.hexdigest())
    return digest.hexdigest()
