"""`quickbeam train`: have a model write text, make a drafter from it, or a drafter's shortlist."""

from __future__ import annotations

import gc
import math
import shutil
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from quickbeam.cli import bench
from quickbeam.cli.common import check_models, loading_progress, progress_bar, say
from quickbeam.hub import TABLE_MAT
from quickbeam.params import SamplingParams
from quickbeam.train.memory import keep_freed_memory
from quickbeam.train.recipes import (
    FEATURE,
    HIDDEN_FOLDER,
    Plan,
    Recipe,
    ShortlistPlan,
    opening_words,
)

if TYPE_CHECKING:
    from quickbeam.train.forecast import Rates
    from quickbeam.train.held_out import HeldOutMetrics
    from quickbeam.train.stages import DrafterStage, TextStage
    from quickbeam.train.trainer import Report

POSITIONS = 7  # whose agreement fits into a line
# By turns text is written up to a share of all, and the drafter trained up to a share of its run: a
# drafter is there soon, and most of the training is on all text.
TURNS = ((1 / 16, 1 / 48), (1 / 8, 1 / 24), (1 / 4, 1 / 12), (1 / 2, 1 / 6), (1, 1))
METHODS = "ar,logitspec,dyspec:4,dyspec,auto"


@dataclass(frozen=True)
class StageOptions:
    """Which stages are carried out, and what the bench at the end asks."""

    only: str | None = field(
        default=None, metadata={"choices": ("text", "drafter", "shortlist"), "common": True}
    )
    """Carry out one stage. text: write text and the table of its n-grams, which drafts without any
    training, after some minutes; drafter: train on the text that is there, which another process
    may add to meanwhile; shortlist: make the shortlist of a feature drafter (EAGLE) that is there.
    Default: write text and train on it by turns, make the shortlist, and measure the drafter."""
    limit: int = field(default=12, metadata={"min": 1})
    """Questions of the bench at the end."""
    max_tokens: int = field(default=64, metadata={"min": 3})
    """Longest answer of the bench at the end, in tokens."""


def train(plan: Plan, recipe: Recipe, shortlist: ShortlistPlan, stages: StageOptions) -> None:
    """Make a drafter for a model from text that the model writes.

    It is a feature drafter, with its shortlist, or a block drafter. At the end a bench says how
    fast the methods are with it. Draft with it by --drafter OUT; without --out, a model that comes
    without a drafter has this one by itself. OUT also gets a table of the text's n-grams, which
    drafts where no drafter does (--only text).

    Ctrl-C or a kill loses at most a minute; the same command goes on, and the drafter in OUT can be
    used meanwhile. OUT also holds the figures: training.json, log.jsonl, bench.json.
    """
    check_models(plan.model)
    keep_freed_memory()
    plan = replace(plan, recipe=recipe, out=plan.folder)
    try:
        if stages.only != "shortlist":
            write_and_train(plan, stages.only)
            gc.collect()
        if stages.only == "shortlist" or (stages.only is None and recipe.kind == FEATURE):
            make_shortlist(plan, shortlist)
            gc.collect()
        if stages.only in (None, "drafter"):
            shutil.rmtree(plan.folder / HIDDEN_FOLDER, ignore_errors=True)
        if stages.only is None:
            bench.compare(
                bench.QuestionOptions(limit=stages.limit),
                bench.TargetOptions(model=plan.model, drafter=str(plan.folder)),
                bench.ReportOptions(METHODS, plan.folder / "bench.json"),
                SamplingParams(max_tokens=stages.max_tokens),
            )
    except KeyboardInterrupt:
        say(f"stopped: {plan.folder} keeps what was done, and the same command goes on")
        raise


def write_and_train(plan: Plan, only: str | None) -> None:
    """Write text and train on it by turns; or `only` one of both."""
    opening_words("questions", plan.languages)  # refused before the model is loaded
    with loading_progress(plan.model):
        from quickbeam.models.weights.formats import pick_device
        from quickbeam.train.shards import Shards
        from quickbeam.train.stages import DrafterStage, TextStage, planned
        from quickbeam.train.target import open_target

        if only == "drafter":
            Shards(plan.text)  # refused before the model is loaded
        target = open_target(plan.model, pick_device(None))
        text = TextStage(plan, target)
        drafter = None
        rates = text.rates() if only == "text" else DrafterStage(plan, target).rates()
        plan = planned(plan, rates)
        if only != "text":
            drafter = DrafterStage(plan, target)
    say(plan_text(plan, rates, text.tokens(), drafter is not None))
    for share, until in TURNS if only is None else TURNS[-1:]:
        if only != "drafter":
            write_text(text, round(plan.tokens * share), drafter)
        if drafter is not None:
            train_drafter(drafter, until)
    if drafter is None:
        say(f"written to {plan.folder}: quickbeam generate … --drafter {plan.folder}")


def plan_text(plan: Plan, rates: Rates, there: int, trains: bool) -> str:
    """Return what is going to be done, and how long that takes at these rates.

    `there`: tokens of text that an earlier run wrote. `trains`: whether a drafter is trained on the
    text.
    """
    write, read, train = rates.seconds(plan, there)
    if not trains:
        return f"{plan.tokens:,} tokens of text: {minutes(write)} to write"
    share, until = TURNS[0]
    first = share * (write + read) + until * train
    return (
        f"{plan.tokens:,} tokens of text: {minutes(write)} to write, {minutes(read)} to read\n"
        f"{plan.visits:,} tokens to train on: {minutes(train)}; a first drafter in "
        f"{minutes(first)}\n"
        + expectation(plan)
        + "a line every 5 minutes says what it accepts of held-out answers"
    )


def expectation(plan: Plan) -> str:
    """Return what the drafter of a plan may gain, a line or two; nothing where it has a start."""
    if plan.start is not None:
        return ""
    mat = f"expected, by drafters of other models: a MAT of about {plan.expected_mat:.1f}\n"
    if plan.expected_mat >= TABLE_MAT:
        return mat
    return mat + "which gains little over a table of n-grams (--only text), the work of minutes\n"


def minutes(seconds: float) -> str:
    return f"{math.ceil(seconds / 60):,} min"


def write_text(stage: TextStage, tokens: int, drafter: DrafterStage | None) -> None:
    """Write text until there are so many tokens, and the table of its n-grams.

    The hidden states of what is written are kept for the `drafter`.
    """
    with progress_bar("text") as show:

        def wrote(count: int, rate: float) -> None:
            left = timedelta(seconds=round((tokens - count) / max(rate, 1e-9)))
            show(f"text: {count:,} tokens, {rate:.0f} a second, {left} left", count / tokens)

        stage.run(wrote, tokens, None if drafter is None else drafter.recorded)
    stage.save_table()
    say(f"text: {stage.tokens():,} tokens")


def train_drafter(stage: DrafterStage, until: float) -> None:
    """Train a drafter up to a share of its run on the text that is there."""
    plan = stage.plan
    with progress_bar("training") as show:

        def trained(report: Report) -> None:
            show(f"training: loss {report.loss:.3f}, {report.rate:.0f} tokens/s", report.done)
            say(progress_line(report))

        held = stage.run(trained, until)
    say(f"{until:.0%}: held-out agreement by position {agreements(held)}; MAT {held.mat:.2f}")
    if until < 1:
        return
    if held.mat < TABLE_MAT:
        say(no_gain(plan, held.mat))
    say(f"written to {plan.folder}: quickbeam generate … --drafter {plan.folder}")


def progress_line(report: Report) -> str:
    """Return how far a training is and how good its drafter is, in a line of 90 columns."""
    left = round(report.seen * (1 / report.done - 1) / report.rate)
    return (
        f"{report.done:.1%}: loss {report.loss:.3f}, agreement {agreements(report.held)}, "
        f"MAT {report.held.mat:.2f}, {timedelta(seconds=left)} left"
    )


def agreements(held: HeldOutMetrics) -> str:
    """Return the agreement at each position; `log.jsonl` has those behind the first ones, too."""
    texts = [f"{one:.2f}" for one in held.agreement[:POSITIONS]]
    return " ".join(texts) + (" …" if len(held.agreement) > POSITIONS else "")


def no_gain(plan: Plan, mat: float) -> str:
    """Return what to do about a drafter that gains less than the table of its text."""
    return (
        f"at a MAT of {mat:.2f} (plain decoding: 1.00) the drafter gains less than the table of "
        "n-grams\nof its text, which drafts in its place unless --drafter names it. Millions of "
        f"tokens are\nusual: the same command with more --tokens (now {plan.tokens:,}) or --epochs "
        f"(now {plan.recipe.epochs:g})\ngoes on from here"
    )


def make_shortlist(plan: Plan, how: ShortlistPlan) -> None:
    """Make a drafter's shortlist from its text."""
    with loading_progress(plan.model) as report:
        from quickbeam.train.shortlist import ShortlistTraining

        figures = ShortlistTraining(plan.model, plan.folder, how, plan.recipe.seed).run(report)
    for count, (listed, both) in figures.items():
        say(
            f"held-out recall of {count:,} rows and the context: {both:.4f}, of a "
            f"list of as many {listed:.4f}"
        )
    say(f"written to {plan.folder}")
