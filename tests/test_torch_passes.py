"""Passes of the torch back end: of one size, one computation, which a graph may hold."""

import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import random_tree, tiny
from quickbeam.engine import measuring
from quickbeam.models.base import Batch, Chain, Draft, Draws
from quickbeam.models.compile.compiled_stack import kv_shapes
from quickbeam.models.families import describe
from quickbeam.models.torch import pages as of_pages
from quickbeam.models.torch import rows as of_rows
from quickbeam.models.torch.feed_forward import has_grouped_product
from quickbeam.models.torch.graphs import MOST_GRAPHS, Graphs
from quickbeam.models.torch.likeliest import ranked_rows
from quickbeam.models.torch.model import PassResults, TorchModel
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.recurrence import recur
from quickbeam.models.torch.rows import (
    Padding,
    PassRows,
    PassSizes,
    list_draws,
    list_pass,
    next_power,
    padded_sizes,
    uncommitted,
)
from quickbeam.models.torch.same_bits import find_padding
from quickbeam.models.torch.states import SCRATCH, state_shapes
from quickbeam.models.weights.parameters import ModelParameters
from test_families import CONFIGS

CPU = torch.device("cpu")
KINDS = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen2_moe", "gemma4-experts", "phimoe")
RECURRENT = ("lfm2_moe", "qwen3_5-moe", "bamba")
KINDS += RECURRENT


def made(name, dtype=torch.float32):
    model = tiny("", dtype, config=CONFIGS[name])
    return TorchModel(ModelParameters(model), describe(model), CPU)


def batch(model, seed):
    """Two trees and a text behind committed tokens, of other lengths for each seed. The tokens
    after one of the trees are drawn."""
    generator = torch.Generator().manual_seed(seed)
    parts, draws = [], (None, Draws(seed, seed, 0.5 + seed))
    for i in range(2):
        cache = model.pool.new()
        text = torch.randint(90, (20 + 13 * seed + 40 * i,), generator=generator).tolist()
        model.forward(Batch([Chain(cache, text)]))
        cache.commit(range(len(text)))
        parts.append(Draft(cache, random_tree(generator, 4 + seed), draws=draws[i]))
    return Batch([*parts, Chain(model.pool.new(), [5, 6, 7][: 1 + seed])])


def listed(model, batch):
    parts, draws = [*map(uncommitted, batch.parts)], list_draws(batch)
    return list_pass(parts, model.pool, batch.tokens, batch.wanted, Padding(), draws)


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


def stepped_states(model, given):
    """The slots whose states a pass has changed."""
    states = [
        one for layer in model.pool.states.layers.values() for one in layer if one is not None
    ]
    before = [one.clone() for one in states]
    run(model, given.sizes, torch.from_numpy(given.numbers))
    pairs = zip(before, states, strict=True)
    return {
        slot for old, new in pairs for slot in range(len(new)) if not old[slot].equal(new[slot])
    }


def listed_with_states(model, batch, padding=None):
    """The rows of a pass, and the slots of its nodes' states."""
    parts = [*map(uncommitted, batch.parts)]
    given = list_pass(parts, model.pool, batch.tokens, batch.wanted, padding)
    slots = [slot for part in parts for slot in part.cache.states._node_slots.values()]
    return given, slots


@pytest.mark.parametrize("name", RECURRENT)
@torch.inference_mode()
def test_padding_steps_no_state(name, monkeypatch):
    model = made(name)
    one = batch(model, 1)
    given, slots = listed_with_states(model, one, Padding())
    assert stepped_states(model, given) == {*slots, SCRATCH}
    # a wrong version
    committed = one.parts[0].cache.states.slot(-1)
    monkeypatch.setattr(of_rows, "SCRATCH", committed)
    given, _ = listed_with_states(model, one, Padding())
    assert committed in stepped_states(model, given)


@pytest.mark.parametrize("name", RECURRENT)
@torch.inference_mode()
def test_recurrences_give_the_same_bits_padded_and_not(name):
    """From the same rows: products of other sizes give others (`test_same_bits.py`)."""
    model = made(name)
    one = batch(model, 1)
    layer = next(block.recurrent for block in model._network.blocks if block.recurrent)
    listed_with_states(model, one)  # tensors have grown for all nodes
    conv, matrix = model.pool.states.layers[layer.index]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, conv.shape[2], generator=generator)
    heads, key_dim, value_dim = (1, 4, 4) if matrix is None else matrix.shape[1:]
    query, key = torch.randn(2, 64, heads, key_dim, generator=generator)
    value = torch.randn(64, heads, value_dim, generator=generator)
    rate, decay = torch.rand(2, 64, heads, generator=generator)
    found = []
    for padding in (None, Padding()):
        given, slots = listed_with_states(model, one, padding)
        rows = given.to(CPU)
        n = len(rows.tokens)
        results = [layer.convolution(x[:n], rows, conv)]
        if matrix is not None:
            inputs = [tensor[:n] for tensor in (query, key, value, rate, decay)]
            results.append(recur(matrix, rows, *inputs, delta=layer.linear.delta))
        states = [tensor[slots] for tensor in (conv, matrix) if tensor is not None]
        found.append([result[: one.rows] for result in results] + states)
    assert all(map(torch.equal, *found))


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
    got = graph(torch.from_numpy(given.numbers))
    right = run(model, given.sizes, torch.from_numpy(given.numbers))
    assert all(map(torch.equal, got, right))


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


class Operations(TorchDispatchMode):
    """Notes all operations on tensors, with what they were given and what they gave."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.noted.append((operation, args, kwargs or {}, result))
        return result


def tensors_of(*some):
    return [one for one in tree_leaves(some) if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_a_pass_takes_nothing_from_the_host(name):
    """A graph can't hold such copies. Tensors without numbers stand for those on a GPU."""
    model = made(name, torch.bfloat16)
    given, device = listed(model, batch(model, 1)), torch.device("meta")
    model._network.to(device)
    stack = model._network.stack
    model._pool = RowPool(kv_shapes(stack), model.dtype, device, state_shapes(stack))
    numbers = torch.empty(given.sizes.numbers, dtype=torch.int64, device=device)
    run(model, given.sizes, numbers)  # angles are moved once, before anything is captured
    with Operations() as operations:
        results = run(model, given.sizes, numbers)
    places = {one.device.type for one in tensors_of([noted[1:] for noted in operations.noted])}
    assert places == {"meta"} and results.hidden.device == device


class PlayedGraph:
    """A CUDA graph on the CPU: operations that run again, on the same tensors."""

    def replay(self):
        for operation, args, kwargs, results in self.noted:
            again = operation(*args, **kwargs)
            for old, new in zip(tensors_of(results), tensors_of(again), strict=True):
                old.copy_(new)


@contextmanager
def played(graph, pool, stream, capture_error_mode):
    with Operations() as operations:
        yield
    graph.noted = operations.noted


@pytest.fixture
def graphs_on_the_cpu(monkeypatch):
    """PyTorch's CUDA graphs by ours. Returns the pools of memory that were asked for."""
    made("llama")  # imports what needs PyTorch's own
    pools = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    def new_pool():
        pools.append(len(pools))
        return pools[-1]

    stand_ins = {
        "CUDAGraph": PlayedGraph,
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "device": lambda device: nullcontext(),
        "graph": played,
        "graph_pool_handle": new_pool,
        "stream": lambda own: nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return pools


@pytest.mark.parametrize("name", ["llama", "lfm2_moe", "qwen3_5-moe"])
@torch.inference_mode()
def test_graphs_give_what_passes_without_them_do(name, graphs_on_the_cpu):
    """Those of several sizes, in turn, also when results are still held, and the pool has grown."""
    model, right, got = made(name), [], []
    graphs = Graphs(model._run, CPU)
    batches = [batch(model, seed) for seed in (1, 2, 3)]
    batches += [Batch([Chain(model.pool.new(), [5, 6])]), *batches]
    for one in batches:
        given = listed(model, one)
        right.append(run(model, given.sizes, torch.from_numpy(given.numbers)))
        got.append(PassResults(*graphs.run(given, model.pool.generation)))
    assert len(graphs._captured) > 1
    for ours, theirs in zip(got, right, strict=True):
        assert all(map(torch.equal, ours, theirs))


@torch.inference_mode()
def test_a_draft_models_graphs_rank_tokens(graphs_on_the_cpu):
    """Each with its own distributions, of several sizes in turn."""
    model = made("llama")
    model.rank(90)
    graphs = Graphs(model._run, CPU)
    for seed in (1, 2, 1):
        given = listed(model, batch(model, seed))
        right = run(model, given.sizes, torch.from_numpy(given.numbers))
        got = PassResults(*graphs.run(given, model.pool.generation))
        assert all(map(torch.equal, got, right))
        assert torch.allclose(got.probs, right.logits[:, :90].softmax(-1))
        (tokens, values), *_ = ranked_rows(got.probs, got.likeliest).likeliest
        assert values == sorted(values, reverse=True)
        assert got.probs[0, tokens].tolist() == values


@torch.inference_mode()
def test_graphs_agree_in_the_sizes_in_which_passes_without_them_do(graphs_on_the_cpu):
    model = made("llama")
    graphs = Graphs(model._run, CPU)

    def by_graphs(given):
        return graphs.run(given, model.pool.generation)[0]

    def without(given):
        return model._run(given.to(CPU)).logits

    found = [
        find_padding(way, model.pool, model.vocab_size, None, (1, 4))
        for way in (without, by_graphs)
    ]
    assert found[0] == found[1] and found[0].rows[-1] == 4


@torch.inference_mode()
def test_graphs_begin_a_new_pool_once_all_of_one_are_gone(graphs_on_the_cpu):
    """PyTorch takes no graph into a pool of memory whose graphs are all gone."""
    model = made("llama")
    graphs, given = Graphs(model._run, CPU), listed(model, batch(model, 1))
    graphs.run(given, 1)
    graphs.run(listed(model, Batch([Chain(model.pool.new(), [5, 6])])), 1)
    assert graphs_on_the_cpu == [0]
    graphs.run(given, 2)
    assert graphs_on_the_cpu == [0, 1]


@torch.inference_mode()
def test_graphs_of_all_sizes_write_to_the_same_memory(graphs_on_the_cpu):
    model = made("llama")
    graphs = Graphs(model._run, CPU)
    for one in (batch(model, 2), Batch([Chain(model.pool.new(), [5, 6])])):
        graphs.run(listed(model, one), 1)
    first, second = graphs._captured.values()
    assert first.results[0].data_ptr() == second.results[0].data_ptr()


def needed_sizes(rng):
    """Those of a pass over trees of up to 64 requests and a prompt, 65,536 tokens each at most."""
    sequences = rng.choice((1, 1, 2, 5, 16, 64))
    nodes = [rng.randint(1, rng.choice((1, 8, 64))) for _ in range(sequences)]
    prompt = rng.choice((0, 0, rng.randint(1, 64), rng.randint(1, 512)))
    while sum(nodes) + prompt > 2048:
        nodes.pop()
    return PassSizes(
        rows=sum(nodes) + prompt,
        wanted=sum(nodes) + min(1, prompt),
        sequences=len(nodes) + min(1, prompt),
        pages=rng.randint(1, rng.choice((2, 30, 1024))),
        path=rng.randint(1, max(nodes)),
        draws=rng.random() < 0.5,
    )


def test_a_long_run_has_fewer_sizes_than_graphs_are_kept():
    """Else graphs would be captured over and over."""
    rng = random.Random(0)
    run = [needed_sizes(rng) for _ in range(100_000)]
    padded = {needed: padded_sizes(needed) for needed in run}
    for needed, sizes in padded.items():
        assert all(size >= least for size, least in zip(sizes, needed, strict=True))
        assert sizes.draws == needed.draws
    assert 60 < len({*padded.values()}) <= MOST_GRAPHS
    # powers of two of all sizes would be too many
    powers = {tuple(map(next_power, needed)) for needed in run}
    assert len(powers) > 3 * MOST_GRAPHS


@torch.inference_mode()
def test_a_page_is_copied_however_the_pool_has_grown():
    pool = made("llama").pool
    for _ in range(6):
        cache = pool.new()
        cache.reserve(10)
        pool.key[1].normal_()
        cache.length = 10
        other = cache.fork()
        other.reserve(20)
        own, copied = (pool.key[1][one.rows(np.arange(10))] for one in (cache, other))
        assert torch.equal(own, copied)


def test_a_pool_on_cuda_begins_large_but_not_beyond_its_limit(monkeypatch):
    pool = made("llama").pool
    monkeypatch.setattr(of_pages, "FIRST_BYTES", 20 * pool.page_bytes)
    pool.device = torch.device("cuda")
    pool.limit = 100
    pool.make()
    assert pool.rows == 20 * pool.page and pool.generation == 1
    other = made("llama").pool
    other.device, other.limit = torch.device("cuda"), 5
    other.make()
    assert other.rows == 6 * other.page


@pytest.mark.parametrize(("capability", "has"), [((9, 0), True), ((8, 0), False), ((12, 0), False)])
def test_a_grouped_product_is_taken_where_it_reads_nothing_back(capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for dtype in (torch.bfloat16, torch.float16):
        rows = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
        assert has_grouped_product(rows) == (has and dtype is torch.bfloat16)


def test_the_first_pass_of_each_size_is_not_measured_on_a_gpu(monkeypatch):
    seen = set()

    def seconds(model, *plan):
        taken = 0.001 if plan in seen else 1.0
        seen.add(plan)
        return taken

    monkeypatch.setattr(measuring, "_seconds", seconds)
    model = SimpleNamespace(streamed=None, device=torch.device("cuda"), context_length=4096)
    cost = measuring.measure(model, 64)
    assert [cost.of_pass(rows) for rows in measuring.NODES] == [0.001] * len(measuring.NODES)
