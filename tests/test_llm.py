"""The Python face, on a random model whose tokens are bytes.

    pytest tests/test_llm.py
"""

from __future__ import annotations

import json

import pytest
from transformers import MambaConfig, T5Config

from quickbeam import LLM, InvalidInput, SamplingParams
from quickbeam.target.target import Target

SHORT = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(toy_folder: str) -> LLM:
    return LLM(toy_folder, dtype="float32")


def user(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def test_text_ids_and_several_prompts(llm: LLM) -> None:
    one = llm.generate("abc abc", SHORT)
    ids = llm.tokenizer("abc abc")["input_ids"]
    assert llm.generate(ids, SHORT).token_ids == one.token_ids
    both = llm.generate(["abc abc", "xyz"], SHORT)
    assert [answer.token_ids for answer in both] == [one.token_ids, llm.generate("xyz", SHORT).token_ids]
    assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert one.finish_reason == "length" and one.statistics.new_tokens == 24


@pytest.mark.parametrize("method", ["ar", "pld", "logitspec"])
def test_stream_is_the_answer_in_pieces(llm: LLM, method: str) -> None:
    stream = llm.stream("hello hello", SHORT, method=method)
    pieces = list(stream)
    assert "".join(pieces) == stream.completion.text == llm.generate("hello hello", SHORT, method="ar").text
    assert stream.completion.method == method


def test_a_closed_stream_keeps_what_it_gave(llm: LLM) -> None:
    stream = llm.stream("hello", SHORT, method="ar")
    first = next(stream)
    stream.close()
    assert stream.completion.finish_reason == "interrupted"
    assert stream.completion.text.startswith(first)
    assert llm.generate("hello", SHORT).finish_reason == "length"


def test_json_record_has_every_field(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)
    record = json.loads(json.dumps(llm.chat(user("hi"), params, method="pld", budget=8).to_json()))
    fields = "text token_ids finish_reason model method new_tokens steps mean_accepted_tokens seconds prefill_seconds tokens_per_second"
    assert {*fields.split(), "sources", "logprobs"} == set(record)
    assert record["sources"]["ngram"].keys() == {"drafted", "accepted"}
    assert [entry["token"] for entry in record["logprobs"]] == record["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in record["logprobs"])


def test_a_conversation_keeps_its_common_prefix(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, prefill = [], Target.prefill
    monkeypatch.setattr(Target, "prefill", lambda self, ids, keep=0: (kept.append(keep), prefill(self, ids, keep))[1])
    opening = user("tell me something long")
    first = llm.chat(opening, SHORT)
    again = [*opening, *user("", first.text)[1:], *user("and more")]
    before, after = llm.encode_chat(opening), llm.encode_chat(again)
    common = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    second = llm.chat(again, SHORT)
    assert kept == [0, common] and common > 20
    llm.reset()
    assert llm.chat(again, SHORT).token_ids == second.token_ids
    llm.chat(user("tell me something else"), SHORT)  # another conversation, though its beginning is the same
    llm.chat(user("tell me something else"), SHORT)
    llm.generate(before, SHORT)
    assert kept[2:] == [0, 0, 0, 0]  # no answer depends on what was asked before


def test_measured_budget_is_learned_once_and_kept(llm: LLM) -> None:
    llm.generate("aaaa", SHORT, method="pld")
    cost, learned = llm._cost, llm._budgets["pld"]
    llm.generate("aaaa", SHORT, method="pld", budget=0)
    assert llm._cost is cost and llm._budgets["pld"] is learned


def test_answers_are_those_of_the_plain_path(llm: LLM, toy_folder: str) -> None:
    plain = LLM(toy_folder, dtype="float32", fast=False)
    for prompt in ("abc abc abc", "one two one two", "q"):
        assert plain.generate(prompt, SHORT, method="ar").token_ids == llm.generate(prompt, SHORT).token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "no/such/folder"}, "no such model folder"),
        ({"model": "./missing.gguf"}, "no such file"),
        ({"model": "organisation/not-cached"}, "can't load 'organisation/not-cached'"),
        ({"method": "lgitspec"}, "unknown method 'lgitspec'; known: ar, pld, logitspec"),
        ({"dtype": "int3"}, "unknown dtype 'int3'; known: bfloat16"),
        ({"device": "tpu9"}, "device 'tpu9' can't be used"),
        ({"exact": True, "dtype": "float32"}, "bfloat16 on a CPU"),
    ],
)
def test_what_cannot_be_used_is_named(toy_folder: str, options: dict, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        LLM(**{"model": toy_folder, **options})


def test_bad_requests_are_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="empty prompt"):
        llm.generate("")
    with pytest.raises(InvalidInput, match="budget=-1"):
        llm.generate("a", budget=-1)
    with pytest.raises(InvalidInput, match="unknown method"):
        llm.generate("a", method="x")
    with pytest.raises(InvalidInput, match="exceed the model's context of 512"):
        llm.generate("a" * 500, SHORT)
    with pytest.raises(InvalidInput, match="outside the model's vocabulary"):
        llm.generate([1, 99999], SHORT)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(InvalidInput, match="no chat template"):
        llm.chat(user("hi"))


def test_a_folder_without_a_model_is_named(tmp_path) -> None:
    with pytest.raises(InvalidInput, match=r"has no config\.json"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "words"),
    [(T5Config(d_model=16, num_layers=1), "encoder-decoder"), (MambaConfig(hidden_size=16), "recurrent or hybrid")],
    ids=["t5", "mamba"],
)
def test_what_cannot_take_a_draft_back_is_refused_before_its_weights_are_read(tmp_path, config, words: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=words):
        LLM(str(tmp_path))
