"""What is scored in a call: clusters routed, tokens of the context, and how many of either."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples, refuses
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import WINDOW, ContextTokens, Shortlist
from quickbeam.models.native import library

VOCAB, D, EMBED = 120, 16, 8


def spread(scores, vocab):
    """`[n, vocab]` logits by token, -inf without a column; fails where a token has two."""
    out = torch.full((len(scores.logits), vocab), -torch.inf)
    finite = scores.logits > -torch.inf
    assert bool((finite == finite[:1]).all())
    tokens = scores.tokens[finite[0]]
    assert len(tokens.unique()) == len(tokens)
    out[:, tokens.cpu()] = scores.logits[:, finite[0]].float().cpu()
    return out


def make(kind="all", chosen=4, **options):
    """`kind`: frequency (20 tokens), context, router (20 frequent ones, clusters of 9, the last one
    short) or all."""
    torch.manual_seed(0)
    weight, order = torch.randn(VOCAB, D), torch.randperm(VOCAB)
    if kind == "context":
        return Shortlist(weight, Layout.nothing(VOCAB), None, window=WINDOW, **options)
    if kind == "frequency":
        return Shortlist(weight, Layout.by_frequency(order, 20, VOCAB), None, **options)
    layout = Layout(order[:115], 20, 9, VOCAB)
    router = Router(RouterConfig(D, EMBED, 12, layout.clusters))
    torch.nn.init.normal_(router.down.weight)
    window = WINDOW if kind == "all" else None
    return Shortlist(weight, layout, None, router=router, chosen=chosen, window=window, **options)


def nodes(n, seed=1):
    torch.manual_seed(seed)
    return torch.randn(n, D), torch.randn(n, EMBED)


def route(shortlist, hidden, embedded):
    if shortlist.route is None:
        return shortlist.none
    with torch.inference_mode():
        return shortlist.choose(shortlist.route(hidden, embedded))[0]


def test_a_share_of_everything_is_everything_and_one_without_a_cluster_is_refused():
    layout = Layout(torch.arange(115), 15, 10, 120)
    rooms = [layout.within(share)[1] for share in (9999, 115, 114, 65, 34, 25)]
    assert rooms == [10, 10, 9, 5, 1, 1]
    for one in (layout, Layout.by_frequency(torch.arange(50), 20, 50)):
        refuses("must be at least", one.within, 9)
    short = Layout(torch.arange(18), 15, 10, 120)  # one cluster of 3
    assert short.within(18) == (short, 1)


@examples(150, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 19), max_size=12), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sets(st.integers(0, 19)),
)
def test_the_context_holds_what_was_seen_last(calls, window, skipped):
    context = ContextTokens(window, skipped)
    seen: list[int] = []  # the least recently seen first
    for tokens in calls:
        before = context.version, context.tokens.tolist()
        context.extend(tokens)
        for token in tokens:
            if token not in skipped:
                seen = [other for other in seen if other != token] + [token]
        if len(seen) > window:
            fresh = min(window, len(set(tokens) - skipped))
            seen = seen[-max(fresh, window - window // 4) :]
        held = context.tokens.tolist()
        assert sorted(held) == sorted(seen) and len(seen) <= window
        assert held == before[1] or context.version != before[0]


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(first):
    shortlist = make()
    with torch.inference_mode() if first else nullcontext():
        state = shortlist.begin([1, 2, 3])
    with nullcontext() if first else torch.inference_mode():
        state.extend(range(60))
        hidden, embedded = nodes(2)
        state.score(hidden, route(shortlist, hidden, embedded))
    state.extend(range(VOCAB))


def choose(scores, count):
    clusters = scores.shape[1]
    layout = Layout(torch.arange(clusters), 0, 1, clusters)
    router = Router(RouterConfig(1, 1, 1, clusters))
    shortlist = Shortlist(torch.zeros(clusters, 2), layout, None, router=router, chosen=count)
    return shortlist.choose(scores)[0].tolist()


@examples(200, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_the_clusters_are_those_that_the_nodes_want_most(n, clusters, data):
    row = st.lists(st.floats(-6, 6, width=32), min_size=clusters, max_size=clusters)
    logits = torch.tensor(data.draw(st.lists(row, min_size=n, max_size=n)))
    count = data.draw(st.integers(1, clusters))
    worth = logits.double().softmax(-1).sum(0).tolist()
    most = sum(sorted(worth, reverse=True)[:count])
    chosen = choose(logits, count)
    assert chosen == sorted(set(chosen)) and len(chosen) == count
    assert sum(worth[c] for c in chosen) == pytest.approx(most, rel=1e-4)


def test_bad_scores_come_last_and_a_context_alone_must_hold_a_token():
    bad, infinite = math.nan, math.inf
    for row, count, expected in (
        ([0.0, 1.0, 1.0, 0.0, 1.0], 3, [1, 2, 4]),
        ([bad, 0.0, bad, -infinite, 1.0], 2, [1, 4]),
        ([0.0, -infinite, 1.0, bad, -infinite], 2, [0, 2]),
    ):
        for rows in (1, 3):
            assert choose(torch.tensor([row] * rows), count) == expected
    assert len(choose(torch.tensor([[bad] * 5]), 2)) == 2
    # a node whose scores are bad leaves the choice to the others
    assert choose(torch.tensor([[bad] * 4, [0.0, 3.0, 1.0, 2.0]]), 2) == [1, 3]
    shortlist, (hidden, _) = make("context"), nodes(1)
    with pytest.raises(ValueError, match="begin it with a prompt"):
        shortlist.begin([]).score(hidden, route(shortlist, hidden, hidden))
    layout, router = Layout(torch.arange(30), 10, 5, 30), Router(RouterConfig(4, 4, 4, 4))
    before = torch.get_rng_state()
    Shortlist(torch.zeros(30, 4), layout, None, router=router, chosen=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kernels", [None, library.kernels()])
def test_tokens_that_the_drafter_does_not_know_are_left_out(kernels):
    layout = Layout.by_frequency(torch.arange(VOCAB), 4, VOCAB)
    weight = torch.randn(VOCAB, 8, dtype=torch.bfloat16)
    state = Shortlist(weight, layout, kernels, window=50).begin([9, VOCAB, VOCAB + 7, 6])
    assert state.context_tokens.tolist() == [9, 6]


@pytest.mark.parametrize("kind", ["frequency", "context", "router", "all"])
def test_what_is_scored_is_what_is_held_and_counted(kind):
    shortlist = make(kind)
    weight, state = shortlist.weight, shortlist.begin(range(0, VOCAB, 7))
    state.extend([1, 2])
    state.extend([3])
    total = 0
    for seed in range(4):
        hidden, embedded = nodes(3, seed)
        routed = route(shortlist, hidden, embedded)
        logits, full = spread(state.score(hidden, routed), VOCAB), hidden @ weight.T
        held, layout = logits[0] > -torch.inf, shortlist.layout
        expected = layout.scored(routed).tolist()
        expected += [*range(0, VOCAB, 7), 1, 2, 3] if kind in ("context", "all") else []
        assert set(held.nonzero()[:, 0].tolist()) == set(expected) and int(held.sum()) < VOCAB
        torch.testing.assert_close(logits[:, held], full[:, held], rtol=1e-4, atol=1e-4)
        total += int(held.sum())
    assert state.scored == total


@pytest.mark.parametrize("kind", ["context", "all"])
def test_each_sequence_has_a_context_and_a_count_of_its_own(kind):
    shortlist, (hidden, embedded) = make(kind), nodes(1)
    routed = route(shortlist, hidden, embedded)
    always = set(shortlist.layout.scored(routed).tolist())
    rare = [token for token in range(VOCAB) if token not in always]
    first, second = shortlist.begin([rare[0], rare[1], rare[0]]), shortlist.begin([rare[2]])
    alone = spread(second.score(hidden, routed), VOCAB)
    first.extend([rare[3]])
    listed = spread(first.score(hidden, routed), VOCAB)[0] > -torch.inf
    assert set(listed.nonzero()[:, 0].tolist()) == always | {rare[0], rare[1], rare[3]}
    assert torch.equal(spread(second.score(hidden, routed), VOCAB), alone)
    held = (alone[0] > -torch.inf).nonzero()[:, 0].tolist()
    assert set(held) == always | {rare[2]}
    assert [first.scored, second.scored] == [int(listed.sum()), 2 * len(held)]
    if kind == "context":
        assert set(first.score(hidden, routed).tokens.tolist()) == {rare[1], rare[0], rare[3]}
