"""`quickbeam train`: make a drafter for a model, and a shortlist for the drafter."""

from __future__ import annotations

import gc
import signal
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from quickbeam.cli import bench
from quickbeam.cli.common import loading_progress, stderr
from quickbeam.cli.loading import Target, check_models
from quickbeam.params import SamplingParams
from quickbeam.train.recipes import Plan, Recipe, ShortlistPlan

if TYPE_CHECKING:
    from pathlib import Path

    from quickbeam.train.trainer import Report

METHODS = "ar,logitspec,dyspec:4,dyspec,frspec,dynaspec+frequency+context,dynaspec"


@dataclass(frozen=True)
class Stages:
    """Which stages are carried out."""

    only: str | None = field(default=None, metadata={"choices": ("drafter", "shortlist")})
    """Make the drafter alone, or anew the shortlist of one. Default: both, and then a bench."""
    limit: int = field(default=12, metadata={"min": 1})
    """Questions of the bench at the end."""
    max_tokens: int = field(default=64, metadata={"min": 3})
    """Longest answer of the bench."""


def train(plan: Plan, recipe: Recipe, shortlist: ShortlistPlan, stages: Stages) -> None:
    """Make a drafter for a model, from text that the model writes itself, and a shortlist of its
    vocabulary; then measure how fast the methods are with it. Draft with it by --drafter OUT.

    Ctrl-C keeps what there is; the same command goes on. OUT also holds the figures: training.json,
    router.json, bench.json. With several GPUs: accelerate launch --module quickbeam train …
    """
    check_models(plan.model)
    if threading.current_thread() is threading.main_thread():
        # what a scheduler sends before it kills counts as Ctrl-C: what was made is written
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = replace(plan, recipe=recipe)
    if stages.only == "shortlist":
        make_shortlist(plan, shortlist)
        return
    console = stderr()
    if stages.only is None:
        console.print("1 of 3: the drafter")
    if not make_drafter(plan) or stages.only == "drafter":
        return
    gc.collect()
    if older(plan.out / "router.json", plan.out / "model.safetensors"):
        console.print("2 of 3: its shortlist")
        make_shortlist(plan, shortlist)
    gc.collect()
    console.print("3 of 3: what they are worth")
    bench.compare(
        bench.Conversations(limit=stages.limit),
        Target(model=plan.model, drafter=str(plan.out)),
        bench.Report(METHODS, plan.out / "bench.json"),
        SamplingParams(max_tokens=stages.max_tokens),
    )


def older(path: Path, than: Path) -> bool:
    """Whether `path` is missing, or older than `than`."""
    return not path.is_file() or path.stat().st_mtime < than.stat().st_mtime


def make_drafter(plan: Plan) -> bool:
    """Write text, then train. Returns whether this process is the one that does what follows."""
    console, tokens = stderr(), plan.tokens
    with loading_progress(plan.model):
        from quickbeam.train.stages import GIB, DrafterTraining

        training = DrafterTraining(plan)
    first: bool = training.accelerator.is_main_process
    needs = training.needs()
    if first:
        console.print(
            f"needs at most {needs.text_memory / GIB:.1f} GiB of memory for the text, "
            f"{needs.train_memory / GIB:.1f} for training, "
            f"and {needs.disk / GIB:.1f} GiB of disk in {plan.out}"
        )
    training.check()
    with stages_bar(console, first) as bar:
        reported = training.written()
        task = bar.add_task("text", total=tokens, completed=reported, figures="")

        def wrote(count: int, rate: float) -> None:
            nonlocal reported
            bar.update(task, completed=count, figures=f"{rate:.0f} tokens/s")
            if first and rate and count - reported >= tokens / 20:
                reported = count
                left = timedelta(seconds=round((tokens - count) / rate))
                bar.console.print(
                    f"text: {count:,} of {tokens:,} tokens, {rate:.0f} a second, {left} left"
                )

        training.write_text(wrote)
        bar.reset(task, description="training", total=1.0, figures="")

        def trained(report: Report) -> None:
            figures = f"loss {report.loss:.3f}, {report.rate:.0f} tokens/s"
            bar.update(task, completed=report.done, figures=figures)
            bar.console.print(line(report))

        held = training.train(trained)
    if first:
        agreement = " ".join(f"{a:.3f}" for a in held.agreement)
        console.print(f"held-out agreement by depth: {agreement}")
        console.print(f"written to {plan.out}: quickbeam generate … --drafter {plan.out}")
    return first


def line(report: Report) -> str:
    """Return a report in words."""
    agreement = ""
    if report.held:
        agreement = f", held-out agreement {' '.join(f'{a:.3f}' for a in report.held.agreement)}"
    left = timedelta(seconds=round(report.seconds_left))
    return (
        f"step {report.step:,} ({report.done:.0%}): loss {report.loss:.3f}{agreement}; "
        f"{report.rate:.0f} tokens/s, {left} left"
    )


def make_shortlist(plan: Plan, how: ShortlistPlan) -> None:
    """Make a drafter's shortlist from its text."""
    with loading_progress(plan.model) as report:
        from quickbeam.train.shortlist import ShortlistTraining

        recipe = plan.recipe
        training = ShortlistTraining(plan.model, plan.out, how, recipe.depths, recipe.seed)
        figures = training.run(report)
    for count, (listed, both) in figures.items():
        stderr().print(
            f"held-out recall of {count:,} rows and the context: {both.recall:.4f}, of a "
            f"list of as many {listed.recall:.4f}"
        )
    stderr().print(f"written to {plan.out}")


def stages_bar(console: Console, shown: bool = True) -> Progress:
    """Return a progress bar for the stages of a training.

    It shows what is going on, how far it is, and the field `figures`. It disappears at the end.
    """
    what, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), figures)
    return Progress(
        *columns, console=console, disable=not (console.is_terminal and shown), transient=True
    )
