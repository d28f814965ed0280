"""The thought that an answer begins with is told from its text, however it is cut into pieces."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.serve.thoughts import ThoughtParser

THOUGHTS = {  # what models write, and what it means: a thought, and a text
    "both": ("<think>\nHm.\n</think>\n\nIt is 4.", "Hm.", "It is 4."),
    "by another mark": ("[THINK]Hm.[/THINK]It is 4.", "Hm.", "It is 4."),
    "spaces before": (" \n<think>Hm.</think>4", "Hm.", "4"),
    "an empty thought": ("<think>\n\n</think>\n\n4", "", "4"),
    "no end": ("<think>Hm. </thin", "Hm. </thin", ""),
    "no end but space": ("<think>Hm. ", "Hm.", ""),
    "nothing behind": ("<think>Hm.</think> \n", "Hm.", ""),
    "a mark further on": ("It is <think>4</think>", "", "It is <think>4</think>"),
    "a second thought": ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    "no mark": (" <thin is no mark", "", " <thin is no mark"),
    "a mark cut short": ("<thi", "", "<thi"),
    "much space": (" " * 65 + "<think>a</think>", "", " " * 65 + "<think>a</think>"),
    "much space within": ("<think>a" + " " * 99 + "</think>b", "a" + " " * 35, "b"),
    "space": ("  ", "", "  "),
}


def parsed(pieces, thinking=False):
    parser = ThoughtParser(thinking)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.flush()
    assert all(part.text for part in parts)
    kinds = [part.kind for part in parts]
    assert kinds == sorted(kinds, reverse=True)  # the thought first
    return tuple(
        "".join(part.text for part in parts if part.kind == kind) for kind in ("thinking", "text")
    )


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_however_they_are_cut(name):
    answer, *right = THOUGHTS[name]
    for size in range(1, len(answer) + 1):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert [*parsed(pieces)] == right
    if answer.startswith("<think>"):  # by the prompt
        assert [*parsed(answer.removeprefix("<think>"), thinking=True)] == right


PARTS = st.sampled_from([*"<>/ ab\n", "think", "</think>", "<think>", "[/THINK]", " " * 40])


@examples(300)
@given(pieces=st.lists(PARTS, max_size=12), thinking=st.booleans())
def test_pieces_make_the_thought_that_the_whole_makes(pieces, thinking):
    assert parsed(pieces, thinking) == parsed(["".join(pieces)], thinking)


def test_long_thoughts_are_read_in_time():
    began = time.perf_counter()
    for unit in (" ", "<", "</think", "a "):
        parser = ThoughtParser(thinking=True)
        for _ in range(50_000):
            parser.feed(unit)
    assert time.perf_counter() - began < 20
