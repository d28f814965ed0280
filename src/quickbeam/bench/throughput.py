"""Many requests at once: tokens a second, waiting times, and whether answers stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from quickbeam.bench.methods import LLMRunner, MethodItem, Question
from quickbeam.bench.report import markdown, number, same
from quickbeam.engine.sequence import SequenceState
from quickbeam.engine.stream import Stream
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.params import COUPLED, SamplingParams

Progress = Callable[[str, float], None]  # a stage, and the share (0 to 1) that is done
REFERENCE = "ar"  # the method whose answers, given one at a time, others are compared with
# columns of the table, by their names in the JSON
COLUMNS = {"decoding": "decoding_tokens_per_second", "p50 first ms": "p50_ttft_ms"}
COLUMNS |= {"p95 first ms": "p95_ttft_ms", "p50 ms a token": "p50_tpot_ms"}
COLUMNS |= {"p95 ms a token": "p95_tpot_ms", "MAT": "mean_accepted_tokens"}


@dataclass
class Answered:
    """An answer, and when its first and last token came, in seconds since the run began."""

    ids: list[int]  # of the prompt
    token_ids: list[int]
    first: float
    last: float
    steps: int
    nodes: int


@dataclass
class Run:
    """All prompts, answered by one method, `load` at a time.

    `decoding_seconds` and `decoding_tokens` are of steps in which no prompt was read. `identical`
    is None where answers need not be the same (`MethodItem.comparable`).
    """

    load: int
    method: str
    answers: list[Answered] = field(default_factory=list)
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


class Ends:
    """Notes on the engine's thread which answers have ended, and when."""

    def __init__(self) -> None:
        self.queue = SimpleQueue[tuple[SequenceState, float]]()

    def notify(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            if sequence.over:
                self.queue.put((sequence, time.perf_counter()))


def serve(
    llm: LLM, prompts: Sequence[list[int]], item: MethodItem, params: SamplingParams, load: int
) -> Run:
    """Answer all prompts, `load` of them at a time. Raises what an answer raises."""
    llm.reset()
    engine, ends, run, streams = llm.engine, Ends(), Run(load, item.name), list[Stream]()
    engine.scheduler.most = load
    seconds, tokens = engine.decoding_seconds, engine.decoding_tokens
    began = time.perf_counter()
    try:
        for ids in prompts:
            streams.append(llm.stream(ids, params, client=ends, **item.options()))
        ended = dict(ends.queue.get() for _ in streams)
        for ids, stream in zip(prompts, streams, strict=True):
            answer, last = stream.result(), ended[stream.sequence]
            times = ((stream.times.first or last) - began, last - began)
            counts = answer.statistics.steps, answer.statistics.nodes
            run.answers.append(Answered(ids, answer.token_ids, *times, *counts))
    finally:
        for stream in streams:
            stream.close()
    run.seconds = time.perf_counter() - began
    run.decoding_seconds = engine.decoding_seconds - seconds
    run.decoding_tokens = engine.decoding_tokens - tokens
    return run


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
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
    for i, ids in enumerate(prompts if compared else ()):
        progress("answers given alone", i / len(prompts))
        llm.reset()
        answer = llm.generate(ids, replace(params, coupling=COUPLED), method=REFERENCE)
        alone[tuple(ids)] = answer.token_ids
    for item in items:  # what is measured or compiled at first use is not counted
        serve(llm, prompts[:2], item, params, 2)
    plan = [(load, item) for _ in range(rounds) for load in loads for item in items]
    for done, (load, item) in enumerate(plan):
        progress(f"{item.name}, {load} at a time", done / len(plan))
        run = serve(llm, prompts, item, params, load)
        if item.name in compared:
            run.identical = sum(one.token_ids == alone[tuple(one.ids)] for one in run.answers)
        runs.append(run)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of a method's runs, in milliseconds; None where nothing was measured."""
    answers = [one for run in runs for one in run.answers]
    seconds, steps = sum(run.seconds for run in runs), sum(one.steps for one in answers)
    tokens = sum(len(one.token_ids) for one in answers)
    later = sum(len(one.token_ids) - 1 for one in answers if one.steps)
    first = [one.first for one in answers]
    each = [(one.last - one.first) / max(1, len(one.token_ids) - 1) for one in answers]
    decoding = sum(run.decoding_seconds for run in runs)
    decoded = sum(run.decoding_tokens for run in runs)
    equal = [run.identical for run in runs if run.identical is not None]
    return {
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "decoding_tokens_per_second": decoded / decoding if decoding else None,
        **{f"p{part}_ttft_ms": _percentile(first, part) for part in (50, 95)},
        **{f"p{part}_tpot_ms": _percentile(each, part) for part in (50, 95)},
        "mean_accepted_tokens": later / steps if steps else None,
        "nodes_per_step": sum(one.nodes for one in answers) / steps if steps else None,
        "identical": sum(equal) if equal else None,
        "prompts": len(answers),
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


def table(runs: Sequence[Run]) -> str:
    """Return the figures as a Markdown table."""
    return markdown(
        [
            {"at a time": load, "method": name, "tokens/s": number(one["tokens_per_second"])}
            | {"over ar": number(one["over_ar"])}
            | {column: number(one[key]) for column, key in COLUMNS.items()}
            | {"identical": same(one)}
            for load, by_name in by_load(runs).items()
            for name, one in by_name.items()
        ]
    )
