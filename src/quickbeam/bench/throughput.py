"""Many requests at once: tokens a second, how long they wait, and whether each answer is the one
given alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from quickbeam.bench.methods import MethodItem
from quickbeam.bench.questions import Question
from quickbeam.engine.stream import Stream
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.params import COUPLED, SamplingParams

Told = Callable[[str, float], None]  # hears of a stage, and how much of it is done
Other = Callable[[Sequence["Asked"], int], "Cell"]  # answers all, so many at a time
ALONE = "ar"  # whose answers, one at a time, the others are held against


@dataclass(frozen=True)
class Asked:
    """One request of the benchmark. `leaves_after`: tokens after which its client goes away; None:
    never."""

    ids: list[int]
    category: str
    arrives: float = 0.0
    leaves_after: int | None = None


@dataclass
class Answered:
    """What became of it, in seconds since the run began."""

    prompt: tuple[int, ...]
    arrived: float
    first: float = 0.0
    last: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    nodes: int = 0
    cancelled: bool = False

    @property
    def time_to_first(self) -> float:
        return self.first - self.arrived

    @property
    def per_token(self) -> float:
        """Seconds of a further token."""
        return (self.last - self.first) / max(1, len(self.token_ids) - 1)


@dataclass
class Cell:
    """One method under one load, over all of its runs. `identical`: answers equal to those given
    alone; None where they need not be, as tokens are sampled without a seed or not coupled
    (`MethodItem.comparable`)."""

    seconds: float = 0.0
    decoding_seconds: float = 0.0  # of steps in which no prompt was read
    decoding_tokens: int = 0  # that these emitted
    answers: list[Answered] = field(default_factory=list)
    identical: int | None = None

    @property
    def named(self) -> bool:
        """Whether all tokens are known by their ids."""
        return all(token >= 0 for one in self.answers for token in one.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, prompts and waiting included."""
        return (
            sum(len(one.token_ids) for one in self.answers) / self.seconds if self.seconds else 0.0
        )

    @property
    def decoding_tokens_per_second(self) -> float:
        """Of the steps in which no prompt was read."""
        return self.decoding_tokens / self.decoding_seconds if self.decoding_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The record of DESIGN's `bench throughput`."""
        whole = [one for one in self.answers if one.token_ids]
        steps = sum(one.steps for one in whole)
        later = sum(max(0, len(one.token_ids) - 1) for one in whole if one.steps)
        return {
            "tokens_per_second": self.tokens_per_second,
            "decoding_tokens_per_second": self.decoding_tokens_per_second,
            "p50_ttft_ms": 1e3 * median(one.time_to_first for one in whole) if whole else None,
            "p95_ttft_ms": 1e3 * _percentile([one.time_to_first for one in whole], 0.95)
            if whole
            else None,
            "p50_tpot_ms": 1e3 * median(one.per_token for one in whole) if whole else None,
            "p95_tpot_ms": 1e3 * _percentile([one.per_token for one in whole], 0.95)
            if whole
            else None,
            "mean_accepted_tokens": later / steps if steps else None,
            "nodes_per_step": sum(one.nodes for one in whole) / steps if steps else None,
            "identical": self.identical,
            "prompts": len(self.answers),
            "cancelled": sum(one.cancelled for one in self.answers),
            "seconds": self.seconds,
        }


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def requests(
    prompts: Sequence[tuple[list[int], str]],
    rate: float | None,
    cancel: float,
    max_tokens: int,
    seed: int = 0,
) -> list[Asked]:
    """Prompts as they arrive: all at once, or at random at `rate` a second (a Poisson process). A
    share `cancel` of them, evenly spread, goes away after a random part of its answer."""
    chance, clock, found = random.Random(seed), 0.0, list[Asked]()
    for number, (ids, category) in enumerate(prompts):
        if rate is not None:
            clock += chance.expovariate(rate)
        leaves = int((number + 1) * cancel) > int(number * cancel)
        after = chance.randint(1, max(1, max_tokens // 2))
        found.append(Asked(ids, category, clock, after if leaves else None))
    return found


def fitting(
    llm: LLM, prompts: Sequence[tuple[list[int], str]], max_tokens: int
) -> list[tuple[list[int], str]]:
    """The prompts that leave room for an answer in the model's context. Raises `InvalidInput` where
    there is none."""
    limit = llm.model.context_length
    found = [prompt for prompt in prompts if limit is None or len(prompt[0]) + max_tokens <= limit]
    if not found:
        raise InvalidInput(
            f"no prompt leaves room for {max_tokens} tokens in the model's context "
            f"of {limit}: lower --max-tokens"
        )
    return found


def encode(llm: LLM, questions: Sequence[Question], raw: bool) -> list[tuple[list[int], str]]:
    """The first turns as token ids, with their categories; `raw`: without a chat template."""
    return [
        (
            list(llm.tokenizer(question.turns[0])["input_ids"])
            if raw
            else llm.encode_chat([{"role": "user", "content": question.turns[0]}]),
            question.category,
        )
        for question in questions
    ]


def serve(
    llm: LLM,
    asked: Sequence[Asked],
    item: MethodItem,
    params: SamplingParams,
    running: int,
    cell: Cell | None = None,
) -> Iterator[Answered]:
    """Answer all requests, `running` of them at a time; each as it ends. `cell` is told of steps
    without prompts."""
    llm.reset()
    llm.engine.scheduler.most = running
    waiting, open_streams = list(enumerate(asked)), dict[int, tuple[Stream, Answered]]()
    began = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began

    try:
        while waiting or open_streams:
            while waiting and waiting[0][1].arrives <= now():
                number, one = waiting.pop(0)
                options: Any = {
                    "method": item.method,
                    "budget": item.budget,
                    "vocab": item.vocab,
                    "shortlist": item.shortlist,
                }
                open_streams[number] = (
                    llm.stream(one.ids, item.told(params), **options),
                    Answered(tuple(one.ids), one.arrives),
                )
            if not open_streams:
                time.sleep(max(0.0, waiting[0][1].arrives - now()))
                continue
            before, tokens = (
                now(),
                sum(len(stream.token_ids) for stream, _ in open_streams.values()),
            )
            llm.engine.step()
            at = now()
            if cell is not None and not llm.engine.prompt_rows:
                cell.decoding_seconds += at - before
                cell.decoding_tokens += (
                    sum(len(stream.token_ids) for stream, _ in open_streams.values()) - tokens
                )
            for number, (stream, answered) in list(open_streams.items()):
                length = len(stream.token_ids)
                if length > len(answered.token_ids):
                    answered.first, answered.last = answered.first or at, at
                    answered.token_ids = list(stream.token_ids)
                leaves = asked[number].leaves_after
                if leaves is not None and length >= leaves and not stream.over:
                    answered.cancelled = True
                    stream.close()
                if stream.over:
                    if stream.error is not None:
                        raise stream.error
                    completion = stream.completion
                    answered.text, answered.steps, answered.nodes = (
                        completion.text,
                        completion.statistics.steps,
                        completion.statistics.nodes,
                    )
                    answered.cancelled = (
                        answered.cancelled or completion.finish_reason == "interrupted"
                    )
                    del open_streams[number]
                    yield answered
    finally:
        for stream, _ in open_streams.values():
            stream.close()


def measure(
    llm: LLM,
    asked: Sequence[Asked],
    methods: Sequence[MethodItem],
    concurrency: Sequence[int],
    params: SamplingParams,
    rounds: int = 1,
    told: Told = lambda stage, done: None,
    alone: Mapping[tuple[int, ...], list[int]] | None = None,
    others: Mapping[str, Other] | None = None,
) -> dict[int, dict[str, Cell]]:
    """Every method under every load, `rounds` times in turn, so that what the machine does
    meanwhile falls on all alike.

    `alone`: by prompt, the tokens of plain answers given one at a time; without it, they are made
    first where they are needed. `others`: further rows of each table, by name, measured after the
    methods in each turn; they answer in the order of what they are given, and are compared where
    they name their tokens.
    """
    others = others or {}
    compared = {item.name for item in methods if item.comparable(params)}
    known = dict(alone or {})
    if compared and alone is None:
        known = _alone(llm, asked, replace(params, coupling=COUPLED), told)
    cells = {
        load: {name: Cell() for name in (*(item.name for item in methods), *others)}
        for load in concurrency
    }
    for item in methods:  # what is measured or compiled at first use is not counted
        for _ in serve(llm, asked[:2], item, params, 2):
            pass
    for other in others.values():
        other(asked[:2], 2)
    total = rounds * len(concurrency) * (len(methods) + len(others))
    done = 0
    for _ in range(rounds):
        for load in concurrency:
            for item in methods:
                told(f"{item.name}, {load} at a time", done / total)
                began = time.perf_counter()
                cell = cells[load][item.name]
                answers = list(serve(llm, asked, item, params, load, cell))
                cell.seconds += time.perf_counter() - began
                cell.answers += answers
                done += 1
            for name, other in others.items():
                told(f"{name}, {load} at a time", done / total)
                found = other(asked, load)
                for answered, one in zip(found.answers, asked, strict=True):
                    answered.prompt = tuple(one.ids)
                cells[load][name].seconds += found.seconds
                cells[load][name].answers += found.answers
                done += 1
    told("done", 1.0)
    if compared:
        compared |= {name for name in others if cells[concurrency[0]][name].named}
    for by_name in cells.values():
        for name in compared:
            cell = by_name[name]
            cell.identical = sum(_same(one, known) for one in cell.answers)
    return cells


def _alone(
    llm: LLM, asked: Sequence[Asked], params: SamplingParams, told: Told
) -> dict[tuple[int, ...], list[int]]:
    """Plain answers, one at a time, by prompt."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(asked):
        told("answers given alone", number / len(asked))
        if tuple(one.ids) not in found:
            llm.reset()
            found[tuple(one.ids)] = llm.generate(one.ids, params, method=ALONE).token_ids
    return found


def _same(answered: Answered, known: Mapping[tuple[int, ...], list[int]]) -> bool:
    """Whether an answer is the one given alone, or its beginning where the client went away."""
    whole = known[answered.prompt]
    return whole[: len(answered.token_ids)] == answered.token_ids and (
        answered.cancelled or len(whole) == len(answered.token_ids)
    )


def ratios(cells: Mapping[int, Mapping[str, Cell]]) -> dict[int, dict[str, float]]:
    """By load and method, tokens a second over those of `ar` under the same load, where it was
    measured."""
    return {
        load: {
            name: cell.tokens_per_second / by_name[ALONE].tokens_per_second
            for name, cell in by_name.items()
        }
        for load, by_name in cells.items()
        if ALONE in by_name and by_name[ALONE].tokens_per_second
    }
