"""`/v1/responses`: stateless answers, their events, and what is refused."""

from typing import Any

import pytest

from quickbeam import QuickbeamError, SamplingParams
from quickbeam.engine.result import Logprob
from quickbeam.serve import responses
from quickbeam.serve.calls import ParsedCall
from quickbeam.serve.tool_fields import Tool, offered_tool
from serving import Texts, ask, events, good, refused

PATH = "/v1/responses"
INPUT = "the cat sat on the mat and the cat"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": INPUT}]


def body(**fields):
    return {"input": INPUT, "instructions": "be brief", "max_output_tokens": 24, **fields}


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_answers_are_those_given_alone_and_events_add_up_to_them(runner, llm, temperature):
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=7)
    right = llm.chat(MESSAGES, params, method="ar")
    asked = body(temperature=temperature, seed=7)
    whole = good(ask(runner, PATH, asked))
    assert text_of(whole) == right.text and whole["object"] == "response" and whole["seed"] == 7
    cut = right.finish_reason == "length"
    assert whole["status"] == ("incomplete" if cut else "completed") == whole["output"][0]["status"]
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    usage, prompt, new = whole["usage"], len(llm.encode_chat(MESSAGES)), len(right.token_ids)
    assert (usage["input_tokens"], usage["output_tokens"]) == (prompt, new)
    assert usage["total_tokens"] == prompt + new
    assert whole["store"] is False and whole["previous_response_id"] is None

    streamed = events(ask(runner, PATH, {**asked, "stream": True}))
    kinds = [one["type"].removeprefix("response.") for one in streamed]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", whole["status"]]
    assert kinds[-4:] == ends and set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(one["delta"] for one in streamed[4:-4]) == right.text == streamed[-4]["text"]
    last = streamed[-1]["response"]
    assert text_of(last) == right.text and last["usage"]["output_tokens"] == new
    first = streamed[0]["response"]
    assert first["output"] == [] and first["status"] == "in_progress"
    assert streamed[2]["item"]["content"] == [] and streamed[3]["part"]["text"] == ""
    assert len({one["item_id"] for one in streamed if "item_id" in one}) == 1


def test_items_are_messages(llm, scripted):
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    replied = [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]
    own = {"type": "message", "id": "msg_1", "status": "completed"}
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": parts},
        {**own, "role": "assistant", "content": replied},
        {"role": "user", "content": "d"},
    ]
    good(ask(scripted, PATH, {"input": items}))
    right = [("system", "be"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    messages = [{"role": role, "content": content} for role, content in right]
    assert scripted.jobs[0].prompt == llm.encode_chat(messages)
    assert scripted.jobs[0].params.max_tokens == 512 - len(scripted.jobs[0].prompt)


def test_empty_and_broken_items_are_read(llm, scripted, monkeypatch):
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}{% if 'tool_calls' in m %}|{{ "
        "m.tool_calls[0].function.arguments | tojson }}{% endif %}]{% endfor %}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    call = {"type": "function_call", "call_id": "c1", "name": "f"}
    output = {"type": "function_call_output", "call_id": "c1"}
    text = {"type": "input_text", "text": "4", "prompt_cache_breakpoint": {}}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    items = [
        {"type": "message", "role": "assistant", "content": []},
        {**call, "arguments": "{x"},
        {**output, "output": []},
        {**call, "arguments": ""},
        {**output, "output": None},
        {**output, "output": [text]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    good(ask(scripted, PATH, {"input": items, "max_output_tokens": 16.0}))
    shown = '[assistant||{"arguments": "{x"}][tool|][assistant||{}][tool|][tool|4][assistant|no]'
    assert llm.tokenizer.decode(scripted.jobs[0].prompt) == shown
    response = ask(scripted, PATH, {"input": [*items, {**output, "output": [image]}]})
    assert "input_image" in refused(response, "input[7]")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(runner, llm, stream):
    right = llm.chat(MESSAGES, SamplingParams(max_tokens=12, logprobs=2), method="ar").logprobs
    asked = body(temperature=0, max_output_tokens=12, top_logprobs=2, stream=stream)
    response = ask(runner, PATH, {**asked, "include": ["message.output_text.logprobs"]})
    if stream:
        *earlier, last = events(response)
        (part,) = last["response"]["output"][0]["content"]
        deltas = [one for one in earlier if one["type"] == "response.output_text.delta"]
        streamed = [entry for one in deltas for entry in one["logprobs"]]
        assert streamed == part["logprobs"][: len(streamed)]
    else:
        (part,) = good(response)["output"][0]["content"]
    logprobs = [one["logprob"] for one in part["logprobs"]]
    assert logprobs == pytest.approx([one.logprob for one in right])
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])


@pytest.mark.parametrize("once", [False, True])
def test_logprobs_of_a_call_are_in_no_text(once):
    call = ParsedCall("c", "f", "{}")
    parts = [(["Let"], [0]), (["é"], [1]), ([], [2]), ([call], [3]), (["bye"], [4]), ([], [5])]
    if once:  # the first four as one, and the others
        parts = [(["Let", "é", call], [0, 1, 2, 3]), (["bye"], [4, 5])]
    texts = Texts(b"Let", "é".encode(), b"<call>", b"f()", b"bye", b"<end>")
    tool = Tool.model_validate({"type": "function", "function": {"name": "f"}})
    items = responses.Items(texts, {"f": offered_tool(tool)})
    emitted = list[dict[str, Any]]()
    for pieces, tokens in parts:
        emitted += items.add(pieces, [Logprob(token, -1.0, {}) for token in tokens])
    emitted += items.end("stop")
    assert [one["type"] for one in items.output] == ["message", "function_call", "message"]
    texts = [items.output[i]["content"][0] for i in (0, 2)]
    assert [one["text"] for one in texts] == ["Leté", "bye"]
    wanted = [["Let", "é"], ["bye", "<end>"]]
    assert [[entry["token"] for entry in one["logprobs"]] for one in texts] == wanted
    done = [event for event in emitted if event["type"] == "response.output_text.done"]
    assert [[entry["token"] for entry in one["logprobs"]] for one in done] == wanted


def test_what_goes_wrong_ends_the_events(scripted):
    response = good(ask(scripted, PATH, body()))  # an answer of nothing is an empty message
    assert (response["status"], text_of(response), len(response["output"])) == ("completed", "", 1)
    scripted.script, scripted.end = "one", QuickbeamError("NaN logits")
    assert ask(scripted, PATH, body()).status_code == 500
    last = events(ask(scripted, PATH, body(stream=True)))[-1]
    assert last["type"] == "error" and last["message"] == "NaN logits"
