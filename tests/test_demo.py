"""`quickbeam demo` on a small model: whose tokens are coloured, and the picture that it draws.
`pytest tests/test_demo.py`"""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quickbeam import LLM, SamplingParams
from quickbeam.cli import demo
from quickbeam.cli.app import app
from quickbeam.engine.result import Completion, Statistics
from quickbeam.engine.trace import StepRecord
from quickbeam.tree import TokenTree

CELL = 12.2  # units of the picture that a character is wide


def rows(svg: str) -> list[str]:
    """The picture's lines of text."""
    lines: dict[float, dict[int, str]] = {}
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if "x" in element.attrib and "clip-path" in element.attrib:
            column = round(float(element.attrib["x"]) / CELL)
            lines.setdefault(float(element.attrib["y"]), {})[column] = element.text or ""
    found = []
    for _, parts in sorted(lines.items()):
        line = ""
        for column, text in sorted(parts.items()):
            line = line.ljust(column) + text.replace("\xa0", " ")
        found.append(line)
    return found


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_the_picture_shows_both_answers_and_the_ratio(toy_folder, tmp_path):
    out = tmp_path / "demo.svg"
    result = CliRunner().invoke(
        app,
        ["demo", "--model", toy_folder, "--method", "pld", "--max-tokens", "40", "--svg", str(out)],
    )
    assert result.exit_code == 0, result.stderr
    svg = out.read_text(encoding="utf-8")
    lines = rows(svg)
    shown = "\n".join(lines)
    assert len(re.findall(r"the same tokens, \d+\.\d\d times as fast", shown)) == 2
    assert str(tmp_path) not in svg and toy_folder not in svg
    assert not re.search(r"href|@font-face|url\([^#]*http", svg)  # it fetches nothing
    assert ">quickbeam&#160;demo<" in svg or ">quickbeam demo<" in svg
    half = demo.WIDTH // 2
    inside = [line.ljust(demo.WIDTH) for line in lines if line.startswith("│")]
    answers = [
        squeezed("".join(line[side : side + half].strip().strip("│") for line in inside))
        for side in (0, half)
    ]
    llm = LLM(toy_folder, "pld")
    texts = [
        llm.chat(
            [{"role": "user", "content": prompt}],
            SamplingParams(max_tokens=40),
            method="ar",
        ).text
        for prompt in demo.EXAMPLES.values()
    ]
    assert answers == [squeezed("".join(demo.harmless(text) for text in texts))] * 2


def test_a_picture_that_can_not_be_written_is_bad_input(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--svg", str(tmp_path / "nowhere" / "demo.svg")])
    assert result.exit_code == 2 and "--svg" in result.stderr and result.stderr.count("\n") == 1


def step(
    drafted: list[tuple[int, str]], accepted: int, token: int, taken: int | None = None
) -> StepRecord:
    """A chain of drafted tokens, the first `accepted` of which were right; `taken`: how many tokens
    the answer took."""
    tree = TokenTree(9)
    for parent, (one, source) in enumerate(drafted):
        tree.add(parent, one, source)
    emitted = [*(one for one, _ in drafted[:accepted]), token][:taken]
    return StepRecord(tree, list(range(accepted + 1)), token, emitted, 0.0, 0.0, 0.0)


def test_each_token_is_its_source_s():
    steps = [
        step([(1, "ngram"), (2, "drafter"), (3, "ngram")], 2, 4),
        step([], 0, 5),
        step([(6, "drafter"), (7, "drafter")], 2, 8, taken=1),
    ]
    assert demo.sources(6, steps) == [None, "ngram", "drafter", None, None, "drafter"]


def test_accepted_tokens_are_coloured_and_nothing_commands_the_terminal():
    class Words:
        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(["a ", "b ", "\x1bc ", "d"][i] for i in ids)

    completion = Completion(
        "a b \x1bc d", [0, 1, 2, 3], "stop", Statistics(4, 2, seconds=1.0), method="auto"
    )
    answer = demo.Answer(completion, [None, "ngram", "drafter", None])
    assert list(demo.pieces(answer, Words())) == [
        ("a ", None),
        ("b ", "ngram"),
        ("\x1bc ", "drafter"),
        ("d", None),
    ]
    text = demo.panel(answer, Words()).renderable
    assert text.plain == "a b \\x1bc d"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("b ", demo.COLOURS["ngram"]),
        ("\\x1bc ", demo.COLOURS["drafter"]),
    ]


@pytest.mark.parametrize("character", ["\ufffe", "\uffff", "\ud800"])
def test_the_picture_is_xml_whatever_a_model_says(character):
    console = Console(record=True, width=40, file=io.StringIO())
    console.print(f"<{character}&>")
    assert "<\ufffd&>" in "".join(rows(demo.svg(console)))
