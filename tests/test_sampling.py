"""From logits to a token: filters, biases, penalties and draws, against other readings of them."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation import logits_process as filters

from cases import examples, refuses
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.grammar.spec import Grammar
from quickbeam.noise import Noise
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler, draw, logprobs, most_probable, nucleus

V = 12
distinct_logits = st.lists(st.integers(-80, 80), min_size=V, max_size=V, unique=True).map(
    lambda row: torch.tensor(row) / 8
)
ids = st.lists(st.integers(0, V - 1), max_size=12)


def probs_of(logits, **params):
    return Sampler(SamplingParams(**params), [], len(logits)).probs(logits)


@examples(300)
@given(
    logits=distinct_logits,
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, V + 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
)
def test_filters_agree_with_transformers(logits, temperature, top_k, top_p, min_p):
    scores = filters.TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    if top_k:
        scores = filters.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        mass = scores.softmax(-1).sort(descending=True).values.cumsum(-1)
        assume(float((mass - top_p).abs().min()) > 1e-5)  # at the edge itself rounding decides
        scores = filters.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        probs = scores.softmax(-1)
        assume(float((probs / probs.max() - min_p).abs().min()) > 1e-5 or min_p == 1)
        scores = filters.MinPLogitsWarper(min_p)(None, scores)
    expected = scores.softmax(-1)[0]
    probs = probs_of(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert probs.dtype == torch.float32
    assert torch.equal(probs > 0, expected > 0)  # the same tokens
    torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-7)


def test_filters_by_hand():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for params, kept in [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        # the mass of top_p is that of what top_k left: 7/9
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 1e30}, [0.25] * 4),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.9}, [1, 0, 0, 0]),
    ]:
        probs = probs_of(logits, **{"temperature": 1.0, **params})
        torch.testing.assert_close(probs, torch.tensor(kept, dtype=torch.float32))
    probs = torch.tensor([0.25, 0.5, 0.125, 0.125])
    assert nucleus(probs, 0.5).tolist() == [0, 0.5, 0, 0]
    assert nucleus(probs, 0.75).tolist() == [0.25, 0.5, 0, 0]
    # a mass that never gets there, as after rounding
    assert nucleus(probs / 2, 0.75).tolist() == (probs / 2).tolist()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 0.99999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(top_p, scale):
    probs = (scale * torch.randn(20_000, generator=torch.Generator().manual_seed(1))).softmax(0)
    order = probs.double().argsort(descending=True, stable=True)
    size = int(torch.searchsorted(probs[order].double().cumsum(0), top_p)) + 1
    kept = nucleus(probs, top_p)
    assert int((kept > 0).sum()) == size
    assert torch.equal(kept[order[:size]].sort().values, probs[order[:size]].sort().values)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-38, 1e-10, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_temperatures_do_not_overflow(temperature, dtype):
    logits = torch.tensor([-3.0, 100.0, 101.0, -math.inf, 101.0], dtype=dtype)
    assert probs_of(logits, temperature=temperature).tolist() == [0, 0, 0.5, 0, 0.5]
    # top-k keeps ties with the last
    assert probs_of(logits, temperature=temperature, top_k=1).tolist() == [0, 0, 0.5, 0, 0.5]
    assert probs_of(logits * 1e8, temperature=temperature).tolist() == [0, 0, 0.5, 0, 0.5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits", [[0.0, math.nan, 1.0], [math.nan] * 3, [-math.inf] * 3, [0.0, math.inf, 1.0]]
)
def test_nan_logits_are_an_error_that_says_what_to_try(logits, temperature):
    with pytest.raises(QuickbeamError, match=r"NaN.*--dtype float32"):
        probs_of(torch.tensor(logits), temperature=temperature)
    refuses("NaN", most_probable, torch.tensor(logits), error=QuickbeamError)


@examples(200)
@given(
    logits=distinct_logits,
    prompt=ids,
    steps=st.lists(ids, max_size=4),
    path=ids,
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=4),
)
def test_all_adjustments_agree_with_brute_force(
    logits, prompt, steps, path, repetition, presence, frequency, bias
):
    penalties = dict(presence_penalty=presence, frequency_penalty=frequency)
    params = SamplingParams(repetition_penalty=repetition, **penalties, logit_bias=bias)
    sampler = Sampler(params, prompt, V)
    for step in steps:
        sampler.extend(step)
    before = logits.clone()
    got = sampler.process(logits, path)
    assert torch.equal(logits, before)  # the caller's logits stay

    output = [token for step in steps for token in step] + path
    expected = []
    for token, logit in enumerate(logits.tolist()):
        logit += bias.get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        expected.append(logit - frequency * output.count(token) - presence * (token in output))
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_bias_bans_and_forces_tokens():
    """Computed in float32, whatever the logits come in."""
    logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    banned = Sampler(SamplingParams(temperature=1.0, logit_bias={2: -math.inf}), [], 3)
    assert banned.probs(logits)[2] == 0 and banned.best(logits) == 1
    forced = Sampler(SamplingParams(logit_bias={0: 100.0}), [], 3)
    assert forced.best(logits) == 0 and forced.probs(logits).tolist() == [1, 0, 0]
    adjusted = Sampler(SamplingParams(logit_bias={0: 0.001}), [], 3).process(logits)
    assert adjusted.tolist() == pytest.approx([1.001, 2.0, 3.0]) and logits[0] == 1
    with pytest.raises(InvalidInput, match="logit_bias=12: must be ids from 0 to 11"):
        Sampler(SamplingParams(logit_bias={12: 1.0}), [], 12)
    with pytest.raises(InvalidInput, match="stop_token_ids=12: must be ids from 0"):
        Sampler(SamplingParams(stop_token_ids=[3, 12]), [], 12)
    with pytest.raises(InvalidInput, match="ban all 2 tokens"):
        Sampler(SamplingParams(logit_bias={0: -math.inf, 1: -math.inf}), [], 2)


@examples(100)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    vocab=st.integers(1, 300),
    levels=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    strided=st.booleans(),
)
def test_of_equals_the_lowest_id_is_the_best(seed, rows, vocab, levels, dtype, strided):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, 2 * vocab), generator=generator).to(dtype)
    logits = logits[:, ::2] if strided else logits[:, :vocab]
    sampler = Sampler(SamplingParams(), [], vocab)
    for row in logits:
        best = row.tolist().index(max(row.tolist()))  # the lowest id
        assert sampler.best(row) == best
        assert sampler.probs(row).argmax() == best and sampler.probs(row).sum() == 1


def test_the_grammar_bans_last_and_knows_output_and_path():
    read: list[list[int]] = []

    def ban(scores, path):
        assert path == [3, 4] and scores[7] == 2.5  # with the bias
        return scores.index_fill(0, torch.tensor([7]), -math.inf)

    grammar: Any = SimpleNamespace(ban=ban, extend=lambda tokens: read.append(list(tokens)))
    params = SamplingParams(grammar=Grammar.regex("a*"), logit_bias={7: 2.5})
    sampler = Sampler(params, [1], V, grammar=grammar)
    sampler.extend([3, 4])
    sampler.extend([5])
    scores = sampler.process(torch.zeros(V), [3, 4])
    assert scores.tolist() == [-math.inf if token == 7 else 0.0 for token in range(V)]
    assert read == [[3, 4], [5]]


def test_draw_has_the_probs_it_is_given_and_logprobs_are_raw():
    probs = torch.tensor([0.0, 1.0, 0.0, 2.0, 5.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = Counter(draw(probs, generator) for _ in range(8000))
    assert set(counts) == {1, 3, 4}
    expected = {1: 1000, 3: 2000, 4: 5000}
    # chi-square with two degrees of freedom, p = 0.001
    assert sum((counts[t] - e) ** 2 / e for t, e in expected.items()) < 13.8
    logits = torch.tensor([0.1, 0.2, 0.7]).log().bfloat16() + 5
    logprob, top = logprobs(logits, 0, 2)
    assert logprob == pytest.approx(math.log(0.1), abs=0.05)
    assert list(top) == [2, 1] and top[2] == pytest.approx(math.log(0.7), abs=0.05)
    assert logprobs(logits, 1, 0)[1] == {} and len(logprobs(logits, 1, 9)[1]) == 3


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_draw_never_gives_an_impossible_token(number, monkeypatch):
    monkeypatch.setattr("quickbeam.sampling.uniform", lambda generator: number)
    for seed in range(50):
        probs = torch.rand(1000, generator=torch.Generator().manual_seed(seed))
        probs[:100] = probs[-100:] = 0
        assert draw(probs, torch.Generator()) == (100 if number == 0 else 899)


WRONG: dict[str, list[object]] = {
    "max_tokens": [0, 2.5, True, None],
    "temperature": [-0.1, math.nan, math.inf, "1", None],
    "top_k": [-1, 1.5],
    "top_p": [0, 1.1, math.nan],
    "min_p": [-0.1, math.nan],
    "repetition_penalty": [0, math.inf],
    "presence_penalty": [math.nan, 1e39],
    "frequency_penalty": [-1e39, math.inf],
    "logit_bias": [{1: math.nan}, {1: math.inf}, {1: 1e300}, {-1: 1.0}, {"1": 1.0}, {1: "1"}, None],
    "stop": [["a", ""], "", [3], None],
    "stop_token_ids": [[-1], "7", 7],
    "logprobs": [-1, 101],
    "seed": [1.5, 2**64],
    "n": [0, 129, 1.0, True],
    "min_tokens": [-1, 257, 1.5, None],  # max_tokens is 256
    "bad_words": [["a", ""], "", [3], None],
    "include_stop_str_in_output": [1, None],
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_cannot_be_used_are_named(name):
    for value in WRONG[name]:
        refuses(f"^{name}=.*must be", SamplingParams, **{name: value})


def test_values_at_the_edge_are_accepted():
    rest = (np.int64(3), 1, 1, 0.1, -2, -2, {3: -math.inf}, "x", [0], True, 100, 2**64 - 1)
    assert SamplingParams(1, np.float32(0.5), *rest).stop == ("x",)
    assert SamplingParams(max_tokens=7, n=128, min_tokens=7, bad_words="no").bad_words == ("no",)
    with pytest.raises(InvalidInput, match=r"^min_tokens=8: .* between 0 and max_tokens=7$"):
        SamplingParams(max_tokens=7, min_tokens=8)


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"temperature": 1.4, "top_p": 0.8}])
def test_an_emitted_token_is_what_the_places_noise_draws_from_the_probs(params):
    """The probs is that behind the path, whether it is filtered or not."""
    noise, path = Noise(7, 0, V), [3, 4, 5]
    sampler = Sampler(SamplingParams(**params, repetition_penalty=1.5), [0], V)
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1))
    behind, before = sampler.probs(logits, path).log(), sampler.probs(logits).log()
    drawn = [sampler.emitted(logits, noise, place, path) for place in range(100)]
    assert drawn == [noise.largest(behind.numpy(), place, 1.0) for place in range(100)]
    assert drawn != [noise.largest(before.numpy(), place, 1.0) for place in range(100)]
    assert drawn != [noise.largest(behind.numpy(), place, 2.0) for place in range(100)]
