"""Draws, and trees against plain references of the papers; what they ask of the drafter."""

import math
from collections import Counter
from functools import lru_cache
from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from drafters import KnownDrafter, context_of, paths, propose, tree_of, zipf_drafter
from quickbeam.drafters.base import DraftProbs
from quickbeam.methods import children, search
from quickbeam.methods.acceptance import printed_features
from quickbeam.methods.children import DrawnChildren, RankedChildren, likeliest_children
from quickbeam.methods.ddtree import DDTree
from quickbeam.methods.dyspec import DySpec, Threshold
from quickbeam.methods.eagle2 import Eagle2
from quickbeam.methods.pctree import pctree
from quickbeam.methods.sequoia import Sequoia, Shapes
from toy import ToyModel, chi_square

Path = tuple[int, ...]
Slots = list[tuple[float, list[float], Path]]  # v, R, the path of the node
seeds, few = st.integers(0, 10**6), st.integers(1, 5)


def test_draws_are_without_replacement_and_ranked_children_deterministic():
    """All orders of four tokens of very unequal weight, in columns of their own."""
    weights, names = [0.96, 0.025, 0.01, 0.005], [7, 3, 0, 9]
    rows = torch.tensor([weights, [0.0, 0.5, 0.0, 0.5], [0.0] * 4])
    distributions = DraftProbs(rows, torch.tensor(names), 10)
    generator = torch.Generator().manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(4000):
        first, second, nothing = (DrawnChildren(distributions, i, generator) for i in range(3))
        order, left = [], 1.0
        for _ in range(4):
            assert first.left == pytest.approx(left, abs=1e-6)
            token, probability = first.draw()
            order.append(names.index(token))
            assert probability == pytest.approx(weights[order[-1]])
            left -= probability
        counts[tuple(order)] += 1
        assert first.draw() is None and nothing.draw() is None
        assert sorted(second.draw()[0] for _ in range(2)) == [3, 9] and second.draw() is None
        assert torch.equal(first.probs, distributions.dense(0))
    exact = {}
    for order in permutations(range(4)):
        exact[order], left = 1.0, 1.0
        for token in order:
            exact[order] *= weights[token] / left
            left -= weights[token]
    assert chi_square(counts, exact) > 1e-3
    rows = likeliest_children(
        context_of([1], 0.0), DraftProbs(torch.tensor([[0.1, 0.0, 0.6, 0.3]])), [0], 9
    )
    ranked, seen = RankedChildren(*rows), []
    while ranked.left:
        seen.append((ranked.left, *ranked.draw()))
    assert [token for _, token, _ in seen] == [2, 3, 0] and ranked.draw() is None
    assert [left for left, *_ in seen] == [p for *_, p in seen] == pytest.approx([0.6, 0.3, 0.1])
    assert ranked.probs is None


def strike_out(residual, token):
    rest = [0.0 if t == token else r for t, r in enumerate(residual)]
    total = sum(rest)
    return [r / total for r in rest] if total else rest


def algorithm_1(probs, size, max_depth, choose):
    """The paper's loop: each way it can go, with its probability. `choose`: the tokens to try."""

    def go_on(prob, slots, nodes):
        slots = [slot for slot in slots if sum(slot[1]) > 0]
        if not slots or len(nodes) == size:
            yield prob, nodes
            return
        best = max(slots, key=lambda slot: slot[0])
        v, residual, node = best
        others = [slot for slot in slots if slot is not best]
        for token in choose(node, residual):
            child = (*node, token)
            opened: Slots = [(v * (1 - residual[token]), strike_out(residual, token), node)]
            if len(child) < max_depth:
                opened.append((v * residual[token], probs([0, *child]).double().tolist(), child))
            yield from go_on(prob * residual[token], others + opened, (*nodes, child))

    yield from go_on(1.0, [(1.0, probs([0]).double().tolist(), ())], ())


@examples(60, derandomize=True)
@given(seed=seeds, size=st.integers(1, 40), max_depth=st.integers(1, 12))
def test_greedy_fills_the_slots_of_algorithm_1_in_its_order(seed, size, max_depth):
    """With the same draws at each node, whenever they are made: the same tree, node by node."""
    model = ToyModel(vocab=6, seed=seed)

    def draw_from(distributions, row, *_):
        seed = hash(tuple(distributions.values[row].tolist())) % 2**62
        return DrawnChildren(distributions, row, torch.Generator().manual_seed(seed))

    orders: dict[Path, list[int]] = {}

    def next_token(node, residual):
        if node not in orders:
            draws = draw_from(DraftProbs(model.draft([0, *node])[None]), 0)
            orders[node] = [draws.draw()[0] for _ in range(sum(r > 0 for r in residual))]
        return [next(token for token in orders[node] if residual[token] > 0)]

    ((_, expected),) = algorithm_1(model.draft, size, max_depth, next_token)
    method = DySpec(KnownDrafter(model.draft), printed_features)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "DrawnChildren", draw_from)
        tree = tree_of(method, context_of([0], 1.0), size + 1, max_depth)
    assert paths(tree) == expected


def all_paths(probs, max_depth, least):
    every, layer = [], [(1.0, ())]
    for _ in range(max_depth):
        layer = [
            (v * p, (*path, t))
            for v, path in layer
            for t, p in enumerate(probs([0, *path]).tolist())
            if 0 < v * p >= least
        ]
        every += layer
    return sorted(every, key=lambda one: -one[0])


@examples(80, derandomize=True)
@given(seeds, st.integers(1, 40), st.integers(1, 5), st.sampled_from([0.0, 0.1, 1.0]))
def test_at_temperature_0_greedy_takes_the_likeliest_paths(seed, size, max_depth, fraction):
    """However many distributions a call asks for."""
    model = ToyModel(vocab=4, seed=seed)
    method = DySpec(KnownDrafter(model.draft), printed_features)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "FRACTION", fraction)
        patch.setattr(search, "CHILD_SHARE", 1.0)
        tree = tree_of(method, context_of([0], 0.0), size + 1, max_depth)
    assert list(paths(tree)) == [path for _, path in all_paths(model.draft, max_depth, 0.0)[:size]]


@examples(80, derandomize=True)
@given(seeds, st.floats(0.005, 0.5), st.integers(1, 6), st.integers(2, 60))
def test_at_temperature_0_threshold_takes_all_likely_paths(seed, threshold, max_depth, budget):
    model = ToyModel(vocab=5, seed=seed)
    method = Threshold(KnownDrafter(model.draft), threshold)
    tree = tree_of(method, context_of([0], 0.0), budget, max_depth)
    likely = all_paths(model.draft, max_depth, threshold)
    if len(likely) < budget:
        assert set(paths(tree)) == {path for _, path in likely}
    else:  # layer by layer, the best of the last
        by_layer = sorted(likely, key=lambda one: (len(one[1]), -one[0]))
        whole = [one for one in by_layer if len(one[1]) < max(tree.depth)]
        assert {path for _, path in whole} <= set(paths(tree)) <= {path for _, path in likely}
        rest = [
            path
            for _, path in by_layer
            if len(path) == max(tree.depth) and (len(path) == 1 or path[:-1] in paths(tree))
        ]
        assert paths(tree)[len(whole) :] == tuple(rest[: budget - 1 - len(whole)])
        assert len(tree) == budget


def algorithm_2(probs, threshold, max_depth):
    """The paper's layers without a cap: each tree (paths and places) with its probability."""

    def fill(prob, queue, nodes):
        if not queue:
            yield prob, nodes
            return
        (v, node), *rest = queue
        residual = probs([0, *node]).double().tolist() if len(node) < max_depth else []
        yield from draw(prob, v, node, residual, 0, rest, nodes)

    def draw(prob, v, node, residual, place, rest, nodes):
        if v < threshold or not sum(residual):
            yield from fill(prob, rest, nodes)
            return
        for token, d in enumerate(residual):
            if d > 0:
                child, struck = (*node, token), strike_out(residual, token)
                more = [*rest, (v * d, child)], nodes | {(child, place)}
                yield from draw(prob * d, v * (1 - d), node, struck, place + 1, *more)

    yield from fill(1.0, [(1.0, ())], frozenset())


@pytest.mark.parametrize("seed", range(3))
def test_threshold_trees_have_the_probs_of_algorithm_2(seed):
    model = ToyModel(vocab=3, seed=seed)
    method = Threshold(KnownDrafter(model.draft), 0.25)
    generator = torch.Generator().manual_seed(seed)
    exact: Counter = Counter()
    for prob, nodes in algorithm_2(model.draft, 0.25, 3):
        exact[nodes] += prob
    assert len(exact) > 10

    def sampled_tokens():
        tree = tree_of(method, context_of([0], 1.0, generator), 100, 3)
        return frozenset(
            (path, list(tree.children[tree.parent[node]]).index(path[-1]))
            for node, path in enumerate(paths(tree), 1)
        )

    assert chi_square(Counter(sampled_tokens() for _ in range(2500)), exact) > 1e-3 / 3


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_greedy_calls_the_drafter_about_once_a_layer(temperature):
    generator, extra, wasted = torch.Generator().manual_seed(0), [], []
    for seed in range(20):
        drafter = zipf_drafter(seed=seed)
        tree = tree_of(DySpec(drafter), context_of([seed], temperature, generator), 64, 40)
        assert len(tree) == 64
        extra.append(drafter.rounds - max(tree.depth))
        wasted.append(drafter.rows - 63)
    assert max(extra) <= 6 and sum(extra) / 20 < 3
    assert max(wasted) < 32


def expand_and_rerank(probs, width, depth, size):
    candidates: list[tuple[float, Path]] = []
    layer: list[tuple[float, Path]] = [(1.0, ())]
    for _ in range(depth):
        fresh = []
        for v, path in layer:
            best = sorted(enumerate(probs([0, *path]).tolist()), key=lambda one: -one[1])[:width]
            fresh += [(v * p, (*path, token)) for token, p in best if p > 0]
        layer = sorted(fresh, reverse=True)[:width]
        candidates += fresh
    return {path for _, path in sorted(candidates, reverse=True)[:size]}


@examples(80, derandomize=True)
@given(seeds, few, st.integers(1, 4), st.integers(2, 40), few, st.sampled_from([0.0, 1.0]))
def test_eagle2_expands_and_reranks(seed, width, depth, budget, max_depth, temperature):
    model = ToyModel(vocab=6, seed=seed)
    method = Eagle2(KnownDrafter(model.draft), width, depth)
    tree = tree_of(method, context_of([0], temperature), budget, max_depth)
    depth = min(depth, max_depth)
    assert set(paths(tree)) == expand_and_rerank(model.draft, width, depth, budget - 1)
    assert tree.value[1:] == sorted(tree.value[1:], reverse=True)


@examples(40, derandomize=True)
@given(seeds, st.integers(1, 16), st.integers(0, 4), st.sampled_from([0.0, 1.0]))
def test_ddtree_has_the_likeliest_paths_by_the_marginals(seed, budget, max_depth, temperature):
    """Against all paths, with one request a depth."""
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1)
    drafter = KnownDrafter(lambda ids: rows[len(ids) - 1])
    tree = tree_of(DDTree(drafter), context_of([0], temperature), budget, max_depth)
    every = [
        math.prod(float(rows[depth][token]) for depth, token in enumerate(path))
        for length in range(1, max_depth + 1)
        for path in product(range(4), repeat=length)
    ]
    assert tree.value[1:] == pytest.approx(sorted(every, reverse=True)[: budget - 1])
    for path, value in zip(paths(tree), tree.value[1:], strict=True):
        assert value == pytest.approx(math.prod(float(rows[d][t]) for d, t in enumerate(path)))
    assert drafter.rows == min(max_depth, budget - 1) and len(set(paths(tree))) == len(tree) - 1


@examples(20, derandomize=True)
@given(seeds, st.integers(2, 40), st.integers(1, 5))
def test_pctree_keeps_four_parents_of_each_depth(seed, budget, max_depth):
    scores, bias = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)), torch.eye(6)

    def probs(ids):
        return (2 * scores[len(ids) - 1] + bias[ids[-1]]).softmax(-1)

    tree = tree_of(pctree(KnownDrafter(probs)), context_of([0], 0.0), budget, max_depth)
    assert set(paths(tree)) == expand_and_rerank(probs, 4, max_depth, budget - 1)


@lru_cache
def all_shapes(nodes, depth):
    """Every ordered tree of this many nodes and at most this depth, as nested tuples."""

    def forests(left):
        if left == 0:
            yield ()
        for first in range(1, left + 1):
            for tree, rest in product(all_shapes(first, depth - 1), forests(left - first)):
                yield (tree, *rest)

    return [()] if nodes == 1 else list(forests(nodes - 1)) if depth > 0 else []


def tokens_of(tree, acceptance):
    if len(tree) > len(acceptance):
        return 0.0
    return 1 + sum(
        rate * tokens_of(child, acceptance) for child, rate in zip(tree, acceptance, strict=False)
    )


def nested(shape, node=0):
    return tuple(nested(shape, child) for child in shape[node])


@examples(60, derandomize=True)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 6))
def test_sequoias_shape_is_the_best_of_all(acceptance, nodes, depth):
    shapes = Shapes(acceptance, 6)
    best = max(
        tokens_of(tree, acceptance)
        for size in range(1, nodes + 1)
        for tree in all_shapes(size, depth)
    )
    shape = shapes.shape(nodes, depth)
    assert pytest.approx(best) == tokens_of(nested(shape), acceptance)
    assert len(shape) <= nodes


def test_sequoia_fills_its_shape_and_learns_what_is_accepted():
    method = Sequoia(zipf_drafter(), (0.5, 0.3, 0.2))
    for temperature in (0.0, 1.0):
        for budget in (2, 7, 30):
            tree = tree_of(method, context_of([0], temperature), budget, 20)
            shape = Shapes((0.5, 0.3, 0.2), budget).shape(budget, 20)
            assert nested([list(children.values()) for children in tree.children]) == nested(shape)
    method, ids = Sequoia(zipf_drafter()), [0]
    first = tree_of(method, context_of(ids, 0.0), 16, 20)
    for _ in range(400):
        tree, learn = propose(method, context_of(ids, 0.0), 16, 20)
        path = [0]
        while len(tree.children[path[-1]]) > 1:
            token, node = list(tree.children[path[-1]].items())[1]
            ids.append(token)
            path.append(node)
        ids.append(499 if tree.child(path[-1], 499) is None else 498)
        learn(tree, path)
    assert method.acceptance[1] > 0.9 > 0.1 > method.acceptance[0]
    assert max(tree.depth) >= 7 > max(first.depth)
    measured = Sequoia(zipf_drafter(), (0.5, 0.3))
    propose(measured, context_of([0], 0.0), 16, 20).learn(tree, path)
    assert measured.acceptance == (0.5, 0.3)
