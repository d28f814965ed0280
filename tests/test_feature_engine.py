"""A feature drafter in the engine: greedy answers are plain decoding's, conversations go on."""

import itertools
from pathlib import Path

import pytest

from answers import answer, request, run
from cases import THOROUGH
from docs import save_drafter
from drafters import DRAFTED
from features import Pair, held, interrupt, page_size
from quickbeam import LLM, hub
from quickbeam.drafters import feature
from quickbeam.drafters.eagle import EagleDrafter, EagleState
from quickbeam.engine.budget import MeasuredBudget
from quickbeam.engine.cost import CostModel
from quickbeam.engine.engine import Engine
from quickbeam.methods import make_method
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.params import SamplingParams

pages = page_size(6)


def drafted(pair, params, prompt, engine):
    method = DRAFTED["dyspec"](pair.drafter)
    return answer(pair.target, method, params, prompt, budget=7, engine=engine)


def outcome(one):
    return one.output.token_ids, one.statistics.steps


def test_an_interrupt_in_the_drafter_leaves_it_fit_for_the_next_request(monkeypatch):
    """In one of its passes, or while it takes over what is known."""
    pair, prompt = Pair("attention"), list(range(20))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    target, drafter, engine = pair.target, pair.drafter, Engine(pair.target)
    monkeypatch.setattr(feature, "CHUNK", 6)
    fresh = drafted(pair, params, prompt, engine)
    places = [(EagleState, "attach", 1), *((drafter.passes, "run", when) for when in range(1, 9))]
    for (owner, name, when), late, shared in itertools.product(places, (0, 1), (0, 1)):
        if name == "run":
            engine.forget()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt(patch, owner, name, when, late)
            drafted(pair, params, prompt, engine)
        assert not engine.busy
        if not shared:
            engine.forget()
            assert target.pool.used == drafter.pool.used == 0
        again = drafted(pair, params, prompt, engine)
        assert outcome(again) == outcome(fresh)
        assert name == "run" or again.statistics.cached_tokens == 18 * shared


@pytest.mark.parametrize("ahead", [0, 7])  # tokens that the first of both answers drafts
def test_hidden_states_of_a_prompt_that_no_drafter_read_are_shared(ahead, monkeypatch):
    pair, prompt = Pair("attention"), list(range(40))
    target, drafter = pair.target, pair.drafter
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    short = SamplingParams(max_tokens=1 + ahead, ignore_eos=True)
    fresh = drafted(pair, params, prompt, alone := Engine(target))
    alone.forget()
    monkeypatch.setattr(Engine, "_reads_along", lambda self, sequence: False)

    def second(engine):
        """An answer after another to the prompt, of which the drafter read nothing, or all."""
        drafted(pair, short, prompt, engine)
        chunks = engine.prefixes.find(prompt, drafter)
        assert all(
            (chunk.draft is None) == (chunk.hidden is not None) == (not ahead) for chunk in chunks
        )
        return drafted(pair, params, prompt, engine)

    again = second(engine := Engine(target))
    assert again.statistics.cached_tokens == 36
    assert outcome(again) == outcome(fresh) and engine.prefixes is not None
    chunks = engine.prefixes.find(prompt, drafter)
    assert all(chunk.draft is not None and chunk.hidden is None for chunk in chunks)
    engine.forget()
    assert target.pool.used == drafter.pool.used == 0
    if not ahead:  # wrong versions: nothing is kept, or it is taken over without
        with monkeypatch.context() as patch:
            patch.setattr(EagleState, "unread_hidden", lambda *_: None)
            assert second(Engine(target)).statistics.cached_tokens == 0
        adopt = EagleState.attach
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="hidden states of"):
            less = lambda self, chunks, n, hidden=(): adopt(self, chunks, n, hidden[:-1])  # noqa: E731
            patch.setattr(EagleState, "attach", less)
            second(Engine(target))


@pytest.mark.parametrize(("arriving", "reads"), [(1, True), (8, False)])
def test_a_prompt_is_read_along_where_the_load_to_come_will_ask(arriving, reads):
    pair = Pair("attention")
    # with eight sequences plain steps are expected to be the fastest
    budget = MeasuredBudget(CostModel({1: 1.0, 8: 1.0, 16: 2.0, 32: 4.0}))
    engine = Engine(pair.target, budget=budget, share=False)
    method, params = Auto(pair.drafter), SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = list(range(6))

    def new_request():
        return request(pair.target, method, params, prompt, budget="auto")

    run(engine, engine.add(new_request()))  # alone: the drafter was asked
    sequences = [engine.add(new_request()) for _ in range(arriving)]
    while not any(sequence.started for sequence in sequences):
        engine.step()
    unread = [sequence.draft_state.readable() for sequence in sequences if sequence.started]
    assert all((count == 0) == reads for count in unread)


def test_a_saved_head_is_a_drafter(toy_folder, tmp_path):
    save_drafter(tmp_path, 257, 32, 2)
    llm = LLM(toy_folder, "dyspec", dtype="float32", drafter=str(tmp_path))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    drafted = llm.generate("abc abc", params)
    assert isinstance(llm.prepare("dyspec"), EagleDrafter)
    assert drafted.statistics.sources["drafter"].drafted > 0
    assert drafted.token_ids == llm.generate("abc abc", params, method="ar").token_ids


@pytest.mark.parametrize(
    "methods",
    [["dyspec"] * 3, ["ar", "dyspec", "logitspec", "dyspec"], ["dyspec", "eagle2", "ar", "chain"]],
)
def test_conversations_go_on_whatever_the_methods(methods):
    """With the distributions that the equations give of the whole text."""
    pair, params = Pair("attention"), SamplingParams(max_tokens=16, ignore_eos=True)
    engine, prompt, drafted = Engine(pair.target), list(range(20)), 0
    for turn, name in enumerate(methods):
        method = DRAFTED[name](pair.drafter) if name in DRAFTED else make_method(name)
        with held(pair.drafter, pair.expected):
            one = answer(pair.target, method, params, prompt, budget=7, engine=engine)
        alone = Engine(pair.target, share=False)
        plain = answer(pair.target, NoDraft(), params, prompt, engine=alone)
        assert one.output.token_ids == plain.output.token_ids
        assert not turn or one.statistics.cached_tokens > 10 or methods[turn - 1] == "ar"
        drafted += one.statistics.drafter_calls
        prompt = [*prompt, *one.output.token_ids, 40 + turn, 7]
    assert drafted > 0 and one.statistics.cached_tokens > 10
    engine.close()


@pytest.mark.slow
def test_the_shipped_drafter_drafts_for_the_default_model(smollm2):
    llm = LLM()
    params = SamplingParams(max_tokens=48 if THOROUGH else 24, ignore_eos=True)
    messages = [{"role": "user", "content": "Why do leaves fall in autumn?"}]
    plain = llm.chat(messages, params, method="ar")
    for method in ("dyspec", "specinfer", "eagle2", "sequoia")[: None if THOROUGH else 3]:
        drafted = llm.chat(messages, params, method=method)
        assert drafted.token_ids == plain.token_ids
        assert drafted.statistics.mean_accepted_tokens > 1.4
    card = (Path(hub.drafter_of(None) or "") / "README.md").read_text()
    assert "quickbeam train --tokens" in card and "| 1 |" in card
