"""Token Recycling: what followed the same tokens is drafted, for its tenant alone."""

import pytest
import torch

from quickbeam.drafters.base import Context, DraftRequest
from quickbeam.drafters.recycling import KEPT, PAIR, SINGLE, Successors, TokenRecycling
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

VOCAB = 50


def context(ids, tenant=None):
    return Context(list(ids), torch.zeros(VOCAB), tenant=tenant)


def logits(*best):
    """Logits whose largest are `best`, in this order."""
    row = torch.zeros(VOCAB)
    for i, token in enumerate(best):
        row[token] = 10.0 - i
    return row


def drafted(drafter, context, tree=None, node=0):
    tree = tree or TokenTree(context.ids[-1])
    (answer,) = drafter.answer([DraftRequest(context, tree, [node])])
    return answer.dense(0), answer.confidence[0]


def test_what_followed_the_last_two_tokens_is_drafted_before_what_followed_the_last():
    drafter = TokenRecycling()
    drafter.learn(context([1, 2]), TokenTree(2), logits(30, 31)[None])
    drafter.learn(context([3, 2]), TokenTree(2), logits(40)[None])
    for before, best, sure in ((1, 30, PAIR), (3, 40, PAIR), (9, 40, SINGLE)):
        probs, confidence = drafted(drafter, context([before, 2]))
        assert int(probs.argmax()) == best and confidence == sure, before
        assert probs.sum().item() == pytest.approx(1) and int((probs > 0).sum()) == KEPT
    probs, confidence = drafted(drafter, context([1, 30]))
    assert not probs.any() and confidence == 0.0


def test_nodes_are_learned_from_by_their_parents_rejected_ones_too():
    drafter, tree = TokenRecycling(), TokenTree(2)
    tree.add(tree.add(0, 5, "test"), 6, "test")
    tree.add(0, 7, "test")
    drafter.learn(context([1, 2]), tree, torch.stack([logits(n) for n in (20, 21, 22, 23)]))
    for ids, best in (([1, 2], 20), ([2, 5], 21), ([5, 6], 22), ([2, 7], 23)):
        assert int(drafted(drafter, context(ids))[0].argmax()) == best
    probs, _ = drafted(drafter, context([1, 2]), tree, 2)
    assert int(probs.argmax()) == 22
    drafter = TokenRecycling()
    for bad in (torch.full((1, VOCAB), torch.nan), torch.full((1, VOCAB), torch.inf)):
        drafter.learn(context([1, 2]), TokenTree(2), bad)
    assert not drafted(drafter, context([1, 2]))[0].any()


def test_the_oldest_rows_are_forgotten_and_tenants_do_not_meet():
    known = Successors(2)
    known.put(1, 2, [3], [0.0])
    known.put(4, 2, [5], [0.0])
    known.put(6, 7, [8], [0.0])  # in place of the first
    assert known.after(1, 2) == (1, SINGLE) and known.after(4, 2) == (1, PAIR)
    known.put(6, 7, [9], [0.0])
    assert known.after(1, 2) is None and known.after(4, 2) is None
    assert known.after(6, 7) == (1, PAIR) and known.row(1)[0][0] == 9
    drafter = TokenRecycling()
    drafter.learn(context([1, 2], "a"), TokenTree(2), logits(30)[None])
    assert drafted(drafter, context([1, 2], "a"))[0].any()
    assert not drafted(drafter, context([1, 2], "b"))[0].any()
    for i in range(8):
        drafted(drafter, context([1, 2], i))
    assert not drafted(drafter, context([1, 2], "a"))[0].any()


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
    llm.close()
    # what followed a token is kept for the token before it
    monkeypatch.setattr("quickbeam.drafters.recycling._before", lambda context, tree, node: node)
    learn = TokenRecycling.learn

    def wrong(self, context, tree, rows):
        learn(self, context, tree, rows.roll(1, -1))

    monkeypatch.setattr(TokenRecycling, "learn", wrong)
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
