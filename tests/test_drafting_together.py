"""Drafters that draft for several sequences at once: each gets the distributions that it gets
alone, whatever it takes over or leaves out."""

import random
from functools import partial

import pytest
import torch

from answers import answer, request, run
from drafters import DRAFTED
from features import Pair, context_of, interrupt, random_tree, rounds, words
from kernels import SETS
from models import VOCAB, tiny
from quickbeam.drafters.base import DraftRequest
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.engine.engine import Engine
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.params import RESIDUAL, SamplingParams
from quickbeam.tree import TokenTree

WAYS = [*SETS[:1], "eager"]


@pytest.fixture
def take(monkeypatch, native):
    """Choose the kernels or PyTorch's operators; gives the number format to test them in."""

    def choose(way):
        if way == "eager":
            monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
            return torch.float32
        native(way)
        return torch.bfloat16

    return choose


def same(way, a, b):
    """The same bits on the kernels, nearly the same numbers in float32."""
    if way == "eager":
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    else:
        assert torch.equal(a, b)


def shortlists(pair, window=40):
    """Two that share nothing: with a router and the context (`window`), and of frequent tokens."""
    torch.manual_seed(0)
    weight = pair.model.get_output_embeddings().weight.detach().to(pair.target.dtype)
    layout = Layout(torch.randperm(VOCAB)[:90], 20, 17, VOCAB)
    router = Router(RouterConfig(32, 32, 25, layout.clusters)).requires_grad_(False)
    kernels = library.kernels()
    routed = Shortlist(weight, layout, kernels, router=router, chosen=2, window=window)
    frequent = Layout.by_frequency(torch.randperm(VOCAB), 30, VOCAB)
    return [routed, Shortlist(weight, frequent, kernels)]


def run_staggered(drafter, pairs, together):
    """Each tree's distributions, round by round; every second sequence begins a call later."""
    # every second one begins later
    calls = [[[], *rounds(tree)] if i % 2 else rounds(tree) for i, (_, tree) in enumerate(pairs)]
    answers: list[list[torch.Tensor]] = [[] for _ in pairs]
    for turn in range(max(map(len, calls))):
        asked = [i for i, mine in enumerate(calls) if turn < len(mine) and mine[turn]]
        requests = [DraftRequest(*pairs[i], calls[i][turn]) for i in asked]
        rounds_of = [requests] if together else [[one] for one in requests]
        distributions = [probs for some in rounds_of for probs in drafter.answer(some)]
        for i, probs in zip(asked, distributions, strict=True):
            answers[i].append(probs.dense())
    return answers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["attention", "own-head", "input", "ours"])
def test_sequences_get_the_distributions_that_they_get_alone(kind, way, take, monkeypatch):
    pair = Pair(kind, take(way))
    # prompts are read over several passes, some of them side by side
    monkeypatch.setattr("quickbeam.drafters.feature.CHUNK", 50)
    routed, frequent = [None, None] if kind == "own-head" else shortlists(pair)
    kinds = [(3, 1.0, None), (70, 0.5, None), (20, 1.0, routed), (9, 0.0, routed)]
    kinds += [(30, 1.0, frequent), (130, 2.0, routed), (1, 0.0, None)]
    runs = []
    for together in (True, False):
        rng = random.Random(4)
        texts = [pair.begin(words(rng, n), rng.randrange(VOCAB), *more) for n, *more in kinds]
        runs.append([])
        for _ in range(2):
            trees = [random_tree(rng, text.context.ids[-1], rng.randint(1, 9)) for text in texts]
            pairs = list(zip([text.context for text in texts], trees, strict=True))
            runs[-1] += run_staggered(pair.drafter, pairs, together)
            for text, tree in zip(texts, trees, strict=True):
                text.go_on(tree, tree.path(rng.randrange(len(tree))), rng.randrange(VOCAB))
        used = [text.state.used for text in texts]
        runs[-1].append([torch.tensor([[one.calls, one.tokens]]) for one in used if one])
        for text in texts:
            text.release()
    for ours, alone in zip(*runs, strict=True):
        assert len(ours) == len(alone) > 0
        for a, b in zip(ours, alone, strict=True):
            same(way, a, b)
    assert pair.target.pool.used == pair.drafter.pool.used == 0


@pytest.mark.parametrize("way", WAYS)
def test_more_than_two_sequences_leave_their_contexts_out(way, take):
    """They have the frequent tokens alone scored, in one product; two have their contexts' too, and
    so has whoever draws children."""
    pair = Pair("attention", take(way))
    beside, frequent = with_context_and_without(pair)
    for count, temperature in ((2, 0.0), (5, 0.0), (5, 0.7)):
        apart, runs = count == 2 or temperature > 0, []
        for together, shortlist in ((True, beside), (False, beside if apart else frequent)):
            rng = random.Random(count)
            texts = [
                pair.begin(words(rng, 5 + i), rng.randrange(VOCAB), temperature, shortlist)
                for i in range(count)
            ]
            asked = [text.request(TokenTree(text.context.ids[-1]), [0]) for text in texts]
            calls = [asked] if together else [[one] for one in asked]
            runs.append([probs for call in calls for probs in pair.drafter.answer(call)])
            runs[-1] += [(text.state.used.calls, text.state.used.tokens) for text in texts]
            for text in texts:
                text.release()
        assert runs[0][count:] == runs[1][count:]
        for ours, alone in zip(runs[0][:count], runs[1][:count], strict=True):
            assert (len(ours.tokens) > 32) == apart
            same(way, ours.dense(), alone.dense())


def with_context_and_without(pair):
    """A shortlist of frequent tokens and the context's, and one of the former alone."""
    weight = pair.model.get_output_embeddings().weight.detach().to(pair.target.dtype)
    layout = Layout.by_frequency(torch.randperm(VOCAB), 32, VOCAB)
    kernels = library.kernels()
    return Shortlist(weight, layout, kernels, window=40), Shortlist(weight, layout, kernels)


@pytest.mark.parametrize("name", ["dyspec", "specinfer"])
def test_a_seed_repeats_answers_of_drawn_children_beside_others(name, take):
    pair = Pair("attention", take(WAYS[0]))
    options = {"budget": 8, "shortlist": with_context_and_without(pair)[0]}
    asked = [
        (SamplingParams(max_tokens=20, temperature=0.9, seed=i, coupling=RESIDUAL), [3, i, 7, 7, i])
        for i in range(5)
    ]
    made = partial(DRAFTED[name], pair.drafter)
    alone = [answer(pair.target, made(), *one, **options).output.token_ids for one in asked]
    engine = Engine(pair.target)
    running = [engine.add(request(pair.target, made(), *one, **options)) for one in asked]
    run(engine)
    assert [one.output.token_ids for one in running] == alone
    assert sum(one.statistics.sources["drafter"].accepted for one in running) > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_sequences_of_a_smaller_model_get_the_distributions_that_they_get_alone(name, way, take):
    drafter, runs = LMDrafter(make_model(tiny(name, take(way))), VOCAB), []
    for together in (True, False):
        rng, kinds = random.Random(4), [(3, 1.0), (90, 0.5), (1, 0.0), (30, 2.0), (200, 1.0)]
        contexts = [context_of(words(rng, n), heat).begin([drafter]) for n, heat in kinds]
        runs.append([])
        for _ in range(3):
            trees = [random_tree(rng, context.ids[-1], rng.randint(1, 9)) for context in contexts]
            runs[-1] += run_staggered(drafter, list(zip(contexts, trees, strict=True)), together)
            for context, tree in zip(contexts, trees, strict=True):
                path = tree.path(rng.randrange(len(tree)))
                context.extend([*(tree.token[node] for node in path[1:]), rng.randrange(VOCAB)])
        assert drafter.model.pool.used > 0
        for context in contexts:
            context.states[drafter.name].release()
        assert drafter.model.pool.used == 0
    for ours, alone in zip(*runs, strict=True):
        for a, b in zip(ours, alone, strict=True):
            same(way, a, b)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_fails_can_be_made_again(way, take, monkeypatch):
    pair = Pair("attention", take(way))
    first, second, tree = pair.begin([5, 6, 7], 8), pair.begin([9, 10], 11), TokenTree(8)
    tree.add(0, 3, "x")
    second.context.extend([12])  # nobody read its hidden state
    with pytest.raises(ValueError, match="not read yet"):
        pair.drafter.answer([first.request(tree, [0]), second.request(TokenTree(12), [0])])
    alone = pair.begin([5, 6, 7], 8)
    for nodes in ([0], [1]):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt(patch, pair.drafter.passes, "run", 1)
            first.distributions(tree, nodes)
        same(way, first.distributions(tree, nodes), alone.distributions(tree, nodes))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["attention", "ours"])
def test_a_drafter_that_was_left_out_goes_on_as_if_it_had_been_asked(kind, way, take):
    pair, runs = Pair(kind, take(way)), []
    # a context would hold what the target's logits offered at each step that asked
    routed, _ = shortlists(pair, None)
    for asked, reading in ((True, False), (False, False), (False, True)):
        rng = random.Random(8)
        text = pair.begin(words(rng, 20), rng.randrange(VOCAB), shortlist=routed)
        for _ in range(90):
            tree = TokenTree(text.context.ids[-1])
            if asked:
                text.distributions(tree, [0])
            text.go_on(tree, [0], rng.randrange(VOCAB))
            if reading:
                pair.drafter.read([text.state], 16)
        least, most = (1, 17) if reading else (1, 1) if asked else (110, 110)
        assert least <= text.state.waiting <= most
        tree = random_tree(rng, text.context.ids[-1], 9)
        runs.append([text.distributions(tree, nodes) for nodes in rounds(tree)])
        text.release()
    for asked_each_step, left_out, read_meanwhile in zip(*runs, strict=True):
        same(way, left_out, asked_each_step)
        same(way, read_meanwhile, asked_each_step)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["attention", "input", "ours"])
def test_what_was_taken_over_is_what_would_be_computed(kind, way, take):
    pair, rng, size = Pair(kind, take(way)), random.Random(2), 64
    ids, pools = words(rng, 150), (pair.target.pool, pair.drafter.pool)
    first = pair.begin(ids[:-1], ids[-1])
    pair.drafter.read([first.state])
    assert first.shared(size) == 2
    kept = [
        (first.target.store.chunk_pages(i, size), first.state.chunk_pages(i, size))
        for i in range(2)
    ]
    for chunk in kept:
        for pool, part in zip(pools, chunk, strict=True):
            pool.pin(part)
    others = []
    for chunks, rest in ((1, 30), (2, 3), (2, 2)):
        text = [*ids[: chunks * size], *words(rng, rest)]
        others.append((first.follow(text, chunks, size), text))
    tree, anew = random_tree(rng, ids[-1], 5), pair.begin(ids[:-1], ids[-1])
    same(way, first.distributions(tree, [0]), anew.distributions(tree, [0]))
    first.release()
    for other, text in others:
        anew, tree = pair.begin(text[:-1], text[-1]), random_tree(rng, text[-1], 9)
        for nodes in rounds(tree):
            same(way, other.distributions(tree, nodes), anew.distributions(tree, nodes))
        for one in (other, anew):
            one.go_on(tree, [0], 5)
        same(way, other.distributions(TokenTree(5), [0]), anew.distributions(TokenTree(5), [0]))
        other.release()
        anew.release()
