"""The figures of a run, as Markdown tables and as JSON, and the machine that it was made on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import transformers

import quickbeam
from quickbeam.bench.run import Results, Trial
from quickbeam.engine.result import Statistics
from quickbeam.machine import cpu_name
from quickbeam.models.native.library import describe

Figures = dict[str, Any]
# What a step costs, on average: figures, and the statistics of an answer that they are made from.
STEP_TOTALS = {
    "draft_ms": "draft_seconds",
    "verify_ms": "verify_seconds",
    "nodes": "nodes",
    "drafter_calls": "drafter_calls",
    "drafter_ms": "drafter_seconds",
    "overhead_ms": "overhead_seconds",
    "experts": "experts",
}
# columns of the table of steps, by their names in the JSON
STEP_COLUMNS = {
    "draft": "draft_ms",
    "drafter": "drafter_ms",
    "verify": "verify_ms",
    "rest": "overhead_ms",
    "prompt": "prefill_ms",
    "nodes": "nodes",
    "calls": "drafter_calls",
    "experts": "experts",
}


def summarise(method: str, trials: Sequence[Trial], reference: str, compared: bool) -> Figures:
    """Return the figures of `method` over `trials`; None where nothing was measured for one.

    - `tokens_per_second`: tokens after each prompt's first, over the seconds of decoding.
      `tokens_per_second_with_prompts`: all tokens, over the seconds of prompts and decoding.
    - `speedup`: decode seconds a token of the reference over those of the method, each summed over
      the prompts. `speedup_error`: its standard error over prompts.
    - `mean_accepted_tokens` (MAT): these tokens over the target's passes, 1.0 for plain decoding.
    - `identical`: how many answers equal the reference's, where they are `compared`.
    - of a step, on average: those of `STEP_TOTALS`. `drafter_ms` is a part of `draft_ms`; `experts`
      are those that a layer of experts reads.
    """
    expected = [trial.answers[reference] for trial in trials]
    answers = [trial.answers[method] for trial in trials]
    statistics = [answer.statistics for answer in answers]
    reference_statistics = [answer.statistics for answer in expected]
    tokens = _decoded_tokens(statistics)
    seconds = _decoding_seconds(statistics)
    prefill = sum(each.prefill_seconds for each in statistics)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, answers, strict=True))
    error = None if method == reference else _speedup_error(reference_statistics, statistics)
    return {
        "prompts": len(trials),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": _ratio(tokens, seconds),
        "tokens_per_second_with_prompts": _ratio(tokens + len(trials), seconds + prefill),
        "speedup": _speedup(reference_statistics, statistics),
        "speedup_error": error,
        "mean_accepted_tokens": _ratio(tokens, sum(each.steps for each in statistics)),
        "identical": equal if compared else None,
        "prefill_ms": _ratio(1000 * prefill, len(trials)),
        **_mean_step(statistics),
    }


def _mean_step(statistics: Sequence[Statistics]) -> Figures:
    """Return the figures of `STEP_TOTALS`; None each for a peer, whose steps have no phases."""
    figures: Figures = dict.fromkeys(STEP_TOTALS)
    steps = sum(each.steps for each in statistics)
    if any(each.verify_seconds for each in statistics):
        for name, key in STEP_TOTALS.items():
            total = sum(getattr(each, key) for each in statistics)
            figures[name] = _ratio(1000 * total if name.endswith("_ms") else total, steps)
    return figures


def summaries(results: Results, category: str | None = None) -> dict[str, Figures]:
    """Return the figures of every method, over all prompts or those of a category."""
    trials = [trial for trial in results.trials if category in (None, trial.question.category)]
    return {
        name: summarise(name, trials, results.reference, name in results.compared)
        for name in results.methods
    }


def by_category(results: Results) -> dict[str, dict[str, Figures]]:
    """Return figures by category, then by method, in order of appearance."""
    names = dict.fromkeys(trial.question.category for trial in results.trials)
    return {name: summaries(results, name) for name in names}


def record(results: Results) -> dict[str, Any]:
    """Return the JSON record; `complete` says whether all questions have been asked."""
    categories = by_category(results)
    methods = summaries(results)
    for name, figures in methods.items():
        figures["by_category"] = {category: rows[name] for category, rows in categories.items()}
    return {
        "questions": len({id(trial.question) for trial in results.trials}),
        "methods": methods,
        "complete": results.complete,
        "reference": results.reference,
        "differences": results.differences,
        "skipped": results.skipped,
    }


def tables(results: Results) -> list[str]:
    """Return a table of each category and overall, and one of what a step costs.

    The tables fit 90 columns with the names of methods.
    """
    overall = summaries(results)
    columns = dict(STEP_COLUMNS)
    if not any(figures["experts"] for figures in overall.values()):
        del columns["experts"]
    steps = [
        {"ms a step": name, **{column: number(figures[key]) for column, key in columns.items()}}
        for name, figures in overall.items()
    ]
    parts = {**by_category(results), "overall": overall}
    speeds = [_speeds(title, rows, results.reference) for title, rows in parts.items()]
    return [*speeds, markdown(steps)]


def _speeds(title: str, rows: Mapping[str, Figures], reference: str) -> str:
    """Return a table of methods, whose first column has this title."""
    return markdown(
        [
            {
                title: name,
                "MAT": number(figures["mean_accepted_tokens"]),
                "tokens/s": number(figures["tokens_per_second"]),
                "with prompts": number(figures["tokens_per_second_with_prompts"]),
                f"over {reference}": number(figures["speedup"], figures["speedup_error"]),
                "identical": same(figures),
            }
            for name, figures in rows.items()
        ]
    )


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows that have the same columns as a Markdown table, numbers on the right."""
    heads = [head.replace("|", "/") for head in rows[0]]
    texts = [[str(cell).replace("|", "/") for cell in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    right = [cell[:1] in "-0123456789" for cell in texts[0]]
    rule = [
        "-" * (width - is_right) + ":" * is_right
        for width, is_right in zip(widths, right, strict=True)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        ]
        return f"| {' | '.join(padded)} |\n"

    return "".join(map(line, [heads, rule, *texts]))


def footer(results: Results) -> list[str]:
    """Return lines on what the tables' figures mean, and on what to know before trusting them."""
    lines = [
        f"prompts: {len(results.trials)}; speed-up over {results.reference}: of decoding alone, "
        "without reading prompts",
        "ms a step: draft (drafter: in the drafter's calls), verify, rest; prompt: ms a prompt",
        "counts a step: nodes, calls of the drafter, experts read",
    ]
    others = [name for name in results.methods if name not in results.compared]
    if others:
        which = "no outputs are" if results.reference in others else f"{', '.join(others)}: not"
        lines.append(f"{which} compared: they are sampled without --seed, or by noise of their own")
    gaps_of = defaultdict[str, list[float | None]](list)
    for difference in results.differences:
        gaps_of[difference["method"]].append(difference["gap"])
    for name, gaps in gaps_of.items():
        finite = [gap for gap in gaps if gap is not None] or [float("inf")]
        lines.append(
            f"{name}: {len(gaps)} of {len(results.trials)} outputs differ; where they first do, "
            f"the two best tokens are {min(finite):.3g} to {max(finite):.3g} apart"
        )
    if results.skipped:
        reason = results.skipped[0]["reason"]
        lines.append(f"prompts left out: {len(results.skipped)}; the first: {reason}")
    return lines


def number(value: float | None, error: float | None = None) -> str:
    """Return a figure as text, with its standard error if there is one; a dash for none."""
    if value is None:
        return "-"
    digits = 2
    if value >= 100:
        digits = 0 if value >= 10_000 else 1
    return f"{value:.{digits}f}" + (f" ± {error:.2f}" if error else "")


def same(figures: Figures) -> str:
    """Return how many answers are identical, as text."""
    count = figures["identical"]
    return "-" if count is None else f"{count} of {figures['prompts']}"


def _decoded_tokens(statistics: Sequence[Statistics]) -> int:
    """Return the tokens after each prompt's first."""
    return sum(max(0, each.new_tokens - 1) for each in statistics)


def _decoding_seconds(statistics: Sequence[Statistics]) -> float:
    return sum(each.seconds for each in statistics)


def _seconds_per_token(statistics: Sequence[Statistics]) -> float | None:
    return _ratio(_decoding_seconds(statistics), _decoded_tokens(statistics))


def _speedup(reference: Sequence[Statistics], statistics: Sequence[Statistics]) -> float | None:
    return _ratio(_seconds_per_token(reference), _seconds_per_token(statistics))


def _speedup_error(
    reference: Sequence[Statistics], statistics: Sequence[Statistics]
) -> float | None:
    """Return the standard error of the speed-up, by the jackknife (Tukey, 1958).

    None for a single prompt, and where leaving one out leaves nothing to measure.
    """
    count = len(statistics)
    speedups = list[float]()
    for i in range(count):
        speedup = _speedup(
            [*reference[:i], *reference[i + 1 :]], [*statistics[:i], *statistics[i + 1 :]]
        )
        if speedup is not None:
            speedups.append(speedup)
    if len(speedups) < max(2, count):
        return None
    mean = sum(speedups) / count
    return sqrt((count - 1) / count * sum((speedup - mean) ** 2 for speedup in speedups))


def _ratio(part: float | None, total: float | None) -> float | None:
    return part / total if part is not None and total else None


def environment(device: str, dtype: str) -> dict[str, object]:
    """Return the command, the date and what speed depends on.

    `commit` is empty where the package does not run from its own checkout.
    """
    root = Path(quickbeam.__file__).resolve().parents[2]
    commit = ""
    if (root / ".git").exists() and shutil.which("git"):
        head = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    program = Path(sys.argv[0]).name.replace("__main__.py", "quickbeam")
    return {
        "command": " ".join([program, *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "quickbeam": quickbeam.__version__,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "dtype": dtype,
        "kernels": describe(device, dtype),
    }
