"""`quickbeam inspect`: show a trace as a table, and as one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

from rich.console import Console
from rich.table import Table

from quickbeam.cli.common import check_output, harmless, save

HEADS = ("source", "drafted", "accepted", "mean value")
# of sources, in the order of their names; the root is grey
COLOURS = ("#2563eb", "#b45309", "#7c3aed", "#0f766e", "#be185d", "#4d7c0f")


@dataclass(frozen=True)
class InspectOptions:
    """What is shown, and how."""

    trace: Path = field(metadata={"argument": True, "metavar": "FILE.json"})
    """File that `quickbeam generate --trace` wrote."""
    html: Path | None = field(default=None, metadata={"metavar": "OUT.html", "common": True})
    """File that gets every step's draft tree, as one page."""


def inspect(options: InspectOptions) -> None:
    """Show what an answer's drafts were and what became of them.

    The table is by source; --html shows every draft tree.
    """
    from quickbeam.engine.trace import read_trace

    trace = read_trace(options.trace)
    if options.html is not None:
        check_output("--html", options.html)
        save("--html", options.html, page(trace))
    table = Table(HEADS[0], box=None, header_style="bold")
    for column in HEADS[1:]:
        table.add_column(column, justify="right")
    for source, figures in by_source(trace).items():
        table.add_row(harmless(source), *figures)
    out = Console(highlight=False, markup=False)
    for name, value in summary(trace).items():
        out.print(harmless(f"{name}: {value}"))
    out.print(table)


def summary(trace: dict[str, Any]) -> dict[str, str]:
    """Return the answer's figures in words. Times are milliseconds per step."""
    answer, steps = trace["answer"], trace["steps"]
    figures = {
        "model": answer["model"],
        "method": answer["method"],
        "tokens": f"{answer['new_tokens']} ({answer['finish_reason']})",
        "steps": f"{len(steps)}",
        "MAT": f"{answer['mean_accepted_tokens']:.2f}",
        "tokens/s": f"{answer['tokens_per_second']:.1f}",
    }
    if learning := trace.get("learning"):
        figures["learned"] = (
            f"{learning['taken']} times from {learning['tokens']} tokens: "
            f"{learning['accepted_after']:.2f} accepted a draft, "
            f"{learning['accepted_before']:.2f} before"
        )
    if steps:
        draft = milliseconds(fmean(step["draft_seconds"] for step in steps))
        verify = milliseconds(fmean(step["verify_seconds"] for step in steps))
        seconds = milliseconds(fmean(step["seconds"] for step in steps))
        figures["a step"] = f"{seconds}: drafting {draft}, verifying {verify}"
        figures["nodes a tree"] = f"{fmean(len(step['nodes']) for step in steps):.1f}"
    return figures


def by_source(trace: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Return, for each source, nodes drafted, nodes accepted and the mean value of its nodes."""
    nodes = [node for step in trace["steps"] for node in step["nodes"][1:]]
    rows = {}
    for source in sorted({node["source"] for node in nodes}):
        nodes_of_source = [node for node in nodes if node["source"] == source]
        count = len(nodes_of_source)
        accepted = sum(node["accepted"] for node in nodes_of_source)
        value = fmean(node["value"] for node in nodes_of_source)
        rows[source] = f"{count}", f"{accepted} ({accepted / count:.0%})", f"{value:.2f}"
    return rows


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def page(trace: dict[str, Any]) -> str:
    """Return the HTML page: figures and answer, then a tree for each step. It runs no script."""
    answer = trace["answer"]
    steps = trace["steps"]
    sources = by_source(trace)
    colours = {source: COLOURS[i % len(COLOURS)] for i, source in enumerate(sources)}
    table = [HEADS, *((source, *figures) for source, figures in sources.items())]
    return Template(files(__package__).joinpath("trace.html").read_text("utf-8")).substitute(
        title=escape(f"{answer['method']}: {len(steps)} steps"),
        summary=rows(summary(trace).items()),
        text=escape(answer["text"]),
        sources=rows(table, colours),
        trees="\n".join(draw_step(i, step, colours) for i, step in enumerate(steps, 1)),
    )


def rows(lines: Iterable[Sequence[str]], colours: Mapping[str, str] | None = None) -> str:
    """Return a table in HTML. The first cell of a line is its heading, in its source's colour."""
    drawn = (
        f"<tr><th style='color: {(colours or {}).get(first, 'inherit')}'>{escape(first)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in others)
        + "</tr>"
        for first, *others in lines
    )
    return f"<table>{''.join(drawn)}</table>"


def draw_step(number: int, step: dict[str, Any], colours: dict[str, str]) -> str:
    nodes = step["nodes"]
    after = step["next"]
    accepted = [node["text"] for node in nodes[1:] if node["accepted"]]
    text = "".join([*accepted, after["text"]][: step["emitted"]])
    draft = milliseconds(step["draft_seconds"])
    verify = milliseconds(step["verify_seconds"])
    return (
        f"<details{' open' if number == 1 else ''}><summary>step {number}: {len(nodes) - 1} "
        f"drafted, {len(accepted)} accepted, {step['emitted']} emitted "
        f"<code>{escape(repr(text))}</code> <small>(drafting {draft}, verifying {verify})</small>"
        f"</summary>{draw_tree(nodes, colours)}"
        f"<span class='node next' title='token {after['token']}'>"
        f"<code>{visible(after['text'])}</code></span></details>"
    )


def draw_tree(nodes: list[dict[str, Any]], colours: dict[str, str]) -> str:
    """Return a tree as nested lists; nodes with one child each share a line with that child."""
    children: list[list[int]] = [[] for _ in nodes]
    for node, entry in enumerate(nodes[1:], 1):
        children[entry["parent"]].append(node)

    def drawn(node: int) -> str:
        run = [node]
        while len(children[run[-1]]) == 1:
            run += children[run[-1]]
        below = "".join(map(drawn, children[run[-1]]))
        line = "".join(draw_node(nodes[index], colours) for index in run)
        return f"<li>{line}{f'<ul>{below}</ul>' if below else ''}</li>"

    return f"<ul>{drawn(0)}</ul>"


def draw_node(node: dict[str, Any], colours: dict[str, str]) -> str:
    kind = "node accepted" if node["accepted"] else "node"
    value = f"<small>{node['value']:.2f}</small>" if node["value"] and node["depth"] else ""
    title = f"token {node['token']}, depth {node['depth']}, {node['source']}"
    title += f", value {node['value']:.4g}"
    return (
        f"<span class='{kind}' style='--c: {colours.get(node['source'], '#888')}' "
        f"title='{escape(title)}'><code>{visible(node['text'])}</code>{value}</span>"
    )


def visible(text: str) -> str:
    """Return a token's text with its white space made visible, escaped for HTML."""
    return escape(text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥") or "∅")
