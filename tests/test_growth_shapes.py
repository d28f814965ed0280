"""EAGLE-2's and Sequoia's trees against brute force.

pytest tests/test_growth_shapes.py
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from drafters import KnownDrafter, context_of, grow, paths, tree_of, zipf_drafter
from quickbeam.methods.ddtree import DDTree
from quickbeam.methods.eagle2 import Eagle2
from quickbeam.methods.pctree import pctree
from quickbeam.methods.sequoia import Sequoia, Shapes
from toy import ToyModel

Path = tuple[int, ...]
seeds = st.integers(0, 10**6)


# --- EAGLE-2 --------------------------------------------------------------------------------------


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
@given(
    seeds,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(2, 40),
    st.integers(1, 5),
    st.sampled_from([0.0, 1.0]),
)
def test_eagle2_expands_and_reranks(seed, width, depth, budget, max_depth, temperature):
    model = ToyModel(vocab=6, seed=seed)
    tree = tree_of(
        Eagle2(KnownDrafter(model.draft), width, depth),
        context_of([0], temperature),
        budget,
        max_depth,
    )
    assert set(paths(tree)) == expand_and_rerank(
        model.draft, width, min(depth, max_depth), budget - 1
    )
    assert tree.value[1:] == sorted(tree.value[1:], reverse=True)


# --- DDTree and PCTree ----------------------------------------------------------------------------


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


# --- Sequoia --------------------------------------------------------------------------------------


@lru_cache
def all_shapes(nodes, depth):
    """Every ordered tree of this many nodes and at most this depth, as nested tuples of
    children."""

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
        chance * tokens_of(child, acceptance)
        for child, chance in zip(tree, acceptance, strict=False)
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


def test_sequoia_fills_its_shape():
    policy = Sequoia(zipf_drafter(), (0.5, 0.3, 0.2))
    for temperature in (0.0, 1.0):
        for budget in (2, 7, 30):
            tree = tree_of(policy, context_of([0], temperature), budget, 20)
            shape = Shapes((0.5, 0.3, 0.2), budget).shape(budget, 20)
            assert nested([list(children.values()) for children in tree.children]) == nested(shape)


def test_sequoia_learns_what_is_accepted():
    """Second children always are: after a while nothing is put below the first ones."""
    policy, ids = Sequoia(zipf_drafter()), [0]
    first = tree_of(policy, context_of(ids, 0.0), 16, 20)
    for _ in range(400):
        tree, learn, _ = grow(policy, context_of(ids, 0.0), 16, 20)
        path = [0]
        while len(tree.children[path[-1]]) > 1:
            token, node = list(tree.children[path[-1]].items())[1]
            ids.append(token)
            path.append(node)
        ids.append(499 if tree.child(path[-1], 499) is None else 498)
        learn(tree, path)
    assert policy.acceptance[1] > 0.9 > 0.1 > policy.acceptance[0]
    assert max(tree.depth) >= 7 > max(first.depth)
    measured = Sequoia(zipf_drafter(), (0.5, 0.3))
    grow(measured, context_of([0], 0.0), 16, 20).learn(tree, path)
    assert measured.acceptance == (0.5, 0.3)
