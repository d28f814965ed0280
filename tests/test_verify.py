"""Run: pytest tests/test_verify.py"""

import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples, few
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.verify import Verdict, verify_equal, verify_residual
from toy import (
    ToyModel,
    chi_square,
    exact_probs,
    path_tokens,
    random_tree,
    reference_verify,
    sample_sequences,
)

SEEDS = 4
MISTAKES = ["siblings stay in Q", "accept with Q", "R stays p", "emit from p"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(tree, verdict):
    return [*path_tokens(tree, verdict.path[-1]), verdict.token]


# --- sampling: the distribution of the output -----------------------------------------------------


@pytest.mark.parametrize("seed", few(range(SEEDS), [1]))
def test_sampled_output_has_the_targets_probs(seed):
    model = ToyModel(vocab=5 + seed % 3, seed=seed, noise=0.5 + 0.5 * seed)
    counts = sample_sequences(model, partial(random_tree, model), count=10_000, seed=seed)
    assert chi_square(counts, exact_probs(model.target, model.vocab)) > 1e-3 / SEEDS


def test_reference_has_the_targets_probs():
    model = ToyModel(seed=0)
    counts = sample_sequences(
        model, partial(random_tree, model), reference_verify, count=10_000, seed=2
    )
    assert chi_square(counts, exact_probs(model.target, model.vocab)) > 1e-3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_verifier_is_found_out(mistake):
    model = ToyModel(seed=0)
    counts = sample_sequences(
        model,
        partial(random_tree, model),
        partial(reference_verify, mistake=mistake),
        count=8000 if mistake == MISTAKES[0] else 2500,
    )
    assert chi_square(counts, exact_probs(model.target, model.vocab)) < 1e-6


def test_dropping_a_drawn_token_for_its_own_value_is_found_out():
    model = ToyModel(seed=0)
    counts = sample_sequences(model, partial(random_tree, model, prune=0.3), count=4000)
    assert chi_square(counts, exact_probs(model.target, model.vocab)) < 1e-6


def test_distributions_that_depend_on_the_path_are_kept():
    model = ToyModel(vocab=5, seed=3, zeros=0.0)
    params = SamplingParams(
        temperature=0.8,
        top_k=4,
        repetition_penalty=1.5,
        frequency_penalty=0.7,
        presence_penalty=0.4,
    )

    def probs(context):
        return Sampler(params, [0], model.vocab).probs(model.target(context).log(), context[1:])

    cached = {}

    def cached_probs(context):
        if tuple(context) not in cached:
            cached[tuple(context)] = probs(context)
        return cached[tuple(context)]

    counts = sample_sequences(
        model, partial(random_tree, model), count=3000, seed=5, probs=cached_probs
    )
    assert chi_square(counts, exact_probs(probs, model.vocab)) > 1e-3
    assert chi_square(counts, exact_probs(model.target, model.vocab)) < 1e-6  # the penalties matter


# --- sampling: against the reference, and edges ---------------------------------------------------


@examples(150)
@given(
    seed=st.integers(0, 10**6), vocab=st.integers(2, 8), certain=st.sampled_from([0.0, 0.4, 1.0])
)
def test_same_verdict_as_the_reference(seed, vocab, certain):
    model, rng = ToyModel(vocab, seed, noise=1.5), random.Random(seed)
    tree = random_tree(model, [0], rng, budget=20, certain=certain)

    def probs(node):
        return model.target([0, *path_tokens(tree, node)])

    verdict = verify_residual(tree, probs, generator(seed))
    assert verdict == reference_verify(tree, probs, generator(seed))
    assert verdict == verify_residual(tree, probs, generator(seed))
    assert probs(verdict.path[-1])[verdict.token] > 0
    assert all(probs(tree.parent[node])[tree.token[node]] > 0 for node in verdict.path[1:])


def test_only_accepted_nodes_are_asked():
    model, rng = ToyModel(seed=5), random.Random(5)
    for seed in range(50):
        tree, asked = random_tree(model, [0], rng), []

        def probs(node):
            asked.append(node)  # noqa: B023 (called in this round only)
            return model.target([0, *path_tokens(tree, node)])  # noqa: B023

        assert verify_residual(tree, probs, generator(seed)).path == asked


def test_a_drafter_with_the_targets_probs_is_always_accepted():
    p = torch.tensor([0.2, 0.5, 0.3])
    for seed in range(100):
        tree = TokenTree(0)
        tree.add(0, seed % 3, "drawn", probs=p.clone())
        assert verify_residual(tree, lambda node: p, generator(seed)).path == [0, 1]


def test_impossible_tokens_are_never_accepted():
    p = torch.tensor([0.0, 0.0, 1.0, 0.0])
    tree = TokenTree(0)
    tree.add(0, 0, "drawn", probs=torch.tensor([0.7, 0.1, 0.0, 0.2]))
    tree.add(0, 1, "certain")
    tree.add(0, 3, "drawn", probs=torch.tensor([0.7, 0.1, 0.0, 0.2]))
    for seed in range(50):
        assert verify_residual(tree, lambda node: p, generator(seed)) == Verdict([0], 2)


def test_impossible_tokens_are_not_accepted_where_a_random_number_is_0(monkeypatch):
    p = torch.tensor([0.0, 1.0])
    monkeypatch.setattr("quickbeam.verify.uniform", lambda generator: 0.0)
    for probs in (None, torch.tensor([0.5, 0.5])):
        tree = TokenTree(0)
        tree.add(0, 0, "impossible", probs=probs)
        assert verify_residual(tree, lambda node: p, generator()) == Verdict([0], 1)


def test_a_token_its_own_probs_rules_out_counts_as_certain():
    p = torch.tensor([0.5, 0.3, 0.2])
    certain = TokenTree(0)
    certain.add(0, 1, "certain")
    certain.add(0, 2, "drawn", probs=p)
    for probs in (torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3), torch.full((3,), float("nan"))):
        drawn = TokenTree(0)
        drawn.add(0, 1, "drawn", probs=probs)
        drawn.add(0, 2, "drawn", probs=p)
        for seed in range(50):
            assert verify_residual(drawn, lambda node: p, generator(seed)) == verify_residual(
                certain, lambda node: p, generator(seed)
            )


def test_rounding_that_uses_up_the_residual_falls_back_to_the_target(monkeypatch):
    p = torch.tensor([0.25, 0.75])
    tree = TokenTree(0)
    tree.add(0, 1, "drawn", probs=p.clone())
    tree.add(0, 0, "drawn", probs=p.clone())
    # beyond [0, 1): rejects although R = Q
    monkeypatch.setattr("quickbeam.verify.uniform", lambda generator: 1.0)
    emitted = {verify_residual(tree, lambda node: p, generator(seed)).token for seed in range(40)}
    assert emitted == {0, 1}


@pytest.mark.parametrize(
    ("chance", "verdict"), [(0.3, Verdict([0, 3], 2)), (0.2, Verdict([0, 2], 2))]
)
def test_tiny_residuals_keep_their_proportions(chance, verdict, monkeypatch):
    p = torch.tensor([1.0, 1e-9, 3e-9])  # once token 0 is rejected, token 1 has a quarter
    tree = TokenTree(0)
    tree.add(0, 0, "certain")
    tree.add(0, 1, "certain")
    tree.add(0, 2, "drawn", probs=torch.tensor([0.0, 0.0, 1.0]))
    chances = iter([1 - 1e-10, chance, 0.5])
    monkeypatch.setattr("quickbeam.verify.uniform", lambda generator: next(chances))
    assert (
        verify_residual(
            tree, lambda node: p if node == 0 else torch.tensor([0.0, 0.0, 1.0]), generator()
        )
        == verdict
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draft_distributions_of_any_precision(dtype):
    # exact in every precision
    p, q = torch.tensor([0.25, 0.25, 0.5]), torch.tensor([0.5, 0.25, 0.25])
    same, other = TokenTree(0), TokenTree(0)
    for tree, probs in ((same, q), (other, q.to(dtype))):
        tree.add(0, 0, "drawn", probs=probs)
        tree.add(0, 1, "drawn", probs=probs)
    for seed in range(50):
        assert verify_residual(same, lambda node: p, generator(seed)) == verify_residual(
            other, lambda node: p, generator(seed)
        )


def test_one_draw_for_each_child_tried_and_one_for_the_emitted_token():
    p = torch.tensor([0.0, 0.0, 0.5, 0.5])
    tree = TokenTree(0)
    tree.add(0, 0, "certain")
    tree.add(0, 1, "drawn", probs=torch.tensor([0.5, 0.5, 0.0, 0.0]))
    used, plain = generator(7), generator(7)
    verify_residual(tree, lambda node: p, used)
    torch.rand(3, dtype=torch.float64, generator=plain)
    assert torch.rand((), generator=used) == torch.rand((), generator=plain)


def test_a_seed_gives_plain_decodings_answer_under_certain_proposals():
    model, rng = ToyModel(seed=9), random.Random(9)

    def answer(budget):
        context, used = [0], generator(4)
        while len(context) < 40:
            tree = random_tree(model, context, rng, budget, certain=1.0)
            verdict = verify_residual(
                tree,
                lambda node: model.target([*context, *path_tokens(tree, node)]),  # noqa: B023
                used,
            )
            context += tokens(tree, verdict)
        return context[:40]

    assert answer(1) == answer(4) == answer(16)


# --- greedy ---------------------------------------------------------------------------------------


@examples(200)
@given(seed=st.integers(0, 10**6), vocab=st.integers(1, 5), hit=st.floats(0, 1))
def test_greedy_follows_plain_decoding(seed, vocab, hit):
    rng, model = random.Random(seed), ToyModel(vocab, seed)

    def best(context):
        return int(model.target(context).argmax())

    tree = TokenTree(0)
    for _ in range(rng.randrange(20)):
        node = rng.randrange(len(tree))
        token = best([0, *path_tokens(tree, node)]) if rng.random() < hit else rng.randrange(vocab)
        if tree.child(node, token) is None:
            tree.add(node, token, "toy", probs=model.draft([0]) if rng.random() < 0.5 else None)
    verdict = verify_equal(tree, lambda node: best([0, *path_tokens(tree, node)]))

    plain = [0]
    for _ in range(len(verdict.path)):
        plain.append(best(plain))
    assert tokens(tree, verdict) == plain[1:]  # nothing but what plain decoding says
    assert tree.child(verdict.path[-1], verdict.token) is None  # and all of it that the tree holds
    assert all(
        tree.parent[child] == node
        for node, child in zip(verdict.path, verdict.path[1:], strict=False)
    )
