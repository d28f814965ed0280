"""Tables and plots between markers in Markdown files.

    <!-- report: NAME -->
    what stands here is replaced
    <!-- /report -->

Each marker has a line of its own. Markers in a code block are ordinary text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quickbeam.bench.charts import chart
from quickbeam.bench.grids import pick
from quickbeam.bench.origin import KEY, commit, machine, stale
from quickbeam.bench.plan import BLANK, Entry, Plan
from quickbeam.bench.saved import Saved, read
from quickbeam.errors import InvalidInput

OPEN, CLOSE = re.compile(r"<!-- report: *(\S+) *-->"), "<!-- /report -->"
MISSING = "not measured yet"
FENCE = re.compile(r"(`{3,}|~{3,})")


class Place(NamedTuple):
    """The lines of a document between a pair of markers, from `begin` up to `end`.

    Lines are counted from 0, and `end` is not included. `name` is that of the plan's entry.
    """

    name: str
    begin: int
    end: int


def places(path: Path, text: str, plan: Plan) -> list[Place]:
    """Return the places between markers in a document.

    Raises `InvalidInput` with the line number for a marker that names no entry of the plan, that
    stands within another pair, or that has no partner.
    """
    found, opened, fence = list[Place](), None, ""
    known = [entry.name for entry in plan.entries]
    for number, line in enumerate(text.split("\n")):
        where, word = f"{path}:{number + 1}", line.strip()
        if fence or FENCE.match(word):
            mark = FENCE.match(word)
            if not fence and mark:
                fence = mark[1]
            elif mark and word.startswith(fence) and not word.strip(fence[0]):
                fence = ""
        elif marker := OPEN.fullmatch(word):
            if opened is not None:
                raise InvalidInput(
                    f"{where}: a marker within that of {opened[0]!r}, which has no {CLOSE} yet"
                )
            if marker[1] not in known:
                raise InvalidInput(
                    f"{where}: the plan {plan.path} has no entry {marker[1]!r}; "
                    f"known: {', '.join(known)}"
                )
            opened = (marker[1], number + 1)
        elif word == CLOSE:
            if opened is None:
                raise InvalidInput(f"{where}: {CLOSE} without a <!-- report: NAME --> before it")
            found.append(Place(*opened, number))
            opened = None
    if opened is not None:
        raise InvalidInput(
            f"{path}:{opened[1]}: the marker of {opened[0]!r} has no {CLOSE} after it"
        )
    return found


def check(plan: Plan) -> None:
    """Raise `InvalidInput` where the plan's documents can't be read or have wrong markers."""
    for path in plan.documents():
        places(path, _text(path), plan)


def render(plan: Plan, out: Path) -> list[Path]:
    """Write the documents' tables and plots from the records in the folder `out`.

    Returns the files that changed.
    """
    changed = [
        (path, text)
        for path, text in rendered(plan, out).items()
        if not path.exists() or _text(path) != text
    ]
    for path, text in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return [path for path, _ in changed]


def rendered(plan: Plan, out: Path, images: bool = True) -> dict[Path, str]:
    """Return what the documents should contain, by path; with `images`, also the plots."""
    entries = {entry.name: entry for entry in plan.entries}
    found, drawn = dict[Path, str](), dict[Path, str]()
    for path in plan.documents():
        text = _text(path)
        lines = text.split("\n")
        for place in reversed(places(path, text, plan)):
            entry = entries[place.name]
            try:
                before = "\n".join(lines[place.begin : place.end])
                lines[place.begin : place.end] = (
                    _section(plan, entry, out, path.parent, drawn) or _unmeasured(entry, before)
                ).split("\n")
            except InvalidInput as error:
                raise InvalidInput(f"{plan.path}: entry {entry.name}: {error}") from error
        found[path] = "\n".join(lines)
    return {**found, **drawn} if images else found


def wrong(plan: Plan, out: Path, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a line for each entry with missing or old figures, and for each outdated document.

    A document is outdated where its figures are not those of the records. An entry whose command
    has blanks may be missing where no document shows it.
    """
    shown = {place.name for path in plan.documents() for place in places(path, _text(path), plan)}
    for entry in entries:
        why = due(plan, entry, out)
        if why != MISSING or not entry.blanks or entry.name in shown:
            yield from [f"{entry.name}: {why}"] if why else []
    for path, text in rendered(plan, out, images=False).items():
        if _text(path) != text:
            yield f"{path}: not what the figures say; `quickbeam bench plan --render` writes it"


def due(plan: Plan, entry: Entry, out: Path) -> str | None:
    """Return why an entry should be measured, or None: it never was, or its figures are old."""
    saved = load(entry, out)
    return MISSING if saved is None else stale(saved, entry, plan.root)


def load(entry: Entry, out: Path) -> Saved | None:
    """Return the record of an entry in the folder `out`, or None where there is none.

    Raises `InvalidInput` for a file that is no record or was not measured by a plan.
    """
    path = out / f"{entry.name}.json"
    if not path.exists():
        return None
    saved = read(path)
    run = saved.content.get(KEY)
    if (
        not isinstance(run, dict)
        or not {"date", "commit", "dirty", "command", "digest"} <= run.keys()
    ):
        raise InvalidInput(
            f"{path}: was not measured by a plan, so date and code are unknown; run `quickbeam "
            f"bench plan --only {entry.name}`"
        )
    return saved


def _section(
    plan: Plan, entry: Entry, out: Path, folder: Path, drawn: dict[Path, str]
) -> str | None:
    """The text between the markers of a document in `folder`, or None without a record.

    The plot, if there is one, is added to `drawn` by the path of its file.
    """
    saved = load(entry, out)
    if saved is None:
        return None
    run, parts = saved.content[KEY], list[str]()
    if why := stale(saved, entry, plan.root):
        parts.append(f"> **This table is {why}.** {_again(entry)} measures again.")
    shown = pick(saved, entry.table.grid, entry.table.columns)
    parts += [f"*{shown.title[0].upper()}{shown.title[1:]}.*", shown.markdown()]
    if entry.plot is not None and (drawing := chart(saved, entry.plot.chart, entry.plot.alt)):
        image = plan.root / plan.images / f"benchmark-{entry.name}.svg"
        drawn[image] = drawing.file()
        parts.append(f"![{_alt(drawing.alt)}]({Path(os.path.relpath(image, folder)).as_posix()})")
    where = ", ".join(word for word in (saved.model, machine(saved)) if word)
    words = f"{commit(run)}, {where}: `{run['command']}`"
    parts.append(f"Measured {run['date'][:10]} at {BLANK.sub(_placeholder, words)}")
    return "\n\n".join(parts)


def _placeholder(blank: re.Match[str]) -> str:
    """What stands for a blank in a document: `{large_model}` is `LARGE_MODEL` there."""
    return blank[1].upper()


def _unmeasured(entry: Entry, before: str) -> str:
    """The text for an entry without a record: what stands there now, with a note.

    Where nothing stands there, it is a line that says that nothing was measured.
    """
    empty = f"*{entry.title}: not measured yet ({_again(entry)}).*"
    if before.strip() in ("", empty):
        return empty
    word = (
        "> **No record of this table is kept, so it may be older than the code.** "
        f"{_again(entry)} measures it."
    )
    return before if before.startswith(word) else f"{word}\n\n{before}"


def _again(entry: Entry) -> str:
    return f"`make report ONLY={entry.name}`"


def _alt(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace("<", "&lt;")


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: can't be read as UTF-8 text ({error})") from error
