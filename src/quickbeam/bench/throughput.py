"""Many requests at once: tokens a second, waiting times, and whether answers stay the same."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from quickbeam.bench.methods import LLMRunner, MethodItem, Question
from quickbeam.bench.report import markdown, number, same
from quickbeam.engine.loop import EngineThread
from quickbeam.engine.sequence import SequenceState
from quickbeam.engine.stream import Stream
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.params import COUPLED, SamplingParams

Progress = Callable[[str, float], None]  # a stage, and the share (0 to 1) that is done
REFERENCE = "ar"  # the method whose answers, given one at a time, others are compared with
# columns of the tables of speed and of waiting, by their names in the JSON
SPEEDS = {
    "tokens/s": "tokens_per_second",
    "over ar": "over_ar",
    "decoding": "decoding_tokens_per_second",
    "MAT": "mean_accepted_tokens",
}
WAITING = {
    "first p50": "p50_ttft_ms",
    "first p95": "p95_ttft_ms",
    "token p50": "p50_tpot_ms",
    "token p95": "p95_tpot_ms",
}


@dataclass
class TimedRequest:
    """One request, and its answer.

    `arrives`, `first` and `last` are seconds since the run began: when the request comes, and when
    its first and last token came. The client goes away after `leaves_after` tokens; None: never.
    """

    ids: list[int]
    arrives: float = 0.0
    leaves_after: int | None = None
    first: float = 0.0
    last: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    nodes: int = 0
    cancelled: bool = False

    def equals(self, expected: list[int]) -> bool:
        """Whether the answer is `expected`, or its beginning where the client went away."""
        length = len(self.token_ids)
        is_beginning = expected[:length] == self.token_ids
        return is_beginning and (self.cancelled or length == len(expected))


@dataclass
class Run:
    """All requests, answered by one method, `load` at a time.

    `decoding_seconds` and `decoding_tokens` are of steps in which no prompt was read. `identical`
    is None where answers need not be the same (`MethodItem.comparable`).
    """

    load: int
    method: str
    answers: list[TimedRequest] = field(default_factory=list)
    seconds: float = 0.0
    decoding_seconds: float = 0.0
    decoding_tokens: int = 0
    identical: int | None = None


def fitting(runner: LLMRunner, questions: Sequence[Question], max_tokens: int) -> list[list[int]]:
    """Return the first turns as ids, if `max_tokens` tokens fit into the context behind them.

    Raises `InvalidInput` if none is short enough.
    """
    limit = runner.llm.model.context_length
    prompts = list[list[int]]()
    for question in questions:
        ids = runner.encode([{"role": "user", "content": question.turns[0]}])
        if limit is None or len(ids) + max_tokens <= limit:
            prompts.append(ids)
    if not prompts:
        raise InvalidInput(
            f"no prompt leaves room for {max_tokens} tokens in the model's context of {limit}: "
            "lower --max-tokens"
        )
    return prompts


def requests(
    prompts: Sequence[list[int]], rate: float | None, cancel: float, max_tokens: int
) -> list[TimedRequest]:
    """Return the prompts as requests that arrive all at once, or `rate` a second (Poisson).

    A share `cancel` of the clients goes away after a random number of tokens, at most half of
    `max_tokens`.
    """
    rng = random.Random(0)
    arrives = 0.0
    timed = list[TimedRequest]()
    for i, ids in enumerate(prompts):
        if rate is not None:
            arrives += rng.expovariate(rate)
        leaves = int((i + 1) * cancel) > int(i * cancel)
        tokens = rng.randint(1, max(1, max_tokens // 2))
        timed.append(TimedRequest(ids, arrives, tokens if leaves else None))
    return timed


@dataclass(eq=False)
class BenchClient:
    """The client of one request. It follows the answer on the engine's thread."""

    request: TimedRequest
    began: float
    thread: EngineThread
    ended: SimpleQueue[BenchClient]
    stream: Stream | None = None

    def notify(self, sequences: Sequence[SequenceState]) -> None:
        """Record the tokens of a step, and cancel the request where its client goes away."""
        (sequence,) = sequences
        request = self.request
        now = time.perf_counter() - self.began
        token_ids = sequence.output.token_ids
        if len(token_ids) > len(request.token_ids):
            request.first = request.first or now
            request.last = now
            request.token_ids = list(token_ids)
        if sequence.over:
            request.steps = sequence.statistics.steps
            request.nodes = sequence.statistics.nodes
            self.ended.put(self)
        elif request.leaves_after is not None and len(token_ids) >= request.leaves_after:
            request.cancelled = True
            self.thread.cancel(sequence)


def serve(
    llm: LLM, asked: Sequence[TimedRequest], item: MethodItem, params: SamplingParams, load: int
) -> Run:
    """Answer all requests, `load` of them at a time. Raises what an answer raises."""
    llm.reset()
    engine = llm.engine
    engine.scheduler.max_running = load
    run = Run(load, item.name)
    waiting = deque(asked)
    running = set[BenchClient]()
    ended = SimpleQueue[BenchClient]()
    seconds_before = engine.decoding_seconds
    tokens_before = engine.decoding_tokens
    began = time.perf_counter()
    try:
        while waiting or running:
            while waiting and waiting[0].arrives <= time.perf_counter() - began:
                client = BenchClient(replace(waiting.popleft()), began, llm.thread, ended)
                client.stream = llm.stream(
                    client.request.ids, params, client=client, **item.options()
                )
                running.add(client)
            done = _next_ended(ended, began + waiting[0].arrives if waiting else None)
            if done is not None:
                running.remove(done)
                if done.stream is not None and done.stream.error is not None:
                    raise done.stream.error
                run.answers.append(done.request)
    finally:
        for client in running:
            if client.stream is not None:
                client.stream.close()
    run.seconds = time.perf_counter() - began
    run.decoding_seconds = engine.decoding_seconds - seconds_before
    run.decoding_tokens = engine.decoding_tokens - tokens_before
    return run


def _next_ended(ended: SimpleQueue[BenchClient], until: float | None) -> BenchClient | None:
    """Return the next client whose answer has ended.

    It waits for one until the time `until` (by `time.perf_counter`; None: for ever), and then
    returns None.
    """
    seconds = None if until is None else max(0.0, until - time.perf_counter())
    try:
        return ended.get(timeout=seconds)
    except Empty:
        return None


def measure(
    llm: LLM,
    asked: Sequence[TimedRequest],
    items: Sequence[MethodItem],
    loads: Sequence[int],
    params: SamplingParams,
    runs: list[Run],
    rounds: int = 1,
    progress: Progress = lambda stage, done: None,
) -> None:
    """Measure every method under every load, `rounds` times in turn, and append to `runs`.

    First plain answers are made one at a time, if a method is compared with them.
    """
    answers: dict[tuple[int, ...], list[int]] = {}
    compared = [item.name for item in items if item.comparable(params)]
    for i, request in enumerate(asked if compared else ()):
        progress("answers given alone", i / len(asked))
        llm.reset()
        answer = llm.generate(request.ids, replace(params, coupling=COUPLED), method=REFERENCE)
        answers[tuple(request.ids)] = answer.token_ids
    for item in items:  # what is measured or compiled at first use is not counted
        serve(llm, asked[:2], item, params, 2)
    plan = [(load, item) for _ in range(rounds) for load in loads for item in items]
    for done, (load, item) in enumerate(plan):
        progress(f"{item.name}, {load} at a time", done / len(plan))
        run = serve(llm, asked, item, params, load)
        if item.name in compared:
            run.identical = sum(
                request.equals(answers[tuple(request.ids)]) for request in run.answers
            )
        runs.append(run)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of a method's runs, in milliseconds; None where nothing was measured."""
    requests = [request for run in runs for request in run.answers]
    answered = [request for request in requests if request.token_ids]
    tokens = sum(len(request.token_ids) for request in answered)
    steps = sum(request.steps for request in answered)
    later_tokens = sum(len(request.token_ids) - 1 for request in answered if request.steps)
    seconds = sum(run.seconds for run in runs)
    decoding_seconds = sum(run.decoding_seconds for run in runs)
    decoding_tokens = sum(run.decoding_tokens for run in runs)
    # seconds to the first token, and to each further one
    to_first = [request.first - request.arrives for request in answered]
    per_token = [
        (request.last - request.first) / max(1, len(request.token_ids) - 1) for request in answered
    ]
    identical = [run.identical for run in runs if run.identical is not None]
    return {
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "decoding_tokens_per_second": (
            decoding_tokens / decoding_seconds if decoding_seconds else None
        ),
        "p50_ttft_ms": _percentile(to_first, 50),
        "p95_ttft_ms": _percentile(to_first, 95),
        "p50_tpot_ms": _percentile(per_token, 50),
        "p95_tpot_ms": _percentile(per_token, 95),
        "mean_accepted_tokens": later_tokens / steps if steps else None,
        "nodes_per_step": sum(request.nodes for request in answered) / steps if steps else None,
        "identical": sum(identical) if identical else None,
        "prompts": len(requests),
        "cancelled": sum(request.cancelled for request in requests),
        "seconds": seconds,
    }


def _percentile(seconds: Sequence[float], part: int) -> float | None:
    """Return a percentile in milliseconds."""
    return 1000 * float(np.percentile(seconds, part)) if seconds else None


def by_load(runs: Sequence[Run]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the figures by load, then by method, with the speed over that of `ar` if measured."""
    loads: dict[int, dict[str, dict[str, Any]]] = {}
    for load, name in dict.fromkeys((run.load, run.method) for run in runs):
        by_name = loads.setdefault(load, {})
        by_name[name] = figures([run for run in runs if (run.load, run.method) == (load, name)])
        reference = by_name.get(REFERENCE, {}).get("tokens_per_second")
        speed = by_name[name]["tokens_per_second"]
        by_name[name]["over_ar"] = speed / reference if reference else None
    return loads


def tables(runs: Sequence[Run]) -> list[str]:
    """Return the figures as Markdown tables: speed, and how long requests wait.

    The tables fit 90 columns with the names of methods.
    """
    speeds = list[dict[str, object]]()
    waiting = list[dict[str, object]]()
    for load, by_name in by_load(runs).items():
        for name, row in by_name.items():
            speed = {column: number(row[key]) for column, key in SPEEDS.items()}
            times = {column: number(row[key]) for column, key in WAITING.items()}
            speeds.append({"at a time": load, "method": name, **speed, "identical": same(row)})
            waiting.append({"at a time": load, "ms": name, **times})
    return [markdown(speeds), markdown(waiting)]
