"""What `generate --trace` records and `inspect` draws."""

import json
from html.parser import HTMLParser

import pytest

import fake_llm
from cases import refuses
from quickbeam.cli.inspect import page
from quickbeam.engine.result import Completion, Statistics
from quickbeam.engine.trace import StepRecord, Trace, read_trace
from quickbeam.errors import InvalidInput
from quickbeam.tree import TokenTree
from scripts import cli

EVIL = "<script>alert('x')</script>&\"\n"


class Letters:
    """Tokens are characters, but token 0 is text that HTML must not take at its word."""

    def decode(self, ids):
        return "".join(chr(97 + i) if i else EVIL for i in ids)


class Page(HTMLParser):
    """A page's elements with their attributes, and its text. Fails where they are not nested."""

    def __init__(self, html):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def of_class(self, name):
        return sum(name in (attrs.get("class") or "").split() for _, attrs in self.elements)


def some_tree():
    tree = TokenTree(1)
    first = tree.add(0, 0, "drafter", 0.5)
    tree.add(0, 3, EVIL, 0.25)
    tree.add(tree.add(first, 4, "ngram", 0.125), 5, "ngram")
    tree.add(first, 6, "drafter", 0.0625)
    return tree


@pytest.fixture
def trace():
    recorder = Trace()
    recorder(StepRecord(some_tree(), [0, 1, 3], 7, [0, 4, 7], 0.001, 0.002, 0.004))
    recorder(StepRecord(TokenTree(7), [0], 2, [2], 0.0, 0.002, 0.003))
    counts = Statistics(5, 2, 0.007, 0.1)
    completion = Completion(EVIL, [1, 0, 4, 7, 2], "stop", counts, EVIL, "dyspec")
    return recorder.to_json(completion, Letters())


def written(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_record_comes_back_as_it_was_written_and_other_files_are_named(trace, tmp_path):
    assert read_trace(written(tmp_path / "t.json", trace)) == trace
    step, plain = trace["steps"]
    nodes = step["nodes"]
    tree = some_tree()
    for name in ("token", "parent", "depth", "source", "value"):
        assert [node[name] for node in nodes] == getattr(tree, name)
    assert [node["text"] for node in nodes] == ["b", EVIL, "d", "e", "f", "g"]
    assert [node["accepted"] for node in nodes] == [True, True, False, True, False, False]
    assert (step["next"], step["emitted"]) == ({"token": 7, "text": "h"}, 3)
    assert (step["draft_seconds"], step["verify_seconds"], step["seconds"]) == (0.001, 0.002, 0.004)
    assert len(plain["nodes"]) == 1 and plain["next"]["text"] == "c"
    assert trace["answer"]["mean_accepted_tokens"] == 2.0
    for content in (b"{", b"\xff", b"[]"):
        (tmp_path / "x").write_bytes(content)
        refuses("not a trace" if content == b"[]" else "read", read_trace, tmp_path / "x")
    with pytest.raises(InvalidInput, match="a trace of version 2; this quickbeam reads version 1"):
        read_trace(written(tmp_path / "x", trace | {"version": 2}))
    half = {key: value for key, value in trace.items() if key != "answer"}
    refuses("not a trace", read_trace, written(tmp_path / "x", half))
    refuses("can't be read", read_trace, tmp_path / "y")


def test_the_page_shows_everything_and_loads_nothing(trace):
    html = page(trace)
    drawn = Page(html)
    assert not {tag for tag, _ in drawn.elements} & {"script", "link", "img", "iframe", "object"}
    assert "http" not in html and "url(" not in html and "@import" not in html
    assert not any({"src", "href", "onclick"} & {*attrs} for _, attrs in drawn.elements)
    assert EVIL.strip() in drawn.text, "texts are shown as they are"
    assert drawn.of_class("accepted") == 3 + 1 and drawn.of_class("next") == 2
    assert drawn.of_class("node") == 6 + 1 + 2
    assert sum(tag == "details" for tag, _ in drawn.elements) == 2
    words = ("step 1: 5 drafted, 2 accepted, 3 emitted", "step 2: 0 drafted", "MAT", "dyspec")
    assert all(one in drawn.text for one in (*words, "drafting 1.0 ms, verifying 2.0 ms"))
    titles = {attrs.get("title") for _, attrs in drawn.elements}
    assert "token 4, depth 2, ngram, value 0.125" in titles


@pytest.mark.parametrize(("prompt", "code"), [("hello", 0), ("interrupt", 130)])
@pytest.mark.parametrize("options", [[], ["--json"], ["--raw"]])
def test_generate_records_and_inspect_draws(faked, tmp_path, prompt, code, options):
    recorded, drawn = tmp_path / "t.json", tmp_path / "t.html"
    assert faked("generate", prompt, "--trace", recorded, *options).exit_code == code
    steps = read_trace(recorded)["steps"]
    assert len(steps) == 2 and steps[0]["nodes"][2]["text"] == "<3>"
    result = faked("inspect", recorded, "--html", drawn)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "steps: 2" in result.stdout and "2 (100%)" in result.stdout and "0 (0%)" in result.stdout
    assert Page(drawn.read_text(encoding="utf-8")).of_class("node") == 2 * (3 + 1)
    assert faked("inspect", recorded).stdout == result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.html", "t.json"]


def test_places_that_cannot_be_written_are_named_before_any_work(faked, tmp_path, trace):
    recorded = written(tmp_path / "t.json", trace)
    for line, words in (
        (("generate", "hello", "--trace", tmp_path / "no" / "t.json"), "does not exist"),
        (("inspect", recorded, "--html", tmp_path), "is a folder"),
        (("inspect", tmp_path / "missing.json"), "missing.json"),
    ):
        result = faked(*line)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert words in result.stderr and fake_llm.CALLS == []


def test_a_real_answers_trace_holds_its_tokens(toy_folder, tmp_path):
    recorded, drawn = tmp_path / "t.json", tmp_path / "t.html"
    options = ["--model", toy_folder, "--drafter", toy_folder, "--method", "dyspec", "--json"]
    options += ["--dtype", "float32", "--max-tokens", "20", "--ignore-eos", "--trace", recorded]
    done = cli("generate", "abc abc", *options)
    assert done.exit_code == 0, done.stderr
    answer, trace = json.loads(done.stdout), read_trace(recorded)
    tokens = []
    for step in trace["steps"]:
        accepted = [node["token"] for node in step["nodes"][1:] if node["accepted"]]
        tokens += [*accepted, step["next"]["token"]][: step["emitted"]]
    assert tokens == answer["token_ids"][1:] and len(trace["steps"]) == answer["steps"]
    sources = {node["source"] for step in trace["steps"] for node in step["nodes"]}
    assert sources == {"root", "drafter"}
    assert cli("inspect", recorded, "--html", drawn).exit_code == 0
    assert Page(drawn.read_text(encoding="utf-8")).of_class("next") == answer["steps"]
