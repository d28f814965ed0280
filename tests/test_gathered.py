"""Attention of many sequences in one call, the way of accelerators: the logits of each sequence by
itself, layout by layout."""

import dataclasses
import random

import pytest
import torch

from answers import answer
from features import WIDE, head_of
from models import CONFIGS, VOCAB, path_logits, random_tree, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.gathered import RowPool
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams

HERE = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
DEVICES = [
    pytest.param(name, marks=pytest.mark.skipif(not here, reason=f"no {name} here"))
    for name, here in HERE.items()
]


def gathered(name, device="cpu", **options):
    return make_model(tiny(name, seed=4).to(device), native=False, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("device", DEVICES)
def test_every_source_drafts_on_every_device(device, temperature):
    """In float32, whose near-ties a tiny model doesn't meet."""
    model = gathered("llama", device)
    network = EagleHead(WIDE, model.embedding, model.head)
    network.load_state_dict(head_of(WIDE, tiny("llama", seed=4)).state_dict())
    eagle, small = eagle_drafter(network, model, native=False), tiny("llama", seed=4).to(device)
    drafter = LMDrafter(make_model(small, native=False), VOCAB)
    methods = [LogitSpec(Ngram(), LastLogits()), DySpec(drafter), DySpec(eagle)]
    methods += [Auto(one, Ngram(), LastLogits()) for one in (drafter, eagle)]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=2, ignore_eos=True)
    prompt = [5, 6, 7, 8] * 5
    plain = answer(model, NoDraft(), params, prompt).output.token_ids
    drawn = dataclasses.replace(params, coupling="residual")
    for method in methods:
        drafted = answer(model, method, params, prompt)
        assert drafted.output.token_ids == plain
        assert sum(of.drafted for of in drafted.statistics.sources.values()) > 0
        if temperature:  # has its own randomness
            assert len(answer(model, method, drawn, prompt).output.token_ids) == 24


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_trees_and_texts_side_by_side(name, device):
    plain, model = tiny(name, seed=4).to(device), gathered(name, device)
    chance, generator = random.Random(1), torch.Generator().manual_seed(1)
    texts = [[chance.randrange(3, VOCAB) for _ in range(length)] for length in (3, 70, 130, 64)]
    caches = [model.pool.new() for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        half = len(text) // 2
        for part in (text[:half], text[half:]):
            if part:
                model.forward(Batch([Chain(cache, part, wanted=False)]))
                cache.commit(range(len(part)))
    trees = [random_tree(generator, nodes) for nodes in (9, 1, 17)]
    early = trees[2].first(6)
    model.forward(Batch([Draft(caches[2], early)]))
    parts = [Draft(caches[i], trees[i], base=6 * (i == 2)) for i in range(3)]
    parts.insert(1, Chain(caches[3], [5, 6, 7]))
    found = model.forward(Batch(parts))
    expected = [path_logits(plain, text, tree) for text, tree in zip(texts, trees, strict=False)]
    expected[2] = expected[2][6:]
    ids = torch.tensor([[*texts[3], 5, 6, 7]], device=device)
    expected.insert(1, plain(input_ids=ids, use_cache=False).logits[0, -1:].detach())
    for passed, right in zip(found, expected, strict=True):
        torch.testing.assert_close(passed.logits.cpu(), right.cpu(), atol=2e-3, rtol=2e-3)


def test_a_path_is_kept_and_pages_are_used_again_clean():
    plain, model = tiny("llama", seed=4), gathered("llama")
    generator = torch.Generator().manual_seed(2)
    assert isinstance(model.pool, RowPool)
    for _ in range(3):
        cache, text, tree = model.pool.new(), list(range(5, 75)), random_tree(generator, 12)
        model.forward(Batch([Chain(cache, text)]))
        cache.commit(range(len(text)))
        model.forward(Batch([Draft(cache, tree)]))
        path = tree.path(len(tree) - 1)
        cache.commit(path)
        (passed,) = model.forward(Batch([Chain(cache, [9])]))
        ids = torch.tensor([[*text, *(tree.token[node] for node in path), 9]])
        expected = plain(input_ids=ids, use_cache=False).logits[0, -1:].detach()
        torch.testing.assert_close(passed.logits, expected, atol=2e-3, rtol=2e-3)
        with torch.inference_mode():
            for tensor in (*model.pool.key, *model.pool.value):
                tensor[64:] = float("nan")  # what the next user of the pages finds
        cache.release()
    assert model.pool.used == 0
