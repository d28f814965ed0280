"""The output of a run: tables, a JSON record and a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from quickbeam.bench.run import Results, Trial
from quickbeam.bench.summary import Summary, by_category, summaries
from quickbeam.params import COUPLED


def record(
    results: Results, environment: Mapping[str, object], model: str, settings: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON record.

    `questions` counts those answered so far, and `complete` says whether all have been asked. The
    gap of a difference is null where it is infinite.
    """
    categories = by_category(results)
    return {
        "environment": dict(environment),
        "model": model,
        "settings": dict(settings),
        "questions": len({id(trial.question) for trial in results.trials}),
        "complete": results.complete,
        "reference": results.reference,
        "methods": {
            name: asdict(summary)
            | {
                "by_category": {
                    category: asdict(rows[name]) for category, rows in categories.items()
                }
            }
            for name, summary in summaries(results).items()
        },
        "differences": [
            asdict(difference) | {"gap": difference.gap if math.isfinite(difference.gap) else None}
            for difference in results.differences
        ],
        "skipped": [asdict(skipped) for skipped in results.skipped],
        "trials": [_trial(trial) for trial in results.trials],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    times = ("seconds", "prefill_seconds", "draft_seconds", "verify_seconds", "drafter_seconds")
    figures = ("decoded", "steps", *times, "drafter_calls", "nodes")
    heads = {name: answer.head for name, answer in trial.answers.items()}
    return {
        "question_id": trial.question.question_id,
        "category": trial.question.category,
        "turn": trial.turn,
        "answers": {
            name: {figure: getattr(answer, figure) for figure in figures}
            | ({"head": asdict(head)} if (head := heads[name]) else {})
            for name, answer in trial.answers.items()
        },
    }


def category_table(results: Results) -> Table:
    """Return the table by category and method: MAT, tokens/s, speed-up, identical outputs."""
    table = Table("category", "method", title="by category")
    for column in ("MAT", "tokens/s", "speed-up", "identical"):
        table.add_column(column, justify="right")
    for category, rows in by_category(results).items():
        for i, (name, summary) in enumerate(rows.items()):
            table.add_row(
                Text("" if i else category),
                name,
                *_figures(summary),
                end_section=i == len(rows) - 1,
            )
    return table


def overall_table(results: Results) -> Table:
    """Return the table by method over all prompts, with the milliseconds of a step.

    Where a drafter is called, it also has the calls and the part of drafting that they took. Where
    its vocabulary is shortened, it has the size and the recall of the shortlist.
    """
    rows = summaries(results)
    parts = {"draft ms": "draft_ms", "verify ms": "verify_ms", "other ms": "overhead_ms"}
    if any(summary.drafter_calls for summary in rows.values()):
        parts = {
            "draft ms": "draft_ms",
            "drafter ms": "drafter_ms",
            "calls": "drafter_calls",
        } | parts
    shortened = any(summary.recall is not None for summary in rows.values())
    parts |= {"head ms": "head_ms"} if shortened else {}
    table = Table(Column("method", overflow="fold"), title="overall")
    for column in (
        "MAT",
        "tokens/s",
        "speed-up",
        "identical",
        *parts,
        *(("shortlist", "recall") if shortened else ()),
    ):
        table.add_column(column, justify="right")
    for name, summary in rows.items():
        lists = (
            (_number(summary.shortlist, ",.0f"), _number(summary.recall, ".3f"))
            if shortened
            else ()
        )
        table.add_row(
            name,
            *_figures(summary),
            *(_number(getattr(summary, part), ".2f") for part in parts.values()),
            *lists,
        )
    return table


def footer(results: Results) -> list[str]:
    """Return lines on what the tables' figures mean, and on what to know before trusting them."""
    reference = results.reference
    why = "" if reference.split("+")[0] == "ar" else " (ar is not among the methods)"
    lines = [
        f"prompts: {len(results.trials)}; reference: {reference}{why}; speed-up: its decode time "
        "per token over the method's, prefill apart"
    ]
    lines += _left_out(results)
    for name, summary in summaries(results).items():
        if (
            summary.drafter_calls
            and summary.drafter_ms is not None
            and summary.break_even_ms is not None
        ):
            took, could = (
                summary.drafter_ms / summary.drafter_calls,
                max(0.0, summary.break_even_ms),
            )
            lines.append(
                f"{name}: a call of the drafter took {took:.2f} ms; as fast as "
                f"{reference} at {could:.2f} ms"
            )
    choice = "top-2 logit gap" if results.params.greedy else "top-2 gap, noise counted in,"
    for name, count in Counter(difference.method for difference in results.differences).items():
        gaps = [difference.gap for difference in results.differences if difference.method == name]
        lines.append(
            f"{name}: {count} of {len(results.trials)} outputs differ; the target's {choice} at "
            "the first difference: "
            f"min {min(gaps):.3g}, median {median(gaps):.3g}, max {max(gaps):.3g}"
        )
    if results.skipped:
        lines.append(
            f"prompts left out: {len(results.skipped)}; the first: {results.skipped[0].reason}"
        )
    return lines


def _left_out(results: Results) -> list[str]:
    """Why some outputs are not compared, as lines; none where all are compared."""
    left = [name for name in results.methods if name not in results.compared]
    if not left:
        return []
    if results.params.seed is None and results.params.coupling == COUPLED:
        return ["tokens are sampled: give --seed to compare outputs"]
    which, whose = f"outputs of {', '.join(left)}", "they"
    if results.reference in left:
        which, whose = "outputs", f"those of {results.reference}"
    return [
        f"tokens are sampled: {which} are not compared, as {whose} are not coupled (--coupling "
        "residual, or a peer)"
    ]


def plot(results: Results, path: Path) -> None:
    """Write bars of speed-up and MAT to the file `path`, by category and overall.

    Each method has one colour. Raises `OSError` where the file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = by_category(results) | {"overall": summaries(results)}
    width = 0.8 / len(results.methods)
    figure, axes = pyplot.subplots(
        2, 1, sharex=True, figsize=(max(8.0, 0.9 * len(groups)), 7), layout="constrained"
    )
    for axis, key, label in zip(
        axes,
        ("speedup", "mean_accepted_tokens"),
        (f"speed-up over {results.reference}", "MAT"),
        strict=True,
    ):
        for i, name in enumerate(results.methods):
            heights = [getattr(rows[name], key) or 0.0 for rows in groups.values()]
            axis.bar(
                [x + (i - (len(results.methods) - 1) / 2) * width for x in range(len(groups))],
                heights,
                width,
                label=name,
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel(label)
    axes[1].set_xticks(range(len(groups)), list(groups), rotation=30, ha="right")
    axes[0].legend(ncols=min(4, len(results.methods)))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _figures(summary: Summary) -> tuple[str, str, str, str]:
    return (
        _number(summary.mean_accepted_tokens, ".2f"),
        _number(summary.tokens_per_second, ".1f"),
        _number(summary.speedup, ".2f", "x"),
        "-" if summary.identical is None else f"{summary.identical}/{summary.prompts}",
    )


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
