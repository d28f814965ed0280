"""Many answers at once: each is the one given alone, whatever arrives, leaves, is shared or
preempted around it."""

import functools
import itertools
import random

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from answers import answer, request, run
from cases import before, examples, few
from features import WIDE, head_of
from models import VOCAB, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.self_draft import SelfDrafter, four_bit_copy
from quickbeam.drafters.texts import AnswerMemory
from quickbeam.engine.budget import MeasuredBudget
from quickbeam.engine.cost import CostModel
from quickbeam.engine.engine import Engine
from quickbeam.engine.sequence import SequenceState
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.methods.prompt_lookup import PromptLookup
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.params import SamplingParams

LAYOUTS = ("llama", "mistral-window", "qwen2-window", "qwen3", "gemma2-softcap-window", "phi3")
LAYOUTS += ("gpt2", "gpt-neox")
FILTERED = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
SAMPLING = ({}, {}, {"temperature": 0.7}, FILTERED)
WAYS = ("native", "float32")  # bfloat16 by the kernels, float32 by PyTorch's operators
COMBINATIONS = list(itertools.product(LAYOUTS, WAYS))
OFTEN = [pair for pair in COMBINATIONS if "native" in pair or pair[0].startswith(("gemma", "gpt2"))]


class RandomSteps(MeasuredBudget):
    """One that learns nothing and takes steps of all kinds."""

    turns = random.Random(0)

    def begin(self, *args, **load):
        super().begin(*args, **load)
        self.kind = self.turns.choice([*self._speeds])

    def observe(self, *step):
        pass


class World:
    def __init__(self, layout, way):
        dtype = torch.float32 if way == "float32" else torch.bfloat16
        source = tiny(layout, dtype, seed=3)
        weights = head_of(WIDE, source).state_dict()
        self.model = make_model(source, chunk=32, native=way == "native")
        network = EagleHead(WIDE, self.model.embedding, self.model.head)
        network.load_state_dict(weights)
        self.drafter = eagle_drafter(network, self.model, library.kernels())
        small = make_model(tiny(layout, dtype, seed=3), native=way == "native")
        self.small = LMDrafter(small, VOCAB)
        self.copy: SelfDrafter | None = None
        if isinstance(self.model, NativeModel):
            parameters = ModelParameters(tiny(layout, dtype, seed=3))
            self.copy = SelfDrafter(four_bit_copy(self.model, parameters))
        self.alone = functools.cache(self._alone)
        self.engines: list[Engine] = []

    def methods(self):
        of_copy = {} if self.copy is None else {"self": DySpec(self.copy)}
        return of_copy | {
            "ar": NoDraft(),
            "pld": PromptLookup(),
            "logitspec": LogitSpec(),
            "dyspec": DySpec(self.drafter),
            "small": DySpec(self.small),
            "auto": Auto(self.drafter),
        }

    def _alone(self, prompt, tokens, **sampling):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
        engine = Engine(self.model, share=False)
        return answer(self.model, NoDraft(), params, prompt, engine=engine).output.token_ids

    def engine(self, **options):
        """One whose costs are made up, so that trees don't depend on the machine. Sequences that
        are not alone take steps of all kinds, at random."""
        budget = RandomSteps(CostModel({1: 1.0, 8: 1.5, 64: 6.0}))
        budget.cost.observe_pass = lambda *_: None
        engine = Engine(self.model, budget=budget, **options)
        self.engines.append(engine)
        return engine


_worlds = functools.cache(World)


@pytest.fixture
def world():
    made = list[World]()
    yield lambda layout, way: made.append(_worlds(layout, way)) or made[-1]
    for here in made:  # worlds are shared: no test may find pages that another's engine keeps
        while here.engines:
            here.engines.pop().close()


def text(rng, beginnings):
    """A prompt that may begin as others do, and repeats itself a little."""
    ids = list(rng.choice(beginnings)) if rng.random() < 0.7 else []
    phrase = [rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 9))]
    while len(ids) < 2 or rng.random() < 0.6:
        ids += rng.choice((phrase, [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]))
    return ids[:200]


def play(world, seed, requests=10):
    """Random requests come and go: each answer is the one given alone, all is given back."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (30, 70, 140)]
    sizes = dict(max_running=rng.choice((1, 2, 3, 8)), pages=rng.choice((None, 6, 9, 14)))
    engine = world.engine(**sizes, share=rng.random() < 0.8)
    methods = world.methods()
    open_ones, every, left = [], [], set()
    waiting = [text(rng, beginnings) for _ in range(requests)]
    while waiting or open_ones:
        if waiting and (not open_ones or rng.random() < 0.4):
            prompt, name = waiting.pop(), rng.choice(list(methods))
            sampling = rng.choice(SAMPLING) | {"seed": rng.randrange(3)}
            params = SamplingParams(max_tokens=rng.randint(1, 40), ignore_eos=True, **sampling)
            budget = None if rng.random() < 0.5 else rng.choice((1, 2, 7, 16))
            asked = world.model, methods[name], params, prompt
            for _ in range(rng.choice((1, 1, 1, 2))):
                one = engine.add(request(*asked, budget=budget, setting=name))
                open_ones.append((one, tuple(prompt), sampling))
                every.append(open_ones[-1])
        if open_ones and rng.random() < 0.06:
            gone = rng.choice(open_ones)[0]
            engine.cancel(gone)
            left.add(gone)
        engine.step()
        open_ones = [known for known in open_ones if not known[0].over]
    for one, prompt, sampling in every:
        assert one.error is None
        expected = world.alone(prompt, one.params.max_tokens, **sampling)
        assert one.output.token_ids == expected[: len(one.output.token_ids)]
        assert len(one.output.token_ids) == len(expected) or one in left
    engine.forget()
    assert world.model.pool.used == world.drafter.pool.used == world.small.pool.used == 0


@pytest.mark.parametrize(("layout", "way"), few(COMBINATIONS, OFTEN))
def test_answers_are_those_given_alone(world, layout, way):
    play(world(layout, way), 1, requests=7)


@pytest.mark.long
@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from(COMBINATIONS))
def test_answers_are_those_given_alone_many_times(world, seed, pair):
    play(world(*pair), seed)


@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from(("llama", "mistral-window")))
def test_answers_are_those_given_alone_in_any_order(world, seed, layout):
    play(world(layout, "native"), seed)


def plain(engine, prompt, tokens=30):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return engine.add(request(engine.model, NoDraft(), params, prompt, budget=1))


def test_a_long_prompt_does_not_hold_up_the_others(world):
    engine = world("llama", "native").engine(share=False)
    first = plain(engine, [5, 6, 7], 60)
    while not first.started:
        engine.step()
    long = plain(engine, [3 + i % 90 for i in range(1500)], 2)
    steps = 0
    while not long.started:
        before = len(first.output.token_ids)
        engine.step()
        steps += 1
        assert first.over or len(first.output.token_ids) == before + 1
    assert steps >= 1500 // 64
    engine.close()


def test_a_drafter_that_fails_ends_no_answer_but_its_own(world, monkeypatch):
    here = world("llama", "native")
    engine = here.engine(share=False)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    method = here.methods()["dyspec"]
    prompts = [5, 6, 7], [8, 9, 10]
    ones = [engine.add(request(here.model, method, params, p, budget=8)) for p in prompts]

    def broken(requests):
        if any(asked.context.ids[:3] == [8, 9, 10] for asked in requests):
            raise RuntimeError("no drafts here")

    before(monkeypatch, here.drafter, "answer", broken)
    run(engine, *ones)
    assert ones[0].error is None and ones[0].output.token_ids == here.alone((5, 6, 7), 12)
    assert isinstance(ones[1].error, RuntimeError)


def test_a_limit_that_is_lowered_ends_nobody_who_needs_no_page(world):
    here = world("llama", "native")
    engine = here.engine(pages=3)
    one = plain(engine, (5, 6, 7))
    for _ in range(3):
        engine.step()
    here.model.pool.limit = 0  # as where a drafter is loaded
    run(engine, one)
    assert one.error is None and one.output.token_ids == here.alone((5, 6, 7), 30)
    engine.close()


def test_chunks_that_nobody_holds_are_dropped_with_those_behind_them(world):
    """A drafter that needs hidden states reads a text anew that the cache has without them. What it
    adds lies behind the chunks that are there, which hold pages of their own."""
    here = world("llama", "native")
    engine = here.engine(pages=8)
    size, page = engine.prefixes.size, here.model.pool.page
    prompt = tuple(3 + i * 7 % 90 for i in range(5 * max(size, page) + 1))
    run(engine, plain(engine, prompt[:-page], 1))
    params = SamplingParams(max_tokens=8 * page - len(prompt) - 1, ignore_eos=True)
    one = engine.add(request(here.model, here.methods()["dyspec"], params, prompt, budget=8))
    run(engine, one)
    assert one.error is None
    assert one.output.token_ids == here.alone(prompt, params.max_tokens)
    engine.close()
    assert here.model.pool.used == here.drafter.pool.used == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_is_known_to_its_end_is_answered(world, way):
    here = world("llama", way)
    engine, size = here.engine(), here.model.granularity
    prompt = tuple(3 + i * i % 90 for i in range(2 * size))
    for known in (0, size):  # one token at least is computed
        one = plain(engine, prompt, 6)
        for _ in range(60):
            engine.step()
        assert one.output.token_ids == here.alone(prompt, 6)
        assert one.statistics.cached_tokens == known
    # what it is going to share can't be dropped to make room for it
    prefixes, chunks = engine.prefixes, engine.prefixes.find([*prompt, 5])
    assert len(chunks) == 2 and prefixes.evictable_pages(chunks) == 0 < prefixes.evictable_pages()
    engine.close()


@pytest.mark.parametrize("pages", (None, 7))
def test_who_leaves_while_waiting_changes_no_order(world, pages):
    here = world("llama", "native")
    engine = here.engine(max_running=3, share=pages is not None, pages=pages)
    rng = random.Random(0)
    before = here.model.pool.used
    prompts = [tuple(3 + (i * 7 + k) % 90 for k in range(60)) for i in range(24)]
    ones = [plain(engine, prompt, 100) for prompt in prompts]
    order, left = list[int](), [5]
    engine.cancel(ones[5])  # before a step saw it
    while engine.busy:
        waiting = [i for i, one in enumerate(ones) if not one.over and one.cache is None]
        if waiting and rng.random() < 0.05:
            left.append(rng.choice(waiting))
            engine.cancel(ones[left[-1]])
        engine.step()
        order += [i for i, one in enumerate(ones) if one.started and i not in order]
        arrivals = [one.arrival for one in engine.scheduler.waiting]
        assert arrivals == sorted(arrivals)
    assert len(left) > 4 and order == sorted(order)
    assert {ones[i].output.finish_reason for i in left} == {"interrupted"}
    assert ones[0].statistics.preemptions == 0  # whoever came first is never preempted
    # nothing of a prompt was known, whatever the cache holds of its answer later
    assert not any(one.statistics.cached_tokens for one in ones)
    assert pages is None or sum(one.statistics.preemptions for one in ones) > 0
    for i, (one, prompt) in enumerate(zip(ones, prompts, strict=True)):
        tokens = one.output.token_ids
        assert one.error is None and tokens == here.alone(prompt, 100)[: len(tokens)]
        assert (len(tokens) < 100) == (i in left)
    engine.forget()
    assert here.model.pool.used == before


@pytest.mark.long
def test_memory_stays_flat(world):
    here, process, rng = world("llama", "native"), psutil.Process(), random.Random(0)
    engine = Engine(here.model, pages=40, memory=AnswerMemory(1 << 20))
    methods, before, under_way = here.methods(), 0, list[SequenceState]()
    for number in range(10_000):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 90))]
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        name = ("ar", "pld", "auto")[number % 3]
        asked = request(here.model, methods[name], params, prompt, budget="auto", setting=name)
        under_way.append(engine.add(asked))
        while len(under_way) >= 16:
            engine.step()
            under_way = [one for one in under_way if not one.over]
        if number == 2_000:
            before = process.memory_info().rss
    run(engine, *under_way)
    assert process.memory_info().rss - before < 20e6
    assert here.model.pool.used <= 40
    engine.close()
