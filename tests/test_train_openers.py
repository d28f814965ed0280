"""How the model's own text begins, by language."""

from __future__ import annotations

from collections import Counter

import pytest

from quickbeam.errors import InvalidInput
from quickbeam.train import openers, stages
from quickbeam.train.recipes import Plan

WORDS = [(openers.questions, openers.QUESTIONS), (openers.documents, openers.DOCUMENTS)]


def test_every_language_has_questions_and_documents():
    assert set(openers.QUESTIONS) == set(openers.DOCUMENTS) == set(openers.LANGUAGES)


@pytest.mark.parametrize(("made", "words"), WORDS)
def test_languages_have_equal_parts(made, words):
    of = {opener: language for language in ("ar", "en", "ru") for opener in words[language]}
    drawn = made(["en", "ru", "ar"])
    assert len(set(Counter(of[opener] for opener in drawn).values())) == 1
    assert set(drawn) == set(of)


@pytest.mark.parametrize("languages", [["en", "tlh"], []])
def test_an_unknown_language_is_named_before_the_model_is_loaded(languages, tmp_path):
    with pytest.raises(InvalidInput, match=r"language .* choose among en, code"):
        stages.TextStage(Plan("no such model", tmp_path, languages=languages))
