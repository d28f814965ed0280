"""Calls of drafters in PyTorch as graphs: of one size, one computation."""

import random
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from features import Pair, rounds, words
from features import random_tree as tree_at
from models import VOCAB, random_tree, spread_out
from quickbeam.drafters import scoring
from quickbeam.drafters.base import DraftProbs
from quickbeam.drafters.eagle import rank
from quickbeam.drafters.largest import largest_plain
from quickbeam.drafters.passes import Head
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.methods.children import largest_children
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.torch import graphs as of_graphs
from quickbeam.models.torch.graphs import Graphs
from quickbeam.models.torch.likeliest import rank_tokens, ranked_rows
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import PassRows
from quickbeam.tree import TokenTree
from test_block_drafter import KINDS, Toy, among
from test_mtp import Head as MtpHead
from test_torch_passes import CPU, Operations, graphs_on_the_cpu, tensors_of  # noqa: F401


def toy(kind):
    return Toy(KINDS[kind], native=False, native_target=False)


def head_of(kind):
    with TemporaryDirectory() as folder:
        return MtpHead(kind).open(Path(folder), native=False)


def shortlist_of(pair, routed, window=30):
    """Frequent tokens, the context's, and clusters that a router chooses; the last one is short."""
    torch.manual_seed(0)
    weight, order = pair.target.head.weight.detach(), torch.randperm(VOCAB)
    if not routed:
        return Shortlist(weight, Layout.by_frequency(order, 20, VOCAB), None, window=window)
    layout = Layout(order[:90], 12, 9, VOCAB)
    router = spread_out(Router(RouterConfig(32, 32, 8, layout.clusters)), 4)
    return Shortlist(weight, layout, None, router=router, chosen=3, window=window)


def listed(pair, routed=False):
    """A pair whose drafter scores a shortlist. It has the equations' distributions among the tokens
    that are scored."""

    def among_scored(probs, right):
        return probs, among(right, probs > 0)

    pair.begin = partial(pair.begin, shortlist=shortlist_of(pair, routed))
    pair.distances = partial(pair.distances, compared=among_scored)
    return pair


MADE = {
    "eagle": lambda: Pair("attention", native=False),
    "own head": lambda: Pair("own-head", native=False),
    "eagle-1": lambda: Pair("input", native=False),
    "dspark": lambda: toy("dspark"),
    "dflash2": lambda: toy("dflash2"),
    "own mask": lambda: toy("own mask"),
    "gemma": lambda: toy("gemma"),
    "confident": lambda: toy("own head"),
    "no markov": lambda: toy("dflash"),
    "eagle, context": lambda: listed(Pair("attention", native=False)),
    "eagle, router": lambda: listed(Pair("attention", native=False), routed=True),
    "mtp": lambda: head_of("qwen3_5"),
    "dspark, context": lambda: listed(toy("dspark")),
    "no markov, context": lambda: listed(toy("dflash")),
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
    padded = [bool(listed.to(CPU).is_padding.any()) for _, listed, _, _ in calls]
    assert any(padded) and not all(padded)


@pytest.mark.parametrize("kind", ["own head", "eagle, router", "dspark, context", "no markov"])
@torch.inference_mode()
def test_sequences_that_share_a_graph_get_what_they_get_alone(kind, calls):
    def answers(pair, together):
        rng, probs = random.Random(7), []
        texts = [pair.begin(words(rng, length), rng.randrange(VOCAB)) for length in (4, 9, 70)]
        trees = [tree_at(rng, text.context.ids[-1], 7) for text in texts]
        for depth in range(4):
            of_depth = [rounds(tree)[depth : depth + 1] for tree in trees]
            asked = [
                text.request(tree, nodes)
                for text, tree, some in zip(texts, trees, of_depth, strict=True)
                for nodes in some
            ]
            parts = [asked] if together else [[request] for request in asked]
            probs += [one.dense() for part in parts for one in pair.drafter.answer(part)]
        return probs

    alone, together = answers(MADE[kind](), False), answers(with_graphs(MADE[kind]()), True)
    assert calls and len(alone) == len(together) > 6
    for right, got in zip(alone, together, strict=True):
        assert torch.equal(right > 0, got > 0)
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-3)


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
        compute, listed, inputs, options = call
        shapes = tuple(one.shape[1:] for one in inputs)
        kinds.setdefault((compute, listed.sizes, shapes, options), []).append(call)
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
    for module in (passes.layers, passes.embedding, passes.head, getattr(pair, "network", None)):
        if module is not None:
            module.to(device)
    passes.pool = RowPool(passes.pool._shapes, passes.pool.dtype, device)
    for (compute, listed, inputs, options), *_ in kinds_of(calls):
        call = compute, listed, inputs, [on_device(option, device) for option in options]
        numbers, inputs = given_of(call)
        moved = numbers.to(device), [one.to(device) for one in inputs]
        computed(call, *moved)  # angles are moved once
        with Operations() as operations:
            computed(call, *moved)
        places = {one.device.type for one in tensors_of([one[1:] for one in operations.noted])}
        assert places == {"meta"}


def on_device(option, device):
    """A pass's option; a head with all tensors that it reads on a device."""
    if not isinstance(option, Head):
        return option
    shortlist, blocks = option.shortlist, getattr(option.finish, "__self__", None)
    if shortlist is not None and shortlist.route is not None:
        shortlist.route.to(device)
    for owner in (blocks, None if shortlist is None else shortlist.in_torch):
        for name, value in {} if owner is None else vars(owner).items():
            if isinstance(value, torch.Tensor):
                setattr(owner, name, value.to(device))
    tokens = None if option.tokens is None else option.tokens.to(device)
    return option._replace(tokens=tokens)


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
    passes, shortlist = pair.drafter.passes, shortlist_of(pair, routed=True)
    tree = random_tree(torch.Generator().manual_seed(0), 3)
    batch, hidden = Batch([Draft(passes.pool.new(), tree)]), torch.randn(len(tree), 32)
    run = partial(passes.run, batch, hidden, scorers=[shortlist.begin([1, 2])])
    head = Head(True, shortlist, None, rank)
    right = run(head)
    order = Order(monkeypatch, passes, shortlist.route)
    got = run(head)
    assert order.noted == ["fork", "router", "back", "layer", "join"]
    assert all(map(torch.equal, tensors_of(got), tensors_of(right)))
    order.noted.clear()
    run(Head(True, None, None, rank))
    assert order.noted == ["layer"]


def scored_tokens(outputs, rows):
    """The tokens that a pass has scored for each of the rows, by the number of their sequences."""
    probs = outputs.finished[0]
    return [set(outputs.columns[number][probs[i] > 0].tolist()) for i, number in enumerate(rows)]


@pytest.mark.parametrize("padded", [True, False])
@torch.inference_mode()
def test_each_sequence_has_the_clusters_that_its_nodes_want_and_its_context(
    padded, calls, monkeypatch
):
    pair = with_graphs(MADE["eagle"]()) if padded else MADE["eagle"]()
    passes, shortlist = pair.drafter.passes, shortlist_of(pair, routed=True)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    trees = [random_tree(generator, nodes) for nodes in (3, 1, 5)]
    hidden = torch.randn(sum(map(len, trees)), 32, generator=generator)
    head = Head(True, shortlist, None, rank)
    states = [shortlist.begin(words(rng, count)) for count in (9, 3, 1)]
    rows = [number for number, tree in enumerate(trees) for _ in range(len(tree))]

    def scored():
        parts = [Draft(passes.pool.new(), tree) for tree in trees]
        return scored_tokens(passes.run(Batch(parts), hidden, head, states), rows)

    embedded = passes.embedding(torch.tensor([t for tree in trees for t in tree.token]))
    right, wanted = [], torch.tensor(rows)
    for number, state in enumerate(states):
        mine = wanted == number
        (clusters,) = shortlist.choose(shortlist.route(hidden[mine], embedded[mine]))
        tokens = shortlist.layout.scored(clusters).tolist()
        right.append({*tokens, *state.context_tokens.tolist()})
    assert len({*map(frozenset, right)}) == len(states)
    assert scored() == [right[number] for number in rows]
    assert calls if padded else not calls
    if padded:  # wrong versions: rows of padding choose, too; the first call's context stays
        states[1].extend(words(rng, 30))
        right[1] |= {*states[1].context_tokens.tolist()}
        assert scored() == [right[number] for number in rows]
        choose = shortlist.choose
        monkeypatch.setattr(
            shortlist, "choose", lambda scores, owned: choose(scores, owned * 0 + 1)
        )
        passes._running._graphs.clear()
        assert scored() != [right[number] for number in rows]


@pytest.mark.parametrize("kind", ["eagle, context", "dspark, context"])
@pytest.mark.usefixtures("graphs_on_the_cpu")
@torch.inference_mode()
def test_a_context_that_stayed_in_a_graph_is_seen(kind, monkeypatch):
    def scored():
        pair, rng, tokens = with_graphs(MADE[kind]()), random.Random(3), []
        for _ in range(2):
            prompt = words(rng, 12)
            text = pair.begin(prompt[:-1], prompt[-1])
            probs = text.distributions(TokenTree(prompt[-1]), [0])[0]
            tokens.append(set(probs.nonzero()[:, 0].tolist()) >= {*prompt})
            text.release()
        return tokens

    assert scored() == [True, True]
    monkeypatch.setattr(of_graphs, "Captured", Frozen)
    assert scored() != [True, True]


@torch.inference_mode()
def test_a_shortlist_that_holds_no_token_is_refused():
    pair = MADE["eagle"]()
    shortlist = Shortlist(pair.target.head.weight, Layout.nothing(VOCAB), None, window=9)
    pair.begin([1, 2], 3, shortlist=shortlist).distributions(TokenTree(3), [0])
    passes = pair.drafter.passes
    batch = Batch([Chain(passes.pool.new(), [1])])
    head, scorers = Head(True, shortlist, None, rank), [shortlist.begin([])]
    with pytest.raises(ValueError, match="begin it with a prompt"):
        passes.run(batch, torch.randn(1, 32), head, scorers)


@torch.inference_mode()
def test_a_cluster_that_is_read_on_the_host_is_seen(calls):
    """A wrong version of the columns: the clusters' tokens by a table on the host."""
    pair = with_graphs(MADE["eagle, router"]())
    pair.distances((7,))
    of_router = [call for call in calls if len(call[2]) == 2]
    (_, _, _, (_, head)), *_ = of_router
    head.shortlist.in_torch.columns = lambda clusters, context: head.shortlist.layout.scored(
        torch.tensor(clusters[0].tolist())
    )[None]
    numbers, inputs = given_of(of_router[0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(one) for one in inputs]
        with pytest.raises(DataDependentOutputException):
            computed(of_router[0], mode.from_tensor(numbers), fakes)


COMPUTED = ("linear", "mm", "softmax", "topk", "sort", "embedding", "index", "gather", "nonzero")


@pytest.mark.parametrize("kind", MADE)
@torch.inference_mode()
def test_the_heads_part_of_a_call_is_in_its_pass(kind, graphs_on_the_cpu, monkeypatch):  # noqa: F811
    """Beside its graphs, a call copies, and the host gets the likeliest tokens alone."""
    run, operations = Graphs.run, Operations()

    def not_noted(*args):
        before = len(operations.noted)
        results = run(*args)
        del operations.noted[before:]
        return results

    pair = with_graphs(MADE[kind]())
    text = pair.begin(words(random.Random(0), 7), 5)
    monkeypatch.setattr(Graphs, "run", not_noted)
    # what the target's last logits make likely is no part of the drafter's call
    monkeypatch.setattr(scoring, "largest", lambda *args, **more: [([1, 2], [0.5, 0.1])])
    with operations:
        probs = pair.drafter.answer([text.request(TokenTree(5), [0])])[0]
    assert len(probs.likeliest) == 1
    names = [str(operation) for operation, *_ in operations.noted]
    assert names and not [name for name in names if any(word in name for word in COMPUTED)]
    with operations:  # what is noted is seen
        probs.values.topk(1)
    assert "aten.topk.default" in [str(operation) for operation, *_ in operations.noted]


@torch.inference_mode()
def test_the_likeliest_tokens_are_those_of_the_distributions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 200, generator=generator)
    logits[1, 5] = torch.nan
    tokens = torch.randperm(5000, generator=generator)[:200]
    ranked = ranked_rows(*rank_tokens(logits, tokens[None], torch.zeros(3, dtype=torch.long)))
    probs = ranked.probs
    assert ranked.scored == [200] * 3
    given = DraftProbs(probs, tokens, 5000, likeliest=ranked.likeliest)
    assert not probs[1].any() and torch.allclose(probs[0], logits[0].softmax(-1))
    for count, least in ((1, 0.0), (9, 0.01), (64, 0.0), (65, 0.0)):
        right = largest_plain(probs, count, [least] * 3, tokens)
        got = largest_children(given, count, [least] * 3)
        assert [[*map(list, row)] for row in got] == [[*map(list, row)] for row in right]
    # a wrong version: columns for tokens
    wrong = given._replace(likeliest=ranked_rows(*rank_tokens(logits)).likeliest)
    assert largest_children(wrong, 1, [0.0] * 3)[0] != largest_children(given, 1, [0.0] * 3)[0]
