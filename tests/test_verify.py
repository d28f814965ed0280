"""Run: pytest tests/test_verify.py"""

import random
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples, few
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.verify import Verdict, verify_equal, verify_residual
from toy import ToyModel, chi_square, exact_probs, path_tokens, plain_verify, random_tree, samples

SEEDS = 4
MISTAKES = ["siblings stay in Q", "accept with Q", "R stays p", "emit from p"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens(tree, verdict):
    return [*path_tokens(tree, verdict.path[-1]), verdict.token]


def siblings(*children):
    """Tokens below a root, each with the distribution that it was drawn from; None: certain."""
    tree = TokenTree(0)
    for token, probs in children:
        tree.add(0, token, "toy", probs=None if probs is None else torch.as_tensor(probs))
    return tree


def verified(tree, p, seed=0):
    return verify_residual(tree, lambda node: torch.as_tensor(p), generator(seed))


@pytest.mark.parametrize("seed", few(range(SEEDS), [1]))
def test_sampled_output_has_the_targets_probs(seed):
    model = ToyModel(vocab=5 + seed % 3, seed=seed, noise=0.5 + 0.5 * seed)
    counts = samples(model, partial(random_tree, model), count=10_000, seed=seed)
    assert chi_square(counts, exact_probs(model.target, model.vocab)) > 1e-3 / SEEDS


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_verifier_is_found_out(mistake):
    model = ToyModel(seed=0)
    wrong = partial(plain_verify, mistake=mistake)
    count = 8000 if mistake == MISTAKES[0] else 2500
    counts = samples(model, partial(random_tree, model), wrong, count)
    assert chi_square(counts, exact_probs(model.target, model.vocab)) < 1e-6


def test_dropping_a_drawn_token_for_its_own_value_is_found_out():
    model = ToyModel(seed=0)
    counts = samples(model, partial(random_tree, model, prune=0.3), count=4000)
    assert chi_square(counts, exact_probs(model.target, model.vocab)) < 1e-6


def test_distributions_that_depend_on_the_path_are_kept():
    model = ToyModel(vocab=5, seed=3, zeros=0.0)
    penalties = dict(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.4)
    params = SamplingParams(temperature=0.8, top_k=4, **penalties)

    @cache
    def cached(*context):
        return Sampler(params, [0], model.vocab).probs(model.target(context).log(), context[1:])

    def probs(context):
        return cached(*context)

    counts = samples(model, partial(random_tree, model), count=3000, seed=5, probs=probs)
    assert chi_square(counts, exact_probs(probs, model.vocab)) > 1e-3
    assert chi_square(counts, exact_probs(model.target, model.vocab)) < 1e-6  # the penalties matter


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
    assert verdict == plain_verify(tree, probs, generator(seed))
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


def test_what_is_always_and_what_is_never_accepted():
    p = [0.2, 0.5, 0.3]
    for seed in range(100):
        assert verified(siblings((seed % 3, p)), p, seed).path == [0, 1]
    q = [0.7, 0.1, 0.0, 0.2]
    tree = siblings((0, q), (1, None), (3, q))
    for seed in range(50):
        assert verified(tree, [0.0, 0.0, 1.0, 0.0], seed) == Verdict([0], 2)


@pytest.mark.parametrize("probs", [None, [0.5, 0.5]])
def test_impossible_tokens_are_not_accepted_where_a_random_number_is_0(probs, monkeypatch):
    monkeypatch.setattr("quickbeam.verify.uniform", lambda generator: 0.0)
    assert verified(siblings((0, probs)), [0.0, 1.0]) == Verdict([0], 1)


@pytest.mark.parametrize("probs", [[1.0, 0.0, 0.0], [0.0] * 3, [float("nan")] * 3])
def test_a_token_its_own_probs_rules_out_counts_as_certain(probs):
    p = [0.5, 0.3, 0.2]
    certain, drawn = (siblings((1, one), (2, p)) for one in (None, probs))
    for seed in range(50):
        assert verified(drawn, p, seed) == verified(certain, p, seed)


def test_rounding_that_uses_up_the_residual_falls_back_to_the_target(monkeypatch):
    p = [0.25, 0.75]
    # beyond [0, 1): rejects although R = Q
    monkeypatch.setattr("quickbeam.verify.uniform", lambda generator: 1.0)
    tree = siblings((1, p), (0, p))
    assert {verified(tree, p, seed).token for seed in range(40)} == {0, 1}


@pytest.mark.parametrize(
    ("number", "verdict"), [(0.3, Verdict([0, 3], 2)), (0.2, Verdict([0, 2], 2))]
)
def test_tiny_residuals_keep_their_proportions(number, verdict, monkeypatch):
    # once token 0 is rejected, token 1 has a quarter
    p, last = torch.tensor([1.0, 1e-9, 3e-9]), torch.tensor([0.0, 0.0, 1.0])
    numbers = iter([1 - 1e-10, number, 0.5])
    monkeypatch.setattr("quickbeam.verify.uniform", lambda generator: next(numbers))
    tree = siblings((0, None), (1, None), (2, last))
    assert verify_residual(tree, lambda node: last if node else p, generator()) == verdict


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draft_distributions_of_any_precision(dtype):
    p, q = [0.25, 0.25, 0.5], torch.tensor([0.5, 0.25, 0.25])  # exact in every precision
    same, other = (siblings((0, one), (1, one)) for one in (q, q.to(dtype)))
    for seed in range(50):
        assert verified(same, p, seed) == verified(other, p, seed)


def test_one_draw_for_each_child_tried_and_one_for_the_emitted_token():
    p, used, plain = torch.tensor([0.0, 0.0, 0.5, 0.5]), generator(7), generator(7)
    verify_residual(siblings((0, None), (1, [0.5, 0.5, 0.0, 0.0])), lambda node: p, used)
    torch.rand(3, dtype=torch.float64, generator=plain)
    assert torch.rand((), generator=used) == torch.rand((), generator=plain)


def test_a_seed_gives_plain_decodings_answer_under_certain_proposals():
    model, rng = ToyModel(seed=9), random.Random(9)

    def answer(budget):
        context, used = [0], generator(4)
        while len(context) < 40:
            tree = random_tree(model, context, rng, budget, certain=1.0)
            of = lambda node: model.target([*context, *path_tokens(tree, node)])  # noqa: B023, E731
            context += tokens(tree, verify_residual(tree, of, used))
        return context[:40]

    assert answer(1) == answer(4) == answer(16)


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
    assert verdict.path == tree.path(verdict.path[-1])
