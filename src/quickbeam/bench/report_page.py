"""One HTML page of records of bench commands: no network, no script, light and dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import quickbeam
from quickbeam.bench import svg
from quickbeam.bench.charts import chart
from quickbeam.bench.grid import Grid
from quickbeam.bench.grids import grids
from quickbeam.bench.origin import KEY, commit, machine
from quickbeam.bench.saved import Saved
from quickbeam.bench.svg import Drawing

TEMPLATE = "report_page.html"
# Title, the chart, and by kind of record the table with the chart's figures.
SECTIONS = (
    ("Speed by category", "speed", {"methods": "categories"}),
    ("MAT against budget", "budget", {"trees": "trees", "methods": "overall"}),
    ("Accepted tokens by source", "sources", {"methods": "sources"}),
    ("Time by phase", "phases", {"methods": "phases"}),
    ("Calibration", "calibration", {"acceptance": "bins"}),
    ("Many requests at once", "load", {"throughput": "throughput"}),
    ("One pass of the model", "passes", {"passes": "passes"}),
    ("A part of the vocabulary", "vocabulary", {"vocabulary": "overall"}),
)


class Part(NamedTuple):
    """What one record shows in a section."""

    name: str
    drawing: Drawing | None
    table: Grid | None


class Section(NamedTuple):
    title: str
    parts: list[Part]


def page(records: Sequence[Saved]) -> str:
    """Return the page, which is well-formed XML as well.

    Raises `InvalidInput` that names a record with missing or broken fields.
    """
    from jinja2 import Environment, StrictUndefined

    records = _apart(records)
    tables = {saved.name: {one.name: one.filled() for one in grids(saved)} for saved in records}
    shown: set[tuple[str, str]] = set()
    sections = list[Section]()
    for title, name, by_kind in SECTIONS:
        parts = []
        for saved in records:
            if saved.kind in by_kind and (drawing := chart(saved, name)):
                key = (saved.name, by_kind[saved.kind])
                parts.append(
                    Part(
                        saved.name,
                        drawing,
                        tables[saved.name].get(key[1]) if key not in shown else None,
                    )
                )
                shown.add(key)
        if parts:
            sections.append(Section(title, parts))
    rest = [
        Part(name, None, one)
        for name, found in tables.items()
        for one in found.values()
        if (name, one.name) not in shown
    ]
    if rest:
        sections.append(Section("Further tables" if sections else "Tables", rest))
    template = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text: str = environment.from_string(template).render(
        records=[_summary(saved) for saved in records],
        sections=sections,
        themes=svg.themes(),
        version=quickbeam.__version__,
    )
    return text


def _apart(records: Sequence[Saved]) -> list[Saved]:
    """The records, each with a name of its own, from which charts can make distinct ids."""
    found, names = list[Saved](), set[str]()
    for saved in records:
        name = stem = saved.name
        number = 2
        while re.sub(r"\W", "-", name) in names:
            name, number = f"{stem} ({number})", number + 1
        names.add(re.sub(r"\W", "-", name))
        found.append(saved._replace(name=name))
    return found


def _summary(saved: Saved) -> dict[str, Any]:
    """The row of a record in the page's summary table."""
    run = saved.content.get(KEY) or {}
    settings = ", ".join(
        f"{name} {value}"
        for name, value in saved.settings.items()
        if value not in (None, "", False)
    )
    return {
        "name": saved.name,
        "kind": "bench" if saved.kind == "methods" else f"bench {saved.kind}",
        "model": saved.model,
        "date": str(run.get("date") or "").replace("T", " ").removesuffix("Z"),
        "commit": commit(run) if run else str(saved.where.get("commit") or "")[:9],
        "machine": machine(saved),
        "measured": str(run.get("command") or settings),
        "whole": saved.whole,
    }
