"""Figures of matplotlib as SVG that is legible on a light and on a dark background."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import Any, NamedTuple

# Figures are drawn with these colours, which `draw` then replaces by variables of the style sheet.
# No other colour may equal one of them.
PAPER, INK, LINE = "#fefdfc", "#010203", "#a0a1a2"
WORDS = {PAPER: "var(--paper)", INK: "var(--ink)", LINE: "var(--line)"}
LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "line": "#c8ced4"}
DARK = {"paper": "#0d1117", "ink": "#e6edf3", "line": "#454c55"}
# Each has a contrast of at least 3:1 on both backgrounds, as WCAG 2 asks of graphics. Markers and
# hatches tell series apart where colours don't.
COLOURS = (
    "#1f77c9",
    "#d1590b",
    "#12906c",
    "#b0559b",
    "#8c7a00",
    "#d6455d",
    "#7a6fd0",
    "#6b7d8c",
    "#3d8f3d",
    "#a5673f",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
HATCHES = ("", "//", "\\\\", "--", "||", "xx", "++", "///", "---", "|||")


def themes() -> str:
    """Return the style sheet that sets the colours of both themes."""
    light, dark = (
        "".join(f"--{word}:{colour};" for word, colour in theme.items()) for theme in (LIGHT, DARK)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}@media "
        f"(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    )


class Drawing(NamedTuple):
    """An SVG image. `alt` says in words what it shows."""

    svg: str  # an <svg> element; its colours come from a style sheet around it
    alt: str

    def file(self) -> str:
        """Return the text of an SVG file, with the style sheet inside."""
        head, tag, rest = self.svg.partition(">")
        return (
            f'<?xml version="1.0" encoding="utf-8"?>\n{head}{tag}<style>{themes()}</style>{rest}\n'
        )


@contextmanager
def style() -> Iterator[Any]:
    """Give matplotlib's pyplot, which draws in our colours within the `with` block."""
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot

    inks = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
        "hatch.color",
    )
    options: Any = {
        **dict.fromkeys(inks, INK),
        "figure.facecolor": PAPER,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": LINE,
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.5,
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=COLOURS, marker=MARKERS),
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
        "svg.fonttype": "none",
        "svg.hashsalt": "quickbeam",
    }
    with matplotlib.rc_context(options):
        yield pyplot


def draw(figure: Any, name: str, alt: str) -> Drawing:
    """Turn a figure into a drawing, and close the figure.

    `name` begins all ids, so that they differ from those of other drawings on the same page.
    """
    from matplotlib import pyplot

    name = re.sub(r"[^A-Za-z0-9]+", "-", name)

    out = StringIO()
    try:
        figure.savefig(
            out,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    finally:
        pyplot.close(figure)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(
        r"<metadata>.*?</metadata>\s*|<style type=\"text/css\">.*?</style>\s*",
        "",
        svg,
        flags=re.DOTALL,
    )
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, word in WORDS.items():
        svg = svg.replace(colour, word)
    said = escape(alt)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{said}" stroke-linejoin="round" ', 1)
    return Drawing(svg.replace(">", f"><title>{said}</title>", 1), alt)
