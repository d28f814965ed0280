"""Draft probability against acceptance: pytest tests/test_acceptance.py. Trees by hand, and laws
whose acceptance is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import binomtest

from drafters import KnownDrafter, context_of, policies, tree_of
from quickbeam import SamplingParams
from quickbeam.bench.acceptance import (
    Tally,
    Tried,
    by_bin,
    by_depth,
    draft_probabilities,
    summarise,
    tried,
    wilson,
)
from quickbeam.engine.trace import StepRecord
from quickbeam.noise import Noise
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.trees import DRAFTED
from quickbeam.trees.dyspec import DySpec
from quickbeam.trees.perturbed import perturbed_plain
from quickbeam.verify import verify_equal, verify_residual
from toy import ToyModel, path_tokens


def record(tree: TokenTree, path: list[int], token: int, taken: int | None = None) -> StepRecord:
    emitted = [*(tree.token[node] for node in path[1:]), token]
    return StepRecord(tree, path, token, emitted[:taken], 0.0, 0.0, 0.0)


def rounded(found: Sequence[Tried]) -> list[tuple[float, bool, int, bool]]:
    return [(round(one.probability, 6), *one[1:]) for one in found]


# What was tried


@pytest.fixture
def tree() -> TokenTree:
    """Certain children: 1 (0.5), 2 (0.3) and 3 (0.1) below the root; below 2: 4 (0.8) and 5 (0.2);
    below 4: 6 (0.9); below 1: 7 (0.6)."""
    tree = TokenTree(0)
    for parent, token, probability in (
        (0, 1, 0.5),
        (0, 2, 0.3),
        (0, 3, 0.1),
        (2, 4, 0.8),
        (2, 5, 0.2),
        (4, 6, 0.9),
        (1, 7, 0.6),
    ):
        tree.add(parent, token, "drafter", tree.value[parent] * probability)
    return tree


def test_only_what_had_its_turn_is_counted(tree: TokenTree) -> None:
    # 1 is rejected and 2 accepted: 3 had no turn, nor had 7 below 1. Then 4 is accepted, and 6
    # below it rejected.
    below_root = [(0.5, False, 1, True), (0.6, True, 1, False)]
    assert rounded([*tried(record(tree, [0, 2, 4], 9))]) == [
        *below_root,
        (0.8, True, 2, True),
        (0.9, False, 3, True),
    ]
    # Both children of 2 are rejected; a certain child is struck out with its own probability.
    assert rounded([*tried(record(tree, [0, 2], 9))]) == [
        *below_root,
        (0.8, False, 2, True),
        (1.0, False, 2, False),
    ]
    # All three children of the root are rejected: 0.3 of what 1 left, 0.1 of what both left.
    assert rounded([*tried(record(tree, [0], 9))]) == [
        (0.5, False, 1, True),
        (0.6, False, 1, False),
        (0.5, False, 1, False),
    ]
    # A leaf is accepted: nothing is tried below it.
    assert rounded([*tried(record(tree, [0, 1, 7], 9))]) == [
        (0.5, True, 1, True),
        (0.6, True, 2, True),
    ]
    assert [*tried(record(TokenTree(0), [0], 9))] == []


def test_what_lies_beyond_the_answers_end_is_left_out(tree: TokenTree) -> None:
    # 2 ended the answer, though the verifier went on to 4 and tried 6.
    assert [one.depth for one in tried(record(tree, [0, 2, 4], 9, taken=1))] == [1, 1]
    assert [one.depth for one in tried(record(tree, [0, 2, 4], 9, taken=2))] == [1, 1, 2]


def test_what_is_left_of_a_nearly_certain_law_is_not_lost_to_rounding() -> None:
    law = torch.tensor([1.0, 1e-9, 3e-9])
    tree = TokenTree(0)
    for token, probability in enumerate(law.tolist()):
        tree.add(0, token, "drafter", probability, law)
    assert list(draft_probabilities(tree, 0)) == pytest.approx([1.0, 0.25, 1.0])


def test_a_tally_adds_steps_up(tree: TokenTree) -> None:
    tally = Tally()
    tally(record(tree, [0, 2, 4], 9))
    tally(record(tree, [0, 1], 9, taken=1))
    assert (tally.steps, tally.tokens, len(tally.tried)) == (2, 4, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTED)
def test_every_policys_draft_probabilities_are_its_laws(name: str, temperature: float) -> None:
    model = ToyModel(vocab=8, zeros=0.0)
    policy, generator, later = policies(model.draft)[name], torch.Generator().manual_seed(3), 0
    for prompt in range(8):
        tree = tree_of(policy, context_of([prompt], temperature, generator), 14, 8)
        for node in range(len(tree)):
            law = model.draft([prompt, *path_tokens(tree, node)]).double()
            found = list(draft_probabilities(tree, node))
            for token, probability in zip(tree.children[node], found, strict=True):
                assert probability == pytest.approx(float(law[token] / law.sum()), rel=1e-4)
                law[token] = 0.0
            later += max(0, len(found) - 1)
    assert later > 0 or name == "drafted-chain"


@pytest.mark.parametrize("name", DRAFTED)
def test_coupled_draft_probabilities_have_the_noise_counted_in(name: str) -> None:
    model = ToyModel(vocab=8, zeros=0.0)
    policy, later = policies(model.draft)[name], 0
    for prompt in range(8):
        noise, context = Noise(prompt, 0, 8), context_of([prompt], 0.6)
        context.noise = noise
        tree = tree_of(policy, context, 14, 8)
        assert all(law is None for law in tree.law), "none is a draw"
        for node in range(len(tree)):
            law = perturbed_plain(
                model.draft([prompt, *path_tokens(tree, node)]), noise, 1 + tree.depth[node], 0.6
            )
            found = list(draft_probabilities(tree, node))
            for token, probability in zip(tree.children[node], found, strict=True):
                # Far less likely tokens count without their noise in what the rest is divided by.
                assert probability == pytest.approx(float(law[token] / law.sum()), rel=0.15)
                law[token] = 0.0
            later += max(0, len(found) - 1)
    assert later > 0 or name == "drafted-chain"


# Laws whose acceptance is known


def steps(
    draft: torch.Tensor,
    target: Callable[[list[int]], torch.Tensor],
    temperature: float,
    count: int,
    budget: int = 32,
) -> Tally:
    """`count` steps of DySpec from a drafter that always has the law `draft`."""
    policy, generator, tally = (
        DySpec(KnownDrafter(lambda _: draft)),
        torch.Generator().manual_seed(5),
        Tally(),
    )
    for _ in range(count):
        tree = tree_of(policy, context_of([0], temperature, generator), budget, 8)
        if temperature > 0:
            verdict = verify_residual(tree, lambda node: target(path_tokens(tree, node)), generator)  # noqa: B023 (called here only)
        else:
            verdict = verify_equal(tree, lambda node: int(target(path_tokens(tree, node)).argmax()))  # noqa: B023
        tally(record(tree, *verdict))
    return tally


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    law = torch.tensor([0.55, 0.33, 0.12])
    summary = summarise(1.0, steps(law, lambda _: law, 1.0, 400), 10)
    assert summary.tried == summary.accepted > 600 and summary.first_acceptance == 1
    filled = [one for one in summary.bins if one.count]
    assert [round(one.low, 1) for one in filled] == [0.1, 0.3, 0.5] and all(
        one.acceptance == 1 for one in filled
    )
    expected = sum(one.count * (1 - (one.probability or 0.0)) for one in filled) / summary.tried
    assert summary.calibration_gap == pytest.approx(expected) and summary.correlation is None


def test_a_coupled_drafter_equal_to_the_target_is_always_accepted() -> None:
    model, tally = ToyModel(vocab=9, zeros=0.0), Tally()
    policy, sampler = (
        DySpec(KnownDrafter(model.target)),
        Sampler(SamplingParams(temperature=0.7), [0], 9),
    )
    for seed in range(60):
        noise, context = Noise(seed, 0, 9), context_of([0], 0.7)
        context.noise = noise
        tree = tree_of(policy, context, 16, 8)

        def emitted(node: int) -> int:
            return sampler.emitted(
                model.target([0, *path_tokens(tree, node)]).log(),  # noqa: B023
                noise,  # noqa: B023
                1 + tree.depth[node],  # noqa: B023
            )

        tally(record(tree, *verify_equal(tree, emitted)))
    summary = summarise(0.7, tally, 10)
    assert summary.tried == summary.accepted > 120 and summary.first_acceptance == 1


def test_acceptance_is_that_of_the_rule() -> None:
    # With draft law q and target p, a first child y is accepted with min(1, p[y] / q[y]): 0.4 for
    # token 0, 1 for the others. Where 0 is rejected all that is left is on token 2: drawn next, d =
    # 0.33 / 0.45 of token 1 is never accepted and 0.12 / 0.45 of 2 always.
    q, p = torch.tensor([0.55, 0.33, 0.12]), torch.tensor([0.22, 0.33, 0.45])
    summary = summarise(1.0, steps(q, lambda _: p, 1.0, 2000), 10)
    rates = {round(one.low, 1): one.acceptance for one in summary.bins if one.count}
    half = summary.bins[5]
    assert half.count > 1000 and half.acceptance == pytest.approx(
        0.4, abs=4 * (0.24 / half.count) ** 0.5
    )
    assert {low: rate for low, rate in rates.items() if low != 0.5} == {
        0.1: 1.0,
        0.2: 1.0,
        0.3: 1.0,
        0.7: 0.0,
        0.9: 1.0,
    }
    assert half.probability == pytest.approx(0.55) and summary.bins[7].probability == pytest.approx(
        0.33 / 0.45
    )
    assert summary.bins[9].probability == 1.0, "the third child has all that is left"
    first = sum(float(torch.minimum(p, q)[token]) for token in range(3))  # E min(1, p/q) under q
    top = summary.by_depth[0]
    assert top.count == 2000 and top.acceptance == pytest.approx(
        first, abs=4 * (first * (1 - first) / 2000) ** 0.5
    )


def test_top_1_agreement_is_told_by_depth() -> None:
    # The drafter's favourite is 0. The target says 0 right below the root and then 1, the drafter's
    # second.
    q = torch.tensor([0.6, 0.3, 0.1])
    law = torch.eye(3)
    summary = summarise(0.0, steps(q, lambda path: law[min(len(path), 1)], 0.0, 3, budget=16), 10)
    layers = [
        (layer.depth, layer.count, layer.accepted) for layer in summary.by_depth if layer.count
    ]
    assert layers == [(1, 3, 3), (2, 3, 0), (3, 3, 0)]
    # 0.6 at depths 1 to 3, right at the first; 0.3 / 0.4 of the second children, right at depth 2
    # and not in the tree at 3.
    bins = {round(one.low, 1): (one.count, one.accepted) for one in summary.bins if one.count}
    assert bins[0.7] == (3, 3) and sum(count for low, (count, _) in bins.items() if low != 0.7) == 9
    assert summary.first_acceptance == pytest.approx(1 / 3) and summary.mean_accepted_tokens == 3


# Figures


@pytest.mark.parametrize(
    ("accepted", "count"), [(0, 1), (1, 1), (0, 7), (3, 7), (7, 7), (50, 1000), (999, 1000)]
)
def test_the_interval_is_wilsons(accepted: int, count: int) -> None:
    interval = binomtest(accepted, count).proportion_ci(0.95, method="wilson")
    assert wilson(accepted, count) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_no_interval_of_nothing() -> None:
    with pytest.raises(ValueError, match="count=0"):
        wilson(0, 0)


def test_bins_are_equal_and_the_last_holds_1() -> None:
    found = by_bin([Tried(p, p > 0.5, 1, True) for p in (0.0, 0.2, 0.25, 0.5, 0.99, 1.0)], 4)
    assert [(one.low, one.high, one.count, one.accepted) for one in found] == [
        (0.0, 0.25, 2, 0),
        (0.25, 0.5, 1, 0),
        (0.5, 0.75, 1, 0),
        (0.75, 1.0, 2, 2),
    ]
    assert (found[0].probability, found[3].probability, found[3].acceptance) == (0.1, 0.995, 1.0)
    (empty,) = by_bin([], 1)
    assert (empty.count, empty.probability, empty.acceptance, empty.interval) == (
        0,
        None,
        None,
        None,
    )


def test_gap_and_correlation() -> None:
    found = [
        Tried(0.2, True, 1, True),
        Tried(0.2, False, 1, False),
        Tried(0.9, True, 2, True),
        Tried(0.9, True, 12, True),
    ]
    summary = summarise(0.5, Tally(steps=2, tokens=5, tried=found), 10)
    assert summary.calibration_gap == pytest.approx((2 * 0.3 + 2 * 0.1) / 4)
    assert summary.correlation == pytest.approx(1 / 3**0.5)
    assert (
        summary.tried,
        summary.accepted,
        summary.mean_accepted_tokens,
        summary.first_acceptance,
    ) == (4, 3, 2.5, 1.0)
    assert [(layer.depth, layer.count) for layer in by_depth(found) if layer.count] == [
        (1, 1),
        (2, 1),
    ], "deeper than 8 is not told apart"
    nothing = summarise(0.0, Tally(), 2)
    assert (
        nothing.calibration_gap,
        nothing.correlation,
        nothing.mean_accepted_tokens,
        nothing.first_acceptance,
    ) == (None,) * 4
