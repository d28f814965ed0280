"""What the scripts of this folder share: arguments, loading, errors, tables and summaries."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from quickbeam import LLM, SamplingParams
from quickbeam.bench.methods import LLMRunner, MethodItem, Question, load_questions, spread
from quickbeam.bench.report import environment, markdown
from quickbeam.bench.run import Results, begin, run, warm_up
from quickbeam.bench.throughput import fitting
from quickbeam.cli.common import save
from quickbeam.config import WEIGHTS
from quickbeam.errors import QuickbeamError
from quickbeam.models.base import Batch, Chain, Draft, Model
from quickbeam.tree import TokenTree


def arguments(doc: str, **defaults: object) -> ArgumentParser:
    """Return a parser with the arguments that all scripts take. The first line of `doc` is help."""
    parser = ArgumentParser(description=doc.splitlines()[0])
    for name in ("model", "drafter", "device", "memory"):
        parser.add_argument(f"--{name}", help=f"{name} of `quickbeam bench`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-weights", default="bfloat16", choices=WEIGHTS)
    parser.add_argument("--questions", type=Path, help="Spec-Bench lines; default: our own")
    parser.add_argument("--limit", type=int, help="questions to ask, evenly over categories")
    parser.add_argument("--raw", action="store_true", help="without the chat template")
    for name, value in {"max-tokens": 64, "temperature": 0.0, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.set_defaults(**defaults)
    return parser


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def load(given: Namespace, method: str = "auto", **more: Any) -> LLM:
    """Return the model that the arguments name. `more`: arguments of `LLM`."""
    names = ("model", "drafter", "device", "memory", "dtype", "draft_weights")
    named = {name: getattr(given, name) for name in names}
    return LLM(method=method, **{"memory_of_answers": 0} | named | more)


def params_of(given: Namespace) -> SamplingParams:
    return SamplingParams(**{n: getattr(given, n) for n in ("max_tokens", "temperature", "seed")})


def questions_of(given: Namespace) -> list[Question]:
    return spread(load_questions(given.questions), given.limit)


def prompts(llm: LLM, given: Namespace, room: int = 0) -> list[list[int]]:
    """Return the first turns as ids, those that fit with an answer and `room` more tokens."""
    runner = LLMRunner(llm, MethodItem("ar", "ar"), given.raw)
    return fitting(runner, questions_of(given), given.max_tokens + room)


def answers(llm: LLM, items: Sequence[MethodItem], given: Namespace) -> Results:
    """Have the methods answer the questions in turn, as `quickbeam bench` does."""
    for item in items:
        llm.prepare(item.method, item.vocab, item.shortlist)
    runners = {item.name: LLMRunner(llm, item, given.raw) for item in items}
    results = begin(items, params_of(given))
    warm_up(runners, results.params)
    list(run(questions_of(given), runners, results))
    return results


def comb(nodes: int, vocab: int) -> TokenTree:
    """Return a tree with the shape of drafts: a chain, with a branch beside each of its tokens."""
    tree, tip = TokenTree(7), 0
    while len(tree) < nodes:
        parent, tip = tip, tree.add(tip, len(tree) % vocab, "probe")
        if len(tree) < nodes:
            tree.add(parent, (len(tree) + 1) % vocab, "probe")
    return tree


def pass_of(model: Model, context: int) -> Callable[[int], object]:
    """Return a pass of the model over so many rows, behind `context` tokens, whichever they are."""
    cache = model.pool.new()
    model.forward(Batch([Chain(cache, [7])]))
    cache.commit([0])

    def run(rows: int) -> object:
        cache.reserve(context + rows + 2)
        cache.length = max(context, 1)
        (passed,) = model.forward(Batch([Draft(cache, comb(rows, model.vocab_size))]))
        return passed.logits[0, 0].item()

    return run


def milliseconds(
    works: Mapping[Any, Callable[[], object]], repeats: int, warm: int = 2
) -> dict[Any, float]:
    """Return the median milliseconds of each, all run in turn; `warm` rounds before don't count."""
    times: dict[Any, list[float]] = {name: [] for name in works}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    for _ in range(repeats + warm):
        for name, work in works.items():
            began = perf_counter()
            work()
            wait()
            times[name].append(1000 * (perf_counter() - began))
    return {name: median(taken[warm:]) for name, taken in times.items()}


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Return the sum of the first numbers over that of the second, and how far each pair pulls."""
    above, below = (sum(column) for column in zip(*pairs, strict=True))
    value = above / below if below else 0.0
    return value, [(a - value * b) / below if below else 0.0 for a, b in pairs]


def error(pulls: Sequence[float]) -> float | None:
    """Return the standard error over prompts from their pulls (Liang and Zeger, 1986)."""
    count = len(pulls)
    return sqrt(count / (count - 1) * sum(pull * pull for pull in pulls)) if count > 1 else None


def finish(given: Namespace, rows: Sequence[Mapping[str, object]], **figures: Any) -> None:
    """Print the rows as a table with where it is from, and write the figures to `--json`."""
    place = environment(given.device or "cpu", given.dtype)
    print(markdown(rows))
    where = f"{place['cpu']}, {place['threads']} threads, {place['kernels']}"
    print(f"{place['date']}, {str(place['commit'])[:7]}, {where}: `{place['command']}`")
    if given.json is not None:
        settings = {name: str(value) for name, value in vars(given).items() if value is not None}
        save("--json", given.json, {"environment": place, "settings": settings, **figures})


def script(main: Callable[[], None]) -> None:
    """Run a script; errors of quickbeam are a line."""
    try:
        main()
    except QuickbeamError as failure:
        sys.exit(f"error: {failure}")
