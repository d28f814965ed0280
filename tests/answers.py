"""Answers by an engine of one's own, from a model, a method and a prompt in token ids."""

import itertools

from quickbeam.engine.engine import Engine
from quickbeam.engine.output import Output
from quickbeam.engine.sequence import Request
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler


class Letters:
    """A tokenizer whose tokens are characters; every seventh is two of them."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i % 26) * (2 if i % 7 == 0 else 1) for i in ids)


def request(
    model,
    method,
    params,
    prompt,
    *,
    budget=16,
    eos=(),
    shortlist=None,
    observer=None,
    setting=None,
    tenant=None,
):
    """What an engine is asked. `budget`: nodes a tree; `auto`: by measured cost."""
    output = Output(Letters(), params, eos)
    sampler = Sampler(params, prompt, model.vocab_size, stop_ids=output.stop_ids)
    return Request(
        *(prompt, params, method, output, sampler, budget, setting, shortlist, observer),
        tenant=tenant,
    )


def answer(model, method, params, prompt, *, engine=None, **options):
    engine = engine or Engine(model)
    sequence = engine.add(request(model, method, params, prompt, **options))
    run(engine, sequence)
    if sequence.error is not None:
        raise sequence.error
    return sequence


def run(engine, *sequences):
    while any(not one.over for one in sequences) if sequences else engine.busy:
        engine.step()


PROMPTS = [[3, 1, 4] * 5, [9] * 3, list(range(5, 40)), [2, 7], [3, 1, 4] * 7, [8, 8, 5] * 4]


def same_as_plain(model, drafter, prompts=PROMPTS):
    """`auto` over a drafter answers as plain decoding does, alone and side by side."""
    for temperature, budget in itertools.product((0.0, 0.8), ("auto", 9)):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=4, ignore_eos=True)
        plain = [answer(model, NoDraft(), params, one).output.token_ids for one in prompts]
        auto = Auto(drafter)
        assert answer(model, auto, params, prompts[0], budget=budget).output.token_ids == plain[0]
        engine = Engine(model)
        running = [engine.add(request(model, auto, params, p, budget=budget)) for p in prompts]
        run(engine)
        assert [one.output.token_ids for one in running] == plain
        assert budget == "auto" or running[0].statistics.drafter_calls > 0
        engine.close()


def method_as_plain(model, method, prompt):
    """Answers of a method that asks a drafter are plain decoding's, at two temperatures."""
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=1, ignore_eos=True)
        drafted = answer(model, method, params, prompt, budget=8)
        assert drafted.output.token_ids == answer(model, NoDraft(), params, prompt).output.token_ids
        assert drafted.statistics.drafter_calls > 0


def methods_over(drafter):
    return LogitSpec(), DySpec(drafter), Auto(drafter)


def conversation(model, params, prompt, more):
    """Prompts and plain decoding's answers without a cache; `more` comes behind each answer."""
    turns = []
    for words in more:
        engine = Engine(model, share=False)
        reply = answer(model, NoDraft(), params, prompt, engine=engine, budget=1).output.token_ids
        turns.append((prompt, reply))
        prompt = [*prompt, *reply, *words]
    return turns


def drafts_change_nothing(model, methods, params, right, alone=None):
    """Answers of every method are the right ones: `alone` (all) on what is cached from the first
    on, and all side by side. Returns the last one of those alone."""
    engine = Engine(model)
    for method in methods:
        for prompt, reply in right if alone is None else alone:
            last = answer(model, method, params, prompt, engine=engine, budget=8)
            assert last.output.token_ids == reply
    running = [
        (engine.add(request(model, method, params, prompt, budget=8)), reply)
        for method in methods
        for prompt, reply in right
    ]
    run(engine)
    assert all(one.output.token_ids == reply for one, reply in running)
    return last
