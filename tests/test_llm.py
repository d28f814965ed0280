"""The Python face, on a random model whose tokens are bytes."""

import json
import math
import reprlib
import shutil
import signal
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MambaConfig, T5Config

from cases import refuses
from quickbeam import LLM, InvalidInput, SamplingParams
from quickbeam.methods import METHODS, tree_budget
from quickbeam.models.torch.pages import RowPool

SHORT = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=450, ignore_eos=True)  # not over before it is looked at
REFUSED = {"encoder-decoder": T5Config(d_model=16, num_layers=1)}
REFUSED["no family describes mamba"] = MambaConfig(hidden_size=16)


@pytest.fixture(scope="module")
def llm(toy_folder):
    return LLM(toy_folder, dtype="float32")


def user(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def test_parameters_that_can_be_read_once_are_kept():
    params = SamplingParams(stop=iter(["a"]), bad_words=iter("bc"), stop_token_ids=map(int, "12"))
    kept = params.stop, params.bad_words, params.stop_token_ids
    assert kept == (("a",), ("b", "c"), (1, 2))
    refuses("bad_words=.*whole characters", SamplingParams, bad_words=["\ud800"])


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
INTEGERS = ["max_tokens", "top_k", "logprobs", "seed", "n", "min_tokens", "prompt_logprobs"]
FLAGS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]
LISTS = ["stop", "bad_words", "stop_token_ids"]
EXPECTED = dict.fromkeys([*NUMBERS, "frequency_penalty"], "a number")
EXPECTED |= dict.fromkeys(INTEGERS, "an integer") | dict.fromkeys(FLAGS, "True or False")
EXPECTED |= dict.fromkeys(LISTS, "a list") | {"logit_bias": "a mapping", "grammar": "a Grammar"}
EXPECTED["coupling"] = "one of coupled, residual"
EXPECTED["prediction"] = "a text"


WRONG = [b"hot", 0.5j, [0.5], {"a": 1}, math.nan, object]


@pytest.mark.parametrize("name", [one.name for one in fields(SamplingParams)])
def test_a_parameter_of_the_wrong_type_is_told_what_it_must_be(name):
    for value in WRONG:
        with pytest.raises(InvalidInput) as caught:
            SamplingParams(**{name: value})
        given, _, accepted = str(caught.value).partition(": must be ")
        assert given == f"{name}={reprlib.repr(value)}" and EXPECTED[name] in accepted


def test_a_text_is_no_number():
    for name in (*NUMBERS, *INTEGERS):
        refuses(f"^{name}='hot': must be {EXPECTED[name]}", SamplingParams, **{name: "hot"})
        refuses(f"^{name}=True: must be {EXPECTED[name]}", SamplingParams, **{name: True})


def test_what_a_shell_shows_is_short(llm):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    assert repr(params) == "SamplingParams(max_tokens=24, ignore_eos=True)"
    assert repr(SamplingParams()) == "SamplingParams()" and eval(repr(params)) == params
    answer = llm.generate("abc abc", params)
    assert str(answer) == f"{answer}" == answer.text
    assert repr(answer) == f"Completion({answer.text!r}, 24 tokens, finish_reason='length')"
    long = replace(answer, text="so " * 500)
    assert len(repr(long)) < 120 and "so so" in repr(long) and "…" in repr(long)
    assert repr(llm) == f"LLM({llm.name!r}, method='recycling')"


def test_a_text_is_a_conversation_of_one_message(llm):
    expected = llm.chat(user("abc abc"), SHORT).token_ids
    assert llm.chat("abc abc", SHORT).token_ids == expected
    assert llm.chat_stream("abc abc", SHORT).result().token_ids == expected
    assert llm.encode_chat("abc abc") == llm.encode_chat(user("abc abc"))
    several = llm.chat(["abc abc", "xyz"], SHORT)
    assert several[0].token_ids == expected
    assert several[1].token_ids == llm.chat(user("xyz"), SHORT).token_ids


@pytest.mark.parametrize(("messages", "words"), [
    (None, r"a conversation is a text, or a list of messages such as \{.*, not None"),
    (5, "a list of messages such as .*, not 5"),
    (b"hello", "a list of messages such as .*, not b'hello'"),
    ({"role": "user", "content": "a"}, "a list of messages such as .*, not {'content': 'a'"),
    ([], "an empty conversation"),
    ([[]], "an empty conversation"),
    ([None], 'message 0: a dict such as {"role": "user", "content": "…"}, not None'),
    ([("user", "a")], "message 0: a dict such as .*, not 'user'"),
    ([*user("a"), "b"], "message 1: a dict such as .*, not 'b'"),
    ([{"content": "a"}], "message 0 has role=None: give who speaks, as 'system', 'user'"),
    ([{"role": 5, "content": "a"}], "message 0 has role=5: give who speaks"),
    ([{"role": "user"}], 'message 0 has no content: give its text, as in {"role": "user"'),
    ([{"role": "user", "text": "a"}], "message 0 has no content"),
    ([{"role": "system", "content": None}], "message 0 has no content"),
    ([{"role": "user", "content": 5}], "message 0 has content=5: give a text"),
    ([{"role": "assistant", "content": {}}], "message 0 has content={}: give a text"),
    ([{"role": "user", "content": [5]}], r"message 0 has content=\[5\]: give a text"),
    ([{"role": "user", "content": "\ud800"}], "give a text of whole characters"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "give a text"),
])  # fmt: skip
def test_a_conversation_that_cannot_be_read_is_told_what_to_pass(llm, messages, words):
    refuses(words, llm.chat, messages, SHORT)
    refuses("template=5: must be a dict", llm.chat, "a", SHORT, template=5)


def test_ids_may_be_of_any_kind_of_integer(llm):
    ids = [*map(int, llm.tokenizer("hello")["input_ids"])]
    right = llm.generate(ids, SHORT).token_ids
    for prompt in (tuple(ids), np.array(ids), torch.tensor(ids)):
        assert llm.generate(prompt, SHORT).token_ids == right
    for several in (np.array(["hello", "hello"]), np.array([ids, ids]), torch.tensor([ids, ids])):
        assert [one.token_ids for one in llm.generate(several, SHORT)] == [right] * 2
    drawn = replace(SHORT, temperature=1.0, seed=5)
    seeded = llm.generate(ids, replace(drawn, seed=np.int64(5))).token_ids
    assert seeded == llm.generate(ids, drawn).token_ids
    refuses("n=3: this gives one answer", llm.stream, "hello", SamplingParams(n=3, temperature=1.0))


def test_text_ids_and_several_prompts(llm):
    one = llm.generate("abc abc", SHORT)
    assert llm.generate(llm.tokenizer("abc abc")["input_ids"], SHORT).token_ids == one.token_ids
    both = [answer.token_ids for answer in llm.generate(["abc abc", "xyz"], SHORT)]
    assert both == [one.token_ids, llm.generate("xyz", SHORT).token_ids]
    assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert one.finish_reason == "length" and one.statistics.new_tokens == 24


def test_an_answer_without_a_seed_can_be_repeated(llm):
    params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    one, other = (llm.generate("abc", params) for _ in range(2))
    assert one.token_ids != other.token_ids and one.seed != other.seed
    for first in (one, other, *llm.generate("abc", replace(params, n=2))):
        for method in ("ar", "logitspec"):
            again = llm.generate("abc", replace(params, seed=first.seed), method=method)
            assert again.token_ids == first.token_ids
            assert again.seed == first.seed == json.loads(json.dumps(again.to_json()))["seed"]


def test_a_conversation_keeps_its_common_prefix(toy_folder, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    monkeypatch.setattr(RowPool, "page", 8)  # beginnings are shared in steps of as many tokens
    llm = LLM(toy_folder, dtype="float32")
    opening = user("tell me something long")
    first = llm.chat(opening, SHORT)
    again = [*opening, *user("", first.text)[1:], *user("and more")]
    before, after = llm.encode_chat(opening), llm.encode_chat(again)
    common = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    second = llm.chat(again, SHORT)
    assert (first.statistics.cached_tokens, second.statistics.cached_tokens) == (0, common // 8 * 8)
    assert common > 20
    llm.reset()
    anew = llm.chat(again, SHORT)
    assert (anew.token_ids, anew.statistics.cached_tokens) == (second.token_ids, 0)
    other = user("tell me something else")  # another conversation, whose beginning is the same
    ids = llm.encode_chat(other)
    beginning = next(i for i, (a, b) in enumerate(zip(ids, after, strict=False)) if a != b)
    answers = [llm.chat(other, SHORT), llm.chat(other, SHORT)]
    cached = [one.statistics.cached_tokens for one in answers]
    assert cached == [beginning // 8 * 8, (len(ids) - 1) // 8 * 8]
    llm.reset()
    # no answer depends on what was asked before
    assert [one.token_ids for one in answers] == [llm.chat(other, SHORT).token_ids] * 2
    unshared = LLM(toy_folder, dtype="float32", share_prefixes=False)
    assert [unshared.chat(other, SHORT).statistics.cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(("options", "words"), [
    ({"model": "no/such/folder"}, "no such model folder"),
    ({"model": "./missing.gguf"}, "no such model folder or file"),
    ({"model": "organisation/not-cached"}, "'organisation/not-cached': .* built-in model: smol"),
    ({"model": str(Path(__file__).parent)}, r"has no config\.json"),
    ({"method": "lgitspec"}, "unknown method 'lgitspec'; known: ar, pld, .*mean 'logitspec'"),
    ({"dtype": "int3"}, "unknown dtype 'int3'; known: bfloat16, float16, float32, auto"),
    ({"device": "tpu9"}, "device 'tpu9' can't be used: give 'cpu', or 'cuda'"),
    ({"budget": 513}, r"must be auto \(or 0\) for the measured budget, or a number of nodes, at"),
    ({"max_running": 0}, "max_running=0: must be an integer of at least 1"),
    ({"max_running": True}, "max_running=True: must be an integer of at least 1"),
    ({"model": 1}, r"model=1: must be a folder, a \.gguf file or a Hugging Face id"),
    ({"model": ""}, "model='': must be a folder"),
    ({"drafter": ["a"]}, r"drafter=\['a'\]: must be a folder"),
    ({"method": ["ar"]}, r"method=\['ar'\]: must be the name of a method"),
    ({"vocab": 1}, "vocab=1: must be one of full, frequency"),
    ({"shortlist": "a"}, "shortlist='a': must be an integer"),
    ({"budget": True}, "budget=True: must be auto"),
    ({"kv_memory": "much"}, "kv_memory='much': must be a size of memory"),
    ({"memory": []}, r"memory=\[\]: must be a size of memory"),
    ({"memory_of_answers": None}, "memory_of_answers=None: must be a size of memory"),
    ({"keep": 1}, "keep=1: must be a file's path"),
    ({"share_prefixes": "no"}, "share_prefixes='no': must be True or False"),
    ({"weights": "int3"}, "unknown weights 'int3'; known: bfloat16, int8, int4"),
    ({"draft_weights": "int3"}, "unknown draft_weights 'int3'; known: bfloat16"),
    ({"progress": 1}, "progress=1: must be a function"),
])  # fmt: skip
def test_what_cannot_be_used_is_named(toy_folder, options, words):
    refuses(words, LLM, **{"model": toy_folder, **options})


@pytest.mark.parametrize(("prompt", "params", "options", "words"), [
    ("", None, {}, "empty prompt"),
    ("a", None, {"budget": -1}, "budget=-1"),
    ("a", None, {"budget": "all"}, "budget='all': must be auto"),
    ("a", None, {"method": "x"}, "unknown method"),
    ("a", None, {"max_tokens": 3}, r"'max_tokens'; give it in SamplingParams\(max_tokens=…\)"),
    ("a", None, {"nodes": 3}, "unknown option 'nodes'; known: method, budget, vocab"),
    ("a" * 500, SHORT, {}, "exceed the model's context of 512"),
    ([1, 99999], SHORT, {}, "outside the model's vocabulary"),
    ([2**70], SamplingParams(presence_penalty=1.0), {}, "outside the model's vocabulary"),
    ([5, 2.5, 7], SHORT, {}, r"a list of token ids, not \[5, 2.5, 7\]"),
    ([1.5], SHORT, {}, "a list of token ids"),
    (None, SHORT, {}, "a list of token ids, not None"),
    ("\ud800", SHORT, {}, "a text of whole characters"),
    ("a", {"n": 2}, {}, "params={'n': 2}: must be a SamplingParams"),
    ("a", SHORT, {"tenant": [1]}, r"tenant=\[1\]: give what can be hashed"),
    (b"ab", SHORT, {}, "a list of token ids, not b'ab'"),
    ({1, 2}, SHORT, {}, "a list of token ids, not {1, 2}"),
    (user("a"), SHORT, {}, r"not \[{'content': 'a', 'role': 'user'}\] \(messages go to `chat`\)"),
    (user("a")[0], SHORT, {}, "a list of token ids, not {'content': 'a', 'role': 'user'}"),
    ("a", SHORT, {"method": ["ar"]}, r"method=\['ar'\]: must be the name of a method"),
    ("a", SHORT, {"vocab": 5}, "vocab=5: must be one of full"),
    ("a", SHORT, {"shortlist": 1.5}, "shortlist=1.5: must be an integer"),
    ("a", SHORT, {"observer": 5}, "observer=5: must be a function"),
    ("a", SHORT, {"choice": 0}, "`stream` gives a single one"),
    ("a", SHORT, {"tools": []}, "'tools'; give it to `chat` as template={'tools': …}"),
])  # fmt: skip
def test_bad_requests_are_named(llm, prompt, params, options, words):
    refuses(words, llm.generate, prompt, params, **options)


def test_a_choice_and_a_grammar_are_checked(llm):
    for choice in ("first", -1, True):
        refuses(f"choice={choice!r}: must be an integer", llm.stream, "a", SHORT, choice=choice)
    refuses("grammar='a': must be a Grammar", llm.compile_grammar, "a")


def test_a_path_and_a_dtype_of_torch_are_taken(toy_folder):
    llm = LLM(Path(toy_folder), "ar", dtype=torch.float32)
    assert llm.name == str(toy_folder) and llm.model.dtype == torch.float32


def test_a_model_without_a_chat_template_says_so(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    refuses("no chat template", llm.chat, user("hi"))


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_take_a_draft_back_is_refused_before_its_weights_are_read(tmp_path, words):
    REFUSED[words].save_pretrained(tmp_path)
    refuses(words, LLM, str(tmp_path))


def save_small(toy_folder, folder, **changes):
    """A smaller random model beside the toy's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(toy_folder)
    config.update({"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(toy_folder) / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def drafter_folder(toy_folder, tmp_path_factory):
    return save_small(toy_folder, tmp_path_factory.mktemp("drafter"))


def test_what_is_learned_changes_no_seeded_answer(toy_folder, drafter_folder):
    llm = LLM(toy_folder, "sequoia", dtype="float32", drafter=drafter_folder)
    drawn = SamplingParams(max_tokens=24, temperature=1.0, coupling="residual", ignore_eos=True)
    seeded = replace(drawn, seed=4)
    first = llm.generate("abc", seeded)
    assert llm.method_store.methods == {}
    plain = llm.generate("abc abc", SHORT, method="ar").token_ids
    for _ in range(4):
        assert llm.generate("abc abc", SHORT).token_ids == plain
        llm.generate("abc", drawn)
    again = llm.generate("abc", seeded)
    assert (again.token_ids, again.statistics.steps) == (first.token_ids, first.statistics.steps)


def test_a_budget_of_auto_is_the_measured_one():
    assert [tree_budget(asked, "chain") for asked in ("auto", 0, 3)] == ["auto", "auto", 3]
    assert tree_budget(None, "chain") == METHODS["chain"].budget


def test_a_drafter_is_loaded_by_the_first_method_that_needs_it_or_named(toy_folder, drafter_folder):
    llm = LLM(toy_folder, "pld", dtype="float32", drafter=drafter_folder)
    llm.generate("abc", SHORT, method="ar")
    assert llm.method_store.drafter is None and llm.prepare("pld") is None
    assert llm.prepare("dyspec") is llm.prepare("dyspec-threshold") is llm.method_store.drafter
    with pytest.raises(InvalidInput, match="no such model folder"):
        LLM(toy_folder, "dyspec", dtype="float32", drafter="no/such/folder")
    refuses("--drafter", LLM, "no/such/folder", "dyspec")  # before the model is looked for
    llm = LLM(toy_folder, dtype="float32")
    refuses("--drafter", llm.generate, "a", SHORT, method="dyspec")


def test_an_interrupt_ends_what_this_client_asked(llm):
    """Ctrl-C: `generate` raises and holds nothing, a stream keeps what it gave, others go on."""
    expected, main = llm.generate("abc abc", SHORT).text, threading.main_thread().ident
    other, steps = llm.stream("abc abc", SHORT, method="ar"), list[int]()

    def interrupt(record):
        steps.append(1)
        if len(steps) == 3:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        stream = llm.stream("abc abc", LONG, method="ar", observer=interrupt)
        pieces = list[str]()
        try:
            for piece in stream:
                pieces.append(piece)
        finally:
            stream.close()
    completion = stream.completion
    assert completion.finish_reason == "interrupted" and len(completion.token_ids) >= 3
    assert completion.text.startswith("".join(pieces)) and "".join(other) == expected
    threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate(["abc abc", "q"], LONG, method="ar")
    assert not llm.engine.busy
    assert llm.generate("abc abc", SHORT).text == expected
