"""What coding agents and libraries of agents send: recorded requests, tools of every type, and what
an answer goes without."""

import json
from pathlib import Path

import pytest

from quickbeam import LLM
from quickbeam.config import ServerOptions
from quickbeam.serve.endpoints import ENDPOINTS
from serving import ScriptedRunner, ask, chunks, events, good, message_of, refused

CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = ENDPOINTS
HEADER = "x-quickbeam-ignored"
# shows what there is: tools' names, messages, calls with their arguments
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% if false %}"
    '<tool_call>"arguments"{% endif %}'
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}]{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
LINES = Path(__file__).with_name("agent_requests.jsonl").read_text().splitlines()
RECORDED = {line["agent"]: line for line in map(json.loads, LINES)}


@pytest.fixture(scope="module")
def llm(toy_folder):
    with LLM(toy_folder, "ar") as llm:
        llm.tokenizer.chat_template = TEMPLATE
        # answers are scripted: their model need not know the token
        llm.tokenizer.backend_tokenizer.add_tokens(["<tool_call>"])
        llm.room = lambda tokens, method=None: 2**20 - tokens
        yield llm


@pytest.fixture
def scripted(llm):
    return ScriptedRunner(ServerOptions(served_names=("m",)), llm)


def written(name, **arguments):
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt(runner, llm):
    return llm.tokenizer.decode(runner.jobs[0].prompt)


def answered(runner, path, body):
    """The calls of an answer, each as its API tells it."""
    if path == ANTHROPIC:
        response = ask(runner, path, body)
        message = message_of(response) if body.get("stream") else good(response)
        return [block for block in message["content"] if block["type"] == "tool_use"]
    if path == CHAT:
        if not body.get("stream"):
            return good(ask(runner, path, body))["choices"][0]["message"].get("tool_calls", [])
        parts = [part for one in chunks(ask(runner, path, body)) for part in one["choices"]]
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        return calls
    response = ask(runner, path, body)
    response = events(response)[-1]["response"] if body.get("stream") else good(response)
    return [item for item in response["output"] if item["type"] != "message"]


@pytest.mark.parametrize("agent", RECORDED)
def test_recorded_requests_are_answered(scripted, agent):
    """Each with a call of its first tool, and what is left out is named."""
    line = RECORDED[agent]
    path, body = line["path"], line["body"]
    first = body["tools"][0]
    name = first.get("name") or first["function"]["name"]
    scripted.script = written(name, x=3)
    (call,) = answered(scripted, path, body)
    function = call["function"] if path == CHAT else call
    arguments = function["input"] if path == ANTHROPIC else json.loads(function["arguments"])
    assert function["name"] == name and arguments == {"x": 3}
    scripted.script, scripted.piece = "Done.", 10
    response = ask(scripted, path, body)
    assert response.status_code == 200 and "Done." in response.text
    assert response.headers.get(HEADER) == line["ignored"]


CUSTOM = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
PATCH = '*** Begin "Patch"\n+é\n'


def nested(tool):
    """A tool as chats have it."""
    kind = tool["type"]
    return {"type": kind, kind: {name: tool[name] for name in tool if name != "type"}}


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_are_functions_of_one_text(scripted, llm, stream):
    scripted.script = f"So.{written('patch', input=PATCH)}"
    asked = {"tools": [nested(CUSTOM)], "stream": stream}
    (call,) = answered(scripted, CHAT, {"messages": MESSAGES, **asked})
    custom = {"name": "patch", "input": PATCH}
    assert call == {"id": call["id"], "type": "custom", "custom": custom}
    output = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked["messages"] = [*MESSAGES, said, output]
    answered(scripted, CHAT, asked)
    shown = f"patch [user: hi][assistant: patch({json.dumps({'input': PATCH})})][tool: ok]"
    assert json.loads(prompt(scripted, llm).split("patch(")[1].split(")]")[0]) == {"input": PATCH}
    assert prompt(scripted, llm).split("patch(")[0] == shown.split("patch(")[0]

    asked = {"tools": [CUSTOM], "stream": stream}
    (item,) = answered(scripted, RESPONSES, {"input": "hi", **asked})
    wanted = {"type": "custom_tool_call", "name": "patch", "input": PATCH, "status": "completed"}
    assert item == {**wanted, "id": item["id"], "call_id": item["call_id"]}
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    answered(scripted, RESPONSES, {"input": [*MESSAGES, item, output], **asked})
    assert prompt(scripted, llm).endswith("[tool: ok]")
    assert json.loads(prompt(scripted, llm).split("patch(")[1].split(")]")[0]) == {"input": PATCH}


def test_the_events_of_a_custom_call(scripted):
    scripted.script = written("patch", input=PATCH)
    asked = {"input": "hi", "tools": [CUSTOM], "stream": True}
    streamed = events(ask(scripted, RESPONSES, asked))
    kinds = [one["type"] for one in streamed]
    kind = "response.custom_tool_call_input"
    added = kinds.index("response.output_item.added")
    ends = [f"{kind}.delta", f"{kind}.done", "response.output_item.done", "response.completed"]
    assert kinds[added + 1 :] == ends
    assert streamed[added]["item"]["input"] == "" and streamed[added + 1]["delta"] == PATCH
    assert streamed[added + 2]["input"] == PATCH


def test_a_custom_tool_may_be_forced_and_gets_all_that_a_model_wrote(scripted):
    forced = {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "patch"}, "input": "hi"}
    scripted.script = written("patch", text="x")
    (item,) = answered(scripted, RESPONSES, forced)
    assert json.loads(item["input"]) == {"text": "x"}
    assert "input" in scripted.jobs[0].params.grammar.text
    choice = {"type": "custom", "custom": {"name": "patch"}}
    asked = {"messages": MESSAGES, "tools": [nested(CUSTOM)], "tool_choice": choice}
    assert answered(scripted, CHAT, asked)[0]["custom"]["name"] == "patch"


F, G = ({"type": "function", "name": name} for name in "fg")
SPACE = {"type": "namespace", "name": "mail", "description": "Mail.", "tools": [F, CUSTOM]}


@pytest.mark.parametrize("stream", [False, True])
def test_namespaces_hold_tools(scripted, llm, stream):
    asked = {"tools": [F, SPACE], "stream": stream, "input": "hi"}
    scripted.script = written("mail__f", x=1) + written("f") + written("mail__patch", input="x")
    items = answered(scripted, RESPONSES, asked)
    calls = [(item["type"], item["name"], item.get("namespace")) for item in items]
    named = [("function_call", "f", "mail"), ("function_call", "f", None)]
    assert calls == [*named, ("custom_tool_call", "patch", "mail")]
    outputs = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
        for item in items
    ]
    answered(scripted, RESPONSES, {**asked, "input": [*MESSAGES, *items, *outputs]})
    shown = prompt(scripted, llm)
    assert shown.startswith("f mail__f mail__patch ")
    assert 'mail__f({"x": 1})f({})mail__patch({"input": "x"})' in shown
    choice = {"type": "function", "name": "f", "namespace": "mail"}
    answered(scripted, RESPONSES, {**asked, "tool_choice": choice})
    assert "mail__f" in scripted.jobs[0].params.grammar.text
    assert "mail__patch" not in scripted.jobs[0].params.grammar.text


def test_a_response_repeats_the_tools_that_a_model_was_shown(scripted):
    space = {**SPACE, "tools": [*SPACE["tools"], {"type": "mcp"}]}
    asked = {"tools": [F, space, {"type": "web_search"}, CUSTOM], "input": "hi"}
    response = ask(scripted, RESPONSES, {**asked, "tool_choice": {"type": "function", "name": "f"}})
    assert good(response)["tools"] == [F, SPACE, CUSTOM]
    assert good(response)["tool_choice"] == {"type": "function", "name": "f"}
    assert response.headers[HEADER] == "tools[1].tools[2] (mcp), tools[2] (web_search)"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(scripted, llm, mode):
    flat = {"type": "allowed_tools", "mode": mode, "tools": [G]}
    chat = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [nested(G)]}}
    asked = [
        (
            RESPONSES,
            {"input": "hi", "tools": [F, G], "tool_choice": flat},
        ),
        (CHAT, {"messages": MESSAGES, "tools": [nested(F), nested(G)], "tool_choice": chat}),
    ]
    for path, body in asked:
        scripted.script = written("f") + written("g")
        assert "g" in str(answered(scripted, path, body)[-1])
        assert prompt(scripted, llm).startswith("g [")
        grammar = scripted.jobs[0].params.grammar
        assert (grammar is None) == (mode == "auto")
    others = [{"type": "web_search"}, {"type": []}, {"function": 3}, {"name": {}}]
    only = {"type": "allowed_tools", "mode": mode, "tools": others}
    response = ask(scripted, RESPONSES, {**asked[0][1], "tool_choice": only})
    if mode == "required":
        assert "no tools to choose from" in refused(response, "tool_choice")
    else:
        good(response)


HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["x"]},
    {"type": "image_generation"},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "x"},
    {"type": "tool_search", "execution": "client"},
    {"type": "one of tomorrow\r\nX: y"},
]


def test_tools_that_a_server_would_run_are_left_out(scripted, llm):
    response = ask(scripted, RESPONSES, {"input": "hi", "tools": [*HOSTED, F]})
    good(response)
    assert prompt(scripted, llm).startswith("f [")
    kinds = [one["type"].replace("\r\n", "??") for one in HOSTED]
    assert response.headers[HEADER] == ", ".join(f"tools[{i}] ({k})" for i, k in enumerate(kinds))
    response = ask(scripted, CHAT, {"messages": MESSAGES, "tools": HOSTED[:1]})
    good(response)
    assert prompt(scripted, llm).startswith("[user")
    assert response.headers[HEADER] == "tools[0] (web_search)"


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
PROMPTS = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}
LEFT_OUT = [  # fields of a request, and what is named
    (COMPLETIONS, {"service_tier": "flex"}, "service_tier"),
    (COMPLETIONS, {"service_tier": "flex", "stream": True}, "service_tier"),
    (CHAT, {"verbosity": "high"}, "verbosity"),
    (CHAT, {"verbosity": "medium"}, None),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"service_tier": "priority"}, "service_tier"),
    (CHAT, {"service_tier": "auto"}, None),
    (CHAT, {"moderation": {"model": "x"}}, "moderation"),
    (CHAT, {"prompt_cache_options": {"x": 1}, "prompt_cache_retention": "24h"}, None),
    (CHAT, {"client_metadata": {"x": "y"}, "safety_identifier": "x"}, None),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"truncation": "disabled", "max_tool_calls": 3, "prompt_cache_key": "x"}, None),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"summary": "auto", "context": "auto"}}, None),
    (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    (RESPONSES, {"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
    (RESPONSES, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"include": ["reasoning.encrypted_content"]}, None),
    (
        RESPONSES,
        {"include": ["file_search_call.results"]},
        "include[0] (file_search_call.results)",
    ),
    (RESPONSES, {"tools": [{**CUSTOM, "format": GRAMMAR}]}, "tools[0].format"),
    (
        RESPONSES,
        {"tools": [{**SPACE, "tools": [F, {**CUSTOM, "format": GRAMMAR}]}]},
        "tools[0].tools[1].format",
    ),
    (RESPONSES, {"tools": [{**F, "allowed_callers": ["direct"], "output_schema": {}}]}, None),
    (
        RESPONSES,
        {"tools": [{**SPACE, "tools": [{"type": "mcp"}, {**SPACE, "tools": []}]}]},
        "tools[0].tools[0] (mcp), tools[0].tools[1] (namespace)",
    ),
    (
        RESPONSES,
        {"tools": [{**F, "allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers",
    ),
    (RESPONSES, {"tools": [{**F, "defer_loading": True}]}, None),
]


@pytest.mark.parametrize(("path", "fields", "named"), LEFT_OUT)
def test_what_an_answer_goes_without_is_named(scripted, path, fields, named):
    response = ask(scripted, path, {**PROMPTS[path], **fields})
    assert response.status_code == 200, response.text
    assert response.headers.get(HEADER) == named


def test_instructions_and_what_a_developer_says_first_are_one_message(scripted, llm):
    developer = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    items = [
        {"role": "developer", "content": developer},
        {"role": "system", "content": "d"},
        *MESSAGES,
        {"role": "developer", "content": "e"},
    ]
    for instructions, begin in (("a", "a\n\n"), (None, "")):
        good(ask(scripted, RESPONSES, {"input": items, "instructions": instructions}))
        assert prompt(scripted, llm) == f"[system: {begin}b\nc\n\nd][user: hi][system: e]"


def test_items_of_what_other_servers_do_are_left_out(scripted, llm):
    items = [
        *MESSAGES,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "item_reference", "id": "rs_2"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"role": "assistant", "content": "yes"},
    ]
    response = ask(scripted, RESPONSES, {"input": items})
    good(response)
    assert prompt(scripted, llm) == "[user: hi][assistant: yes]"
    named = "input[1] (reasoning), input[2] (reasoning), input[3] (web_search_call)"
    assert response.headers[HEADER] == named
    reference = {"type": "item_reference", "id": "msg_1"}
    message = refused(ask(scripted, RESPONSES, {"input": [*MESSAGES, reference]}), "input[1]")
    assert "store: false" in message
