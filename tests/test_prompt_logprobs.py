"""Log-probabilities of prompts: the model's own, and the same bits however the prompt was read."""

import random
from dataclasses import replace

import pytest
import torch

from answers import answer, request, run
from cases import before, refuses
from models import VOCAB, tiny
from quickbeam import SamplingParams
from quickbeam.engine.engine import Engine
from quickbeam.methods.base import NoDraft
from quickbeam.methods.prompt_lookup import PromptLookup
from quickbeam.models.native import library
from quickbeam.models.opening import make_model

CHUNK = 32
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
PROMPTS = [
    random.Random(seed).choices(range(3, VOCAB), k=length)
    for seed, length in enumerate((150, 1, 2, 33, 64, 90))
]


@pytest.fixture
def native():
    if library.kernels() is None:
        pytest.skip("no native kernels here")
    return make_model(tiny("llama", torch.bfloat16, seed=3), chunk=CHUNK)


@pytest.fixture(params=["native", "eager"])
def model(request):
    if request.param == "native":
        return request.getfixturevalue("native")
    return make_model(tiny("llama", seed=3), chunk=CHUNK, native=False)


def scored(model, prompt, params=SCORE, **options):
    options.setdefault("engine", Engine(model, share=False))
    return answer(model, NoDraft(), params, prompt, budget=1, **options)


@pytest.mark.parametrize("layout", ["llama", "gemma2-softcap-window", "gpt2"])
def test_they_are_transformers_own(layout):
    prompt = PROMPTS[0]
    with torch.inference_mode():
        probs = tiny(layout, seed=3)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    sequence = scored(make_model(tiny(layout, seed=3), chunk=CHUNK), prompt)
    assert (sequence.output.token_ids, sequence.output.finish_reason) == ([], "length")
    assert sequence.prompt_logprobs[0] is None and len(sequence.prompt_logprobs) == len(prompt)
    for row, token, entry in zip(probs[:-1], prompt[1:], sequence.prompt_logprobs[1:], strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert list(entry.top) == row.topk(3).indices.tolist()
        assert list(entry.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_bits_are_the_same_alone_and_in_a_batch(model):
    alone = [scored(model, prompt).prompt_logprobs for prompt in PROMPTS]
    engine, method = Engine(model), PromptLookup()
    for rng in map(random.Random, range(6)):
        if rng.random() < 0.3:
            engine.forget()
        asked = [i for i in range(len(PROMPTS)) for _ in range(2)]
        rng.shuffle(asked)
        ones = []
        for i in asked:
            tokens, scores = rng.choice([(1, None), (20, None), (0, 3), (0, 3), (1, 3), (20, 3)])
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, prompt_logprobs=scores)
            ones.append(engine.add(request(model, method, params, PROMPTS[i], budget=8)))
            if rng.random() < 0.5:
                engine.step()
        run(engine)
        for i, one in zip(asked, ones, strict=True):
            assert one.error is None
            if one.params.prompt_logprobs is not None:
                if model.exact:
                    assert one.prompt_logprobs == alone[i]
                assert one.statistics.cached_tokens == 0
    engine.close()


def test_a_cached_prefix_loses_none_and_is_left_for_others(model):
    prompt, engine = PROMPTS[0], Engine(model)
    plain = SamplingParams(max_tokens=4, ignore_eos=True)
    first = scored(model, prompt, plain, engine=engine)
    for _ in range(2):
        sequence = scored(model, prompt, engine=engine)
        assert sequence.prompt_logprobs == scored(model, prompt).prompt_logprobs
        assert sequence.statistics.cached_tokens == 0
    engine.forget()
    scored(model, prompt, engine=engine)
    again = scored(model, prompt, plain, engine=engine)
    assert again.statistics.cached_tokens > 0
    assert again.output.token_ids == first.output.token_ids
    engine.close()


def test_a_preempted_prompt_is_scored_once(native, monkeypatch):
    prompts = [PROMPTS[0][:100], PROMPTS[5], [9, *PROMPTS[5]], [7, *PROMPTS[0][:99]]]
    params = SamplingParams(max_tokens=120, ignore_eos=True, prompt_logprobs=3)
    alone = [scored(native, prompt, params) for prompt in prompts]
    engine, back = Engine(native, pages=7), []
    note = lambda sequence: back.append(len(sequence.prompt_logprobs or ()))  # noqa: E731
    before(monkeypatch, engine.scheduler, "preempt", note)
    ones = [engine.add(request(native, NoDraft(), params, prompt, budget=1)) for prompt in prompts]
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.active[-1])  # in the middle of its prompt
    run(engine)
    assert len(back) > 1 and 1 < back[0] < 90
    for one, right in zip(ones, alone, strict=True):
        assert one.error is None
        assert one.prompt_logprobs == right.prompt_logprobs
        assert one.output.token_ids == right.output.token_ids
    engine.close()
    assert native.pool.used == 0


def test_an_answer_scores_as_it_was_given(native):
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, logprobs=3, ignore_eos=True)
    for prompt in PROMPTS:
        given = scored(native, prompt, params)
        both = scored(native, prompt, replace(params, prompt_logprobs=1))
        assert both.output.token_ids == given.output.token_ids
        assert both.logprobs == given.logprobs and given.prompt_logprobs is None
        whole = scored(native, prompt + given.output.token_ids)
        assert whole.prompt_logprobs[len(prompt) :] == given.logprobs


def test_what_has_no_meaning_is_refused():
    fields = [{"max_tokens": 0}, {"max_tokens": 0, "logprobs": 1}, {"prompt_logprobs": -1}]
    fields += [{"max_tokens": -1, "prompt_logprobs": 1}, {"prompt_logprobs": 101}]
    fields += [{"max_tokens": 0, "prompt_logprobs": 1, "min_tokens": 1}, {"prompt_logprobs": True}]
    for given in fields:
        refuses(r"(max|min)_tokens=|prompt_logprobs=", SamplingParams, **given)
