"""A feature drafter at work: its laws are those of its equations run plainly, whatever was grown, accepted and begun anew.

pytest tests/test_feature_drafter.py
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from features import KINDS, WIDE, Pair, context_of, head_of
from models import VOCAB, tiny
from quickbeam.draft import eagle
from quickbeam.draft.eagle import EagleDrafter
from quickbeam.errors import QuickbeamError
from quickbeam.target.target import Target
from quickbeam.train.shards import Conversation
from quickbeam.train.unroll import collate, unroll
from quickbeam.tree import TokenTree


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {kind: Pair(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(rng=st.randoms(use_true_random=False), temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_laws_are_those_of_the_equations(pairs: dict[str, Pair], kind: str, rng: random.Random, temperature: float) -> None:
    """Trees that grow by rounds of some of their nodes; steps that accept any path, some without a draft; requests that share a prefix."""
    pair = pairs[kind]
    target, drafter = pair.target, pair.drafter

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    ids = tokens(2, 20)
    pair.begin(ids[:-1], ids[-1])
    context = context_of(ids, temperature)
    for _ in range(5):
        tree, asked = TokenTree(context.ids[-1]), list[int]()
        for _ in range(rng.randint(0, 4)):
            fit = [node for node in range(len(tree)) if node not in asked and (not node or tree.parent[node] in (*asked, 0))]
            if ready := [node for node in fit if node == 0 or rng.random() < 0.7]:
                pair.check(context, tree, ready)
                asked += ready
            for _ in range(rng.randint(1, 4)):
                parent, token = rng.randrange(len(tree)), rng.randrange(VOCAB)
                if tree.child(parent, token) is None:
                    tree.add(parent, token, "random")
        target.verify(tree)
        path = tree.path(rng.randrange(len(tree)))
        target.commit(tree, path)
        emitted = [*(tree.token[node] for node in path[1:]), rng.choice([rng.randrange(VOCAB), *tree.children[path[-1]]])]
        context.ids.extend(emitted)
        drafter.extend(emitted)
        if rng.random() < 0.3:  # another request
            kept = target.ids[: rng.randint(0, len(target.ids))]
            prompt = [*kept, *tokens(1, 5)]
            pair.begin(prompt, token := rng.randrange(VOCAB), keep=drafter.reusable(prompt, len(kept)))
            context = context_of([*prompt, token], temperature)


def test_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, passes = Pair("attention"), list[int]()
    run = pair.drafter._run
    monkeypatch.setattr(pair.drafter, "_run", lambda hidden, tokens, *rest: (passes.append(len(tokens)), run(hidden, tokens, *rest))[1])
    monkeypatch.setattr(eagle, "CHUNK", 5)
    prompt = list(range(10, 22))
    pair.begin(prompt, 50)
    context, tree = context_of([*prompt, 50]), TokenTree(50)
    pair.check(context, tree, [0])
    a, b = tree.add(0, 1, "x"), tree.add(0, 2, "x")
    pair.check(context, tree, [a, b])
    assert passes == [5, 5, 2, 2] and pair.drafter.calls == 4
    pair.target.verify(tree)
    pair.target.commit(tree, [0, b])
    longer = [*prompt, 50, 2, 7, 7]
    assert pair.drafter.reusable(longer, 14) == 12  # the draft's row is not the target's
    assert pair.drafter.reusable([*prompt[:6], 3, 3], 6) == 5  # row 5 holds the embedding of the next token
    pair.begin(longer, 8, keep=12)
    pair.check(context_of([*longer, 8]), TokenTree(8), [0])
    assert passes[4:] == [4]
    pair.drafter.forget()
    assert pair.drafter.reusable(longer, 15) == 0


@pytest.mark.parametrize("kind", ["attention", "input", "ours"])
def test_training_unrolls_what_drafting_computes(kind: str) -> None:
    """Pass k of training-time test at row i is the drafter's row k below the root i + 1."""
    pair, depths = Pair(kind), 4
    ids = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    pair.target.prefill(ids)
    text = Conversation(torch.tensor(ids, dtype=torch.int32), torch.ones(12, dtype=torch.bool), pair.target.take_hidden(), 1.0)
    trained = [pair.network.logits(step.out).softmax(-1) for step in unroll(pair.network, collate([text]), depths)]
    assert [len(laws) for laws in trained] == [10, 9, 8, 7]
    pair.begin(ids[:1], ids[1])
    for i in range(10):
        tree = TokenTree(ids[i + 1])
        for depth in range(min(depths, 10 - i)):
            law = pair.drafter.laws(context_of(ids[: i + 2]), tree, [depth])[0]
            torch.testing.assert_close(law, trained[depth][i], atol=1e-5, rtol=1e-4)
            tree.add(depth, ids[i + depth + 2], "x")
        pair.target.verify(tree)
        pair.target.commit(tree, [0])


def test_nodes_are_asked_for_from_the_root_down_and_prompts_must_fit(pairs: dict[str, Pair]) -> None:
    pair = pairs["attention"]
    pair.drafter.forget()
    pair.begin([1], 2)
    context, tree = context_of([1, 2]), TokenTree(2)
    tree.add(tree.add(0, 5, "x"), 6, "x")
    with pytest.raises(ValueError, match="ask for its root first"):
        pair.drafter.laws(context, tree, [1])
    law = pair.drafter.laws(context, tree, [0])
    with pytest.raises(ValueError, match="parent 1 first"):
        pair.drafter.laws(context, tree, [2])
    with pytest.raises(ValueError, match="parent 1 first"):
        pair.drafter.laws(context, tree, [1, 2])
    pair.check(context, tree, [1])
    with pytest.raises(ValueError, match="ask for its root first"):
        pair.drafter.laws(context, TokenTree(2), [1])
    assert torch.equal(pair.drafter.laws(context, TokenTree(2), [0]), law)  # a second tree on the same text
    with pytest.raises(ValueError, match="hidden states of 0 tokens for the 1 that are not read yet"):
        pair.drafter.laws(context_of([1, 2, 3]), TokenTree(3), [0])
    pair.drafter.forget()
    with pytest.raises(ValueError, match="the target kept 1 tokens, the drafter has read 0"):
        pair.begin([1, 4], 2, keep=1)


def test_bad_weights_are_an_error_and_a_tiny_temperature_leaves_one_token() -> None:
    pair = Pair("attention")
    pair.begin([1], 2)
    law = pair.drafter.laws(context_of([1, 2], 1e-40), TokenTree(2), [0])[0]
    assert law.max() == 1 and law.count_nonzero() == 1
    pair.drafter.network.norm.weight.fill_(float("nan"))
    with pytest.raises(QuickbeamError, match="not finite"):
        pair.drafter.laws(context_of([1, 2]), TokenTree(2), [0])


def test_bfloat16_does_not_round_the_rotary_angles() -> None:
    model = tiny("llama", torch.bfloat16)
    drafter = EagleDrafter(head_of(WIDE, model), Target(model))
    x, at = torch.zeros(1), torch.tensor([[3000]])
    got, wanted = drafter.network.rotary(x, at), WIDE.rotary()(x, at)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_the_largest_logits_are_those_of_a_sort(spread: float) -> None:
    """Whether all, some or few tokens lie near the peak."""
    logits = spread * torch.randn(5000, generator=torch.Generator().manual_seed(0))
    for count in (1, 16, 60):
        assert eagle._largest(logits, count) == logits.topk(count).indices.tolist()
    assert sorted(eagle._largest(logits[:7], 16)) == list(range(7))
