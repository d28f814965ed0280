"""What the server refuses: each field that is not served by its name, junk, what is too much or too
large, and bodies that would freeze it."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import ValidationError

from cases import examples
from quickbeam.serve import endpoints
from quickbeam.serve.endpoints import ENDPOINTS
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import CompletionRequest
from serving import anthropic_error, ask, ask_raw, junk, refused

CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = ENDPOINTS
MESSAGES = [{"role": "user", "content": "the cat sat on the mat and the cat"}]
BODIES = {
    CHAT: {"messages": MESSAGES, "max_tokens": 24},
    COMPLETIONS: {"prompt": "the cat sat on the mat and the cat", "max_tokens": 20},
    RESPONSES: {"input": "the cat", "instructions": "be brief", "max_output_tokens": 24},
    ANTHROPIC: {"messages": MESSAGES, "max_tokens": 24},
}

LINES = Path(__file__).with_name("refused_requests.jsonl").read_text().splitlines()
KINDS = dict(zip(("chat", "completion", "response", "message"), ENDPOINTS, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_served_is_refused_by_name(runner, kind):
    """`param`: the field that the error names."""
    asked = [line for line in map(json.loads, LINES) if line["of"] == kind]
    assert len(asked) > 15
    for line in asked:
        body = {**BODIES[KINDS[kind]], **line["fields"]}
        response = ask_raw(runner, KINDS[kind], json.dumps(body))
        if kind == "message":
            anthropic_error(response, "invalid_request_error", f"{line['param']}: ")
        else:
            refused(response, line["param"])


def test_numbers_without_end_are_refused(runner):
    tool = '{"type": "function", "name": "f", "parameters": {"maximum": 1e999}}'
    response = ask_raw(runner, RESPONSES, f'{{"input": "x", "tools": [{tool}]}}')
    assert "not finite" in refused(response, "tools[0].parameters")
    messages = json.dumps(MESSAGES)
    text = f'{{"messages": {messages}, "chat_template_kwargs": {{"a": [-1e999]}}}}'
    assert "not finite" in refused(ask_raw(runner, CHAT, text), "chat_template_kwargs")


def test_bodies_that_are_no_json_or_too_long_are_refused(runner):
    deep, digits = "[" * 5000 + "]" * 5000, "1" + "0" * 5000
    for text in ("{", "", "[]", "3", '{"messages": NaN}', f'{{"x": {deep}}}', f'{{"n": {digits}}}'):
        response = ask_raw(runner, CHAT, text)
        assert response.status_code == 400 and "JSON" in response.json()["error"]["message"], text
    long = "x" * 200_000
    messages = {"messages": [{"role": "user", "content": long}]}
    for path, fields, param in (
        (COMPLETIONS, {"prompt": ["x", long]}, "prompt"),
        (CHAT, messages, "messages"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"a": long}}, "messages"),
        (RESPONSES, {"input": MESSAGES * 4096, "instructions": long}, "input"),
        (RESPONSES, {"input": long}, "input"),
    ):
        response = ask(runner, path, fields)
        assert "512" in refused(response, param) and "can't fit" in response.text
        assert response.json()["error"]["code"] == "context_length_exceeded"


# what would take too long
SLOW = ("n", "best_of", "regex", "lark", "structured_outputs", "guided_json", "guided_regex")
SLOW += ("guided_grammar", "text", "messages", "response_format")
PARTS = st.sampled_from(["text", "image_url", "input_text", "thinking", "tool_use", "tool_result"])
OF_PARTS = ("text", "thinking", "id", "tool_use_id", "name", "input", "content")
PART = st.fixed_dictionaries({"type": PARTS}, optional=dict.fromkeys(OF_PARTS, junk()))
ROLES = st.sampled_from(["user", "system", "assistant", "tool"]) | junk()
CONTENT = st.text(max_size=8) | st.lists(PART, max_size=2) | junk()
ITEMS = st.sampled_from(["message", "function_call", "function_call_output"]) | junk()
OPTIONAL = dict.fromkeys(("name", "tool_calls", "tool_call_id", "call_id", "output"), junk())
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES, "content": CONTENT}, optional={**OPTIONAL, "arguments": junk(), "type": ITEMS}
)
CONVERSATIONS = st.lists(MESSAGE, max_size=3) | junk("type", "role", "content", "text", "format")
VALUES = junk() | st.integers(-3, 300) | st.floats(-3, 3) | st.sampled_from([None, [], {}, "auto"])
TOKENS = {"/tokenize": ("prompt", "messages", "tools"), "/detokenize": ("tokens", "model")}


@st.composite
def requests(draw):
    path = draw(st.sampled_from([CHAT, CHAT, COMPLETIONS, RESPONSES, ANTHROPIC, *TOKENS]))
    if path in TOKENS:
        return path, draw(st.dictionaries(st.sampled_from(TOKENS[path]), VALUES, max_size=2))
    known = ENDPOINTS[path].kind
    lengths, prompt = known.length_fields, known.prompt_field
    names = [field.alias or name for name, field in known.model_fields.items()]
    names = [name for name in names if name not in (*SLOW, *lengths)]
    fields = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))
    if path != COMPLETIONS and draw(st.booleans()):
        fields[prompt] = draw(CONVERSATIONS)
    return path, {prompt: BODIES[path][prompt], lengths[-1]: 1} | fields


@examples(220, suppress_health_check=list(HealthCheck))
@given(asked=requests())
def test_junk_is_never_the_servers_fault(runner, asked):
    path, body = asked
    response = ask_raw(runner, path, json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        if path == ANTHROPIC:
            anthropic_error(response, error["type"])
        else:  # Infinity and NaN are no JSON
            assert error["message"] and (error["param"] is not None or "JSON" in error["message"])


HUGE = 5000
FUNCTION = {"type": "function", "name": "f", "allowed_callers": [1] * HUGE}
WITHIN = [  # lists within lists
    (COMPLETIONS, {"prompt": [[{}] * HUGE]}),
    (COMPLETIONS, {"prompt": [1] * HUGE + ["x"] * HUGE}),
    (CHAT, {"messages": [{"role": "user", "content": 3}] * HUGE}),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * HUGE}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * HUGE}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{}] * HUGE}]}),
    (RESPONSES, {"input": "x", "tools": [FUNCTION]}),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [{}] * HUGE}]}),
    (ANTHROPIC, {"messages": [{"role": "assistant", "content": [{}] * HUGE}]}),
    (ANTHROPIC, {"system": [{}] * HUGE, "messages": MESSAGES}),
    (ANTHROPIC, {"tools": [{}] * HUGE, "messages": MESSAGES}),
]

DICTIONARIES = ("logit_bias", "metadata")  # fields, which pydantic reads to their end


def wrong_fields():
    """Bodies in which a field, each in turn, holds the same mistake many times over."""
    for path, known in ENDPOINTS.items():
        for name, field in known.kind.model_fields.items():
            for wrong in ([None] * HUGE, dict.fromkeys(map(str, range(HUGE)))):
                if name not in DICTIONARIES or isinstance(wrong, list):
                    yield path, {**BODIES[path], field.alias or name: wrong}


def test_what_is_wrong_many_times_is_found_once():
    refusals = 0
    for path, body in (*WITHIN, *wrong_fields()):
        kind = ENDPOINTS[path].kind
        try:
            kind.model_validate(body)
        except ValidationError as error:
            assert error.error_count() < 12
            with pytest.raises(Refused) as refusal:
                endpoints.check(body, kind)
            assert refusal.value.problem.param and len(str(refusal.value)) < 300
            refusals += 1
    assert refusals > 200


def test_lists_have_an_end():
    for fields in (
        {"stop": ["x"] * 257},
        {"stop": ["x" * 8193]},
        {"bad_words": [f"{i}" for i in range(257)]},
        {"bad_words": ["x" * 5000, "y" * 5000]},
        {"stop_token_ids": [1] * 4097},
        {"metadata": {str(i): "x" for i in range(65)}},
        {"logit_bias": {str(i): 1 for i in range(16_385)}},
        {"prompt": ["x"] * 4097},
        {"guided_choice": ["x"] * 4097},
    ):
        with pytest.raises(Refused, match="the most that there may be") as error:
            endpoints.check({"prompt": "x", **fields}, CompletionRequest)
        assert error.value.problem.param in fields


def test_extremes_are_answered_or_refused_in_few_words(runner):
    for fields, param in (
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": -1e308}, "temperature"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"frequency_penalty": 1e308}, "frequency_penalty"),
        ({"logit_bias": {"1": 1e308}}, "logit_bias"),
        ({"top_p": 1e-320}, None),
        ({"min_p": 5e-324}, None),
        ({"temperature": 5e-324}, None),
        ({"seed": int("9" * 4000)}, "seed"),
        ({"seeds": [int("9" * 4000)]}, "seeds[0]"),
        ({"n": int("9" * 4000)}, "n"),
        ({"max_tokens": int("9" * 4000)}, "max_tokens"),
        ({"prompt": [int("9" * 4000)]}, "prompt"),
        ({"top_k": int("9" * 4000)}, None),
        ({"model": "x" * 100_000}, "model"),
        ({"speculation": {"method": "x" * 100_000}}, "speculation.method"),
        ({"response_format": {"type": "x" * 100_000}}, "response_format"),
        ({"regex": "(" * 100_000}, "regex"),
        ({"bad_words": ["abcdefgh" * 100]}, "bad_words"),
        ({"x" * 100_000: 1}, None),
    ):
        response = ask(runner, COMPLETIONS, {"prompt": "hello", "max_tokens": 2, **fields})
        assert response.status_code in (200, 400, 404) and len(response.content) < 2500
        if response.status_code != 200:
            assert response.json()["error"]["param"] == param
