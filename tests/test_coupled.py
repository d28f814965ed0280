"""Coupled sampling: what is emitted belongs to the place, whatever was drafted."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from cases import few, spread
from drafters import DRAFTED, KnownDrafter, perturbed_plain, propose
from quickbeam.drafters.base import Context, DraftProbs
from quickbeam.drafters.ngram import Ngram
from quickbeam.methods.auto import Auto
from quickbeam.methods.children import likeliest_children, ruled_out_below
from quickbeam.noise import CHUNK, Noise
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from quickbeam.verify import verify_equal
from toy import ToyModel, chi_square, exact_probs, path_tokens, random_tree

V = 6
FILTERS: dict[str, dict[str, object]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {1: 1.5, 4: -math.inf}},
    "all": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05}
    | {"repetition_penalty": 1.2, "logit_bias": {2: 1.0}},
    "bans": {"bad_words": ["x"], "min_tokens": 2},
}


def params_of(name):
    return SamplingParams(**{"temperature": 1.0, **FILTERS[name]})


def sampler_of(params):
    return Sampler(params, [0], V, stop_ids=[5], bad=[[3], [1, 2]] if params.bad_words else ())


def answer(model, params, noise, length, draft):
    sampler, context = sampler_of(params), [0]
    while len(context) <= length:
        tree = draft(context)

        def emitted(node):
            below = path_tokens(tree, node)  # noqa: B023 (called in this round only)
            logits = model.target([*context, *below]).log()  # noqa: B023
            return sampler.emitted(logits, noise, len(context) + len(below), below)  # noqa: B023

        path, token = verify_equal(tree, emitted)
        new = [*path_tokens(tree, path[-1]), token]
        sampler.extend(new)
        context += new
    return context[1 : length + 1]


def plainly(context):
    return TokenTree(context[-1])


# One of each way from logits to a token; what single filters leave is held to transformers in
# test_sampling.py.
@pytest.mark.parametrize("name", few(FILTERS, ["plain", "all"]))
def test_plain_sampling_has_the_targets_probs(name):
    model, params = ToyModel(V, seed=3, zeros=0.0), params_of(name)
    noises = (Noise(seed, 0, V) for seed in range(2500))
    counts = Counter(tuple(answer(model, params, noise, 3, plainly)) for noise in noises)

    def probs(context):
        sampler = sampler_of(params)
        sampler.extend(context[1:])
        return sampler.probs(model.target(context).log())

    assert chi_square(counts, exact_probs(probs, V)) > 1e-3


@pytest.mark.parametrize("mistake", ["one place", "one seed"])
def test_noise_that_is_used_twice_is_found_out(mistake, monkeypatch):
    of, peaks = Noise.of, Noise.peaks
    if mistake == "one place":  # two places of an answer share their noise
        monkeypatch.setattr(Noise, "of", lambda self, tokens, at: of(self, tokens, at // 2))
        monkeypatch.setattr(Noise, "peaks", lambda self, position: peaks(self, position // 2))
    else:  # seeds that differ in their high bits only share it
        begin = Noise.__init__
        seedless = lambda self, seed, *rest: begin(self, seed // 16, *rest)  # noqa: E731
        monkeypatch.setattr(Noise, "__init__", seedless)
    with pytest.raises(AssertionError):
        test_plain_sampling_has_the_targets_probs("plain")


@pytest.mark.parametrize("name", FILTERS)
def test_no_tree_changes_an_answer(name):
    same, accepted = same_answers(name)
    assert same == 30 and accepted > 100


@pytest.mark.parametrize("name", ["penalties", "bans"])
def test_a_sampler_that_forgets_the_path_is_found_out(name, monkeypatch):
    process = Sampler.process
    monkeypatch.setattr(Sampler, "process", lambda self, logits, path=(): process(self, logits))
    assert same_answers(name)[0] < 25


def same_answers(name):
    """How many of 30 answers by random trees are plain decoding's own, and tokens drafted right."""
    same = 0
    params, rng, accepted = params_of(name), random.Random(1), 0
    for seed in range(30):
        model, noise = ToyModel(V, seed=seed, zeros=0.0), Noise(seed, 0, V)
        plain = answer(model, params, noise, 12, plainly)

        def drafted(context):
            nonlocal accepted
            tree = random_tree(model, context, rng)  # noqa: B023 (called in this round only)
            node = 0
            for token in plain[len(context) - 1 : len(context) + 1 if rng.random() < 0.5 else 0]:  # noqa: B023
                node = tree.child(node, token) or tree.add(node, token, "known")
                accepted += 1
            return tree

        same += answer(model, params, noise, 12, drafted) == plain
    return same, accepted


@pytest.mark.parametrize(("name", "temperature"), spread([*DRAFTED, "auto"], [0.6, 1.0]))
def test_trees_that_look_at_the_noise_change_no_answer_and_save_steps(name, temperature):
    steps = tokens = 0
    params = SamplingParams(temperature=temperature)
    for seed in range(12):
        model, noise = ToyModel(V, seed=seed, noise=0.5, zeros=0.0), Noise(seed, 0, V)
        drafter = KnownDrafter(model.draft)
        method = Auto(drafter) if name == "auto" else DRAFTED[name](drafter)

        def drafted(context):
            nonlocal steps
            steps += 1
            where = Context(list(context), torch.zeros(V), temperature, noise=noise)  # noqa: B023 (called in this round only)
            if name == "auto":
                where.states[Ngram.name] = Ngram().begin(context)
            return propose(method, where, 8, 6).tree  # noqa: B023

        plain = answer(model, params, noise, 24, plainly)
        assert answer(model, params, noise, 24, drafted) == plain
        tokens += len(plain)
    assert tokens / steps > 1.5


def perturbed(distributions, noise, positions, temperature, count, least=None, filters=None):
    context = Context([0], torch.zeros(1), temperature, noise=noise, filters=filters)
    return likeliest_children(
        context, distributions, [position - 1 for position in positions], count, least
    )


def test_children_are_those_of_the_whole_perturbed_distribution():
    torch.manual_seed(0)
    distributions = (3 * torch.randn(5, 1000)).softmax(-1)
    noise, positions = Noise(4, 0, 1000), [3, 4, 4, 9, 70]
    for temperature in (0.3, 0.6, 1.0):
        rows = perturbed(DraftProbs(distributions), noise, positions, temperature, 8)
        for probs, position, (tokens, values) in zip(distributions, positions, rows, strict=True):
            best = perturbed_plain(probs, noise, position, temperature).topk(len(tokens))
            assert tokens == best.indices.tolist()
            assert np.allclose(values, best.values, rtol=0.25)  # what is not looked at counts about
        least = [0.0, 1.0, 0.0, 2.0, 0.0]
        rows = perturbed(DraftProbs(distributions), noise, positions, temperature, 8, least)
        assert [len(tokens) for tokens, _ in rows][1::2] == [0, 0]


def test_columns_of_a_shortlist_have_the_noise_of_their_tokens():
    torch.manual_seed(0)
    probs, tokens = (3 * torch.randn(1, 1000)).softmax(-1), torch.randperm(1000)[:300]
    part = probs[:, tokens] / probs[:, tokens].sum()
    dense = torch.zeros(1, 1000).index_copy_(1, tokens, part)
    noise = Noise(4, 0, 1000)
    ((drafted, values),) = perturbed(DraftProbs(part, tokens, 1000), noise, [5], 0.8, 10)
    ((expected, others),) = perturbed(DraftProbs(dense), noise, [5], 0.8, 10)
    assert drafted == expected and np.allclose(values, others, rtol=1e-5)


def test_values_of_children_come_true():
    rng, right, hoped, count = np.random.default_rng(0), 0, 0.0, 3000
    sampler = Sampler(SamplingParams(temperature=0.7), [0], 50)
    for seed in range(count):
        drafted = torch.from_numpy(1.5 * rng.standard_normal(50)).float()
        target, noise = drafted + torch.from_numpy(rng.gumbel(size=50)).float(), Noise(seed, 0, 50)
        probs = DraftProbs(drafted.softmax(-1)[None])
        (((token, *_), (value, *_)),) = perturbed(probs, noise, [2], 0.7, 3)
        right, hoped = right + (sampler.emitted(target, noise, 2) == token), hoped + value
    assert abs(right - hoped) / math.sqrt(count) / 0.5 < 4


def test_a_row_with_one_possible_token_emits_it():
    vocab = 20 * CHUNK
    noise, sampler = Noise(4, 0, vocab), Sampler(SamplingParams(temperature=1.0), [0], vocab)
    tokens = [0, CHUNK - 1, 3 * CHUNK, vocab - 1]
    logits = torch.full((len(tokens), vocab), -math.inf)
    for row, token in zip(logits, tokens, strict=True):
        row[token] = 0.0
    assert [sampler.emitted(row, noise, i) for i, row in enumerate(logits)] == tokens


def test_tokens_that_filters_rule_out_are_not_drafted():
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.0625, *[0.0625 / 60] * 60]])
    asked = [({"top_p": 0.8}, 3), ({"top_k": 2}, 2), ({"min_p": 0.3}, 2)]
    for filters, kept in (*asked, ({"top_p": 0.8, "top_k": 2}, 2)):
        params = SamplingParams(temperature=1.0, **filters)
        assert ruled_out_below(probs[0].numpy(), params) == probs[0, kept - 1]
        for seed in range(20):
            noise = Noise(seed, 0, 64)
            ((tokens, _),) = perturbed(DraftProbs(probs), noise, [1], 1.0, 64, None, params)
            # and one more, as the target may see it otherwise
            assert set(tokens) <= set(range(kept + 1))
    assert ruled_out_below(probs[0].numpy(), SamplingParams(temperature=0.5, top_p=0.8)) == 0.25
