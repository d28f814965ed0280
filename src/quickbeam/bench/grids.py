"""The tables of each kind of record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from quickbeam.bench import cost_grids, draft_grids
from quickbeam.bench.grid import NONE, TIMES, Grid, figure, grid
from quickbeam.bench.saved import Saved, told
from quickbeam.errors import InvalidInput

Content = Mapping[str, Any]
MODEL = "the model itself"  # the source of a token that was not drafted


def grids(saved: Saved) -> list[Grid]:
    """Return all tables of a record, the main one first.

    Raises `InvalidInput` for a record with missing or broken fields.
    """
    with told(saved):
        return TABLES[saved.kind](saved.content)


def pick(saved: Saved, name: str | None, columns: Sequence[str] | None) -> Grid:
    """Return one table of a record.

    Without `name` it is the first one. Without `columns` it has all columns with figures. Raises
    `InvalidInput` for an unknown name.
    """
    found = grids(saved)
    chosen = found[0] if name is None else next((one for one in found if one.name == name), None)
    if chosen is None:
        raise InvalidInput(
            f"bench {saved.kind} has no table {name!r}; known: "
            f"{', '.join(one.name for one in found)}"
        )
    return chosen.filled() if columns is None else chosen.only(columns)


def speedup_error(trials: Sequence[Content], method: str, reference: str) -> float | None:
    """Return the standard error of a speed-up over prompts.

    It is that of the jackknife (Tukey, 1958): the speed-up is computed again with each prompt left
    out. None for fewer than two prompts, for the reference itself, and where a speed-up is not
    defined.
    """
    pairs = [(trial["answers"][reference], trial["answers"][method]) for trial in trials]
    without = [
        _speedup([pair for i, pair in enumerate(pairs) if i != left]) for left in range(len(pairs))
    ]
    known = [one for one in without if one is not None]
    if method == reference or len(pairs) < 2 or len(known) < len(pairs):
        return None
    middle = sum(known) / len(known)
    return sqrt((len(known) - 1) / len(known) * sum((one - middle) ** 2 for one in known))


def _speedup(pairs: Sequence[tuple[Content, Content]]) -> float | None:
    """Seconds per token of the reference over those of the method, as in `summary.py`.

    None where a sum is 0.
    """
    sums = [
        [sum(answer[key] for answer in side) for key in ("seconds", "decoded")]
        for side in zip(*pairs, strict=True)
    ]
    if len(sums) < 2 or any(number == 0 for side in sums for number in side):
        return None
    (seconds, tokens), (own_seconds, own_tokens) = sums
    return float(seconds / tokens / (own_seconds / own_tokens))


def _methods(content: Content) -> list[Grid]:
    reference, trials = content["reference"], content["trials"]
    categories = list(dict.fromkeys(trial["category"] for trial in trials))
    rows = [
        _method({"method": name}, one, trials, name, reference)
        for name, one in content["methods"].items()
    ]
    parts = [
        _answers(
            {"category": category, "method": name},
            one["by_category"][category],
            held,
            name,
            reference,
        )
        for category in categories
        for held in [[trial for trial in trials if trial["category"] == category]]
        for name, one in content["methods"].items()
    ]
    over = f"speed-up over {reference}, with its standard error over prompts"
    phases = [
        {
            "method": name,
            **{phase: figure(ms) for phase, ms in (phases_of(one) or {}).items()},
            "ms a token": figure(pace),
        }
        for name, one in content["methods"].items()
        for pace in [1000 / one["tokens_per_second"] if one["tokens_per_second"] else None]
    ]
    sources = [
        {
            "method": name,
            **{source: figure(count) for source, count in found.items()},
            "MAT": figure(one["mean_accepted_tokens"]),
        }
        for name, one in content["methods"].items()
        if (found := sources_of(one))
    ]
    return [
        grid("overall", f"all prompts; {over}", rows),
        grid("categories", f"by category; {over}", parts, 2),
        _last("ms a token", grid("phases", "milliseconds a decoded token, by phase", phases)),
        *(
            [_last("MAT", grid("sources", "tokens a step, by who proposed them", sources))]
            if sources
            else []
        ),
    ]


def _last(column: str, found: Grid) -> Grid:
    """The same table with this column at the end."""
    return found.only([*(name for name in found.columns[found.labels :] if name != column), column])


def phases_of(one: Content) -> dict[str, float] | None:
    """Return a method's milliseconds per decoded token by phase.

    None where the method doesn't measure phases.
    """
    mat, parts = (
        one["mean_accepted_tokens"],
        [one[key] for key in ("draft_ms", "verify_ms", "overhead_ms")],
    )
    if not mat or None in parts:
        return None
    drafting, verifying, other = parts
    calls = one["drafter_ms"] or 0.0
    steps = {
        "verification": verifying,
        "calls of the drafter": calls,
        "other drafting": drafting - calls,
        "other": other,
    }
    return {phase: ms / mat for phase, ms in steps.items()}


def sources_of(one: Content) -> dict[str, float] | None:
    """Return a method's tokens per step by the source that proposed them.

    Tokens that were not drafted count under `MODEL`, so the figures add up to MAT. None where the
    method doesn't count sources.
    """
    mat, accepted = one["mean_accepted_tokens"], one.get("accepted")
    if mat is None or accepted is None:
        return None
    return {MODEL: mat - sum(accepted.values()), **accepted}


def _answers(
    labels: dict[str, str], one: Content, trials: Sequence[Content], name: str, reference: str
) -> dict[str, str]:
    error = speedup_error(trials, name, reference)
    same = NONE if one["identical"] is None else f"{one['identical']}/{one['prompts']}"
    return {
        **labels,
        "MAT": figure(one["mean_accepted_tokens"]),
        "tokens/s": figure(one["tokens_per_second"], ".1f"),
        "speed-up": figure(one["speedup"], ".2f", TIMES)
        + (f" ± {error:.2f}" if error is not None else ""),
        "identical": same,
    }


def _method(
    labels: dict[str, str], one: Content, trials: Sequence[Content], name: str, reference: str
) -> dict[str, str]:
    times = {
        "verify ms": "verify_ms",
        "draft ms": "draft_ms",
        "drafter ms": "drafter_ms",
        "head ms": "head_ms",
        "other ms": "overhead_ms",
    }
    return {
        **_answers(labels, one, trials, name, reference),
        **{column: figure(one[key]) for column, key in times.items()},
        "calls": figure(one["drafter_calls"]),
        "a call ms": figure(
            one["drafter_ms"] / one["drafter_calls"]
            if one["drafter_ms"] and one["drafter_calls"]
            else None
        ),
        "break-even ms": figure(one["break_even_ms"]),
        "nodes": figure(one.get("nodes")),
        "prefill ms": figure(one.get("prefill_ms"), ".1f"),
        "shortlist": figure(one["shortlist"], ",.0f"),
        "recall": figure(one["recall"], ".3f"),
    }


def _throughput(content: Content) -> list[Grid]:
    rows = [
        {
            "at a time": load,
            "method": name,
            "tokens/s": figure(one["tokens_per_second"], ".1f"),
            "over ar": _over(one, by_name.get("ar"), "tokens_per_second"),
            "decoding": figure(one["decoding_tokens_per_second"] or None, ".1f"),
            "decoding over ar": _over(one, by_name.get("ar"), "decoding_tokens_per_second"),
            "first token ms": figure(one["p50_ttft_ms"], ".0f"),
            "first token 95 %": figure(one["p95_ttft_ms"], ".0f"),
            "ms a token": figure(one["p50_tpot_ms"], ".0f"),
            "ms a token 95 %": figure(one["p95_tpot_ms"], ".0f"),
            "MAT": figure(one["mean_accepted_tokens"]),
            "nodes": figure(one["nodes_per_step"]),
            "identical": _identical(one),
        }
        for load, by_name in content["concurrency"].items()
        for name, one in by_name.items()
    ]
    names = dict.fromkeys(name for by_name in content["concurrency"].values() for name in by_name)
    compared = [
        {
            "method": name,
            **{
                f"{column}, {load} at a time": text
                for load, by_name in content["concurrency"].items()
                if (one := by_name.get(name)) is not None
                for column, text in (
                    ("identical", _identical(one)),
                    ("MAT", figure(one["mean_accepted_tokens"])),
                )
            },
        }
        for name in names
    ]
    return [
        grid(
            "throughput",
            "all requests together, prompts and waiting included; decoding: "
            "steps in which no prompt is read",
            rows,
            2,
        ),
        grid(
            "identical", "answers that are those of plain decoding, given one at a time", compared
        ),
    ]


def _identical(one: Content) -> str:
    return NONE if one["identical"] is None else f"{one['identical']}/{one['prompts']}"


def _over(one: Content, plain: Content | None, key: str) -> str:
    return (
        figure(one[key] / plain[key], ".2f", TIMES) if plain and plain[key] and one[key] else NONE
    )


def _structured(content: Content) -> list[Grid]:
    rows = [
        {
            "answers": kind,
            "method": name,
            "valid": f"{one['valid']}/{one['answers']}",
            "identical": f"{one['identical']}/{one['answers']}",
            "tokens/s": figure(one["tokens_per_second"], ".1f"),
            "MAT": figure(one["mean_accepted_tokens"]),
            "tokens an answer": figure(one["tokens"] / one["answers"] + 1, ".0f"),
        }
        for kind, by_name in content["structured"].items()
        for name, one in by_name.items()
    ]
    return [
        grid(
            "structured",
            "answers with their JSON schema and without; identical: to those of the first method",
            rows,
            2,
        )
    ]


TABLES: dict[str, Callable[[Content], list[Grid]]] = {
    "vocabulary": draft_grids.vocabulary,
    "methods": _methods,
    "acceptance": draft_grids.acceptance,
    "trees": draft_grids.trees,
    "throughput": _throughput,
    "weights": cost_grids.weights,
    "passes": cost_grids.passes,
    "structured": _structured,
    "drafting": cost_grids.drafting,
    "heads": cost_grids.heads,
    "recall": draft_grids.recall,
}
