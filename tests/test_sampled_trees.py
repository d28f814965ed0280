"""Trees grown from a drafter: sampled output keeps the target's distribution, limits hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples, spread
from drafters import DRAFTED, KnownDrafter, context_of, methods, tempered, toy_probs, tree_of
from quickbeam.methods import children
from quickbeam.methods.auto import Auto
from quickbeam.methods.dyspec import Threshold
from quickbeam.methods.eagle2 import Eagle2
from quickbeam.methods.sequoia import Sequoia
from quickbeam.methods.specinfer import SpecInfer
from quickbeam.tree import TokenTree
from toy import ToyModel, chi_square, exact_probs, path_tokens, samples


def p_value(method, model, temperature, count, budget=7, change=None):
    """Of the test that two tokens have the target's distribution; `change` alters each tree."""
    target, _ = toy_probs(model, temperature)
    generator = torch.Generator().manual_seed(count)

    def make_tree(ids, rng):
        tree = tree_of(method, context_of(ids, temperature, generator), budget, 5)
        return change(tree) if change else tree

    counts = samples(model, make_tree, count=count, length=2, seed=1, probs=target)
    return chi_square(counts, exact_probs(target, model.vocab, 2))


@pytest.mark.parametrize(("name", "temperature"), spread(list(DRAFTED), [0.6, 1.0]))
def test_sampled_output_has_the_targets_distribution(name, temperature):
    model = ToyModel(vocab=4, seed=list(DRAFTED).index(name), noise=1.2)
    method = methods(toy_probs(model, temperature)[1])[name]
    assert p_value(method, model, temperature, count=2500) > 1e-3 / (4 * len(DRAFTED))


def keep_best(size):
    """Prune to the nodes of greatest value: what no method may do to draws."""

    def prune(tree):
        kept, place = TokenTree(tree.token[0]), {0: 0}
        for node in sorted(sorted(range(1, len(tree)), key=lambda node: -tree.value[node])[:size]):
            about = (of[node] for of in (tree.token, tree.source, tree.value, tree.probs))
            place[node] = kept.add(place[tree.parent[node]], *about)
        return kept

    return prune


@pytest.mark.parametrize("name", ["dyspec-printed", "dyspec-threshold", "specinfer", "sequoia"])
def test_pruning_draws_by_value_is_found_out(name):
    model = ToyModel(vocab=4, seed=0, noise=1.2)
    probs = toy_probs(model)[1]
    method = methods(probs)[name]
    if name == "sequoia":
        method = Sequoia(KnownDrafter(probs), (0.4, 0.3, 0.2))
    assert p_value(method, model, 1.0, count=800, budget=9, change=keep_best(2)) < 1e-6


class Opposed(ToyModel):
    """What the drafter thinks likely is not: most draws are rejected."""

    def _both(self, context):
        probs = torch.tensor([0.6, 0.25, 0.1, 0.05])
        return probs.flip(0), probs


class Peeking(children.DrawnChildren):
    """Tells the next token's own probability instead of its slot's."""

    _next: tuple[int, float] | None = None
    left = property(lambda self: self._next[1] if self._next else 0.0, lambda self, value: None)

    def __init__(self, *about):
        super().__init__(*about)
        self._next = super().draw()

    def draw(self):
        now, self._next = self._next, super().draw()
        return now


def test_choosing_a_slot_by_its_own_token_is_found_out(monkeypatch):
    """The worth that deterministic children have, for nodes that count as draws."""
    model = Opposed(vocab=4)
    method = methods(model.draft)["dyspec-threshold"]
    assert p_value(method, model, 1.0, count=600, budget=6) > 1e-3
    monkeypatch.setattr(children, "DrawnChildren", Peeking)
    assert p_value(method, model, 1.0, count=600, budget=6) < 1e-6


def test_reranked_candidates_are_no_draws():
    """EAGLE-2's tree may not claim to be drawn."""
    model = ToyModel(vocab=4, seed=0, noise=1.2)
    _, probs = toy_probs(model)

    def claim(tree):
        paths = (path_tokens(tree, parent) for parent in tree.parent[1:])
        tree.probs[1:] = [probs([0, *path]) for path in paths]
        return tree

    assert p_value(methods(probs)["eagle2"], model, 1.0, count=1500, budget=5, change=claim) < 1e-6


@examples(100, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.floats(0, 0.8),
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.lists(st.integers(0, 7), min_size=1),
)
def test_every_tree_keeps_the_contract(seed, vocab, zeros, budget, max_depth, temperature, text):
    model, ids = ToyModel(vocab, seed, zeros=zeros), [token % vocab for token in text]
    drafter = KnownDrafter(lambda context: tempered(model.draft(context), temperature or 1.0))
    every = {name: make(drafter) for name, make in DRAFTED.items()}
    every |= {"five branches": SpecInfer(drafter, 5), "low threshold": Threshold(drafter, 0.01)}
    every |= {"narrow": Eagle2(drafter, 2, 3), "measured": Sequoia(drafter, (0.2, 0.5, 0.1))}
    every["auto"] = Auto(drafter)
    for name, method in every.items():
        drafter.calls = []
        context = context_of(list(ids), temperature, logits=torch.arange(vocab).float())
        tree = tree_of(method, context, budget, max_depth)
        assert 1 <= len(tree) <= budget
        assert max(tree.depth) <= max_depth and tree.token[0] == ids[-1]
        assert set(tree.source[1:]) <= {source.name for source in method.sources}
        if name == "auto":
            assert tree.probs == [None] * len(tree)
            for node in range(1, len(tree)):
                assert 0 < tree.value[node] <= tree.value[tree.parent[node]] + 1e-9
            assert tree.value[1:] == sorted(tree.value[1:], reverse=True)
            continue
        assert (not drafter.calls) == (budget == 1 or max_depth == 0)
        reach = [1.0]
        for node in range(1, len(tree)):
            probs = drafter.probs([*ids, *path_tokens(tree, tree.parent[node])])
            if name == "ddtree":  # by the distribution after another path
                assert tree.probs[node] is None and tree.probability[node] > 0
                continue
            assert probs[tree.token[node]] > 0
            reach.append(reach[tree.parent[node]] * float(probs[tree.token[node]]))
            drawn_node = temperature > 0 and not isinstance(method, Eagle2)
            assert (tree.probs[node] is not None) == drawn_node
            assert not drawn_node or torch.equal(tree.probs[node], probs)
            assert 0 < tree.value[node] <= tree.value[tree.parent[node]]
        if name not in ("dyspec", "ddtree"):
            assert tree.value == pytest.approx(reach, rel=1e-3, abs=1e-6)
