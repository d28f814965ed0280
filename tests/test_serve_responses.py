"""`/v1/responses`: stateless answers, their events, and what is refused.

pytest tests/test_serve_responses.py
"""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cases import examples
from quickbeam import QuickbeamError, SamplingParams
from quickbeam.engine.result import Logprob
from quickbeam.serve import responses
from quickbeam.serve.items import ResponsesRequest
from quickbeam.serve.logprobs import TokenTexts
from quickbeam.serve.settings import ServeSettings
from quickbeam.serve.tools import Call
from serving import (
    GRAMMAR_FIELDS,
    ScriptedRunner,
    answered_or_refused,
    ask,
    ask_raw,
    events,
    good,
    junk,
    refused,
)

PATH = "/v1/responses"
INPUT = "the cat sat on the mat and the cat"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": INPUT}]


def body(**fields):
    return {"input": INPUT, "instructions": "be brief", "max_output_tokens": 24, **fields}


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_answers_are_those_given_alone(runner, llm, temperature):
    right = llm.chat(
        MESSAGES, SamplingParams(max_tokens=24, temperature=temperature, seed=7), method="ar"
    )
    found = good(ask(runner, PATH, body(temperature=temperature, seed=7)))
    assert text_of(found) == right.text and found["object"] == "response" and found["seed"] == 7
    cut = right.finish_reason == "length"
    assert found["status"] == ("incomplete" if cut else "completed") == found["output"][0]["status"]
    assert found["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        len(llm.encode_chat(MESSAGES)),
        len(right.token_ids),
    )
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert found["store"] is False and found["previous_response_id"] is None


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_events_add_up_to_the_answer(runner, temperature):
    asked = body(temperature=temperature, seed=7)
    whole = good(ask(runner, PATH, asked))
    found = events(ask(runner, PATH, {**asked, "stream": True}))
    kinds = [one["type"] for one in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    ends = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole['status']}",
    ]
    assert kinds[-4:] == ends and set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(one["delta"] for one in found[4:-4]) == text_of(whole) == found[-4]["text"]
    last = found[-1]["response"]
    assert (
        text_of(last) == text_of(whole)
        and last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    )
    assert found[0]["response"]["output"] == [] and found[0]["response"]["status"] == "in_progress"
    assert found[2]["item"]["content"] == [] and found[3]["part"]["text"] == ""
    assert len({one["item_id"] for one in found if "item_id" in one}) == 1


def test_items_are_messages(llm):
    scripted = ScriptedRunner(ServeSettings(), llm)
    items = [
        {"role": "developer", "content": "be"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "d"},
    ]
    good(ask(scripted, PATH, {"input": items}))
    wanted = [("system", "be"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    assert scripted.jobs[0].prompt == llm.encode_chat(
        [{"role": role, "content": content} for role, content in wanted]
    )
    assert scripted.jobs[0].params.max_tokens == 512 - len(scripted.jobs[0].prompt)
    asyncio.run(scripted.close())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(runner, llm, stream):
    right = llm.chat(MESSAGES, SamplingParams(max_tokens=12, logprobs=2), method="ar").logprobs
    asked = body(
        temperature=0,
        max_output_tokens=12,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        stream=stream,
    )
    response = ask(runner, PATH, asked)
    if stream:
        found = events(response)
        part = found[-1]["response"]["output"][0]["content"][0]
        told = [
            entry
            for one in found
            if one["type"] == "response.output_text.delta"
            for entry in one["logprobs"]
        ]
        assert told == part["logprobs"][: len(told)]
    else:
        part = good(response)["output"][0]["content"][0]
    assert [one["logprob"] for one in part["logprobs"]] == pytest.approx(
        [one.logprob for one in right]
    )
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])


class Texts(TokenTexts):
    def __init__(self):
        self._known = {0: b"Let", 1: "é".encode(), 2: b"<call>", 3: b"f()", 4: b"bye", 5: b"<end>"}


@pytest.mark.parametrize("once", [False, True])
def test_logprobs_of_a_call_are_in_no_text(once):
    steps = [
        (["Let"], [0]),
        (["é"], [1]),
        ([], [2]),
        ([Call("c", "f", "{}")], [3]),
        (["bye"], [4]),
        ([], [5]),
    ]
    if once:  # the first four as one
        parts = [
            ([one for pieces, _ in some for one in pieces], [t for _, ids in some for t in ids])
            for some in (steps[:4], steps[4:])
        ]
    else:
        parts = steps
    items = responses.Items(Texts())
    told = [
        event
        for pieces, tokens in parts
        for event in items.add(pieces, [Logprob(token, -1.0, {}) for token in tokens])
    ]
    told += items.end(cut=False)
    kinds = [one["type"] for one in items.output]
    assert kinds == ["message", "function_call", "message"]
    texts = [items.output[i]["content"][0] for i in (0, 2)]
    assert [one["text"] for one in texts] == ["Leté", "bye"]
    wanted = [["Let", "é"], ["bye", "<end>"]]
    assert [[entry["token"] for entry in one["logprobs"]] for one in texts] == wanted
    done = [event for event in told if event["type"] == "response.output_text.done"]
    assert [[entry["token"] for entry in one["logprobs"]] for one in done] == wanted


def test_what_goes_wrong_ends_the_events(llm):
    scripted = ScriptedRunner(ServeSettings(), llm)
    scripted.script, scripted.end = "one", QuickbeamError("NaN logits")
    assert ask(scripted, PATH, body()).status_code == 500
    last = events(ask(scripted, PATH, body(stream=True)))[-1]
    assert last["type"] == "error" and last["message"] == "NaN logits"
    asyncio.run(scripted.close())


def test_an_answer_of_nothing_is_an_empty_message(llm):
    scripted = ScriptedRunner(ServeSettings(), llm)
    found = good(ask(scripted, PATH, body()))
    assert found["status"] == "completed" and text_of(found) == "" and len(found["output"]) == 1
    asyncio.run(scripted.close())


REFUSED = {
    "memory": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "c"}, "conversation"),
    "a stored prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "reasoning": ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    "a summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    "a field of a message": (
        {"input": [{"role": "user", "content": "x", "foo": 1}]},
        "input[0].foo",
    ),
    "a chat's length": ({"max_tokens": 4}, "max_tokens"),
    "no room": ({"max_output_tokens": 1000}, "max_output_tokens"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "an image": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
            ]
        },
        "input[0].content[0]",
    ),
    "a file": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0]",
    ),
    "a reference": ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
    "no input": ({"input": []}, "input"),
    "a built-in tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "what was found": ({"include": ["file_search_call.results"]}, "include[0]"),
    "verbosity": ({"text": {"verbosity": "high"}}, "text.verbosity"),
    "two grammars": ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
    "stream options": ({"stream_options": {}}, "stream_options"),
    "several answers": ({"n": 2}, "n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(runner, name):
    fields, param = REFUSED[name]
    refused(ask(runner, PATH, body(**fields)), param)


def test_what_asks_for_nothing_is_accepted(runner):
    fields = {
        "store": True,
        "reasoning": {"effort": "none", "summary": "auto"},
        "metadata": {"a": "b"},
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "user": "me",
    }
    found = good(
        ask(
            runner,
            PATH,
            body(
                **fields,
                text={"format": {"type": "text"}, "verbosity": "medium"},
                service_tier="auto",
            ),
        )
    )
    assert (
        found["metadata"] == {"a": "b"}
        and found["text"]["format"] == {"type": "text"}
        and found["user"] == "me"
    )


def test_formats_make_grammars():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    asked = ResponsesRequest.model_validate(
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    )
    assert asked.grammars == [("text", "json_schema", schema)]
    asked = ResponsesRequest.model_validate(
        {"input": "x", "text": {"format": {"type": "json_object"}}}
    )
    assert asked.grammars == [("text", "json_object", True)]
    assert (
        ResponsesRequest.model_validate(
            {"input": "x", "text": {"format": {"type": "text"}}}
        ).grammars
        == []
    )


JSON = junk("type", "role", "content", "text", "format")
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output"]) | JSON},
    optional={
        "role": st.sampled_from(["user", "assistant"]),
        "content": JSON,
        "call_id": JSON,
        "output": JSON,
        "name": JSON,
        "arguments": JSON,
    },
)
KNOWN = [
    name
    for name in ResponsesRequest.model_fields
    if name not in ("max_output_tokens", *GRAMMAR_FIELDS, "text")
]


@examples(60, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(KNOWN), JSON | st.integers(-3, 3), max_size=3),
    items=st.lists(ITEM, max_size=3) | JSON,
)
def test_junk_is_never_the_servers_fault(runner, fields, items):
    asked = {"input": items, "max_output_tokens": 1, **fields}
    response = ask_raw(runner, PATH, json.dumps(asked))
    answered_or_refused(response)
