"""What the server refuses: each field that is not served by its name, junk, what is too much or too
large, and bodies that would freeze it."""

import json

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import ValidationError

from cases import examples
from quickbeam.serve import app
from quickbeam.serve.app import ENDPOINTS
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import CompletionRequest
from serving import ask, ask_raw, junk, refused

CHAT, COMPLETIONS, RESPONSES = ENDPOINTS
MESSAGES = [{"role": "user", "content": "the cat sat on the mat and the cat"}]
AFTER = [*MESSAGES, {"role": "assistant", "content": "It sat"}]
BODIES = {
    CHAT: {"messages": MESSAGES, "max_tokens": 24},
    COMPLETIONS: {"prompt": "the cat sat on the mat and the cat", "max_tokens": 20},
    RESPONSES: {"input": "the cat", "instructions": "be brief", "max_output_tokens": 24},
}


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def item(part):
    return {"input": [{"role": "user", "content": [part]}]}


OLD_CALL = {"role": "assistant", "content": "", "function_call": {"name": "f"}}
OF_CHATS = [  # fields, and the one that the error names
    ({"foo": 1}, "foo"),
    ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": []}, "messages"),
    (user([{"type": "image_url", "image_url": {"url": "file:///x"}}]), "messages[0].content[0]"),
    (user([{"type": "text", "text": "x"}, {"type": "input_audio"}]), "messages[0].content[1]"),
    (user([]), "messages[0].content"),
    (user("\ud800"), None),
    ({"messages": [*MESSAGES, {"role": "assistant", "contents": "x"}]}, "messages[1]"),
    ({"messages": [OLD_CALL]}, "messages[0].function_call"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    ({"max_completion_tokens": 5}, "max_tokens"),  # two lengths
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"cat": 1}}, "logit_bias.cat"),
    ({"top_logprobs": 2}, "top_logprobs"),  # without logprobs
    ({"stream_options": {"include_usage": True}}, "stream_options"),  # without stream
    ({"trace": True}, "trace"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    (
        {"add_generation_prompt": True, "continue_final_message": True, "messages": AFTER},
        "add_generation_prompt",
    ),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"maximum": 1e999}}, None),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    ({"regex": "a+", "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ({"regex": "a+", "response_format": {"type": "json_object"}}, "regex"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"best_of": 2}, "best_of"),
    ({"speculation": {"method": "magic"}}, "speculation.method"),
    ({"speculation": {"budget": -1}}, "speculation.budget"),
    ({"speculation": {"budget": 513}}, "speculation.budget"),
    ({"presence_penalty": 1e39}, "presence_penalty"),
    ({"bad_words": ["abcdefgh" * 100]}, "bad_words"),
]
OF_COMPLETIONS = [  # fields, and the one that the error names
    ({"suffix": "x"}, "suffix"),  # by a tokenizer without tokens for it
    ({"prompt": [3], "suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [100000]}, "prompt"),
    ({"prompt": [2**70], "presence_penalty": 1}, "prompt"),
    ({"seeds": [1, 2]}, "seeds"),
    ({"seeds": [1], "seed": 1}, "seeds"),
    ({"seeds": [2**64]}, "seeds[0]"),
    ({"logprobs": True}, "logprobs"),  # as a chat has it
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"stop_token_ids": [3, 100000]}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"min_tokens": 21}, "min_tokens"),
    ({"n": 129}, "n"),
    ({"messages": []}, "messages"),
]
OF_RESPONSES = [  # fields, and the one that the error names
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"input": [{"role": "user", "content": "x", "foo": 1}]}, "input[0].foo"),
    ({"max_tokens": 4}, "max_tokens"),
    ({"max_output_tokens": 1000}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    (item({"type": "input_image", "image_url": "http://x"}), "input[0].content[0]"),
    (item({"type": "input_file", "file_id": "f"}), "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
    ({"input": []}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
    ({"stream_options": {}}, "stream_options"),
    ({"n": 2}, "n"),
]
REFUSED = {CHAT: OF_CHATS, COMPLETIONS: OF_COMPLETIONS, RESPONSES: OF_RESPONSES}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_served_is_refused_by_name(runner, path):
    for fields, param in REFUSED[path]:
        refused(ask_raw(runner, path, json.dumps({**BODIES[path], **fields})), param)


def test_bodies_that_are_no_json(runner):
    deep, digits = "[" * 5000 + "]" * 5000, "1" + "0" * 5000
    for text in ("{", "", "[]", "3", '{"messages": NaN}', f'{{"x": {deep}}}', f'{{"n": {digits}}}'):
        response = ask_raw(runner, CHAT, text)
        assert response.status_code == 400 and "JSON" in response.json()["error"]["message"], text


def test_a_text_that_no_tokens_could_fit_is_not_tokenised(runner):
    """It could be the whole body, and take half a minute."""
    long = "x" * 200_000
    messages = {"messages": [{"role": "user", "content": long}]}
    for path, fields, param in (
        (COMPLETIONS, {"prompt": ["x", long]}, "prompt"),
        (CHAT, messages, "messages"),
        (RESPONSES, {"input": long}, "input"),
    ):
        response = ask(runner, path, fields)
        assert "512" in refused(response, param) and "can't fit" in response.text
        assert response.json()["error"]["code"] == "context_length_exceeded"


# what would take too long
SLOW = ("n", "best_of", "regex", "lark", "structured_outputs", "guided_json", "guided_regex")
SLOW += ("guided_grammar", "text", "messages", "response_format")
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_text"])}, optional={"text": junk()}
)
ROLES = st.sampled_from(["user", "system", "assistant", "tool"]) | junk()
CONTENT = st.text(max_size=8) | st.lists(PART, max_size=2) | junk()
KINDS = st.sampled_from(["message", "function_call", "function_call_output"]) | junk()
OPTIONAL = dict.fromkeys(("name", "tool_calls", "tool_call_id", "call_id", "output"), junk())
SAID = st.fixed_dictionaries(
    {"role": ROLES, "content": CONTENT}, optional={**OPTIONAL, "arguments": junk(), "type": KINDS}
)
SAYINGS = st.lists(SAID, max_size=3) | junk("type", "role", "content", "text", "format")
VALUES = junk() | st.integers(-3, 300) | st.floats(-3, 3) | st.sampled_from([None, [], {}, "auto"])
TOKENS = {"/tokenize": ("prompt", "messages", "tools"), "/detokenize": ("tokens", "model")}


@st.composite
def requests(draw):
    """A path and a body, some of whose fields are right."""
    path = draw(st.sampled_from([CHAT, CHAT, COMPLETIONS, RESPONSES, *TOKENS]))
    if path in TOKENS:
        return path, draw(st.dictionaries(st.sampled_from(TOKENS[path]), VALUES, max_size=2))
    known = ENDPOINTS[path].kind
    lengths, prompt = known.length_fields, known.prompt_field
    names = [name for name in known.model_fields if name not in (*SLOW, *lengths)]
    fields = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))
    if path != COMPLETIONS and draw(st.booleans()):
        fields[prompt] = draw(SAYINGS)
    own = {prompt: BODIES[path][prompt], lengths[-1]: 1}
    return path, own | fields


@examples(220, suppress_health_check=list(HealthCheck))
@given(asked=requests())
def test_junk_is_never_the_servers_fault(runner, asked):
    path, body = asked
    response = ask_raw(runner, path, json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        # Infinity and NaN are no JSON
        assert error["message"] and (error["param"] is not None or "JSON" in error["message"])


HUGE = 5000
USER = {"messages": [{"role": "user", "content": "x"}]}
FUNCTION = {"type": "function", "name": "f", "allowed_callers": [1] * HUGE}
WITHIN = [  # lists within lists
    (COMPLETIONS, {"prompt": [[{}] * HUGE]}),
    (COMPLETIONS, {"prompt": [1] * HUGE + ["x"] * HUGE}),
    (CHAT, {"messages": [{"role": "user", "content": 3}] * HUGE}),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * HUGE}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * HUGE}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{}] * HUGE}]}),
    (RESPONSES, {"input": "x", "tools": [FUNCTION]}),
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
                app.check(body, kind)
            assert refusal.value.problem.param and len(str(refusal.value)) < 300
            refusals += 1
    assert refusals > 200


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"] * 257},
        {"stop": ["x" * 8193]},
        {"bad_words": [f"{i}" for i in range(257)]},
        {"bad_words": ["x" * 5000, "y" * 5000]},
        {"stop_token_ids": [1] * 4097},
        {"metadata": {str(i): "x" for i in range(65)}},
        {"logit_bias": {str(i): 1 for i in range(16_385)}},
        {"prompt": ["x"] * 4097},
        {"guided_choice": ["x"] * 4097},
    ],
)
def test_lists_have_an_end(fields):
    with pytest.raises(Refused, match="the most that there may be") as error:
        app.check({"prompt": "x", **fields}, CompletionRequest)
    assert error.value.problem.param in fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
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
        ({"x" * 100_000: 1}, None),
    ],
)
def test_extremes_are_answered_or_refused_in_few_words(runner, fields, param):
    body = {"prompt": "hello", "max_tokens": 2, "seed": 1, **fields}
    body = {name: value for name, value in body.items() if name != "seed" or "seeds" not in fields}
    found = ask(runner, COMPLETIONS, body)
    assert found.status_code in (200, 400, 404) and len(found.content) < 2500
    if found.status_code != 200:
        assert found.json()["error"]["param"] == param
