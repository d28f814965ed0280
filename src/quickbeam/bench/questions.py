"""Question sets: JSON lines in Spec-Bench's format, and an even choice among their categories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from quickbeam.errors import InvalidInput

BUILT_IN = "questions.jsonl"  # our own set, inside the package


@dataclass(frozen=True)
class Question:
    """A question of one or more turns.

    `turns` is what the user says, one after the other.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def load_questions(path: Path | None = None) -> list[Question]:
    """Read a question file, or our own set where `path` is None.

    Each line is an object with `question_id`, `category` and `turns`. Other keys are ignored, and
    blank lines are skipped. Raises `InvalidInput` that names the file and the line.
    """
    if path is None:
        return _parse(
            resources.files(__package__).joinpath(BUILT_IN).read_text(encoding="utf-8"), BUILT_IN
        )
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise InvalidInput(f"--questions {path}: no such file") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"--questions {path}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except OSError as error:
        raise InvalidInput(f"--questions {path}: can't be read ({error.strerror})") from None


def spread(questions: Sequence[Question], limit: int | None = None) -> list[Question]:
    """Take `limit` questions (None: all), one of each category in turn.

    Categories come in order of appearance. Any prefix is spread as evenly as the categories' sizes
    allow, so a run that is cut short stays balanced.
    """
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    longest = max(map(len, by_category.values()), default=0)
    rounds = (group[i] for i in range(longest) for group in by_category.values() if i < len(group))
    return list(rounds)[:limit]


def _parse(text: str, name: str) -> list[Question]:
    # Not splitlines(): JSON strings may hold U+2028 and its like, which are no line ends here.
    questions = [
        _question(line, f"{name}:{number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not questions:
        raise InvalidInput(
            f"{name}: holds no questions; a line each is expected, with "
            "question_id, category and turns"
        )
    return questions


def _question(line: str, where: str) -> Question:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise InvalidInput(
            f"{where}: {type(record).__name__} where an object with question_id, "
            "category and turns is expected"
        )
    question_id, category, turns = (
        record.get("question_id"),
        record.get("category"),
        record.get("turns"),
    )
    if not isinstance(question_id, int | str) or isinstance(question_id, bool):
        raise InvalidInput(f"{where}: question_id={question_id!r}: must be a number or a string")
    if not isinstance(category, str) or not category.strip():
        raise InvalidInput(f"{where}: category={category!r}: must be a non-empty string")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise InvalidInput(f"{where}: turns must be a non-empty list of non-empty strings")
    return Question(question_id, category, tuple(turns))
