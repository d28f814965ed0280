"""`/v1/completions`, and models and tokens: `/v1/models`, `/tokenize`, `/detokenize`,
`/version`."""

import asyncio

import pytest
from tokenizers import AddedToken

from quickbeam import LLM, SamplingParams, __version__
from quickbeam.config import ServerOptions
from quickbeam.engine.result import Logprob
from quickbeam.grammar.token_texts import TokenTexts
from quickbeam.serve.logprobs import CompletionLogprobs
from quickbeam.serve.prompts import INFILL
from quickbeam.serve.runner import Runner
from serving import ScriptedRunner, Texts, ask, ask_raw, chunks, good, refused

PATH = "/v1/completions"
PROMPTS = ["the cat sat on the mat and the cat", "one two three one two"]
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)


def body(**fields):
    return {"prompt": PROMPTS[0], "max_tokens": 20, **fields}


def choices(runner, stream=False, **fields):
    """The choices of a response, or the parts of a stream by its answers."""
    response = ask(runner, PATH, body(**fields, stream=stream))
    if not stream:
        return [[choice] for choice in good(response)["choices"]]
    parts = [one["choices"][0] for one in chunks(response)]
    count = 1 + max(one["index"] for one in parts)
    return [[one for one in parts if one["index"] == index] for index in range(count)]


def text_of(parts):
    return "".join(one["text"] for one in parts)


def texts(runner, stream=False, **fields):
    return [text_of(parts) for parts in choices(runner, stream, **fields)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(("temperature", "n"), [(0, 1), (0.8, 3)])
def test_answers_are_those_given_alone(runner, llm, as_ids, temperature, n, stream):
    ids = [llm.tokenizer(one)["input_ids"] for one in PROMPTS]
    asked = {"temperature": temperature, "seed": 3, "n": n}
    right = llm.generate(PROMPTS, SamplingParams(max_tokens=20, **asked), method="ar")
    asked |= {"prompt": ids if as_ids else PROMPTS, "return_token_ids": True}
    got = choices(runner, stream, **asked)
    assert [text_of(parts) for parts in got] == [one.text for one in right]
    for index, (parts, one) in enumerate(zip(got, right, strict=True)):
        assert [token for part in parts for token in part["token_ids"]] == one.token_ids
        assert parts[0]["prompt_token_ids"] == ids[index // n]
        assert parts[-1]["finish_reason"] == one.finish_reason
    usage = good(ask(runner, PATH, body(**asked)))["usage"]
    assert usage["prompt_tokens"] == sum(map(len, ids))
    assert usage["completion_tokens"] == sum(len(one.token_ids) for one in right)


def test_each_prompt_is_drawn_with_a_seed_that_repeats_it(runner):
    """A seed for all of them would give the same prompt the same answer."""
    got = good(ask(runner, PATH, body(prompt=[PROMPTS[0]] * 3, temperature=1.0)))
    assert got["seed"] is None and len({one["text"] for one in got["choices"]}) == 3
    for one in got["choices"]:
        assert texts(runner, temperature=1.0, seed=one["seed"]) == [one["text"]]
    own = {"temperature": 1.0, "n": 2}
    got = choices(runner, prompt=PROMPTS, seeds=[3, 2**64 - 1], **own)
    seeds = [one["seed"] for (one,) in got]
    assert seeds == [3, 3, 2**64 - 1, 2**64 - 1]
    for prompt, mine, seed in zip(PROMPTS, (got[:2], got[2:]), seeds[::2], strict=True):
        assert texts(runner, prompt=prompt, seed=seed, **own) == [text_of(one) for one in mine]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(runner, llm, stream):
    (plain,) = texts(runner, temperature=0)
    for prompt in (PROMPTS[0], llm.tokenizer(PROMPTS[0])["input_ids"]):
        got = texts(runner, stream, prompt=prompt, temperature=0, echo=True)
        assert got == [PROMPTS[0] + plain]
    (parts,) = choices(runner, stream, echo=True, max_tokens=0)  # no answer
    assert text_of(parts) == PROMPTS[0] and parts[0]["logprobs"] is None
    assert parts[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [0, 5])
def test_an_echo_has_the_logprobs_of_its_prompt(runner, llm, stream, length):
    prompts = [llm.tokenizer(one)["input_ids"] for one in ("é the cat", *PROMPTS)]
    asked = {"seed": 1, "temperature": 0.9, "logprobs": 2}
    params = SamplingParams(max_tokens=max(length, 1), **asked)
    asked |= {"prompt": prompts, "max_tokens": length, "echo": True, "n": 2}
    for index, parts in enumerate(choices(runner, stream, **asked)):
        ids, text = prompts[index // 2], text_of(parts)
        right = llm.stream(ids, params, choice=index % 2)
        answer = "".join(right) if length else ""
        given = right.completion.logprobs if length else []
        assert text == llm.tokenizer.decode(ids) + answer
        assert parts[-1]["finish_reason"] == "length"
        pieces = [one["logprobs"] for one in parts]
        got = {name: [one for piece in pieces for one in piece[name]] for name in pieces[0]}
        entries = [*llm.generate(ids, SCORE).prompt_logprobs, *given]
        assert got["token_logprobs"] == [entry and entry.logprob for entry in entries]
        tokens = [*ids, *(entry.token for entry in given)]
        assert got["tokens"] == [*map(TokenTexts(llm.tokenizer).text_of, tokens)]
        assert got["top_logprobs"][0] is None and got["text_offset"][0] == 0
        for token, top in zip(got["tokens"][1:], got["top_logprobs"][1:], strict=True):
            assert token in top and len(top) <= 3
        if index > 1:  # whose tokens are characters
            spelled = list(zip(got["text_offset"], got["tokens"], strict=True))[: len(ids) + 1]
            assert all(text[at : at + 1] == token for at, token in spelled[: len(ids)])
            assert all(at == len(ids) for at, _ in spelled[len(ids) :])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_once_for_all_its_answers(llm, stream):
    """And not by each of them, which would read it as often."""
    read = []

    class Counting(Runner):
        async def begin(self, jobs, ticket):
            read.extend(job for job in jobs if job.params.prompt_logprobs is not None)
            return await super().begin(jobs, ticket)

    runner = Counting(ServerOptions(), llm)
    asked = dict(prompt=PROMPTS, n=4, echo=True, logprobs=1, seed=1, max_tokens=5)
    got = choices(runner, stream, **asked)
    assert len(read) == len(PROMPTS) and len(got) == 8
    for index, (first, *_) in enumerate(got):
        right = llm.generate(read[index // 4].prompt, SCORE).prompt_logprobs
        scores = first["logprobs"]["token_logprobs"][: len(right)]
        assert scores == [one and one.logprob for one in right]
    asyncio.run(runner.close())


def test_offsets_count_characters_however_many_tokens_spell_them():
    first, second = "é".encode()[:1], "é".encode()[1:]
    form = CompletionLogprobs(Texts(b"a", first, second, b"bc"), echo=10)
    logprobs = [Logprob(i, -1.0, {}) for i in (0, 1, 2, 3, 0)]
    begun, again = form.add((0, 1), logprobs[:2]), form.add((2, 3, 0), logprobs[2:])
    assert begun["text_offset"] + again["text_offset"] == [10, 11, 11, 12, 14]
    assert again["tokens"] == ["\ufffd", "bc", "a"]
    form = CompletionLogprobs(Texts(b"a", b"<end>"), hidden={1}, echo=6, prompt=(1, 0))
    shown = form.add((1, 0, 0, 1, 0), [Logprob(0, -1.0, {})] * 5)
    assert shown["text_offset"] == [0, 5, 6, 7, 7]  # a prompt's are spelled, an answer's are not


def test_prompt_logprobs_have_vllms_form(runner, llm):
    ids = llm.tokenizer(PROMPTS[1])["input_ids"]
    right, texts = llm.generate(ids, SCORE).prompt_logprobs, TokenTexts(llm.tokenizer)
    got = good(ask(runner, PATH, body(prompt=[ids], prompt_logprobs=2, max_tokens=0)))
    choice = got["choices"][0]
    assert choice["text"] == "" and choice["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 0 and choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    for entry, one in zip(right[1:], choice["prompt_logprobs"][1:], strict=True):
        ranks, wanted = {token: rank for rank, token in enumerate(entry.top, 1)}, {}
        for token, logprob in {entry.token: entry.logprob, **entry.top}.items():
            spelled = {"rank": ranks.get(token), "decoded_token": texts.text_of(token)}
            wanted[str(token)] = {"logprob": logprob, **spelled}
        assert one == wanted
    asked = dict(prompt=[1] * 512, echo=True, logprobs=0)
    assert len(choices(runner, **asked, max_tokens=0)[0][0]["logprobs"]["tokens"]) == 512
    response = ask(runner, PATH, body(**asked, max_tokens=1))
    assert response.status_code == 400 and "max_tokens asks for 1:" in response.text


@pytest.mark.parametrize("marks", INFILL)
def test_a_suffix_is_filled_up_to(toy_folder, marks):
    before, between, behind = marks
    with LLM(toy_folder, "ar") as llm:
        backend = llm.tokenizer.backend_tokenizer
        backend.add_tokens([AddedToken(mark, special=True) for mark in marks])
        llm.model.check_prompt = lambda ids: None  # the model has no rows for them
        scripted = ScriptedRunner(ServerOptions(), llm)
        scripted.script = "x + 1"
        asked = {"prompt": ["def f(x):\n  return ", "g"], "suffix": "\n\nf(3)", "echo": True}
        filled = texts(scripted, **asked)
        shown = [llm.tokenizer.decode(job.prompt) for job in scripted.jobs]
        assert shown == [f"{before}{one}{between}\n\nf(3){behind}" for one in asked["prompt"]]
        assert filled[0] == asked["prompt"][0] + "x + 1"
        ids = [backend.token_to_id(mark) for mark in marks]
        assert [token for token in scripted.jobs[0].prompt if token in ids] == ids
        # the prompt's tokens are not those of the text in front
        refused(ask(scripted, PATH, {**asked, "logprobs": 1}), "suffix")


def test_models(runner, llm):
    listed = good(ask(runner, "/v1/models", method="GET"))
    assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == ["toy", "small"]
    assert listed["data"][0]["max_model_len"] == 512
    assert listed["data"][0]["quickbeam"] == {"methods": llm.methods, "default_method": "pld"}
    # which needs a drafter
    assert {"ar", "pld", "auto"} <= set(llm.methods) and "dyspec" not in llm.methods
    assert good(ask(runner, "/v1/models/small", method="GET"))["id"] == "small"
    refused(ask(runner, "/v1/models/a/b", method="GET"), "model", 404)
    asked = [{"speculation": {"method": method}} for method in llm.methods]
    assert len({texts(runner, temperature=0.8, seed=1, **one)[0] for one in asked}) == 1


def test_tokens_there_and_back_and_what_is_asked_of_paths(runner, llm):
    asked = {"model": "toy", "prompt": "Hé!", "return_token_strs": True}
    got = good(ask(runner, "/tokenize", asked))
    ids, messages = llm.tokenizer("Hé!")["input_ids"], [{"role": "user", "content": "hi"}]
    assert got["tokens"] == ids and got["max_model_len"] == 512
    assert got["count"] == len(ids) == len(got["token_strs"])
    assert good(ask(runner, "/detokenize", {"tokens": ids})) == {"prompt": "Hé!"}
    got = good(ask(runner, "/tokenize", {"messages": messages}))
    assert got["tokens"] == llm.encode_chat(messages)
    for token in (-1, 10**30):
        refused(ask(runner, "/detokenize", {"tokens": [token]}), "tokens")
    refused(ask(runner, "/tokenize", {"prompt": "x", "model": "y"}), "model", 404)
    refused(ask(runner, "/tokenize", {"messages": messages, "odd": 1}), "odd")
    assert good(ask(runner, "/tokenize", {"prompt": "x", "messages": None}))["count"] == 1
    refused(ask_raw(runner, "/tokenize", '{"prompt": "\\ud800"}'), None)
    tool = {"type": "function", "function": {"name": "f"}}
    response = ask(runner, "/tokenize", {"messages": messages, "tools": [tool]})
    assert "tools" in refused(response, "tools")
    assert good(ask(runner, "/version", method="GET")) == {"version": __version__}
    for path in ("/", "/health", "/version", "/v1/models", "/v1/models/toy"):
        assert ask(runner, path, method="HEAD").status_code == 200
    assert ask(runner, "/v1/nothing", method="HEAD").status_code == 404
    assert ask(runner, PATH, method="HEAD").status_code == 405
    says = refused(ask(runner, "/v1/nothing", {}), None, 404)
    assert "/v1/responses" in says and "/v1/models" in says
    assert "{" not in says and "did you mean" not in says  # no pattern of a route
    says = refused(ask(runner, "/chat/completions", {}), None, 404)
    assert says.endswith("did you mean '/v1/chat/completions'?")
    refused(ask(runner, PATH, method="GET"), None, 405)
    response = ask(runner, PATH, {"prompt": "x", "speculation": {"method": "lgitspec"}})
    assert "did you mean 'logitspec'?" in refused(response, "speculation.method")
