"""`/v1/chat/completions`: answers are those that the model gives alone, streams add up to them, and
what isn't served is refused by name."""

import json
import shutil
from dataclasses import asdict

import pytest

from quickbeam import LLM, QuickbeamError, SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.grammar.spec import Grammar
from serving import ScriptedRunner, ask, chunks, good, refused

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the cat sat on the mat and the cat"}]
AFTER = [*MESSAGES, {"role": "assistant", "content": "It sat"}]


def alone(llm, messages=MESSAGES, **params):
    answers = llm.chat(messages, SamplingParams(**params), method="ar")
    return answers if isinstance(answers, list) else [answers]


def body(**fields):
    return {"messages": MESSAGES, "max_tokens": 24, **fields}


def whole(runner, **fields):
    return good(ask(runner, PATH, body(**fields)))


def texts(response):
    return [choice["message"]["content"] for choice in response["choices"]]


def streamed(runner, **fields):
    return chunks(ask(runner, PATH, body(**fields, stream=True)))


def joined(pieces, index=0):
    mine = [one for chunk in pieces for one in chunk["choices"] if one["index"] == index]
    return "".join(one["delta"].get("content") or "" for one in mine)


SETTINGS = {
    "greedy": {"temperature": 0},
    "three": {"temperature": 0.8, "seed": 7, "n": 3},
    "filtered": {"temperature": 0.8, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": dict(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1),
    "bent": dict(
        temperature=0.8, seed=3, min_tokens=4, bad_words=["a"], stop=["e"],
        include_stop_str_in_output=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_given_alone_and_streams_add_up_to_them(runner, llm, name):
    fields = SETTINGS[name]
    right = alone(llm, max_tokens=24, **fields)
    response = whole(runner, **fields, return_token_ids=True)
    assert [one["token_ids"] for one in response["choices"]] == [one.token_ids for one in right]
    assert texts(response) == [one.text for one in right]
    reasons = [one["finish_reason"] for one in response["choices"]]
    assert reasons == [one.finish_reason for one in right]
    assert [one["index"] for one in response["choices"]] == list(range(len(right)))
    assert response["prompt_token_ids"] == llm.encode_chat(MESSAGES)
    assert response["seed"] == fields.get("seed")
    usage, prompt = response["usage"], len(response["prompt_token_ids"])
    new = sum(len(one.token_ids) for one in right)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, new)
    assert usage["total_tokens"] == prompt + new

    options = {"include_usage": True}
    pieces = streamed(runner, **fields, return_token_ids=True, stream_options=options)
    n = len(right)
    assert [one["choices"][0]["delta"].get("role") for one in pieces[:n]] == ["assistant"] * n
    assert {one["id"] for one in pieces} == {pieces[0]["id"]}
    assert {one["object"] for one in pieces} == {"chat.completion.chunk"}
    for index, one in enumerate(right):
        mine = [piece["choices"][0] for piece in pieces[:-1]]
        mine = [choice for choice in mine if choice["index"] == index]
        assert joined(pieces, index) == one.text
        assert [token for piece in mine for token in piece.get("token_ids", [])] == one.token_ids
        ends = [piece["finish_reason"] for piece in mine]
        assert ends == [None] * (len(mine) - 1) + [one.finish_reason]
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["completion_tokens"] == new
    assert all(one["usage"] is None for one in pieces[:-1])


def test_usage_may_come_with_each_chunk_and_tells_what_was_cached(runner, llm):
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = streamed(runner, temperature=0, stream_options=options)
    counts = [one["usage"]["completion_tokens"] for one in pieces]
    assert counts == sorted(counts) and counts[-1] > 0
    assert "usage" not in streamed(runner, temperature=0)[0]
    llm.reset()
    long = [{"role": "user", "content": "all work and no play " * 15}]
    usages = [whole(runner, messages=long, temperature=0)["usage"] for _ in "12"]
    counts = [one["prompt_tokens_details"]["cached_tokens"] for one in usages]
    assert counts[0] == 0 < counts[1]


def test_defaults_are_openais_the_models_or_the_servers(llm, scripted, toy_folder, tmp_path):
    good(ask(scripted, PATH, body()))
    assert (scripted.jobs[0].params.temperature, scripted.jobs[0].params.top_p) == (1, 1)
    folder = shutil.copytree(toy_folder, tmp_path / "toy")
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": True, **own}))
    with LLM(str(folder), "ar") as llm:
        scripted = ScriptedRunner(ServerOptions(), llm)
        others = ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})
        for url, asked in ((PATH, body()), *others):
            response = good(ask(scripted, url, asked))
            assert own.items() <= asdict(scripted.jobs[0].params).items()
            assert response.get("temperature", 0.6) == 0.6 and response.get("top_p", 0.95) == 0.95
            good(ask(scripted, url, {**asked, "temperature": 0, "top_p": 1, "top_k": -1}))
            params = scripted.jobs[0].params
            assert (params.temperature, params.top_p, params.top_k) == (0, 1, 0)
        cold = ScriptedRunner(ServerOptions(default_temperature=0.0), llm)
        good(ask(cold, PATH, body()))
        assert cold.jobs[0].params.temperature == 0 and cold.jobs[0].params.top_k == 20
        path.write_text(json.dumps({"temperature": -3.0}))
    with LLM(str(folder), "ar") as llm:
        assert llm.sampling_defaults == {}


def test_an_answer_may_go_on_to_the_end_of_the_context(llm, scripted):
    asked = {"messages": MESSAGES}
    good(ask(scripted, PATH, asked))
    assert scripted.jobs[0].params.max_tokens == 512 - len(llm.encode_chat(MESSAGES))
    good(ask(scripted, PATH, {**asked, "max_completion_tokens": 5}))
    assert scripted.jobs[0].params.max_tokens == 5
    response = ask(scripted, PATH, {**asked, "max_completion_tokens": 512})
    assert "context length is 512 tokens" in refused(response, "max_completion_tokens")
    response = ask(scripted, PATH, {"messages": [{"role": "user", "content": "x" * 600}]})
    refused(response, "messages")
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models_own(runner, llm, stream):
    (right,) = alone(llm, max_tokens=12, logprobs=3)
    fields = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    if stream:
        pieces = [one["choices"][0]["logprobs"] for one in streamed(runner, **fields)]
        content = [entry for piece in pieces if piece for entry in piece["content"]]
    else:
        content = whole(runner, **fields)["choices"][0]["logprobs"]["content"]
    for entry, wanted in zip(content, right.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(wanted.logprob)
        tops = [one["logprob"] for one in entry["top_logprobs"]]
        assert tops == pytest.approx(list(wanted.top.values()))
    spelled = bytes(byte for entry in content for byte in entry["bytes"])
    assert spelled.removesuffix(b"<end>").decode(errors="replace") == right.text


def test_what_was_drafted_is_counted_and_traced(runner):
    fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    pld, options = {"method": "pld", "budget": 6}, {"include_usage": True}
    pieces = streamed(runner, **fields, speculation=pld, trace=True, stream_options=options)
    usage = pieces[-1]["usage"]
    steps = [step for one in pieces for step in one.get("quickbeam", {}).get("steps", [])]
    assert usage["steps"] == len(steps) > 0
    accepted = sum(node["accepted"] for step in steps for node in step["nodes"][1:])
    assert accepted > 0  # greedy answers of this model end in a cycle
    assert 1 + sum(step["emitted"] for step in steps) == usage["completion_tokens"] == 40
    assert {one["quickbeam"]["method"] for one in pieces if "quickbeam" in one} == {"pld"}
    plain = whole(runner, **fields, speculation={"method": "ar"})["usage"]
    assert plain["steps"] == 39
    measured = whole(runner, **fields, speculation={"method": "pld", "budget": "auto"})["usage"]
    assert measured["completion_tokens"] == 40


@pytest.mark.parametrize("parts", [False, True])
def test_a_prediction_is_drafted_and_its_tokens_alone_are_counted(runner, parts):
    fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    details = "completion_tokens_details"
    plain = whole(runner, **fields)
    text = plain["choices"][0]["message"]["content"]
    content = [{"type": "text", "text": text}] if parts else text
    speculation = {"method": "auto", "budget": 8}
    prediction = {"type": "content", "content": content}
    answer = whole(runner, **fields, speculation=speculation, prediction=prediction)
    assert answer["choices"] == plain["choices"]
    assert answer["usage"][details]["accepted_prediction_tokens"] > 10
    prediction["content"] = "never, never, never"
    wrong = whole(runner, **fields, speculation=speculation, prediction=prediction)
    assert wrong["choices"] == plain["choices"]
    assert wrong["usage"][details]["accepted_prediction_tokens"] < 10
    unpredicted = whole(runner, **fields, speculation=speculation)["usage"][details]
    assert unpredicted["accepted_prediction_tokens"] == 0
    assert unpredicted["rejected_prediction_tokens"] == 0


def test_messages_reach_the_template_as_it_takes_them(llm, scripted, monkeypatch):
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.name }}|{{ m.content }}|{% for c in "
        "m.tool_calls %}{{ c.function.name }}:{{ c.function.arguments.x }}{% endfor %}]{% endfor %}"
        "{{ extra }}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    good(ask(scripted, PATH, {"messages": messages, "chat_template_kwargs": {"extra": "!"}}))
    text = llm.tokenizer.decode(scripted.jobs[0].prompt)
    assert text == "[system||be\nbrief|][user|Ann|hi|][assistant|||f:3][tool|f|4|]!"
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('only users') }}")
    assert "only users" in refused(ask(scripted, PATH, body()), "messages")


# as Llama 3.1 reads it: a message with the field holds a call
CAREFUL = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}{% if 'tool_calls' in m %}|{{ "
    "m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }}){% endif %}"
    "{% if m.keys() - ['role', 'content', 'tool_calls', 'name', 'tool_call_id'] %}?{% endif %}]"
    "{% endfor %}"
)


def past_call(**function):
    return {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", **function}}]}


ASSISTANT, TOOL = {"role": "assistant"}, {"role": "tool", "tool_call_id": "c1"}
MARK = {"cache_control": {"type": "ephemeral"}}
MARKED = [{"type": "text", "text": "hi", **MARK, "prompt_cache_breakpoint": {}}]
PAST = [  # a message as clients send it back, and what the template shows
    ({**ASSISTANT, "content": "a", "tool_calls": []}, "[assistant|a]"),
    ({**ASSISTANT, "content": "", "tool_calls": []}, "[assistant|]"),
    ({**ASSISTANT, "content": None, "tool_calls": []}, "[assistant|]"),
    ({**ASSISTANT, "content": []}, "[assistant|]"),
    ({**ASSISTANT, "content": None, "refusal": "no"}, "[assistant|no]"),
    ({**ASSISTANT, "content": [{"type": "refusal", "refusal": "no"}]}, "[assistant|no]"),
    ({**ASSISTANT, "content": [], **past_call(arguments="{}")}, "[assistant||f({})]"),
    ({**ASSISTANT, **past_call(arguments='{"x": 3}')}, '[assistant||f({"x": 3})]'),
    ({**ASSISTANT, **past_call(arguments={"x": 3})}, '[assistant||f({"x": 3})]'),
    *(
        ({**ASSISTANT, **past_call(arguments=nothing)}, "[assistant||f({})]")
        for nothing in ("", " ", "null", None)
    ),
    ({**ASSISTANT, **past_call()}, "[assistant||f({})]"),
    ({**ASSISTANT, **past_call(arguments="[3]")}, '[assistant||f({"arguments": [3]})]'),
    ({**ASSISTANT, **past_call(arguments="{x")}, '[assistant||f({"arguments": "{x"})]'),
    (  # half of a character
        {**ASSISTANT, **past_call(arguments='{"x": "\\ud83d"}')},
        r'[assistant||f({"arguments": "{\"x\": \"\\ud83d\"}"})]',
    ),
    ({**TOOL, "content": []}, "[tool|]"),
    ({**TOOL, "content": None}, "[tool|]"),
    ({**TOOL, "content": "4", "is_error": False}, "[tool|4]"),
    ({**TOOL, "content": MARKED, **MARK}, "[tool|hi]"),
    ({"role": "user", "content": MARKED, **MARK}, "[user|hi]"),
]


@pytest.mark.parametrize(("message", "shown"), PAST)
def test_a_history_is_what_it_is(llm, scripted, monkeypatch, message, shown):
    monkeypatch.setattr(llm.tokenizer, "chat_template", CAREFUL)
    good(ask(scripted, PATH, {"messages": [message]}))
    assert llm.tokenizer.decode(scripted.jobs[0].prompt) == shown


def test_a_number_without_a_fraction_is_an_integer(scripted):
    good(ask(scripted, PATH, body(max_tokens=16.0, seed=7.0, n=1.0, top_k=3.0)))
    params = scripted.jobs[0].params
    assert (params.max_tokens, params.seed, params.top_k) == (16, 7, 3)
    assert isinstance(params.max_tokens, int)
    refused(ask(scripted, PATH, body(max_tokens=16.5)), "max_tokens")


def test_images_in_a_history_are_refused_in_clear_words(scripted):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tool, user = {**TOOL, "content": [image]}, {"role": "user", "content": [image]}
    response = ask(scripted, PATH, {"messages": [*MESSAGES, tool]})
    assert "'image_url': give parts of type 'text'" in refused(response, "messages[1].content[0]")
    response = ask(scripted, PATH, {"messages": [*MESSAGES, user]})
    assert "message 1 has a part of type 'image_url', which is not read for this model" in (
        refused(response, "messages")
    )


def test_a_last_message_may_be_continued(runner, llm):
    asked = {"messages": AFTER, "temperature": 0, "continue_final_message": True}
    response = whole(runner, **asked, return_token_ids=True)
    prompt = llm.encode_chat(AFTER, continue_final_message=True)
    assert response["prompt_token_ids"] == prompt
    assert llm.tokenizer.decode(prompt).endswith("It sat")
    assert texts(whole(runner, **asked, add_generation_prompt=False)) == texts(response)  # as vLLM


def test_a_template_is_told_how_much_to_reason(llm, scripted, monkeypatch):
    for template, effort, shown, done in (
        ("{{ reasoning_effort }}", "high", "high", True),
        ("{% if not enable_thinking %}no{% endif %}", "none", "no", True),
        ("-", "none", "-", True),
        ("-", "high", "-", False),
        ("-{{ enable_thinking }}", "high", "-", False),
    ):
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        for path, field, fields in (
            (PATH, "reasoning_effort", body(reasoning_effort=effort)),
            ("/v1/responses", "reasoning.effort", {"input": "x", "reasoning": {"effort": effort}}),
        ):
            response = ask(scripted, path, fields)
            good(response)
            assert llm.tokenizer.decode(scripted.jobs[0].prompt) == shown
            assert response.headers.get("x-quickbeam-ignored") == (None if done else field)


def test_models_by_other_names(runner):
    assert whole(runner, model="toy")["model"] == whole(runner, model="small")["model"] == "toy"
    response = ask(runner, PATH, body(model="gpt-9"))
    refused(response, "model", 404)
    assert response.json()["error"]["code"] == "model_not_found"


def test_what_goes_wrong_is_told_for_that_request(scripted):
    for end, status, message in (
        (QuickbeamError("NaN logits"), 500, "NaN logits"),
        (ValueError("secret"), 500, "log"),
        ("interrupted", 503, "ending"),
    ):
        scripted.script, scripted.end = "one two", end
        response = ask(scripted, PATH, body())
        assert response.status_code == status and message in response.json()["error"]["message"]
        assert "secret" not in response.text
        pieces = streamed(scripted)
        assert joined(pieces[:-1]) == "one two" and message in pieces[-1]["error"]["message"]
        assert all(stream.closed for stream in scripted.streams)


def test_a_comment_keeps_a_silent_stream_open(llm):
    scripted = ScriptedRunner(ServerOptions(keep_alive=0.02), llm)
    scripted.script, scripted.piece, scripted.pause = "one two", 7, 0.2
    response = ask(scripted, PATH, body(stream=True))
    assert ": keep-alive\n\n" in response.text and len(chunks(response)) == 3


X = {"x": {"type": "integer", "minimum": 0, "maximum": 99}}
SCHEMA = {"type": "object", "properties": X, "required": ["x"], "additionalProperties": False}
LARK = 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{1,3}/'
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
GRAMMARS = [
    ({"response_format": FORMAT}, Grammar.json_schema(SCHEMA)),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"regex": "(yes|no), (ab)+!"}, Grammar.regex("(yes|no), (ab)+!")),
    ({"lark": LARK}, Grammar.lark(LARK)),
    *(
        ({key: value}, grammar)
        for name, value, grammar in (
            ("json", SCHEMA, Grammar.json_schema(SCHEMA)),
            ("regex", "a+", Grammar.regex("a+")),
            ("grammar", LARK, Grammar.lark(LARK)),
            ("choice", ["a", "b"], Grammar.lark('start: "a" | "b"')),
        )
        for key, value in ((f"guided_{name}", value), ("structured_outputs", {name: value}))
    ),
]


def test_grammars_are_asked_for_in_many_words_and_bad_ones_refused(scripted, runner):
    for fields, right in GRAMMARS:
        good(ask(scripted, PATH, body(**fields)))
        assert scripted.jobs[0].params.grammar == right, fields
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    assert "thing" in refused(ask(runner, PATH, body(response_format=bad)), "response_format")
    refused(ask(runner, PATH, body(regex="(")), "regex")
    refused(ask(runner, PATH, body(lark="begin: x")), "lark")


@pytest.mark.parametrize("text", ["\U0001f600 oui", 'a "b"\\', "two\nlines", "(a|b)*"])
def test_an_answer_is_one_of_the_choices(runner, text):
    assert texts(whole(runner, guided_choice=[text], max_tokens=60)) == [text]
