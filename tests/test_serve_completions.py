"""`/v1/completions`, and models and tokens: `/v1/models`, `/tokenize`, `/detokenize`, `/version`.

pytest tests/test_serve_completions.py
"""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from cases import examples
from quickbeam import LLM, SamplingParams, __version__
from quickbeam.engine.result import Logprob
from quickbeam.serve.convert import INFILL
from quickbeam.serve.logprobs import CompletionLogprobs, TokenTexts
from quickbeam.serve.runner import Runner
from quickbeam.serve.schemas import CompletionRequest
from quickbeam.serve.settings import ServeSettings
from serving import (
    GRAMMAR_FIELDS,
    ScriptedRunner,
    answered_or_refused,
    ask,
    ask_raw,
    chunks,
    good,
    junk,
    refused,
)

PATH = "/v1/completions"
PROMPTS = ["the cat sat on the mat and the cat", "one two three one two"]


def body(**fields):
    return {"prompt": PROMPTS[0], "max_tokens": 20, **fields}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(("temperature", "n"), [(0, 1), (0.8, 3)])
def test_answers_to_several_prompts_are_those_given_alone(runner, llm, as_ids, temperature, n):
    prompts = [llm.tokenizer(one)["input_ids"] for one in PROMPTS] if as_ids else PROMPTS
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3, n=n)
    right = llm.generate(prompts, params, method="ar")
    asked = body(prompt=prompts, temperature=temperature, seed=3, n=n, return_token_ids=True)
    found = good(ask(runner, PATH, asked))
    assert [one["index"] for one in found["choices"]] == list(range(2 * n))
    assert [one["text"] for one in found["choices"]] == [one.text for one in right]
    assert [one["token_ids"] for one in found["choices"]] == [one.token_ids for one in right]
    ids = [llm.tokenizer(one)["input_ids"] for one in PROMPTS for _ in range(n)]
    assert [one["prompt_token_ids"] for one in found["choices"]] == ids
    assert found["usage"]["prompt_tokens"] == sum(
        len(llm.tokenizer(one)["input_ids"]) for one in PROMPTS
    )

    streamed = chunks(
        ask(runner, PATH, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert (
        streamed[-1]["choices"] == []
        and streamed[-1]["usage"]["completion_tokens"] == found["usage"]["completion_tokens"]
    )
    for index, choice in enumerate(found["choices"]):
        mine = [one["choices"][0] for one in streamed[:-1] if one["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [token for one in mine for token in one["token_ids"]] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_one_prompt_in_token_ids(runner, llm):
    ids = llm.tokenizer(PROMPTS[0])["input_ids"]
    texts = [
        good(ask(runner, PATH, body(prompt=one, temperature=0)))["choices"][0]["text"]
        for one in (PROMPTS[0], ids, [ids])
    ]
    assert len(set(texts)) == 1


def test_the_same_prompt_twice_is_drawn_twice(runner):
    """A seed for all of them would give all the same answer; each tells its own, which repeats
    it."""
    found = good(ask(runner, PATH, body(prompt=[PROMPTS[0]] * 3, temperature=1.0)))
    assert found["seed"] is None and len({one["text"] for one in found["choices"]}) == 3
    for one in found["choices"]:
        assert (
            good(ask(runner, PATH, body(temperature=1.0, seed=one["seed"])))["choices"][0]["text"]
            == one["text"]
        )


def test_each_prompt_may_have_its_own_seed(runner):
    asked = body(prompt=PROMPTS, seeds=[3, 2**64 - 1], temperature=1.0, n=2)
    found = good(ask(runner, PATH, asked))["choices"]
    assert [one["seed"] for one in found] == [3, 3, 2**64 - 1, 2**64 - 1]
    for prompt, mine in zip(PROMPTS, (found[:2], found[2:]), strict=True):
        alone = good(
            ask(runner, PATH, body(prompt=prompt, seed=mine[0]["seed"], temperature=1.0, n=2))
        )
        assert [one["text"] for one in alone["choices"]] == [one["text"] for one in mine]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(runner, llm, stream):
    for prompt in (PROMPTS[0], llm.tokenizer(PROMPTS[0])["input_ids"]):
        plain = good(ask(runner, PATH, body(temperature=0)))["choices"][0]["text"]
        response = ask(runner, PATH, body(prompt=prompt, temperature=0, echo=True, stream=stream))
        text = (
            "".join(one["choices"][0]["text"] for one in chunks(response))
            if stream
            else good(response)["choices"][0]["text"]
        )
        assert text == PROMPTS[0] + plain


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models_own(runner, llm, stream):
    right = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, logprobs=2), method="ar")
    response = ask(runner, PATH, body(temperature=0, logprobs=2, stream=stream))
    pieces = (
        [one["choices"][0]["logprobs"] for one in chunks(response)]
        if stream
        else [good(response)["choices"][0]["logprobs"]]
    )
    found = {name: [one for piece in pieces for one in piece[name]] for name in pieces[0]}
    assert found["token_logprobs"] == pytest.approx([one.logprob for one in right.logprobs])
    for top, token, logprob in zip(
        found["top_logprobs"], found["tokens"], found["token_logprobs"], strict=True
    ):
        assert top[token] >= logprob - 1e-6 and len(top) <= 3
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0


SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [0, 5])
def test_an_echo_has_the_logprobs_of_its_prompt(runner, llm, stream, length):
    """The form that evaluation harnesses read: the prompt's tokens in front of the answer's."""
    prompts = [llm.tokenizer(one)["input_ids"] for one in ("é the cat", *PROMPTS)]
    params = SamplingParams(max_tokens=max(length, 1), seed=1, temperature=0.9, logprobs=2)
    response = ask(
        runner,
        PATH,
        body(
            prompt=prompts,
            max_tokens=length,
            echo=True,
            logprobs=2,
            n=2,
            seed=1,
            temperature=0.9,
            stream=stream,
        ),
    )
    pieces = (
        [one["choices"][0] for one in chunks(response)] if stream else good(response)["choices"]
    )
    for index in range(6):
        ids, mine = prompts[index // 2], [one for one in pieces if one["index"] == index]
        right = llm.stream(ids, params, choice=index % 2)
        answer = "".join(right) if length else ""
        given = right.completion.logprobs if length else []
        text = "".join(one["text"] for one in mine)
        assert text == llm.tokenizer.decode(ids) + answer
        assert mine[-1]["finish_reason"] == "length"
        found = {
            name: [one for piece in mine for one in piece["logprobs"][name]]
            for name in mine[0]["logprobs"]
        }
        entries = [*llm.generate(ids, SCORE).prompt_logprobs, *given]
        assert found["token_logprobs"] == [entry and entry.logprob for entry in entries]
        assert found["tokens"] == [
            TokenTexts(llm.tokenizer).text_of(token)
            for token in [*ids, *(entry.token for entry in given)]
        ]
        assert found["top_logprobs"][0] is None and found["text_offset"][0] == 0
        for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
            assert token in top and len(top) <= 3
        if index > 1:  # whose tokens are characters
            spelled = list(zip(found["text_offset"], found["tokens"], strict=True))[: len(ids) + 1]
            assert all(text[at : at + 1] == token for at, token in spelled[: len(ids)])
            assert all(at == len(ids) for at, _ in spelled[len(ids) :])


@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_once_for_all_its_answers(llm, stream, length):
    """And not by each of them, which would read it as often."""
    runner, read = Runner(ServeSettings(), llm), []

    async def begin(jobs, ticket):
        read.extend(job for job in jobs if job.params.prompt_logprobs is not None)
        return await Runner.begin(runner, jobs, ticket)

    runner.begin = begin
    asked = body(prompt=PROMPTS, n=4, echo=True, logprobs=1, seed=1, max_tokens=length)
    response = ask(runner, PATH, {**asked, "stream": stream})
    found = [one["choices"][0] for one in chunks(response)] if stream else good(response)["choices"]
    assert len(read) == len(PROMPTS) and {one["index"] for one in found} == set(range(8))
    for index in range(8):
        first = next(one for one in found if one["index"] == index)
        scores = first["logprobs"]["token_logprobs"]
        right = llm.generate(read[index // 4].prompt, SCORE).prompt_logprobs
        assert scores[: len(right)] == [one and one.logprob for one in right]
    asyncio.run(runner.close())


def test_a_response_holds_so_many_logprobs(runner):
    asked = body(n=100, logprobs=100, max_tokens=400)
    assert "ask for a stream" in refused(ask(runner, PATH, asked), "logprobs")


def test_offsets_skip_what_the_echo_does_not_show():
    """A token that begins every text, and a space that a tokenizer puts in front."""

    class Texts(TokenTexts):
        def __init__(self):
            self._known = {0: b"<s>", 1: b" Hello", 2: b" you"}

    form = CompletionLogprobs(Texts(), len("Hello"), [0, 1])
    found = form.add((0, 1, 2), [None, *(Logprob(token, -1.0, {}) for token in (1, 2))])
    assert found["text_offset"] == [0, 0, 5] and found["token_logprobs"] == [None, -1.0, -1.0]


def test_prompt_logprobs_have_vllms_form(runner, llm):
    ids = llm.tokenizer(PROMPTS[1])["input_ids"]
    right = llm.generate(ids, SCORE).prompt_logprobs
    found = good(ask(runner, PATH, body(prompt=[ids], prompt_logprobs=2, max_tokens=0)))
    choice = found["choices"][0]
    assert choice["text"] == "" and choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0 and choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    texts = TokenTexts(llm.tokenizer)
    for entry, one in zip(right[1:], choice["prompt_logprobs"][1:], strict=True):
        assert {int(token): told["logprob"] for token, told in one.items()} == {
            entry.token: entry.logprob,
            **entry.top,
        }
        ranks = {token: rank for rank, token in enumerate(entry.top, 1)}
        assert {int(token): told["rank"] for token, told in one.items()} == {
            entry.token: None,
            **ranks,
        }
        assert all(
            told["decoded_token"] == texts.text_of(int(token)) for token, told in one.items()
        )


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone(runner, stream):
    """Without an answer and without log-probabilities: the prompt as it was given."""
    response = ask(runner, PATH, body(echo=True, max_tokens=0, stream=stream))
    pieces = [one["choices"][0] for one in (chunks(response) if stream else [good(response)])]
    assert "".join(one["text"] for one in pieces) == PROMPTS[0]
    assert pieces[-1]["finish_reason"] == "length" and pieces[0]["logprobs"] is None


def test_a_prompt_that_fills_the_context_can_be_scored(runner):
    asked = body(prompt=[1] * 512, echo=True, logprobs=0, max_tokens=0)
    assert len(good(ask(runner, PATH, asked))["choices"][0]["logprobs"]["tokens"]) == 512
    response = ask(runner, PATH, asked | {"max_tokens": 1})
    assert response.status_code == 400 and "max_tokens asks for 1:" in response.text


def test_offsets_count_characters_however_many_tokens_spell_them():
    class Texts(TokenTexts):
        def __init__(self):
            self._known = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"bc"}

    form = CompletionLogprobs(Texts(), echo=10)
    found = form.add((0, 1), [Logprob(token, -1.0, {}) for token in (0, 1)])
    again = form.add((2, 3, 0), [Logprob(token, -1.0, {}) for token in (2, 3, 0)])
    assert found["text_offset"] + again["text_offset"] == [10, 11, 11, 12, 14]
    assert again["tokens"] == ["\ufffd", "bc", "a"]


def test_an_answer_has_sixteen_tokens_unless_asked_otherwise(llm):
    scripted = ScriptedRunner(ServeSettings(), llm)
    good(ask(scripted, PATH, {"prompt": "x"}))
    assert scripted.jobs[0].params.max_tokens == 16
    asyncio.run(scripted.close())


def test_stop_strings_and_ids(runner, llm):
    whole = good(ask(runner, PATH, body(temperature=0, ignore_eos=True, return_token_ids=True)))[
        "choices"
    ][0]
    stop = whole["text"][3:5]
    found = good(ask(runner, PATH, body(temperature=0, ignore_eos=True, stop=stop)))["choices"][0]
    assert (
        found["text"] == whole["text"][: whole["text"].index(stop)]
        and found["finish_reason"] == "stop"
    )
    last = whole["token_ids"][2]
    found = good(
        ask(
            runner,
            PATH,
            body(temperature=0, ignore_eos=True, stop_token_ids=[last], return_token_ids=True),
        )
    )["choices"][0]
    assert found["token_ids"] == whole["token_ids"][: whole["token_ids"].index(last) + 1]


REFUSED = {
    "a suffix without tokens for it": ({"suffix": "x"}, "suffix"),
    "a suffix of ids": ({"prompt": [3], "suffix": "x"}, "suffix"),
    "best_of": ({"best_of": 3}, "best_of"),
    "no answer": ({"max_tokens": 0}, "max_tokens"),
    "no answer, with its logprobs": ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    "prompt_logprobs in a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "prompt_logprobs of an echo": (
        {"prompt_logprobs": 1, "echo": True, "logprobs": 2},
        "prompt_logprobs",
    ),
    "too many prompt_logprobs": ({"prompt_logprobs": 21}, "prompt_logprobs"),
    "too many logprobs of an echo": ({"echo": True, "logprobs": 21}, "logprobs"),
    "no prompt": ({"prompt": []}, "prompt"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "an empty one of several": ({"prompt": ["a", ""]}, "prompt"),
    "no ids": ({"prompt": [[]]}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 1]}, "prompt[1]"),
    "negative ids": ({"prompt": [-1]}, "prompt"),
    "ids beyond the vocabulary": ({"prompt": [100000]}, "prompt"),
    "ids beyond all numbers": ({"prompt": [2**70], "presence_penalty": 1}, "prompt"),
    "seeds of other prompts": ({"seeds": [1, 2]}, "seeds"),
    "seed and seeds": ({"seeds": [1], "seed": 1}, "seeds"),
    "a seed that is too long": ({"seeds": [2**64]}, "seeds[0]"),
    "logprobs of a chat": ({"logprobs": True}, "logprobs"),
    "a bias beyond the vocabulary": ({"logit_bias": {"100000": 1}}, "logit_bias"),
    "a stop id beyond the vocabulary": ({"stop_token_ids": [3, 100000]}, "stop_token_ids"),
    "a word without tokens": ({"bad_words": [""]}, "bad_words"),
    "more than there may be": ({"min_tokens": 21}, "min_tokens"),
    "many answers": ({"n": 129}, "n"),
    "messages": ({"messages": []}, "messages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(runner, name):
    fields, param = REFUSED[name]
    refused(ask(runner, PATH, body(**fields)), param)


def test_best_of_that_asks_for_nothing(runner):
    assert len(good(ask(runner, PATH, body(n=2, best_of=2, suffix="")))["choices"]) == 2


@pytest.mark.parametrize("marks", INFILL)
def test_a_suffix_is_filled_up_to(toy_folder, marks):
    before, between, behind = marks
    with LLM(toy_folder, "ar") as llm:
        llm.tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
        # the model has no rows for them
        llm.model.check_prompt = lambda ids: None
        scripted = ScriptedRunner(ServeSettings(), llm)
        scripted.script = "x + 1"
        asked = {"prompt": ["def f(x):\n  return ", "g"], "suffix": "\n\nf(3)", "echo": True}
        found = good(ask(scripted, PATH, asked))["choices"]
        shown = [llm.tokenizer.decode(job.prompt) for job in scripted.jobs]
        texts = [f"{before}{prompt}{between}\n\nf(3){behind}" for prompt in asked["prompt"]]
        assert shown == texts and found[0]["text"] == asked["prompt"][0] + "x + 1"
        ids = llm.tokenizer.convert_tokens_to_ids(list(marks))
        assert [token for token in scripted.jobs[0].prompt if token in ids] == ids
        # the prompt's tokens are not those of the text in front
        refused(ask(scripted, PATH, {**asked, "logprobs": 1}), "suffix")
        asyncio.run(scripted.close())


def test_models(runner, llm):
    found = good(ask(runner, "/v1/models", method="GET"))
    assert found["object"] == "list" and [one["id"] for one in found["data"]] == ["toy", "small"]
    assert found["data"][0]["max_model_len"] == 512
    assert found["data"][0]["quickbeam"] == {"methods": llm.methods, "default_method": "pld"}
    # which needs a drafter
    assert {"ar", "pld", "auto"} <= set(llm.methods) and "dyspec" not in llm.methods
    assert good(ask(runner, "/v1/models/small", method="GET"))["id"] == "small"
    refused(ask(runner, "/v1/models/a/b", method="GET"), "model", 404)


def test_every_method_that_is_told_answers(runner, llm):
    texts = {
        good(ask(runner, PATH, body(temperature=0.8, seed=1, speculation={"method": method})))[
            "choices"
        ][0]["text"]
        for method in llm.methods
    }
    assert len(texts) == 1


def test_room_is_bound_by_context_and_memory(llm):
    assert llm.room(12) == 500
    before, llm.model.pool.limit = llm.model.pool.limit, 3
    try:
        room = llm.room(10)
        assert room == 3 * llm.model.pool.page - 11
        llm.stream([5] * 10, SamplingParams(max_tokens=room)).close()
        with pytest.raises(ValueError, match="memory"):
            llm.stream([5] * 10, SamplingParams(max_tokens=room + 1))
    finally:
        llm.model.pool.limit = before


def test_tokens_there_and_back(runner, llm):
    found = good(
        ask(runner, "/tokenize", {"model": "toy", "prompt": "Hé!", "return_token_strs": True})
    )
    assert found["tokens"] == llm.tokenizer("Hé!")["input_ids"]
    assert (
        found["count"] == len(found["tokens"]) == len(found["token_strs"])
        and found["max_model_len"] == 512
    )
    assert good(ask(runner, "/detokenize", {"tokens": found["tokens"]})) == {"prompt": "Hé!"}
    messages = [{"role": "user", "content": "hi"}]
    assert good(ask(runner, "/tokenize", {"messages": messages}))["tokens"] == llm.encode_chat(
        messages
    )
    refused(ask(runner, "/detokenize", {"tokens": [-1]}), "tokens")
    refused(ask(runner, "/detokenize", {"tokens": [10**30]}), "tokens")
    refused(ask(runner, "/tokenize", {"prompt": "x", "model": "y"}), "model", 404)
    refused(ask_raw(runner, "/tokenize", '{"prompt": "\\ud800"}'), None)
    refused(ask_raw(runner, "/tokenize", '{"prompt": "x", "\\ud800": 1}'), None)
    assert "tools" in refused(
        ask(runner, "/tokenize", {"messages": messages, "tools": [TOOL]}), "tools"
    )


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"prompt": ["x", "x" * 100_000]}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
            "messages",
        ),
        ("/v1/responses", {"input": "x" * 100_000}, "input"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ],
)
def test_a_text_that_no_tokens_could_fit_is_not_tokenised(runner, path, fields, param):
    """It could be the whole body, and take half a minute."""
    response = ask(runner, path, fields)
    assert "100" in refused(response, param) and "can't fit" in response.text
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_version(runner):
    assert good(ask(runner, "/version", method="GET")) == {"version": __version__}


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/v1/models", "/v1/models/toy"])
def test_whether_something_is_there(runner, path):
    assert ask(runner, path, method="HEAD").status_code == 200


def test_paths_that_are_not_there(runner):
    assert ask(runner, "/v1/nothing", method="HEAD").status_code == 404
    assert ask(runner, PATH, method="HEAD").status_code == 405
    refused(ask(runner, "/v1/nothing", {}), None, 404)
    refused(ask(runner, PATH, method="GET"), None, 405)


JSON = junk()
KNOWN = [
    name
    for name in CompletionRequest.model_fields
    if name not in ("max_tokens", "n", *GRAMMAR_FIELDS, "response_format")
]


@examples(60, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(KNOWN), JSON | st.integers(-3, 300), max_size=3),
    path=st.sampled_from([PATH, "/tokenize", "/detokenize"]),
)
def test_junk_is_never_the_servers_fault(runner, fields, path):
    asked = (
        body(max_tokens=1) | fields if path == PATH else fields | {"tokens": fields.get("prompt")}
    )
    response = ask_raw(runner, path, json.dumps(asked))
    answered_or_refused(response)


def test_nothing_is_left_over(runner, llm):
    assert not llm.engine.busy and runner.gate.inside == 0 and runner.gate.waiting_tokens == 0
