"""The benchmark's questions: the built-in ones, files, an even spread. pytest
tests/test_bench_questions.py"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from fake_runner import questions_of
from quickbeam.bench.questions import Question, load_questions, spread
from quickbeam.errors import InvalidInput


def test_built_in_questions_cover_eight_categories_evenly():
    questions = load_questions()
    counts = Counter(question.category for question in questions)
    assert len(questions) >= 48 and len(counts) == 8 and min(counts.values()) >= 6
    assert len({question.question_id for question in questions}) == len(questions)
    assert (
        sum(len(question.turns) == 2 for question in questions if question.category == "chat") >= 3
    )
    for question in questions:
        if question.category in ("summary", "extraction"):
            assert 150 <= len(question.turns[0].split()) <= 330


def test_question_file_is_read_with_blank_lines_other_keys_and_odd_separators(tmp_path):
    file = tmp_path / "q.jsonl"
    turns = ["first\u2028line", "second"]
    lines = [
        json.dumps(
            {"question_id": "a", "category": "x", "turns": turns, "reference": [1]},
            ensure_ascii=False,
        ),
        "",
        '{"question_id": 2, "category": "y", "turns": ["t"]}\r',
    ]
    file.write_text("\n".join(lines), encoding="utf-8-sig", newline="")
    assert load_questions(file) == [Question("a", "x", tuple(turns)), Question(2, "y", ("t",))]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"category": "c", "turns": ["t"]}',
        '{"question_id": true, "category": "c", "turns": ["t"]}',
        '{"question_id": 1, "turns": ["t"]}',
        '{"question_id": 1, "category": " ", "turns": ["t"]}',
        '{"question_id": 1, "category": "c"}',
        '{"question_id": 1, "category": "c", "turns": []}',
        '{"question_id": 1, "category": "c", "turns": "t"}',
        '{"question_id": 1, "category": "c", "turns": ["t", 3]}',
    ],
)
def test_malformed_line_is_named(tmp_path, line):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 1, "category": "c", "turns": ["t"]}\n\n' + line + "\n")
    with pytest.raises(InvalidInput, match=r"q\.jsonl:3: .*must be a JSON object with question_id"):
        load_questions(file)


def test_unreadable_question_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"category": "caf\xe9"}')
    for name, says in (
        ("none.jsonl", "No such file"),
        ("empty.jsonl", "holds no questions"),
        ("latin.jsonl", "not UTF-8 text"),
        ("", "read"),
    ):
        with pytest.raises(InvalidInput, match=says):
            load_questions(tmp_path / name)


@examples(200)
@given(st.lists(st.sampled_from("abcdef"), max_size=40), st.one_of(st.none(), st.integers(1, 50)))
def test_spread_is_even_ordered_and_complete(categories, limit):
    questions = questions_of(*categories)
    chosen = spread(questions, limit)
    assert len(chosen) == min(len(questions), limit or len(questions))
    assert len({question.question_id for question in chosen}) == len(chosen)
    sizes, taken = Counter(categories), Counter(question.category for question in chosen)
    most = max(taken.values(), default=0)
    for category, size in sizes.items():
        assert taken[category] >= min(size, most - 1), (
            "a category with questions left is at most one behind"
        )
        own = [question.question_id for question in chosen if question.category == category]
        assert own == sorted(own), "the first of each category, in order"
    first_round = list(dict.fromkeys(categories))[: len(chosen)]
    assert [question.category for question in chosen[: len(first_round)]] == first_round
