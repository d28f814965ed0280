"""`bench report`: one page of any records. `pytest tests/test_bench_page.py`"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quickbeam.bench.grids import grids
from quickbeam.bench.report_page import page
from quickbeam.bench.saved import KINDS, Saved
from quickbeam.cli.app import app
from quickbeam.errors import InvalidInput
from records import RECORDS

pytest.importorskip("matplotlib")

X = "{http://www.w3.org/1999/xhtml}"
VOID = {"meta"}


class Outline(HTMLParser):
    """Reads as browsers do: every element must be closed by its own tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [
            value
            for key, value in attributes
            if key in ("src", "href", "xlink:href", "action", "data")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def saved(kind: str, name: str | None = None) -> Saved:
    return Saved(name or kind, kind, RECORDS[kind]())


@pytest.fixture(scope="module")
def whole() -> str:
    return page([saved(kind) for kind in KINDS])


def test_all_kinds_make_one_page_that_needs_nothing_else(whole: str) -> None:
    found = outline(whole)
    sections = [
        "Speed by category",
        "MAT against budget",
        "Accepted tokens by source",
        "Time by phase",
        "Calibration",
    ]
    assert [heading for heading in found.headings if heading in sections] == sections
    assert {
        "Many requests at once",
        "One pass of the model",
        "A part of the vocabulary",
        "Further tables",
    } <= set(found.headings)
    assert (
        not {"script", "link", "img", "iframe", "object"} & set(found.tags)
        and found.tags.count("svg") == 9
    )
    assert all(link.startswith("#") for link in found.links)
    assert "@import" not in whole and "url(" not in whole.replace("url(#", "")
    ids = [node.get("id") for node in ET.fromstring(whole).iter() if node.get("id")]
    assert len(ids) == len(set(ids)) and {link[1:] for link in found.links} <= set(ids)


def test_every_table_is_there_once_with_its_figures(whole: str) -> None:
    """By its region's name: the record and the title."""
    shown: dict[str, list[list[str]]] = {}
    for region in ET.fromstring(whole).iter(f"{X}div"):
        assert region.get("aria-label") not in shown
        shown[str(region.get("aria-label"))] = [
            ["".join(cell.itertext()) for cell in row] for row in region.iter(f"{X}tr")
        ]
    for kind in KINDS:
        for one in grids(saved(kind)):
            assert shown.pop(f"{kind}: {one.title}") == [
                list(row) for row in (one.filled().columns, *one.filled().rows)
            ]
    assert list(shown) == ["Summary of the records"]


def test_tables_are_told_to_who_can_t_see_them(whole: str) -> None:
    document = ET.fromstring(whole)
    for table in document.iter(f"{X}table"):
        assert "".join(table.find(f"{X}caption").itertext()).strip()
        assert {cell.get("scope") for cell in table.iter(f"{X}th")} == {"col", "row"}
        assert all(row[0].tag == f"{X}th" for row in table.find(f"{X}tbody"))
    for drawing in document.iter("{http://www.w3.org/2000/svg}svg"):
        assert drawing.get("role") == "img" and drawing.get("aria-label")
    assert document.get("lang") == "en" and "prefers-color-scheme:dark" in whole


def test_names_are_text_not_markup() -> None:
    name = '<script>alert("x")</script>'
    text = page([saved("methods", name)])
    assert "script" not in outline(text).tags and "&lt;script&gt;" in text
    document = "".join(ET.fromstring(text).itertext())
    assert (
        name in document
        and "<b>model</b>" in document
        and "Test CPU <9000>" in document
        and "a|b <i>" in document
    )


def test_the_summary_tells_date_commit_machine_and_what_was_cut_short() -> None:
    record = saved("trees")
    record.content["run"] = {
        "date": "2026-01-02T03:04:05Z",
        "commit": "f" * 40,
        "dirty": True,
        "command": "quickbeam bench trees --limit 3",
    }
    rows = list(ET.fromstring(page([record, saved("acceptance")])).iter(f"{X}tr"))
    first, second = (["".join(cell.itertext()) for cell in row] for row in rows[1:3])
    machine = "Test CPU <9000>, 2 cores, 2 threads, native (avx2), torch 2.13.0"
    assert first == [
        "trees",
        "bench trees",
        "m",
        "2026-01-02 03:04:05",
        "fffffffff with changes",
        machine,
        "quickbeam bench trees --limit 3",
    ]
    assert (
        second[0] == "acceptance (cut short)" and second[4] == "012345678" and second[6] == "bins 2"
    )


def test_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x.json", tmp_path / "b" / "x.json"]
    for path, kind in zip(paths, ("methods", "heads"), strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps(RECORDS[kind]()))
    result = CliRunner().invoke(
        app,
        ["bench", "report", *map(str, paths), "--out", str(tmp_path / "new" / "page")],
        catch_exceptions=False,
    )
    assert result.exit_code == 0 and result.stdout.strip() == str(
        tmp_path / "new" / "page" / "index.html"
    )
    headings = outline(
        (tmp_path / "new" / "page" / "index.html").read_text(encoding="utf-8")
    ).headings
    assert "x" in headings and "x (2)" in headings


def test_bad_files_are_named_in_a_line(tmp_path: Path) -> None:
    good, bad, other = (tmp_path / name for name in ("good.json", "bad.json", "other.json"))
    good.write_text(json.dumps(RECORDS["heads"]()))
    bad.write_text("{")
    other.write_text(json.dumps({**RECORDS["heads"](), "heads": [{"name": 1}]}))
    for files, says in (
        ([good, bad], "bad.json: not JSON"),
        ([other], "other: not a whole record of bench heads (no 'vocab')"),
        ([tmp_path], "can't be read"),
    ):
        result = CliRunner().invoke(
            app, ["bench", "report", *map(str, files), "--out", str(tmp_path / "page")]
        )
        assert (
            result.exit_code == 2
            and says in result.stderr
            and len(result.stderr.strip().splitlines()) == 1
        )
    assert not (tmp_path / "page").exists()
    result = CliRunner().invoke(app, ["bench", "report", str(good), "--out", str(good)])
    assert result.exit_code == 2 and "is a file; name a folder" in result.stderr
    with pytest.raises(InvalidInput):
        page([Saved("x", "methods", {})])
