"""Calls of drafters in PyTorch as graphs: of one size, one computation."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from features import Pair
from models import random_tree
from quickbeam.drafters import eagle as of_eagle
from quickbeam.drafters.base import DraftProbs
from quickbeam.drafters.largest import largest_plain
from quickbeam.drafters.passes import HeadInput
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.methods.children import largest_children
from quickbeam.models.base import Batch, Draft
from quickbeam.models.torch import graphs as of_graphs
from quickbeam.models.torch.graphs import Graphs
from quickbeam.models.torch.likeliest import rank_tokens, rows_of
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import PassRows
from test_block_drafter import KINDS, Toy
from test_torch_passes import CPU, Operations, graphs_on_the_cpu, tensors_of  # noqa: F401

MADE = {
    "eagle": lambda: Pair("attention", native=False),
    "own head": lambda: Pair("own-head", native=False),
    "eagle-1": lambda: Pair("input", native=False),
    "dspark": lambda: Toy(KINDS["dspark"]),
    "dflash2": lambda: Toy(KINDS["dflash2"]),
    "own mask": lambda: Toy(KINDS["own mask"]),
    "gemma": lambda: Toy(KINDS["gemma"]),
}


def passes_of(pair):
    passes = pair.drafter.passes
    return [passes._running, passes._writing]


def with_graphs(pair):
    for passes in passes_of(pair):
        passes._graphs = Graphs(passes._compute, CPU)
    return pair


@pytest.fixture
def calls(monkeypatch, graphs_on_the_cpu):  # noqa: F811
    """What graphs were asked for: what computes them, their rows, inputs and options."""
    noted, run = [], Graphs.run

    def record(graphs, listed, generation, inputs=(), options=()):
        noted.append((graphs._compute, listed, inputs, options))
        return run(graphs, listed, generation, inputs, options)

    monkeypatch.setattr(Graphs, "run", record)
    return noted


@pytest.mark.parametrize("kind", MADE)
@torch.inference_mode()
def test_graphs_give_what_the_equations_do(kind, calls):
    """Padded, of several sizes, each with what its own inputs are."""
    pair = with_graphs(MADE[kind]())
    assert max(pair.distances()) < 1e-4
    captured = sum(len(passes._graphs._captured) for passes in passes_of(pair))
    assert 3 <= captured < len(calls) / 2
    padded = [listed.sizes.rows > len(inputs[0]) for _, listed, inputs, _ in calls if inputs]
    assert any(padded) and not all(padded)


@pytest.mark.usefixtures("graphs_on_the_cpu")
@torch.inference_mode()
def test_inputs_that_stayed_in_a_graph_are_seen(monkeypatch):
    pair = with_graphs(MADE["eagle"]())
    assert max(pair.distances((7,))) < 1e-4
    monkeypatch.setattr(of_graphs, "Captured", Frozen)
    pair = with_graphs(MADE["eagle"]())
    assert max(pair.distances((7,))) > 0.1


class Frozen(of_graphs.Captured):
    """A graph whose inputs nobody can fill."""

    @property
    def inputs(self):
        return [buffer.clone() for buffer in super().inputs]


def given_of(call):
    """What a call's graph reads, padded: numbers and inputs."""
    _, listed, inputs, _ = call
    rows = listed.sizes.rows
    padded = [torch.cat([one, one.new_zeros(rows - len(one), one.shape[1])]) for one in inputs]
    return torch.from_numpy(listed.numbers), padded


def computed(call, numbers, inputs):
    compute, listed, _, options = call
    rows = PassRows.of(numbers, listed.sizes, listed.page)
    return compute(rows, *inputs, *options)


def kinds_of(calls):
    """The calls that have sizes and options in common."""
    kinds = {}
    for call in calls:
        compute, listed, _, options = call
        kinds.setdefault((compute, listed.sizes, options), []).append(call)
    return kinds.values()


@pytest.mark.parametrize("kind", MADE)
@torch.inference_mode()
def test_a_call_reads_no_number_from_the_device(kind, calls):
    with_graphs(MADE[kind]()).distances((7,))
    for call, *_ in kinds_of(calls):
        numbers, inputs = given_of(call)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(one) for one in inputs]
            computed(call, mode.from_tensor(numbers), fakes)


@pytest.mark.parametrize("kind", MADE)
@torch.inference_mode()
def test_a_call_that_is_recorded_once_runs_others_of_its_size(kind, calls):
    with_graphs(MADE[kind]()).distances((7, 30))
    compared = 0
    for first, *others in kinds_of(calls):
        recorded = make_fx(lambda numbers, *inputs: computed(first, numbers, inputs))  # noqa: B023
        numbers, inputs = given_of(first)
        graph = recorded(numbers, *inputs)
        for other in others[-1:]:
            numbers, inputs = given_of(other)
            right = computed(other, numbers, inputs)
            assert all(map(torch.equal, graph(numbers, *inputs), right))
            compared += len(right)
    assert compared


@pytest.mark.parametrize("kind", MADE)
@torch.inference_mode()
def test_a_call_takes_nothing_from_the_host(kind, calls):
    """Tensors without numbers stand for those on a GPU."""
    pair, device = with_graphs(MADE[kind]()), torch.device("meta")
    pair.distances((7,))
    passes = pair.drafter.passes
    pair.target.embedding.to(device)
    pair.target.head.to(device)
    passes.network.to(device)
    passes.layers.to(device)
    passes.pool = RowPool(passes.pool._shapes, passes.pool.dtype, device)
    for (compute, listed, inputs, options), *_ in kinds_of(calls):
        call = compute, listed, inputs, moved_options(options, device)
        numbers, inputs = given_of(call)
        moved = numbers.to(device), [one.to(device) for one in inputs]
        computed(call, *moved)  # angles are moved once
        with Operations() as operations:
            computed(call, *moved)
        places = {one.device.type for one in tensors_of([one[1:] for one in operations.noted])}
        assert places == {"meta"}


def moved_options(options, device):
    """With the tokens of a head's columns on a device."""
    if not isinstance(options[-1], HeadInput) or options[-1].tokens is None:
        return options
    return *options[:-1], options[-1]._replace(tokens=options[-1].tokens.to(device))


class Order:
    """Notes what is started, and on which stream."""

    def __init__(self, monkeypatch, passes, router):
        self.noted = []
        self._note(monkeypatch, router, "forward", "router")
        self._note(monkeypatch, passes.layers, "drafter_stream", "layer")
        passes._side = SimpleNamespace(fork=self.fork, join=lambda: self.noted.append("join"))

    def _note(self, monkeypatch, module, name, word):
        run = getattr(module, name)

        def noted(*args):
            self.noted.append(word)
            return run(*args)

        monkeypatch.setattr(module, name, noted)

    @contextmanager
    def fork(self):
        self.noted.append("fork")
        yield
        self.noted.append("back")


@torch.inference_mode()
def test_the_router_runs_beside_the_layer(monkeypatch):
    pair = MADE["eagle"]()
    router = Router(RouterConfig(32, 32, 8, 5))
    passes = pair.drafter.passes
    cache = passes.pool.new()
    tree = random_tree(torch.Generator().manual_seed(0), 3)
    batch, hidden = Batch([Draft(cache, tree)]), torch.randn(len(tree), 32)
    right = passes.run(batch, hidden, router)
    order = Order(monkeypatch, passes, router)
    got = passes.run(batch, hidden, router)
    assert order.noted == ["fork", "router", "back", "layer", "join"]
    assert all(map(torch.equal, got[:3], right[:3])) and got.scores.shape == (len(tree), 5)
    order.noted.clear()
    passes.run(batch, hidden)
    assert order.noted == ["layer"]


@pytest.mark.parametrize("kind", ["eagle", "own head", "eagle-1"])
@torch.inference_mode()
def test_the_heads_part_of_a_call_is_in_its_pass(kind, calls, monkeypatch):
    """Nothing is scored behind it, and the host gets the likeliest tokens alone."""
    monkeypatch.setattr(of_eagle, "probs_of", None)
    pair = with_graphs(MADE[kind]())
    assert max(pair.distances((7,))) < 1e-4
    heads = [options[-1] for _, _, _, options in calls if len(options) == 3]
    assert heads and heads.count(pair.drafter._head) == len(heads)


@torch.inference_mode()
def test_the_likeliest_tokens_are_those_of_the_distributions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 200, generator=generator)
    logits[1, 5] = torch.nan
    tokens = torch.randperm(5000, generator=generator)[:200]
    probs, likeliest = rank_tokens(logits, tokens)
    given = DraftProbs(probs, tokens, 5000, likeliest=rows_of(likeliest))
    assert not probs[1].any() and torch.allclose(probs[0], logits[0].softmax(-1))
    for count, least in ((1, 0.0), (9, 0.01), (64, 0.0), (65, 0.0)):
        right = largest_plain(probs, count, [least] * 3, tokens)
        got = largest_children(given, count, [least] * 3)
        assert [[*map(list, row)] for row in got] == [[*map(list, row)] for row in right]
    # a wrong version: columns for tokens
    wrong = given._replace(likeliest=rows_of(rank_tokens(logits)[1]))
    assert largest_children(wrong, 1, [0.0] * 3)[0] != largest_children(given, 1, [0.0] * 3)[0]
