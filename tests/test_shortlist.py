"""What is scored in a call: clusters routed, tokens of the context, and how many of either.

pytest tests/test_shortlist.py
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.errors import InvalidInput
from quickbeam.shortlist.context import ContextTokens
from quickbeam.shortlist.layout import FREQUENT, Layout
from quickbeam.shortlist.router import Router, RouterConfig
from quickbeam.shortlist.schedule import Schedule
from quickbeam.shortlist.shortlist import Routed, Shortlist, union, union_on_cpu
from quickbeam.target.native.library import kernels
from test_shortlist_head import spread

VOCAB, D, EMBED = 120, 16, 8
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    ),
]


def make(
    kind: str = "all", device: str = "cpu", schedule: Schedule | None = None, **options: object
) -> Shortlist:
    """`kind`: frequency (20 tokens), context, router (20 frequent ones, clusters of 9, the last one
    short) or all."""
    torch.manual_seed(0)
    weight, order = torch.randn(VOCAB, D, device=device), torch.randperm(VOCAB)
    if kind == "context":
        return Shortlist(
            weight, Layout.nothing(VOCAB), context=partial(ContextTokens, weight), **options
        )
    if kind == "frequency":
        return Shortlist(weight, Layout.by_frequency(order, 20, VOCAB), **options)
    layout = Layout(order[:115], 20, 9, VOCAB)
    router = Router(RouterConfig(D, EMBED, 12, layout.clusters))
    torch.nn.init.normal_(router.down.weight)
    context = (
        partial(ContextTokens, weight, skip=layout.cluster_of == FREQUENT)
        if kind == "all"
        else None
    )
    return Shortlist(
        weight,
        layout,
        router=router,
        schedule=schedule or Schedule(4, 1),
        context=context,
        **options,
    )


def nodes(n: int, seed: int = 1, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, D, device=device), torch.randn(n, EMBED, device=device)


# Schedule


def test_a_schedule_decays_with_depth_to_its_least() -> None:
    assert [Schedule(10, 2, 0.7).clusters(depth) for depth in range(7)] == [10, 7, 4, 3, 2, 2, 2]
    # which the product in floating point just misses
    assert Schedule(100, 1, 0.7).clusters(2) == 49
    assert [Schedule(3, 1, 1.0).clusters(depth) for depth in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    "wrong",
    [(3, 4, 0.5), (3, 0, 0.5), (3, 1, 0.0), (3, 1, 1.1), (3, 1, float("nan")), (3, 1, 0.5, -1)],
)
def test_an_impossible_schedule_is_refused(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(InvalidInput, match="a schedule"):
        Schedule(*wrong)


@examples(100, derandomize=True)
@given(st.integers(1, 400), st.integers(1, 40), st.floats(0.3, 1), st.data())
def test_a_fitted_schedule_is_the_largest_that_keeps_to_its_share(
    rest: int, size: int, decay: float, data: st.DataObject
) -> None:
    layout = Layout(torch.arange(30 + rest), 30, size, 30 + rest)
    share = data.draw(st.integers(min(30 + size, 30 + rest), 30 + rest))
    deepest = data.draw(st.integers(0, 8))
    fitted = Schedule.fit(share, layout, decay, deepest)
    room = layout.clusters - (30 + rest - share) / size
    assert fitted.expected() <= room + 1e-6
    assert (
        fitted.most == layout.clusters
        or Schedule(fitted.most + 1, max(1, int(room / 3)), decay, deepest).expected() > room
    )
    assert (
        fitted.least == fitted.most
        or Schedule(fitted.most, fitted.least + 1, decay, deepest).expected() > room
    )


def test_calls_below_the_deepest_that_is_routed_score_what_the_one_above_did() -> None:
    shortlist = make(schedule=Schedule(4, 1, 0.7, deepest=1))
    hidden, embedded = nodes(2)
    root = shortlist.route(hidden[:1], embedded[:1], [0])
    first = shortlist.route(hidden, embedded, [1, 2], root)
    assert (
        first is not root
        and first.clusters.tolist() == shortlist.route(hidden, embedded, [1, 2]).clusters.tolist()
    )
    assert shortlist.route(hidden, embedded, [2, 3], first) is first
    # nothing above: routed
    assert shortlist.route(hidden, embedded, [2, 2]).clusters.tolist() != first.clusters.tolist()


def test_a_share_of_everything_is_everything_and_one_without_a_cluster_is_refused() -> None:
    layout = Layout(torch.arange(115), 15, 10, 120)
    assert Schedule.fit(9999, layout) == Schedule(10, 10)
    assert Schedule.fit(65, layout, 1.0) == Schedule(5, 5, 1.0)
    with pytest.raises(InvalidInput, match="must be at least 25"):
        Schedule.fit(24, layout)
    with pytest.raises(InvalidInput, match="no clusters"):
        Schedule.fit(24, Layout.by_frequency(torch.arange(50), 20, 50))


# Context


@examples(150, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 19), max_size=12), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sets(st.integers(0, 19)),
)
def test_the_context_holds_what_was_seen_last(
    calls: list[list[int]], window: int, skipped: set[int]
) -> None:
    torch.manual_seed(0)
    weight, h = torch.randn(20, 5), torch.randn(2, 5)
    context = ContextTokens(weight, window, torch.tensor([token in skipped for token in range(20)]))
    seen: list[int] = []  # the least recently seen first
    for number, tokens in enumerate(calls):
        context.reset(tokens) if number == 0 else context.extend(tokens)
        for token in tokens:
            if token not in skipped:
                seen = [other for other in seen if other != token] + [token]
        if len(seen) > window:
            fresh = min(window, len(set(tokens) - skipped))
            seen = seen[-max(fresh, window - window // 4) :]
        held = context.tokens.tolist()
        assert sorted(held) == sorted(seen) and len(context) == len(seen) <= window
        assert [token in context for token in range(20)] == [token in seen for token in range(20)]
        torch.testing.assert_close(context.logits(h), h @ weight[context.tokens].T)


def test_a_row_is_copied_once() -> None:
    weight, h = torch.randn(9, 4), torch.randn(1, 4)
    context = ContextTokens(weight)
    context.reset([3, 5])
    before = context.logits(h)
    weight.zero_()
    context.extend([5, 3, 3])
    assert context.tokens.tolist() == [3, 5] and torch.equal(context.logits(h), before)
    context.extend([7])
    assert context.logits(h)[0, 2] == 0
    context.reset([3])
    assert context.logits(h).tolist() == [[0]]  # another sequence: read anew


def test_rebuilding_is_rare() -> None:
    context = ContextTokens(torch.randn(10_000, 2), window=400)
    context.reset([0])
    for token in range(1, 10_000):
        context.extend([token])
        assert len(context) <= 400
    assert 0 < context.rebuilt <= 10_000 / 100


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(first: bool) -> None:
    shortlist = make()
    with torch.inference_mode() if first else nullcontext():
        state = shortlist.begin([1, 2, 3])
    with nullcontext() if first else torch.inference_mode():
        state.extend(range(60))
        hidden, embedded = nodes(2)
        state.score(hidden, shortlist.route(hidden, embedded, [0, 1]))
    state.extend(range(VOCAB))


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        ContextTokens(torch.randn(3, 2), window=0)


# Routing


def union_plain(logits: torch.Tensor, wanted: list[int], most: int) -> list[int]:
    called = set()
    for row, k in zip(logits.tolist(), wanted, strict=True):
        called |= set(sorted(range(len(row)), key=lambda c: -row[c])[:k])
    law = logits.softmax(-1)
    worth = {cluster: float(law[:, cluster].max()) for cluster in sorted(called)}
    return sorted(sorted(worth, key=lambda c: -worth[c])[:most])


@examples(200, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_the_union_is_that_of_each_nodes_best_clusters(
    n: int, clusters: int, data: st.DataObject
) -> None:
    row = st.lists(st.integers(-3, 3), min_size=clusters, max_size=clusters)  # with ties
    logits = torch.tensor(data.draw(st.lists(row, min_size=n, max_size=n))).float()
    wanted = data.draw(st.lists(st.integers(1, 14), min_size=n, max_size=n))
    most = data.draw(st.integers(1, clusters))
    found = union(logits, torch.tensor(wanted), most).tolist()
    expected = union_plain(logits, wanted, most)
    assert union_on_cpu(logits.numpy(), wanted, most).tolist() == [
        cluster for cluster in expected if cluster >= 0
    ]
    assert found == expected + [-1] * (most - len(expected))


def test_a_nodes_clusters_do_not_depend_on_its_neighbours() -> None:
    shortlist = make("router", most=99)
    hidden, embedded = nodes(5)
    depths = [0, 1, 1, 2, 3]
    alone = [
        shortlist.route(hidden[i : i + 1], embedded[i : i + 1], depths[i : i + 1]).clusters.tolist()
        for i in range(5)
    ]
    assert [len(clusters) for clusters in alone] == [4, 2, 2, 1, 1]
    assert len({tuple(clusters) for clusters in alone}) > 1
    together = shortlist.route(hidden, embedded, depths).clusters.tolist()
    assert together == sorted(set().union(*alone))


@pytest.mark.parametrize("device", DEVICES)
def test_routing_is_limited_repeatable_and_leaves_chance_alone(device: str) -> None:
    shortlist = make("router", device)
    hidden, embedded = nodes(8, device=device)
    assert (
        shortlist.most == 4
        and make("router", most=3).most == 3
        and make("router", most=99).most == 11
    )
    state = torch.get_rng_state()
    first, second = (shortlist.route(hidden, embedded, [0] * 8).clusters for _ in range(2))
    assert torch.equal(first, second) and len(first) == 4
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(kernels() is None, reason="needs native kernels")
def test_calls_come_to_score_what_is_asked_for() -> None:
    """Nodes that agree call for fewer clusters than the schedule assumes."""
    torch.manual_seed(0)
    vocab, size = 1040, 16
    layout = Layout(torch.randperm(vocab), 80, size, vocab)
    router = Router(RouterConfig(D, EMBED, 12, layout.clusters))
    torch.nn.init.normal_(router.down.weight)
    weight, schedule = torch.randn(vocab, D).bfloat16(), Schedule.fit(400, layout, deepest=5)
    room = 20 / schedule.expected()
    assert room == pytest.approx(1, abs=0.1)
    counts = dict[str, float]()
    for name, options in (("follows", {}), ("fixed", {"most": schedule.most})):
        shortlist = Shortlist(weight, layout, router=router, schedule=schedule, **options)
        state, other, scored = shortlist.begin([]), shortlist.begin([]), []
        for step in range(60):
            one, other_one = nodes(1, step)
            hidden, embedded = one.expand(4, -1).bfloat16(), other_one.expand(4, -1)
            for depth in range(6):
                routed = shortlist.route(hidden, embedded, [depth] * 4, None, state.scale)
                state.score(hidden, routed)
                scored.append(len(routed.clusters))
        counts[name] = sum(scored[120:]) / len(scored[120:])
        assert other.scale == 1.0 and (name == "follows" or state.scale == 1.0)
    assert counts["fixed"] < 0.75 * schedule.expected()
    assert counts["follows"] == pytest.approx(schedule.expected(), rel=0.1)


def test_without_a_router_nothing_is_routed() -> None:
    for kind in ("frequency", "context"):
        assert make(kind).route(*nodes(2), [0, 1]).clusters.tolist() == []


# Scoring


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "plain"])
@pytest.mark.parametrize("kind", ["frequency", "context", "router", "all"])
def test_what_is_scored_is_what_is_held_and_counted(
    kind: str, backend: str | None, device: str
) -> None:
    shortlist = make(kind, device, backend=backend)
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, D, device=device)
    state = shortlist.begin(range(0, VOCAB, 7))
    state.extend([1, 2])
    state.extend([3])
    sizes = []
    for seed in range(4):
        hidden, embedded = nodes(3, seed, device)
        routed = shortlist.route(hidden, embedded, [0, 1, 5])
        scores = state.score(hidden, routed)
        found, full = spread(scores, VOCAB), (hidden @ weight.T).cpu()
        held = torch.tensor([state.holds(token, routed) for token in range(VOCAB)])
        assert torch.equal(found[0] > -torch.inf, held)
        torch.testing.assert_close(found[:, held], full[:, held], rtol=1e-4, atol=1e-4)
        assert state.size(routed) == int(held.sum()) < VOCAB
        sizes.append(state.size(routed))
        if kind in ("context", "all"):
            assert all(state.holds(token, routed) for token in (0, 7, 119, 1, 2, 3))
    assert state.scored == sum(sizes)


def test_padded_clusters_are_the_same_shortlist() -> None:
    state, (hidden, _) = make().begin(range(0, VOCAB, 7)), nodes(2)
    bare, padded = Routed(torch.tensor([2, 10])), Routed(torch.tensor([2, 10, -1, -1]))
    assert torch.equal(
        spread(state.score(hidden, bare), VOCAB), spread(state.score(hidden, padded), VOCAB)
    )
    assert state.size(bare) == state.size(padded)
    assert all(state.holds(token, bare) == state.holds(token, padded) for token in range(VOCAB))


@pytest.mark.parametrize("kind", ["context", "all"])
def test_each_sequence_has_a_context_and_a_count_of_its_own(kind: str) -> None:
    shortlist, (hidden, embedded) = make(kind), nodes(1)
    routed = shortlist.route(hidden, embedded, [0])
    rare = [token for token in range(VOCAB) if not shortlist.holds(token, routed)]
    first, second = shortlist.begin([rare[0], rare[1], rare[0]]), shortlist.begin([rare[2]])
    alone = spread(second.score(hidden, routed), VOCAB)
    first.extend([rare[3]])
    first.score(hidden, routed)
    assert [token for token in rare if first.holds(token, routed)] == [rare[0], rare[1], rare[3]]
    assert [token for token in rare if second.holds(token, routed)] == [rare[2]]
    assert torch.equal(spread(second.score(hidden, routed), VOCAB), alone)
    assert (first.scored, second.scored) == (first.size(routed), 2 * second.size(routed))
    if kind == "context":
        assert first.score(hidden, routed).tokens.tolist() == [rare[1], rare[0], rare[3]]


def test_a_context_alone_must_hold_a_token() -> None:
    shortlist, (hidden, _) = make("context"), nodes(1)
    with pytest.raises(ValueError, match="begin it with a prompt"):
        shortlist.begin([]).score(hidden, shortlist.route(hidden, hidden, [0]))


def test_parts_that_do_not_fit_are_refused() -> None:
    weight, layout = torch.randn(30, 4), Layout(torch.arange(30), 10, 5, 30)
    router, schedule = Router(RouterConfig(4, 4, 4, 4)), Schedule(2, 1)
    for parts, says in [
        ({"router": router}, "go together"),
        ({"schedule": schedule}, "go together"),
        (
            {"router": Router(RouterConfig(4, 4, 4, 3)), "schedule": schedule},
            "3 clusters, the layout has 4",
        ),
        ({"router": router, "schedule": schedule, "most": 0}, "at most 0 clusters"),
    ]:
        with pytest.raises(InvalidInput, match=says):
            Shortlist(weight, layout, **parts)
    with pytest.raises(InvalidInput, match="empty"):
        Shortlist(weight, Layout.nothing(30))
