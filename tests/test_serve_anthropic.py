"""`/v1/messages` and what belongs to Anthropic's API: answers are those of a chat, events add up to
them, conversations, thoughts and tools are translated, errors have Anthropic's form."""

import asyncio
import json
import time

import pytest

from quickbeam import LLM, QuickbeamError, SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.serve.endpoints import IGNORED
from quickbeam.serve.runner import Runner
from running import braked, idle, served, until
from serving import ScriptedRunner, anthropic_error, ask, ask_raw, chunks, good, message_of, send

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CHAT = "/v1/chat/completions"
HEADERS = {"anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "the cat sat on the mat and the cat"}
SYSTEM = "be brief"
X = {"x": {"type": "integer", "minimum": 0, "maximum": 99}}
SCHEMA = {"type": "object", "properties": X, "required": ["x"]}
SCHEMA["additionalProperties"] = False
TOOL = {"name": "f", "description": "Add one.", "input_schema": SCHEMA}
OTHER = {"name": "g", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
# shows what there is: tools' names, messages with their thoughts, calls with their arguments
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.parameters | tojson }} "
    '{% endfor %}{% if false %}<tool_call>"arguments" enable_thinking{% endif %}'
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}]{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)


@pytest.fixture(scope="module")
def calling(toy_folder):
    """A model whose chat template takes tools, as Hermes writes them."""
    with LLM(toy_folder, "pld") as llm:
        llm.tokenizer.chat_template = TEMPLATE
        yield llm


@pytest.fixture
def hermes(calling):
    """A server whose answers are given, with that template."""
    return ScriptedRunner(ServerOptions(served_names=("toy",)), calling)


def body(**fields):
    return {"messages": [USER], "max_tokens": 24, "temperature": 0, **fields}


def both(runner, **fields):
    """The message to a request, which its stream adds up to."""
    whole = good(ask(runner, PATH, body(**fields)))
    again = message_of(ask(runner, PATH, body(**fields, stream=True)))
    for message in (whole, again):
        for block in message["content"]:
            block.pop("id", None)
    assert again["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert {**again, "id": whole["id"], "usage": whole["usage"]} == whole
    return whole


def text_of(message):
    assert [one["type"] for one in message["content"]] == ["text"]
    return message["content"][0]["text"]


def shown(runner, **fields):
    """The prompt that a request becomes."""
    good(ask(runner, PATH, body(**fields)))
    return runner.llm.tokenizer.decode(runner.jobs[0].prompt)


SETTINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "filtered": {"temperature": 0.8, "seed": 11, "top_p": 0.9, "top_k": 40},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_a_chat_and_events_add_up_to_them(runner, llm, name):
    fields = SETTINGS[name]
    right = llm.chat(
        [{"role": "system", "content": SYSTEM}, USER],
        SamplingParams(max_tokens=24, **fields),
        method="ar",
    )
    messages = [{"role": "system", "content": SYSTEM}, USER]
    chat = good(ask(runner, CHAT, {"messages": messages, "max_tokens": 24, **fields}))
    for system in (SYSTEM, [{"type": "text", "text": SYSTEM, "cache_control": {}}]):
        message = both(runner, system=system, **fields)
        assert text_of(message) == right.text == chat["choices"][0]["message"]["content"]
        assert message["role"] == "assistant" and message["model"] == "toy"
        assert message["id"].startswith("msg_") and message["seed"] == fields.get("seed")
        cut = right.finish_reason == "length"
        assert message["stop_reason"] == ("max_tokens" if cut else "end_turn")
        assert message["stop_sequence"] is None
        usage = message["usage"]
        inputs = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert (
            inputs == chat["usage"]["prompt_tokens"] and usage["cache_creation_input_tokens"] == 0
        )
        assert usage["output_tokens"] == len(right.token_ids)


def test_the_stop_sequence_that_ended_an_answer_is_named(runner, llm):
    right = llm.chat([USER], SamplingParams(max_tokens=24), method="ar").text
    message = both(runner, stop_sequences=["never", right[5:8], right[12:14]])
    assert text_of(message) == right[: right.index(right[5:8])]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", right[5:8])
    message = both(runner, stop_sequences=["never"])
    assert message["stop_sequence"] is None and text_of(message) == right


def test_an_answer_may_ask_for_more_than_the_context_holds(runner, scripted, llm):
    message = both(runner, max_tokens=32_000, ignore_eos=True)
    assert message["stop_reason"] == "model_context_window_exceeded"
    prompt = len(llm.encode_chat([USER]))
    assert message["usage"]["output_tokens"] == 512 - prompt
    good(ask(scripted, PATH, body(max_tokens=32_000)))
    assert scripted.jobs[0].params.max_tokens == 512 - prompt
    long = [{"role": "user", "content": "x" * 600}]
    error = anthropic_error(ask(runner, PATH, body(messages=long)), "invalid_request_error")
    assert error.startswith("prompt is too long: ") and "at least 1: shorten" in error


def test_what_the_prefix_cache_holds_is_counted_apart(runner, llm):
    llm.reset()
    long = [{"role": "user", "content": "all work and no play " * 15}]
    asked = {"messages": long}
    usages = [good(ask(runner, PATH, body(**asked)))["usage"] for _ in "12"]
    usages.append(message_of(ask(runner, PATH, body(**asked, stream=True)))["usage"])
    cached = [one["cache_read_input_tokens"] for one in usages]
    assert cached[0] == 0 < cached[1] == cached[2]
    assert len({one["input_tokens"] + one["cache_read_input_tokens"] for one in usages}) == 1
    counted = good(ask(runner, COUNT, {"messages": long}))
    assert counted == {"input_tokens": usages[0]["input_tokens"]}


def text(value):
    return {"type": "text", "text": value}


USES = [
    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 3}},
    {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
]


def result(number, **fields):
    return {"type": "tool_result", "tool_use_id": f"t{number}", **fields}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


CONVERSATIONS = {
    "text": ([{"role": "user", "content": "a"}], None, "[user: a]"),
    "blocks": ([user(text("a"), text("b"))], None, "[user: a\nb]"),
    "system": ([user(text("a"))], [text("s"), text("t")], "[system: s\nt][user: a]"),
    "no system": ([user(text("a"))], [], "[user: a]"),
    "billing": (
        [user(text("a"))],
        [text("x-anthropic-billing-header: cch=1f2e;"), text("s")],
        "[system: s][user: a]",
    ),
    "turns of one role": (
        [
            *(user(text("a")), user(text("b"))),
            *(assistant(text("c")), assistant(text("d"))),
            user(text("e")),
        ],
        None,
        "[user: a\nb][assistant: c\nd][user: e]",
    ),
    "an earlier turn of nothing": (
        [user(text("a")), assistant(), user(text("b"))], None, "[user: a][assistant: ][user: b]"
    ),
    "the system's first turns": (
        [{"role": "system", "content": "t"}, user(text("a"))], "s", "[system: s\nt][user: a]"
    ),
    "the system's later turns": (
        [user(text("a")), {"role": "system", "content": [text("t"), text("u")]}],
        "s",
        "[system: s][user: a\n<system>\nt\nu\n</system>]",
    ),
    "an answer begun": ([user(text("a")), assistant(text("b"))], None, "[user: a][assistant: b"),
    "thoughts": (
        [
            user(text("a")),
            assistant(
                {"type": "thinking", "thinking": "h", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "i"},
                text("b"),
            ),
            user(text("c")),
        ],
        None,
        "[user: a][assistant: (h\n\ni) b][user: c]",
    ),
    "tools": (
        [
            user(text("a")),
            assistant(text("b"), *USES),
            user(result(1, content="4"), result(2, content=[text("no"), text("g")], is_error=True)),
        ],
        None,
        '[user: a][assistant: bf({"x": 3})g({})][tool f: 4][tool g: Error: no\ng]',
    ),
    "tools that return nothing, and more words": (
        [
            user(text("a")),
            assistant(*USES),
            user(result(1), result(2, content=[]), text("so?")),
            user(text("well?")),
        ],
        None,
        '[user: a][assistant: f({"x": 3})g({})][tool f: ][tool g: ][user: so?\nwell?]',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(hermes, name):
    messages, system, prompt = CONVERSATIONS[name]
    fields = {"messages": messages} | ({} if system is None else {"system": system})
    assert shown(hermes, **fields) == prompt
    counted = good(ask(hermes, COUNT, {"model": "toy", **fields}))
    assert counted == {"input_tokens": len(hermes.jobs[0].prompt)}


def test_a_turn_of_the_assistant_that_comes_last_is_continued(runner, llm):
    begun = [USER, {"role": "assistant", "content": "It sat"}]
    ids = llm.encode_chat(begun, continue_final_message=True)
    right = llm.generate([ids], SamplingParams(max_tokens=24), method="ar")[0].text
    assert text_of(both(runner, messages=begun)) == right
    error = ask(runner, PATH, body(messages=[USER, assistant(*USES[:1])]))
    assert "give their results" in anthropic_error(error, "invalid_request_error", "messages")


def test_tools_are_shown_unless_none_may_be_called(hermes):
    prompt = "[user: the cat sat on the mat and the cat]"
    for tool_choice, grammar in (
        (None, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "f"}, True),
    ):
        fields = {"tools": [TOOL, {**OTHER, "type": "custom"}], "tool_choice": tool_choice}
        of_f, _, after = shown(hermes, **fields).removeprefix("f: ").partition(" g: ")
        assert json.loads(of_f) == SCHEMA and after == f'{{"type": "object"}} {prompt}'
        assert (hermes.jobs[0].params.grammar is not None) == grammar
    assert shown(hermes, tools=[TOOL], tool_choice={"type": "none"}) == prompt
    named = ask(hermes, PATH, body(tools=[{**TOOL, "allowed_callers": ["program"]}]))
    assert named.headers[IGNORED] == "tools[0].allowed_callers"


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_calls_are_blocks(hermes, piece):
    hermes.script, hermes.piece = f"Let me see.\n{CALL}\n{CALL} bye", piece
    message = both(hermes, tools=[TOOL])
    call = {"type": "tool_use", "name": "f", "input": {"x": 3}}
    blocks = [text("Let me see."), call, call, text(" bye")]
    assert message["content"] == blocks and message["stop_reason"] == "tool_use"
    hermes.end = "length"
    assert both(hermes, tools=[TOOL])["stop_reason"] == "max_tokens"
    hermes.end = "stop"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert both(hermes, tools=[TOOL], tool_choice=one)["content"] == [*blocks[:2], blocks[3]]


@pytest.mark.parametrize("several", [None, False])
def test_forced_calls_keep_to_their_schema(calling, several):
    """An agent's loop of two turns, with the model itself."""
    runner = Runner(ServerOptions(), calling)
    choice = {"type": "any", "disable_parallel_tool_use": several}
    asked = {
        "tools": [TOOL],
        "tool_choice": choice,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 99,
    }
    message = both(runner, **asked)
    (call,) = message["content"]
    assert call["type"] == "tool_use" and call["input"].keys() == {"x"}
    assert isinstance(call["input"]["x"], int) and message["stop_reason"] == "tool_use"
    call = {**call, "id": "t1"}
    again = {**asked, "messages": [USER, assistant(call), user(result(1, content="4"))]}
    again["tool_choice"] = {"type": "none"}
    message = both(runner, **again)
    called = {"name": "f", "arguments": call["input"]}
    right = calling.chat(
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"function": called}]},
            {"role": "tool", "name": "f", "content": "4"},
        ],
        SamplingParams(max_tokens=99, temperature=1.0, seed=5),
        method="ar",
    )
    assert text_of(message) == right.text


def test_what_a_call_is_not_held_to_is_named(hermes):
    unheld = {"name": "f", "input_schema": {"not": {}}}
    response = ask(hermes, PATH, body(tools=[unheld], tool_choice={"type": "any"}))
    error = anthropic_error(response, "invalid_request_error", "tools[0].input_schema (f): ")
    assert "parameters" not in error
    response = ask(hermes, PATH, body(tools=[{**TOOL, "strict": True}]))
    assert response.headers[IGNORED] == "tools[0].strict"  # its mark is no token of this model


def test_schemas_of_answers(runner):
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    output = {"format": {"type": "json_schema", "schema": schema}}
    message = both(runner, output_config=output)
    assert json.loads(text_of(message))["x"] in (1, 2)


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_thoughts_are_blocks(hermes, piece):
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    hermes.piece, hermes.script = piece, "<think>\nHm.\n</think>\n\nIt is 4."
    assert both(hermes)["content"] == [thought, text("It is 4.")]
    hermes.script = f"<think>\nHm.\n</think>\n\n{CALL}"
    call = {"type": "tool_use", "name": "f", "input": {"x": 3}}
    assert both(hermes, tools=[TOOL])["content"] == [thought, call]
    hermes.script = f"<think>Hm. {CALL}"
    assert both(hermes, tools=[TOOL])["content"] == [thought, call]


def test_an_answer_to_a_prompt_that_opens_a_thought_is_one(hermes, monkeypatch):
    monkeypatch.setattr(hermes.llm.tokenizer, "chat_template", f"{TEMPLATE}<think>\n")
    hermes.script = "Hm.</think>4"
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert both(hermes)["content"] == [thought, text("4")]
    hermes.script = '{"x": 1}'  # an answer that keeps to a grammar has none
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert both(hermes, output_config=output)["content"] == [text('{"x": 1}')]


def test_thinking_is_asked_for_by_the_templates_variable(hermes):
    prompt = "[user: the cat sat on the mat and the cat]"
    enabled = {"type": "enabled", "budget_tokens": 1024}
    for thinking, end in (
        (None, ""),
        ({"type": "adaptive"}, ""),
        ({"type": "disabled"}, "False"),
        (enabled, "True"),
    ):
        assert shown(hermes, thinking=thinking) == prompt + end
    effort = {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}
    assert shown(hermes, **effort) == f"{prompt}False"
    own = {"chat_template_kwargs": {"enable_thinking": "?"}, "thinking": enabled}
    assert shown(hermes, **own) == f"{prompt}?"


def test_an_answer_of_nothing_is_an_empty_text(scripted):
    assert both(scripted)["content"] == [text("")]


LEFT_OUT = [  # fields of a request, and what is named
    ({"metadata": {"user_id": None}, "user_profile_id": "x", "workspace_id": "y"}, None),
    ({"service_tier": "standard_only", "speed": "standard"}, None),
    ({"speed": "fast"}, "speed"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"diagnostics": {"previous_message_id": None}}, "diagnostics"),
    ({"cache_control": {"type": "ephemeral"}}, None),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, None),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"effort": "high"}}, "output_config.effort"),
    ({"context_management": {"edits": []}}, None),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, None),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management",
    ),
    (
        {"messages": [USER, assistant(text("x"), {"type": "server_tool_use", "id": "y"}), USER]},
        "messages[1].content[1] (server_tool_use)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), LEFT_OUT)
def test_what_an_answer_goes_without_is_named(scripted, fields, named):
    for stream in (False, True):
        response = ask(scripted, PATH, body(**fields, stream=stream))
        assert response.status_code == 200, response.text
        assert response.headers.get(IGNORED) == named


def test_errors_have_anthropics_form(runner, scripted):
    negative = ask(runner, PATH, body(temperature=-1))
    anthropic_error(negative, "invalid_request_error", "temperature")
    for path, asked in ((PATH, body()), (COUNT, {"messages": [USER]})):
        response = ask(runner, path, {**asked, "model": "gpt-9"})
        anthropic_error(response, "not_found_error", "the model 'gpt-9'")
    anthropic_error(ask_raw(runner, PATH, "{"), "invalid_request_error", "the body is not JSON")
    anthropic_error(ask(runner, f"{PATH}/batches", {}), "not_found_error", "there is no such path")
    anthropic_error(ask(runner, PATH, method="GET"), "invalid_request_error")
    plain = send(runner, ("POST", PATH, {"content": "{}"}))[0]
    anthropic_error(plain, "invalid_request_error", "the body must be a JSON")
    scripted.script = "one two"
    for end, status, kind, words in (
        (QuickbeamError("NaN logits"), 500, "api_error", "NaN logits"),
        (ValueError("secret"), 500, "api_error", "the server failed"),
        ("interrupted", 529, "overloaded_error", "the server is ending"),
    ):
        scripted.end = end
        response = ask(scripted, PATH, body())
        assert response.status_code == status
        anthropic_error(response, kind, words)
        *_, last = ask(scripted, PATH, body(stream=True)).text.strip().split("\n\n")
        name, data = last.split("\n")
        error = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and error["type"] == "error"
        assert error["error"]["type"] == kind and error["error"]["message"].startswith(words)
        assert all(stream.closed for stream in scripted.streams)


def test_what_is_full_or_starts_may_be_asked_again(llm, scripted):
    scripted.gate.phase = "draining"
    response = ask(scripted, PATH, body())
    assert response.status_code == 529 and int(response.headers["retry-after"]) > 0
    anthropic_error(response, "overloaded_error")
    full = ScriptedRunner(ServerOptions(max_waiting=1), llm)
    full.gate.inside = full.gate.max_running + 1
    response = ask(full, PATH, body())
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
    anthropic_error(response, "rate_limit_error")


def test_keys(llm):
    runner = ScriptedRunner(ServerOptions(api_keys=("first", "second")), llm)
    good_headers = (
        {"x-api-key": "first"},
        {"x-api-key": " second "},
        {"Authorization": "Bearer first"},
        {"Authorization": "Bearer none", "x-api-key": "first"},
        {"Authorization": "Bearer first", "x-api-key": "none"},
    )
    bad_headers = (
        {},
        {"x-api-key": ""},
        {"x-api-key": "Bearer first"},
        {"Authorization": "first"},
        {"Authorization": "Basic first", "x-api-key": "third"},
    )
    paths = ("/v1/completions", {"prompt": "x"}), (PATH, body()), (COUNT, {"messages": [USER]})
    for path, asked in paths:
        for headers in good_headers:
            (response,) = send(runner, ("POST", path, {"json": asked, "headers": headers}))
            assert response.status_code == 200
        for headers in bad_headers:
            (response,) = send(runner, ("POST", path, {"json": asked, "headers": headers}))
            assert response.status_code == 401 and "first" not in response.text
            if path.startswith(PATH):
                anthropic_error(response, "authentication_error", "a key is needed")
    (large,) = send(
        runner, ("POST", PATH, {"content": b"", "headers": {"content-length": "9" * 12}})
    )
    anthropic_error(large, "authentication_error")
    small = ScriptedRunner(ServerOptions(max_body="1kB"), llm)
    large = ask(small, PATH, body(system="x" * 2000))
    assert large.status_code == 413
    anthropic_error(large, "request_too_large")


def test_models(runner):
    listed, single, missing, other = send(
        runner,
        ("GET", "/v1/models", {"headers": HEADERS}),
        ("GET", "/v1/models/small", {"headers": HEADERS}),
        ("GET", "/v1/models/large", {"headers": HEADERS}),
        ("GET", "/v1/models", {}),
    )
    names = [one["id"] for one in good(listed)["data"]]
    assert names == ["toy", "small"] and good(listed)["has_more"] is False
    assert good(single) == good(listed)["data"][1] and good(single)["type"] == "model"
    assert good(single)["max_input_tokens"] == 512
    anthropic_error(missing, "not_found_error")
    assert good(other)["object"] == "list"


def test_a_ping_keeps_a_silent_stream_open(llm):
    runner = ScriptedRunner(ServerOptions(keep_alive=0.02), llm)
    runner.script, runner.piece, runner.pause = "one two", 7, 0.2
    response = ask(runner, PATH, body(stream=True))
    assert 'event: ping\ndata: {"type": "ping"}\n\n' in response.text
    assert text_of(message_of(response)) == "one two"
    assert ": keep-alive\n\n" in ask(runner, CHAT, {"messages": [USER], "stream": True}).text


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_answer(llm, stream):
    async with served(llm) as (runner, client):
        with braked(llm.engine) as brake:
            asked = body(stream=stream, max_tokens=200, ignore_eos=True)
            task = asyncio.create_task(client.post(PATH, json=asked))
            await until(brake.waits.is_set)
            brake.release(4)
            await until(lambda: bool(runner.under_way))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for _ in range(100):  # the answer needs 200 steps
                brake.release(1)
                await asyncio.sleep(0.02)
                if idle(runner):
                    break
            assert idle(runner)


def test_many_blocks_are_read_in_time(runner):
    """Turns of the same role become one message, and a body may hold many."""
    block = '{"type":"text","text":""}'
    turn = f'{{"role":"user","content":[{",".join([block] * 60)}]}}'
    began = time.perf_counter()
    text = f'{{"max_tokens":1,"messages":[{",".join([turn] * 2000)}]}}'
    assert len(text) < 8_000_000
    response = ask_raw(runner, PATH, text)
    assert time.perf_counter() - began < 60
    anthropic_error(response, "invalid_request_error", "prompt is too long")


def test_deep_and_large_bodies_are_answered_in_time(runner, hermes):
    deep = "[" * 5000 + "]" * 5000
    calls = '{"type":"tool_use","id":"t","name":"f","input":{"x":%s}}'
    call_and_result = '{"role":"assistant","content":[%s]},{"role":"user","content":"x"}'
    asked = '{"max_tokens":1,"messages":[%s]}'
    began = time.perf_counter()
    refused = ask_raw(hermes, PATH, asked % (call_and_result % (calls % deep)))
    anthropic_error(refused, "invalid_request_error", "the body is not JSON")
    nested = "[" * 150 + "]" * 150
    good(ask_raw(hermes, PATH, asked % (call_and_result % (calls % nested))))
    assert f'f({{"x": {nested}}})' in hermes.llm.tokenizer.decode(hermes.jobs[0].prompt)
    large = json.dumps("x" * 5_000_000)
    result = '{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":%s}]}'
    for text in (result % large, call_and_result % (calls % large)):
        anthropic_error(ask_raw(runner, PATH, asked % text), "invalid_request_error", "prompt is")
    assert time.perf_counter() - began < 60


def test_other_endpoints_are_as_before(runner):
    """The header of Anthropic's clients alone makes no other answer of a chat."""
    asked = {"messages": [USER], "max_tokens": 4, "temperature": 0}
    (response,) = send(runner, ("POST", CHAT, {"json": asked, "headers": HEADERS}))
    assert good(response)["object"] == "chat.completion"
    assert len(chunks(ask(runner, CHAT, {**asked, "stream": True}))) > 1
