"""A table of figures as text, for documents and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quickbeam.errors import InvalidInput

NONE = "-"  # a figure that was not measured
TIMES = "\N{MULTIPLICATION SIGN}"


class Grid(NamedTuple):
    """`name`: among the grids of a kind. `labels`: how many of the first columns say what a row is
    of; the others are figures."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1

    def only(self, columns: Sequence[str]) -> Grid:
        """These columns, in this order; the labels always come first. Raises `InvalidInput` for one
        that is not there."""
        figures = self.columns[self.labels :]
        if unknown := [column for column in columns if column not in figures]:
            raise InvalidInput(
                f"unknown column {unknown[0]!r} of the table {self.name!r}; known: "
                f"{', '.join(figures)}"
            )
        places = [*range(self.labels), *(self.columns.index(column) for column in columns)]
        return self._replace(
            columns=_pick(self.columns, places), rows=tuple(_pick(row, places) for row in self.rows)
        )

    def filled(self) -> Grid:
        """Without the columns that have no figure at all."""
        figures = self.columns[self.labels :]
        empty = {
            column
            for i, column in enumerate(figures, self.labels)
            if all(row[i] in (NONE, "") for row in self.rows)
        }
        return self.only([column for column in figures if column not in empty])

    def markdown(self) -> str:
        """A table of GitHub's Markdown; figures stand on the right."""
        rule = ["---"] * self.labels + ["---:"] * (len(self.columns) - self.labels)
        lines = [self.columns, rule, *self.rows]
        return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def grid(name: str, title: str, rows: Sequence[Mapping[str, str]], labels: int = 1) -> Grid:
    """From rows by column. Columns are those of any row, in order of appearance; what a row lacks
    was not measured."""
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    return Grid(
        name,
        title,
        columns,
        tuple(tuple(row.get(column, NONE) for column in columns) for row in rows),
        labels,
    )


def figure(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return NONE if value is None else f"{value:{form}}{unit}"


def _pick(row: Sequence[str], places: Sequence[int]) -> tuple[str, ...]:
    return tuple(row[place] for place in places)


def _cell(text: str) -> str:
    """No line end and no bar of its own; a `<` would begin HTML."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
