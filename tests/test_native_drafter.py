"""The feature drafter, its router and its shortlisted head on the native kernels."""

import random
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quantised
import reference
from cases import examples
from features import KINDS, RANDOM, WIDE, Pair, head_of, random_tree, rounds
from kernels import SETS, best_set, every_set, load, number
from models import VOCAB, table, tiny
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.drafters.shortlist import native as parts
from quickbeam.drafters.shortlist.layout import Layout, Scores
from quickbeam.drafters.shortlist.router import EPS, NativeRouter, Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import ContextTokens
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BFLOAT16, INT8
from quickbeam.models.opening import make_model
from test_shortlist import spread

SINGLE, HALF = 2.0**-23, 2.0**-8


@best_set
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_as_near_to_the_equations_as_pytorchs_operators(isa, kind, native):
    """The head's rows in 8 bits add little to what rounding does."""
    distances = {}
    for way in (isa, "eager"):
        native(way)
        pair = Pair(kind, torch.bfloat16, native=True)
        assert isinstance(pair.drafter.passes, NativePasses) is (way != "eager")
        distances[way] = mean(pair.distances())
    assert distances[isa] <= 1.25 * distances["eager"] + 0.02, distances
    for other in (isa, SETS[-1]) if kind == "ours" else (isa,):
        native(other)
        pair = Pair(kind, torch.bfloat16, native=True, weights=BFLOAT16)
        assert mean(pair.distances()) <= 1.25 * distances["eager"] + 1e-3


@best_set
def test_a_drafter_that_computes_something_else_is_seen(isa, native):
    native(isa)
    pair = Pair("attention", torch.bfloat16)
    before = mean(pair.distances())
    pair.network.out.weight.mul_(1.5)
    assert mean(pair.distances()) > 5 * before + 0.01


@every_set
@pytest.mark.parametrize("kind", ["attention", "input", "ours", "own-head"])
def test_a_probs_does_not_depend_on_the_nodes_asked_for_beside_it(isa, kind, native):
    native(isa)
    pair, rng = Pair(kind, torch.bfloat16), random.Random(0)
    ids = [rng.randrange(VOCAB) for _ in range(70)]
    text, tree = pair.begin(ids[:-1], ids[-1]), random_tree(rng, ids[-1], 30)

    def distributions_of(calls, asked):
        """Each in a tree of its own, as a node is asked for once in a tree."""
        probs = dict[int, torch.Tensor]()
        for nodes in calls:
            probs |= zip(nodes, text.distributions(asked, nodes), strict=True)
        return probs

    together = distributions_of(rounds(tree), tree)
    one_by_one = distributions_of([[node] for node in range(len(tree))], tree.first(len(tree)))
    assert all(torch.equal(together[node], one_by_one[node]) for node in together)
    for _ in range(3):  # any of the nodes whose parents were asked for, in any order
        again, calls, left = tree.first(len(tree)), [[0]], set(range(1, len(tree)))
        while left:
            ready = sorted(node for node in left if tree.parent[node] not in left)
            calls.append(sorted(rng.sample(ready, rng.randint(1, len(ready)))))
            left -= set(calls[-1])
        mixed = distributions_of(calls, again)
        assert all(torch.equal(together[node], mixed[node]) for node in together)


@every_set
def test_chunks_of_the_certain_text_give_the_same_distributions(isa, native, monkeypatch):
    native(isa)
    pair, distributions = Pair("ours", torch.bfloat16), []
    ids = [random.Random(1).randrange(VOCAB) for _ in range(150)]
    for chunk in (512, 64, 7):
        monkeypatch.setattr("quickbeam.drafters.feature.CHUNK", chunk)
        text, tree = pair.begin(ids[:-1], ids[-1]), random_tree(random.Random(2), ids[-1], 9)
        distributions.append(torch.cat([text.distributions(tree, nodes) for nodes in rounds(tree)]))
    assert all(torch.equal(distributions[0], one) for one in distributions[1:])


@st.composite
def heads(draw):
    vocab, size, half = (draw(st.integers(1, most)) for most in (200, 50, 40))
    seed = draw(st.integers(0, 99))
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    order = order[: draw(st.integers(0, vocab))]
    layout = Layout(order, draw(st.integers(0, len(order))), size, vocab)
    every = range(layout.clusters)
    clusters = sorted(draw(st.sets(st.sampled_from(every)))) if every else []
    h = number(draw(st.integers(1, 20)), 2 * half, seed=seed + 1)
    return number(vocab, 2 * half, seed=seed), h, layout, clusters


def scored(blocks, h, clusters):
    prepared = blocks.prepare(torch.tensor(clusters, dtype=torch.int64))
    return Scores(blocks.score(h, prepared), prepared.tokens)


def of_rows(isa, rows, weight, h, count, name=INT8):
    """The logits of the first `count` rows that stand beside no block."""
    alone = parts.NativeHead(weight, Layout.nothing(len(weight)), load(isa), name)
    tokens = torch.zeros(count, dtype=torch.int64)
    return alone.score(h, parts.Prepared(np.empty(0, np.int64), tokens, torch.zeros(count)), rows)


@every_set
@examples(60, derandomize=True)
@given(heads())
def test_blocks_give_the_rows_of_the_head(isa, case):
    weight, h, layout, clusters = case
    scores = scored(parts.NativeHead(weight, layout, load(isa), BFLOAT16), h, clusters)
    assert scores.logits.dtype is torch.float32
    held = layout.scored(torch.tensor(clusters, dtype=torch.int64))
    right = torch.full((len(h), layout.vocab), -torch.inf)
    right[:, held] = (h.double() @ weight[held].double().T).float()
    largest = float((h.abs().double() @ weight.abs().double().T).max())
    allowed = (weight.shape[1] + 4) * SINGLE * largest
    torch.testing.assert_close(spread(scores, layout.vocab), right, rtol=1e-6, atol=allowed)


@every_set
@examples(40, derandomize=True)
@given(heads(), st.lists(st.integers(0, 10**6), max_size=30))
def test_rows_of_8_bits_are_those_of_the_reference(isa, case, others):
    weight, h, layout, clusters = case
    expected = quantised.product(h, quantised.quantise(weight, INT8))
    blocks = parts.NativeHead(weight, layout, load(isa), INT8)
    rows = parts.NativeRows(weight, load(isa), INT8)
    prepared = blocks.prepare(torch.tensor(clusters, dtype=torch.int64))
    tokens, logits = prepared.tokens, blocks.score(h, prepared)
    finite = logits[0] > -torch.inf
    assert torch.equal(logits[:, finite], expected[:, tokens[finite]])
    ids = torch.tensor([other % layout.vocab for other in others], dtype=torch.int64)
    rows.write(2, ids)
    rows.write(0, ids)  # over some of them
    assert torch.equal(of_rows(isa, rows, weight, h, len(ids)), expected[:, ids])
    if len(ids):
        bias = torch.zeros(len(ids)).masked_fill_(ids % 3 == 0, -torch.inf)
        both = blocks.score(
            h, parts.Prepared(prepared.blocks, torch.cat([tokens, ids]), bias), rows
        )
        assert torch.equal(both[:, : len(tokens)][:, finite], logits[:, finite])
        assert torch.equal(both[:, len(tokens) :], expected[:, ids] + bias)


@best_set
def test_rows_that_are_not_finite_stay_as_they_are(isa):
    weight, h = number(40, 64), number(3, 64, seed=1)
    weight[7, 3], weight[9, 0] = float("nan"), float("inf")
    layout = Layout.by_frequency(torch.arange(40), 40, 40)
    logits, _ = scored(parts.NativeHead(weight, layout, load(isa)), h, [])
    assert parts.rows_format(weight) == BFLOAT16 and bool(logits[:, 7].isnan().all())
    assert bool(logits[:, 10:40].isfinite().all())


@every_set
@examples(40, derandomize=True)
@given(rng=RANDOM, window=st.integers(1, 60), d=st.integers(1, 40).map(lambda half: 2 * half))
def test_tokens_of_the_context_have_the_rows_of_the_head(isa, rng, window, d):
    weight, skip = number(100, d), {token for token in range(100) if token % 7 == 0}
    rows = parts.NativeRows(weight, load(isa), BFLOAT16)
    context, h = ContextTokens(window, skip, rows), number(rng.randint(1, 20), d, seed=1)
    right = h.double() @ weight.double().T
    allowed = (d + 4) * SINGLE * float((h.abs().double() @ weight.abs().double().T).max())
    for _ in range(6):
        context.extend([rng.randrange(100) for _ in range(rng.randint(0, 50))])
        count = len(context.tokens)
        got = of_rows(isa, rows, weight, h, count, BFLOAT16)
        assert got.shape == (len(h), count) and count <= window
        assert bool(((got.double() - right[:, context.tokens]).abs() <= allowed).all())


@every_set
@examples(40, derandomize=True)
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 2).filter(lambda sizes: sum(sizes) % 2 == 0),
    width=st.integers(1, 70),
    clusters=st.integers(1, 70),
    n=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_the_router_scores_clusters(isa, sizes, width, clusters, n, seed):
    kernels, rng = load(isa), random.Random(seed)
    torch.manual_seed(seed)
    router = Router(RouterConfig(*sizes, width, clusters)).requires_grad_(False)
    for parameter in router.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    hidden = number(n, sizes[0], like=torch.float32, seed=seed)
    embedded = number(n, sizes[1], seed=seed + 1)
    wanted = [rng.randrange(n) for _ in range(rng.randint(1, n))]

    def scored(name):
        return NativeRouter(router, kernels, name)(hidden[wanted], embedded[wanted])

    scores, down = scored(BFLOAT16), router.down
    normed = [reference.norm(part[wanted], None, EPS) for part in (hidden, embedded)]
    x = torch.cat(normed, -1).to(torch.bfloat16)
    middle = reference.activate(x, router.up.weight, router.up.bias)
    right = reference.linear(middle.to(torch.bfloat16), down.weight, down.bias)
    # one bit of what is between
    allowed = HALF * reference.linear(middle.abs(), down.weight.abs(), down.bias.abs())
    assert bool(((scores.double() - right).abs() <= allowed + 1e-6).all())
    plain = router(hidden[wanted], embedded[wanted].float())
    torch.testing.assert_close(scores, plain, rtol=0.05, atol=0.05)
    near = float(plain.abs().max())  # 8 bits, as a wrong cluster costs only its time
    torch.testing.assert_close(scored(None), plain, rtol=0.05, atol=0.05 + 0.05 * near)


def test_drafters_of_odd_sizes_stay_with_pytorchs_operators():
    model, target = tiny("llama", torch.bfloat16), make_model(tiny("llama", torch.bfloat16))
    network = head_of(replace(WIDE, intermediate_size=47), model)
    drafter = eagle_drafter(network, target, library.kernels())
    assert isinstance(drafter.passes, TorchPasses)


@best_set
@pytest.mark.parametrize(
    "config",
    [replace(WIDE, layers=(1, 2, 3)), replace(WIDE, layers=(3,), join="input", final_norm=False)],
)
def test_an_embedding_that_scales_is_not_passed_over(isa, config, native, monkeypatch):
    monkeypatch.setitem(KINDS, "scaled", ("gemma3-window", True, config))
    distances = {}
    for way in (isa, "eager"):
        native(way)
        distances[way] = mean(Pair("scaled", torch.bfloat16, weights=BFLOAT16).distances())
    assert distances[isa] <= 1.25 * distances["eager"] + 1e-3, distances


@best_set
def test_the_bias_of_a_head_counts(isa, native):
    native(isa)
    for fast in (False, True):
        model = tiny("", torch.bfloat16, config=table("families")["phi"])
        model.lm_head.bias.data.normal_()
        feature = number(5, 32)
        weight = model.lm_head.weight.detach().clone()
        bias = model.lm_head.bias.detach().float().clone()
        target = make_model(model, native=fast)
        drafter = eagle_drafter(
            EagleHead(WIDE, target.embedding, target.head), target, library.kernels()
        )
        assert isinstance(drafter.passes, NativePasses)
        right = quantised.product(feature, quantised.quantise(weight, INT8)) + bias
        torch.testing.assert_close(drafter.passes.logits(feature), right, rtol=1e-3, atol=1e-3)
