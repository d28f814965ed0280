"""`quickbeam train`: make a drafter for a model."""

from __future__ import annotations

from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, stderr
from quickbeam.hub import DEFAULT

if TYPE_CHECKING:
    from quickbeam.train.trainer import Report

commands = typer.Typer(help="Make a drafter for a model, from text that the model writes itself.")


@commands.callback()
def train() -> None:
    """Keeps `drafter` a command of its own."""


@commands.command()
def drafter(
    out: Annotated[Path, typer.Option("--out", help="Folder for text, checkpoints and the drafter. A second run goes on from there.")],
    model: options.Model = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1000, help="Tokens of text to write.")] = 1_000_000,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='Questions of your own, a JSON object a line: {"prompt": …}, {"turns": […]} or {"messages": […]}.'),
    ] = None,
    epochs: Annotated[float, typer.Option("--epochs", min=0.01, help="Times the text is trained on.")] = 6,
    depths: Annotated[int, typer.Option("--depths", min=1, max=12, help="Drafts ahead that are trained (training-time test).")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=64, help="Tokens a training step.")] = 1024,
    lr: Annotated[float, typer.Option("--lr", min=1e-7, help="Highest learning rate.")] = 1e-3,
    loss_vocab: Annotated[int, typer.Option("--loss-vocab", min=16, help="Tokens that a step's loss is taken over.")] = 8192,
    cooldown: Annotated[float, typer.Option("--cooldown", min=0, max=1, help="Last part of the run: the rate falls to zero.")] = 0.3,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Conversations written at a time.")] = 128,
    length: Annotated[int, typer.Option("--length", min=32, help="Longest conversation, in tokens.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Repeats a run on the same machine.")] = 0,
) -> None:
    """Write text with the model, and train a drafter on it that quickbeam then drafts with (--drafter OUT).

    Ctrl-C keeps text and checkpoint; the same command goes on. With several GPUs: accelerate launch --module quickbeam train drafter …
    """
    console = stderr()
    with progress_bar(f"loading {model or DEFAULT}"), redirect_stderr(StringIO()):
        from quickbeam.train.drafter import Recipe
        from quickbeam.train.stages import GIB, DrafterTraining, Plan

        recipe = Recipe(epochs=epochs, batch=batch, depths=depths, lr=lr, loss_vocab=loss_vocab, cooldown=cooldown, seed=seed)
        training = DrafterTraining(Plan(model, out, tokens, prompts, slots, length, recipe))
    first = training.accelerator.is_main_process
    needs = training.needs()
    if first:
        console.print(
            f"needs at most {needs.text_memory / GIB:.1f} GiB of memory for the text, {needs.train_memory / GIB:.1f} for training, "
            f"and {needs.disk / GIB:.1f} GiB of disk in {out}"
        )
    training.check_room()
    what, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), figures)
    with Progress(*columns, console=console, disable=not (console.is_terminal and first), transient=True) as bar:
        task = bar.add_task("text", total=tokens, completed=training.written(), figures="")
        told = 0

        def wrote(count: int, rate: float) -> None:
            nonlocal told
            bar.update(task, completed=count, figures=f"{rate:.0f} tokens/s")
            if first and count - told >= tokens / 20:
                told = count
                left = timedelta(seconds=round((tokens - count) / rate))
                bar.console.print(f"text: {count:,} of {tokens:,} tokens, {rate:.0f} a second, {left} left")

        training.write_text(wrote)
        bar.reset(task, description="training", total=1.0, figures="")

        def trained(report: Report) -> None:
            bar.update(task, completed=report.done, figures=f"loss {report.loss:.3f}, {report.rate:.0f} tokens/s")
            bar.console.print(line(report))

        held = training.train(trained)
    if first:
        console.print(f"held-out agreement by depth: {' '.join(f'{a:.3f}' for a in held.agreement)}")
        console.print(f"written to {out}: quickbeam generate … --method dyspec --drafter {out}")


def line(report: Report) -> str:
    """One report, in words."""
    held = report.held
    agreement = f", held-out agreement {' '.join(f'{a:.3f}' for a in held.agreement)}" if held else ""
    left = timedelta(seconds=round(report.seconds_left))
    return f"step {report.step:,} ({report.done:.0%}): loss {report.loss:.3f}{agreement}; {report.rate:.0f} tokens/s, {left} left"
