"""Attention of many sequences in one call, the way of accelerators: each path's logits by itself,
layout by layout. What these are is held to transformers in test_families.py."""

import dataclasses

import pytest
import torch

from answers import answer
from features import WIDE, head_of
from models import CONFIGS, VOCAB, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from test_recurrent import wrong_rows

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
    eagle, small = eagle_drafter(network, model, None), tiny("llama", seed=4).to(device)
    drafter = LMDrafter(make_model(small, native=False), VOCAB)
    methods = [LogitSpec(), DySpec(drafter), DySpec(eagle)]
    methods += [Auto(one) for one in (drafter, eagle)]
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
def test_trees_of_texts_side_by_side_follow_their_paths(name, device):
    """Twice: the second time in pages that hold no numbers from before."""
    model = gathered(name, device)
    for seed in (1, 2):
        assert wrong_rows(model, seed, steps=2, far=2e-3) == 0
        with torch.inference_mode():
            for tensor in (*model.pool.key, *model.pool.value):
                tensor[64:] = torch.nan
