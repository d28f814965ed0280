"""`quickbeam train`: have a model write text, make a drafter from it, or a drafter's shortlist."""

from __future__ import annotations

import gc
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
    from quickbeam.train.trainer import Report

METHODS = "ar,logitspec,dyspec:4,dyspec,auto"


@dataclass(frozen=True)
class Stages:
    """Which stages are carried out."""

    only: str | None = field(default=None, metadata={"choices": ("text", "drafter", "shortlist")})
    """Write text alone; train a drafter on the text that is there, which another process may add to
    meanwhile; or make the shortlist of a feature drafter (EAGLE) that is there. Default: text, a
    block drafter, and a bench."""
    limit: int = field(default=12, metadata={"min": 1})
    """Questions of the bench at the end."""
    max_tokens: int = field(default=64, metadata={"min": 3})
    """Longest answer of the bench."""


def train(plan: Plan, recipe: Recipe, shortlist: ShortlistPlan, stages: Stages) -> None:
    """Make a block drafter for a model, from text that the model writes itself; then measure how
    fast the methods are with it. Draft with it by --drafter OUT.

    Ctrl-C or a kill loses at most a minute; the same command goes on. OUT also holds the figures:
    training.json, log.jsonl, bench.json.
    """
    check_models(plan.model)
    plan = replace(plan, recipe=recipe)
    if stages.only == "shortlist":
        make_shortlist(plan, shortlist)
        return
    if stages.only != "drafter":
        write_text(plan)
        gc.collect()
    if stages.only == "text":
        return
    make_drafter(plan)
    gc.collect()
    if stages.only is None:
        bench.compare(
            bench.Conversations(limit=stages.limit),
            Target(model=plan.model, drafter=str(plan.out)),
            bench.Report(METHODS, plan.out / "bench.json"),
            SamplingParams(max_tokens=stages.max_tokens),
        )


def write_text(plan: Plan) -> None:
    """Write text until there is enough."""
    console, tokens = stderr(), plan.tokens
    with loading_progress(plan.model):
        from quickbeam.train.stages import TextStage, written

        there = written(plan)
        reported = 0 if there is None else there.tokens
        if reported >= tokens:
            return
        stage = TextStage(plan)
    with stages_bar(console) as bar:
        task = bar.add_task("text", total=tokens, completed=reported, figures="")

        def wrote(count: int, rate: float) -> None:
            nonlocal reported
            bar.update(task, completed=count, figures=f"{rate:.0f} tokens/s")
            if rate and count - reported >= tokens / 20:
                reported = count
                left = timedelta(seconds=round((tokens - count) / rate))
                bar.console.print(
                    f"text: {count:,} of {tokens:,} tokens, {rate:.0f} a second, {left} left"
                )

        stage.run(wrote)


def make_drafter(plan: Plan) -> None:
    """Train a block drafter on the text that is there."""
    console = stderr()
    with loading_progress(plan.model):
        from quickbeam.train.stages import BlockStage

        stage = BlockStage(plan)
    with stages_bar(console) as bar:
        task = bar.add_task("training", total=1.0, figures="")

        def trained(report: Report) -> None:
            figures = f"loss {report.loss:.3f}, {report.rate:.0f} tokens/s"
            bar.update(task, completed=report.done, figures=figures)
            bar.console.print(line(report))

        held = stage.run(trained)
    agreement = " ".join(f"{a:.3f}" for a in held.agreement)
    console.print(f"held-out agreement by position: {agreement}; MAT {held.mat:.2f}")
    console.print(f"written to {plan.out}: quickbeam generate … --drafter {plan.out}")


def line(report: Report) -> str:
    """Return a report in words."""
    held = report.held
    left = timedelta(seconds=round(report.seen * (1 / report.done - 1) / report.rate))
    return (
        f"{report.seen:,} tokens ({report.done:.1%}): loss {report.loss:.3f}, held-out agreement "
        f"{' '.join(f'{a:.3f}' for a in held.agreement)}, MAT {held.mat:.2f} (drawn "
        f"{held.mat_drawn:.2f}); {report.rate:.0f} tokens/s, {left} left"
    )


def make_shortlist(plan: Plan, how: ShortlistPlan) -> None:
    """Make a drafter's shortlist from its text."""
    with loading_progress(plan.model) as report:
        from quickbeam.train.shortlist import ShortlistTraining

        training = ShortlistTraining(plan.model, plan.out, how, plan.recipe.seed)
        figures = training.run(report)
    for count, (listed, both) in figures.items():
        stderr().print(
            f"held-out recall of {count:,} rows and the context: {both:.4f}, of a "
            f"list of as many {listed:.4f}"
        )
    stderr().print(f"written to {plan.out}")


def stages_bar(console: Console) -> Progress:
    """Return a bar that shows a stage of a training, how far it is, and the field `figures`."""
    what, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), figures)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
