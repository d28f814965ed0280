"""`quickbeam bench vocabulary`: what shortlists keep of the accepted length, and what they save."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from quickbeam.bench.files import check_output, check_plot
from quickbeam.bench.methods import load_runners, parse_methods
from quickbeam.bench.questions import load_questions, spread
from quickbeam.cli import options
from quickbeam.cli.bench import Log, carry_out
from quickbeam.cli.common import progress_bar, stdout
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT
from quickbeam.params import SamplingParams
from quickbeam.presets import FULL, VOCABS, plain_vocab

SHORT = [word for word in VOCABS if word != FULL]


def bench_vocabulary(
    questions: Annotated[
        Path | None,
        typer.Option("--questions", help="Spec-Bench lines. Default: a set of our own."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Questions to ask, spread evenly over the categories."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=3, help="Longest answer, in tokens.")
    ] = 64,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    method: Annotated[
        str, typer.Option("--method", help="The method whose tree is drafted.")
    ] = "dyspec",
    budget: options.Budget = None,
    vocabs: Annotated[
        str, typer.Option("--vocabs", help=f"Of {', '.join(SHORT)}, comma-separated.")
    ] = ",".join(SHORT),
    shares: Annotated[
        str,
        typer.Option("--shares", help="Sizes to ask for, in % of the vocabulary, comma-separated."),
    ] = "6,10,15,25",
    overlap: Annotated[
        str | None,
        typer.Option(
            "--overlap", help="How routing runs beside the drafter's layer: none, thread or stream."
        ),
    ] = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    device: options.DeviceOption = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here, after every question.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the curves here (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """How much of the accepted length a shortened vocabulary keeps, how much head time it saves,
    per category. Interleaved by question.

    Differences are held against the first of --vocabs, at the same size; standard errors are over
    questions, the same for all."""
    words, parts = _words(vocabs), percent(shares)
    # raises for a method that needs a drafter and has none
    parse_methods(f"{method}+full", drafter=drafter, model=model)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    asked = spread(load_questions(questions), limit)
    if json_path is not None:
        check_output("--json", json_path)
    if plot_path is not None:
        check_plot(plot_path)
    nodes = options.nodes(budget)
    with progress_bar(f"loading {model or DEFAULT}") as loading, redirect_stderr(StringIO()):
        from quickbeam.bench import vocabulary
        from quickbeam.bench.environment import environment
        from quickbeam.bench.methods import LLMRunner
        from quickbeam.bench.run import begin
        from quickbeam.draft.eagle import EagleDrafter
        from quickbeam.shortlist.overlap import Overlap

        place = device.value if device else None
        runners, name = load_runners(
            vocabulary.items(method, nodes, [], []), model, dtype.value, place, drafter, loading
        )
        first = runners[FULL]
        assert isinstance(first, LLMRunner)
        size = first.llm.model.vocab_size
        items = vocabulary.items(
            method, nodes, words, [max(1, round(size * part / 100)) for part in parts]
        )
        runners = {item.name: LLMRunner(first.llm, item) for item in items}
        for item in items:
            found = first.llm.prepare(item.method, item.vocab, item.shortlist)
        if overlap is not None:
            if not isinstance(found, EagleDrafter):
                raise InvalidInput("--overlap: only a feature drafter routes beside its layer")
            found.overlap = Overlap(first.llm.model.device, overlap)
    results = begin(runners, params, FULL)
    settings = {
        "questions": "built-in" if questions is None else str(questions),
        "limit": limit,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "drafter": drafter,
        "method": method,
        "budget": budget,
        "overlap": overlap,
    }
    log = Log(
        json_path,
        results,
        environment(first.device, dtype.value),
        name,
        settings,
        lambda: vocabulary.record(results, items, size),
    )

    def show() -> None:
        stdout().print(vocabulary.category_table(results, items, size))
        stdout().print(vocabulary.overall_table(results, items, size))

    carry_out(
        asked,
        runners,
        False,
        log,
        show,
        plot_path,
        lambda path: vocabulary.plot(results, items, size, path),
    )


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or any(plain_vocab(word) not in SHORT for word in words):
        raise InvalidInput(f"--vocabs {text!r}: must be of {', '.join(SHORT)}")
    return list(dict.fromkeys(plain_vocab(word) for word in words))


def percent(text: str) -> list[float]:
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if not parts or not all(0 < part <= 100 for part in parts):
        raise InvalidInput(
            f"--shares {text!r}: must be numbers above 0 and at most 100, comma-separated"
        )
    return parts
