"""Tool calls: read from answers however they are cut into pieces, told in each API's form, forced
by a grammar, and refused where unknown."""

import itertools
import json
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from cases import examples, refuses
from quickbeam import LLM, InvalidInput
from quickbeam.grammar.spec import Grammar
from quickbeam.serve import tools as calling
from quickbeam.serve.calls import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    JsonCalls,
    ParsedCall,
    PossibleCall,
    ToolCallParser,
)
from quickbeam.serve.endpoints import IGNORED, ignored_header
from quickbeam.serve.messages import ChatRequest
from quickbeam.serve.tool_fields import Tool
from quickbeam.serve.tools import answer_grammar, forcing_grammar, strict_grammar
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
    "mistral with names": (
        MISTRAL_NAMED,
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}{% for m in messages %}{{ m.content "
        "}}{% endfor %}[TOOL_CALLS]name[ARGS]",
    ),
}
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
BAD = "<tool_call>?</tool_call>"
LLAMA_CALL = '{"name": "f", "parameters": {"x": 3}}'
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
    "an unknown name": (MISTRAL, '[TOOL_CALLS]h[ARGS]{"x": 3}'),
    "a name alone": (MISTRAL, "[TOOL_CALLS]f[ARGS] is how to call f"),
    "many openings": (HERMES, "<tool_call>" * 99),
    "names of other keys": (HERMES, '<tool_call>{"name": "f", "args": {"x": 3}}</tool_call>'),
    "arguments that are no JSON": (HERMES, '<tool_call>{"name": "f", "arguments": "x=3"}'),
    "arguments of two kinds": (HERMES, '<tool_call>[{"name": "f", "arguments": {}}, 3]'),
    "a name that is none": (HERMES, '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
    "a thought's draft": (HERMES, f"<think>Or {HERMES_CALL}?\n{HERMES_CALL}</think>No."),
    "drafts of two thoughts": (HERMES, f"<think>{HERMES_CALL}</think><think>{HERMES_CALL}</think>"),
    "a thought of Mistral's": (MISTRAL, "[THINK][TOOL_CALLS]f{}[/THINK] no"),
    "a draft that breaks off": (HERMES, '<think><tool_call>{"name": "f</think>It is "4".'),
    "a semicolon before": (LLAMA3, f"; {LLAMA_CALL}"),
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
    "mistral with names": (
        MISTRAL_NAMED,
        'Well[TOOL_CALLS]f[ARGS]{"x": 3}[TOOL_CALLS]g[ARGS]{}', ["Well", F, G],
    ),
    "mistral without a list": (MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {"x": 3}}', [F]),
    "mistral with a name": (MISTRAL, 'So [TOOL_CALLS]f{"x": 3} done', ["So", F, " done"]),
    "mistral with ids": (MISTRAL, '[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{"x": 3}', [F]),
    "a closing mark in a string": (
        HERMES, HERMES_CALL.replace("3", '"</tool_call><tool_call>"') + "bye",
        [("f", {"x": "</tool_call><tool_call>"}), "bye"],
    ),
    "parameters": (HERMES, HERMES_CALL.replace("arguments", "parameters"), [F]),
    "arguments as a string": (HERMES, HERMES_CALL.replace('{"x": 3}', r'"{\"x\": 3}"'), [F]),
    "no arguments as a string": (HERMES, HERMES_CALL.replace('{"x": 3}', '""'), [("f", {})]),
    "a line break in a string": (
        HERMES, HERMES_CALL.replace("3", '"a\nb"'), [("f", {"x": "a\nb"})]
    ),
    "marks twice": (HERMES, f"<tool_call>\n{HERMES_CALL}\n</tool_call>\n", [F]),
    "a list of calls": (
        HERMES, '<tool_call>[{"name": "f", "arguments": {"x": 3}}]</tool_call>', [F]
    ),
    "text behind, not closed": (HERMES, f"{HERMES_CALL[:-13]} bye", [F, " bye"]),
    "an opening that is none": (HERMES, f"<tool_call>, {HERMES_CALL}", ["<tool_call>,", F]),
    "a call in a string": (
        HERMES, f'<tool_call>{{"name": "f {HERMES_CALL}', ['<tool_call>{"name": "f', F],
    ),
    "llama3 with arguments": (LLAMA3, LLAMA_CALL.replace("parameters", "arguments"), [F]),
    "llama3 joined": (LLAMA3, f"{LLAMA_CALL}; {LLAMA_CALL};<|python_tag|>{LLAMA_CALL}", [F, F, F]),
    "llama3 on two lines": (LLAMA3, f"{LLAMA_CALL}\n{LLAMA_CALL}\n", [F, F]),
    "text behind": (LLAMA3, f"{LLAMA_CALL} is it; {LLAMA_CALL}", [F, f" is it; {LLAMA_CALL}"]),
    "tagged later": (LLAMA3, f"Well. <|python_tag|>{LLAMA_CALL}", ["Well.", F]),
    "an answer behind": (LLAMA3, f'{LLAMA_CALL}; {{"x": 3}}', [F, '; {"x": 3}']),
    "a call behind a thought": (
        HERMES, f"<think>Or {HERMES_CALL}?</think>Yes {HERMES_CALL}",
        [f"<think>Or {HERMES_CALL}?</think>Yes", F],
    ),
    "llama3 behind a thought": (
        LLAMA3, f"<think>{LLAMA_CALL}</think> {LLAMA_CALL}", [f"<think>{LLAMA_CALL}</think>", F]
    ),
    "a thought that never closes": (
        HERMES, f"<think>Or {HERMES_CALL} hm {HERMES_CALL}", ["<think>Or", F, " hm", F]
    ),
    "thoughts in a string": (
        HERMES, HERMES_CALL.replace("3", '"<think></think>"') + "</think>",
        [("f", {"x": "<think></think>"}), "</think>"],
    ),
    "the end of a thought in a string": (
        HERMES, "<think>" + HERMES_CALL.replace("3", '"</think>"'),
        ["<think>", ("f", {"x": "</think>"})],
    ),
    **{name: (form, text, [text]) for name, (form, text) in UNREAD.items()},
}  # fmt: skip


def read(form, text, size, several=True, **more):
    return read_parts(
        form, [text[i : i + size] for i in range(0, len(text), size)], several, **more
    )


def read_parts(form, parts, several=True, **more):
    reader = ToolCallParser(form, TOOLS, several, **more)
    pieces = []
    for piece in itertools.chain(*map(reader.feed, parts), reader.finish()):
        if isinstance(piece, ParsedCall):
            pieces.append((piece.name, json.loads(piece.arguments)))
        elif pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    assert bool(reader.count) == any(isinstance(one, tuple) for one in pieces)
    return pieces


@pytest.mark.parametrize("size", [1, 3, 7, 10000])
@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_told_from_text(name, size):
    form, text, wanted = ANSWERS[name]
    assert read(form, text, size) == wanted


FRAGMENTS = [
    *("a", " ", "\n", "<", "</", "{", "}", "[", "]", '"', "\\", ",", ";", ": ", "3", "f", "é"),
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", '{"name": "', '"arguments": {"x": "', HERMES_CALL, LLAMA_CALL),
]
FORMS = [HERMES, LLAMA3, MISTRAL]
CASES = st.tuples(
    st.sampled_from([(form, text) for form, text, _ in ANSWERS.values() if len(text) < 300])
    | st.tuples(
        st.sampled_from(FORMS),
        st.lists(st.sampled_from(FRAGMENTS), max_size=15).map("".join),
    ),
    st.lists(st.integers(0, 400), max_size=20)
    | st.integers(1, 7).map(lambda size: range(size, 2000, size)),
    st.booleans(),
)


def is_read_alike(case):
    """Whether a text is read alike whole and cut into parts, and no character is lost."""
    (form, text), cuts, thinking = case
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[begin:end] for begin, end in itertools.pairwise(places)]
    reader = JsonCalls(form, TOOLS)
    pieces = [*itertools.chain.from_iterable(map(reader.read, [*parts, None]))]
    given = "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)
    whole = read_parts(form, [text], thinking=thinking)
    return given == text and read_parts(form, parts, thinking=thinking) == whole


@examples(500)
@given(CASES)
def test_any_text_is_read_alike_in_parts(case):
    assert is_read_alike(case)


def holds_nothing(self, text, at):
    return len(text)


def forgets_escapes(self, text, at=0, read=PossibleCall.read):
    self._escaped = False
    read(self, text, at)


def forgets_half_marks(self, text, closes=ToolCallParser._closes_thought):
    self._tail = ""
    return closes(self, text)


WRONG = [
    (JsonCalls, "_held_from", holds_nothing),
    (PossibleCall, "read", forgets_escapes),
    (ToolCallParser, "_closes_thought", forgets_half_marks),
]


@pytest.mark.parametrize(("owner", "name", "wrong"), WRONG)
def test_wrong_readers_read_parts_otherwise(monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    once = settings(max_examples=5000, phases=[Phase.generate], database=None, derandomize=True)
    find(CASES, lambda case: not is_read_alike(case), settings=once)  # raises if there is none


HOSTILE = [
    *("<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{\\"', '<tool_call>{":"', "<"),
    *(
        '<tool_call>{"a',
        '{"name": "h"}',
        "{",
        "[",
        '"',
        "\\",
        " ",
        "<think>",
        "</think>",
        HERMES_CALL,
    ),
    *('<tool_call>{"name": "h", "arguments": {}}', '{"a":', "<tool_call>f", '{"name":', ";"),
    *(
        f"<think>{HERMES_CALL}</think>",
        f"{LLAMA_CALL};",
        "[TOOL_CALLS][",
        '[TOOL_CALLS]f{"',
        "f[ARGS]",
    ),
]


@pytest.mark.parametrize("form", FORMS)
def test_reading_takes_time_in_proportion_to_the_text(form, monkeypatch):
    scanned = 0

    def counted(self, text, at=0, read=PossibleCall.read):
        nonlocal scanned
        begin = self.end
        read(self, text, at)
        scanned += self.end - begin

    monkeypatch.setattr(PossibleCall, "read", counted)
    for first, repeated in itertools.product(("", '<tool_call>{"'), HOSTILE):
        unit = repeated.replace("<tool_call>", form.marker)
        text = first.replace("<tool_call>", form.marker) + unit * (20_000 // len(unit))
        scanned = 0
        for size in (999, len(text)):
            read(form, text, size)
        assert scanned <= 4 * len(text)


def test_one_call_where_one_is_asked_for():
    assert read(HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", 5, several=False) == [("f", {"x": 3})]
    assert read(MISTRAL, ANSWERS["mistral"][1], 5, several=False) == ["Well", ("f", {"x": 3})]


def test_an_answer_that_is_calls_or_text_holds_no_call_in_its_text():
    text = '{"x": "[TOOL_CALLS]f{}"}'
    for form in (MISTRAL, HERMES, LLAMA3):
        answer = text.replace("[TOOL_CALLS]", form.marker)
        assert read(form, answer, 5) != [answer] == read(form, answer, 5, either=True)
    assert read(HERMES, f" {HERMES_CALL}\n{HERMES_CALL}", 5, either=True) == [F, F]


def test_text_is_held_back_only_where_a_call_may_begin():
    def given(form, text):
        return "".join(ToolCallParser(form, TOOLS).feed(text))

    for form in FORMS:
        text = f"It is <b>1</b>, {form.marker}x, {{ [1]"
        assert given(form, text) == text
        assert given(form, f"{text} \n{form.marker}") == text
        assert given(form, f"{text} {form.marker[:3]}") == text
        assert given(form, f"<think>{text}") == f"<think>{text}"
    assert given(LLAMA3, '{"names": ["') == '{"names": ["'
    assert given(LLAMA3, '{"name": "f", ["') == ""


@pytest.mark.parametrize("size", [1, 7, 10000])
def test_a_prompt_may_open_a_thought(size):
    text = f"Or {HERMES_CALL}?</think>Yes {HERMES_CALL}"
    assert read(HERMES, text, size, thinking=True) == [f"Or {HERMES_CALL}?</think>Yes", F]
    assert read(HERMES, f"Or {HERMES_CALL}?", size, thinking=True) == ["Or", F, "?"]


OWN_FIELD = {"open_pattern": r"<call=(?P<name>\w+)>", "close": "</call>", "repeats": True}
OWN_FIELD |= {"content": "xml-inline"}
OWN_FIELD |= {"content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"}}
OWN_FIELD |= {
    "transform": {
        "type": "function",
        "function": {"name": "{name}", "arguments": "{content}"},
    }
}
OWN_TEMPLATE = {"fields": {"tool_calls": OWN_FIELD}}


def test_a_tokenizers_own_template_comes_first():
    own = SimpleNamespace(
        get_chat_template=lambda **_: "{{ tools }}",
        response_template=OWN_TEMPLATE,
        all_special_tokens=[],
    )
    form = calling.tool_format(own)
    call = "<call=f><x>3</x></call>"
    assert read(form, f"so {call}", 4) == ["so ", F]
    assert read(form, f"<think>{call}</think>so {call}", 4) == [f"<think>{call}</think>so ", F]
    refuses("can't force", forcing_grammar, form, TOOLS, True, own, error=ValueError)
    asked = {"messages": MESSAGES, "tools": [TOOL, OTHER], "response_format": FORMAT}
    request = ChatRequest.model_validate(asked)
    refuses("can't write a grammar", calling.tool_use, request, own, error=ValueError)


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_known_by_the_chat_template(name):
    form, template = TEMPLATES[name]
    assert calling.tool_format(SimpleNamespace(get_chat_template=lambda **_: template)) is form


def test_templates_that_do_not_say_how_are_refused():
    with pytest.raises(ValueError, match="does not take tools"):
        calling.tool_format(SimpleNamespace(get_chat_template=lambda **_: "{{ messages }}"))
    for marks in ("", "<tool_call><function="):
        template = "{{ tools }}" + marks
        with pytest.raises(ValueError, match="does not know how"):
            calling.tool_format(SimpleNamespace(get_chat_template=lambda t=template, **_: t))


def test_calls_with_ids_are_read_and_not_forced():
    template = "{{ tools }}[TOOL_CALLS]name[CALL_ID]id[ARGS]"
    form = calling.tool_format(SimpleNamespace(get_chat_template=lambda **_: template))
    assert form == MISTRAL_NAMED._replace(syntax=None)


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
    assert all(call["type"] == "function" for call in calls)
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


def test_what_reads_calls_is_imported_beside_other_requests(scripted, llm, monkeypatch):
    name, threads = "transformers.utils.chat_parsing", list[threading.Thread]()

    def find_spec(module, *_):
        if module == name:
            threads.append(threading.current_thread())

    monkeypatch.delitem(sys.modules, name, raising=False)
    finders = [SimpleNamespace(find_spec=find_spec), *sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setattr(llm.tokenizer, "response_template", OWN_TEMPLATE, raising=False)
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


@pytest.mark.parametrize("name", ANSWERS)
def test_streams_and_whole_answers_hold_the_same(scripted, llm, monkeypatch, name):
    form, script, wanted = ANSWERS[name]
    template = next(template for known, template in TEMPLATES.values() if known is form)
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    scripted.script = script
    text = "".join(piece for piece in wanted if isinstance(piece, str))
    calls = [piece for piece in wanted if isinstance(piece, tuple)]
    message = choice(scripted)["message"]
    assert (message["content"] or "") == text
    assert calls_of({"tool_calls": [], **message}) == calls
    parts = [one["choices"][0]["delta"] for one in chunks(ask(scripted, PATH, body(stream=True)))]
    assert "".join(one.get("content") or "" for one in parts) == text
    streamed = [call for one in parts for call in one.get("tool_calls", [])]
    assert calls_of({"tool_calls": streamed}) == calls

    asked = {
        "input": "f?",
        "tools": [{"type": "function", **one["function"]} for one in (TOOL, OTHER)],
    }
    output = good(ask(scripted, "/v1/responses", asked))["output"]
    last = events(ask(scripted, "/v1/responses", {**asked, "stream": True}))[-1]
    for items in (output, last["response"]["output"]):
        pieces = [
            (item["name"], json.loads(item["arguments"]))
            if item["type"] == "function_call"
            else item["content"][0]["text"]
            for item in items
        ]
        assert pieces == (wanted or [""])


def test_a_template_may_open_a_thought(scripted, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATES["hermes"][1] + "<think>\n")
    scripted.script = f"Or {HERMES_CALL}?</think>No."
    assert choice(scripted)["message"]["content"] == scripted.script
    scripted.script = f"Or {HERMES_CALL}?"
    message = choice(scripted)["message"]
    assert (message["content"], calls_of(message)) == ("Or?", [F])


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
SETS = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
UNENFORCEABLE = {"name": "a", "schema": SETS, "strict": True}
UNENFORCEABLE = {"type": "json_schema", "json_schema": UNENFORCEABLE}
IMPOSSIBLE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "word"}}}
REFUSED = [  # fields, and the one that the error names
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"regex": "a+"}, "regex"),
    ({"regex": "a+", "tool_choice": "required"}, "regex"),
    ({"response_format": UNENFORCEABLE}, "response_format"),
    ({"response_format": IMPOSSIBLE}, "response_format"),
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


def test_what_an_answer_is_not_held_to_is_logged_once(runner, caplog):
    """By the server, and not by the engine, too."""
    schema = {"type": "object", "properties": {"labels": UNIQUE}}
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"messages": MESSAGES, "response_format": answer, "max_tokens": 4}
    words = "uniqueItems at #/properties/labels"
    for _ in "12":
        response = ask(runner, PATH, asked)
        assert response.headers["x-quickbeam-ignored"] == f"response_format ({words})"
    lines = [one.getMessage() for one in caplog.records]
    assert [line for line in lines if words in line] == [
        f"left out of what a request asks for: response_format ({words})"
    ]


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
    other = text.replace('"f"', '"g"').replace("f[ARGS]", "g[ARGS]")
    assert matches(lark, tokenizer, other.replace('"x": 3', '"y": "3"'))
    assert not matches(strict_grammar(form, strict, False, tokenizer), tokenizer, text)


ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/word"}, "names": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"word": {"enum": ["f", "fit", "o"]}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER_SCHEMA}}
FLAT_FORMAT = {"type": "json_schema", "name": "a", "schema": ANSWER_SCHEMA}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_grammars_allow_calls_or_an_answer_that_fits(name, tokenizer):
    form = TEMPLATES[name][0]
    begin, middle, end = form.syntax.parts

    def written(tool, arguments):
        call = f"{begin}{tool}{middle}{arguments}{end}"
        return f"{form.syntax.before}{call}{form.syntax.after}"

    strict = [TOOLS[0].model_copy(deep=True), TOOLS[1]]
    strict[0].function.strict = True
    fitting = Grammar.json_schema(ANSWER_SCHEMA)
    for answer in (fitting, Grammar.json_object()):
        lark = answer_grammar(form, strict, True, tokenizer, "text", answer)
        for allowed in (
            written("f", '{"x": 3}'),
            written("g", '{"y": ["3"]}'),
            '{"name": "f"}',
            '{"name": "fit", "names": 3}',
        ):
            assert matches(lark, tokenizer, allowed), allowed
        call = written("f", '{"x": 3}')
        for forbidden in ("So", '{"name": 3', f'{{"name": "f"}}{call}', f"So {call}"):
            assert not matches(lark, tokenizer, forbidden), forbidden
    lark = answer_grammar(form, strict, True, tokenizer, "text", fitting)
    for forbidden in (written("f", '{"x": "3"}'), written("h", "{}"), '{"name": "of"}', "{}"):
        assert not matches(lark, tokenizer, forbidden), forbidden


def test_grammars_of_requests_with_tools_and_an_answers_format(scripted):
    flat = [{"type": "function", **TOOL["function"]}]
    for path, asked in (
        (PATH, body(response_format=FORMAT)),
        ("/v1/responses", {"input": "f?", "tools": flat, "text": {"format": FLAT_FORMAT}}),
    ):
        grammars = {}
        for mode in ("auto", "required", "none"):
            good(ask(scripted, path, {**asked, "tool_choice": mode}))
            grammars[mode] = scripted.jobs[0].params.grammar
        assert "start: calls | answer" in grammars["auto"].text
        assert "start: calls\n" in grammars["required"].text
        assert grammars["none"] == Grammar.json_schema(ANSWER_SCHEMA)


def test_an_answer_is_calls_or_fits_its_format(scripted):
    scripted.script = HERMES_CALL
    answer = choice(scripted, response_format=FORMAT)
    assert answer["message"]["content"] is None and calls_of(answer["message"]) == [F]
    scripted.script = '{"name": "<tool_call>f{}</tool_call>"}'
    for stream in (False, True):
        response = ask(scripted, PATH, body(response_format=FORMAT, stream=stream))
        parts = chunks(response) if stream else [good(response)]
        parts = [one["choices"][0]["delta" if stream else "message"] for one in parts]
        assert "".join(part.get("content") or "" for part in parts) == scripted.script
        assert not any("tool_calls" in part for part in parts)


@pytest.mark.parametrize("begin", ["<", "{"])
@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_change_no_answer_that_is_calls_or_fits_its_format(runner, llm, seed, begin):
    (likely,) = llm.tokenizer.encode(begin)
    shared = {"tools": [TOOL], "temperature": 1.5, "seed": seed, "logit_bias": {str(likely): 9}}
    chat = {**shared, "response_format": FORMAT, "return_token_ids": True, "max_tokens": 200}
    plain, drafted = (choice(runner, **chat, speculation={"method": m}) for m in ("ar", "pld"))
    assert plain["token_ids"] == drafted["token_ids"] and plain["finish_reason"] != "length"
    message = plain["message"]
    calls = calls_of({"tool_calls": [], **message})
    assert bool(calls) == (begin == "<") == (plain["finish_reason"] == "tool_calls")
    if not calls:
        assert json.loads(message["content"])["name"] in ("f", "fit", "o")

    parts = chunks(ask(runner, PATH, body(**chat, stream=True)))
    deltas = [one["choices"][0]["delta"] for one in parts]
    assert "".join(one.get("content") or "" for one in deltas) == (message["content"] or "")
    streamed = [call for one in deltas for call in one.get("tool_calls", [])]
    assert calls_of({"tool_calls": streamed}) == calls

    flat = [{"type": "function", **TOOL["function"]}]
    asked = {**shared, "input": MESSAGES, "tools": flat, "text": {"format": FLAT_FORMAT}}
    output = good(ask(runner, "/v1/responses", asked))["output"]
    assert [(one["name"], json.loads(one["arguments"])) for one in output if calls] == calls
    assert calls or output[0]["content"][0]["text"] == message["content"]


def test_the_fixed_parts_of_calls_are_drafted_and_are_no_predicted_tokens(runner, scripted, llm):
    ask(scripted, PATH, body())
    assert scripted.jobs[0].skeletons[0] == '<tool_call>\n{"name": "f", "arguments": {"x": '
    ask(scripted, PATH, body(tool_choice="none"))
    assert scripted.jobs[0].skeletons == ()

    keys = {key: {"type": "integer"} for key in ("x", "yy", "z")}
    schema = {"type": "object", "properties": keys, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    likely = {str(llm.tokenizer.encode(each)[0]): 99 for each in '"x'}
    shared = {"tools": tools, "tool_choice": "required", "temperature": 0, "logit_bias": likely}
    shared["return_token_ids"] = True
    plain = choice(runner, **shared, speculation={"method": "ar"})
    auto = {"method": "auto", "budget": 8}
    answer = good(ask(runner, PATH, body(**shared, speculation=auto)))
    assert answer["choices"][0]["token_ids"] == plain["token_ids"]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    parts = chunks(ask(runner, PATH, body(**shared, speculation=auto, trace=True, stream=True)))
    steps = [step for one in parts for step in one.get("quickbeam", {}).get("steps", [])]
    nodes = [node for step in steps for node in step["nodes"][1:]]
    assert any(node["accepted"] for node in nodes if node["source"] == "skeletons")
