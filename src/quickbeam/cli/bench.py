"""`quickbeam bench`: methods on the same questions, one request at a time and many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from quickbeam.bench.methods import (
    NAMES,
    SYNTAX,
    LLMRunner,
    MethodItem,
    Question,
    load_questions,
    load_runners,
    parse_methods,
    spread,
)
from quickbeam.cli.common import (
    arguments,
    check_models,
    check_output,
    loading_progress,
    progress_bar,
    save,
)
from quickbeam.cli.fields import Command, Group, command
from quickbeam.config import VOCABS, DrafterOptions, ModelOptions
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams

# what transformers' generate takes of an answer's parameters
PEER_PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
MOST = 1024  # requests at a time
WAITING = "ms to the first and to each further token; half (p50) or 95 % of requests are below"
METHODS = (
    f"What is compared, comma-separated, each as {SYNTAX}. Names: {', '.join(NAMES)}; "
    f"vocabularies: {', '.join(VOCABS)}."
)


@dataclass(frozen=True)
class QuestionOptions:
    """What is asked, of each question its first turn."""

    questions: Path | None = field(default=None, metadata={"metavar": "FILE", "common": True})
    """File of questions, in lines as Spec-Bench has them (question_id, category, turns). Default: a
    set of our own."""
    limit: int | None = field(default=None, metadata={"min": 1, "common": True})
    """Questions to ask, spread evenly over the categories. Default: all."""
    raw: bool = False
    """Give questions as they are, without the chat template."""


@dataclass(frozen=True)
class ThroughputOptions(QuestionOptions):
    """What is asked, and how much at once."""

    concurrency: str = field(default="1,4,16", metadata={"metavar": "N,N,…", "common": True})
    """How many requests are under way at a time; one or several numbers, comma-separated."""
    rate: float | None = None
    """Requests that arrive a second, at random times (Poisson). Default: all at once."""
    cancel: float = field(default=0.0, metadata={"min": 0.0, "max": 1.0})
    """Share of clients that go away in the middle of their answer."""
    rounds: int = field(default=1, metadata={"min": 1})
    """How often every method is measured with each number of --concurrency, in turn."""


@dataclass(frozen=True)
class TargetOptions(DrafterOptions, ModelOptions):
    """The model that answers, and what drafts for it."""


@dataclass(frozen=True)
class ReportOptions:
    """What is compared, and where the figures go."""

    methods: str = field(
        default="ar,pld,logitspec,auto",
        metadata={"metavar": "NAME,NAME,…", "help": METHODS, "common": True},
    )
    json: Path | None = field(default=None, metadata={"metavar": "FILE", "common": True})
    """File that gets the figures, as JSON."""

    def save(self, record: dict[str, Any]) -> None:
        if self.json is not None:
            save("--json", self.json, record)


commands = typer.Typer(cls=Group)


@commands.callback(invoke_without_command=True)
@command
def bench(
    context: typer.Context,
    asked: QuestionOptions,
    target: TargetOptions,
    report: ReportOptions,
    params: SamplingParams = SamplingParams(max_tokens=128),  # noqa: B008
) -> None:
    """Compare methods by asking questions, one at a time.

    Tables show MAT (the mean accepted tokens a step), tokens/s, speed-up and how many outputs are
    identical, for each category and overall. Above temperature 0 outputs are compared where a
    --seed is given.
    """
    if context.invoked_subcommand is None:
        compare(asked, target, report, params)


def compare(
    asked: QuestionOptions,
    target: TargetOptions,
    report_options: ReportOptions,
    params: SamplingParams,
) -> None:
    """Load the methods, ask the questions, then show and write the figures."""
    items, questions = prepare(asked, target, report_options, params)
    with loading_progress(target.source, target.drafter) as loading:
        from quickbeam.bench import report
        from quickbeam.bench.run import begin, run, warm_up

        runners, name, disk = load_runners(items, arguments(target), loading, asked.raw)
    results, device = begin(items, params), next(iter(runners.values())).device
    about = measurement(asked, target, params, device, name)
    about |= {} if disk is None else {"memory": disk.record()}

    def finish() -> None:
        if results.trials:
            lines = report.footer(results) + ([] if disk is None else [disk.in_words])
            typer.echo("\n".join([*report.tables(results), *lines]))
            report_options.save({**about, **report.record(results)})

    # the bar is drawn when an answer is done, so that nothing else runs while one is timed
    with kept(finish), progress_bar("warming up", by_itself=False) as show:
        warm_up(runners, params)
        for _ in run(questions, runners, results, show):
            pass
    if not results.trials:
        raise InvalidInput(f"no prompt is answered; the first: {results.skipped[0]['reason']}")


@contextmanager
def kept(finish: Callable[[], None]) -> Iterator[None]:
    """Call `finish` at the end of the block, however it ends. After Ctrl-C the exit code is 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        finish()


@commands.command(cls=Command)
@command
def throughput(
    load: ThroughputOptions,
    target: TargetOptions,
    report: ReportOptions = ReportOptions("ar,logitspec,auto"),
    params: SamplingParams = SamplingParams(max_tokens=128, seed=0),  # noqa: B008
) -> None:
    """Compare methods while many requests are under way.

    Tables show tokens a second, prompts and waiting included ("decoding" leaves out the steps in
    which prompts are read); how many answers are the ones given alone by plain decoding; and how
    long requests wait for their first token and for each further one.
    """
    parts = [part.strip() for part in load.concurrency.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST for part in parts):
        raise InvalidInput(
            f"--concurrency {load.concurrency!r}: must be numbers from 1 to {MOST}, comma-separated"
        )
    loads = list(dict.fromkeys(map(int, parts)))
    if load.rate is not None and not load.rate > 0:
        raise InvalidInput(f"--rate {load.rate}: must be above 0 requests a second")
    items, questions = prepare(load, target, report, params)
    if peer := next((item.name for item in items if item.is_peer), None):
        raise InvalidInput(f"--methods {peer}: answers one request at a time; leave it out")
    with loading_progress(target.source, target.drafter) as loading:
        from quickbeam.bench.throughput import Run, by_load, fitting, measure, requests, tables

        runners, name, _ = load_runners(items, arguments(target), loading, load.raw)
    runner, runs = next(iter(runners.values())), list[Run]()
    assert isinstance(runner, LLMRunner)
    prompts = fitting(runner, questions, params.max_tokens)
    about = measurement(load, target, params, runner.device, name)
    about["settings"]["skipped"] = len(questions) - len(prompts)

    def finish() -> None:
        if runs:
            typer.echo("\n".join([*tables(runs), WAITING]))
            about["complete"] = len(runs) == load.rounds * len(loads) * len(items)
            report.save({**about, "concurrency": by_load(runs)})
        runner.llm.close()

    asked = requests(prompts, load.rate, load.cancel, params.max_tokens)
    with kept(finish), progress_bar("warming up") as show:
        measure(runner.llm, asked, items, loads, params, runs, load.rounds, show)


def prepare(
    asked: QuestionOptions, target: TargetOptions, report: ReportOptions, params: SamplingParams
) -> tuple[list[MethodItem], list[Question]]:
    """Return the entries of `--methods` and the questions, or refuse them before torch is
    imported."""
    if params.max_tokens < 2:
        raise InvalidInput(f"--max-tokens {params.max_tokens}: must be at least 2 to be timed")
    items = parse_methods(
        report.methods,
        budget=target.budget,
        drafter=None if target.drafter is None else str(target.drafter),
        model=target.source,
        vocab=target.vocab,
        shortlist=target.shortlist,
    )
    peer = next((item.name for item in items if item.is_peer), None)
    plain = vars(SamplingParams())
    for option, value in vars(params).items() if peer else ():
        if option not in PEER_PARAMS and value != plain[option]:
            name = option.replace("_", "-")
            raise InvalidInput(f"--{name}: {peer} takes no such option; leave out one of them")
    check_models(target.model, target.drafter)
    if report.json is not None:
        check_output("--json", report.json)
    return items, spread(load_questions(asked.questions), asked.limit)


def measurement(
    asked: QuestionOptions, target: TargetOptions, params: SamplingParams, device: str, model: str
) -> dict[str, Any]:
    """Return when, where and with what settings a measurement was made, for its JSON."""
    from quickbeam.bench.report import environment

    settings = {**asdict(asked), **asdict(params), **asdict(target)}
    settings["questions"] = str(asked.questions or "built-in")
    settings = {k: v for k, v in settings.items() if k not in ("model", "grammar", "n")}
    return {"environment": environment(device, target.dtype), "model": model, "settings": settings}
