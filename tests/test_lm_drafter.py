"""A smaller language model as a drafter: its laws are those of plain runs, whatever was grown, accepted and begun anew.

pytest tests/test_lm_drafter.py
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import VOCAB, tiny
from quickbeam.draft.base import Context
from quickbeam.draft.draft_model import GAP, LMDrafter, check_vocabulary
from quickbeam.engine.loop import Generation
from quickbeam.engine.output import Output
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.presets import PRESETS
from quickbeam.sampling import SamplingParams, draw
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree
from quickbeam.trees import make_policy
from quickbeam.trees.base import NoDraft, TreePolicy

NAMES = ("llama", "mistral-window", "gpt2")
METHODS = [name for name, preset in PRESETS.items() if LMDrafter.name in preset.sources]


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class DrafterChain(TreePolicy):
    """A chain of the drafter's most probable tokens, or of its draws: the plainest use of its laws."""

    def __init__(self, drafter: LMDrafter) -> None:
        self.sources, self.drafter = (drafter,), drafter

    def grow(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        tree = TokenTree(context.ids[-1])
        while len(tree) < budget and tree.depth[-1] < max_depth:
            law = self.drafter.laws(context, tree, [len(tree) - 1])[0]
            if context.temperature > 0:
                tree.add(len(tree) - 1, draw(law, context.generator), "drafter", law=law)
            else:
                tree.add(len(tree) - 1, int(law.argmax()), "drafter")
        return tree


@pytest.fixture(scope="module")
def pairs():
    """By layout, a drafter and the same model as transformers runs it."""
    return {name: (LMDrafter(tiny(name, seed=7), VOCAB), tiny(name, seed=7)) for name in NAMES}


def context_of(ids: list[int], temperature: float = 1.0) -> Context:
    return Context(list(ids), torch.zeros(VOCAB), temperature)


@torch.inference_mode()
def expected(model, ids: list[int], tree: TokenTree, nodes: list[int], temperature: float) -> torch.Tensor:
    """The laws after `nodes` as transformers gives them, each path run on its own, the prefix included."""
    paths = [ids[:-1] + [tree.token[i] for i in tree.path(node)] for node in nodes]
    return torch.stack([model(torch.tensor([path]), use_cache=False).logits[0, -1] / temperature for path in paths]).softmax(-1)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(rng=st.randoms(use_true_random=False), temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_laws_are_those_of_a_plain_run_of_every_path(pairs, name: str, rng: random.Random, temperature: float) -> None:
    """Trees that grow by rounds of some of their nodes; steps that accept any path; requests that share a prefix with what was read."""
    drafter, model = pairs[name]
    context = context_of([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], temperature)
    drafter.reset(context.ids)
    for _ in range(5):
        tree, asked = TokenTree(context.ids[-1]), []
        for _ in range(rng.randint(0, 4)):
            ready: list[int] = []
            for node in range(len(tree)):
                if node not in asked and (node == 0 or (tree.parent[node] in (*asked, *ready) and rng.random() < 0.7)):
                    ready.append(node)
            if ready:
                laws = drafter.laws(context, tree, ready)
                torch.testing.assert_close(laws, expected(model, context.ids, tree, ready, temperature or 1.0), atol=1e-5, rtol=1e-3)
                asked += ready
            for _ in range(rng.randint(1, 4)):
                parent, token = rng.randrange(len(tree)), rng.randrange(VOCAB)
                if tree.child(parent, token) is None:
                    tree.add(parent, token, "random")
        path = tree.path(rng.randrange(len(tree)))
        last = rng.choice([rng.randrange(VOCAB), *tree.children[path[-1]]])  # a token that a child holds, too: rounding may reject it first
        emitted = [*(tree.token[node] for node in path[1:]), last]
        context.ids.extend(emitted)
        drafter.extend(emitted)
        if rng.random() < 0.25:  # another request
            kept = context.ids[: rng.randint(0, len(context.ids))]
            context = context_of([*kept, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 5)))], temperature)
            drafter.reset(context.ids)


def passes_of(drafter: LMDrafter, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the drafter's model is made to run from here on: (prefill, tokens computed) and (verify, nodes computed)."""
    passes: list[tuple[str, int]] = []
    prefill, verify = drafter.model.prefill, drafter.model.verify
    monkeypatch.setattr(drafter.model, "prefill", lambda ids, keep=0: (passes.append(("prefill", len(ids) - keep)), prefill(ids, keep))[1])
    monkeypatch.setattr(drafter.model, "verify", lambda tree, base=0: (passes.append(("verify", len(tree) - base)), verify(tree, base))[1])
    return passes


def test_nothing_is_computed_twice_and_catching_up_takes_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = LMDrafter(tiny("llama"), VOCAB)
    passes = passes_of(drafter, monkeypatch)
    context = context_of([5, 6, 7, 8])
    drafter.reset(context.ids)
    tree = TokenTree(8)
    nodes = [tree.add(0, 20, "x"), tree.add(0, 21, "x"), tree.add(1, 22, "x"), tree.add(3, 23, "x")]
    drafter.laws(context, tree, [0])
    drafter.laws(context, tree, nodes[:2])
    drafter.laws(context, tree, nodes[2:3])
    assert passes == [("prefill", 3), ("verify", 1), ("verify", 2), ("verify", 1)] and drafter.calls == 3
    context.ids.extend([20, 22, 23, 50])  # the last node accepted was a leaf: it is run together with the new root
    tree = TokenTree(50)
    law = drafter.laws(context, tree, [0])
    assert passes[4:] == [("verify", 2)] and drafter.model.ids == [5, 6, 7, 8, 20, 22]
    torch.testing.assert_close(law, expected(tiny("llama"), context.ids, tree, [0], 1.0), atol=1e-5, rtol=1e-3)
    del passes[:]
    drafter.reset([5, 6, 7, 8, 20, 9, 9])  # a request that shares five tokens
    drafter.reset([5, 6, 7, 8, 20, 9, 3])
    assert passes == [("prefill", 1)]


def test_a_long_stretch_that_was_not_drafted_is_read_like_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = LMDrafter(tiny("llama"), VOCAB)
    passes = passes_of(drafter, monkeypatch)
    context = context_of([1, 2])
    drafter.reset(context.ids)
    context.ids.extend([3] * GAP)
    law = drafter.laws(context, tree := TokenTree(3), [0])
    assert passes == [("prefill", 1), ("prefill", GAP), ("verify", 1)]
    torch.testing.assert_close(law, expected(tiny("llama"), context.ids, tree, [0], 1.0), atol=1e-5, rtol=1e-3)


def test_nodes_are_asked_for_from_the_root_down() -> None:
    drafter = LMDrafter(tiny("llama"), VOCAB)
    context = context_of([1, 2])
    drafter.reset(context.ids)
    tree = TokenTree(2)
    tree.add(tree.add(0, 5, "x"), 6, "x")
    with pytest.raises(ValueError, match="ask for its root first"):
        drafter.laws(context, tree, [1])
    drafter.laws(context, tree, [0])
    with pytest.raises(ValueError, match="parent 1 first"):
        drafter.laws(context, tree, [2])
    with pytest.raises(ValueError, match="ask for its root first"):
        drafter.laws(context, TokenTree(2), [1])


@pytest.mark.parametrize(("own", "asked"), [(VOCAB, 90), (VOCAB, VOCAB), (VOCAB, 120)])
def test_other_widths_are_cut_or_padded_and_any_token_can_be_read(own: int, asked: int) -> None:
    drafter = LMDrafter(tiny("llama"), asked)
    context = context_of([1, 2, asked - 1])  # where the target is wider, a token that the drafter has never heard of
    drafter.reset(context.ids)
    law = drafter.laws(context, tree := TokenTree(asked - 1), [0])[0]
    assert law.shape == (asked,) and law.dtype == torch.float32 and float(law.sum()) == pytest.approx(1)
    assert not law[own:].any()
    if asked <= own:
        full = expected(tiny("llama"), context.ids, tree, [0], 1.0)[0, :asked]
        torch.testing.assert_close(law, full / full.sum(), atol=1e-5, rtol=1e-3)


def test_a_tiny_temperature_leaves_one_token_and_bad_weights_are_an_error() -> None:
    drafter = LMDrafter(tiny("gpt2"), VOCAB)
    context = context_of([1, 2], temperature=1e-40)
    drafter.reset(context.ids)
    law = drafter.laws(context, TokenTree(2), [0])[0]
    assert law.max() == 1 and law.count_nonzero() == 1
    broken = tiny("gpt2")
    broken.transformer.ln_f.weight.data.fill_(float("nan"))
    drafter = LMDrafter(broken, VOCAB)
    drafter.reset(context.ids)
    with pytest.raises(QuickbeamError, match="not finite"):
        drafter.laws(context, TokenTree(2), [0])


def test_a_request_beyond_the_drafters_context_is_refused() -> None:
    drafter = LMDrafter(tiny("gpt2"), VOCAB)
    drafter.check_length(500, 12)
    with pytest.raises(InvalidInput, match=r"500 tokens and max_tokens=13 exceed the drafter's context of 512.*at most 12 tokens"):
        drafter.check_length(500, 13)


def tokenizer(*tokens: str | None) -> SimpleNamespace:
    return SimpleNamespace(get_vocab=lambda: {token: i for i, token in enumerate(tokens) if token is not None})


@pytest.mark.parametrize(
    ("target", "drafter", "sizes", "words"),
    [
        (("a", "b", "c"), ("a", "x", "y"), (3, 3), "token 1 is 'b' to the target and 'x' to the drafter"),
        (("a", "b"), ("b", "a"), (2, 2), "token 0 is 'a' to the target and 'b' to the drafter"),
        (("a", "b", "c"), ("a", "b"), (3, 2), "token 2 is 'c' to the target and no token to the drafter"),
        (("a", "b"), ("a", "b", "c"), (2, 4), "token 2 is no token to the target and 'c' to the drafter"),
        (("a", None, "c"), ("a", "b", "c"), (3, 3), "token 1 is no token to the target and 'b' to the drafter"),
        (("a", "b", "c"), ("a", None, "c"), (3, 3), "token 1 is 'b' to the target and no token to the drafter"),
    ],
)
def test_other_vocabularies_are_refused(target, drafter, sizes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        check_vocabulary(tokenizer(*target), tokenizer(*drafter), sizes)


def test_padded_tails_may_differ() -> None:
    check_vocabulary(tokenizer("a", "b"), tokenizer("a", "b"), (5, 2))
    check_vocabulary(tokenizer("a", "b", "<tool>"), tokenizer("a", "b"), (5, 4))
    check_vocabulary(tokenizer("a", "b"), tokenizer("a", "b", "<tool>"), (3, 5))


# Through the engine


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", seed=3))


def answer(target: Target, policy: TreePolicy, params: SamplingParams, prompt: list[int], budget: int = 6) -> Generation:
    target.reset()
    generation = Generation(target, policy, Output(Letters(), params), prompt, params, budget)
    for _ in generation:
        pass
    return generation


def policy_of(method: str, drafter: LMDrafter) -> TreePolicy:
    return make_policy(PRESETS[method].sources, PRESETS[method].tree, drafter)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_greedy_answers_are_plain_decodings_whatever_the_drafter(target: Target, pairs, method: str, data: st.DataObject) -> None:
    params = SamplingParams(
        max_tokens=data.draw(st.integers(1, 40)),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        stop=data.draw(st.sampled_from([(), ("ab", "ccd")])),
        stop_token_ids=data.draw(st.sampled_from([(), (17, 40)])),
    )
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    drafter = pairs[data.draw(st.sampled_from(NAMES))][0]
    plain = answer(target, NoDraft(), params, prompt)
    drafted = answer(target, policy_of(method, drafter), params, prompt, data.draw(st.sampled_from([1, 2, 7, 30])))
    assert drafted.output.token_ids == plain.output.token_ids
    assert (drafted.output.text, drafted.output.finish_reason) == (plain.output.text, plain.output.finish_reason)
    stats = drafted.statistics
    assert sum(source.accepted for source in stats.sources.values()) + stats.steps + 1 >= stats.new_tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_repeats_the_answer_and_its_drafts(target: Target, pairs, method: str) -> None:
    drafter = pairs["gpt2"][0]

    def tell(seed: int, before: list[int] | None = None) -> tuple[list[int], int]:
        if before:
            answer(target, policy_of(method, drafter), SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True), before)
        drafter.forget()
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True)
        generation = answer(target, policy_of(method, drafter), params, [3, 3], 12)
        return generation.output.token_ids, generation.statistics.sources["drafter"].drafted

    assert tell(1) == tell(1) == tell(1, before=[3, 3, 8]) != tell(2)
    assert tell(-5) == tell(-5) != tell(2**64 - 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_equal_to_the_target_is_nearly_always_right(target: Target, temperature: float) -> None:
    params = SamplingParams(max_tokens=61, temperature=temperature, seed=2, ignore_eos=True)
    generation = answer(target, DrafterChain(LMDrafter(tiny("llama", seed=3), VOCAB)), params, [4, 5, 6], budget=6)
    assert generation.statistics.mean_accepted_tokens > 5.5  # of 6: five drafted tokens and the target's own
    assert generation.statistics.steps <= 11


def test_an_interrupt_in_the_drafter_leaves_it_fit_for_the_next_request(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = LMDrafter(tiny("llama", seed=3), VOCAB)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    fresh = answer(target, DrafterChain(drafter), params, [4, 5, 6])
    for where in ("verify", "commit", "prefill"):
        for when in range(1, 4):
            drafter.forget()
            inner, calls = getattr(drafter.model, where), []

            def interrupted(*args, inner=inner, calls=calls, when=when, **kwargs):
                calls.append(1)
                result = inner(*args, **kwargs)
                if len(calls) == when:
                    raise KeyboardInterrupt
                return result

            with monkeypatch.context() as patch:
                patch.setattr(drafter.model, where, interrupted)
                generation = Generation(target, DrafterChain(drafter), Output(Letters(), params), [4, 5, 6], params, 6)
                target.reset()
                try:
                    list(generation)
                except KeyboardInterrupt:
                    assert len(calls) == when
            again = answer(target, DrafterChain(drafter), params, [4, 5, 6])
            assert again.output.token_ids == fresh.output.token_ids
            assert again.statistics.steps == fresh.statistics.steps


def test_an_interrupt_while_rewinding_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = LMDrafter(tiny("llama"), VOCAB)
    store, context = drafter.model.store, context_of([5, 6, 7, 8, 9])
    drafter.reset(context.ids)
    with monkeypatch.context() as patch:
        truncate = store.truncate

        def interrupted(length: int) -> None:
            truncate(length)
            raise KeyboardInterrupt

        patch.setattr(store, "truncate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.reset([5, 4])
    drafter.reset(context.ids)
    law = drafter.laws(context, tree := TokenTree(9), [0])
    torch.testing.assert_close(law, expected(tiny("llama"), context.ids, tree, [0], 1.0), atol=1e-5, rtol=1e-3)
