"""A feature drafter that scores a part of the vocabulary: its distributions are the whole ones
renormalised, and answers stay the model's."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from answers import answer, request, run
from cases import few, refuses
from drafters import DRAFTED
from features import Pair
from models import VOCAB, tiny
from quickbeam import LLM
from quickbeam.config import VOCABS, plain_vocab
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.drafters.loading import ranks_ids
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.drafters.texts import AnswerMemory
from quickbeam.drafters.vocabulary import is_listed, make_shortlist
from quickbeam.engine.engine import Engine
from quickbeam.engine.method_store import MethodStore
from quickbeam.errors import InvalidInput
from quickbeam.methods.base import NoDraft
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree
from scripts import cli

SHORT = tuple(word for word in VOCABS if word != "full")
NATIVE = ["attention native", "ours native"] if library.kernels() else []
CASES = [(name, "full") for name in DRAFTED] + [("specinfer", "router")]
CASES += [("dyspec", vocab) for vocab in SHORT] + [("eagle2", "frequency")]


def artefact(vocab, size, frequent=6, cluster=5, router=True):
    """A random one for a drafter whose states are `size` wide."""
    torch.manual_seed(2)
    layout, ranking = Layout(torch.randperm(vocab), frequent, cluster, vocab), torch.randperm(vocab)
    config = RouterConfig(size, size, 8, layout.clusters)
    return Artefact(layout, ranking, Router(config) if router else None)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shortlist")
    artefact(VOCAB, 32).save(folder)
    made = {kind: Pair(kind) for kind in ("attention", "input", "plain", "ours")}
    made |= {kind: Pair(kind.split()[0], torch.bfloat16) for kind in NATIVE}
    for pair in made.values():
        pair.drafter.folder = folder
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("vocab", SHORT)
@pytest.mark.parametrize("kind", ["attention", "input", "plain", "ours", *NATIVE])
def test_distributions_are_the_whole_ones_over_what_is_scored(pairs, kind, vocab, temperature):
    pair = pairs[kind]
    size = 30 if vocab == "context" else 14
    shortlist = make_shortlist(pair.drafter, pair.target, vocab, size, library.kernels())
    assert bool(shortlist.native) == (kind in NATIVE)
    prompt, tree = [3, 9, 4, 9, 30, 17], TokenTree(21)
    a, b = tree.add(0, 5, "x"), tree.add(0, 30, "x")
    nodes = [[0], [a, b], [tree.add(b, 2, "x")]]
    answers = []
    for use in (None, shortlist):
        text = pair.begin(prompt, 21, temperature, use)
        answers.append([pair.drafter.answer([text.request(tree, part)])[0] for part in nodes])
    for whole, part in zip(*answers, strict=True):
        assert whole.tokens is None
        assert len(part.tokens.unique()) <= len(part.tokens)
        scored = torch.zeros(VOCAB, dtype=torch.bool)
        scored[part.tokens[(part.values > 0).any(0)]] = True
        assert 3 <= int(scored.sum()) < VOCAB
        probs = whole.dense() * scored
        right = probs / probs.sum(-1, keepdim=True)
        torch.testing.assert_close(part.dense(), right, atol=1e-5, rtol=1e-3)
    assert 17 in answers[1][0].tokens or vocab in ("frequency", "clusters")  # of the context


def test_what_was_scored_is_counted(pairs):
    pair = pairs["attention"]
    params = SamplingParams(max_tokens=25, temperature=2.0, seed=1, ignore_eos=True)
    use = make_shortlist(pair.drafter, pair.target, "frequency", 25, library.kernels())
    given = DRAFTED["dyspec"](pair.drafter), params, [4, 8, 15]
    one = answer(pair.target, *given, budget=6, shortlist=use).statistics
    assert one.head.calls == one.drafter_calls and one.head.tokens == 25 * one.head.calls
    assert 0 < one.head.seconds < one.drafter_seconds


def scored_of(one):
    return one.statistics.head.tokens / one.statistics.head.calls


@pytest.mark.parametrize("coupling", ["coupled", "residual"])
def test_what_a_tenant_was_answered_is_scored_for_that_tenant_alone(pairs, coupling):
    pair, memory = pairs["attention"], AnswerMemory(1 << 20)
    use = make_shortlist(pair.drafter, pair.target, "frequency+context", 5, library.kernels())
    params = SamplingParams(
        max_tokens=20, temperature=0.9, seed=1, ignore_eos=True, coupling=coupling
    )
    prompts = [[*range(10, 40)], [4, 8, 15]]
    engine = Engine(pair.target, memory=memory)

    def of(prompt, **where):
        method = DRAFTED["dyspec"](pair.drafter)  # without rates of earlier answers
        return answer(pair.target, method, params, prompt, budget=6, shortlist=use, **where)

    for prompt in prompts:
        theirs = of(prompt, engine=engine, tenant="a")
    others, alone = of(prompts[1], engine=engine, tenant="b"), of(prompts[1])
    assert theirs.output.token_ids == others.output.token_ids == alone.output.token_ids
    assert scored_of(others) == scored_of(alone)
    if coupling == "residual":  # where the answer depends on what is scored
        assert scored_of(theirs) == scored_of(alone)
    else:
        assert scored_of(theirs) > scored_of(alone) + 10
    engine.close()


def test_the_context_may_stand_beside_every_vocabulary(pairs):
    with_context = {plain_vocab(word + "+context") for word in SHORT if "+" not in word}
    assert with_context == {"frequency+context", "context", "router"}
    assert plain_vocab("full+context") == "full" and plain_vocab("half+context") == "half+context"
    pair, prompt = pairs["attention"], [3, 9, 4]
    shortlist = make_shortlist(pair.drafter, pair.target, "frequency+context", 12, None)
    assert shortlist is not None and shortlist.layout.frequent == 12
    state = shortlist.begin(prompt)
    ranked = shortlist.layout.order.tolist()
    scores = state.score(shortlist.weight[:1], shortlist.none)
    assert {*scores.tokens[scores.logits[0] > -torch.inf].tolist()} == {*ranked, *prompt}


def test_what_cannot_be_is_refused(pairs, tmp_path, monkeypatch):
    pair = pairs["attention"]
    drafter, target = pair.drafter, pair.target

    def error_of(vocab, size=None, one=drafter):
        with pytest.raises(InvalidInput) as caught:
            make_shortlist(one, target, vocab, size, None)
        return str(caught.value)

    assert make_shortlist(drafter, target, "full", None, None) is None
    assert "unknown vocabulary 'half' of the drafter; known: full, frequency" in error_of("half")
    assert f"must be 1 to {VOCAB}" in error_of("frequency", VOCAB + 1)
    assert f"must be 1 to {VOCAB}" in error_of("router", 0)
    assert "must be at least 5, a cluster's" in error_of("router", 3)
    in_torch = LMDrafter(make_model(tiny("llama"), native=False), VOCAB, ranks_ids=True)
    assert "a head of its own" in error_of("frequency", one=in_torch)
    assert "a head of its own" in error_of("frequency", one=Pair("own-head").drafter)
    folder, drafter.folder = drafter.folder, tmp_path
    try:
        assert "quickbeam train --only shortlist" in error_of("frequency")
        assert "quickbeam train --only shortlist" in error_of("router")
        artefact(VOCAB, 32, router=False).save(tmp_path)
        assert "has clusters but no router" in error_of("router")
        assert make_shortlist(drafter, target, "frequency", 9, None) is not None
        artefact(VOCAB, 16).save(tmp_path)
        assert "other states than 32 wide" in error_of("router")
        artefact(VOCAB + 1, 32).save(tmp_path)
        assert f"for {VOCAB + 1} tokens" in error_of("router")
    finally:
        drafter.folder = folder
    monkeypatch.setattr("quickbeam.models.opening.open_checkpoint", None)
    refuses("unknown vocabulary 'half'", LLM, method="dyspec", vocab="half")
    size = ["--shortlist", "99"]
    for options in (["--vocab", "half"], size, ["--vocab", "full", *size]):
        result = cli("generate", "abc", "--method", "dyspec", *options)
        assert result.exit_code == 2 and options[-1] in result.output


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
def test_a_smaller_models_ids_are_its_list(pairs, tmp_path):
    target = pairs["attention"].target
    lm = LMDrafter(make_model(tiny("llama")), VOCAB, ranks_ids=True)
    assert is_listed(lm)
    shortlist = make_shortlist(lm, target, "frequency+context", 20, library.kernels())
    assert shortlist.layout.order[: shortlist.layout.frequent].tolist() == [*range(20)]
    for vocab in ("router", "clusters"):
        refuses("takes no router", make_shortlist, lm, target, vocab, None, None)
    not_ranked = LMDrafter(make_model(tiny("llama")), VOCAB)
    assert not is_listed(not_ranked)
    refuses("without a shortlist", make_shortlist, not_ranked, target, "frequency", None, None)


@pytest.mark.parametrize(
    ("tokens", "ranked"), [(["!", "e", "th"], True), (["th"] * 600 + ["e"], False)]
)
def test_ids_are_ranks_where_bytes_come_first(tokens, ranked):
    vocab = {token: i for i, token in enumerate(tokens)}
    assert ranks_ids(SimpleNamespace(get_vocab=lambda: vocab)) == ranked


def test_the_default_takes_a_list_that_is_there_and_no_router(pairs, tmp_path):
    drafter = Pair("attention").drafter
    assert not is_listed(drafter)
    drafter.folder = tmp_path
    assert not is_listed(drafter)
    artefact(VOCAB, 32, router=False).save(tmp_path)
    assert is_listed(drafter) and not is_listed(LMDrafter(make_model(tiny("llama")), VOCAB))
    own = Pair("own-head").drafter
    own.folder = tmp_path
    assert not is_listed(own)
    pair = pairs["attention"]
    for drafter, expected in ((pair.drafter, "frequency+context"), (own, "full")):
        store = MethodStore(pair.target, None, lambda model, tokenizer: drafter)  # noqa: B023
        store.load()
        assert store.setting("auto", None, None).vocab == expected
    assert store.setting("dynaspec", None, None).vocab == "router"
    assert store.setting("auto", "router", 9).vocab == "router"


@pytest.mark.parametrize(("name", "vocab"), few(CASES, CASES[len(DRAFTED) + 1 :]))
@pytest.mark.parametrize("kind", few(["attention", "plain"], ["attention"]))
def test_sampled_answers_are_the_models(pairs, kind, name, vocab):
    pair, accepted = pairs[kind], 0
    size = None if vocab == "full" else 30
    use = make_shortlist(pair.drafter, pair.target, vocab, size, library.kernels())
    engine = Engine(pair.target)
    for temperature in (0.6, 1.0):
        given = dict(max_tokens=12, temperature=temperature, ignore_eos=True)
        asked = [SamplingParams(**given, seed=seed) for seed in range(8)]
        add = partial(request, pair.target, DRAFTED[name](pair.drafter), budget=5, shortlist=use)
        ones = [engine.add(add(params=one, prompt=[3, 9, 4])) for one in asked]
        run(engine)
        for params, one in zip(asked, ones, strict=True):
            plain = answer(pair.target, NoDraft(), params, [3, 9, 4])
            assert one.output.token_ids == plain.output.token_ids
            accepted += one.statistics.sources["drafter"].accepted
    assert accepted > 0
    engine.close()
