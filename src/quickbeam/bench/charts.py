"""Charts of benchmark records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quickbeam.bench.draft_grids import points_of
from quickbeam.bench.grids import MODEL, phases_of, sources_of, speedup_error
from quickbeam.bench.saved import Saved, told
from quickbeam.bench.svg import COLOURS, HATCHES, INK, LINE, MARKERS, Drawing, draw, style
from quickbeam.errors import InvalidInput

Content = Mapping[str, Any]
Points = Sequence[tuple[float, float]]


def chart(saved: Saved, name: str, alt: str | None = None) -> Drawing | None:
    """Draw one of `CHARTS` from a record, or return None where the record lacks its figures.

    `alt` replaces the chart's own description. Raises `InvalidInput` for an unknown name, and for a
    record with missing or broken fields.
    """
    if name not in CHARTS:
        raise InvalidInput(f"unknown chart {name!r}; known: {', '.join(CHARTS)}")
    with told(saved), style() as pyplot:
        kinds, make = CHARTS[name]
        found = make(pyplot, saved.content) if saved.kind in kinds else None
        return None if found is None else draw(found[0], f"{name}-{saved.name}", alt or found[1])


def _speed(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    reference, trials = content["reference"], content["trials"]
    methods = {name: one for name, one in content["methods"].items() if name != reference}
    if not methods:
        return None
    groups: dict[str, list[Content]] = {}
    for trial in trials:
        groups.setdefault(trial["category"], []).append(trial)
    step = 0.8 / len(methods)
    size = (7.5, 1.2 + (len(groups) + 1) * max(0.32, 0.13 * len(methods)))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    for i, (name, one) in enumerate(methods.items()):
        found = [one["by_category"][category]["speedup"] for category in groups] + [one["speedup"]]
        errors = [
            speedup_error(held, name, reference) or 0.0 for held in [*groups.values(), trials]
        ]
        points = [
            (value, place + (i - (len(methods) - 1) / 2) * step, error)
            for place, (value, error) in enumerate(zip(found, errors, strict=True))
            if value is not None
        ]
        x, y, sides = zip(*points, strict=True) if points else ((), (), ())
        axis.errorbar(
            x,
            y,
            xerr=sides,
            linestyle="none",
            label=name,
            capsize=2,
            markersize=5,
            elinewidth=0.9,
            **_look(i),
        )
    axis.axvline(1, color=INK, linewidth=0.9)
    axis.set_yticks(range(len(groups) + 1), [*groups, "all"])
    axis.invert_yaxis()
    for place in range(len(groups)):
        axis.axhline(place + 0.5, color=LINE, linewidth=0.6)
    axis.set_xlabel(f"speed-up over {reference}")
    axis.grid(axis="y", visible=False)
    _legend(figure, axis)
    overall = ", ".join(
        f"{name} {one['speedup']:.2f}" for name, one in methods.items() if one["speedup"]
    )
    return figure, (
        f"Points of speed-up over {reference} by category, with standard errors; over "
        f"all prompts: {overall}."
    )


def _look(number: int) -> dict[str, str]:
    """The colour and the marker of a series, which set it apart from others."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
    }


def _budget(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    return _trees(pyplot, content) if "temperatures" in content else _nodes(pyplot, content)


def _trees(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    heats = content["temperatures"]
    if not heats:
        return None
    figure, axes = pyplot.subplots(
        1,
        len(heats),
        figsize=(max(6.0, 4.2 * len(heats)), 4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, heat in zip(axes[0], heats, strict=True):
        for name in dict.fromkeys(one["tree"] for one in heat["trees"]):
            rows = [one for one in heat["trees"] if one["tree"] == name]
            errors = [one["difference"]["error"] or 0.0 for one in rows]
            axis.errorbar(
                [one["budget"] for one in rows],
                [one["tokens"] for one in rows],
                yerr=errors,
                capsize=2,
                label=name,
            )
        sizes = sorted({one["budget"] for one in heat["trees"]})
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set(title=f"temperature {heat['temperature']:g}", xlabel="nodes of a tree")
    axes[0][0].set_ylabel("MAT: tokens a step")
    _legend(figure, axes[0][0])
    best = ", ".join(
        f"{one['tree']} {one['tokens']:.2f}"
        for one in heats[0]["trees"]
        if one["budget"] == heats[0]["trees"][-1]["budget"]
    )
    return figure, (
        "Lines of mean accepted tokens by tree and number of nodes; with the most "
        f"nodes at the first temperature: {best}."
    )


def _nodes(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    """MAT against the nodes of a method's trees. The budgets of one method are joined by a line."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, one in content["methods"].items():
        if one.get("nodes") and one["mean_accepted_tokens"]:
            lines.setdefault(name.split("+")[0].split(":")[0], []).append(
                (one["nodes"], one["mean_accepted_tokens"])
            )
    return (
        _lines(
            pyplot,
            lines,
            "nodes a step",
            "MAT: tokens a step",
            "mean accepted tokens by the nodes of a step",
        )
        if lines
        else None
    )


def _stacked(pyplot: Any, rows: Mapping[str, Mapping[str, float]], label: str) -> Any:
    """Draw one bar per row, with one segment per part."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    figure, axis = pyplot.subplots(figsize=(7.5, 1.4 + 0.42 * len(rows)), layout="constrained")
    left = dict.fromkeys(rows, 0.0)
    for i, part in enumerate(parts):
        sizes = [row.get(part, 0.0) for row in rows.values()]
        look = {
            "color": COLOURS[i % len(COLOURS)],
            "hatch": HATCHES[i % len(HATCHES)],
            "label": part,
        }
        axis.barh(list(rows), sizes, left=list(left.values()), height=0.7, **look)
        left = {name: left[name] + size for name, size in zip(rows, sizes, strict=True)}
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.grid(axis="y", visible=False)
    _legend(figure, axis)
    return figure


def _sources(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    rows = {name: found for name, one in content["methods"].items() if (found := sources_of(one))}
    if not any(set(row) > {MODEL} for row in rows.values()):
        return None
    parts = ", ".join(dict.fromkeys(part for row in rows.values() for part in row))
    words = ", ".join(f"{name} {sum(row.values()):.2f}" for name, row in rows.items())
    return _stacked(pyplot, rows, "tokens a step"), (
        f"Bars of tokens a step by who proposed them ({parts}); in all {words}."
    )


def _phases(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    rows = {name: found for name, one in content["methods"].items() if (found := phases_of(one))}
    if not rows:
        return None
    words = ", ".join(f"{name} {sum(row.values()):.2f}" for name, row in rows.items())
    return _stacked(pyplot, rows, "milliseconds a token"), (
        f"Bars of milliseconds a token by phase; in all {words}."
    )


def _calibration(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    if not content["temperatures"]:
        return None
    figure, axis = pyplot.subplots(figsize=(5.6, 5), layout="constrained")
    axis.plot(
        [0, 1],
        [0, 1],
        color=INK,
        linewidth=0.9,
        linestyle="--",
        marker="",
        label="acceptance = draft probability",
    )
    for i, heat in enumerate(content["temperatures"]):
        bins = [one for one in heat["bins"] if one["count"]]
        y = [one["acceptance"] for one in bins]
        sides = [
            [abs(one["interval"][side] - one["acceptance"]) for one in bins] for side in (0, 1)
        ]
        x, label = [one["probability"] for one in bins], f"temperature {heat['temperature']:g}"
        axis.errorbar(x, y, yerr=sides, label=label, capsize=2, **_look(i))
    axis.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
        xlabel="draft probability",
        ylabel="accepted",
        aspect="equal",
    )
    _legend(figure, axis)
    gaps = ", ".join(
        f"{heat['temperature']:g}: {heat['calibration_gap']:.3f}"
        for heat in content["temperatures"]
    )
    return figure, (
        "Acceptance by draft probability with 95 % intervals; the calibration gap at "
        f"temperature {gaps}."
    )


def _lines(
    pyplot: Any,
    lines: Mapping[str, Points],
    x: str,
    y: str,
    what: str,
    log: bool = False,
    zero: bool = True,
) -> tuple[Any, str]:
    """Draw one line per name, through its points.

    `log`: the x axis has a scale of powers of 2. `zero`: the y axis begins at 0.
    """
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, points in lines.items():
        places, heights = zip(*sorted(points), strict=True)
        axis.plot(places, heights, label=name)
    if log:
        ticks = sorted({place for points in lines.values() for place, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(xlabel=x, ylabel=y)
    if zero:
        axis.set_ylim(0, 1.08 * max(height for points in lines.values() for _, height in points))
    _legend(figure, axis)
    words = "; ".join(
        f"{name} {min(points)[1]:.3g} to {max(points)[1]:.3g}" for name, points in lines.items()
    )
    return figure, f"Lines of {what}, from the first place to the last: {words}."


def _legend(figure: Any, axis: Any) -> None:
    """Put the legend above the chart, in as many columns as there is room for."""
    handles, labels = axis.get_legend_handles_labels()
    column = 0.7 + 0.08 * max(map(len, labels))  # inches
    columns = max(1, min(len(labels), int(figure.get_figwidth() / column)))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def _load(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for load, by_name in content["concurrency"].items():
        for name, one in by_name.items():
            lines.setdefault(name, []).append((float(load), one["tokens_per_second"]))
    return (
        _lines(
            pyplot,
            lines,
            "requests at a time",
            "tokens/s",
            "tokens a second by requests at a time",
            log=True,
        )
        if lines
        else None
    )


def _passes(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    lines = {
        f"{way}, {int(context):,} behind": [(float(width), ms) for width, ms in by_width.items()]
        for way, found in content["contexts"].items()
        for context, by_width in found.items()
    }
    return (
        _lines(
            pyplot,
            lines,
            "tokens a pass",
            "milliseconds",
            "milliseconds of a pass by its tokens",
            log=True,
        )
        if lines
        else None
    )


def _vocabulary(pyplot: Any, content: Content) -> tuple[Any, str] | None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in points_of(content["points"] if "points" in content else content["overall"]):
        if one["vocab"] != "full":
            lines.setdefault(one["vocab"], []).append((100 * one["share"], 100 * one["kept"]))
    what = "the share of MAT that is kept by the share of the vocabulary"
    return (
        _lines(pyplot, lines, "tokens scored, % of the vocabulary", "MAT kept, %", what, zero=False)
        if lines
        else None
    )


Make = Callable[[Any, Content], tuple[Any, str] | None]
CHARTS: dict[str, tuple[tuple[str, ...], Make]] = {  # its kinds of record, its function
    "speed": (("methods",), _speed),
    "budget": (("trees", "methods"), _budget),
    "sources": (("methods",), _sources),
    "phases": (("methods",), _phases),
    "calibration": (("acceptance",), _calibration),
    "load": (("throughput",), _load),
    "passes": (("passes",), _passes),
    "vocabulary": (("vocabulary",), _vocabulary),
}
