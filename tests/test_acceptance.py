"""How likely proposals are accepted: the first guess, and what was accepted."""

import random
from statistics import mean

import pytest
import torch

from cases import few
from drafters import KnownDrafter, context_of, grow, toy_distributions
from quickbeam.methods.acceptance import (
    REPEATED,
    AcceptanceModel,
    as_printed,
    drafted,
    drawn,
    elsewhere,
)
from quickbeam.methods.dyspec import DySpec
from quickbeam.verify import verify_residual
from toy import ToyModel, path_tokens, random_tree, reached


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_what_is_accepted_is_learned_where_it_was_seen(rate):
    model, rng = AcceptanceModel(), random.Random(3)
    for _ in range(4000):
        accepted = rng.random() < rate
        model.observe(drawn(1, rng.uniform(0.3, 0.6)), accepted)
        model.observe(elsewhere(REPEATED, 5), accepted)
        model.observe(as_printed(0, 0.5), accepted)
    assert mean(model.rate(drawn(1, x)) for x in (0.31, 0.45, 0.59)) == pytest.approx(
        rate, abs=0.06
    )
    assert model.rate(elsewhere(REPEATED, 4)) == pytest.approx(rate, abs=0.06)
    others = drawn(0, 0.45), drawn(1, 0.2), drafted(1, 0.45), as_printed(0, 0.5)
    for other in (*others, elsewhere(REPEATED, 3)):
        assert model.rate(other) == other.usual
    agreed = elsewhere(REPEATED, 4).given(True)
    assert model.rate(agreed) == agreed.usual


def observed(policy):
    """What the method's model is told from now on: draft probabilities, and what came of them."""
    told = list[tuple[float, bool]]()

    def observe(evidence, accepted):
        told.append((evidence.usual, accepted))

    policy.model.observe = observe
    return told


def test_of_draws_what_had_its_turn_is_learned():
    model = ToyModel(vocab=5, seed=4, noise=1.0, zeros=0.0)
    policy = DySpec(KnownDrafter(model.draft), as_printed)
    told, generator = observed(policy), torch.Generator().manual_seed(0)
    for _ in range(40):
        tree, learn = grow(policy, context_of([0], 1.0, generator), 9, 5)
        path, _ = verify_residual(
            tree,
            lambda node: model.target([0, *path_tokens(tree, node)]),  # noqa: B023
            generator,
        )
        told.clear()
        learn(tree, path)
        expected = []
        for node, following in zip(path, [*path[1:], None], strict=True):
            left = 1.0
            for token, child in tree.children[node].items():
                probability = float(model.draft([0, *path_tokens(tree, node)])[token])
                expected.append((pytest.approx(probability / left, rel=1e-3), child == following))
                left -= probability
                if child == following:
                    break
        assert told == expected


def accepted(printed, temperature, budget):
    """Tokens a step of many trees, after as many to learn from."""
    found, policy = [], None
    for seed in range(4):
        model = ToyModel(vocab=12, seed=seed, noise=1.3, zeros=0.0)
        target, draft = toy_distributions(model, temperature)
        before, policy = policy, DySpec(KnownDrafter(draft), as_printed if printed else None)
        policy.model = before.model if before else policy.model
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        for _ in range(150):
            context = [rng.randrange(12) for _ in range(3)]
            tree, learn = grow(policy, context_of(context, temperature, generator), budget, 12)

            def probs(node):
                return target([*context, *path_tokens(tree, node)])  # noqa: B023

            found.append(sum(reached(tree, probs)))
            learn(tree, verify_residual(tree, probs, generator)[0])
    return mean(found)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_trees_by_what_was_accepted_are_better_than_by_the_drafters_word(temperature):
    assert accepted(False, temperature, 12) > 1.02 * accepted(True, temperature, 12)


@pytest.mark.parametrize("seed", few(range(4), [0, 1]))
def test_nodes_are_reached_as_often_as_verification_accepts_them(seed):
    model = ToyModel(vocab=5, seed=seed)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tree = max((random_tree(model, [0], rng) for _ in range(30)), key=len)
    assert len(tree) > 6 and {probs is None for probs in tree.probs[1:]} == {True, False}
    count, hits = 6000, [0] * len(tree)

    def probs(node):
        return model.target([0, *path_tokens(tree, node)])

    for _ in range(count):
        for node in verify_residual(tree, probs, generator)[0]:
            hits[node] += 1
    for chance, hit in zip(reached(tree, probs), hits, strict=True):
        assert hit / count == pytest.approx(
            chance, abs=4.5 * (chance * (1 - chance) / count) ** 0.5 + 1e-9
        )
