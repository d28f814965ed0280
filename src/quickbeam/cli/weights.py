"""`quickbeam bench weights`: what weights of fewer bits cost and save."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from quickbeam.bench.files import check_output
from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, save_record, stdout
from quickbeam.cli.passes import numbers
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT

if TYPE_CHECKING:
    from quickbeam.bench.weights import Row


def bench_weights(
    model: options.Model = None,
    weights: Annotated[
        str, typer.Option("--weights", help="Of bfloat16, int8 and int4, comma-separated.")
    ] = "bfloat16,int8,int4",
    widths: Annotated[
        str, typer.Option("--widths", help="Rows of a pass, comma-separated, 128 at most.")
    ] = "1,8,16",
    context: Annotated[
        int, typer.Option("--context", min=1, help="Tokens of context before a pass.")
    ] = 200,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", help="Text file that perplexity is measured on. Default: a text of our own."
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help="Spec-Bench lines (question_id, category, turns). Default: a set of our own.",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", min=1, help="Questions to ask, spread evenly over the categories."),
    ] = 8,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Longest answer, in tokens.")
    ] = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Timed passes of each kind; the median counts.")
    ] = 15,
    drafter: options.Drafter = None,
    memory: options.Memory = None,
    raw: options.Raw = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record there.")
    ] = None,
) -> None:
    """The model with each kind of weights: milliseconds of a pass by its width, perplexity, the
    share of a text's places where the likeliest token stays, tokens a second of plain and of
    drafted answers, and the bytes that a pass reads."""
    names, width_numbers = (
        [name.strip() for name in weights.split(",")],
        numbers("--widths", widths, 128),
    )
    if len(set(names)) < len(names):
        raise InvalidInput(f"--weights {weights!r}: name each kind once")
    if json_file is not None:
        check_output("--json", json_file)
    with progress_bar(f"loading {model or DEFAULT}") as told, redirect_stderr(StringIO()):
        from quickbeam.bench import weights as measured
        from quickbeam.bench.environment import environment
        from quickbeam.bench.passes import measure
        from quickbeam.bench.questions import load_questions, spread
        from quickbeam.bench.throughput import encode, fitting
        from quickbeam.llm import LLM
        from quickbeam.params import SamplingParams
        from quickbeam.target.quantised import check_weights

        for name in names:
            check_weights(name)
        try:
            written = measured.own_text() if text is None else text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"--text {text}: can't be read as UTF-8 text ({error})") from None
        asked = spread(load_questions(questions), limit)
        llms = {
            name: LLM(
                model, drafter=drafter, weights=name, memory=memory, device="cpu", progress=told
            )
            for name in names
        }
        first, rows = (
            next(iter(llms.values())),
            {name: measured.Row(bytes=llm.model.weight_bytes) for name, llm in llms.items()},
        )
        passes = {name: measured.pass_of(llm, context) for name, llm in llms.items()}
        measured.take_passes(
            rows, measure(passes, [context], width_numbers, repeats, progress=told), context
        )
        prompts = [ids for ids, _ in fitting(first, encode(first, asked, raw), max_tokens)]
        likeliest = None
        for name, llm in llms.items():
            told(f"{name}: reading a text", None)
            rows[name].perplexity, found = measured.read_text(llm, written)
            likeliest = found if likeliest is None else likeliest
            rows[name].stays = float((found == likeliest).float().mean())
            told(f"{name}: answers", None)
            measured.answer(
                llm, prompts, SamplingParams(max_tokens=max_tokens, temperature=0), rows[name]
            )
    over = measured.compare(rows)
    stdout().print(_table(rows, over))
    for name, llm in llms.items():
        if llm.model.streamed is not None:
            stdout().print(f"{name}: {llm.model.streamed.in_words}")
    if json_file is not None:
        record: dict[str, Any] = {
            "environment": environment("cpu", "bfloat16"),
            "model": first.name,
            "settings": {
                "context": context,
                "questions": len(prompts),
                "max_tokens": max_tokens,
                "text": str(text or "built-in"),
            },
            "kernels": {name: llm.kernels for name, llm in llms.items()},
            "memory": {
                name: llm.model.streamed.record()
                for name, llm in llms.items()
                if llm.model.streamed is not None
            },
            "weights": {name: row.to_json() for name, row in rows.items()},
            "over_first": over,
        }
        save_record(json_file, record)


def _table(rows: dict[str, Row], over: dict[str, dict[str, Any]]) -> Table:
    widths, methods = next(iter(rows.values())).pass_ms, next(iter(rows.values())).tokens_per_second
    table = Table(
        title=f"in brackets: how much faster than {next(iter(rows))}", title_justify="left"
    )
    columns = ["", *(f"ms, {width} tokens" for width in widths), "perplexity", "tokens that stay"]
    for column in [
        *columns,
        *(f"tokens/s, {method}" for method in methods),
        "identical",
        "MB a pass",
    ]:
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        passes = [
            f"{ms:.1f} ({over[name]['pass'][width]:.2f})" for width, ms in row.pass_ms.items()
        ]
        rates = [
            f"{rate:.1f} ({over[name]['tokens_per_second'][method]:.2f})"
            for method, rate in row.tokens_per_second.items()
        ]
        perplexity = f"{row.perplexity:.3f} ({over[name]['perplexity'] - 1:+.2%})"
        same = f"{row.identical} of {row.prompts}"
        table.add_row(
            name, *passes, perplexity, f"{row.stays:.1%}", *rates, same, f"{row.bytes / 1e6:.0f}"
        )
    return table
