"""`quickbeam bench passes`: what one pass of the model costs, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, stdout, strict_json
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT

if TYPE_CHECKING:
    from quickbeam.bench.breakdown import Bandwidth, Breakdown
    from quickbeam.bench.passes import Figures

PEER = "llama.cpp"


def passes(
    model: options.Model = None,
    context: Annotated[
        str, typer.Option("--context", help="Tokens of context before the pass, comma-separated.")
    ] = "200",
    widths: Annotated[
        str, typer.Option("--widths", help="Rows of a pass, comma-separated, 128 at most.")
    ] = "1,2,4,8,16,32,64",
    ways: Annotated[
        str | None,
        typer.Option(
            "--ways",
            help="Some of transformers, plain, fast, exact and native, comma-separated. "
            "Default: all that this machine has.",
        ),
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            "--llama-cpp",
            metavar="FILE.gguf",
            help="The same model for llama.cpp, whose pass over one token is timed.",
        ),
    ] = None,
    llama_cpp_python: Annotated[
        str | None,
        typer.Option(
            "--llama-cpp-python",
            metavar="PATH",
            help="A Python that has llama_cpp installed. Default: this one.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Timed passes of each kind; the median counts.")
    ] = 15,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    weights: options.Weights = options.WeightsKind.bfloat16,
    memory: options.Memory = None,
    device: options.DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record.")] = False,
) -> None:
    """Milliseconds of one pass of the model by its rows and context: transformers as it comes, the
    plain path, PyTorch's operators (fast, or exact: bit-identical), the native kernels, and where
    the time of a native pass goes."""
    width_numbers = numbers("--widths", widths, 128)
    contexts = numbers("--context", context, None)
    names = [] if ways is None else [part.strip() for part in ways.split(",")]
    with progress_bar(f"loading {model or DEFAULT}") as loading, ExitStack() as stack:
        with redirect_stderr(StringIO()):
            from quickbeam import hub
            from quickbeam.bench.breakdown import break_down, measure_bandwidth
            from quickbeam.bench.environment import environment
            from quickbeam.bench.llama_cpp import llama_cpp as run_llama_cpp
            from quickbeam.bench.passes import (
                WAYS,
                make_passes,
                measure,
                over_first_context,
                over_first_width,
            )
            from quickbeam.target.loading import pick_device

            if unknown := [name for name in names if name not in WAYS]:
                raise InvalidInput(f"--ways: unknown way {unknown[0]!r}; known: {', '.join(WAYS)}")
            place = device.value if device else None
            singles = {}
            if llama_cpp is not None:
                loading(f"{PEER}: reading {max(contexts)} tokens", None)
                singles[PEER] = stack.enter_context(
                    run_llama_cpp(llama_cpp, contexts, llama_cpp_python)
                )
            made = make_passes(
                hub.resolve(model, loading),
                dtype.value,
                place,
                contexts,
                names,
                loading,
                weights.value,
                memory,
            )
            bandwidth = None
            if made.parts:
                loading("the memory's bandwidth", None)
                bandwidth = measure_bandwidth()
        figures = measure(
            {**made.ways, **made.parts}, contexts, width_numbers, repeats, singles, loading
        )
    breakdown = break_down(figures, made.weight_bytes, bandwidth) if bandwidth else {}
    peer, figures = figures.get(PEER), {name: figures[name] for name in made.ways}
    by_width, by_context = over_first_width(figures), over_first_context(figures)
    ours = "native" if "native" in figures else list(figures)[-1]
    beside = compare(figures[ours], peer) if peer else {}
    if as_json:
        record: dict[str, Any] = {
            "model": model or DEFAULT,
            "context": contexts[0],
            "dtype": dtype.value,
            "weights": weights.value,
        }
        if made.streamed is not None:
            record["memory"] = made.streamed.record()
        # those of the first context
        record["milliseconds"] = {name: found[contexts[0]] for name, found in figures.items()}
        record |= {
            "contexts": figures,
            "over_first_width": by_width,
            "over_first_context": by_context,
        }
        if bandwidth:
            record["native"] = {
                "weight_bytes": made.weight_bytes,
                "gigabytes_per_second": bandwidth._asdict(),
            }
            record["native"]["parts"] = {
                at: {width: {**one._asdict(), "rest": one.rest} for width, one in row.items()}
                for at, row in breakdown.items()
            }
        if beside:
            record["llama_cpp"] = {"way": ours, "contexts": beside}
        print(
            strict_json(
                {**record, "environment": environment(str(pick_device(place)), dtype.value)}
            )
        )
        return
    console = stdout()
    console.print(times(figures, dtype.value, contexts, width_numbers))
    if len(width_numbers) > 1:
        console.print(
            ratios(
                f"each width over {min(width_numbers)} of the same way",
                by_width,
                contexts,
                width_numbers,
            )
        )
    if len(contexts) > 1:
        console.print(
            ratios(f"each context over {min(contexts)} tokens", by_context, contexts, width_numbers)
        )
    if made.streamed is not None:
        console.print(made.streamed.in_words)
    if bandwidth:
        console.print(parts(breakdown, bandwidth, made.weight_bytes))
    if beside:
        console.print(peers(beside, ours))


def numbers(option: str, text: str, most: int | None) -> list[int]:
    """Return comma-separated whole numbers, each once.

    Raises `InvalidInput` for a number below 1 or above `most`, and for other text.
    """
    found = [part.strip() for part in text.split(",")]
    if not all(
        part.isascii() and part.isdigit() and int(part) >= 1 and (most is None or int(part) <= most)
        for part in found
    ):
        raise InvalidInput(
            f"{option} {text!r}: must be whole numbers from "
            f"1{f' to {most}' if most else ''}, comma-separated"
        )
    return list(dict.fromkeys(int(part) for part in found))


def compare(
    own: dict[int, dict[int, float]], peer: dict[int, dict[int, float]]
) -> dict[int, dict[str, float]]:
    """Return the milliseconds of a pass with one token beside llama.cpp's, by context.

    Our figure is left out if one token is not among the widths.
    """
    found: dict[int, dict[str, float]] = {}
    for context, by_width in peer.items():
        found[context] = {"milliseconds": by_width[1]}
        if 1 in own[context]:
            found[context] |= {"ours": own[context][1], "ratio": own[context][1] / by_width[1]}
    return found


def _grid(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def times(figures: Figures, dtype: str, contexts: Sequence[int], widths: Sequence[int]) -> Table:
    base = figures.get("transformers")
    title = f"milliseconds a pass, {dtype}" + (
        " (in brackets: transformers' over it)" if base else ""
    )
    table = _grid(title, ("context", "tokens a pass", *figures))
    for context in contexts:
        for width in widths:
            cells = [found[context][width] for found in figures.values()]
            shown = (
                f"{ms:.1f}" + (f" ({base[context][width] / ms:.2f})" if base else "")
                for ms in cells
            )
            table.add_row(str(context), str(width), *shown)
    return table


def ratios(title: str, figures: Figures, contexts: Sequence[int], widths: Sequence[int]) -> Table:
    table = _grid(title, ("context", "tokens a pass", *figures))
    for context in contexts:
        for width in widths:
            table.add_row(
                str(context),
                str(width),
                *(f"{found[context][width]:.2f}" for found in figures.values()),
            )
    return table


def parts(
    breakdown: dict[int, dict[int, Breakdown]], bandwidth: Bandwidth, weight_bytes: int
) -> Table:
    title = (
        f"milliseconds of a native pass; weights of {weight_bytes / 1e6:.0f} MB against "
        f"{bandwidth.best:.1f} GB/s that memory gives"
    )
    how = f" (a sum {bandwidth.sum:.1f}, a product {bandwidth.product:.1f})"
    columns = (
        "context",
        "tokens a pass",
        "whole",
        "products",
        "attention",
        "rest",
        "GB/s",
        "of memory's",
    )
    table = _grid(title + how, columns)
    for context, by_width in breakdown.items():
        for width, one in by_width.items():
            shown = (
                f"{ms:.2f}" for ms in (one.milliseconds, one.products, one.attention, one.rest)
            )
            table.add_row(
                str(context),
                str(width),
                *shown,
                f"{one.gigabytes_per_second:.1f}",
                f"{one.share:.0%}",
            )
    return table


def peers(beside: dict[int, dict[str, float]], ours: str) -> Table:
    table = _grid(
        f"milliseconds of one token, {PEER} beside {ours}",
        ("context", PEER, ours, f"{ours} over {PEER}"),
    )
    for context, one in beside.items():
        own = (f"{one['ours']:.2f}", f"{one['ratio']:.2f}") if "ours" in one else ("-", "-")
        table.add_row(str(context), f"{one['milliseconds']:.2f}", *own)
    return table
