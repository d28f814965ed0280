"""Passes of the torch back end: of one size, one computation, which a graph may hold."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from models import random_tree, tiny
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.families import describe
from quickbeam.models.stack_tensors import ModelParameters
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.torch.rows import PassRows, list_pass, uncommitted
from test_families import CONFIGS

CPU = torch.device("cpu")
KINDS = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen2_moe", "gemma4-experts", "phimoe")


def made(name, dtype=torch.float32):
    model = tiny("", dtype, config=CONFIGS[name])
    return TorchModel(ModelParameters(model), describe(model), CPU)


def batch(model, seed):
    """Two trees and a text behind committed tokens, of other lengths for each seed."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(2):
        cache = model.pool.new()
        text = torch.randint(90, (20 + 13 * seed + 40 * i,), generator=generator).tolist()
        model.forward(Batch([Chain(cache, text)]))
        cache.commit(range(len(text)))
        parts.append(Draft(cache, random_tree(generator, 4 + seed)))
    return Batch([*parts, Chain(model.pool.new(), [5, 6, 7][: 1 + seed])])


def listed(model, batch):
    parts = [*map(uncommitted, batch.parts)]
    return list_pass(parts, model.pool, batch.tokens, batch.wanted, padded=True)


def run(model, sizes, numbers):
    return model._run(PassRows.of(numbers, sizes, model.pool.page))


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_padding_changes_no_result(name):
    model = made(name)
    one = batch(model, 1)
    results = run(model, (given := listed(model, one)).sizes, torch.from_numpy(given.numbers))
    right = torch.cat([passed.logits for passed in model.forward(one)])
    got = results.logits[: len(right)]
    assert bool(results.logits.isfinite().all())
    assert (got - right).abs().max() <= 2e-5 * right.abs().max()


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_a_pass_reads_no_number_from_the_device(name):
    """As none may that is captured. A fake tensor has no numbers: asking for one is an error."""
    model = made(name, torch.bfloat16)
    given = listed(model, batch(model, 1))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = run(model, given.sizes, mode.from_tensor(torch.from_numpy(given.numbers)))
    assert results.logits.shape == (given.sizes.wanted, model.vocab_size)


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_a_pass_that_is_recorded_once_runs_others_of_its_size(name):
    """Of other trees, lengths and pages: a number of the host that stayed in it would be seen."""
    model = made(name)
    first, given = (listed(model, batch(model, seed)) for seed in (1, 2))
    assert given.sizes == first.sizes and not (given.numbers == first.numbers).all()
    recorded = make_fx(lambda numbers: run(model, first.sizes, numbers))
    graph = recorded(torch.from_numpy(first.numbers))
    got = graph(torch.from_numpy(given.numbers))[0]
    right = run(model, given.sizes, torch.from_numpy(given.numbers)).logits
    assert torch.equal(got, right)


@torch.inference_mode()
def test_a_number_of_the_host_in_a_recorded_pass_is_seen():
    model = made("llama")
    given = listed(model, batch(model, 1))

    def wrong(numbers):
        rows = PassRows.of(numbers, given.sizes, model.pool.page)
        x, _ = model._network(rows, model.pool)
        return x[: int(rows.seen[0])]

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        numbers = mode.from_tensor(torch.from_numpy(given.numbers))
        with pytest.raises(DataDependentOutputException):
            wrong(numbers)
