"""How likely proposals are accepted: the first guess, and what was accepted."""

import random
from statistics import mean

import pytest
import torch

from drafters import KnownDrafter, context_of, grow
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
from toy import ToyModel, path_tokens


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
