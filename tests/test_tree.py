"""TokenTree against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples, refuses
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


def ancestors(tree, node):
    return [node] if tree.parent[node] < 0 else [node, *ancestors(tree, tree.parent[node])]


@examples(100, derandomize=True)
@given(trees())
def test_a_tree_is_what_was_added(tree):
    above, before = [ancestors(tree, n) for n in range(len(tree))], (tree.token[:], tree.parent[:])
    visible = [[column in line for column in range(len(tree))] for line in above]
    assert torch.equal(tree.visible(), torch.tensor(visible))
    for node, line in enumerate(above):
        assert tree.path(node) == line[::-1] and tree.depth[node] == len(line) - 1
        assert tree.tokens(node) == [tree.token[one] for one in line[-2::-1]]
        below = [child for child in range(len(tree)) if tree.parent[child] == node]
        assert list(tree.children[node].values()) == below and tree.child(node, 99) is None
        for child in below:
            assert tree.child(node, tree.token[child]) == child
            with pytest.raises(ValueError, match="already has a child"):
                tree.add(node, tree.token[child], "other")
    assert (tree.token, tree.parent) == before


@pytest.mark.parametrize("parent", [-1, 1, 5])
def test_parent_that_is_not_there(parent):
    refuses("not a node of this tree of 1", TokenTree(0).add, parent, 1, "t", error=ValueError)


def test_a_probability_is_the_values_quotient_unless_it_is_told():
    tree = TokenTree(3)
    half = tree.add(0, 1, "drafter", value=0.5)
    tree.add(half, 1, "drafter", value=0.1)
    tree.add(half, 2, "drafter", value=0.1, probability=0.9)
    tree.add(tree.add(0, 2, "ngram"), 1, "ngram", value=0.3)  # whose parent has no value
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
        assert list(ours.items()) == [both for both in theirs.items() if both[1] < kept]
    before = len(tree)
    first.add(0, 50, "test")
    assert len(tree) == before and tree.child(0, 50) is None  # nothing is shared
