"""Token Recycling: what followed the same tokens is drafted, for its tenant alone."""

import math

import numpy as np
import pytest
import torch

from quickbeam.drafters.base import Context
from quickbeam.drafters.ngram import Ngram
from quickbeam.drafters.recycling import KEPT, RecycledRows, Recycling
from quickbeam.llm import LLM
from quickbeam.methods.auto import Auto
from quickbeam.noise import Noise
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree

VOCAB = 50


def context(ids, tenant=None, **fields):
    return Context(list(ids), torch.zeros(VOCAB), tenant=tenant, **fields).begin([Ngram()])


def logits(*best):
    """Logits whose largest are `best`, in this order."""
    row = torch.zeros(VOCAB)
    for i, token in enumerate(best):
        row[token] = 10.0 - i
    return row


def learn(source, context, *rows, tree=None):
    source.learn(context, tree or TokenTree(context.ids[-1]), torch.stack(rows))


def best_after(source, context, path=()):
    recycled = source.after(context, path)
    return recycled and (int(recycled.tokens[0]), recycled.known == 2)


def test_what_followed_the_last_two_tokens_comes_before_what_followed_the_last():
    source = Recycling()
    learn(source, context([1, 2]), logits(30, 31))
    learn(source, context([3, 2]), logits(40))
    for before, best, pair in ((1, 30, True), (3, 40, True), (9, 40, False)):
        assert best_after(source, context([before, 2])) == (best, pair)
        assert best_after(source, context([5, before]), [2]) == (best, pair)
        assert best_after(source, context([5]), [before, 2]) == (best, pair)
    recycled = source.after(context([1, 2]), [])
    assert len(recycled.tokens) == KEPT and recycled.probs.sum() == pytest.approx(1)
    assert recycled.tokens[:2].tolist() == [30, 31]
    assert recycled.probs[0] / recycled.probs[1] == pytest.approx(math.e)
    assert source.after(context([1, 30]), []) is None


def test_nodes_are_learned_from_by_their_parents_rejected_ones_too():
    source, tree = Recycling(), TokenTree(2)
    tree.add(tree.add(0, 5, "test"), 6, "test")
    tree.add(0, 7, "test")
    learn(source, context([1, 2]), *map(logits, (20, 21, 22, 23)), tree=tree)
    for ids, best in (([1, 2], 20), ([2, 5], 21), ([5, 6], 22), ([2, 7], 23)):
        assert best_after(source, context(ids)) == (best, True)
    source = Recycling()
    for bad in (torch.nan, torch.inf):
        learn(source, context([1, 2]), torch.full((VOCAB,), bad))
    assert source.after(context([1, 2]), []) is None


def test_the_oldest_rows_are_forgotten_and_tenants_do_not_meet():
    known = RecycledRows(2)

    def put(before, token, next_token):
        known.put([(before, token)], np.array([[next_token]]), np.ones((1, 1)))

    def after(before, token):
        recycled = known.after(before, token)
        return recycled and (recycled.tokens[0], recycled.known == 2)

    put(1, 2, 3)
    put(4, 2, 5)
    put(6, 7, 8)  # in place of the first
    assert after(1, 2) == (5, False) and after(4, 2) == (5, True)
    put(6, 7, 9)
    assert after(1, 2) is None and after(4, 2) is None and after(6, 7) == (9, True)
    source = Recycling()
    learn(source, context([1, 2], "a"), logits(30))
    assert source.after(context([1, 2], "a"), [])
    assert source.after(context([1, 2], "b"), []) is None
    for i in range(8):
        source.after(context([1, 2], i), [])
    assert source.after(context([1, 2], "a"), []) is None


def tree_of_auto(method, context, budget=8):
    steps = method.propose(context, budget, 6)
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value.tree


def test_recycled_tokens_compete_in_the_tree_of_auto():
    """Below the root, below each other, and with a token that the text repeats, as one child."""
    method = Auto()
    for before, token, best in ((1, 2, (30, 31)), (2, 30, (33,)), (30, 33, (34,))):
        learn(method.successors[-1], context([before, token]), logits(*best))
    tree = tree_of_auto(method, context([9, 1, 2]))
    paths = {tuple(tree.tokens(node)): tree.source[node] for node in range(1, len(tree))}
    assert {(30,), (31,), (30, 33), (30, 33, 34)} <= paths.keys()
    assert set(paths.values()) == {"recycling"}
    text = [1, 2, 30, 8, 7, 1, 2]
    alone = tree_of_auto(Auto(), context(text))
    tree = tree_of_auto(method, context(text))
    child = tree.children[0][30]
    assert tree.source[child] == "ngram"
    assert tree.value[child] > alone.value[alone.children[0][30]]
    assert sum(tree.value[child] for child in tree.children[0].values()) <= 1
    # where nodes have costs, only what is worth its node
    costs = [0.0] + [0.2] * 8
    few = tree_of_auto(method, context([9, 1, 2], node_costs=costs))
    assert 1 < len(few) < 8 and all(value > 0.2 for value in few.value[1:])


def test_the_noise_of_a_position_decides_between_recycled_tokens():
    """At a temperature the target's choice is known up to its logits: the drafts follow it."""
    method = Auto()
    row = torch.zeros(VOCAB)
    row[20:30] = 20.0
    learn(method.successors[-1], context([1, 2]), row)
    chosen = set()
    for seed in range(12):
        noise = Noise(seed, 0, VOCAB)
        drafted = context([1, 2], temperature=1.0, noise=noise)
        tree = tree_of_auto(method, drafted, 2)
        target = Sampler(SamplingParams(temperature=1.0, seed=seed), [], VOCAB)
        chosen.add(target.emitted(row, noise, 2, []) == tree.token[1])
    assert chosen == {True}


def test_a_grammar_bans_recycled_tokens():
    class Odd:
        """Allows odd tokens."""

        def follows(self, path, tokens):
            return next((i for i, token in enumerate(tokens) if token % 2 == 0), len(tokens))

        def forced(self, path):
            return None

        def ban(self, row):
            row[::2] = -torch.inf
            return row

    method = Auto()
    learn(method.successors[-1], context([1, 2]), logits(30, 31, 32, 33))
    tree = tree_of_auto(method, context([1, 2], grammar=Odd()))
    assert {31, 33} <= set(tree.token[1:]) and all(token % 2 for token in tree.token[1:])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_drafts_without_a_drafter_and_a_wrong_table_costs_no_token(
    toy_folder, monkeypatch, temperature
):
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    llm = LLM(toy_folder, memory_of_answers=0)
    plain = llm.generate("To be or not", params, method="ar")
    first = llm.generate("To be or not", params, budget=8)
    assert first.method == "recycling" and first.token_ids == plain.token_ids
    again = llm.generate("To be or not", params, budget=8)
    assert again.token_ids == plain.token_ids and again.statistics.sources["recycling"].accepted > 0
    llm.reset()
    anew = llm.generate("To be or not", params, budget=8)
    assert anew.token_ids == plain.token_ids
    assert anew.statistics.steps > again.statistics.steps, "the answer was still remembered"
    llm.close()
    # what followed a token is kept for the token before it
    monkeypatch.setattr("quickbeam.drafters.recycling._before", lambda context, tree, node: node)
    learn = Recycling.learn

    def wrong(self, context, tree, rows):
        learn(self, context, tree, rows.roll(1, -1))

    monkeypatch.setattr(Recycling, "learn", wrong)
    llm = LLM(toy_folder, memory_of_answers=0)
    for _ in range(2):
        broken = llm.generate("To be or not", params, budget=8)
        assert broken.token_ids == plain.token_ids
    assert broken.statistics.mean_accepted_tokens < again.statistics.mean_accepted_tokens
    llm.close()


@pytest.mark.slow
def test_under_the_residual_rule_a_seed_repeats_an_answer_whatever_was_answered_before(toy_folder):
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5, coupling="residual")
    llm = LLM(toy_folder, "recycling", budget=8, memory_of_answers=0)
    first = llm.generate("To be", params).token_ids
    llm.generate("To be or not to be", SamplingParams(max_tokens=40))
    assert llm.generate("To be", params).token_ids == first
    llm.close()
