"""Question sets: JSON lines in Spec-Bench's format, and an even choice among their categories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from quickbeam.errors import InvalidInput

BUILT_IN = "questions.jsonl"  # our own set, inside the package


@dataclass(frozen=True)
class Question:
    """A question. `turns` is what the user says, one after the other."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def load_questions(path: Path | None = None) -> list[Question]:
    """Read a file of Spec-Bench lines, or our own set. Raises `InvalidInput` by line."""
    file = resources.files(__package__).joinpath(BUILT_IN) if path is None else path
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or f"not UTF-8 text: {error}"
        raise InvalidInput(f"--questions {path}: can't be read ({why})") from None
    # Not splitlines(): JSON strings may hold U+2028 and its like, which are no line ends here.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InvalidInput(f"--questions {path}: holds no questions")
    return [_question(line, f"{path or BUILT_IN}:{number}") for number, line in lines]


def spread(questions: Sequence[Question], limit: int | None = None) -> list[Question]:
    """Take `limit` questions (None: all), one of each category in turn: any prefix is even."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    longest = max(map(len, by_category.values()), default=0)
    rounds = (group[i] for i in range(longest) for group in by_category.values() if i < len(group))
    return list(rounds)[:limit]


def _question(line: str, where: str) -> Question:
    try:
        name, category, turns = map(json.loads(line).get, ("question_id", "category", "turns"))
        texts = isinstance(turns, list) and bool(turns) and [category, *turns]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError
        if not isinstance(name, int | str) or isinstance(name, bool):
            raise ValueError
    except (ValueError, AttributeError):
        raise InvalidInput(
            f"{where}: {line.strip()[:80]!r} must be a JSON object with question_id (a number or "
            "string), category (a string) and turns (a list of strings), none of them empty"
        ) from None
    return Question(name, category, tuple(turns))
