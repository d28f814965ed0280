"""A table of figures as text, for documents and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quickbeam.errors import InvalidInput

NONE = "-"  # a figure that was not measured
TIMES = "\N{MULTIPLICATION SIGN}"


class Grid(NamedTuple):
    """A table of texts.

    `name` tells it from the other tables of a kind of record. The first `labels` columns say what a
    row is about. The other columns are figures.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1

    def only(self, columns: Sequence[str]) -> Grid:
        """Return the table with these figure columns, in this order, behind the label columns.

        Raises `InvalidInput` for a column that is not there.
        """
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
        """Return the table without the columns that have no figure at all."""
        figures = self.columns[self.labels :]
        empty = {
            column
            for i, column in enumerate(figures, self.labels)
            if all(row[i] in (NONE, "") for row in self.rows)
        }
        return self.only([column for column in figures if column not in empty])

    def markdown(self) -> str:
        """Return a table in GitHub's Markdown, with figures aligned to the right."""
        rule = ["---"] * self.labels + ["---:"] * (len(self.columns) - self.labels)
        lines = [self.columns, rule, *self.rows]
        return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def grid(name: str, title: str, rows: Sequence[Mapping[str, str]], labels: int = 1) -> Grid:
    """Make a table from rows that map a column to its text.

    The columns are those of any row, in order of first appearance. A column that a row lacks shows
    `NONE`: not measured.
    """
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
    """Escape what would end a cell or begin HTML: line breaks, bars, backslashes and `<`."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
