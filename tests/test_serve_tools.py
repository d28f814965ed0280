"""Tool calls: read from answers however they are cut into pieces, told in each API's form, forced
by a grammar, and refused where unknown.

pytest tests/test_serve_tools.py
"""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from quickbeam import LLM
from quickbeam.serve.messages import NamedTool, Tool
from quickbeam.serve.runner import Runner
from quickbeam.serve.settings import ServeSettings
from quickbeam.serve.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    forcing_grammar,
    strict_grammar,
    tool_format,
)
from quickbeam.serve.tools import Call, CallReader, calling
from serving import ScriptedRunner, ask, chunks, events, good, refused

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Add one.", "parameters": SCHEMA},
}
TOOL_F = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
TOOLS = [Tool.model_validate(TOOL), Tool.model_validate(OTHER)]
MESSAGES = [{"role": "user", "content": "What is f of 3?"}]
TEMPLATES = {
    "hermes": (
        HERMES,
        "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}\n'
        "{% endfor %}> ",
    ),
    "llama3": (
        LLAMA3,
        '{% for t in tools %}{{ t }}"parameters"{% endfor %}{% for m in messages '
        "%}<|start_header_id|>{{ m.content }}{% endfor %}",
    ),
    "mistral": (
        MISTRAL,
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}{% for m in messages %}{{ m.content "
        "}}{% endfor %}[TOOL_CALLS]",
    ),
}
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
SAID = {  # what models say, and what it means: texts, and calls with their arguments
    "hermes": (
        HERMES,
        f"Let me see.\n{HERMES_CALL}\n{HERMES_CALL} bye",
        ["Let me see.", ("f", {"x": 3}), ("f", {"x": 3}), " bye"],
    ),
    "hermes, no spaces": (
        HERMES,
        '<tool_call>{"name":"g","arguments":{}}</tool_call>',
        [("g", {})],
    ),
    "hermes, not closed": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}',
        [("f", {"x": 1})],
    ),
    "hermes, no call": (HERMES, "1 < 2 and <tool> is <tool_", ["1 < 2 and <tool> is <tool_"]),
    "hermes, cut short": (
        HERMES,
        'So: <tool_call>\n{"name": "f", "argu',
        ['So: <tool_call>\n{"name": "f", "argu'],
    ),
    "hermes, no JSON": (
        HERMES,
        "<tool_call>{x}</tool_call> sorry",
        ["<tool_call>{x}</tool_call> sorry"],
    ),
    "hermes, not an object": (HERMES, "<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
    "hermes, unknown tool": (
        HERMES,
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "h", "arguments": {}}</tool_call>'],
    ),
    "hermes, a bad one between": (
        HERMES,
        f"{HERMES_CALL}<tool_call>?</tool_call>{HERMES_CALL}",
        [("f", {"x": 3}), "<tool_call>?</tool_call>", ("f", {"x": 3})],
    ),
    "hermes, no number of JSON": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'],
    ),
    "hermes, too deep": (HERMES, "<tool_call>" + "[" * 9000, ["<tool_call>" + "[" * 9000]),
    "hermes, types are the model's": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"x": "3"}}</tool_call>',
        [("f", {"x": "3"})],
    ),
    "llama3": (LLAMA3, '{"name": "f", "parameters": {"x": 3}}', [("f", {"x": 3})]),
    "llama3, tagged": (
        LLAMA3,
        '<|python_tag|>{"name": "f", "parameters": {"x": 3}}',
        [("f", {"x": 3})],
    ),
    "llama3, JSON that is none": (LLAMA3, '{"answer": 4}', ['{"answer": 4}']),
    "llama3, later": (
        LLAMA3,
        'It is {"name": "f", "parameters": {"x": 3}}',
        ['It is {"name": "f", "parameters": {"x": 3}}'],
    ),
    "mistral": (
        MISTRAL,
        'Well[TOOL_CALLS] [{"name": "f", "arguments": {"x": 3}}, {"name": "g", "arguments": {}}]',
        ["Well", ("f", {"x": 3}), ("g", {})],
    ),
    "mistral, one unknown": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "h", "arguments": {}}]',
        ['[TOOL_CALLS] [{"name": "h", "arguments": {}}]'],
    ),
}


def read(form, text, size, several=True):
    """What a reader makes of a text that comes in pieces."""
    reader = CallReader(form, TOOLS, several)
    pieces = [
        piece for i in range(0, len(text), size) for piece in reader.feed(text[i : i + size])
    ] + reader.finish()
    found = []
    for piece in pieces:
        if isinstance(piece, Call):
            found.append((piece.name, json.loads(piece.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    assert bool(reader.found) == any(isinstance(one, tuple) for one in found)
    return found


@pytest.mark.parametrize("size", [1, 7, 10000])
@pytest.mark.parametrize("name", SAID)
def test_calls_are_told_from_text(name, size):
    form, text, wanted = SAID[name]
    assert read(form, text, size) == wanted


def test_text_comes_at_once_and_a_call_does_not():
    reader = CallReader(HERMES, TOOLS)
    assert reader.feed("Let me see <b") == ["Let me see <b"]
    assert reader.feed(" or <tool_call>{") == [" or"]
    assert reader.feed('"name": "g"}') == []
    assert [type(piece) for piece in reader.feed("</tool_call>")] == [Call]


@pytest.mark.parametrize("text", [" ", "\n", "<", "<tool_cal", "{", "} {", " " * 60 + "{"])
@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=["hermes", "llama3", "mistral"])
def test_long_answers_are_read_in_linear_time(form, text):
    """Whoever biases a model writes what they like: white space, say, before a call that never
    comes."""
    reader, text = CallReader(form, TOOLS), (text * 20_000)[:20_000]
    begun = time.thread_time()  # of the processor, so that busy neighbours don't matter
    pieces = [piece for i in range(0, len(text), 4) for piece in reader.feed(text[i : i + 4])]
    assert "".join([*pieces, *reader.finish()]) == text and time.thread_time() - begun < 5


def test_one_call_where_one_is_asked_for():
    assert read(HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", 5, several=False) == [("f", {"x": 3})]
    assert read(MISTRAL, SAID["mistral"][1], 5, several=False) == ["Well", ("f", {"x": 3})]


def test_a_tokenizers_own_template_comes_first():
    """As those that transformers defines: calls in tags, whose arguments get their types from the
    schemas."""
    field = {
        "open_pattern": r"<call=(?P<name>\w+)>",
        "close": "</call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    own = SimpleNamespace(
        get_chat_template=lambda **_: "{{ tools }}",
        response_template={"fields": {"tool_calls": field}},
        all_special_tokens=[],
    )
    form = tool_format(own)
    assert read(form, "so <call=f><x>3</x></call>", 4) == ["so ", ("f", {"x": 3})]
    with pytest.raises(ValueError, match="can't force"):
        forcing_grammar(form, TOOLS, True, own)


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_known_by_the_chat_template(name):
    form, template = TEMPLATES[name]
    assert tool_format(SimpleNamespace(get_chat_template=lambda **_: template)) is form


def test_templates_that_do_not_say_how_are_refused():
    with pytest.raises(ValueError, match="does not take tools"):
        tool_format(SimpleNamespace(get_chat_template=lambda **_: "{{ messages }}"))
    for template in (
        "{{ tools }}",
        "{{ tools }}<tool_call><function=",
        "{{ tools }}[TOOL_CALLS]name[ARGS]",
    ):
        with pytest.raises(ValueError, match="does not know how"):
            tool_format(SimpleNamespace(get_chat_template=lambda t=template, **_: t))


@pytest.fixture(scope="module")
def llm(toy_folder):
    with LLM(toy_folder, "pld") as found:
        found.tokenizer.chat_template = TEMPLATES["hermes"][1]
        yield found


@pytest.fixture(scope="module")
def scripted(llm):
    found = ScriptedRunner(ServeSettings(served_name="toy"), llm)
    yield found
    asyncio.run(found.close())


def body(**fields):
    return {"messages": MESSAGES, "tools": [TOOL, OTHER], "max_tokens": 100, **fields}


def test_calls_of_a_chat(scripted, llm):
    scripted.script, scripted.end = SAID["hermes"][1], "stop"
    found = good(ask(scripted, PATH, body()))["choices"][0]
    assert (
        found["finish_reason"] == "tool_calls" and found["message"]["content"] == "Let me see. bye"
    )
    calls = found["message"]["tool_calls"]
    assert [
        (call["type"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in calls
    ] == [("function", "f", {"x": 3})] * 2
    assert len({call["id"] for call in calls}) == 2
    shown = llm.tokenizer.decode(scripted.jobs[0].prompt)
    assert '"description": "Add one."' in shown and '"name": "g"' in shown and "strict" not in shown
    scripted.script = HERMES_CALL
    assert good(ask(scripted, PATH, body(tools=[TOOL])))["choices"][0]["message"]["content"] is None
    scripted.end = "length"
    assert good(ask(scripted, PATH, body()))["choices"][0]["finish_reason"] == "length"


def test_calls_of_a_streamed_chat(scripted):
    scripted.script, scripted.end = SAID["hermes"][1], "stop"
    found = [one["choices"][0] for one in chunks(ask(scripted, PATH, body(stream=True, n=2)))]
    for index in (0, 1):
        mine = [one for one in found if one["index"] == index]
        assert "".join(one["delta"].get("content") or "" for one in mine) == "Let me see. bye"
        calls = [call for one in mine for call in one["delta"].get("tool_calls", [])]
        assert [
            (call["index"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in calls
        ] == [(0, "f", {"x": 3}), (1, "f", {"x": 3})]
        assert mine[-1]["finish_reason"] == "tool_calls"


def test_a_conversation_goes_on_after_a_call(scripted, llm):
    scripted.script, scripted.end = HERMES_CALL, "stop"
    message = good(ask(scripted, PATH, body()))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    good(ask(scripted, PATH, body(messages=[*MESSAGES, message, result])))
    shown = llm.tokenizer.decode(scripted.jobs[0].prompt)
    assert 'assistant: <tool_call>{"name": "f", "arguments": {"x": 3}}</tool_call>tool: 4' in shown


def test_parallel_calls_may_be_turned_off(scripted):
    scripted.script, scripted.end = SAID["hermes"][1], "stop"
    assert (
        len(
            good(ask(scripted, PATH, body(parallel_tool_calls=False)))["choices"][0]["message"][
                "tool_calls"
            ]
        )
        == 1
    )


def test_tool_choice_none_hides_the_tools(scripted, llm):
    scripted.script, scripted.end = HERMES_CALL, "stop"
    found = good(ask(scripted, PATH, body(tool_choice="none")))["choices"][0]
    assert found["message"]["content"] == HERMES_CALL and "tool_calls" not in found["message"]
    assert "Add one" not in llm.tokenizer.decode(scripted.jobs[0].prompt)


def test_calls_of_a_response(scripted, llm):
    scripted.script, scripted.end = f"See. {HERMES_CALL}", "stop"
    flat = {
        "type": "function",
        "name": "f",
        "description": "Add one.",
        "parameters": SCHEMA,
        "strict": False,
    }
    asked = {"input": "What is f of 3?", "tools": [flat]}
    found = good(ask(scripted, "/v1/responses", asked))
    text, call = found["output"]
    assert text["content"][0]["text"] == "See." and call["type"] == "function_call"
    assert (
        call["name"] == "f"
        and json.loads(call["arguments"]) == {"x": 3}
        and call["status"] == "completed"
    )
    streamed = events(ask(scripted, "/v1/responses", {**asked, "stream": True}))
    done = next(one for one in streamed if one["type"] == "response.function_call_arguments.done")
    assert json.loads(done["arguments"]) == {"x": 3} and done["output_index"] == 1
    assert [one["type"] for one in streamed[-1]["response"]["output"]] == [
        "message",
        "function_call",
    ]
    history = [{"role": "user", "content": "What is f of 3?"}, *found["output"]]
    history.append({"type": "function_call_output", "call_id": call["call_id"], "output": "4"})
    good(ask(scripted, "/v1/responses", {**asked, "input": history}))
    shown = llm.tokenizer.decode(scripted.jobs[0].prompt)
    assert (
        'assistant: See.<tool_call>{"name": "f", "arguments": {"x": 3}}</tool_call>tool: 4'
    ) in shown


REFUSED = {
    "no tools": ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    "unknown choice": (
        {"tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice",
    ),
    "the same name": ({"tools": [TOOL, TOOL]}, "tools"),
    "a name with spaces": (
        {"tools": [{"type": "function", "function": {"name": "f g"}}]},
        "tools[0].function.name",
    ),
    "another type": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a grammar": ({"response_format": {"type": "json_object"}}, "response_format"),
    "strict": (
        {"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]},
        "tools[0].function.strict",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(scripted, name):
    fields, param = REFUSED[name]
    refused(ask(scripted, PATH, body(**fields)), param)


def test_the_embedded_template_takes_no_tools(scripted, llm):
    before, llm.tokenizer.chat_template = (
        llm.tokenizer.chat_template,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    try:
        assert "does not take tools" in refused(ask(scripted, PATH, body()), "tools")
    finally:
        llm.tokenizer.chat_template = before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_calls_are_forced_by_a_grammar(llm, choice, stream):
    pytest.importorskip("quickbeam.grammar")
    runner = Runner(ServeSettings(), llm)
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    limit = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["x"],
        "additionalProperties": False,
    }
    strict["function"]["parameters"] = limit
    fields = {
        "tools": [strict],
        "tool_choice": choice,
        "temperature": 0.8,
        "seed": 4,
        "max_tokens": 200,
        "parallel_tool_calls": False,
    }
    try:
        response = ask(runner, PATH, body(**fields, stream=stream))
        if stream:
            every = [one["choices"][0] for one in chunks(response)]
            calls, reason = (
                [call for one in every for call in one["delta"].get("tool_calls", [])],
                every[-1]["finish_reason"],
            )
        else:
            found = good(response)["choices"][0]
            calls, reason = found["message"]["tool_calls"], found["finish_reason"]
        assert reason == "tool_calls" and len(calls) == 1 and calls[0]["function"]["name"] == "f"
        assert 0 <= json.loads(calls[0]["function"]["arguments"])["x"] <= 99
    finally:
        asyncio.run(runner.close())


def matches(lark, tokenizer, text):
    """Whether a grammar allows a text, and as a whole."""
    import llguidance.hf

    matcher = llguidance.LLMatcher(
        llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer)), lark
    )
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(params=[False, True], ids=["letters", "tokens"])
def tokenizer(request, toy_folder):
    """With tokens of their own for what calls begin with, or without."""
    pytest.importorskip("llguidance")
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(toy_folder)
    found.add_tokens(["<tool_call>", "</tool_call>", "[TOOL_CALLS]"] if request.param else [])
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_forcing_grammars_allow_what_is_read_as_calls(name, tokenizer):
    """Of text that a grammar allows, the reader makes calls; added tokens stand in it as
    themselves."""
    form = TEMPLATES[name][0]
    writing = form.writing
    begin, middle, end = writing.parts
    call = f'{begin}f{middle}{{"x": 3}}{end}'
    one, two = (
        writing.before + between.join([call] * n) + writing.after
        for n, between in ((1, ""), (2, writing.between or ""))
    )
    several = writing.between is not None
    assert matches(forcing_grammar(form, TOOLS, True, tokenizer), tokenizer, one)
    assert matches(forcing_grammar(form, TOOLS, True, tokenizer), tokenizer, two) == several
    assert not matches(forcing_grammar(form, TOOLS, False, tokenizer), tokenizer, two)
    assert not matches(
        forcing_grammar(form, TOOLS, True, tokenizer), tokenizer, one.replace("3", '"3"')
    )
    assert not matches(forcing_grammar(form, TOOLS[1:], True, tokenizer), tokenizer, one)
    assert read(form, one, 5) == [("f", {"x": 3})] and (not several or len(read(form, two, 5)) == 2)


@pytest.mark.parametrize("choice", ["required", TOOL_F])
def test_forced_calls_are_one_unless_several_are_asked_for(tokenizer, choice):
    """A weak model goes on calling for as long as a grammar lets it."""
    tokenizer.chat_template = TEMPLATES["hermes"][1]
    choice = choice if choice == "required" else NamedTool.model_validate(choice)
    two = f"{HERMES_CALL}\n{HERMES_CALL}"
    for asked in (None, False, True):
        lark = calling(TOOLS, choice, asked, tokenizer).grammar.text
        assert matches(lark, tokenizer, HERMES_CALL)
        assert matches(lark, tokenizer, two) == (asked is True and choice == "required")


@pytest.mark.parametrize("name", TEMPLATES)
def test_strict_grammars_allow_text_and_hold_calls_to_schemas(name, tokenizer):
    form, text, _ = SAID[name]
    strict = [TOOLS[0].model_copy(deep=True), TOOLS[1]]
    strict[0].function.strict = True
    lark = strict_grammar(form, strict, True, tokenizer)
    if name == "llama3" or "<tool_call>" not in tokenizer.get_added_vocab():
        assert lark is None
        return
    assert (
        matches(lark, tokenizer, text)
        and matches(lark, tokenizer, "Just text, {1} or <tool_c")
        and matches(lark, tokenizer, "")
    )
    assert not matches(lark, tokenizer, text.replace('"x": 3', '"x": "3"'))
    # which is not strict
    assert matches(lark, tokenizer, text.replace('"f"', '"g"').replace('"x": 3', '"y": "3"'))
    assert not matches(strict_grammar(form, strict, False, tokenizer), tokenizer, text)
