"""A smaller language model as a drafter: its distributions are those of plain runs, whatever was
grown, accepted and begun anew."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from answers import answer
from cases import before, examples, raising, refuses
from features import RANDOM, context_of, interrupt, random_requests
from models import VOCAB, path_logits, tiny
from quickbeam import LLM
from quickbeam.drafters.base import DraftRequest
from quickbeam.drafters.draft_model import GAP, LMDrafter, same_tokens
from quickbeam.drafters.vocabulary import make_shortlist
from quickbeam.engine.engine import Engine
from quickbeam.errors import InvalidInput
from quickbeam.methods import make_method
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Draft
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

NAMES = ("llama", "mistral-window", "gpt2")


@pytest.fixture(scope="module")
def pairs():
    """By layout, a drafter and the same model as transformers runs it."""
    return {
        name: (LMDrafter(make_model(tiny(name, seed=7)), VOCAB), tiny(name, seed=7))
        for name in NAMES
    }


def begin(drafter, ids, temperature=1.0):
    return context_of(ids, temperature).begin([drafter])


def state_of(context):
    return context.states[LMDrafter.name]


def distributions_of(drafter, context, tree=None, nodes=(0,)):
    """`[len(nodes), vocab]`, from a call for this sequence alone."""
    tree = TokenTree(context.ids[-1]) if tree is None else tree
    return drafter.answer([DraftRequest(context, tree, list(nodes))])[0].dense()


def check(probs, model, context, tree=None, nodes=(0,)):
    tree = TokenTree(context.ids[-1]) if tree is None else tree
    logits = path_logits(model, context.ids[:-1], tree, nodes)[:, : probs.shape[1]]
    right = (logits / (context.temperature or 1.0)).softmax(-1)
    torch.testing.assert_close(probs, right, atol=1e-5, rtol=1e-3)


def test_a_call_that_fails_can_be_made_again(pairs, monkeypatch):
    drafter, _ = pairs["llama"]
    context, alone, tree = begin(drafter, [5, 6, 7]), begin(drafter, [5, 6, 7]), TokenTree(7)
    tree.add(0, 3, "x")
    for nodes in ([0], [1]):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
            patch.setattr(drafter.model, "forward", raising(RuntimeError("broken")))
            distributions_of(drafter, context, tree, nodes)
        again = distributions_of(drafter, context, tree, nodes)
        assert torch.equal(again, distributions_of(drafter, alone, tree, nodes))
    for one in (context, alone):
        state_of(one).release()


@pytest.mark.parametrize("name", NAMES)
@examples(12)
@given(rng=RANDOM, temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_distributions_are_those_of_a_plain_run_of_every_path(pairs, name, rng, temperature):
    drafter, model = pairs[name]
    pages = drafter.model.pool.used
    context = begin(drafter, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], temperature)
    for _ in range(5):
        for tree, ready in random_requests(rng, context.ids[-1], alone=False):
            if ready:
                check(distributions_of(drafter, context, tree, ready), model, context, tree, ready)
        path = tree.path(rng.randrange(len(tree)))
        # a token that a child holds, too: rounding may reject it first
        last = rng.choice([rng.randrange(VOCAB), *tree.children[path[-1]]])
        context.extend([*(tree.token[node] for node in path[1:]), last])
        if rng.random() < 0.25:  # another request
            state_of(context).release()
            kept = context.ids[: rng.randint(0, len(context.ids))]
            kept += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
            context = begin(drafter, kept, temperature)
    state_of(context).release()
    assert drafter.model.pool.used == pages


@pytest.fixture(scope="module")
def listing():
    """A drafter in bfloat16 with a soft-capped head, and a shortlist of its first 20 tokens and the
    context's."""
    if library.kernels() is None:
        pytest.skip("no native kernels here")
    model = make_model(tiny("gemma2-softcap-window", torch.bfloat16, seed=7))
    drafter = LMDrafter(model, VOCAB, ranks_ids=True)
    kernels = library.kernels()
    return drafter, make_shortlist(drafter, model, "frequency+context", 20, kernels)


def listed(probs, tokens):
    """The part of `probs` `[n, vocab]` that lies on these tokens, renormalised."""
    kept = torch.zeros_like(probs)
    kept[:, tokens] = probs[:, tokens]
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_of_a_shortlist_distributions_are_the_whole_ones_renormalised(listing, temperature):
    drafter, shortlist = listing
    prompt = [70, 80, 90, 3]
    whole, short = context_of(prompt, temperature), context_of(prompt, temperature)
    whole.begin([drafter])
    short.begin([drafter], shortlist)
    short.logits = -torch.arange(VOCAB).float()  # favours listed tokens
    tokens = sorted({*range(20), *prompt})
    tree = TokenTree(3)
    for nodes in ([0], [tree.add(0, 70, "x"), tree.add(0, 40, "x")], [tree.add(1, 5, "x")]):
        (right,) = drafter.answer([DraftRequest(whole, tree, nodes)])
        (probs,) = drafter.answer([DraftRequest(short, tree, nodes)])
        assert {*probs.tokens.tolist()} == {*tokens}
        torch.testing.assert_close(
            probs.dense(), listed(right.dense(), tokens), atol=0.02, rtol=0.05
        )
    used = state_of(short).used
    assert used.calls == 3 and used.tokens == 3 * len(tokens)
    for one in (whole, short):
        state_of(one).release()


def test_a_call_mixes_sequences_with_a_shortlist_and_without(listing):
    drafter, shortlist = listing
    contexts = [context_of([70, 80, first]) for first in (3, 4, 5)]
    for context, which in zip(contexts, (shortlist, None, shortlist), strict=True):
        context.begin([drafter], which)
    asked = [DraftRequest(one, TokenTree(one.ids[-1]), [0]) for one in contexts]
    together = drafter.answer(asked)
    for context, probs in zip(contexts, together, strict=True):
        alone = distributions_of(drafter, context)
        torch.testing.assert_close(probs.dense(), alone, atol=0.02, rtol=0.05)
        state_of(context).release()


def test_answers_are_plain_decodings_with_a_shortlist(listing):
    drafter, shortlist = listing
    target = make_model(tiny("gemma2-softcap-window", torch.bfloat16, seed=8))
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=1, ignore_eos=True)
        right = answer(target, NoDraft(), params, [3, 1, 4]).output.token_ids
        method = make_method("dyspec", drafter)
        drafted = answer(target, method, params, [3, 1, 4], budget=8, shortlist=shortlist)
        assert drafted.output.token_ids == right and drafted.statistics.drafter_calls


def passes_of(drafter, monkeypatch):
    """What the model runs from here on: (read, tokens computed) and (draft, nodes computed)."""
    passes: list[tuple[str, int]] = []

    def count(batch):
        for part in batch.parts:
            passes.append(("draft" if isinstance(part, Draft) else "read", part.rows))

    before(monkeypatch, drafter.model, "forward", count)
    return passes


def test_nothing_is_computed_twice_and_catching_up_takes_no_pass(monkeypatch):
    drafter = LMDrafter(make_model(tiny("llama")), VOCAB)
    passes = passes_of(drafter, monkeypatch)
    context = begin(drafter, [5, 6, 7, 8])
    tree = TokenTree(8)
    nodes = [tree.add(0, 20, "x"), tree.add(0, 21, "x"), tree.add(1, 22, "x"), tree.add(3, 23, "x")]
    for asked in ([0], nodes[:2], nodes[2:3]):
        distributions_of(drafter, context, tree, asked)
    assert passes == [("draft", 4), ("draft", 2), ("draft", 1)]
    # the last node accepted was a leaf: it is run together with the new root
    context.extend([20, 22, 23, 50])
    assert state_of(context).waiting == 1
    probs = distributions_of(drafter, context)
    assert passes[3:] == [("draft", 2)]
    assert state_of(context).cache.length == len([5, 6, 7, 8, 20, 22])
    check(probs, tiny("llama"), context)
    again = distributions_of(drafter, context)  # a second tree on the same text
    assert passes[4:] == [("draft", 1)]
    torch.testing.assert_close(again, probs, atol=1e-6, rtol=1e-4)


def test_a_long_stretch_that_was_not_drafted_is_read_like_a_prompt(monkeypatch):
    drafter = LMDrafter(make_model(tiny("llama")), VOCAB)
    passes = passes_of(drafter, monkeypatch)
    context = begin(drafter, [1, 2])
    distributions_of(drafter, context)
    assert state_of(context).waiting == 0
    context.extend([3] * (GAP + 1))
    assert state_of(context).waiting == GAP  # what the last tree computed is no part of it
    check(distributions_of(drafter, context), tiny("llama"), context)
    # what the last tree computed stays
    assert passes == [("draft", 2), ("read", GAP), ("draft", 1)]
    drafter.read([state_of(context)])
    context.extend([4] * GAP)
    drafter.read([state_of(context)], GAP + 1)
    assert len(passes) == 3  # not worth a pass yet
    drafter.read([state_of(context)])
    check(distributions_of(drafter, context), tiny("llama"), context)
    assert passes[3:] == [("read", GAP), ("draft", 1)]


@pytest.mark.parametrize("asked", [90, VOCAB, 120])
def test_other_widths_are_cut_or_padded_and_any_token_can_be_read(asked):
    drafter = LMDrafter(make_model(tiny("llama")), asked)
    # where the target is wider, a token that the drafter does not have
    context = begin(drafter, [1, 2, asked - 1])
    probs = distributions_of(drafter, context)
    assert probs.shape == (1, asked) and probs.dtype == torch.float32
    assert float(probs.sum()) == pytest.approx(1) and not probs[0, VOCAB:].any()
    if asked <= VOCAB:
        check(probs, tiny("llama"), context)


def test_a_tiny_temperature_leaves_one_token_and_bad_weights_propose_nothing(caplog):
    drafter = LMDrafter(make_model(tiny("gpt2")), VOCAB)
    probs = distributions_of(drafter, begin(drafter, [1, 2], 1e-40))
    assert probs.max() == 1 and probs.count_nonzero() == 1 and not caplog.records
    model = tiny("gpt2")
    model.transformer.ln_f.weight.data.fill_(float("nan"))
    drafter = LMDrafter(make_model(model), VOCAB)
    assert not distributions_of(drafter, begin(drafter, [1, 2])).any()
    assert "not finite (NaN)" in caplog.text


def test_a_request_beyond_the_drafters_context_is_refused(target):
    drafter = LMDrafter(make_model(tiny("gpt2")), VOCAB)
    words = r"500 tokens and max_tokens=13 exceed the drafter's context of 512.*at most 12 fit"
    with pytest.raises(InvalidInput, match=words):
        answer(target, make_method("chain", drafter), SamplingParams(max_tokens=13), [1] * 500)


def tokenizer(*tokens):
    vocab = {token: i for i, token in enumerate(tokens) if token is not None}
    return SimpleNamespace(get_vocab=lambda: vocab)


def test_other_vocabularies_are_told_apart_but_for_padded_tails():
    for drafter, sizes, same in (
        (("a", "b", "c"), (3, 3), True),
        (("a", "c", "b"), (3, 3), False),
        (("a", None, "c"), (3, 3), False),
        (("a", "b"), (3, 2), False),
        (("a", "b", "c", "d"), (3, 4), False),
        (("a", "b"), (5, 4), True),
        (("a", "b", "c", "<tool>"), (4, 4), True),
    ):
        assert same_tokens(tokenizer("a", "b", "c"), tokenizer(*drafter), sizes) is same


def test_a_drafter_with_another_tokenizer_is_refused_by_name(toy_folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(toy_folder, other)
    stored = json.loads((other / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(stored))
    match = f"{other} has another tokenizer than the model.*a smaller model of its family"
    refuses(match, LLM, toy_folder, "dyspec", drafter=str(other))


@pytest.fixture(scope="module")
def target():
    return make_model(tiny("llama", seed=3))


def equal_drafter():
    return LMDrafter(make_model(tiny("llama", seed=3)), VOCAB)


@pytest.mark.parametrize(
    ("temperature", "coupling"), [(0.0, "coupled"), (1.0, "coupled"), (1.0, "residual")]
)
def test_a_drafter_equal_to_the_target_is_nearly_always_right(target, temperature, coupling):
    given = dict(temperature=temperature, seed=2, ignore_eos=True, coupling=coupling)
    method = make_method("chain", equal_drafter())
    sequence = answer(target, method, SamplingParams(max_tokens=61, **given), [4, 5, 6], budget=6)
    # of 6: five drafted tokens and the target's own
    assert sequence.statistics.mean_accepted_tokens > 5.5
    assert sequence.statistics.steps <= 11


def test_an_interrupt_in_the_drafter_leaves_it_fit_for_the_next_request(target, monkeypatch):
    drafter, engine = equal_drafter(), Engine(target, share=False)
    params, prompt = SamplingParams(max_tokens=30, ignore_eos=True), [4, 5, 6] * GAP

    def asked():
        method = make_method("chain", drafter)
        return answer(target, method, params, prompt, budget=6, engine=engine)

    fresh = asked()
    for place, where in ((drafter.model, "forward"), (SequenceCache, "commit")):
        for when in range(1, 6):
            engine.forget()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                interrupt(patch, place, where, when)
                asked()
            assert not engine.busy and drafter.model.pool.used == 0
            again = asked()
            assert again.output.token_ids == fresh.output.token_ids
            assert again.statistics.steps == fresh.statistics.steps


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_text_whose_beginning_is_left_out_is_drafted_as_its_end_alone(name):
    drafter, rng = LMDrafter(make_model(tiny(name, torch.bfloat16)), VOCAB), random.Random(3)
    ids = [rng.randrange(VOCAB) for _ in range(150)]
    whole = begin(drafter, ids)
    expected, chunk = distributions_of(drafter, whole), state_of(whole).chunk_pages(0, 64)
    short = distributions_of(drafter, begin(drafter, ids[-41:]))
    for adopts, reads in ((False, 0), (False, 60), (True, 0)):
        context = begin(drafter, ids)
        state = state_of(context)
        if adopts:
            state.attach([chunk], 64, ())
        if reads:
            drafter.read([state], end=reads)
        state.skip(40)
        assert state.waiting == 40
        drafter.read([state], end=len(ids))
        assert torch.equal(distributions_of(drafter, context), short)
        assert state.chunk_pages(0, 16) is None
        state.skip(40)  # nothing is unread
        context.extend([5, 6])
        longer = distributions_of(drafter, begin(drafter, [*ids[-41:], 5, 6]))
        assert torch.equal(distributions_of(drafter, context), longer)
        state.release()
    again = begin(drafter, ids)
    state_of(again).attach([chunk], 64, ())
    assert torch.equal(distributions_of(drafter, again), expected)
