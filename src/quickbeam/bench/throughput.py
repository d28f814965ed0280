"""Many requests at once: tokens a second, waiting times, and whether answers stay the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    """One request, and what became of it: when its first and last token came, in seconds since the
    run began. The client goes away after `leaves_after` tokens, or never."""

    ids: list[int]
    arrives: float = 0.0
    leaves_after: int | None = None
    first: float = 0.0
    last: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    nodes: int = 0
    cancelled: bool = False

    def equals(self, whole: list[int]) -> bool:
        """Whether the answer is `whole`, or its beginning where the client went away."""
        length = len(self.token_ids)
        return whole[:length] == self.token_ids and (self.cancelled or length == len(whole))


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
    """Return the first turns as ids, those that leave room for `max_tokens` tokens."""
    limit = runner.llm.model.context_length
    prompts = [runner.encode([{"role": "user", "content": one.turns[0]}]) for one in questions]
    fit = [ids for ids in prompts if limit is None or len(ids) + max_tokens <= limit]
    if not fit:
        room = f"no prompt leaves room for {max_tokens} tokens in the model's context of {limit}"
        raise InvalidInput(f"{room}: lower --max-tokens")
    return fit


def requests(
    prompts: Sequence[list[int]], rate: float | None, cancel: float, max_tokens: int
) -> list[TimedRequest]:
    """Return the prompts as requests that arrive all at once, or `rate` a second (Poisson).

    The clients of a share `cancel` of them go away after a random number of tokens, at most half of
    `max_tokens`.
    """
    rng, clock, asked = random.Random(0), 0.0, list[TimedRequest]()
    for i, ids in enumerate(prompts):
        clock += rng.expovariate(rate) if rate is not None else 0.0
        leaves = int((i + 1) * cancel) > int(i * cancel)
        after = rng.randint(1, max(1, max_tokens // 2))
        asked.append(TimedRequest(ids, clock, after if leaves else None))
    return asked


@dataclass(eq=False)
class BenchClient:
    """The client of one request. It follows the answer on the engine's thread."""

    request: TimedRequest
    began: float
    thread: EngineThread
    ended: SimpleQueue[BenchClient]
    stream: Stream | None = None

    def notify(self, sequences: Sequence[SequenceState]) -> None:
        """Note what a step brought, and go away where the client does."""
        (sequence,), one = sequences, self.request
        at, token_ids = time.perf_counter() - self.began, sequence.output.token_ids
        if len(token_ids) > len(one.token_ids):
            one.first, one.last, one.token_ids = one.first or at, at, list(token_ids)
        if sequence.over:
            one.steps, one.nodes = sequence.statistics.steps, sequence.statistics.nodes
            self.ended.put(self)
        elif one.leaves_after is not None and len(token_ids) >= one.leaves_after:
            one.cancelled = True
            self.thread.cancel(sequence)


def serve(
    llm: LLM, asked: Sequence[TimedRequest], item: MethodItem, params: SamplingParams, load: int
) -> Run:
    """Answer all requests, `load` of them at a time. Raises what an answer raises."""
    llm.reset()
    engine, ended = llm.engine, SimpleQueue[BenchClient]()
    engine.scheduler.most = load
    run, waiting, running = Run(load, item.name), list(asked), set[BenchClient]()
    seconds, tokens = engine.decoding_seconds, engine.decoding_tokens
    began = time.perf_counter()
    try:
        while waiting or running:
            while waiting and waiting[0].arrives <= time.perf_counter() - began:
                one = BenchClient(replace(waiting.pop(0)), began, llm.thread, ended)
                one.stream = llm.stream(one.request.ids, params, client=one, **item.options())
                running.add(one)
            left = waiting[0].arrives - (time.perf_counter() - began) if waiting else None
            with suppress(Empty):
                one = ended.get(timeout=left and max(0.0, left))
                running.remove(one)
                if one.stream is not None and one.stream.error is not None:
                    raise one.stream.error
                run.answers.append(one.request)
    finally:
        for one in running:
            if one.stream is not None:
                one.stream.close()
    run.seconds = time.perf_counter() - began
    run.decoding_seconds = engine.decoding_seconds - seconds
    run.decoding_tokens = engine.decoding_tokens - tokens
    return run


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
    alone: dict[tuple[int, ...], list[int]] = {}
    compared = [item.name for item in items if item.comparable(params)]
    for i, one in enumerate(asked if compared else ()):
        progress("answers given alone", i / len(asked))
        llm.reset()
        answer = llm.generate(one.ids, replace(params, coupling=COUPLED), method=REFERENCE)
        alone[tuple(one.ids)] = answer.token_ids
    for item in items:  # what is measured or compiled at first use is not counted
        serve(llm, asked[:2], item, params, 2)
    plan = [(load, item) for _ in range(rounds) for load in loads for item in items]
    for done, (load, item) in enumerate(plan):
        progress(f"{item.name}, {load} at a time", done / len(plan))
        run = serve(llm, asked, item, params, load)
        if item.name in compared:
            run.identical = sum(one.equals(alone[tuple(one.ids)]) for one in run.answers)
        runs.append(run)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of a method's runs, in milliseconds; None where nothing was measured."""
    answers = [one for run in runs for one in run.answers]
    whole, seconds = [one for one in answers if one.token_ids], sum(run.seconds for run in runs)
    tokens, steps = sum(len(one.token_ids) for one in whole), sum(one.steps for one in whole)
    later = sum(len(one.token_ids) - 1 for one in whole if one.steps)
    first = [one.first - one.arrives for one in whole]
    each = [(one.last - one.first) / max(1, len(one.token_ids) - 1) for one in whole]
    decoding = sum(run.decoding_seconds for run in runs)
    decoded = sum(run.decoding_tokens for run in runs)
    equal = [run.identical for run in runs if run.identical is not None]
    return {
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "decoding_tokens_per_second": decoded / decoding if decoding else None,
        **{f"p{part}_ttft_ms": _percentile(first, part) for part in (50, 95)},
        **{f"p{part}_tpot_ms": _percentile(each, part) for part in (50, 95)},
        "mean_accepted_tokens": later / steps if steps else None,
        "nodes_per_step": sum(one.nodes for one in whole) / steps if steps else None,
        "identical": sum(equal) if equal else None,
        "prompts": len(answers),
        "cancelled": sum(one.cancelled for one in answers),
        "seconds": seconds,
    }


def _percentile(seconds: Sequence[float], part: int) -> float | None:
    return 1000 * float(np.percentile(seconds, part)) if seconds else None


def by_load(runs: Sequence[Run]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the figures by load, then by method, with the speed over that of `ar` where it is."""
    cells: dict[int, dict[str, dict[str, Any]]] = {}
    for load, name in dict.fromkeys((run.load, run.method) for run in runs):
        own = [run for run in runs if (run.load, run.method) == (load, name)]
        one = cells.setdefault(load, {})[name] = figures(own)
        plain = cells[load].get(REFERENCE, {}).get("tokens_per_second")
        one["over_ar"] = one["tokens_per_second"] / plain if plain else None
    return cells


def tables(runs: Sequence[Run]) -> list[str]:
    """Return the figures as Markdown tables: speed, and how long requests wait.

    They fit 90 columns with the names of methods.
    """
    speeds, waiting = list[dict[str, object]](), list[dict[str, object]]()
    for load, by_name in by_load(runs).items():
        for name, one in by_name.items():
            speed = {column: number(one[key]) for column, key in SPEEDS.items()}
            times = {column: number(one[key]) for column, key in WAITING.items()}
            speeds.append({"at a time": load, "method": name, **speed, "identical": same(one)})
            waiting.append({"at a time": load, "ms": name, **times})
    return [markdown(speeds), markdown(waiting)]
