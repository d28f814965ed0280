"""How the model's own questions and documents begin, by language.

An instruct model that is given the chat template up to where a user speaks writes what a user would
ask. Half of the questions begin with one of these words, so that the text covers what users ask for
and not only what the model likes to ask. They are ours, in `openers.json`; `code` is about
programs, in English. Add none that begins as the questions of a benchmark do that we measure with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import cycle, islice

from quickbeam.errors import InvalidInput

OPENERS: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(
    resources.files(__package__).joinpath("openers.json").read_text(encoding="utf-8")
)
QUESTIONS, DOCUMENTS = OPENERS["questions"], OPENERS["documents"]  # by language
LANGUAGES = tuple(QUESTIONS)


def questions(languages: Sequence[str]) -> list[str]:
    """Return how questions in these `languages` begin, as many of each.

    Raises `InvalidInput` for a language without any.
    """
    return _evenly(QUESTIONS, languages)


def documents(languages: Sequence[str]) -> list[str]:
    """Return how documents in these `languages` begin, as many of each.

    Raises `InvalidInput` for a language without any.
    """
    return _evenly(DOCUMENTS, languages)


def _evenly(words: Mapping[str, Sequence[str]], languages: Sequence[str]) -> list[str]:
    if unknown := [language for language in languages if language not in words]:
        raise InvalidInput(
            f"no language {unknown[0]!r} to write text in: choose among {', '.join(LANGUAGES)}"
        )
    if not languages:
        raise InvalidInput(f"no language to write text in: choose among {', '.join(LANGUAGES)}")
    longest = max(len(words[language]) for language in languages)
    return [opener for language in languages for opener in islice(cycle(words[language]), longest)]
