"""One tree of what the text repeats, what the last logits nearly chose and what a drafter says."""

import pytest
import torch

from drafters import KnownDrafter, context_of, paths, tree_of, zipf_drafter
from quickbeam import LLM, SamplingParams
from quickbeam.drafters.base import Context, MarginalCost
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram
from quickbeam.methods.acceptance import GUESSED, elsewhere
from quickbeam.methods.auto import Auto
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.free import LONGEST
from toy import path_tokens


class NoGuesses(LastLogits):
    """Last logits that nearly chose nothing."""

    def ranked(self, context, k):
        return []


def auto(drafter, guesses=False):
    return Auto(drafter, Ngram(), LastLogits() if guesses else NoGuesses())


def priced(ids, prices):
    context = context_of(ids, 0.0)
    context.marginal_cost = prices
    return context


def test_without_repeats_the_tree_is_the_drafters():
    ids = [7, 3]
    both, alone = auto(zipf_drafter()), DySpec(zipf_drafter())
    for budget in (2, 9, 30):
        trees = [tree_of(policy, context_of(ids, 0.0), budget, 12) for policy in (both, alone)]
        assert paths(trees[0]) == paths(trees[1])
        assert trees[0].value == pytest.approx(trees[1].value)


def test_where_the_text_repeats_itself_for_long_the_drafter_is_not_asked():
    period, prices = [5, 9, 2, 7, 1, 8, 3], MarginalCost.of_passes([1, 64], [0.0, 63 * 0.01])
    drafter = zipf_drafter(20)
    policy = auto(drafter)
    tree = tree_of(policy, priced(period * 4, prices), 64, 12, call=0.3)
    assert drafter.rounds == 0 and path_tokens(tree, len(tree) - 1) == (period * 2)[:12]
    tree_of(policy, priced([1, 2, 3, 4], prices), 64, 12, call=0.3)
    assert drafter.rounds > 0


def test_likely_paths_are_continued_from_the_text():
    """The drafter is sure of one token."""
    probs = torch.full((30,), 0.001)
    probs[4] = 1 - 0.029
    text = [1, 4, 11, 12, 13, 14, 9, 8, 1]
    drafter = KnownDrafter(lambda context: probs)
    prices = MarginalCost.of_passes([1, 64], [0.0, 63 * 0.02])
    tree = tree_of(auto(drafter), priced([*text[:-1], 20, 1], prices), 64, 9, call=0.75)
    assert (4, 11, 12) in paths(tree) and drafter.rounds <= 1


def test_guesses_of_the_last_logits_compete_with_the_others():
    """They take the place of what is less likely, are learned, and give way to likelier ones."""
    drafter, logits = zipf_drafter(30), torch.arange(30).float()
    policy, ids = auto(drafter, guesses=True), [1, 2, 3, 29]

    def tree():
        prices = MarginalCost.of_passes([1, 64], [0.0, 63 * 0.02])
        context = Context(list(ids), logits, marginal_cost=prices)
        return tree_of(policy, context, 64, 9, call=9.0)

    first = tree()
    assert not drafter.rounds and set(first.source[1:]) == {"last_logits"}
    # the root, of rank 0, is left out
    assert [first.token[child] for child in first.children[0].values()] == [28, 27, 26]
    for _ in range(3000):
        policy.model.observe(elsewhere(GUESSED, 1), True)
        policy.model.observe(elsewhere(GUESSED, 2), False)
    assert [tree().token[1:], tree().value[1]] == [[28], pytest.approx(0.99)]
    # the drafter is asked here, and finds another token likelier
    assert paths(tree_of(policy, Context(ids, logits), 9, 4))[0] != (28,)


def test_auto_takes_what_is_at_hand(toy_folder):
    short = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = LLM(toy_folder, dtype="float32")
    answer = alone.generate("abc abc", short)
    assert alone.method == answer.method == "recycling"
    both = LLM(toy_folder, dtype="float32", drafter=toy_folder)
    drafted = both.generate("abc abc", short)
    assert drafted.method == "auto" and drafted.token_ids == answer.token_ids


def test_continuations_are_not_endless():
    ids = [1] * 40
    assert max(tree_of(auto(zipf_drafter(20)), context_of(ids, 0.0), 64, 60).depth) <= 2 * LONGEST
