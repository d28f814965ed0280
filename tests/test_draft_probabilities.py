"""Draft probabilities of trees against acceptance: trees by hand, and distributions whose
acceptance is known."""

import pytest
import torch

from drafters import DRAFTED, KnownDrafter, context_of, perturbed_plain, policies, tree_of
from quickbeam.engine.trace import StepRecord
from quickbeam.methods.dyspec import DySpec
from quickbeam.noise import Noise
from quickbeam.tree import TokenTree
from quickbeam.verify import verify_equal, verify_residual
from scripts import script
from toy import ToyModel, path_tokens

acceptance = script("acceptance")
draft_probabilities, summarise = acceptance.draft_probabilities, acceptance.summarise
# DDTree takes the distribution after the likeliest path for those of all paths of its length
DRAFTED = [name for name in DRAFTED if name != "ddtree"]


def record(tree, path, token, taken=None):
    emitted = [*(tree.token[node] for node in path[1:]), token]
    return StepRecord(tree, path, token, emitted[:taken], 0.0, 0.0, 0.0)


def tried(*arguments):
    found = acceptance.tried(record(*arguments))
    return [(round(one.probability, 6), *one[1:]) for one in found]


@pytest.fixture
def tree():
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


def test_only_what_had_its_turn_is_counted(tree):
    # 1 is rejected and 2 accepted: 3 had no turn, nor had 7 below 1. Then 4 is accepted, and 6
    # below it rejected.
    below_root = [(0.5, False, True), (0.6, True, False)]
    assert tried(tree, [0, 2, 4], 9) == [*below_root, (0.8, True, True), (0.9, False, True)]
    # Both children of 2 are rejected; a certain child is struck out with its own probability.
    assert tried(tree, [0, 2], 9) == [*below_root, (0.8, False, True), (1.0, False, False)]
    # All three children of the root are rejected: 0.3 of what 1 left, 0.1 of what both left.
    rejected = [(0.5, False, True), (0.6, False, False), (0.5, False, False)]
    assert tried(tree, [0], 9) == rejected
    # A leaf is accepted: nothing is tried below it.
    assert tried(tree, [0, 1, 7], 9) == [(0.5, True, True), (0.6, True, True)]
    assert tried(TokenTree(0), [0], 9) == []


def test_what_lies_beyond_the_answers_end_is_left_out(tree):
    # 2 ended the answer, though the verifier went on to 4 and tried 6.
    assert len(tried(tree, [0, 2, 4], 9, 1)) == 2
    assert len(tried(tree, [0, 2, 4], 9, 2)) == 3


def test_what_is_left_of_a_nearly_certain_probs_is_not_lost_to_rounding():
    probs = torch.tensor([1.0, 1e-9, 3e-9])
    tree = TokenTree(0)
    for token, probability in enumerate(probs.tolist()):
        tree.add(0, token, "drafter", probability, probs)
    assert list(draft_probabilities(tree, 0)) == pytest.approx([1.0, 0.25, 1.0])


@pytest.mark.parametrize("name", DRAFTED)
def test_coupled_draft_probabilities_have_the_noise_counted_in(name):
    model = ToyModel(vocab=8, zeros=0.0)
    policy, later = policies(model.draft)[name], 0
    for prompt in range(8):
        noise, context = Noise(prompt, 0, 8), context_of([prompt], 0.6)
        context.noise = noise
        tree = tree_of(policy, context, 14, 8)
        assert all(probs is None for probs in tree.probs), "none is a draw"
        for node in range(len(tree)):
            probs = perturbed_plain(
                model.draft([prompt, *path_tokens(tree, node)]), noise, 1 + tree.depth[node], 0.6
            )
            found = list(draft_probabilities(tree, node))
            for token, probability in zip(tree.children[node], found, strict=True):
                # Far less likely tokens count without their noise in what the rest is divided by.
                assert probability == pytest.approx(float(probs[token] / probs.sum()), rel=0.15)
                probs[token] = 0.0
            later += max(0, len(found) - 1)
    assert later > 0 or name == "chain"


def steps(draft, target, temperature, count, budget=32):
    """`count` steps of DySpec from a drafter that always has the distribution `draft`."""
    policy, generator = DySpec(KnownDrafter(lambda _: draft)), torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        tree = tree_of(policy, context_of([0], temperature, generator), budget, 8)
        if temperature > 0:
            verdict = verify_residual(tree, lambda node: target(path_tokens(tree, node)), generator)  # noqa: B023 (called here only)
        else:
            verdict = verify_equal(tree, lambda node: int(target(path_tokens(tree, node)).argmax()))  # noqa: B023
        found.append(record(tree, *verdict))
    return found


def test_a_drafter_equal_to_the_target_is_always_accepted():
    probs = torch.tensor([0.55, 0.33, 0.12])
    one = summarise(steps(probs, lambda _: probs, 1.0, 400), 10)
    assert one["tried"] == one["accepted"] > 600 and one["first_acceptance"] == 1
    filled = [each for each in one["bins"] if each["count"]]
    assert [round(each["low"], 1) for each in filled] == [0.1, 0.3, 0.5]
    assert all(each["acceptance"] == 1 for each in filled)
    expected = sum(each["count"] * (1 - each["probability"]) for each in filled) / one["tried"]
    assert one["calibration_gap"] == pytest.approx(expected) and one["correlation"] is None


def test_the_gap_is_that_of_a_group_and_not_of_its_nodes():
    tree = TokenTree(0)
    tree.add(0, 1, "drafter", 0.5)
    one = summarise([record(tree, [0, 1], 9), record(tree, [0], 9)], 10)
    assert (one["tried"], one["accepted"], one["calibration_gap"]) == (2, 1, 0)


def test_the_drafters_favourite_is_right_once():
    # The drafter's favourite is 0. The target says 0 right below the root and then 1, the drafter's
    # second: 0.6 at depths 1 to 3, right at the first; 0.3 / 0.4 of the second children, right at
    # depth 2 and not in the tree at 3.
    q, sure = torch.tensor([0.6, 0.3, 0.1]), torch.eye(3)
    one = summarise(steps(q, lambda path: sure[min(len(path), 1)], 0.0, 3, budget=16), 10)
    bins = {round(each["low"], 1): each for each in one["bins"] if each["count"]}
    assert (bins[0.7]["count"], bins[0.7]["acceptance"]) == (3, 1.0)
    assert sum(each["count"] for low, each in bins.items() if low != 0.7) == 9
    assert one["first_acceptance"] == pytest.approx(1 / 3) and one["mean_accepted_tokens"] == 3
