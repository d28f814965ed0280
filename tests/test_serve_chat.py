"""`/v1/chat/completions`: answers are those that the model gives alone, streams add up to them, and
what isn't served is refused by name.

pytest tests/test_serve_chat.py
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import asdict

import pytest

pytest.importorskip("fastapi")

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cases import examples
from quickbeam import LLM, QuickbeamError, SamplingParams
from quickbeam.serve import chat
from quickbeam.serve.endpoints import answer
from quickbeam.serve.messages import ChatRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.settings import ServeSettings
from serving import (
    GRAMMAR_FIELDS,
    ScriptedRunner,
    answered_or_refused,
    ask,
    ask_all,
    ask_raw,
    chunks,
    good,
    junk,
    refused,
)

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the cat sat on the mat and the cat"}]


def alone(llm, params, messages=MESSAGES):
    """What plain decoding answers to nobody else."""
    found = llm.chat(messages, params, method="ar")
    return found if isinstance(found, list) else [found]


def body(**fields):
    return {"messages": MESSAGES, "max_tokens": 24, **fields}


SETTINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "three": {"temperature": 0.8, "seed": 7, "n": 3},
    "filtered": {"temperature": 0.8, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {
        "temperature": 0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
    },
    "bent": {
        "temperature": 0.8,
        "seed": 3,
        "min_tokens": 4,
        "bad_words": ["a"],
        "stop": ["e"],
        "include_stop_str_in_output": True,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_given_alone(runner, llm, name):
    fields = SETTINGS[name]
    right = alone(llm, SamplingParams(max_tokens=24, **fields))
    found = good(ask(runner, PATH, body(**fields, return_token_ids=True)))
    assert [one["token_ids"] for one in found["choices"]] == [one.token_ids for one in right]
    assert [one["message"]["content"] for one in found["choices"]] == [one.text for one in right]
    assert [one["finish_reason"] for one in found["choices"]] == [
        one.finish_reason for one in right
    ]
    assert [one["index"] for one in found["choices"]] == list(range(len(right)))
    assert found["prompt_token_ids"] == llm.encode_chat(MESSAGES)
    assert found["seed"] == fields.get("seed")
    usage = found["usage"]
    assert usage["prompt_tokens"] == len(found["prompt_token_ids"])
    assert usage["completion_tokens"] == sum(len(one.token_ids) for one in right)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("name", SETTINGS)
def test_streams_add_up_to_the_answer(runner, name):
    fields = SETTINGS[name]
    whole = good(ask(runner, PATH, body(**fields, return_token_ids=True)))
    found = chunks(
        ask(
            runner,
            PATH,
            body(
                **fields, return_token_ids=True, stream=True, stream_options={"include_usage": True}
            ),
        )
    )
    n = fields.get("n", 1)
    assert [one["choices"][0]["delta"].get("role") for one in found[:n]] == ["assistant"] * n
    assert {one["id"] for one in found} == {found[0]["id"]} and {
        one["object"] for one in found
    } == {"chat.completion.chunk"}
    for index, choice in enumerate(whole["choices"]):
        mine = [one["choices"][0] for one in found[:-1] if one["choices"][0]["index"] == index]
        assert (
            "".join(one["delta"].get("content") or "" for one in mine)
            == choice["message"]["content"]
        )
        assert [token for one in mine for token in one.get("token_ids", [])] == choice["token_ids"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [
            choice["finish_reason"]
        ]
    assert (
        found[-1]["choices"] == []
        and found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    )
    assert all(one["usage"] is None for one in found[:-1])


def test_usage_may_come_with_each_chunk(runner):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(ask(runner, PATH, body(temperature=0, stream=True, stream_options=options)))
    counts = [one["usage"]["completion_tokens"] for one in found]
    assert counts == sorted(counts) and counts[-1] > 0
    assert "usage" not in chunks(ask(runner, PATH, body(temperature=0, stream=True)))[0]


def test_several_at_once_are_answered_as_alone(runner, llm):
    messages = [
        [{"role": "user", "content": text}]
        for text in ("one two three one two", "hello", "a b a b a b", "rain, rain")
    ]
    bodies = [
        {
            "messages": one,
            "max_tokens": 20,
            "temperature": (0, 0.8)[i % 2],
            "seed": i,
            "n": i % 3 + 1,
            "return_token_ids": True,
        }
        for i, one in enumerate(messages)
    ]
    found = [good(one) for one in ask_all(runner, PATH, bodies)]
    for one, asked, said in zip(found, bodies, messages, strict=True):
        params = SamplingParams(
            **{name: asked[name] for name in ("max_tokens", "temperature", "seed", "n")}
        )
        assert [choice["token_ids"] for choice in one["choices"]] == [
            answer.token_ids for answer in alone(llm, params, said)
        ]


def test_methods_never_change_an_answer(runner):
    texts = {
        good(ask(runner, PATH, body(temperature=0.8, seed=5, speculation=asked)))["choices"][0][
            "message"
        ]["content"]
        for asked in (
            {"method": "ar"},
            {"method": "pld", "budget": 4},
            {"method": "logitspec"},
            {"budget": 0},
            None,
        )
    }
    assert len(texts) == 1
    message = refused(
        ask(runner, PATH, body(speculation={"method": "magic"})), "speculation.method"
    )
    assert "unknown method 'magic'" in message


def test_a_seed_that_was_drawn_repeats_the_answer(runner):
    first = good(ask(runner, PATH, body(n=2)))
    again = good(ask(runner, PATH, body(n=2, seed=first["seed"])))
    assert 0 <= first["seed"] < 2**53
    assert [one["message"] for one in first["choices"]] == [
        one["message"] for one in again["choices"]
    ]
    assert first["choices"][0]["message"] != first["choices"][1]["message"]
    assert good(ask(runner, PATH, body(n=2)))["seed"] != first["seed"]


def test_defaults_are_those_of_the_models_generation_config(toy_folder, tmp_path):
    folder = shutil.copytree(toy_folder, tmp_path / "toy")
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": True, **own}))
    with LLM(str(folder), "ar") as llm:
        scripted = ScriptedRunner(ServeSettings(), llm)
        for url, asked in (
            (PATH, body()),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/responses", {"input": "x"}),
        ):
            found = good(ask(scripted, url, asked))
            params = scripted.jobs[0].params
            assert own.items() <= asdict(params).items()
            assert found.get("temperature", 0.6) == 0.6 and found.get("top_p", 0.95) == 0.95
            good(ask(scripted, url, {**asked, "temperature": 0, "top_p": 1, "top_k": -1}))
            params = scripted.jobs[0].params
            assert (params.temperature, params.top_p, params.top_k) == (0, 1, 0)
        cold = ScriptedRunner(ServeSettings(default_temperature=0.0), llm)
        good(ask(cold, PATH, body()))
        assert cold.jobs[0].params.temperature == 0 and cold.jobs[0].params.top_k == 20
        path.write_text(json.dumps({"temperature": -3.0}))
    with LLM(str(folder), "ar") as llm:
        assert llm.sampling_defaults == {}


def test_the_default_temperature_is_openais_or_the_servers(llm):
    default = ScriptedRunner(ServeSettings(), llm)
    good(ask(default, PATH, body()))
    assert default.jobs[0].params.temperature == 1.0 and default.jobs[0].params.top_p == 1.0
    own = ScriptedRunner(ServeSettings(default_temperature=0.0), llm)
    good(ask(own, PATH, body()))
    assert own.jobs[0].params.temperature == 0.0
    asyncio.run(default.close())
    asyncio.run(own.close())


def test_an_answer_may_go_on_to_the_end_of_the_context(llm):
    scripted = ScriptedRunner(ServeSettings(), llm)
    found = {"messages": MESSAGES}
    good(ask(scripted, PATH, found))
    assert scripted.jobs[0].params.max_tokens == 512 - len(llm.encode_chat(MESSAGES))
    good(ask(scripted, PATH, {**found, "max_completion_tokens": 5}))
    assert scripted.jobs[0].params.max_tokens == 5
    message = refused(
        ask(scripted, PATH, {**found, "max_completion_tokens": 512}), "max_completion_tokens"
    )
    assert "maximum context length is 512 tokens" in message
    response = ask(scripted, PATH, {"messages": [{"role": "user", "content": "x" * 600}]})
    refused(response, "messages")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    asyncio.run(scripted.close())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models_own(runner, llm, stream):
    right = alone(llm, SamplingParams(max_tokens=12, logprobs=3))[0]
    response = ask(
        runner,
        PATH,
        body(temperature=0, max_tokens=12, logprobs=True, top_logprobs=3, stream=stream),
    )
    if stream:
        pieces = [one["choices"][0]["logprobs"] for one in chunks(response)]
        content = [entry for piece in pieces if piece for entry in piece["content"]]
    else:
        content = good(response)["choices"][0]["logprobs"]["content"]
    assert len(content) == len(right.logprobs)
    for entry, wanted in zip(content, right.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(wanted.logprob)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(
            list(wanted.top.values())
        )
    spelled = bytes(byte for entry in content for byte in entry["bytes"])
    assert spelled.removesuffix(b"<end>").decode(errors="replace") == right.text


def test_what_was_drafted_is_counted_and_traced(runner, llm):
    fields = {
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "speculation": {"method": "pld", "budget": 6},
    }
    found = chunks(
        ask(
            runner,
            PATH,
            body(**fields, stream=True, trace=True, stream_options={"include_usage": True}),
        )
    )
    usage = found[-1]["usage"]
    steps = [step for one in found for step in one.get("quickbeam", {}).get("steps", [])]
    assert usage["steps"] == len(steps) > 0
    details = usage["completion_tokens_details"]
    accepted = sum(node["accepted"] for step in steps for node in step["nodes"][1:])
    # greedy answers of this model end in a cycle
    assert details["accepted_prediction_tokens"] == accepted > 0
    assert 1 + sum(step["emitted"] for step in steps) == usage["completion_tokens"] == 40
    assert {one["quickbeam"]["method"] for one in found if "quickbeam" in one} == {"pld"}
    plain = good(ask(runner, PATH, body(**fields | {"speculation": {"method": "ar"}})))["usage"]
    assert plain["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert plain["steps"] == 39


def test_a_prompt_seen_before_is_told_as_cached(runner, llm):
    llm.reset()
    long = [{"role": "user", "content": "all work and no play " * 15}]
    counts = [
        good(ask(runner, PATH, body(messages=long, temperature=0)))["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]
        for _ in "12"
    ]
    assert counts[0] == 0 < counts[1]


def test_messages_reach_the_template_as_it_takes_them(llm):
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.name }}|{{ m.content }}|{% for c in "
        "m.tool_calls %}{{ c.function.name }}:"
    )
    template += "{{ c.function.arguments.x }}{% endfor %}]{% endfor %}{{ extra }}"
    before, llm.tokenizer.chat_template = llm.tokenizer.chat_template, template
    scripted = ScriptedRunner(ServeSettings(), llm)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        },
        {"role": "user", "content": "hi", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "annotations": [],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    try:
        good(ask(scripted, PATH, {"messages": messages, "chat_template_kwargs": {"extra": "!"}}))
        text = llm.tokenizer.decode(scripted.jobs[0].prompt)
        assert text == "[system||be\nbrief|][user|Ann|hi|][assistant|||f:3][tool|f|4|]!"
        messages[2]["tool_calls"][0]["function"]["arguments"] = "[3]"
        refused(
            ask(scripted, PATH, {"messages": messages}),
            "messages[2].tool_calls[0].function.arguments",
        )
        llm.tokenizer.chat_template = "{{ raise_exception('only users') }}"
        assert "only users" in refused(ask(scripted, PATH, body()), "messages")
    finally:
        llm.tokenizer.chat_template = before
        asyncio.run(scripted.close())


def test_a_last_message_may_be_continued(runner, llm):
    messages = [*MESSAGES, {"role": "assistant", "content": "It sat"}]
    found = good(
        ask(
            runner,
            PATH,
            body(
                messages=messages, continue_final_message=True, temperature=0, return_token_ids=True
            ),
        )
    )
    prompt = llm.encode_chat(messages, continue_final_message=True)
    assert found["prompt_token_ids"] == prompt and llm.tokenizer.decode(prompt).endswith("It sat")


REFUSED = {
    "unknown field": ({"foo": 1}, "foo"),
    "field of a part": (
        {"messages": [{"role": "user", "content": "x", "foo": 1}]},
        "messages[0].foo",
    ),
    "unknown role": ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0]"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "no messages": ({"messages": []}, "messages"),
    "an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                }
            ]
        },
        "messages[0].content[0]",
    ),
    "audio": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}],
                }
            ]
        },
        "messages[0].content[1]",
    ),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    "a number as a text": ({"max_tokens": "5"}, "max_tokens"),
    "a fraction of a token": ({"max_tokens": 1.5}, "max_tokens"),
    "a truth as a number": ({"temperature": True}, "temperature"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "no completion tokens": (
        {"max_completion_tokens": 0, "max_tokens": None},
        "max_completion_tokens",
    ),
    "two lengths": ({"max_completion_tokens": 5}, "max_tokens"),
    "cold": ({"temperature": -1}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "n": ({"n": 0}, "n"),
    "an empty stop": ({"stop": ""}, "stop"),
    "a bias of a word": ({"logit_bias": {"cat": 1}}, "logit_bias"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "stream options alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "a trace alone": ({"trace": True}, "trace"),
    "service tier": ({"service_tier": "priority"}, "service_tier"),
    "modalities": ({"modalities": ["audio"]}, "modalities[0]"),
    "prediction": ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
    "no prompt for the answer": ({"add_generation_prompt": False}, "add_generation_prompt"),
    "two ends": (
        {
            "add_generation_prompt": True,
            "continue_final_message": True,
            "messages": [*MESSAGES, {"role": "assistant", "content": "x"}],
        },
        "add_generation_prompt",
    ),
    "no parts": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "an answer that says nothing": (
        {"messages": [*MESSAGES, {"role": "assistant", "contents": "x"}]},
        "messages[1]",
    ),
    "a call of old": (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "a schema that is none": ({"guided_json": "{"}, "guided_json"),
    "a backend": ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    "two grammars, one of vLLM's": (
        {"regex": "a+", "structured_outputs": {"choice": ["a"]}},
        "structured_outputs.choice",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "reasoning": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "web search": ({"web_search_options": {}}, "web_search_options"),
    "two grammars": ({"regex": "a+", "response_format": {"type": "json_object"}}, "regex"),
    "a format": ({"response_format": {"type": "xml"}}, "response_format"),
    "a schema without one": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    "a template": ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    "an old engine's word": ({"best_of": 2}, "best_of"),
    "a budget": ({"speculation": {"budget": -1}}, "speculation.budget"),
    "a huge budget": ({"speculation": {"budget": 513}}, "speculation.budget"),
    "messages of a template": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    "self of a template": ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    "a penalty that no logit bears": ({"presence_penalty": 1e39}, "presence_penalty"),
    "a bad word that is a book": ({"bad_words": ["abcdefgh" * 100]}, "bad_words"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(runner, name):
    fields, param = REFUSED[name]
    response = ask_raw(runner, PATH, json.dumps(body(**fields)))
    refused(response, param)


def test_what_asks_for_nothing_is_accepted(runner):
    fields = {
        "store": True,
        "prediction": {"type": "content", "content": "the cat sat"},
        "reasoning_effort": "none",
        "add_generation_prompt": True,
        "top_logprobs": 0,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "x",
        "tools": None,
    }
    fields |= {
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "audio": None,
        "top_k": -1,
    }
    good(
        ask(
            runner,
            PATH,
            body(
                **fields,
                tool_choice="none",
                prompt_cache_key="k",
                verbosity="medium",
                logit_bias={"5": -100, "7": 1},
            ),
        )
    )


def test_a_message_may_be_continued_in_vllms_words(runner):
    messages = [*MESSAGES, {"role": "assistant", "content": "It sat"}]
    asked = body(messages=messages, temperature=0, continue_final_message=True)
    right = good(ask(runner, PATH, asked))["choices"]
    assert good(ask(runner, PATH, {**asked, "add_generation_prompt": False}))["choices"] == right


@pytest.mark.parametrize(
    ("template", "effort", "shown"),
    [
        ("{{ reasoning_effort }}", "high", "high"),
        ("{% if not enable_thinking %}no{% endif %}", "none", "no"),
        ("-", "none", "-"),
        ("-", "high", None),
        ("{{ enable_thinking }}", "high", None),
    ],
)
def test_a_template_is_told_how_much_to_reason(llm, template, effort, shown):
    before, llm.tokenizer.chat_template = llm.tokenizer.chat_template, template
    scripted = ScriptedRunner(ServeSettings(), llm)
    try:
        for path, field, fields in (
            (PATH, "reasoning_effort", body(reasoning_effort=effort)),
            ("/v1/responses", "reasoning.effort", {"input": "x", "reasoning": {"effort": effort}}),
        ):
            response = ask(scripted, path, fields)
            if shown is None:
                refused(response, field)
            else:
                good(response)
                assert llm.tokenizer.decode(scripted.jobs[0].prompt) == shown
    finally:
        llm.tokenizer.chat_template = before
        asyncio.run(scripted.close())


def test_bodies_that_are_no_json(runner):
    for text in (
        "{",
        "",
        "[]",
        "3",
        '{"messages": NaN}',
        '{"messages": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"seed": 1' + "0" * 5000 + "}",
    ):
        response = ask_raw(runner, PATH, text)
        assert response.status_code == 400 and response.json()["error"]["message"], text


def test_models_by_other_names(runner):
    assert good(ask(runner, PATH, body(model="toy")))["model"] == "toy"
    good(ask(runner, PATH, body(model="small")))
    response = ask(runner, PATH, body(model="gpt-9"))
    refused(response, "model", 404)
    assert response.json()["error"]["code"] == "model_not_found"


def test_what_goes_wrong_is_told_for_that_request(llm):
    scripted = ScriptedRunner(ServeSettings(), llm)
    scripted.script = "one two"
    for end, status, message in (
        (QuickbeamError("NaN logits"), 500, "NaN logits"),
        (ValueError("secret"), 500, "log"),
        ("interrupted", 503, "ending"),
    ):
        scripted.end = end
        response = ask(scripted, PATH, body())
        assert response.status_code == status and message in response.json()["error"]["message"]
        assert "secret" not in response.text
        found = chunks(ask(scripted, PATH, body(stream=True)))
        assert (
            "".join(one["choices"][0]["delta"].get("content", "") for one in found[:-1])
            == "one two"
        )
        assert message in found[-1]["error"]["message"]
        assert all(stream.closed for stream in scripted.streams)
    asyncio.run(scripted.close())


def test_a_comment_keeps_a_silent_stream_open(llm):
    scripted = ScriptedRunner(ServeSettings(keep_alive=0.02), llm)
    scripted.script, scripted.piece, scripted.pause = "one two", 7, 0.2
    response = ask(scripted, PATH, body(stream=True))
    assert ": keep-alive\n\n" in response.text and len(chunks(response)) == 3
    asyncio.run(scripted.close())


def test_a_stream_that_is_left_gives_everything_back(runner, llm):
    async def go():
        asked = ChatRequest.model_validate(
            body(temperature=0, max_tokens=400, ignore_eos=True, stream=True, n=2)
        )
        stream = (await chat.begin(runner, asked)).chunks()
        for _ in range(4):
            await anext(stream)
        assert runner.gate.inside == 2
        await stream.aclose()
        for _ in range(200):
            if not runner.gate.inside:
                return
            await asyncio.sleep(0.02)

    asyncio.run(go())
    assert runner.gate.inside == 0 and not llm.engine.busy


SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        }
    },
    "regex": {"regex": "(yes|no), (ab)+!"},
    "lark": {"lark": 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{1,3}/'},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", GRAMMARS)
def test_answers_follow_grammars_as_they_do_alone(runner, llm, name, stream):
    pytest.importorskip("llguidance")
    grammar = pytest.importorskip("quickbeam.grammar").Grammar
    made = (
        grammar.json_schema(SCHEMA)
        if name == "json_schema"
        else getattr(grammar, name)(GRAMMARS[name][name])
    )
    right = alone(llm, SamplingParams(max_tokens=60, temperature=0.8, seed=5, grammar=made))[0]
    response = ask(
        runner, PATH, body(max_tokens=60, temperature=0.8, seed=5, stream=stream, **GRAMMARS[name])
    )
    if stream:
        assert (
            "".join(one["choices"][0]["delta"].get("content", "") for one in chunks(response))
            == right.text
        )
    else:
        assert good(response)["choices"][0]["message"]["content"] == right.text
    if name == "json_schema":
        assert 0 <= json.loads(right.text)["x"] <= 99


@pytest.mark.parametrize("given", ["guided_{}", "structured_outputs"])
def test_grammars_in_vllms_words(llm, given):
    pytest.importorskip("llguidance")
    grammar = pytest.importorskip("quickbeam.grammar").Grammar
    scripted, lark = ScriptedRunner(ServeSettings(), llm), 'start: "a" | "b"'
    kinds = {
        "json": (SCHEMA, grammar.json_schema(SCHEMA)),
        "regex": ("a+", grammar.regex("a+")),
        "grammar": (lark, grammar.lark(lark)),
        "choice": (["a", "b"], grammar.lark(lark)),
    }
    for name, (value, right) in kinds.items():
        fields = {given.format(name): value} if "{" in given else {given: {name: value}}
        good(ask(scripted, PATH, body(**fields)))
        assert scripted.jobs[0].params.grammar == right
    asyncio.run(scripted.close())


@pytest.mark.parametrize("text", ["\U0001f600 oui", 'a "b"\\', "two\nlines", "(a|b)*"])
def test_an_answer_is_one_of_the_choices(runner, text):
    pytest.importorskip("llguidance")
    found = good(ask(runner, PATH, body(guided_choice=[text], max_tokens=60)))["choices"][0]
    assert found["message"]["content"] == text


def test_bad_grammars_are_refused_with_the_reason(runner):
    pytest.importorskip("llguidance")
    pytest.importorskip("quickbeam.grammar")
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    assert "thing" in refused(ask(runner, PATH, body(response_format=bad)), "response_format")
    refused(ask(runner, PATH, body(regex="(")), "regex")
    refused(ask(runner, PATH, body(lark="begin: x")), "lark")
    found = good(
        ask(
            runner, PATH, body(response_format={"type": "json_object"}, max_tokens=5, temperature=0)
        )
    )
    assert found["choices"][0]["message"]["content"].startswith("{")


def test_answers_without_http(runner):
    async def go():
        return await answer(runner, PATH, body(temperature=0))

    found = asyncio.run(go())
    assert found["choices"] == good(ask(runner, PATH, body(temperature=0)))["choices"]


def test_nothing_is_left_over(runner, llm):
    assert not llm.engine.busy and runner.gate.inside == 0 and runner.gate.waiting_tokens == 0


JSON = junk()
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"])}, optional={"text": JSON}
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON,
        "content": st.text(max_size=8) | st.lists(PART, max_size=2) | JSON,
    },
    optional={"name": JSON, "tool_calls": JSON, "tool_call_id": JSON},
)
KNOWN = [
    name
    for name in ChatRequest.model_fields
    if name not in ("messages", "max_tokens", "n", "best_of", *GRAMMAR_FIELDS, "response_format")
]
NUMBERS = st.integers(-3, 3) | st.floats(-3, 3) | st.none()


@examples(80, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(
        st.sampled_from(KNOWN), JSON | NUMBERS | st.sampled_from([[], {}, "auto", True]), max_size=4
    ),
    messages=st.lists(MESSAGE, max_size=3) | JSON,
)
def test_junk_is_never_the_servers_fault(runner, fields, messages):
    asked = {"messages": messages, "max_tokens": 1, **fields}
    response = ask_raw(runner, PATH, json.dumps(asked))
    answered_or_refused(response)


@examples(50, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(KNOWN), value=JSON | NUMBERS)
def test_junk_in_one_field_is_never_the_servers_fault(runner, name, value):
    response = ask_raw(runner, PATH, json.dumps(body(max_tokens=1, **{name: value})))
    answered_or_refused(response)


@pytest.mark.slow
@pytest.mark.long
def test_the_embedded_models_answers_are_those_given_alone(smollm2):
    messages = [{"role": "user", "content": "Name three trees."}]
    with LLM(str(smollm2)) as llm:
        real = Runner(ServeSettings(), llm)
        for fields in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 2, "n": 2}):
            right = alone(llm, SamplingParams(max_tokens=24, **fields), messages)
            found = good(ask(real, PATH, {"messages": messages, "max_tokens": 24, **fields}))
            assert [one["message"]["content"] for one in found["choices"]] == [
                one.text for one in right
            ]
        asyncio.run(real.close())
