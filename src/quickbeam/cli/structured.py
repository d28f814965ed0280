"""`quickbeam bench structured`: answers that follow JSON schemas."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from quickbeam.bench.files import check_output
from quickbeam.cli import options
from quickbeam.cli.common import progress_bar, save_record, stdout
from quickbeam.errors import InvalidInput
from quickbeam.hub import DEFAULT


def structured(
    model: options.Model = None,
    methods: Annotated[
        str, typer.Option("--methods", help="Comma-separated NAME[:BUDGET], as for bench.")
    ] = "ar,auto",
    answers: Annotated[
        int, typer.Option("--answers", min=1, help="Answers to each of the ten tasks.")
    ] = 10,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Longest answer, in tokens.")
    ] = 256,
    temperature: options.Temperature = 0.8,
    drafter: options.Drafter = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    device: options.DeviceOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record there.")
    ] = None,
) -> None:
    """Answers to ten tasks, each with its JSON schema and without: how many are valid, how many
    have the tokens of the first method, and tokens a second."""
    if json_file is not None:
        check_output("--json", json_file)
    with progress_bar(f"loading {model or DEFAULT}") as told:
        with redirect_stderr(StringIO()):
            from quickbeam.bench.environment import environment
            from quickbeam.bench.methods import parse_methods
            from quickbeam.bench.structured import measure, tasks
            from quickbeam.llm import LLM
            from quickbeam.params import SamplingParams

            items = parse_methods(methods)
            if peers := [item.name for item in items if item.is_peer]:
                raise InvalidInput(f"--methods {peers[0]}: knows no schemas; name our own methods")
            place = device.value if device else None
            llm = LLM(
                model,
                items[0].method,
                dtype=dtype.value,
                device=place,
                drafter=drafter,
                progress=told,
            )
            for item in items:
                llm.prepare(item.method, item.vocab, item.shortlist)
        asked = tasks()
        rows = measure(
            llm,
            asked,
            items,
            answers,
            SamplingParams(max_tokens=max_tokens, temperature=temperature),
            told,
        )
    table = Table()
    for column in ("", "method", "valid", "identical", "tokens/s", "MAT", "tokens an answer"):
        table.add_column(column, justify="right" if column not in ("", "method") else "left")
    for (kind, name), row in rows.items():
        counts = f"{row.valid} of {row.answers}", f"{row.identical} of {row.answers}"
        mat, length = row.tokens / max(1, row.steps), row.tokens / row.answers + 1
        table.add_row(
            kind, name, *counts, f"{row.tokens_per_second:.1f}", f"{mat:.2f}", f"{length:.0f}"
        )
    stdout().print(table)
    if json_file is not None:
        settings = {
            "tasks": len(asked),
            "answers": answers,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        record = {
            "environment": environment(str(llm.model.device), dtype.value),
            "model": llm.name,
            "settings": settings,
        }
        found = {
            kind: {name: row.to_json() for (of, name), row in rows.items() if of == kind}
            for kind, _ in rows
        }
        save_record(json_file, record | {"structured": found})
