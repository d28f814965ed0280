"""A lone request beside a slow drafter, on a simulated clock: what pays goes on, prompts
counted."""

import random
from functools import cache

import pytest
import torch

from answers import answer
from cases import before
from drafters import KnownDrafter
from models import VOCAB, tiny
from quickbeam import LLM
from quickbeam.drafters.base import DrafterState
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.engine import engine as engine_module
from quickbeam.engine.budget import ASKED, FREE, PLAIN, MeasuredBudget, Speed
from quickbeam.engine.cost import CostModel
from quickbeam.engine.engine import Engine
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Model
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams

PASS, ROW = 1.0, 0.02  # seconds of a pass, and of each further row
EXACT = {1: PASS, 64: PASS + 63 * ROW}
PROMPT, ANSWER, ANSWERS = 150, 64, 8


@cache
def questions():
    rng, params = random.Random(5), SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    target = make_model(tiny("llama", seed=3))
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(ANSWERS)]
    replies = [answer(target, NoDraft(), params, prompt).output.token_ids for prompt in prompts]
    return list(zip(prompts, replies, strict=True))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class ReadingState(DrafterState):
    def __init__(self, ids):
        self.unread = len(ids) - 1

    @property
    def waiting(self):
        return self.unread

    def extend(self, tokens):
        self.unread += len(tokens)

    def skip(self, tail):
        self.unread = min(self.unread, tail)


class SlowDrafter(KnownDrafter):
    """A drafter whose calls and reading take time; it says the right token every so often."""

    skips = True

    def __init__(self, clock, call, token, right):
        self.clock, self.call, self.token, self.right = clock, call, token, right
        self.text, self.tokens_read = list[int](), 0
        super().__init__(self._probs)

    def _probs(self, context):
        place = len(context)
        sure = random.Random(place).random() < self.right and place < len(self.text)
        token = self.text[place] if sure else random.Random(str(context[-3:])).randrange(VOCAB)
        probs = torch.full((VOCAB,), 0.4 / VOCAB)
        probs[token] += 0.6
        return probs

    def begin(self, ids, shortlist=None):
        return ReadingState(ids)

    def read(self, states, least=1, end=None):
        for state in states:
            self.clock.now += self.token * state.unread
            self.tokens_read += state.unread
            state.unread = 0

    def answer(self, requests):
        self.read([request.context.states[self.name] for request in requests])
        self.clock.now += self.call
        return super().answer(requests)


def simulated(monkeypatch, call, right, kind, busy=False, costs=EXACT):
    """The seconds of each answer, its prompt counted, and the drafter. `kind`: of all steps; None:
    as the budget decides. `busy`: every tenth pass and call takes four times as long. `costs`:
    seconds of passes that were measured before."""
    asked, clock, rng = questions(), Clock(), random.Random(5)
    monkeypatch.setattr("time.perf_counter", clock)
    target, drafter = make_model(tiny("llama", seed=3)), SlowDrafter(clock, call, call / 10, right)
    forward = target.forward

    def timed(batch):
        rows = sum(part.rows for part in batch.parts)
        slow = 4.0 if busy and rng.random() < 0.1 else 1.0
        clock.now += slow * (PASS + ROW * (rows - 1))
        return forward(batch)

    target.forward = timed
    budget = MeasuredBudget(CostModel(dict(costs)))
    if kind is not None:
        only = {kind: Speed(1.2)}
        budget._speeds_of = lambda *_: only
    engine = Engine(target, budget=budget, share=False)
    method = Auto(drafter)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    seconds = []
    for prompt, plain in asked:
        drafter.text, began = [*prompt, *plain], clock.now
        drafted = answer(target, method, params, prompt, budget="auto", engine=engine)
        assert drafted.output.token_ids == plain
        seconds.append(clock.now - began)
    return seconds, drafter


@pytest.mark.parametrize(("call", "right"), [(0.05, 0.9), (0.3, 0.6), (0.8, 0.4)])
def test_what_pays_goes_on(monkeypatch, call, right):
    """Nearly as fast as with the best kind of step alone, though it does not know which that is."""
    kinds = (ASKED, FREE, PLAIN)
    alone = {kind: sum(simulated(monkeypatch, call, right, kind)[0]) for kind in kinds}
    ours = sum(simulated(monkeypatch, call, right, None)[0])
    assert ours < 1.1 * min(alone.values()), alone


def test_an_answer_is_drafted_by_what_its_own_steps_bring(monkeypatch):
    """Answers that took a fifth of the time don't keep a drafter from being asked that is right
    seven times in ten."""
    asked, clock = questions(), Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    target, drafter = make_model(tiny("llama", seed=3)), SlowDrafter(clock, 0.05, 0.001, 0.7)
    forward = target.forward

    def timed(batch):
        clock.now += PASS + ROW * (sum(part.rows for part in batch.parts) - 1)
        return forward(batch)

    target.forward = timed
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)

    def seconds(engine, question, right):
        prompt, plain = asked[question]
        drafter.text, drafter.right, began = [*prompt, *plain], right, clock.now
        answer(target, Auto(drafter), params, prompt, budget="auto", engine=engine)
        return clock.now - began

    def engine():
        return Engine(target, budget=MeasuredBudget(CostModel(dict(EXACT))), share=False)

    after_easy = engine()
    easy = [seconds(after_easy, question, 1.0) for question in range(4)]
    hard = sum(seconds(after_easy, question, 0.7) for question in range(4, 6))
    alone = engine()
    assert hard < 1.2 * sum(seconds(alone, question, 0.7) for question in range(4, 6))
    assert hard > 4 * easy[-1]


def test_steps_of_plain_decoding_look_for_no_candidates(monkeypatch):
    monkeypatch.setattr(Auto, "propose", lambda *_: pytest.fail("it looked for candidates"))
    _, drafter = simulated(monkeypatch, 0.1, 0.9, PLAIN)
    assert not drafter.tokens_read


@pytest.mark.parametrize("call", [0.1, 0.4])
def test_a_busy_machine_is_no_slower_than_plain_decoding(monkeypatch, call):
    ours, _ = simulated(monkeypatch, call, 0.5, None, busy=True)
    plain, _ = simulated(monkeypatch, call, 0.5, PLAIN, busy=True)
    assert ours[0] < 1.05 * plain[0] and sum(ours) < sum(plain)


@pytest.mark.parametrize("call", [0.1, 0.4])
def test_costs_that_a_busy_machine_measured_are_corrected(monkeypatch, call):
    """By them no node is ever worth its time, so that only a trial can show that they are wrong."""
    wrong = {1: PASS, 8: 12 * PASS, 64: 80 * PASS}
    ours, _ = simulated(monkeypatch, call, 0.9, None, costs=wrong)
    plain, _ = simulated(monkeypatch, call, 0.9, PLAIN)
    right, _ = simulated(monkeypatch, call, 0.9, None)
    assert sum(ours) < sum(plain) and ours[-1] < 1.2 * right[-1] < 0.8 * plain[-1]


def test_loading_measures_passes_and_chooses_a_drafters_weights(toy_folder, monkeypatch):
    measured = list[Model]()
    before(monkeypatch, engine_module, "measure", lambda model, most: measured.append(model))
    with LLM(toy_folder, weights="int8", drafter=toy_folder) as llm:
        drafter = llm.prepare("auto")
        assert isinstance(drafter, LMDrafter) and drafter.model.weights == "int8"
        assert measured == [llm.model]
        llm.generate("abc", SamplingParams(max_tokens=4))
        assert measured == [llm.model]
    with LLM(toy_folder, "ar"):
        assert len(measured) == 1  # it drafts nothing
