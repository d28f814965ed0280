"""`quickbeam demo` on a small model: whose tokens are coloured, and the picture that it draws."""

import re
from xml.etree import ElementTree

from quickbeam import LLM, SamplingParams
from quickbeam.cli import demo
from quickbeam.engine.result import Completion, Statistics
from scripts import cli


def drawn(svg):
    """The picture's text without its white space, line by line."""
    elements = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    lines = {}
    for one in elements:
        if "x" in one.attrib and "clip-path" in one.attrib:
            line = lines.setdefault(float(one.attrib["y"]), [])
            line.append((float(one.attrib["x"]), one.text or ""))
    return squeezed("".join(text for _, line in sorted(lines.items()) for _, text in sorted(line)))


def squeezed(text):
    return re.sub(r"\s|\xa0", "", text)


def test_the_picture_shows_both_answers_and_the_ratio(toy_folder, tmp_path):
    out = tmp_path / "demo.svg"
    given = ["--model", toy_folder, "--method", "pld", "--max-tokens", "40", "--svg", str(out)]
    result = cli("demo", *given)
    assert result.exit_code == 0, result.stderr
    svg = out.read_text(encoding="utf-8")
    shown = drawn(svg)
    assert len(re.findall(r"thesametokens,\d+\.\d\dtimesasfast", shown)) == 2
    assert str(tmp_path) not in svg and toy_folder not in svg
    assert not re.search(r"href|@font-face|url\([^#]*http", svg)  # it fetches nothing
    llm, params = LLM(toy_folder, "pld"), SamplingParams(max_tokens=40)
    for prompt in demo.EXAMPLES.values():
        asked = [{"role": "user", "content": prompt}]
        text = squeezed(demo.harmless(llm.chat(asked, params, method="ar").text))
        assert shown.count(text[:12]) >= 2  # in both columns


def test_accepted_tokens_are_coloured_and_nothing_commands_the_terminal():
    class Words:
        def decode(self, ids, **_):
            return "".join(["a ", "b ", "\x1bc ", "d"][i] for i in ids)

    completion = Completion("a b \x1bc d", [0, 1, 2, 3], "stop", Statistics(4, 2, seconds=1.0))
    answer = demo.SourcedAnswer(completion, [None, "ngram", "drafter", None])
    text = demo.panel(answer, Words()).renderable
    assert text.plain == "a b \\x1bc d"
    coloured = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    colours = demo.COLOURS
    assert coloured == [("b ", colours["ngram"]), ("\\x1bc ", colours["drafter"])]
