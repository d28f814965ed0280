"""Records read back, their tables and their charts: pytest tests/test_bench_grids.py"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from quickbeam.bench import svg
from quickbeam.bench.charts import CHARTS, chart
from quickbeam.bench.grid import TIMES, Grid, grid
from quickbeam.bench.grids import grids, pick, speedup_error
from quickbeam.bench.saved import KINDS, Saved, read
from quickbeam.errors import InvalidInput
from records import RECORDS

pytest.importorskip("matplotlib")


def saved(kind: str, **changes: object) -> Saved:
    return Saved(kind, kind, {**RECORDS[kind](), **changes})


def row(found: Grid, *labels: str) -> dict[str, str]:
    (one,) = [
        line
        for line in found.rows
        if tuple(cell.replace(TIMES, "x") for cell in line[: len(labels)]) == labels
    ]
    return {
        column: cell.replace(TIMES, "x") for column, cell in zip(found.columns, one, strict=True)
    }


def test_every_kind_is_told_from_its_keys(tmp_path: Path) -> None:
    assert set(RECORDS) == set(KINDS)
    for kind, make in RECORDS.items():
        (tmp_path / "x.json").write_text(json.dumps(make()))
        found = read(tmp_path / "x.json")
        assert (found.name, found.kind) == ("x", kind)
        assert found.whole == (kind != "acceptance")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "can't be read"),
        ("{", "not JSON"),
        ("[]", "not a record"),
        ('{"a": 1}', "not a record"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInput, match=f"some.json: {says}"):
        read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_lacks_figures_is_refused_by_name(kind: str) -> None:
    """Whatever of its keys is taken away or emptied."""
    for key in KINDS[kind]:
        broken = Saved(
            "some",
            kind,
            {**RECORDS[kind](), key: {"a": {"b": None}} if kind != "trees" else [{"trees": []}]},
        )
        if key in ("reference", "vocab_size", "complete", "over_ar", "milliseconds", "agreement"):
            continue  # nothing is built of it alone
        with pytest.raises(InvalidInput, match=f"some: not a whole record of bench {kind}"):
            grids(broken)


FIGURES = {
    "methods": [
        (
            "overall",
            ("auto",),
            {
                "MAT": "2.50",
                "tokens/s": "140.0",
                "identical": "4/4",
                "a call ms": "1.00",
                "nodes": "8.00",
            },
        ),
        ("overall", ("hf",), {"identical": "-", "verify ms": "-", "speed-up": "0.40x ± 0.03"}),
        ("overall", ("ar",), {"speed-up": "1.00x"}),
        ("categories", ("a|b <i>", "auto"), {"speed-up": "3.30x ± 0.00", "identical": "4/2"}),
        (
            "phases",
            ("auto",),
            {
                "verification": "4.80",
                "calls of the drafter": "0.80",
                "other drafting": "0.40",
                "ms a token": "7.14",
            },
        ),
        ("phases", ("hf",), {"verification": "-", "ms a token": "50.00"}),
        (
            "sources",
            ("auto",),
            {"the model itself": "1.00", "drafter": "1.25", "ngram": "0.25", "MAT": "2.50"},
        ),
    ],
    "vocabulary": [
        (
            "overall",
            ("router",),
            {
                "asked": "60",
                "scored": "62",
                "share": "6.2%",
                "MAT kept": "96.0%",
                "speed-up": "1.25x",
            },
        ),
        ("categories", ("maths",), {"full": "100.0%", "router@250": "99.0%"}),
    ],
    "trees": [
        ("trees", ("0", "greedy"), {"8 nodes": "2.500", "16 nodes": "3.250"}),
        ("trees", ("0.6", "eagle2"), {"8 nodes": "2.250 (-0.250 ± 0.020)"}),
    ],
    "acceptance": [
        (
            "temperatures",
            ("0.6",),
            {"tried": "40", "MAT": "2.50", "calibration gap": "0.050", "correlation": "0.321"},
        ),
        ("bins", ("0.6", "0.50 to 1.00"), {"accepted": "0.750", "95 % interval": "0.600 to 0.860"}),
        ("bins", ("0.6", "0.00 to 0.50"), {"accepted": "-", "95 % interval": "-"}),
        ("depths", ("1",), {"accepted": "0.750"}),
        ("agreement", ("maths",), {"tokens": "80", "the drafter's likeliest": "0.625"}),
    ],
    "throughput": [
        (
            "throughput",
            ("1", "auto"),
            {
                "tokens/s": "120.0",
                "over ar": "1.50x",
                "decoding over ar": "1.60x",
                "identical": "8/8",
            },
        ),
        (
            "throughput",
            ("16", "auto"),
            {"over ar": "1.05x", "decoding": "-", "decoding over ar": "-", "first token ms": "120"},
        ),
        ("identical", ("auto",), {"identical, 1 at a time": "8/8"}),
    ],
    "weights": [
        (
            "weights",
            ("int8",),
            {
                "ms, 1 token": "10.0 (1.60x)",
                "perplexity": "20.400 (+2.00%)",
                "tokens/s, auto": "192.0 (1.60x)",
                "MB a pass": "140",
            },
        ),
    ],
    "passes": [
        (
            "passes",
            ("100", "1"),
            {
                "transformers": "50.0",
                "native": "10.0",
                "products": "8.0",
                "rest": "1.5",
                "of memory's": "93%",
            },
        ),
        ("passes", ("100", "8"), {"native over the narrowest": "1.25", "products": "-"}),
        ("llama.cpp", ("100",), {"llama.cpp": "12.5", "native over llama.cpp": "0.80"}),
    ],
    "structured": [
        (
            "structured",
            ("JSON schema", "ar"),
            {"valid": "9/10", "tokens/s": "92.0", "MAT": "2.00", "tokens an answer": "47"},
        )
    ],
    "drafting": [
        ("drafting", ("greedy", "0.6"), {"8 nodes": "0.50 (3.5)", "16 nodes": "1.00 (3.5)"})
    ],
    "recall": [
        ("ways", ("list",), {"rows": "2,949", "recall": "0.9731", "of rare": "0.125"}),
        ("sizes", ("list",), {"recall 2,949": "0.9731"}),
        ("mass", ("router",), {"it is": "0.5100", "gain": "+0.0100 ± 0.0020"}),
    ],
    "heads": [
        (
            "heads",
            ("Llama-3-8B 128,256 x 4,096", "4"),
            {"scored": "16,032", "share": "12.5%", "full": "40.00", "ratio": "0.13"},
        )
    ],
}


@pytest.mark.parametrize(
    ("kind", "name", "labels", "figures"),
    [(kind, *one) for kind, some in FIGURES.items() for one in some],
)
def test_tables_hold_the_figures(
    kind: str, name: str, labels: tuple[str, ...], figures: dict[str, str]
) -> None:
    assert set(FIGURES) == set(KINDS)
    found = {one.name: one for one in grids(saved(kind))}[name]
    if kind == "vocabulary" and name == "overall":
        found = found._replace(rows=found.rows[:2])
    assert figures.items() <= row(found, *labels).items()


def test_vocabularies_may_have_errors_and_rare_tokens() -> None:
    """As records have them that name their points."""
    found = saved("vocabulary")
    rows = [
        {
            **one,
            "scored": one["tokens"],
            "kept": one["mat_kept"],
            "kept_error": 0.005,
            "gap": gap,
            "gap_error": 0.004,
            "rare_recall": 0.5,
        }
        for one, gap in zip(found.content.pop("overall"), (None, None, -0.0125), strict=True)
    ]
    for one in rows:
        del one["mat_kept"], one["tokens"]
    found.content["points"] = rows
    table, _ = grids(found)
    assert [line[table.columns.index("MAT kept")] for line in table.rows] == [
        "100.0%",
        "96.0% ± 0.5",
        "99.0% ± 0.5",
    ]
    assert [line[table.columns.index("less the first")] for line in table.rows] == [
        "-",
        "-",
        "-1.2 % ± 0.4",
    ]
    assert {line[table.columns.index("rare recall")] for line in table.rows} == {"0.500"}
    assert chart(found, "vocabulary") == chart(saved("vocabulary"), "vocabulary")


def test_errors_of_a_speed_up_are_the_jackknife_s() -> None:
    """By hand: leaving out one of two prompts leaves the other's ratio, so the error is half their
    difference."""
    trials = [
        {"answers": {"ar": {"decoded": 10, "seconds": 8.0}, "x": {"decoded": 10, "seconds": taken}}}
        for taken in (2.0, 4.0)
    ]
    assert speedup_error(trials, "x", "ar") == pytest.approx(abs(8 / 2 - 8 / 4) / 2)
    assert (
        speedup_error(trials, "ar", "ar") is None and speedup_error(trials[:1], "x", "ar") is None
    )
    many = [
        {"answers": {"ar": {"decoded": 10, "seconds": 8.0}, "x": {"decoded": 10, "seconds": 2.0}}}
    ] * 5
    assert speedup_error(many, "x", "ar") == pytest.approx(0)
    trials[1]["answers"]["x"]["decoded"] = 0
    assert speedup_error(trials, "x", "ar") is None


def test_columns_are_chosen_and_empty_ones_left_out() -> None:
    found = pick(saved("methods"), None, ["speed-up", "MAT"])
    assert found.columns == ("method", "speed-up", "MAT") and found.rows[1][2] == "2.50"
    assert "recall" not in pick(saved("methods"), None, None).columns
    assert "recall" in pick(saved("methods"), None, ["recall"]).columns, (
        "one that is asked for stays"
    )
    with pytest.raises(InvalidInput, match=r"unknown column 'speed'.*known: MAT, tokens/s"):
        pick(saved("methods"), None, ["speed"])
    with pytest.raises(
        InvalidInput, match="bench methods has no table 'all'; known: overall, categories"
    ):
        pick(saved("methods"), "all", None)


def test_markdown_keeps_a_cell_in_its_place() -> None:
    text = grid("x", "t", [{"a": "one|two\nthree", "b": "1"}, {"a": "<b>"}]).markdown()
    assert text.splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| one\\|two three | 1 |",
        "| &lt;b> | - |",
    ]


def charts_of(kind: str) -> list[str]:
    return [name for name, (kinds, _) in CHARTS.items() if kind in kinds]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in charts_of(kind)]
)
def test_charts_are_whole_documents_in_our_colours(kind: str, name: str) -> None:
    drawing = chart(saved(kind), name)
    assert drawing is not None
    document = ET.fromstring(drawing.file())
    text = " ".join(document.itertext())
    assert (
        "prefers-color-scheme:dark" in text
        and drawing.alt in text
        and document.get("aria-label") == drawing.alt
    )
    assert "var(--ink)" in drawing.svg and "var(--paper)" in drawing.svg
    assert not any(colour in drawing.svg for colour in (*svg.WORDS, "#000000", "#ffffff")), (
        "nothing is drawn in black or white"
    )
    ids = [node.get("id") for node in document.iter() if node.get("id")]
    assert len(set(ids)) == len(ids) and all(
        one.startswith(f"{name}-{kind}-") for one in ids if one
    )
    used = {
        value[1:]
        for node in document.iter()
        for key, value in node.attrib.items()
        if key.endswith("href")
    }
    assert used <= set(ids)
    assert drawing == chart(saved(kind), name), "the same figures make the same file"


WORDS = {
    "speed": ["maths", "a|b <i>", "auto", "speed-up over ar", "auto 2.80"],
    "budget": ["greedy", "eagle2", "temperature 0.6", "16"],
    "sources": ["the model itself", "drafter", "ngram", "auto"],
    "phases": ["verification", "calls of the drafter", "auto", "ar"],
    "calibration": ["draft probability", "temperature 0.6", "0.6: 0.050"],
    "load": ["requests at a time", "auto", "16"],
    "passes": ["native, 100 behind", "milliseconds"],
    "vocabulary": ["router", "MAT kept, %"],
}


@pytest.mark.parametrize("name", CHARTS)
def test_charts_say_what_they_show(name: str) -> None:
    drawing = chart(saved(CHARTS[name][0][0]), name)
    assert drawing is not None
    text = " ".join(ET.fromstring(drawing.file()).itertext())
    assert all(word in text for word in WORDS[name]), text


def test_records_without_the_figures_have_no_chart() -> None:
    """Of an earlier version, of a single method, of another kind."""
    old = saved("methods")
    for one in old.content["methods"].values():
        del one["accepted"], one["nodes"], one["prefill_ms"]
    assert (
        chart(old, "sources") is None
        and chart(old, "budget") is None
        and chart(old, "speed") is not None
    )
    assert {one.name for one in grids(old)} == {"overall", "categories", "phases"}
    alone = saved("methods")
    alone.content["methods"] = {"ar": alone.content["methods"]["ar"]}
    assert chart(alone, "speed") is None
    assert chart(saved("heads"), "speed") is None
    with pytest.raises(InvalidInput, match="unknown chart 'bars'; known: speed, "):
        chart(saved("methods"), "bars")
    drawing = chart(saved("methods"), "speed", "Own <words>")
    assert (
        drawing is not None and drawing.alt == "Own <words>" and "Own &lt;words&gt;" in drawing.svg
    )


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_colours_are_legible_on_both_papers(theme: dict[str, str]) -> None:
    def contrast(colour: str) -> float:
        high, low = sorted((luminance(colour), luminance(theme["paper"])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, svg.COLOURS)) >= 3 and contrast(theme["ink"]) >= 7
    assert not set(svg.COLOURS) & set(svg.WORDS)
