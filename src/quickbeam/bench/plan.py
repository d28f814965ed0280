"""A benchmark plan: named commands, and what of their records goes into the documents."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from quickbeam.errors import InvalidInput

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# a blank of a command; `{port}` is not one, as it belongs to `bench throughput --server`
BLANK = re.compile(r"\{(?!port\})([a-z_]+)\}")
# followed by a blank's name in capitals: the environment variable that fills the blank
VARIABLE = "QUICKBEAM_BENCH_"
HEAD = ("quickbeam", "bench")
SETTING = re.compile(r"([A-Z_]+)=(.*)")  # a word before the command, for its environment


@dataclass(frozen=True)
class TableSpec:
    """Which of a record's tables is shown (`grids.py`).

    Without `grid` it is the first one. Without `columns` it has all columns with figures.
    """

    grid: str | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class PlotSpec:
    """A chart of `charts.py`. `alt` replaces the chart's own description."""

    chart: str
    alt: str | None = None


@dataclass(frozen=True)
class Entry:
    """One benchmark of a plan.

    - `command`: as typed, with blanks such as `{questions}`. NAME=VALUE before it sets a variable
      of its environment.
    - `minutes`: about how long it takes.
    - `covers`: patterns of files, relative to the plan's root. A change of one of them makes the
      figures old.
    """

    name: str
    title: str
    command: str
    table: TableSpec
    plot: PlotSpec | None
    minutes: float
    covers: tuple[str, ...]

    @property
    def blanks(self) -> list[str]:
        return list(dict.fromkeys(BLANK.findall(self.command)))

    @property
    def environment(self) -> dict[str, str]:
        """The variables that are set before the command."""
        return _split(self.command)[0]

    def words(self, values: Mapping[str, str]) -> list[str]:
        """Return the arguments of `quickbeam`, with the blanks filled in.

        Raises `InvalidInput` for a blank without a value.
        """
        if missing := [blank for blank in self.blanks if not values.get(blank)]:
            blank = missing[0]
            raise InvalidInput(
                f"{self.name} needs {{{blank}}}: set {VARIABLE}{blank.upper()}, or "
                f"give --set {blank}=VALUE"
            )
        return [
            BLANK.sub(lambda found: values[found[1]], word) for word in _split(self.command)[1][1:]
        ]


@dataclass(frozen=True)
class Plan:
    """A plan, as read from the file `path`.

    `root` is the folder that `covers`, `docs` and `images` are relative to.
    """

    path: Path
    root: Path
    docs: tuple[str, ...]
    images: str
    entries: tuple[Entry, ...]

    def only(self, names: Iterable[str]) -> list[Entry]:
        """Return the entries with these names, in the plan's order.

        Raises `InvalidInput` for a name that the plan doesn't have.
        """
        wanted, known = list(names), [entry.name for entry in self.entries]
        if unknown := [name for name in wanted if name not in known]:
            raise InvalidInput(f"{self.path}: no entry {unknown[0]!r}; known: {', '.join(known)}")
        return [entry for entry in self.entries if entry.name in wanted]

    def documents(self) -> list[Path]:
        """Return the Markdown files that `docs` matches, each once."""
        found = [
            Path(name)
            for pattern in self.docs
            for name in sorted(glob(str(self.root / pattern), recursive=True))
        ]
        return list(dict.fromkeys(path for path in found if path.is_file()))


def read_plan(path: Path) -> Plan:
    """Read a plan from a YAML file.

    Raises `InvalidInput` that names what is wrong where the file is no plan.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(
            f"{path}: can't be read ({error.strerror}); name a plan, as benchmarks/plan.yaml"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    fields = {"root": str, "docs": list, "images": str, "entries": list}
    # Keys that begin with x- may hold YAML anchors and are ignored.
    own = (
        {key: value for key, value in content.items() if not str(key).startswith("x-")}
        if isinstance(content, dict)
        else content
    )
    _check(own, fields, ("entries",), str(path))
    entries = tuple(
        _entry(one, f"{path}: entry {number}") for number, one in enumerate(own["entries"], 1)
    )
    names = [entry.name for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidInput(f"{path}: two entries have the name {twice[0]!r}")
    docs, root = (
        _texts(own.get("docs", []), f"{path}: docs"),
        (path.parent / own.get("root", ".")).resolve(),
    )
    return Plan(path, root, docs, own.get("images", "images"), entries)


def _split(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command, and its words."""
    words, environment = shlex.split(command), dict[str, str]()
    while words and (found := SETTING.fullmatch(words[0])):
        environment[found[1]] = found[2]
        del words[0]
    return environment, words


def _entry(one: Any, where: str) -> Entry:
    number = (int, float)
    fields = {
        "name": str,
        "title": str,
        "command": str,
        "table": (dict, str),
        "plot": (dict, str),
        "minutes": number,
        "covers": list,
    }
    _check(one, fields, ("name", "title", "command", "minutes", "covers"), where)
    name = one["name"]
    if not NAME.fullmatch(name):
        raise InvalidInput(f"{where}: name {name!r} must be of small letters, digits and hyphens")
    where = f"{where} ({name})"
    try:
        words = _split(one["command"])[1]
    except ValueError as error:
        raise InvalidInput(f"{where}: command: {error}") from error
    if tuple(words[:2]) != HEAD or "--json" in words:
        raise InvalidInput(f"{where}: command must be a `quickbeam bench …` line without --json")
    if not one["minutes"] > 0:
        raise InvalidInput(f"{where}: minutes must be above 0")
    table, plot = one.get("table", {}), one.get("plot")
    table = {"grid": table} if isinstance(table, str) else table
    _check(table, {"grid": str, "columns": list}, (), f"{where}, table")
    columns = _texts(table["columns"], f"{where}: columns") if "columns" in table else None
    if plot is not None:
        plot = {"chart": plot} if isinstance(plot, str) else plot
        _check(plot, {"chart": str, "alt": str}, ("chart",), f"{where}, plot")
    drawn = None if plot is None else PlotSpec(plot["chart"], plot.get("alt"))
    covers = _texts(one["covers"], f"{where}: covers")
    return Entry(
        name,
        one["title"],
        " ".join(one["command"].split()),
        TableSpec(table.get("grid"), columns),
        drawn,
        one["minutes"],
        covers,
    )


def _texts(values: Sequence[Any], where: str) -> tuple[str, ...]:
    """The texts of a list and of the lists in it (which YAML's anchors make), each once."""
    flat: list[Any] = []
    for value in values:
        flat += _texts(value, where) if isinstance(value, list) else [value]
    if not all(isinstance(value, str) and value for value in flat):
        raise InvalidInput(f"{where}: must be a list of texts")
    return tuple(dict.fromkeys(flat))


def _check(content: Any, fields: Mapping[str, Any], needed: Sequence[str], where: str) -> None:
    """Raise `InvalidInput` unless `content` is a mapping of these fields with these types.

    The fields of `needed` must be among them.
    """
    if not isinstance(content, dict):
        raise InvalidInput(f"{where}: must be a mapping with {', '.join(fields)}")
    if unknown := [key for key in content if key not in fields]:
        raise InvalidInput(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(fields)}")
    for key in needed:
        if key not in content:
            raise InvalidInput(f"{where}: has no {key}; it needs {', '.join(needed)}")
    for key, value in content.items():
        kinds = fields[key] if isinstance(fields[key], tuple) else (fields[key],)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InvalidInput(
                f"{where}: {key}={str(value)[:40]!r}: must be "
                f"{' or '.join(kind.__name__ for kind in kinds)}"
            )
