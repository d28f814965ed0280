"""Added tokens in the text of a grammar: special ones stand for nothing there, others for text."""

import json
import random
import re
from functools import cache

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from cases import examples, few, refuses, spread
from quickbeam import LLM, Grammar, InvalidInput, SamplingParams
from quickbeam.grammar.compiler import GrammarCompiler
from quickbeam.grammar.masks import DeadEnd
from quickbeam.grammar.source import pattern_text, read_lark
from quickbeam.serve.schemas import one_of
from quickbeam.serve.tool_fields import Tool
from quickbeam.serve.tools import HERMES, MISTRAL, forcing_grammar, strict_grammar
from test_grammar_masks import compiler as letters_compiler
from test_grammar_masks import letters
from tokenizers_alike import ALIKE, alike

PADDING = 3  # logits are wider than the vocabulary


@cache
def compiler(name):
    tokenizer = alike(name)
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDING, [tokenizer.eos_token_id])


@cache
def added(name):
    """Texts that begin with an added token's and end with the first one's."""
    contents = [one.content for one in alike(name).added_tokens_decoder.values()]
    shown = [content.replace("\u2581", " ") for content in contents]
    return [f"{one}b{shown[0]}" for one in shown]


def begin(name, grammar):
    return compiler(name).begin(grammar, [alike(name).eos_token_id])


def write(name, grammar, seed=0, most=400):
    """The tokens of an answer of random choices that soon closes what it opened."""
    masks, rng, tokens = begin(name, grammar), random.Random(seed), list[int]()
    end = alike(name).eos_token_id
    while end not in tokens:
        assert len(tokens) < most
        place = masks.allowed()
        allowed = (~place.banned).nonzero().flatten().tolist()
        assert allowed and max(allowed) < len(alike(name))
        forced = masks.forced()
        assert forced is None or allowed == [forced]
        closing = [token for token in allowed if set(texts(name)[token]) & set('"}]@')]
        if end in allowed and (rng.random() < 0.5 or len(tokens) > 40):
            closing = [end]
        hurry = closing and rng.random() < (0.3 if len(tokens) < 40 else 0.95)
        tokens.append(rng.choice(closing if hurry else allowed))
        masks.extend(tokens[-1:])
    return tokens[:-1]


@cache
def texts(name):
    tokenizer = alike(name)
    return [tokenizer.decode([token, token]) for token in range(len(tokenizer) + PADDING)]


def shown(name, tokens):
    return alike(name).decode(tokens, skip_special_tokens=True)


def tool_of(schema):
    return Tool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": schema}}
    )


def object_of(name, value):
    return {
        "type": "object",
        "properties": {name: value},
        "required": [name],
        "additionalProperties": False,
    }


def grammars_of(text):
    """Grammars whose only answer holds a text, and that answer."""
    quoted = json.dumps(text, ensure_ascii=False)
    key = object_of(text, {"const": 1})
    pattern = {"type": "string", "pattern": f"^x{re.escape(text)}[yz]$"}
    yield Grammar.json_schema({"const": text}), [quoted]
    yield Grammar.json_schema({"enum": [text, f"{text}{text}"]}), None
    yield Grammar.json_schema(key), [f"{{{quoted}: 1}}"]
    yield (
        Grammar.json_schema(pattern),
        [json.dumps(f"x{text}{c}", ensure_ascii=False) for c in "yz"],
    )
    yield Grammar.regex(f"x{re.escape(text)}[yz]"), [f"x{text}y", f"x{text}z"]
    yield Grammar.lark(f'start: "x" {json.dumps(text)} /[yz]/'), [f"x{text}y", f"x{text}z"]
    yield one_of([f"x{text}", f"x{text}{text}"]), [f"x{text}", f"x{text}{text}"]


@pytest.mark.parametrize("name", ALIKE)
def test_the_text_of_an_added_token_is_text(name):
    for text in added(name):
        for grammar, answers in grammars_of(text):
            answer = shown(name, write(name, grammar))
            if answers is None:
                assert json.loads(answer) in (text, text * 2)
            elif "\\" not in answer:  # JSON has several ways to write some characters
                assert answer in answers


@pytest.mark.parametrize("name", ALIKE)
def test_the_text_of_an_added_token_is_text_in_the_arguments_of_a_forced_tool(name):
    form = MISTRAL if name == "mistral" else HERMES
    for text in added(name):
        tool = tool_of(object_of("a", {"const": text}))
        lark = forcing_grammar(form, [tool], False, alike(name))
        answer = alike(name).decode(write(name, Grammar.lark(lark)))
        ((arguments),) = re.findall(r'"arguments": (\{.*\})\}', answer, re.DOTALL)
        assert json.loads(arguments) == {"a": text}


@pytest.mark.parametrize("mark", ["<tool_call>", "</tool_call>"])
def test_a_token_that_a_grammar_names_is_none_of_its_text(mark):
    """A call's first and last token stand where the grammar names them, and nowhere else."""
    tokenizer, tool = alike("qwen"), tool_of(object_of("a", {"const": f"x{mark}"}))
    token = tokenizer.convert_tokens_to_ids(mark)
    tokens = write("qwen", Grammar.lark(forcing_grammar(HERMES, [tool], False, tokenizer)))
    assert tokens.count(token) == 1 and tokenizer.decode(tokens).count(mark) == 2
    by_name = write("qwen", Grammar.lark(f'start: {mark} "x{mark}"'))
    assert by_name.count(token) == 1 and tokenizer.decode(by_name) == f"{mark}x{mark}"
    free = begin("qwen", Grammar.lark(strict_grammar(HERMES, [tool], True, tokenizer)))
    assert free.allowed().left == len(tokenizer)  # padding can't come, the end can


@pytest.mark.parametrize("name", ALIKE)
def test_free_text_takes_added_tokens_that_decoding_shows_and_no_others(name):
    tokenizer = alike(name)
    special = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    inside = begin(name, Grammar.regex(r"(?s:.)*x"))
    for token, one in tokenizer.added_tokens_decoder.items():
        assert bool(inside.allowed().banned[token]) == (token in special), one.content
    free = begin(name, Grammar.json_schema({"type": "string"}))
    quote = tokenizer.convert_tokens_to_ids('"')
    free.extend([quote])
    for token, one in tokenizer.added_tokens_decoder.items():
        writable = token not in special and not set(one.content) & set("\n\t")
        assert bool(free.allowed().banned[token]) != writable, one.content
    # what llguidance takes for any bytes
    anything = begin(name, Grammar.lark("start: A\nA: ~/abc/"))
    assert all(
        bool(anything.allowed().banned[token]) for token in special - {tokenizer.eos_token_id}
    )


def test_the_end_named_in_a_grammar_ends_an_answer_only_where_the_grammar_ends():
    a, end = alike("qwen").convert_tokens_to_ids("a"), alike("qwen").eos_token_id
    masks = begin("qwen", Grammar.lark('start: "a" <|im_end|>'))
    masks.extend([a])
    assert (~masks.allowed().banned).nonzero().flatten().tolist() == [end]
    masks = begin("qwen", Grammar.lark('start: "a" <|im_end|> "b"'))
    masks.extend([a])
    refuses("no token can come after 1 tokens", masks.allowed, error=DeadEnd)
    masks = begin("qwen", Grammar.lark('start: <[^5]>* "b"'))
    assert bool(masks.allowed().banned[end])


@pytest.mark.parametrize(
    "lark", ['start: "x" <[{a}]> "y" ("b" | "c")', 'start: "x" <[{t}]> "y" /[bc]/']
)
def test_a_matcher_goes_back_over_a_token_that_is_named_by_its_id(lark):
    tokenizer = alike("qwen")
    a, t = tokenizer.convert_tokens_to_ids(["a", "<tool_call>"])
    x, y, b = tokenizer.convert_tokens_to_ids(["x", "y", "b"])
    grammar = Grammar.lark(lark.format(a=a, t=t))
    named = a if "{a}" in lark else t
    paths = [[], [x], [x, named], [x, named, y], [x, named, y, b]]
    masks, rng = begin("qwen", grammar), random.Random(0)
    for _ in range(30):
        path = rng.choice(paths)
        expected = begin("qwen", grammar).allowed(path)
        assert torch.equal(masks.allowed(path).banned, expected.banned)
        masks.forced([*path, x])
        masks._allowed.clear()


UNSPELT = [
    Grammar.regex("abé"),
    Grammar.regex(r"ab\x{e9}c"),
    Grammar.lark('start: "a" | "aé"'),
    Grammar.lark('start: "a" | "a\\u00e9"'),
    Grammar.lark("start: A\nA: /a(b|é)/"),
]


@pytest.mark.parametrize("grammar", UNSPELT, ids=str)
def test_what_no_token_spells_is_refused_before_an_answer_begins(grammar):
    refuses("no token of this model spells 'é'", letters_compiler(5, 6).compile, grammar)


def test_what_no_token_spells_is_refused_in_schemas():
    tokenizer = letters(12)
    known = GrammarCompiler(tokenizer, len(tokenizer), [12])
    for schema in (
        {"const": "é"},
        {"enum": ["a", {"é": 1}]},
        object_of("é", {"type": "null"}),
        {"type": "string", "pattern": "^é"},
        {"type": "object", "patternProperties": {"^é": {"type": "null"}}},
    ):
        refuses("no token of this model spells .*é", known.compile, Grammar.json_schema(schema))
        text = f"start: %json {json.dumps(schema)}"
        refuses("no token of this model spells .*é", known.compile, Grammar.lark(text))


def test_signs_of_expressions_are_no_text():
    assert pattern_text(r"a[^é-ü\]]{2,3}(?:b|c)+?(?P<name>d)(?i)\d\p{L}\.$") == "abcd."
    assert pattern_text(r"\x{e9}\xe9\u00e9\n\/") == "ééé\n/"


def test_a_lark_source_is_read_as_llguidance_reads_it():
    text = '// "é" <[1]>\nstart: "a\\u00e9" /x\\/[é]/ <[7-9,11]> <|end|> %json {"const": "<[3]>"}'
    source = read_lark(f'{text} # "é"')
    assert list(source.texts) == ["aé", "x/", '"<[3]>"']
    assert (source.names, source.ids) == ({"<|end|>"}, [(7, 9), (11, 11)])
    assert not source.takes_others and read_lark("start: <[^5]>").takes_others


def test_ids_in_any_number_and_of_any_size_take_little_time():
    many = ",".join(f"{i}-999999999" for i in range(50_000))
    lark = Grammar.lark(f"start: <[{many}]> <[{'9' * 5000}]>")
    refuses("lark: ", compiler("qwen").compile, lark)


@pytest.mark.parametrize(
    "text",
    ["<[" * 200_000, '"\\' * 200_000, "/\\" * 200_000, "%json [" * 90_000, "/" + "\\p{" * 200_000],
)
def test_reading_a_source_takes_time_in_proportion_to_it(text):
    read_lark(text)
    pattern_text(text)


def json_values(texts):
    leaves = st.none() | st.booleans() | st.integers(-99, 999) | texts
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
        max_leaves=3,
    )


def schemas(texts):
    """Schemas with these texts as values, keys and patterns."""
    leaves = st.one_of(
        st.builds(lambda value: {"const": value}, json_values(texts)),
        st.builds(lambda values: {"enum": values}, st.lists(json_values(texts), min_size=1)),
        st.builds(
            lambda text: {"type": "string", "pattern": f"^{re.escape(text)}[ab]{{1,3}}$"}, texts
        ),
        st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]),
        st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 9)),
    )

    def outer(inner):
        objects = st.builds(
            lambda fields, required: {
                "type": "object",
                "properties": fields,
                "required": [key for key, one in zip(fields, required, strict=False) if one],
                "additionalProperties": False,
            },
            st.dictionaries(texts, inner, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
        )
        arrays = st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        )
        either = st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
        return objects | arrays | either

    return st.recursive(leaves, outer, max_leaves=4)


@pytest.mark.parametrize("name", few(ALIKE, ["qwen", "gemma"]))
@examples(120, deadline=None)
@given(data=st.data())
def test_random_answers_fit_their_schema_and_are_its_text(name, data):
    texts = st.sampled_from(added(name)) | st.text(max_size=3)
    schema = data.draw(schemas(texts))
    grammar = Grammar.json_schema(schema)
    tokens = write(name, grammar, data.draw(st.integers(0, 99)), most=4000)
    text = shown(name, tokens)
    jsonschema.validate(json.loads(text), schema)
    # the same text in the tokenizer's own tokens is an answer, too
    again = compiler(name)._tokenizer(frozenset()).tokenize_str(text)
    assert shown(name, again) == text
    assert begin(name, grammar).follows((), again) == len(again)


@pytest.fixture(scope="module")
def qwen_llm(tmp_path_factory):
    """A random model with a tokenizer like Qwen's."""
    tokenizer, folder = alike("qwen"), tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(
        **sizes, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.5
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with LLM(str(folder), dtype="float32", memory_of_answers="0") as llm:
        yield llm


MIXED = object_of(
    "a<|im_end|>", {"enum": ["<tool_call>x<|im_start|>", "<|im_end|>", "a<|file_sep|>"]}
)


@pytest.mark.parametrize(
    ("method", "temperature"), spread(["pld", "logitspec", "auto"], [0.0, 0.9])
)
def test_drafts_and_neighbours_change_no_answer_with_such_a_text(qwen_llm, method, temperature):
    asked = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=80, grammar=grammar)
        for seed in range(2)
        for grammar in (
            Grammar.json_schema(MIXED),
            Grammar.json_schema({"const": "a<|im_end|>b"}),
            Grammar.regex("(<\\|im_end\\|>|<think>){2,3}x"),
        )
    ]
    alone = [qwen_llm.generate("abc", params, method="ar") for params in asked]
    together = qwen_llm.generate(["abc"] * len(asked), asked, method=method)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for params, answer in zip(asked, together, strict=True):
        assert answer.finish_reason == "stop"
        if params.grammar.kind == "regex":
            assert re.fullmatch(params.grammar.text, answer.text)
        else:
            jsonschema.validate(json.loads(answer.text), json.loads(params.grammar.text))


def test_the_default_models_added_tokens_are_text(smollm2):
    with LLM(smollm2, memory_of_answers="0") as llm:
        for one in llm.tokenizer.added_tokens_decoder.values():
            text = f"a{one.content}b"
            params = SamplingParams(max_tokens=40, grammar=Grammar.json_schema({"const": text}))
            answer = llm.generate("abc", params)
            assert (json.loads(answer.text), answer.finish_reason) == (text, "stop")
        with pytest.raises(InvalidInput, match=r"no token of this model spells '\\x04'"):
            llm.generate("abc", SamplingParams(grammar=Grammar.regex(r"a\x04b")))
