"""Draft probabilities of trees against acceptance: trees by hand, and distributions whose
acceptance is known."""

import pytest
import torch

from drafters import DRAFTED, KnownDrafter, context_of, tree_of
from quickbeam.engine.trace import StepRecord
from quickbeam.methods.dyspec import DySpec
from quickbeam.tree import TokenTree
from quickbeam.verify import verify_equal, verify_residual
from scripts import script
from toy import path_tokens

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
