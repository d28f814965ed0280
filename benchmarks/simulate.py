"""What drafts would gain on other machines: recorded acceptance against a roofline.

    python benchmarks/simulate.py --traces benchmarks/traces.json --machine h100 --shape 8b
    python benchmarks/simulate.py --traces benchmarks/traces.json --machine 8x60 --shape 1.5b-q4
    python benchmarks/simulate.py --traces benchmarks/traces.json --machine here --loads 1,4,16,32

A load of B sequences takes the entry of a trace (`traces.py`), or plain decoding, with the most
tokens a second, B * tokens / (pass of B * rows + calls + host). A pass takes the longer of its
arithmetic and of reading its bytes (weights, experts that its rows wake, keys and values), at the
shares of a data sheet's figures in REACHED. `8x60` is 8 cores like those that PER_CORE was measured
on, with 60 GB/s between them, both as passes reach them. `here` takes passes and calls as this
machine's budget measured them, and the rest of a step from the run; its table has what decoding
gave beside it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from common import arguments, finish, load, numbers, params_of, prompts, script
from quickbeam import LLM
from quickbeam.drafters.base import Drafter
from quickbeam.engine.cost import CostModel
from traces import Entry

REACHED = 0.8, 0.6  # shares of bandwidth and arithmetic that good kernels reach
PLAIN: Entry = (1.0, 1.0, 0.0)
Seconds = Callable[[Entry, int], float]  # of a step: an entry for so many sequences
Row = dict[str, object]
COLUMNS = "requests", "method", "measured", "simulated", "ratio"


class Device(NamedTuple):
    bandwidth: float  # bytes a second
    arithmetic: float  # operations a second, in the shape's number format
    host: float  # seconds of a pass or call that are neither, a guess
    reached: tuple[float, float] = REACHED


class Shape(NamedTuple):
    """Parameters that every row reads, and those of all experts, of which it takes a share."""

    dense: float
    expert: float
    share: float
    kept: float  # bytes of keys and values a token
    drafter: float  # parameters of a drafter of one layer with a head of 32,000 tokens
    number: float = 2.0  # bytes of a parameter


# H100 SXM: NVIDIA's data sheet, dense. EPYC 9965: 12 channels of DDR5-6400; 192 cores with
# two products of 32 pairs a cycle at 2.25 GHz.
DEVICES = {
    "h100": Device(3.35e12, 989e12, 1e-4),
    "epyc-192": Device(614e9, 192 * 2.25e9 * 128, 2e-4),
}
# Operations a second of one core (Zen 4, 3.65 GHz) in passes of 8 to 32 rows, by bytes of a number
PER_CORE = {2.0: 195e9, 0.72: 290e9}
BARRIERS = 224, 1.5e-6  # of a pass, and seconds of each
# Llama-3.1-8B and Qwen3-30B-A3B by their configurations, without the embedding; Qwen2.5 1.5B in
# Q4_K_M with its head, and the 0.5B drafting
SHAPES = {
    "8b": Shape(7.5e9, 0.0, 1.0, 131072, 0.38e9),
    "30b-a3b": Shape(1.22e9, 29.0e9, 8 / 128, 98304, 0.15e9),
    "1.5b-q4": Shape(1.54e9, 0.0, 1.0, 28672, 0.49e9, 0.72),
}


def device_of(name: str, shape: Shape) -> Device:
    """Return a device of DEVICES, or the one of so many cores and gigabytes a second."""
    if name in DEVICES:
        return DEVICES[name]
    cores, gigabytes = map(float, name.split("x"))
    host = BARRIERS[0] * BARRIERS[1]
    return Device(gigabytes * 1e9, cores * PER_CORE[shape.number], host, (1.0, 1.0))


def roofline(device: Device, shape: Shape, context: int) -> Seconds:
    def longer(parameters: float, operations: float, more: float = 0.0) -> float:
        bandwidth, arithmetic = device.reached
        read = (shape.number * parameters + more) / (bandwidth * device.bandwidth)
        return max(read, 2 * operations / (arithmetic * device.arithmetic)) + device.host

    def seconds(entry: Entry, many: int) -> float:
        rows, calls = many * entry[0], entry[2]
        woken = shape.expert * (1 - (1 - shape.share) ** rows)  # as if chosen at random
        active = shape.dense + shape.expert * shape.share
        whole = longer(shape.dense + woken, rows * active, many * context * shape.kept)
        return whole + calls * longer(shape.drafter, rows / max(calls, 1) * shape.drafter)

    return seconds


def best(curve: Sequence[Entry], many: int, seconds: Seconds) -> tuple[Entry, float]:
    """Return the entry with the most tokens a second for `many` sequences, and how many."""
    rates = {one: many * one[1] / seconds(one, many) for one in (PLAIN, *map(tuple, curve))}
    return max(rates.items(), key=lambda pair: pair[1])  # type: ignore[return-value]


def decoded(llm: LLM, asked: list[list[int]], name: str, given: Namespace) -> tuple[float, float]:
    """Return the tokens a second of decoding here, and a step's seconds beside pass and calls."""
    llm.reset()
    engine = llm.engine
    tokens, seconds = engine.decoding_tokens, engine.decoding_seconds
    done = [one.statistics for one in llm.generate(asked, params_of(given), method=name)]
    beside = sum(one.overhead_seconds + one.draft_seconds for one in done)
    # each has a share
    beside -= sum(one.drafter_seconds for one in done) * engine.scheduler.max_running
    rate = (engine.decoding_tokens - tokens) / (engine.decoding_seconds - seconds)
    return rate, beside / sum(one.steps for one in done)


def here(cost: CostModel, drafter: Drafter | None, host: float, context: int) -> Seconds:
    """Return a step's time by a budget's costs; `host`: seconds of it that are no pass or call."""

    def seconds(entry: Entry, many: int) -> float:
        whole = cost.of_pass(round(many * entry[0])) + entry[2] * cost.of_call(drafter, many)
        return host + whole + many * cost.of_context(round(entry[0]), context)

    return seconds


def compared(llm: LLM, curves: dict[str, list[Entry]], given: Namespace) -> Iterator[Row]:
    asked, cells = prompts(llm, given), defaultdict[tuple[int, str], list[Entry]](list)
    context = round(mean(map(len, asked))) + given.max_tokens // 2
    cost = llm.engine.budget.cost  # before the first run, since passes correct it
    for many in list(map(int, numbers(given.loads))) * given.rounds:
        llm.engine.scheduler.max_running = many
        enough = asked * -(-4 * many // len(asked))  # as many run for most of the time
        for name in ("ar", "logitspec", "auto"):
            rate, host = decoded(llm, enough, name, given)
            seconds = here(cost, llm.method_store.drafter, host, context)
            guess = best([] if name == "ar" else curves[name], many, seconds)[1]
            cells[many, name].append((rate, guess, guess / rate))
    for (many, name), turns in cells.items():
        of = (f"{median(column):.2f}" for column in zip(*turns, strict=True))
        yield dict(zip(COLUMNS, (many, name, *of), strict=True))


def main() -> None:
    parser = arguments(__doc__, limit=32, max_tokens=64)
    parser.add_argument("--traces", type=Path, required=True, help="what `traces.py --json` wrote")
    machines = f"{', '.join(DEVICES)}, CORESxGIGABYTES_A_SECOND, or here"
    parser.add_argument("--machine", default="h100", help=machines)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--context", type=int, default=1024, help="tokens before each tree")
    parser.add_argument("--loads", default="1,4,16,64,256,1024", help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="of the table of `here`, in turn")
    given = parser.parse_args()
    curves, rows = json.loads(given.traces.read_text())["curves"], list[Row]()
    if given.machine == "here":
        rows += compared(load(given), curves, given)
    else:
        shape = SHAPES[given.shape]
        seconds = roofline(device_of(given.machine, shape), shape, given.context)
        for many in map(int, numbers(given.loads)):
            plain = many / seconds(PLAIN, many)
            rows.append({"requests": many, "ar, tokens/s": f"{plain:.0f}"})
            for name, curve in curves.items():
                (nodes, tokens, _), rate = best(curve, many, seconds)
                rows[-1][name] = f"{rate / plain:.2f} ({nodes:.1f} rows, MAT {tokens:.2f})"
    finish(given, rows, table=rows)


if __name__ == "__main__":
    script(main)
