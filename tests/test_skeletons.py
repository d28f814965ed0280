"""Fixed parts of tool calls: drafted, not forced, and where an answer is in them."""

import json

import pytest
import torch

from quickbeam.drafters.base import Context
from quickbeam.drafters.ngram import Ngram
from quickbeam.drafters.predicted_text import GAP, PredictedText
from quickbeam.llm import LLM
from quickbeam.methods.auto import Auto
from quickbeam.params import SamplingParams
from quickbeam.serve.calls import HERMES, LLAMA3, MISTRAL_NAMED
from quickbeam.serve.skeletons import MAX_CHARACTERS, call_skeletons
from quickbeam.serve.tool_fields import Tool
from test_prediction import next_tokens, tree_of

# a call of one tool: 1 2 (name) 3, then two keys (4 and 6) whose values are free, and the end
CALL = [1, 2, 3, 4, 9, GAP, 8, 6, 9, GAP, 5, 7, GAP]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "where": {"type": "object", "properties": {"street": {"type": "string"}}},
    },
}


def tool(name, parameters=None):
    function = {"name": name, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


def test_an_answer_is_followed_across_the_gaps():
    text = list[int]()
    skeleton = PredictedText(CALL)
    for tokens, expected in (
        ([1, 2], [3, 4, 9]),  # not past the gap
        ([3, 4, 9], []),
        ([30, 31, 32, 33, 34, 35, 36, 37], None),  # a value longer than what comes next
        ([8], [6, 9]),  # the key behind the gap, of one agreeing token
        ([6, 9], []),
        ([40], None),
        ([5], [7]),
    ):
        text += tokens
        skeleton.follow(text)
        assert next_tokens(skeleton, text) == expected, tokens


@pytest.mark.parametrize("committed", [1, 2, 3, 4, 5, 6, 7])
def test_keys_that_begin_alike_come_in_their_order(committed):
    keys = [token for i in range(20) for token in (8, 9, 20 + i, 7, GAP)]
    skeleton = PredictedText(keys)
    answer = [99]
    skeleton.follow(answer)
    for i in range(20):
        answer += [8, 9, 20 + i, 7] + [50 + i] * (i % 3 + 1)
    for end in range(1 + committed, len(answer) - 3, committed):  # so many tokens a step
        text = answer[:end]
        skeleton.follow(text)
        if text[-1] == 8:
            assert next_tokens(skeleton, text) == answer[end : end + 3], end


def test_skeletons_are_a_source_of_the_tree_beside_the_prediction():
    context = Context(
        [1, 2], torch.zeros(100), prediction=PredictedText([5, 6]), skeletons=PredictedText(CALL)
    ).begin([Ngram()])
    tree = tree_of(Auto(), context)
    assert tree.token[1:4] == [3, 4, 9]
    assert tree.source[1:4] == ["skeletons"] * 3
    assert "prediction" not in tree.source
    assert GAP not in tree.token


def test_skeletons_are_calls_as_the_template_writes_them_and_as_indented_json():
    parts = call_skeletons(HERMES, [tool("weather", SCHEMA), tool("stop")])
    assert len(parts) == 12
    assert parts[:4] == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "',
        '", "days": ',
        ', "where": {"street": "',
        '"}}}\n</tool_call>',
    )
    values = ["Oslo", "3", "High Street"]
    texts = [part + value for part, value in zip(parts[4:7], values, strict=True)]
    indented = json.loads("".join([*texts, parts[7]]))
    where = {"street": "High Street"}
    assert indented == {
        "name": "weather",
        "arguments": {"city": "Oslo", "days": 3, "where": where},
    }
    assert parts[8] == '<tool_call>\n{"name": "stop", "arguments": '


@pytest.mark.parametrize(("form", "key"), [(LLAMA3, '"parameters": {'), (MISTRAL_NAMED, "[ARGS]{")])
def test_other_templates_write_calls_otherwise(form, key):
    first = call_skeletons(form, [tool("weather", SCHEMA)])[0]
    assert f'{key}"city": "' in first
    assert call_skeletons(form._replace(syntax=None), [tool("weather", SCHEMA)])[0].startswith(
        "{\n"
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {}},
        {"properties": {"a": True, "\0text": {"type": ["string", "null"]}}},
        {"properties": {"\ud800": {}}},
        {"properties": {"x" * MAX_CHARACTERS: {}}},
        {"anyOf": [{"properties": {"a": {}}}]},
    ],
)
def test_odd_schemas_have_skeletons_or_none(parameters):
    parts = call_skeletons(HERMES, [tool("f", parameters)])
    "".join(parts).encode()
    assert sum(map(len, parts)) <= MAX_CHARACTERS


def test_objects_nest_only_so_deep():
    schema = {"type": "string"}
    for _ in range(40):
        schema = {"properties": {"a": schema}}
    assert len(call_skeletons(HERMES, [tool("f", schema)])) == 4


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_skeletons_change_no_token_and_right_ones_take_fewer_steps(toy_folder, temperature):
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    with LLM(toy_folder, memory_of_answers=0) as llm:
        plain = llm.generate("To be or not", params, method="ar")
        words = plain.text.split(" ")
        parts = [" ".join(words[i : i + 6]) for i in range(0, len(words), 8)]
        alone = llm.stream("To be or not", params, budget=8).result()
        right = llm.stream("To be or not", params, budget=8, skeletons=parts).result()
        wrong = llm.stream(
            "To be or not", params, budget=8, skeletons=["speak, ", "no more"] * 9
        ).result()
        for answer in (alone, right, wrong):
            assert answer.token_ids == plain.token_ids
        assert right.statistics.sources["skeletons"].accepted > 10
        assert right.statistics.steps < alone.statistics.steps
