"""Many requests at once: tokens a second, waiting times, and whether answers stay the same.

An answer stays the same where it is the one that is given when its request is alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from quickbeam.bench.methods import MethodItem
from quickbeam.bench.questions import Question
from quickbeam.engine.stream import Stream
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.params import COUPLED, SamplingParams

Told = Callable[[str, float], None]  # is told of a stage, and of the share (0 to 1) that is done
Other = Callable[[Sequence["Asked"], int], "Cell"]  # answers all requests, so many at a time
ALONE = "ar"  # the method whose answers, given one at a time, others are compared with


@dataclass(frozen=True)
class Asked:
    """One request of the benchmark.

    `arrives` is in seconds since the run began. `leaves_after` is the number of tokens after which
    the client goes away, or None for never.
    """

    ids: list[int]
    category: str
    arrives: float = 0.0
    leaves_after: int | None = None


@dataclass
class Answered:
    """What became of a request, with times in seconds since the run began.

    `first` and `last` are when the first and the last token came.
    """

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
        """Seconds per token after the first."""
        return (self.last - self.first) / max(1, len(self.token_ids) - 1)


@dataclass
class Cell:
    """The figures of one method under one load, over all of its runs.

    `identical` counts the answers equal to those given alone. It is None where they need not be
    equal, because tokens are sampled without a seed or not coupled (`MethodItem.comparable`). It is
    also None for a server that does not name its tokens.
    """

    seconds: float = 0.0
    decoding_seconds: float = 0.0  # of steps in which no prompt was read
    decoding_tokens: int = 0  # tokens that these steps emitted
    answers: list[Answered] = field(default_factory=list)
    identical: int | None = None

    @property
    def named(self) -> bool:
        """Whether the ids of all tokens are known."""
        return all(token >= 0 for one in self.answers for token in one.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all requests together, prompts and waiting included."""
        return (
            sum(len(one.token_ids) for one in self.answers) / self.seconds if self.seconds else 0.0
        )

    @property
    def decoding_tokens_per_second(self) -> float:
        """Tokens a second in the steps in which no prompt was read."""
        return self.decoding_tokens / self.decoding_seconds if self.decoding_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON record of the cell.

        Latencies are in milliseconds. A figure is None where nothing was measured for it.
        """
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
    """Return the prompts as requests that arrive all at once, or at random.

    With `rate` they arrive as a Poisson process of so many a second. The clients of a share
    `cancel` of them, evenly spread, go away after a random number of tokens: at most half of
    `max_tokens`.
    """
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
    """Return the prompts that leave room for `max_tokens` tokens in the model's context.

    Raises `InvalidInput` where there are none.
    """
    limit = llm.model.context_length
    found = [prompt for prompt in prompts if limit is None or len(prompt[0]) + max_tokens <= limit]
    if not found:
        raise InvalidInput(
            f"no prompt leaves room for {max_tokens} tokens in the model's context "
            f"of {limit}: lower --max-tokens"
        )
    return found


def encode(llm: LLM, questions: Sequence[Question], raw: bool) -> list[tuple[list[int], str]]:
    """Return the first turns as token ids, with their categories. `raw`: no chat template."""
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
    """Answer all requests, `running` of them at a time. Yields each answer when it ends.

    The time and the tokens of steps without prompts are added to `cell`. Raises what an answer
    raises.
    """
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


class Stopped(KeyboardInterrupt):
    """The measuring was interrupted. `cells`: what was measured by then, by load and name."""

    def __init__(self, cells: dict[int, dict[str, Cell]]) -> None:
        super().__init__()
        self.cells = cells


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
    """Measure every method under every load, `rounds` times in turn.

    They take turns so that changes in the machine's speed affect all of them alike. Returns the
    cells by load and name.

    - `alone`: by prompt, the tokens of plain answers given one at a time. Where None, these answers
      are made first, if a method needs them.
    - `others`: further rows of each table, by name, which are measured after the methods in each
      turn. They answer in the order of the requests that they are given. They are compared where
      they name their tokens.

    Raises `Stopped` if it is interrupted once something is measured.
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
    try:
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
    except KeyboardInterrupt as interrupt:
        measured = {
            load: {name: cell for name, cell in by_name.items() if cell.answers}
            for load, by_name in cells.items()
        }
        measured = {load: by_name for load, by_name in measured.items() if by_name}
        if not measured:
            raise
        _compare(measured, compared, known)
        raise Stopped(measured) from interrupt
    told("done", 1.0)
    if compared:
        compared |= {name for name in others if cells[concurrency[0]][name].named}
    _compare(cells, compared, known)
    return cells


def _compare(
    cells: Mapping[int, Mapping[str, Cell]],
    compared: Collection[str],
    known: Mapping[tuple[int, ...], list[int]],
) -> None:
    """Count, in the cells of the names `compared`, the answers that are the `known` ones."""
    for by_name in cells.values():
        for name, cell in by_name.items():
            if name in compared:
                cell.identical = sum(_same(one, known) for one in cell.answers)


def _alone(
    llm: LLM, asked: Sequence[Asked], params: SamplingParams, told: Told
) -> dict[tuple[int, ...], list[int]]:
    """The token ids of plain answers given one at a time, by prompt."""
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
    """Return tokens a second over those of `ar` under the same load, by load and method.

    Loads under which `ar` was not measured are left out.
    """
    return {
        load: {
            name: cell.tokens_per_second / by_name[ALONE].tokens_per_second
            for name, cell in by_name.items()
        }
        for load, by_name in cells.items()
        if ALONE in by_name and by_name[ALONE].tokens_per_second
    }
