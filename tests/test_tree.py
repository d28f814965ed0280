"""TokenTree against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.tree import TokenTree


@st.composite
def trees(draw, token=5):
    """A tree of up to 24 nodes; each proposal that would duplicate a sibling is left out."""
    tree = TokenTree(draw(st.integers(0, token)))
    for _ in range(draw(st.integers(0, 23))):
        parent = draw(st.integers(0, len(tree) - 1))
        proposal = draw(st.integers(0, token))
        if tree.child(parent, proposal) is None:
            tree.add(parent, proposal, "test")
    return tree


def chain(*tokens):
    tree = TokenTree(tokens[0])
    for node, token in enumerate(tokens[1:]):
        tree.add(node, token, "test")
    return tree


def ancestors(tree, node):
    """`node` and what is above it, upwards."""
    return [node] if tree.parent[node] < 0 else [node, *ancestors(tree, tree.parent[node])]


@examples(100, derandomize=True)
@given(trees())
def test_visible_marks_ancestors_and_self(tree):
    expected = torch.tensor(
        [
            [column in ancestors(tree, row) for column in range(len(tree))]
            for row in range(len(tree))
        ]
    )
    assert torch.equal(tree.visible(), expected)


def test_visible_of_a_chain_is_causal():
    tree = TokenTree(0)
    for node in range(6):
        tree.add(node, node, "test")
    visible = tree.visible()
    assert visible.dtype is torch.bool and torch.equal(visible, torch.ones(7, 7).tril().bool())


@examples(100, derandomize=True)
@given(trees())
def test_path_and_depth(tree):
    for node in range(len(tree)):
        path = tree.path(node)
        assert path == ancestors(tree, node)[::-1]
        assert path[0] == 0
        assert tree.depth[node] == len(path) - 1
        assert tree.tokens(node) == [tree.token[above] for above in path[1:]]


@examples(100, derandomize=True)
@given(trees())
def test_children_are_unique_found_and_in_order_of_proposal(tree):
    for node in range(len(tree)):
        below = [child for child in range(len(tree)) if tree.parent[child] == node]
        assert list(tree.children[node].values()) == below
        assert len({tree.token[child] for child in below}) == len(below)
        assert [tree.child(node, tree.token[child]) for child in below] == below
        assert tree.child(node, 99) is None


@examples(100, derandomize=True)
@given(trees())
def test_duplicate_siblings_are_refused_and_change_nothing(tree):
    before = (list(tree.token), list(tree.parent))
    for node in range(1, len(tree)):
        with pytest.raises(ValueError, match="already has a child"):
            tree.add(tree.parent[node], tree.token[node], "other")
    assert (tree.token, tree.parent) == before


@pytest.mark.parametrize("parent", [-1, 1, 5])
def test_parent_that_is_not_there(parent):
    with pytest.raises(ValueError, match="not a node of this tree of 1"):
        TokenTree(0).add(parent, 1, "test")


def test_a_probability_is_the_values_quotient_unless_it_is_told():
    tree = TokenTree(3)
    half = tree.add(0, 1, "drafter", value=0.5)
    tree.add(half, 1, "drafter", value=0.1)
    tree.add(half, 2, "drafter", value=0.1, probability=0.9)
    tree.add(tree.add(0, 2, "ngram"), 1, "ngram", value=0.3)  # whose parent promises nothing
    assert tree.probability == pytest.approx([1.0, 0.5, 0.2, 0.9, 0.0, 0.0])


@examples(100, derandomize=True)
@given(trees(), st.integers(1, 30))
def test_the_first_nodes_are_a_tree_of_their_own(tree, count):
    for node in range(1, len(tree)):
        tree.value[node], tree.probability[node] = 1 / node, 0.5 / node
        tree.probs[node] = torch.full((2,), float(node))
    first, kept = tree.first(count), min(count, len(tree))
    assert len(first) == kept
    for name in ("token", "parent", "depth", "source", "value", "probability"):
        assert getattr(first, name) == getattr(tree, name)[:kept]
    assert all(ours is theirs for ours, theirs in zip(first.probs, tree.probs, strict=False))
    for ours, theirs in zip(first.children, tree.children, strict=False):
        assert list(ours.items()) == [
            (token, child) for token, child in theirs.items() if child < kept
        ]
    before = len(tree)
    first.add(0, 50, "test")
    assert len(tree) == before and tree.child(0, 50) is None  # nothing is shared
