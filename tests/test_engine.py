"""The engine: speculative answers are plain decoding's own, however they end, and alone or side by
side."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from answers import answer, request, run
from cases import before, examples, few, raising
from models import VOCAB, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.engine.commit import accept
from quickbeam.engine.engine import Engine
from quickbeam.errors import QuickbeamError
from quickbeam.methods import METHODS, make_method
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Draft, Passed
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.verify import Verdict

CERTAIN = [name for name, preset in METHODS.items() if not preset.uses_drafter]
DRAFTED = [name for name in CERTAIN if name != "ar"]
DRAFTING = [name for name in METHODS if name not in CERTAIN]
KINDS = {METHODS[name].maker: name for name in reversed(DRAFTING)}


@pytest.fixture(scope="module")
def model():
    return make_model(tiny("qwen3", seed=5))


def answered(model, method, params, prompt, budget=16, eos=()):
    budget = 1 if method == "ar" else budget
    made = make_method(method, drafter() if method in DRAFTING else None)
    return answer(model, made, params, prompt, budget=budget, eos=eos)


@cache
def drafter():
    return LMDrafter(make_model(tiny("llama", seed=7)), VOCAB)


def prompt_of(seed, length=12):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# of those that draft with a model, one of each kind of tree
@pytest.mark.parametrize("method", few(DRAFTED + DRAFTING, [*DRAFTED, *KINDS.values()]))
@examples(25)
@given(data=st.data())
def test_every_answer_is_plain_decodings(model, method, data):
    params = SamplingParams(
        max_tokens=data.draw(st.integers(1, 40)),
        temperature=data.draw(st.sampled_from([0.0, 0.6, 1.0])),
        top_k=data.draw(st.sampled_from([0, 20])),
        top_p=data.draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        logit_bias=data.draw(st.sampled_from([{}, {7: 3.0, 8: -math.inf}])),
        stop=data.draw(st.sampled_from([(), ("ab", "ccd"), ("e", "zz")])),
        stop_token_ids=data.draw(st.sampled_from([(), (17, 40)])),
        logprobs=data.draw(st.sampled_from([None, 2])),
        seed=data.draw(st.integers(0, 9)),
    )
    prompt, eos = prompt_of(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 30))), (3, 60)
    plain = answered(model, "ar", params, prompt, eos=eos)
    budget = data.draw(st.sampled_from([1, 2, 5, 24, 64]))
    drafted = answered(model, method, params, prompt, budget=budget, eos=eos)
    for name in ("token_ids", "text", "finish_reason"):
        assert getattr(drafted.output, name) == getattr(plain.output, name)
    counts = [one.statistics.new_tokens for one in (drafted, plain)]
    assert counts == [len(plain.output.token_ids)] * 2
    assert plain.statistics.mean_accepted_tokens == 1.0 <= drafted.statistics.mean_accepted_tokens
    if params.logprobs is not None:
        assert drafted.logprobs is not None and plain.logprobs is not None
        for mine, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert (mine.token, list(mine.top)) == (theirs.token, list(theirs.top))
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_drafts_are_accepted_where_text_repeats(model):
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    for method in DRAFTED:
        stats = answered(model, method, params, prompt_of(0)).statistics
        accepted = sum(source.accepted for source in stats.sources.values())
        assert accepted + stats.steps + 1 == stats.new_tokens == 120
        assert all(source.accepted <= source.drafted for source in stats.sources.values())
        assert stats.mean_accepted_tokens > 2


def test_an_answer_may_fill_the_context_to_its_last_token():
    model = make_model(tiny("gpt2"))  # positions are looked up in a table: one too many would raise
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    sequence = answered(model, "logitspec", params, prompt_of(0, 512 - 40), budget=64)
    assert sequence.statistics.new_tokens == 40


def test_an_answer_of_any_length_is_a_beginning_for_the_next(model):
    params, engine = SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True), Engine(model)
    for length in range(56, 66):  # around the end of a page
        prompt = prompt_of(length, length)
        prompt += [*answer(model, NoDraft(), params, prompt, engine=engine).output.token_ids, 7, 8]
        logprobs = [
            answer(model, NoDraft(), params, prompt, engine=one).logprobs
            for one in (engine, Engine(model, share=False))
        ]
        assert logprobs[0] == logprobs[1]
    engine.close()


def test_drawn_nodes_are_judged_behind_their_path():
    """A token that is there already is penalised at the node below it, and not at the root."""
    params = SamplingParams(temperature=0.01, presence_penalty=2.0, coupling="residual")
    tree, passed = TokenTree(0), Passed(torch.tensor([[0.0, 1.0, 0.5]] * 3), None)
    tree.add(tree.add(0, 1, "x"), 1, "x")
    randomness = None, torch.Generator()
    assert accept(Sampler(params, [0], 3), tree, passed, *randomness, 1) == Verdict([0, 1], 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_that_keeps_what_was_produced(model, temperature, monkeypatch):
    """Of that sequence alone: the others go on."""
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=1, ignore_eos=True)
    engine = Engine(model)
    expected = [answered(model, "ar", params, prompt_of(seed)).output.token_ids for seed in (2, 3)]
    bad, good = (engine.add(request(model, NoDraft(), params, prompt_of(seed))) for seed in (2, 3))
    calls, forward = list[int](), model.forward

    def failing(batch):
        passed = forward(batch)
        for i, part in enumerate(batch.parts):
            if part.cache is bad.cache and isinstance(part, Draft):
                calls.append(1)
                if len(calls) == 3:
                    passed[i] = passed[i]._replace(logits=passed[i].logits * math.nan, best=None)
        return passed

    monkeypatch.setattr(model, "forward", failing)
    run(engine)
    assert isinstance(bad.error, QuickbeamError) and "NaN" in str(bad.error)
    assert bad.output.token_ids == expected[0][:3] and bad.output.finish_reason == "error"
    assert good.error is None and good.output.finish_reason == "length"
    assert good.output.token_ids == expected[1]


def test_what_fails_in_one_sequence_touches_no_other(model, monkeypatch):
    params, engine = SamplingParams(max_tokens=20, ignore_eos=True), Engine(model)
    expected = answered(model, "logitspec", params, prompt_of(3)).output.token_ids

    class Raising(NoDraft):
        def propose(self, context, budget, max_depth):
            if len(context.ids) > 16:
                raise ZeroDivisionError("in the method")
            return super().propose(context, budget, max_depth)

    method = engine.add(request(model, Raising(), params, prompt_of(2)))
    observe = raising(OSError("in the observer"))
    observer = engine.add(request(model, NoDraft(), params, prompt_of(2), observer=observe))
    rows = engine.add(request(model, NoDraft(), params, prompt_of(2)))
    good = engine.add(request(model, make_method("logitspec"), params, prompt_of(3)))

    def failing(batch):
        if any(part.cache is rows.cache and part.cache.length > 14 for part in batch.parts):
            raise RuntimeError("in the pass")

    before(monkeypatch, model, "forward", failing)
    run(engine)
    for one, where, tokens in ((method, "method", 5), (observer, "observer", 2), (rows, "pass", 4)):
        assert (str(one.error), len(one.output.token_ids)) == (f"in the {where}", tokens)
    assert (good.error, good.output.token_ids) == (None, expected)


def test_a_step_that_fails_ends_what_runs_and_keeps_what_waits(model, monkeypatch):
    params, engine = SamplingParams(max_tokens=20, ignore_eos=True), Engine(model, max_running=1)
    expected = [answered(model, "ar", params, prompt_of(seed)).output.token_ids for seed in (2, 3)]
    asked = (request(model, NoDraft(), params, prompt_of(seed)) for seed in (2, 3))
    runs, waits = map(engine.add, asked)
    for _ in range(5):
        engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no room"):
        patch.setattr(engine.scheduler, "fit_memory", raising(RuntimeError("no room")))
        engine.step()
    assert (str(runs.error), runs.output.finish_reason) == ("no room", "interrupted")
    given = runs.output.token_ids
    assert given and given == expected[0][: len(given)]
    run(engine)
    assert waits.output.token_ids == expected[1]
    engine.close()
