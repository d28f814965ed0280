"""The figures of a run, as Markdown tables and as JSON; and on what machine it was made."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
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
# what a step costs, on average; a peer's has no phases
STEP = {"draft_ms": "draft_seconds", "verify_ms": "verify_seconds", "nodes": "nodes"}
STEP |= {"drafter_calls": "drafter_calls", "drafter_ms": "drafter_seconds"}
STEP |= {"overhead_ms": "overhead_seconds", "experts": "experts"}
# columns of the table of steps, by their names in the JSON
COLUMNS = {
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
    - of a step, on average: those of `STEP`. `drafter_ms` is a part of `draft_ms`; `experts` are
      those that a layer of experts reads.
    """
    pairs = [(one.answers[reference], one.answers[method]) for one in trials]
    both = [(expected.statistics, answer.statistics) for expected, answer in pairs]
    statistics = [own for _, own in both]
    (tokens, seconds), steps = _decoded(statistics), sum(one.steps for one in statistics)
    prefill = sum(one.prefill_seconds for one in statistics)
    equal = sum(expected.token_ids == answer.token_ids for expected, answer in pairs)
    phases = any(one.verify_seconds for one in statistics)
    totals = {name: sum(getattr(one, key) for one in statistics) for name, key in STEP.items()}
    step = {
        name: _ratio(total * (1000 if name.endswith("ms") else 1), steps) if phases else None
        for name, total in totals.items()
    }
    return {
        "prompts": len(trials),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": _ratio(tokens, seconds),
        "tokens_per_second_with_prompts": _ratio(tokens + len(trials), seconds + prefill),
        "speedup": _speedup(both),
        "speedup_error": None if method == reference else _error(both),
        "mean_accepted_tokens": _ratio(tokens, steps),
        "identical": equal if compared else None,
        "prefill_ms": _ratio(1000 * prefill, len(trials)),
        **step,
    }


def summaries(results: Results, category: str | None = None) -> dict[str, Figures]:
    """Return the figures of every method, over all prompts or those of a category."""
    trials = [one for one in results.trials if category in (None, one.question.category)]
    known, compared = (trials, results.reference), results.compared
    return {name: summarise(name, *known, name in compared) for name in results.methods}


def by_category(results: Results) -> dict[str, dict[str, Figures]]:
    """Return figures by category, then by method, in order of appearance."""
    names = dict.fromkeys(trial.question.category for trial in results.trials)
    return {name: summaries(results, name) for name in names}


def record(results: Results) -> dict[str, Any]:
    """Return the JSON record; `complete` says whether all questions have been asked."""
    parts, methods = by_category(results), summaries(results)
    for name, one in methods.items():
        one["by_category"] = {category: rows[name] for category, rows in parts.items()}
    kept = ("complete", "reference", "differences", "skipped")
    questions = len({id(trial.question) for trial in results.trials})
    known = {key: getattr(results, key) for key in kept}
    return {"questions": questions, "methods": methods, **known}


def tables(results: Results) -> list[str]:
    """Return a table of each category and overall, and one of what a step costs.

    They fit 90 columns with the names of methods.
    """
    whole = summaries(results)
    parts = {**by_category(results), "overall": whole}
    columns = dict(COLUMNS)
    if not any(one["experts"] for one in whole.values()):
        del columns["experts"]
    steps = [
        {"ms a step": name} | {column: number(one[key]) for column, key in columns.items()}
        for name, one in whole.items()
    ]
    speeds = [_speeds(category, rows, results.reference) for category, rows in parts.items()]
    return [*speeds, markdown(steps)]


def _speeds(title: str, rows: Mapping[str, Figures], reference: str) -> str:
    """Return a table of methods, whose first column has this title."""
    return markdown(
        [
            {title: name, "MAT": number(one["mean_accepted_tokens"])}
            | {"tokens/s": number(one["tokens_per_second"])}
            | {"with prompts": number(one["tokens_per_second_with_prompts"])}
            | {f"over {reference}": number(one["speedup"], one["speedup_error"])}
            | {"identical": same(one)}
            for name, one in rows.items()
        ]
    )


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows that have the same columns as a Markdown table, numbers on the right."""
    texts = [[str(cell).replace("|", "/") for cell in row.values()] for row in rows]
    lines = [[head.replace("|", "/") for head in rows[0]], *texts]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [cell[:1] in "-0123456789" for cell in texts[0]]
    lines.insert(1, ["-" * (n - last) + ":" * last for n, last in zip(widths, right, strict=True)])

    def drawn(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ]
        return f"| {' | '.join(cells)} |\n"

    return "".join(map(drawn, lines))


def footer(results: Results) -> list[str]:
    """Return lines on what the tables' figures mean, and on what to know before trusting them."""
    lines = [
        f"prompts: {len(results.trials)}; speed-up over {results.reference}: of decoding alone, "
        "without reading prompts",
        "ms a step: draft (drafter: in the drafter's calls), verify, rest; prompt: ms a prompt",
        "counts a step: nodes, calls of the drafter, experts read",
    ]
    if left := [name for name in results.methods if name not in results.compared]:
        which = "no outputs are" if results.reference in left else f"{', '.join(left)}: not"
        lines.append(f"{which} compared: they are sampled without --seed, or by noise of their own")
    for name in dict.fromkeys(one["method"] for one in results.differences):
        gaps = [one["gap"] for one in results.differences if one["method"] == name]
        known = [gap for gap in gaps if gap is not None] or [float("inf")]
        lines.append(
            f"{name}: {len(gaps)} of {len(results.trials)} outputs differ; where they first do, "
            f"the two best tokens are {min(known):.3g} to {max(known):.3g} apart"
        )
    if results.skipped:
        count, first = len(results.skipped), results.skipped[0]["reason"]
        lines.append(f"prompts left out: {count}; the first: {first}")
    return lines


def number(value: float | None, error: float | None = None) -> str:
    """Return a figure as text, with its standard error if there is one; a dash for none."""
    if value is None:
        return "-"
    digits = 0 if value >= 10_000 else 1 if value >= 100 else 2
    return f"{value:.{digits}f}" + (f" ± {error:.2f}" if error else "")


def same(figures: Figures) -> str:
    """Return how many answers are identical, as text."""
    count = figures["identical"]
    return "-" if count is None else f"{count} of {figures['prompts']}"


def _decoded(statistics: Sequence[Statistics]) -> tuple[int, float]:
    """Return the tokens after each prompt's first, and the seconds of decoding."""
    tokens = sum(max(0, one.new_tokens - 1) for one in statistics)
    return tokens, sum(one.seconds for one in statistics)


def _speedup(pairs: Sequence[tuple[Statistics, Statistics]]) -> float | None:
    tokens, seconds = _decoded([expected for expected, _ in pairs])
    own_tokens, own_seconds = _decoded([own for _, own in pairs])
    return _ratio(_ratio(seconds, tokens), _ratio(own_seconds, own_tokens))


def _error(pairs: Sequence[tuple[Statistics, Statistics]]) -> float | None:
    """The standard error of the speed-up by the jackknife (Tukey, 1958); None for one prompt."""
    without = [_speedup([*pairs[:i], *pairs[i + 1 :]]) for i in range(len(pairs))]
    known = [one for one in without if one is not None]
    if len(known) < max(2, len(pairs)):
        return None
    middle = sum(known) / len(known)
    return sqrt((len(known) - 1) / len(known) * sum((one - middle) ** 2 for one in known))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def environment(device: str, dtype: str) -> dict[str, object]:
    """Return the command, the date and what speed depends on.

    `commit` is empty where the package does not run from its own checkout.
    """
    root, commit = Path(quickbeam.__file__).resolve().parents[2], ""
    if (root / ".git").exists() and shutil.which("git"):
        head = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "quickbeam": quickbeam.__version__}
    command = " ".join([Path(sys.argv[0]).name.replace("__main__.py", "quickbeam"), *sys.argv[1:]])
    known = {"command": command, "date": date.today().isoformat(), "commit": commit, **versions}
    cores = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    kernels = describe(device, dtype)
    return {**known, **cores, "device": device, "dtype": dtype, "kernels": kernels}
