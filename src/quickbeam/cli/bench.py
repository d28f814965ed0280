"""`quickbeam bench`: compare methods and peers on the same questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from enum import Enum
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from quickbeam.bench.base import Runner
from quickbeam.bench.files import check_output, check_plot, save
from quickbeam.bench.methods import (
    PEERS,
    SWITCHES,
    LLMRunner,
    load_runners,
    parse_budget,
    parse_methods,
)
from quickbeam.bench.questions import Question, load_questions, spread
from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, stderr, stdout
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.hub import DEFAULT
from quickbeam.params import SamplingParams
from quickbeam.presets import PRESETS

if TYPE_CHECKING:
    from quickbeam.bench.run import Results

INTERRUPTED = 130  # the shell's code for Ctrl-C


class Turns(str, Enum):
    first = "first"
    all = "all"


commands = typer.Typer(
    help="Measure. Without a command: methods side by side on the same questions."
)


@commands.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="Spec-Bench lines (question_id, category, turns). Default: a set of our own.",
        ),
    ] = None,
    model: options.Model = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help=f"Comma-separated NAME[:BUDGET][+SWITCH]. Names: {', '.join([*PRESETS, *PEERS])}; "
            f"switches: {', '.join(SWITCHES)}. "
            "Example: ar,logitspec:16,logitspec:64,ar+exact,hf.",
        ),
    ] = "ar,pld,logitspec,auto",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help="Questions to ask, spread evenly over the categories. Default: all.",
        ),
    ] = None,
    turns: Annotated[
        Turns,
        typer.Option(
            "--turns",
            help="Ask only the first turn of a question, or all; earlier answers in the "
            "conversation are the reference method's.",
        ),
    ] = Turns.first,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Longest answer, in tokens.")
    ] = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    coupling: options.CouplingOption = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="N|auto",
            help="Most nodes of a draft tree. Default: the method's own.",
        ),
    ] = None,
    exact: options.Exact = None,
    fast: Annotated[
        bool, typer.Option("--fast/--plain", help="Packed linears, or the plain reference path.")
    ] = True,
    drafter: options.Drafter = None,
    vocab: options.Vocab = None,
    shortlist: options.Shortlist = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    weights: options.Weights = options.WeightsKind.bfloat16,
    draft_weights: options.DraftWeights = options.WeightsKind.bfloat16,
    memory: options.Memory = None,
    device: options.DeviceOption = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here, after every question.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw speed-up and MAT here (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Compare methods: MAT, tokens/s, speed-up and identical outputs, per category and overall.
    Above temperature 0 outputs are compared where a --seed is given."""
    if context.invoked_subcommand is not None:
        return
    filters: dict[str, Any] = {
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        coupling=options.coupling(coupling),
        **filters,
    )
    items = parse_methods(
        methods,
        None if budget is None else parse_budget(budget),
        exact,
        fast,
        drafter,
        model,
        vocab,
        shortlist,
    )
    asked = spread(load_questions(questions), limit)
    if json_path is not None:
        check_output("--json", json_path)
    if plot_path is not None:
        check_plot(plot_path)

    # stderr is redirected to hide the loaders' own progress bars
    with progress_bar(f"loading {model or DEFAULT}") as loading, redirect_stderr(StringIO()):
        from quickbeam.bench import report
        from quickbeam.bench.environment import environment
        from quickbeam.bench.run import begin

        runners, name = load_runners(
            items,
            model,
            dtype.value,
            device.value if device else None,
            drafter,
            loading,
            weights.value,
            draft_weights.value,
            memory,
        )
    results = begin(runners, params)
    settings = {
        "questions": "built-in" if questions is None else str(questions),
        "limit": limit,
        "turns": turns.value,
        "max_tokens": max_tokens,
        "temperature": temperature,
        **filters,
        "seed": seed,
        "coupling": params.coupling,
        "drafter": drafter,
        "vocab": vocab,
        "shortlist": shortlist,
        "weights": weights.value,
        "draft_weights": draft_weights.value,
        "memory": memory,
    }
    more = partial(_memory, runners)
    log = Log(
        json_path,
        results,
        environment(runners[results.reference].device, dtype.value),
        name,
        settings,
        more,
    )
    carry_out(
        asked,
        runners,
        turns is Turns.all,
        log,
        lambda: _show(results),
        plot_path,
        lambda path: report.plot(results, path),
    )
    for name, found in more().get("memory", {}).items():
        stdout().print(f"{name}: {found['words']}")


def _memory(runners: Mapping[str, Runner]) -> dict[str, dict[str, Any]]:
    """Return what each method reads from disk, for the methods whose weights stay there."""
    found = {}
    for name, runner in runners.items():
        if isinstance(runner, LLMRunner) and (streamed := runner.llm.model.streamed) is not None:
            found[name] = {**streamed.record(), "words": streamed.in_words}
    return {"memory": found} if found else {}


class Log:
    """The JSON record on disk, with what `more` returns added.

    If it can't be written, `write` is called again after the next question: a full disk may have
    room by then.
    """

    def __init__(
        self,
        path: Path | None,
        results: Results,
        where: Mapping[str, object],
        model: str,
        settings: Mapping[str, object],
        more: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self.path, self.results, self.where, self.model, self.settings, self.more = (
            path,
            results,
            where,
            model,
            settings,
            more,
        )
        self.problem: OSError | None = None

    def write(self) -> None:
        if self.path is None or not self.results.trials:
            return
        from quickbeam.bench import report

        try:
            save(
                self.path,
                {
                    **report.record(self.results, self.where, self.model, self.settings),
                    **self.more(),
                },
            )
            self.problem = None
        except OSError as error:
            self.problem = error


def _ask(
    asked: Sequence[Question],
    runners: Mapping[str, Runner],
    results: Results,
    all_turns: bool,
    log: Log,
) -> None:
    """Warm up, ask every runner every question, show progress, and write the record after each."""
    from quickbeam.bench.run import run, warm_up

    prompts = 1 + sum(len(question.turns) if all_turns else 1 for question in asked)
    what, left = TextColumn("{task.description}"), TextColumn("left")
    columns = (
        what,
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        left,
        TimeRemainingColumn(),
    )
    # Progress is drawn when an answer is done, not by a thread, so that nothing else runs while an
    # answer is timed.
    console = stderr()
    quiet = not console.is_terminal
    with Progress(
        *columns,
        console=console,
        disable=quiet,
        auto_refresh=False,
        transient=True,
        speed_estimate_period=3600,
    ) as progress:
        task = progress.add_task("warming up", total=prompts * len(runners))

        def answered() -> None:
            progress.advance(task)
            progress.refresh()

        progress.refresh()
        warm_up(runners, results.params, answered)
        progress.update(task, description="answers")
        for _ in run(asked, runners, results, all_turns, answered):
            log.write()


def carry_out(
    asked: Sequence[Question],
    runners: Mapping[str, Runner],
    all_turns: bool,
    log: Log,
    show: Callable[[], None],
    plot_path: Path | None,
    plot: Callable[[Path], None],
) -> None:
    """Ask everything, then write, show and plot the results.

    This is done for what there is, however the asking ended. After Ctrl-C the exit code is 130.
    Raises `QuickbeamError` for files that could not be written, and `InvalidInput` if no prompt
    could be answered.
    """
    results, interrupted = log.results, False
    try:
        _ask(asked, runners, results, all_turns, log)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        log.write()
        if results.trials:
            show()
    if plot_path is not None and results.trials:
        try:
            plot(plot_path)
        except OSError as error:
            raise QuickbeamError(f"--plot {plot_path}: not written ({error.strerror})") from error
    if log.problem is not None:
        raise QuickbeamError(
            f"--json {log.path}: not written ({log.problem.strerror}); see the tables instead"
        ) from log.problem
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not results.trials:
        raise InvalidInput(f"no prompt could be answered; the first: {results.skipped[0].reason}")


def _show(results: Results) -> None:
    from quickbeam.bench import report

    console = stdout()
    console.print(report.category_table(results))
    console.print(report.overall_table(results))
    for line in report.footer(results):
        console.print(Text(line))
