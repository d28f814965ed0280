"""Tool calls: read from answers however they are cut into pieces, told in each API's form, forced
by a grammar, and refused where unknown."""

import itertools
import json
import sys
import threading
from types import SimpleNamespace

import pytest

from cases import refuses
from quickbeam import LLM, InvalidInput
from quickbeam.serve import tools as calling
from quickbeam.serve.app import IGNORED, ignored_header
from quickbeam.serve.messages import ChatRequest, Tool
from quickbeam.serve.tools import HERMES, LLAMA3, MISTRAL, forcing_grammar, strict_grammar
from serving import ask, chunks, events, good, refused

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
SCHEMA["additionalProperties"] = False
ADD = {"name": "f", "description": "Add one.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": ADD}
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
BAD = "<tool_call>?</tool_call>"
F, G = ("f", {"x": 3}), ("g", {})
UNREAD = {  # what is no call: it stays text
    "no call": (HERMES, "1 < 2 and <tool> is <tool_"),
    "cut short": (HERMES, 'So: <tool_call>\n{"name": "f", "argu'),
    "no JSON": (HERMES, "<tool_call>{x}</tool_call> sorry"),
    "not an object": (HERMES, "<tool_call>[1]</tool_call>"),
    "an unknown tool": (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call>'),
    "infinity": (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
    "too deep": (HERMES, "<tool_call>" + "[" * 9000),
    "spaces": (HERMES, " " * 200),
    "JSON of an answer": (LLAMA3, '{"answer": 4}'),
    "later": (LLAMA3, 'It is {"name": "f", "parameters": {"x": 3}}'),
    "one unknown": (MISTRAL, '[TOOL_CALLS] [{"name": "h", "arguments": {}}]'),
}
ANSWERS = {  # what models say, and what it means: texts, and calls with their arguments
    "hermes": (
        HERMES, f"Let me see.\n{HERMES_CALL}\n{HERMES_CALL} bye", ["Let me see.", F, F, " bye"]
    ),
    "no spaces": (HERMES, '<tool_call>{"name":"g","arguments":{}}</tool_call>', [G]),
    "not closed": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 3}}', [F]),
    "a bad one between": (HERMES, f"{HERMES_CALL}{BAD}{HERMES_CALL}", [F, BAD, F]),
    "types are the model's": (HERMES, HERMES_CALL.replace("3", '"3"'), [("f", {"x": "3"})]),
    "llama3": (LLAMA3, '{"name": "f", "parameters": {"x": 3}}', [F]),
    "tagged": (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"x": 3}}', [F]),
    "mistral": (
        MISTRAL,
        'Well[TOOL_CALLS] [{"name": "f", "arguments": {"x": 3}}, {"name": "g", "arguments": {}}]',
        ["Well", F, G],
    ),
    **{name: (form, text, [text]) for name, (form, text) in UNREAD.items()},
}  # fmt: skip


def read(form, text, size, several=True):
    reader = calling.ToolCallParser(form, TOOLS, several)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    pieces = []
    for piece in itertools.chain(*map(reader.feed, parts), reader.finish()):
        if isinstance(piece, calling.ParsedCall):
            pieces.append((piece.name, json.loads(piece.arguments)))
        elif pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    assert bool(reader.count) == any(isinstance(one, tuple) for one in pieces)
    return pieces


@pytest.mark.parametrize("size", [1, 7, 10000])
@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_told_from_text(name, size):
    form, text, wanted = ANSWERS[name]
    assert read(form, text, size) == wanted


def test_one_call_where_one_is_asked_for():
    assert read(HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", 5, several=False) == [("f", {"x": 3})]
    assert read(MISTRAL, ANSWERS["mistral"][1], 5, several=False) == ["Well", ("f", {"x": 3})]


def test_a_tokenizers_own_template_comes_first():
    field = {"open_pattern": r"<call=(?P<name>\w+)>", "close": "</call>", "repeats": True}
    field |= {"content": "xml-inline"}
    field |= {"content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"}}
    called = {"name": "{name}", "arguments": "{content}"}
    field |= {"transform": {"type": "function", "function": called}}
    own = SimpleNamespace(
        get_chat_template=lambda **_: "{{ tools }}",
        response_template={"fields": {"tool_calls": field}},
        all_special_tokens=[],
    )
    form = calling.tool_format(own)
    assert read(form, "so <call=f><x>3</x></call>", 4) == ["so ", ("f", {"x": 3})]
    refuses("can't force", forcing_grammar, form, TOOLS, True, own, error=ValueError)


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_known_by_the_chat_template(name):
    form, template = TEMPLATES[name]
    assert calling.tool_format(SimpleNamespace(get_chat_template=lambda **_: template)) is form


def test_templates_that_do_not_say_how_are_refused():
    with pytest.raises(ValueError, match="does not take tools"):
        calling.tool_format(SimpleNamespace(get_chat_template=lambda **_: "{{ messages }}"))
    for marks in ("", "<tool_call><function=", "[TOOL_CALLS]name[ARGS]"):
        template = "{{ tools }}" + marks
        with pytest.raises(ValueError, match="does not know how"):
            calling.tool_format(SimpleNamespace(get_chat_template=lambda t=template, **_: t))


@pytest.fixture(scope="module")
def llm(toy_folder):
    with LLM(toy_folder, "pld") as llm:
        llm.tokenizer.chat_template = TEMPLATES["hermes"][1]
        yield llm


def body(**fields):
    return {"messages": MESSAGES, "tools": [TOOL, OTHER], "max_tokens": 100, **fields}


def choice(runner, **fields):
    return good(ask(runner, PATH, body(**fields)))["choices"][0]


def calls_of(message):
    calls = message["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls)
    assert {call["type"] for call in calls} == {"function"}
    called = [call["function"] for call in calls]
    return [(one["name"], json.loads(one["arguments"])) for one in called]


def test_calls_of_a_chat(scripted, llm):
    scripted.script = ANSWERS["hermes"][1]
    answer = choice(scripted)
    assert answer["finish_reason"] == "tool_calls"
    message = answer["message"]
    assert message["content"] == "Let me see. bye" and calls_of(message) == [F, F]
    shown = llm.tokenizer.decode(scripted.jobs[0].prompt)
    assert '"description": "Add one."' in shown and '"name": "g"' in shown and "strict" not in shown
    assert calls_of(choice(scripted, parallel_tool_calls=False)["message"]) == [F]
    scripted.script = HERMES_CALL
    assert choice(scripted, tools=[TOOL])["message"]["content"] is None
    scripted.end = "length"
    assert choice(scripted)["finish_reason"] == "length"


def test_what_reads_calls_is_imported_beside_other_requests(scripted, monkeypatch):
    name, threads = "transformers.utils.chat_parsing", list[threading.Thread]()

    def find_spec(module, *_):
        if module == name:
            threads.append(threading.current_thread())

    monkeypatch.delitem(sys.modules, name, raising=False)
    finders = [SimpleNamespace(find_spec=find_spec), *sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", finders)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        good(ask(scripted, PATH, {"messages": MESSAGES, **fields}))
    assert not threads
    choice(scripted)
    assert threads and threading.main_thread() not in threads


def test_calls_of_a_streamed_chat(scripted):
    scripted.script = UNREAD["cut short"][1]  # no call, which is streamed to its end
    parts = [one["choices"][0] for one in chunks(ask(scripted, PATH, body(stream=True)))]
    assert "".join(one["delta"].get("content") or "" for one in parts) == scripted.script
    scripted.script = ANSWERS["hermes"][1]
    parts = [one["choices"][0] for one in chunks(ask(scripted, PATH, body(stream=True, n=2)))]
    for index in (0, 1):
        mine = [one for one in parts if one["index"] == index]
        assert "".join(one["delta"].get("content") or "" for one in mine) == "Let me see. bye"
        calls = [call for one in mine for call in one["delta"].get("tool_calls", [])]
        assert calls_of({"tool_calls": calls}) == [F, F]
        assert [call["index"] for call in calls] == [0, 1]
        assert mine[-1]["finish_reason"] == "tool_calls"


def test_a_conversation_goes_on_after_a_call_and_tools_may_be_hidden(scripted, llm):
    scripted.script = HERMES_CALL
    message = choice(scripted)["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    choice(scripted, messages=[*MESSAGES, message, result])
    shown = llm.tokenizer.decode(scripted.jobs[0].prompt)
    assert 'assistant: <tool_call>{"name": "f", "arguments": {"x": 3}}</tool_call>tool: 4' in shown
    scripted.script = HERMES_CALL
    message = choice(scripted, tool_choice="none")["message"]
    assert message["content"] == HERMES_CALL and "tool_calls" not in message
    assert "Add one" not in llm.tokenizer.decode(scripted.jobs[0].prompt)


def test_calls_of_a_response(scripted, llm):
    scripted.script = f"See. {HERMES_CALL}"
    flat = {"type": "function", **TOOL["function"], "strict": False}
    asked = {"input": "What is f of 3?", "tools": [flat]}
    output = good(ask(scripted, "/v1/responses", asked))["output"]
    text, call = output
    assert text["content"][0]["text"] == "See." and call["type"] == "function_call"
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == (*F, "completed")
    streamed = events(ask(scripted, "/v1/responses", {**asked, "stream": True}))
    done = next(one for one in streamed if one["type"] == "response.function_call_arguments.done")
    assert json.loads(done["arguments"]) == {"x": 3} and done["output_index"] == 1
    kinds = [one["type"] for one in streamed[-1]["response"]["output"]]
    assert kinds == ["message", "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    history = [{"role": "user", "content": "What is f of 3?"}, *output, result]
    good(ask(scripted, "/v1/responses", {**asked, "input": history}))
    assert (
        'assistant: See.<tool_call>{"name": "f", "arguments": {"x": 3}}</tool_call>tool: 4'
    ) in llm.tokenizer.decode(scripted.jobs[0].prompt)


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
REFUSED = [  # fields, and the one that the error names
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]


def test_what_is_not_served_is_refused_by_name(scripted, llm, monkeypatch):
    for fields, param in REFUSED:
        refused(ask(scripted, PATH, body(**fields)), param)
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages }}")
    assert "does not take tools" in refused(ask(scripted, PATH, body()), "tools")


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_held_to_a_schema_is_said_in_a_header(scripted, stream, caplog):
    tools = [TOOL_F, {"type": "function", "function": {"name": "g", "strict": True}}]
    for _ in "12":
        response = ask(scripted, PATH, body(tools=tools, stream=stream))
        assert response.status_code == 200
        assert response.headers["x-quickbeam-ignored"] == "tools[1].function.strict"
    lines = [one.getMessage() for one in caplog.records]
    assert sum("tools[1].function.strict" in line for line in lines) == 1
    response = ask(scripted, PATH, body(tools=tools, stream=stream, tool_choice="required"))
    assert response.status_code == 200 and "x-quickbeam-ignored" not in response.headers


UNIQUE = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}
TAGS = {"type": "object", "properties": {"tags": UNIQUE}}


def test_a_tool_names_what_its_calls_are_not_held_to_or_is_refused_if_strict(scripted):
    place, words = "tools[1].function.parameters", "uniqueItems at #/properties/tags"
    tools = [TOOL, {"type": "function", "function": {"name": "g", "parameters": TAGS}}]
    response = ask(scripted, PATH, body(tools=tools, tool_choice="required"))
    assert response.headers["x-quickbeam-ignored"] == f"{place} ({words})"
    assert "x-quickbeam-ignored" not in ask(scripted, PATH, body(tools=tools)).headers
    tools[1] = {"type": "function", "function": {**tools[1]["function"], "strict": True}}
    message = refused(ask(scripted, PATH, body(tools=tools, tool_choice="required")), place)
    assert f"(g): {words}" in message


def test_an_error_in_a_tools_schema_names_the_tool_and_quotes_no_grammar_of_ours(runner):
    wrong = {"type": "object", "properties": {"a": {"type": "strnig"}}}
    tools = [TOOL, {"type": "function", "function": {"name": "g", "parameters": wrong}}]
    response = ask(runner, PATH, body(tools=tools, tool_choice="required"))
    message = refused(response, "tools[1].function.parameters")
    assert "(g): json_schema: Invalid type: strnig" in message
    assert "lark" not in message and "arguments1" not in message


def test_an_error_of_all_tools_together_quotes_no_grammar_of_ours(scripted, monkeypatch):
    async def compile_grammar(grammar, ticket):
        if grammar.kind == "lark":
            raise InvalidInput("lark: at 3(1): too large\n  3 | arguments1: ...")

    monkeypatch.setattr(scripted, "compile_grammar", compile_grammar)
    message = refused(ask(scripted, PATH, body(tool_choice="required")), "tools")
    assert message == "tools: no grammar of calls of all of them: at 3(1): too large"


def test_the_header_of_what_is_left_out_is_short_plain_text():
    request = ChatRequest.model_validate({"messages": MESSAGES})
    assert ignored_header(request) == {}
    request.ignore("a")
    request.ignore("a")
    request.ignore("b, c\r\nSet-Cookie: \xe9\x7f")
    assert ignored_header(request) == {IGNORED: "a, b? c??Set-Cookie: ??"}
    request.ignore("x" * 5000)
    value = ignored_header(request)[IGNORED]
    assert len(value) == 1000 and value.endswith("x...")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ["required", TOOL_F])
def test_calls_are_forced_by_a_grammar(runner, asked, stream):
    limit = {**SCHEMA, "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}}}
    strict = {"type": "function", "function": {**STRICT["function"], "parameters": limit}}
    fields = dict(tools=[strict], tool_choice=asked, temperature=0.8, seed=4, max_tokens=200)
    if stream:
        parts = chunks(ask(runner, PATH, body(**fields, stream=True)))
        every = [one["choices"][0] for one in parts]
        calls = [call for one in every for call in one["delta"].get("tool_calls", [])]
        message, reason = {"tool_calls": calls}, every[-1]["finish_reason"]
    else:
        answer = choice(runner, **fields)
        message, reason = answer["message"], answer["finish_reason"]
    ((name, arguments),) = calls_of(message)
    assert reason == "tool_calls" and name == "f" and 0 <= arguments["x"] <= 99


def matches(lark, tokenizer, text):
    import llguidance.hf

    known = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    matcher = llguidance.LLMatcher(known, lark)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(params=[False, True], ids=["letters", "tokens"])
def tokenizer(request, toy_folder):
    """With tokens of their own for what calls begin with, or without."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "[TOOL_CALLS]"] if request.param else [])
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_forcing_grammars_allow_what_is_read_as_calls(name, tokenizer):
    form = TEMPLATES[name][0]
    syntax = form.syntax
    begin, middle, end = syntax.parts
    call = f'{begin}f{middle}{{"x": 3}}{end}'
    several = syntax.between is not None
    one = f"{syntax.before}{call}{syntax.after}"
    two = f"{syntax.before}{call}{syntax.between or ''}{call}{syntax.after}"

    def allows(tools, more, text):
        return matches(forcing_grammar(form, tools, more, tokenizer), tokenizer, text)

    assert allows(TOOLS, True, one) and allows(TOOLS, True, two) == several
    assert not allows(TOOLS, False, two) and not allows(TOOLS[1:], True, one)
    assert not allows(TOOLS, True, one.replace("3", '"3"'))
    assert read(form, one, 5) == [("f", {"x": 3})] and (not several or len(read(form, two, 5)) == 2)


@pytest.mark.parametrize("name", TEMPLATES)
def test_strict_grammars_allow_text_and_hold_calls_to_schemas(name, tokenizer):
    form, text, _ = ANSWERS[name]
    strict = [TOOLS[0].model_copy(deep=True), TOOLS[1]]
    strict[0].function.strict = True
    lark = strict_grammar(form, strict, True, tokenizer)
    if name == "llama3" or "<tool_call>" not in tokenizer.get_added_vocab():
        assert lark is None
        return
    for allowed in (text, "Just text, {1} or <tool_c", ""):
        assert matches(lark, tokenizer, allowed)
    assert not matches(lark, tokenizer, text.replace('"x": 3', '"x": "3"'))
    # which is not strict
    assert matches(lark, tokenizer, text.replace('"f"', '"g"').replace('"x": 3', '"y": "3"'))
    assert not matches(strict_grammar(form, strict, False, tokenizer), tokenizer, text)
