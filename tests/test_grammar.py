"""Answers that follow a grammar are the plain ones, whatever drafts them and whatever runs beside
them."""

import json
import math
import re
import sys
from dataclasses import replace

import jsonschema
import pytest

from cases import few, refuses, spread
from quickbeam import LLM, Grammar, InvalidInput, SamplingParams
from quickbeam.engine.budget import MeasuredBudget
from quickbeam.engine.cost import CostModel
from quickbeam.grammar.compiler import GrammarCompiler
from quickbeam.grammar.masks import DeadEnd
from quickbeam.methods import METHODS as EVERY
from running import braked
from test_llm import save_small

METHODS = [key for key, one in EVERY.items() if key != "ar" and one.vocab in ("full", "routed")]
FIELDS = {
    "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
    "kind": {"enum": ["cat", "catfish", "dog"]},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
SCHEMA["additionalProperties"] = False
COUNT = 'start: "[" (digit ",")* digit "]"\ndigit: /[1-5]{1,3}/\n'
PHONE = r"(\+1 )?[0-9]{3}-[0-9]{4} extension [ab]+!"
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex(PHONE),
    "lark": Grammar.lark(COUNT),
}
LONG = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def llm(toy_folder, tmp_path_factory):
    small = save_small(toy_folder, tmp_path_factory.mktemp("small"))
    # without answers of other tests, which would be drafted in place of forced tokens
    return LLM(toy_folder, dtype="float32", drafter=small, memory_of_answers="0")


def fits(name, text):
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    pattern = {"regex": PHONE, "lark": r"\[([1-5]{1,3},)*[1-5]{1,3}\]"}[name]
    return re.fullmatch(pattern, text) is not None


def asked(name, **changes):
    return replace(SamplingParams(max_tokens=120, grammar=GRAMMARS[name]), **changes)


@pytest.mark.parametrize(
    ("method", "temperature", "name"), spread(METHODS, [0.0, 0.8], list(GRAMMARS))
)
def test_drafts_change_no_answer(llm, method, temperature, name):
    for seed, budget in ((0, None), (1, 4), (2, 0)):
        params = asked(name, temperature=temperature, seed=seed, max_tokens=60)
        expected = llm.generate("abc abc", params, method="ar")
        answer = llm.generate("abc abc", params, method=method, budget=budget)
        assert answer.token_ids == expected.token_ids
        assert answer.finish_reason == expected.finish_reason
        if answer.finish_reason == "stop":
            assert fits(name, answer.text)


@pytest.mark.parametrize("method", few(METHODS, ["dyspec", "specinfer"]))
def test_drawn_answers_fit(llm, method):
    params = asked("schema", temperature=1.0, seed=1, coupling="residual")
    answer = llm.generate("abc", params, method=method)
    assert answer.finish_reason == "stop" and fits("schema", answer.text)


@pytest.mark.parametrize("method", ["ar", "auto"])
def test_all_that_shapes_an_answer_goes_with_a_grammar(llm, method):
    full = dict(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, seed=3)
    full |= dict(repetition_penalty=1.1, frequency_penalty=0.1)
    full |= dict(logit_bias={llm.tokenizer.encode("c")[0]: -math.inf}, bad_words=["ab"])
    params = asked("schema", **full, min_tokens=20)
    answer = llm.generate("abc", params, method=method)
    assert answer.token_ids == llm.generate("abc", params, method="ar").token_ids
    assert answer.finish_reason == "stop" and fits("schema", answer.text)
    assert json.loads(answer.text)["kind"] == "dog"


@pytest.mark.parametrize("method", ["pld", "auto"])
def test_others_beside_it_change_no_answer(llm, method):
    every = [asked("schema", temperature=0.8, seed=1), asked("regex", seed=2)]
    every += [asked("lark", temperature=0.9, seed=3), replace(every[0], n=3)]
    every += [SamplingParams(max_tokens=30, ignore_eos=True)]
    alone = [one for params in every for one in llm.generate(["abc abc"], params, method="ar")]
    together = llm.generate(["abc abc"] * len(every), every, method=method)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


@pytest.mark.parametrize("method", ["pld", "dyspec"])
def test_an_answer_outlasts_a_preemption(llm, method):
    grammar = Grammar.regex("[a-f]{75} [a-f]{70,90}!")
    long = SamplingParams(max_tokens=180, temperature=0.8, grammar=grammar)
    params = [replace(long, seed=seed) for seed in range(3)]
    expected = [llm.generate("abc", one, method="ar").token_ids for one in params]
    llm.generate("abc", SamplingParams(max_tokens=1), method=method)  # opens the drafter
    pool, limit = llm.model.pool, llm.model.pool.limit
    llm.reset()
    try:
        pool.limit = -(-256 // pool.page)
        with braked(llm.engine):  # until all are asked, however fast one is answered
            streams = [llm.stream("abc", one, method=method, budget=4) for one in params]
        answers = [one.result() for one in streams]
    finally:
        pool.limit = limit
    assert [one.token_ids for one in answers] == expected
    assert sum(one.statistics.preemptions for one in answers) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [16, 0])
def test_forced_tokens_come_many_a_step(llm, method, budget, monkeypatch):
    costs = MeasuredBudget(CostModel({1: 1.0, 64: 1.5}))  # whatever the machine does meanwhile
    costs.observe = costs.cost.observe_pass = lambda *_: None
    monkeypatch.setattr(llm.engine, "_budget", costs)
    params = SamplingParams(grammar=Grammar.regex(LONG), temperature=0.7, seed=1)
    answer = llm.generate("xyz", params, method=method, budget=budget)
    s = answer.statistics
    assert (answer.text, answer.finish_reason) == (LONG, "stop")
    # n-grams and last logits, too, name forced tokens only
    for name in ("drafted", "accepted"):
        counts = [getattr(one, name) for one in s.sources.values()]
        assert sum(counts) == s.new_tokens - 1 - s.steps
    assert s.sources["grammar"].accepted > s.new_tokens / 2
    assert s.drafter_calls == 0 and s.steps < s.new_tokens / 4


@pytest.mark.parametrize("method", ["ar", "auto"])
def test_every_id_that_ends_an_answer_may_end_it(llm, method, monkeypatch):
    (end,) = llm.eos_ids
    a, x = llm.tokenizer.encode("ax")

    def answer(pattern, **fields):
        params = SamplingParams(grammar=Grammar.regex(pattern), **fields)
        return llm.generate("abc", params, method=method)

    with pytest.raises(DeadEnd, match=r"allows 1 tokens after 2 tokens .* logit_bias"):
        answer("aa", logit_bias={end: -math.inf})
    early = answer("a{9}", stop_token_ids=[a])
    # a letter that the grammar allows anyway
    assert (early.token_ids, early.finish_reason) == ([a], "stop")
    assert answer("a{9}", stop_token_ids=[x]).token_ids == [a] * 9 + [end]
    assert answer("a{9}", ignore_eos=True, stop_token_ids=[end]).token_ids == [a] * 9 + [end]


@pytest.mark.parametrize("method", ["ar", "pld", "dyspec", "specinfer"])
def test_no_token_left_ends_that_answer_and_no_other(llm, method):
    stuck = SamplingParams(grammar=Grammar.regex("abc(d|e)"), bad_words=["d", "e"])
    streams = [
        llm.stream("abc", params, method=method)
        for params in (stuck, asked("regex", max_tokens=40), replace(stuck, stop=["bc"]))
    ]
    words = "2 tokens after 3 tokens of the answer, all ruled out by min_tokens, bad_words or logit"
    refuses(f"allows {words}_bias", list, streams[0], error=DeadEnd)
    assert streams[0].completion.finish_reason == "error" and streams[0].completion.text == "abc"
    expected = llm.generate("abc", asked("regex", max_tokens=40), method="ar")
    assert "".join(streams[1]) == expected.text
    # it ended before
    assert ["".join(streams[2]), streams[2].completion.finish_reason] == ["a", "stop"]


BAD = [
    (Grammar.json_schema({"type": "strnig"}), "json_schema: Invalid type: strnig"),
    (Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "json_schema: Unsat"),
    (Grammar.json_schema({"type": "string", "not": {}}), "json_schema: Unsat|json_schema: enum"),
    (Grammar.json_schema({"$ref": "https://example.com/x.json"}), "json_schema: Resource"),
    (Grammar.json_schema("[1]"), "json_schema: .*object"),
    (Grammar.regex("a("), "regex: .*unclosed group"),
    (Grammar.regex("a(?=b)"), "regex: .*look-around"),
    (Grammar.lark("start: nothing"), "lark: .*unknown name"),
]


@pytest.mark.parametrize(("grammar", "words"), BAD, ids=str)
def test_a_bad_grammar_is_told_when_a_request_begins(llm, grammar, words):
    for begin in (llm.stream, llm.generate):
        refuses(re.compile(words, re.DOTALL), begin, "abc", SamplingParams(grammar=grammar))
    with pytest.raises(InvalidInput):
        llm.chat_stream([{"role": "user", "content": "hi"}], SamplingParams(grammar=grammar))


def test_what_is_missing_or_no_grammar_is_told(llm, monkeypatch):
    size, ends = llm.model.vocab_size, llm.eos_ids
    with pytest.raises(InvalidInput, match="grammar with ignore_eos: nothing could end the answer"):
        llm.generate("abc", SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True))
    with pytest.raises(InvalidInput, match="no end-of-sequence token"):
        GrammarCompiler(llm.tokenizer, size, []).compile(Grammar.regex("a"))
    with pytest.raises(InvalidInput, match="can't take this model's tokenizer"):
        GrammarCompiler(list(range(257)), size, ends).compile(Grammar.regex("a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidInput, match=r"pip install 'quickbeam\[grammar\]'"):
        GrammarCompiler(llm.tokenizer, size, ends).compile(Grammar.regex("a"))
    for given in ({"type": {1, 2}}, "{", "nope"):
        refuses("json_schema: not JSON", Grammar.json_schema, given)
    refuses("must be a mapping", Grammar.json_schema, 3)
    refuses("grammar 'bnf'; known: json_schema, regex, lark", Grammar, "bnf", "")
    refuses(r"grammar='a': must be a Grammar", SamplingParams, grammar="a")


def test_json_is_written_as_python_writes_it_unless_told(llm):
    for seed in range(3):
        text = llm.generate("abc", asked("schema", temperature=1.0, seed=seed)).text
        assert json.dumps(json.loads(text)) == text
    loose = Grammar.json_schema(SCHEMA, any_whitespace=True)
    free = SamplingParams(temperature=1.0, max_tokens=300, grammar=loose)
    texts = [llm.generate("abc", replace(free, seed=seed)).text for seed in range(4)]
    assert any("\n" in text or "  " in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("method", few([*EVERY][1:], ["auto", "logitspec"]))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_default_model_gives_one_answer(method, temperature, default):
    messages = [{"role": "user", "content": "Describe a pet as JSON."}]
    params = asked("schema", max_tokens=60, temperature=temperature, seed=4)
    expected = default.chat(messages, params, method="ar")
    answer = default.chat(messages, params, method=method)
    assert answer.token_ids == expected.token_ids
    assert answer.finish_reason == "stop" and fits("schema", answer.text)
    assert answer.statistics.sources["grammar"].accepted > 5
    assert answer.statistics.steps < expected.statistics.steps / 1.5


@pytest.fixture(scope="module")
def default(smollm2):
    return LLM(memory_of_answers="0")
