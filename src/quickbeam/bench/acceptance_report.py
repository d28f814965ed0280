"""The output of the acceptance measurement: tables, lines of text, a JSON record and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from quickbeam.bench import agreement
from quickbeam.bench.acceptance import Depth, Results, Summary, by_depth, summarise


def summaries(results: Results, bins: int) -> list[Summary]:
    """Return the summaries of the temperatures where anything was tried, in the order given."""
    return [
        summarise(temperature, tally, bins)
        for temperature, tally in results.tallies.items()
        if tally.tried
    ]


def record(
    results: Results,
    bins: int,
    environment: Mapping[str, object],
    model: str,
    settings: Mapping[str, object],
) -> dict[str, object]:
    """Return the JSON record.

    `by_depth` beside `temperatures` covers all temperatures together. `complete` says whether all
    questions were asked.
    """
    return {
        "environment": dict(environment),
        "model": model,
        "settings": dict(settings),
        "prompts": results.prompts,
        "complete": results.complete,
        "temperatures": [asdict(summary) for summary in summaries(results, bins)],
        "by_depth": [asdict(layer) for layer in by_depth(results.tried)],
        "agreement": results.agreement.to_json(),
        "skipped": [asdict(skipped) for skipped in results.skipped],
    }


def table(summary: Summary) -> Table:
    """Return a table of the bins of one temperature."""
    found = Table("draft probability", title=f"temperature {summary.temperature:g}")
    for column in ("tried", "mean", "accepted", "95 % interval"):
        found.add_column(column, justify="right")
    for one in summary.bins:
        interval = (
            "-" if one.interval is None else (f"{one.interval[0]:.3f} to {one.interval[1]:.3f}")
        )
        found.add_row(
            f"{one.low:.2f} to {one.high:.2f}",
            str(one.count),
            _figure(one.probability),
            _figure(one.acceptance),
            interval,
        )
    return found


def lines(summary: Summary) -> list[str]:
    """Return the lines of text below the table of one temperature."""
    gap, related, mat = (
        _figure(summary.calibration_gap),
        _figure(summary.correlation),
        _figure(summary.mean_accepted_tokens, 2),
    )
    return [
        f"calibration gap {gap}, correlation {related}, MAT {mat} over {summary.steps} steps",
        f"first children accepted: {_figure(summary.first_acceptance)}; "
        f"{depth_line(summary.by_depth)}",
    ]


def footer(results: Results) -> list[str]:
    """Return lines on all temperatures together, and on what to know before trusting the tables."""
    found = [
        f"prompts: {results.prompts}; tried: the parent accepted, earlier siblings rejected; "
        "mean: their draft probability"
    ]
    found += agreement.lines(results.agreement)
    if len(results.tallies) > 1:
        found.append(f"first children at all temperatures: {depth_line(by_depth(results.tried))}")
    if results.skipped:
        found.append(
            f"prompts left out: {len(results.skipped)}; the first: {results.skipped[0].reason}"
        )
    return found


def depth_line(layers: Sequence[Depth]) -> str:
    """Return the acceptance of first children by depth, with the number tried in brackets."""
    parts = (
        f"{layer.depth}: {layer.acceptance:.3f} ({layer.count})"
        for layer in layers
        if layer.acceptance is not None
    )
    return f"by depth {', '.join(parts)}"


def plot(results: Results, bins: int, path: Path) -> None:
    """Write a plot of acceptance over draft probability to the file `path`.

    Each temperature is a line. The area of a point grows with its count. Raises `OSError` where the
    file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = summaries(results, bins)
    most = max(one.count for summary in found for one in summary.bins)
    figure, axis = pyplot.subplots(figsize=(7, 6), layout="constrained")
    axis.plot(
        [0, 1],
        [0, 1],
        color="black",
        linewidth=0.8,
        linestyle="--",
        label="acceptance = draft probability",
    )
    for i, summary in enumerate(found):
        x, y, below, above, areas = (
            list[float](),
            list[float](),
            list[float](),
            list[float](),
            list[float](),
        )
        for one in summary.bins:
            if one.probability is None or one.acceptance is None or one.interval is None:
                continue
            x.append(one.probability)
            y.append(one.acceptance)
            below.append(one.acceptance - one.interval[0])
            above.append(one.interval[1] - one.acceptance)
            areas.append(12 + 240 * one.count / most)
        colour, label = f"C{i}", f"temperature {summary.temperature:g} ({summary.tried} tried)"
        axis.errorbar(
            x, y, yerr=[below, above], color=colour, linewidth=1.2, capsize=3, label=label
        )
        axis.scatter(x, y, areas, color=colour, alpha=0.5, linewidths=0)
    axis.set(
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
        xlabel="draft probability",
        ylabel="accepted",
        aspect="equal",
    )
    axis.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
