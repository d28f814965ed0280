"""`quickbeam train`: make a drafter for a model, and a shortlist for the drafter."""

from __future__ import annotations

import signal
import threading
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, stderr
from quickbeam.hub import DEFAULT
from quickbeam.train.openers import LANGUAGES

if TYPE_CHECKING:
    from quickbeam.train.router import Epoch
    from quickbeam.train.trainer import Report

Folder = Annotated[
    Path,
    typer.Option(
        "--out",
        help="Folder of `train drafter`, with its text. The shortlist is written there too.",
    ),
]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


commands = typer.Typer(
    help="Make a drafter for a model, from text that the model writes itself, "
    "and a shortlist of its vocabulary."
)


@commands.callback()
def begin() -> None:
    """What a scheduler sends before it kills (SIGTERM) counts as Ctrl-C: what was made is
    written."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


@commands.command()
def drafter(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder for text, checkpoints and the drafter. A second run goes on from there.",
        ),
    ],
    model: options.Model = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1000, help="Tokens of text to write.")
    ] = 1_000_000,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='Questions of your own, a JSON object a line: {"prompt": '
            '…}, {"turns": […]} or {"messages": […]}.',
        ),
    ] = None,
    epochs: Annotated[
        float, typer.Option("--epochs", min=0.01, help="Times the text is trained on.")
    ] = 6,
    depths: Annotated[
        int,
        typer.Option(
            "--depths", min=1, max=12, help="Drafts ahead that are trained (training-time test)."
        ),
    ] = 3,
    batch: Annotated[int, typer.Option("--batch", min=64, help="Tokens a training step.")] = 1024,
    lr: Annotated[float, typer.Option("--lr", min=1e-7, help="Highest learning rate.")] = 1e-3,
    loss_vocab: Annotated[
        int, typer.Option("--loss-vocab", min=16, help="Tokens that a step's loss is taken over.")
    ] = 8192,
    cooldown: Annotated[
        float,
        typer.Option(
            "--cooldown", min=0, max=1, help="Last part of the run: the rate falls to zero."
        ),
    ] = 0.3,
    slots: Annotated[
        int, typer.Option("--slots", min=1, help="Conversations written at a time.")
    ] = 128,
    length: Annotated[
        int, typer.Option("--length", min=32, help="Longest conversation, in tokens.")
    ] = 512,
    quote: Annotated[
        float,
        typer.Option(
            "--quote",
            min=0,
            max=1,
            help="Share of conversations about a longer text, made of what was written before.",
        ),
    ] = 0.15,
    languages: Annotated[
        str,
        typer.Option(
            "--languages",
            help="Of the questions and documents that the model writes, in equal parts: "
            f"{', '.join(LANGUAGES)}.",
        ),
    ] = "en",
    start: Annotated[
        Path | None,
        typer.Option(
            "--start",
            help="Begin with the weights of this drafter (a "
            "folder), to train it on with other text.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Repeats a run on the same machine.")] = 0,
) -> None:
    """Write text with the model, and train a drafter on it that quickbeam then drafts with
    (--drafter OUT).

    Ctrl-C keeps text and checkpoint; the same command goes on. With several GPUs: accelerate launch
    --module quickbeam train drafter …
    """
    console = stderr()
    with progress_bar(f"loading {model or DEFAULT}"), redirect_stderr(StringIO()):
        from quickbeam.train.drafter import Recipe
        from quickbeam.train.stages import GIB, DrafterTraining, Plan

        recipe = Recipe(
            epochs=epochs,
            batch=batch,
            depths=depths,
            lr=lr,
            loss_vocab=loss_vocab,
            cooldown=cooldown,
            seed=seed,
        )
        training = DrafterTraining(
            Plan(
                model,
                out,
                tokens,
                prompts,
                slots,
                length,
                quote,
                start,
                [word.strip() for word in languages.split(",") if word.strip()],
                recipe,
            )
        )
    first = training.accelerator.is_main_process
    needs = training.needs()
    if first:
        console.print(
            f"needs at most {needs.text_memory / GIB:.1f} GiB of memory for the text, "
            f"{needs.train_memory / GIB:.1f} for training, "
            f"and {needs.disk / GIB:.1f} GiB of disk in {out}"
        )
    training.check()
    with stages_bar(console, first) as bar:
        told = training.written()
        task = bar.add_task("text", total=tokens, completed=told, figures="")

        def wrote(count: int, rate: float) -> None:
            nonlocal told
            bar.update(task, completed=count, figures=f"{rate:.0f} tokens/s")
            if first and rate and count - told >= tokens / 20:
                told = count
                left = timedelta(seconds=round((tokens - count) / rate))
                bar.console.print(
                    f"text: {count:,} of {tokens:,} tokens, {rate:.0f} a second, {left} left"
                )

        training.write_text(wrote)
        bar.reset(task, description="training", total=1.0, figures="")

        def trained(report: Report) -> None:
            bar.update(
                task,
                completed=report.done,
                figures=f"loss {report.loss:.3f}, {report.rate:.0f} tokens/s",
            )
            bar.console.print(line(report))

        held = training.train(trained)
    if first:
        console.print(
            f"held-out agreement by depth: {' '.join(f'{a:.3f}' for a in held.agreement)}"
        )
        console.print(f"written to {out}: quickbeam generate … --method dyspec --drafter {out}")


def line(report: Report) -> str:
    """Return a report in words."""
    held = report.held
    agreement = (
        (f", held-out agreement {' '.join(f'{a:.3f}' for a in held.agreement)}") if held else ""
    )
    left = timedelta(seconds=round(report.seconds_left))
    return (
        f"step {report.step:,} ({report.done:.0%}): loss {report.loss:.3f}{agreement}; "
        f"{report.rate:.0f} tokens/s, {left} left"
    )


@commands.command()
def clusters(
    out: Folder,
    model: options.Model = None,
    frequent: Annotated[
        int | None,
        typer.Option(
            "--frequent",
            min=1,
            help="Tokens that are always scored. Default: a twelfth of the vocabulary.",
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            "--size", min=1, help="Tokens a cluster. Default: 512, fewer for small vocabularies."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Repeats a run on the same machine.")] = 0,
) -> None:
    """Order a drafter's vocabulary for a shortlist: frequent tokens, then clusters of tokens that
    are alike. A router over clusters that were there before is dropped."""
    console = stderr()
    with progress_bar(f"loading {model or DEFAULT}") as report, redirect_stderr(StringIO()):
        from quickbeam.train.shortlists import ClusterTraining

        training = ClusterTraining(model, out, frequent, size, seed)
        report("clustering", None)
        made = training.run()
    layout = made.artefact.layout
    console.print(
        f"the {layout.frequent:,} frequent tokens are {made.share:.1%} of the text; "
        f"{layout.clusters} clusters of {layout.size}"
    )
    if made.dropped:
        console.print("the router was over other clusters and is dropped")
    console.print(
        f"written to {out}: quickbeam train router --out "
        f"{out}{f' --model {model}' if model else ''}"
    )


@commands.command()
def router(
    out: Folder,
    model: options.Model = None,
    rows: Annotated[
        int,
        typer.Option("--rows", min=1, help="Rows of the drafter that the router is trained on."),
    ] = 200_000,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Times the rows are trained on.")
    ] = 6,
    width: Annotated[
        int, typer.Option("--width", min=1, help="Of the router's hidden layer.")
    ] = 256,
    depths: Annotated[
        int, typer.Option("--depths", min=1, max=12, help="Drafts ahead that it is trained for.")
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Repeats a run on the same machine.")] = 0,
) -> None:
    """Train the router of a drafter's shortlist: which clusters a row of the drafter calls for
    (quickbeam train clusters makes them).

    Ctrl-C between epochs keeps the best router so far.
    """
    console = stderr()
    with progress_bar(f"loading {model or DEFAULT}"), redirect_stderr(StringIO()):
        from quickbeam.train.router import RouterRecipe
        from quickbeam.train.shortlists import GIB, RouterTraining

        training = RouterTraining(
            model,
            out,
            RouterRecipe(rows=rows, epochs=epochs, width=width, depths=depths, seed=seed),
        )
    console.print(f"needs at most {training.memory() / GIB:.1f} GiB of memory beside the model")
    training.check_memory()
    with stages_bar(console) as bar:
        task = bar.add_task("labels", total=1.0, figures="")

        def labelled(done: float) -> None:
            bar.update(task, completed=done)
            if done >= 1:
                bar.reset(task, description="training", total=float(epochs), figures="")

        def trained(epoch: Epoch) -> None:
            bar.update(task, completed=epoch.number, figures=f"loss {epoch.loss:.3f}")
            bar.console.print(
                f"epoch {epoch.number} of {epochs}: loss {epoch.loss:.3f}, held out "
                f"{epoch.held.loss:.3f}"
            )

        held = training.run(labelled, trained)
    for depth, row in enumerate(held.recall, 1):
        shares = ", ".join(
            f"{share:.3f} with {k}" if k else f"{share:.3f} by the frequent ones"
            for k, share in zip(held.choices, row, strict=True)
        )
        console.print(f"held-out recall at depth {depth}: {shares} clusters")
    console.print(f"written to {out}")


@commands.command()
def shortlist(
    out: Folder,
    model: options.Model = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Places of the text that it is taught on, at most.")
    ] = 400_000,
    listed: Annotated[
        int | None,
        typer.Option(
            "--listed",
            min=1,
            help="Tokens that are always scored. Default: one in 48 of the vocabulary, "
            "at most 1,024.",
        ),
    ] = None,
    list_of: Annotated[
        Path | None,
        typer.Option(
            "--list-of",
            help="Folder of a drafter whose shortlist says which tokens are frequent, of more "
            "text than this one's.",
        ),
    ] = None,
    size: Annotated[
        int, typer.Option("--size", min=1, help="Tokens a cluster, a multiple of 8.")
    ] = 16,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Times the places are taught.")
    ] = 4,
    width: Annotated[
        int, typer.Option("--width", min=1, help="Of the router's hidden layer.")
    ] = 256,
    depths: Annotated[
        int, typer.Option("--depths", min=1, max=12, help="Drafts ahead that it is taught for.")
    ] = 3,
) -> None:
    """Make a drafter's shortlist in one go: small clusters of tokens that are wanted in the same
    places, and a router taught to find what neither the frequent tokens nor the context have. Takes
    the place of train clusters and train router."""
    with progress_bar(f"loading {model or DEFAULT}") as report, redirect_stderr(StringIO()):
        from quickbeam.train.wanted import Teaching, WantedTraining

        found = WantedTraining(
            model, out, listed, size, rows, Teaching(width=width, epochs=epochs), depths, list_of
        ).run(report)
    for count, (plain, one) in found.items():
        stderr().print(
            f"held-out recall of {count:,} rows and the context: {one.recall:.4f}, of a "
            f"list of as many {plain.recall:.4f}"
        )
    stderr().print(f"written to {out}")


def stages_bar(console: Console, shown: bool = True) -> Progress:
    """Return a progress bar for the stages of a training.

    It shows what is going on, how far it is, and the field `figures`. It disappears at the end.
    """
    what, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), figures)
    return Progress(
        *columns, console=console, disable=not (console.is_terminal and shown), transient=True
    )
