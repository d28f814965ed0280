"""One tree of what the text repeats, what the last logits nearly chose and what a drafter says."""

import random
from statistics import mean

import pytest
import torch

from drafters import KnownDrafter, context_of, paths, propose, tree_of, zipf_drafter
from quickbeam import LLM, SamplingParams
from quickbeam.drafters.base import Context
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.methods import acceptance, make_method
from quickbeam.methods.acceptance import (
    AcceptanceModel,
    drawn_features,
    free_features,
    printed_features,
)
from quickbeam.methods.auto import Auto
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.free import LONGEST
from toy import path_tokens


class NoGuesses(LastLogits):
    def ranked(self, context, k):
        return []


def flat(node, nodes=64):
    return [0.0] + [node] * (nodes - 1)


def auto(drafter, guesses=False):
    method = Auto(drafter)
    if not guesses:
        method.last_logits = NoGuesses()
    return method


def costed(ids, node):
    context = context_of(ids, 0.0)
    context.node_costs = flat(node)
    return context


def test_without_repeats_the_tree_is_the_drafters():
    ids = [7, 3]
    both, alone = auto(zipf_drafter()), DySpec(zipf_drafter())
    for budget in (2, 9, 30):
        trees = [tree_of(method, context_of(ids, 0.0), budget, 12) for method in (both, alone)]
        assert paths(trees[0]) == paths(trees[1])
        assert trees[0].value == pytest.approx(trees[1].value)


def test_where_the_text_repeats_itself_for_long_the_drafter_is_not_asked():
    period, drafter = [5, 9, 2, 7, 1, 8, 3], zipf_drafter(20)
    method = auto(drafter)
    tree = tree_of(method, costed(period * 4, 0.01), 64, 12, call=0.3)
    assert drafter.rounds == 0 and path_tokens(tree, len(tree) - 1) == (period * 2)[:12]
    tree_of(method, costed([1, 2, 3, 4], 0.01), 64, 12, call=0.3)
    assert drafter.rounds > 0


def test_likely_paths_are_continued_from_the_text():
    probs = torch.full((30,), 0.001)
    probs[4] = 1 - 0.029
    text = [1, 4, 11, 12, 13, 14, 9, 8, 1]
    drafter = KnownDrafter(lambda context: probs)
    tree = tree_of(auto(drafter), costed([*text[:-1], 20, 1], 0.02), 64, 9, call=0.75)
    assert (4, 11, 12) in paths(tree) and drafter.rounds <= 1


def test_guesses_of_the_last_logits_compete_with_the_others():
    """They take the place of what is less likely, are learned, and give way to likelier ones."""
    drafter, logits = zipf_drafter(30), torch.arange(30).float()
    method, ids = auto(drafter, guesses=True), [1, 2, 3, 29]

    def tree():
        context = Context(list(ids), logits, node_costs=flat(0.02))
        return tree_of(method, context, 64, 9, call=9.0)

    first = tree()
    assert not drafter.rounds and set(first.source[1:]) == {"last_logits"}
    # the root, of rank 0, is left out
    assert [first.token[child] for child in first.children[0].values()] == [28, 27, 26]
    for _ in range(3000):
        method.model.observe(free_features(acceptance.GUESSED, 1), True)
        method.model.observe(free_features(acceptance.GUESSED, 2), False)
    assert [tree().token[1:], tree().value[1]] == [[28], pytest.approx(0.99)]
    # the drafter is asked here, and finds another token likelier
    assert paths(tree_of(method, Context(ids, logits), 9, 4))[0] != (28,)


def test_auto_takes_what_is_at_hand(toy_folder):
    llms = [LLM(toy_folder, dtype="float32", drafter=one) for one in (None, toy_folder)]
    answers = [one.generate("abc abc", SamplingParams(12, ignore_eos=True)) for one in llms]
    assert [one.method for one in (*llms, *answers)] == ["recycling", "auto"] * 2
    assert answers[0].token_ids == answers[1].token_ids


def test_continuations_are_not_endless():
    ids = [1] * 40
    assert max(tree_of(auto(zipf_drafter(20)), context_of(ids, 0.0), 64, 60).depth) <= 2 * LONGEST


def test_what_brings_too_little_is_not_asked_for():
    drafter = zipf_drafter()
    method = DySpec(drafter, printed_features)
    context, calls = costed([0], 0.02), []
    for call in (0.0, 0.05, 0.2, 0.5, 0.7):
        method.model = AcceptanceModel()
        before = drafter.rounds
        tree = tree_of(method, context, 64, 20, call)
        calls.append(drafter.rounds - before)
        assert (len(tree) == 1) == (calls[-1] == 0)
    assert calls == sorted(calls, reverse=True) and calls[0] > calls[2] > 0 == calls[-1]
    context.node_costs, context.explore = flat(0.02), True
    assert len(tree_of(method, context, 64, 20, call=0.7)) > 1 and len(drafter.calls) == 1
    tree_of(method, context_of([0], 0.0), 8, 20, call=0.7)  # without costs, the paper's own
    assert len(drafter.calls) > 1
    method, context = DySpec(zipf_drafter(), printed_features), context_of([0], 0.0)
    for _ in range(60_000):
        method.model.observe_calls(0, 1.0)
    context.node_costs, context.explore = flat(0.02), True
    assert len(tree_of(method, context, 64, 20, call=0.1)) >= 1


def test_only_the_first_call_of_a_block_drafter_costs_anything():
    """And all that the tree brings counts for it; for a call of another, a token at most."""
    rounds, sizes = [], []
    for one_call, least, most in ((False, 0.9, 1.01), (True, 2.5, 5.0)):
        drafter, context = zipf_drafter(), costed([0], 0.02)
        drafter.one_call = one_call
        method = DySpec(drafter, printed_features)
        sizes.append(len(tree_of(method, context, 64, 20, call=0.3)))
        rounds.append(drafter.rounds)
        assert len(tree_of(method, context, 64, 20, call=9.0)) == 1  # that one is too slow
        assert drafter.rounds == rounds[-1]
        for _ in range(200):
            tree, learn = propose(method, context, 64, 20)
            learn(tree, tree.path(max(range(len(tree)), key=tree.depth.__getitem__))[:4])
        assert least < method.model.accepted_per_asked < most
    assert 0 < rounds[0] < rounds[1] and sizes[0] < sizes[1]


@pytest.mark.parametrize("name", ["pld", "logitspec"])
def test_free_trees_hold_what_is_worth_its_cost_and_learn(name):
    method, sizes = make_method(name), list[int]()
    context = context_of([5, 9, 2, 7, 1, 8, 3] * 3, 0.0).begin(method.sources)
    for node in (0.001, 0.1, 0.3, 0.7):
        context.node_costs = flat(node)
        tree = tree_of(method, context, 64, 20)
        assert len(tree_of(method, context, 64, 0)) == 1
        assert all(value > node for value in tree.value[1:])
        sizes.append(len(tree))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > 1
    for _ in range(300):  # the text goes on differently each time
        steps = method.propose(context, 64, 20)
        with pytest.raises(StopIteration) as end:
            next(steps)
        end.value.value.learn(end.value.value.tree, [0])
    assert len(end.value.value.tree) == 1


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_what_is_accepted_is_learned_where_it_was_seen(rate):
    model, rng = AcceptanceModel(), random.Random(3)
    for _ in range(4000):
        accepted = rng.random() < rate
        model.observe(drawn_features(1, rng.uniform(0.3, 0.6)), accepted)
        model.observe(free_features(acceptance.REPEATED, 5), accepted)
        model.observe(printed_features(0, 0.5), accepted)
    near = pytest.approx(rate, abs=0.06)
    assert mean(model.rate(drawn_features(1, x)) for x in (0.31, 0.45, 0.59)) == near
    assert model.rate(free_features(acceptance.REPEATED, 4)) == near
    others = (
        drawn_features(0, 0.45),
        drawn_features(1, 0.2),
        acceptance.drafted_features(1, 0.45),
        printed_features(0, 0.5),
    )
    for other in (*others, free_features(acceptance.REPEATED, 3)):
        assert model.rate(other) == other.prior
    agreed = free_features(acceptance.REPEATED, 4).after_drafter(first_choice=True)
    assert model.rate(agreed) == agreed.prior
