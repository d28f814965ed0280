"""Predicted outputs: the text that an answer is expected to be much like is drafted first."""

import pytest
import torch

from quickbeam.drafters.base import Context
from quickbeam.drafters.ngram import Ngram
from quickbeam.drafters.predicted_text import PredictedText
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.methods.auto import Auto
from quickbeam.params import SamplingParams

OLD = [10, 11, 12, 13, 10, 11, 14, 15, 10, 11, 16]


def next_tokens(predicted, text, path=(), length=3):
    match = predicted.match(text, path)
    return match and predicted.continuation(match, length)


def test_an_answer_is_followed_in_its_prediction_through_its_changes():
    predicted = PredictedText(OLD)
    assert next_tokens(predicted, [1, 2, 10]) == [11, 12, 13]
    for text, expected in (
        ([10, 11, 12], [13, 10, 11]),
        ([10, 11, 12, 13, 10, 11], [14, 15, 10]),  # the longest agreement, not the first
        ([10, 11, 12, 13, 10, 11, 99, 15], [10, 11, 16]),  # a token was replaced
        ([10, 11, 12, 13, 10, 11, 99, 15, 10], [11, 16]),  # two tokens agree
        ([99], None),
    ):
        predicted.follow(text)
        assert next_tokens(predicted, text) == expected, text
    assert next_tokens(predicted, [5], [13, 10]) == [11, 14, 15]


def test_of_equal_matches_the_nearest_to_the_answer_is_taken():
    line = [7, 8, 9]
    predicted = PredictedText([token for i in range(20) for token in (*line, 20 + i)])
    text = list[int]()
    for i in range(20):
        for token in (*line, 50 + i):  # the last token of each line is replaced
            text.append(token)
            predicted.follow(text)
        after = next_tokens(predicted, [*text, 7], length=3)
        assert i == 19 or after == [8, 9, 21 + i]


def tree_of(method, context, budget=8):
    steps = method.propose(context, budget, 12)
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value.tree


def test_the_prediction_is_a_source_of_the_tree():
    context = Context([1, 2, 10], torch.zeros(100), prediction=PredictedText(OLD)).begin([Ngram()])
    tree = tree_of(Auto(), context)
    assert tree.token[:6] == [10, 11, 12, 13, 10, 11]
    assert set(tree.source[1:]) == {"prediction"}
    without = Context([1, 2, 10], torch.zeros(100)).begin([Ngram()])
    assert "prediction" not in tree_of(Auto(), without).source


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prediction_changes_no_token_and_a_true_one_takes_fewer_steps(toy_folder, temperature):
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)

    def predicting(text):
        return SamplingParams(
            max_tokens=60, temperature=temperature, seed=3, ignore_eos=True, prediction=text
        )

    with LLM(toy_folder, memory_of_answers=0) as llm:
        plain = llm.generate("To be or not", params, method="ar")
        alone = llm.generate("To be or not", params, budget=8)
        true = llm.generate("To be or not", predicting(plain.text), budget=8)
        wrong = llm.generate("To be or not", predicting("speak, speak no more" * 9), budget=8)
        for answer in (alone, true, wrong):
            assert answer.token_ids == plain.token_ids
        assert true.statistics.sources["prediction"].accepted > 20
        assert true.statistics.steps < alone.statistics.steps


def test_what_is_no_text_is_refused():
    for bad in (None, 3, ["a"], "\ud800"):
        with pytest.raises(InvalidInput, match="prediction"):
            SamplingParams(prediction=bad)
