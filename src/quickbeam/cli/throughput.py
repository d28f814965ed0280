"""`quickbeam bench throughput`: many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
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
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.bench.throughput import Cell


def throughput(
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
        typer.Option("--methods", help="Comma-separated NAME[:BUDGET][+residual], as for bench."),
    ] = "ar,logitspec,auto",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at a time; several, comma-separated.")
    ] = "1,4,16",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help="Questions to ask, spread evenly over the categories. Default: all.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Longest answer, in tokens.")
    ] = 128,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help="Requests that arrive a second, at random (Poisson). Default: all at once.",
        ),
    ] = None,
    cancel: Annotated[
        float,
        typer.Option(
            "--cancel", min=0.0, max=1.0, help="The share of clients that go away midway."
        ),
    ] = 0.0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often every cell is run, in turn.")
    ] = 1,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    logit_bias: options.LogitBias = [],  # noqa: B006 (typer copies it)
    seed: options.Seed = 0,
    coupling: options.CouplingOption = None,
    drafter: options.Drafter = None,
    kv_memory: options.KVMemory = None,
    raw: options.Raw = False,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    weights: options.Weights = options.WeightsKind.bfloat16,
    draft_weights: options.DraftWeights = options.WeightsKind.bfloat16,
    memory: options.Memory = None,
    device: options.DeviceOption = None,
    server: Annotated[
        list[str],
        typer.Option(
            "--server",
            metavar="NAME=COMMAND",
            help="A peer that serves OpenAI's interface, in a process of its own; "
            "greedy answers only.",
        ),
    ] = [],  # noqa: B006
    served: Annotated[
        bool,
        typer.Option(
            "--served",
            help="Ask the same through `quickbeam serve` too, in a "
            "process of its own; greedy answers only.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record there.")
    ] = None,
) -> None:
    """Tokens a second of many requests at once, how long they wait for their first token and for
    each further one, and how many answers are the ones given alone by plain decoding. "Decoding"
    leaves out the steps in which prompts are read."""
    loads = numbers("--concurrency", concurrency, 1024)
    if rate is not None and not rate > 0:
        raise InvalidInput(f"--rate {rate}: must be above 0 requests a second")
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
        logit_bias=options.biases(logit_bias),
        **filters,
    )
    altered = params.temperature > 0 or params.adjusts_logits
    if (served or server) and (altered or cancel or rate is not None):
        raise InvalidInput(
            f"{'--served' if served else '--server'} asks for greedy answers, all at once: "
            "leave out --temperature, --repetition-penalty, --logit-bias, --rate and --cancel"
        )
    if json_file is not None:
        check_output("--json", json_file)
    with ExitStack() as stack, progress_bar(f"loading {model or DEFAULT}") as told:
        with redirect_stderr(StringIO()):
            from quickbeam.bench.environment import environment
            from quickbeam.bench.methods import parse_methods
            from quickbeam.bench.questions import load_questions, spread
            from quickbeam.bench.servers import Serving, ourselves, parse_server, speculation
            from quickbeam.bench.throughput import (
                Asked,
                Other,
                Stopped,
                encode,
                fitting,
                measure,
                ratios,
                requests,
            )
            from quickbeam.llm import LLM

            items = parse_methods(methods)
            if peers := [item.name for item in items if item.is_peer]:
                raise InvalidInput(
                    f"--methods {peers[0]}: answers one request at a time; name our "
                    "own methods, and servers with --server"
                )
            servers = [parse_server(text) for text in server]
            asked_of = spread(load_questions(questions), limit)
            llm = LLM(
                model,
                items[0].method,
                dtype=dtype.value,
                device=device.value if device else None,
                drafter=drafter,
                kv_memory=kv_memory,
                weights=weights.value,
                draft_weights=draft_weights.value,
                memory=memory,
                progress=told,
            )
            for item in items:
                llm.prepare(item.method, item.vocab, item.shortlist)
            prompts = encode(llm, asked_of, raw)
            asked = requests(fitting(llm, prompts, max_tokens), rate, cancel, max_tokens)
            text = {
                tuple(ids): question.turns[0]
                for (ids, _), question in zip(prompts, asked_of, strict=True)
            }

            def asking(serving: Serving, extra: dict[str, Any]) -> Other:
                def ask(some: Sequence[Asked], load: int) -> Cell:
                    return serving.measure(
                        [text[tuple(one.ids)] for one in some], load, max_tokens, raw, extra
                    )

                return ask

            others = dict[str, Other]()
            if served:
                told("starting quickbeam serve", None)
                place, size = device.value if device else None, max(loads)
                given = {
                    "--model": model,
                    "--drafter": drafter,
                    "--kv-memory": kv_memory,
                    "--dtype": dtype.value,
                    "--device": place,
                }
                given |= {"--method": items[0].method, "--max-running": str(size)}
                words = [
                    word
                    for name, value in given.items()
                    if value is not None
                    for word in (name, value)
                ]
                # without sharing: each method asks the same questions
                ours = stack.enter_context(Serving(ourselves([*words, "--no-share-prefixes"])))
                others = {
                    f"{item.name} served": asking(ours, speculation(item.method, item.budget))
                    for item in items
                }
        stopped = False
        try:
            cells = measure(llm, asked, items, loads, params, rounds, told, others=others)
        except Stopped as stop:
            cells, stopped = stop.cells, True
        record: dict[str, Any] = {
            "environment": environment(str(llm.model.device), dtype.value),
            "model": llm.name,
            "settings": {
                "questions": len(asked),
                "skipped": len(prompts) - len(asked),
                "max_tokens": max_tokens,
                "temperature": temperature,
                **filters,
                "logit_bias": logit_bias,
                "seed": seed,
                "coupling": params.coupling,
                "rate": rate,
                "cancel": cancel,
                "rounds": rounds,
                "weights": weights.value,
                "draft_weights": draft_weights.value,
                "memory": memory,
            },
            "complete": not stopped,
            "concurrency": {
                load: {name: cell.to_json() for name, cell in by_name.items()}
                for load, by_name in cells.items()
            },
            "over_ar": ratios(cells),
        }
        # called when the progress bar is gone, even if a peer fails
        stack.callback(_finish, cells, record, json_file)
        llm.close()
        if stopped:
            raise typer.Exit(130)
        for peer in servers:
            with Serving(peer) as serving:
                ask = asking(serving, {})
                ask(asked[:2], 2)
                for load in loads:
                    told(f"{peer.name}, {load} at a time", None)
                    cells[load][peer.name] = found = ask(asked, load)
                    record["concurrency"][load][peer.name] = found.to_json()


def _finish(
    cells: dict[int, dict[str, Cell]], record: dict[str, Any], json_file: Path | None
) -> None:
    """Print the tables, then write the record."""
    for load, by_name in cells.items():
        stdout().print(_table(load, by_name))
    if json_file is not None:
        save_record(json_file, record)


def _table(load: int, cells: dict[str, Cell]) -> Table:
    table = Table(title=f"{load} at a time", title_justify="left")
    rates, waits, trees = (
        ("tokens/s", "over ar", "decoding", "over ar"),
        ("ttft p50", "ttft p95", "a token p50", "p95"),
        ("MAT", "nodes"),
    )
    for column in ("", *rates, *waits, *trees, "identical"):
        table.add_column(column, justify="left" if not column else "right")
    plain = cells.get("ar")
    for name, cell in cells.items():
        found = cell.to_json()
        over = _over(cell.tokens_per_second, plain.tokens_per_second if plain else 0.0)
        decoding = cell.decoding_tokens_per_second
        alone = _over(decoding, plain.decoding_tokens_per_second if plain else 0.0)
        seen = [found[key] for key in ("p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms", "p95_tpot_ms")]
        times = ["" if wait is None else f"{wait:.0f} ms" for wait in seen]
        counts = [
            f"{found[key]:.2f}" if found[key] is not None else ""
            for key in ("mean_accepted_tokens", "nodes_per_step")
        ]
        same = "" if cell.identical is None else f"{cell.identical} of {len(cell.answers)}"
        shown = f"{decoding:.1f}" if decoding else ""
        table.add_row(
            name, f"{cell.tokens_per_second:.1f}", over, shown, alone, *times, *counts, same
        )
    return table


def _over(value: float, plain: float) -> str:
    return f"{value / plain:.2f}x" if value and plain else ""
