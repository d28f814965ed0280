"""Recurrent layers: a node's bits are those of its path, and states belong to sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from answers import answer, conversation, drafts_change_nothing, methods_over, request
from cases import few, refuses, spread
from features import interrupt
from kernels import SETS
from models import VOCAB, random_tree, table, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.engine import prefix_cache
from quickbeam.engine.engine import Engine
from quickbeam.methods.base import NoDraft
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native import library
from quickbeam.models.native.pages import NativeStates
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

KINDS = table("recurrent")
every_kind = pytest.mark.parametrize("kind", few(KINDS, ["qwen3_5"]))
PAGE = 64
IDS = torch.randint(3, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).tolist()
every_kind_and_set = pytest.mark.parametrize(("kind", "isa"), spread(list(KINDS), SETS))
FORMATS = ("bfloat16", "float32", "int8", "int4")
SAMPLING: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 5})


def made(kind, weights="bfloat16", **options):
    """`weights`: float32 for rows of float32, too."""
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    options["weights"] = "bfloat16" if weights == "float32" else weights
    model = make_model(tiny("", dtype, config=KINDS[kind]), **options)
    assert model.exact and isinstance(model, NativeModel)
    return model


def read(model, ids, chunks=()):
    cache, done = model.pool.new(), 0
    for end in (*chunks, len(ids)):
        model.forward(Batch([Chain(cache, ids[done:end])]))
        cache.commit(range(end - done))
        done = end
    return cache


def of_path(model, ids):
    cache = model.pool.new()
    try:
        (passed,) = model.forward(Batch([Chain(cache, ids)]))
        return passed.logits[0]
    finally:
        cache.release()


def wrong_rows(model, seed=0, steps=4, nodes=9, far=0.0):
    """Grow random trees behind sequences side by side, in one pass or two; count nodes with other
    logits than their path's by itself. Then commit a path, and go on."""
    generator, wrong = torch.Generator().manual_seed(seed), 0
    texts = [IDS[:PAGE], IDS[7:10], IDS[20 : 18 + 2 * PAGE]]
    caches = [read(model, texts[0], (5, 50)), read(model, texts[1]), read(model, texts[2], (PAGE,))]
    for _ in range(steps):
        trees = [random_tree(generator, nodes) for _ in texts]
        half = [Draft(cache, tree.first(3)) for cache, tree in zip(caches, trees, strict=True)]
        passed = model.forward(Batch([*half]))
        wrong += differ(model, texts[0], trees[0].first(3), passed[0].logits, 0, far)
        whole = [Draft(caches[0], trees[0], 3), *map(Draft, caches[1:], trees[1:])]
        for i, got in enumerate(model.forward(Batch([*whole]))):
            wrong += differ(model, texts[i], trees[i], got.logits, 3 * (i == 0), far)
        for cache, text, tree in zip(caches, texts, trees, strict=True):
            path = max(map(tree.path, range(len(tree))), key=len)
            cache.commit(path)
            text += [tree.token[node] for node in path]
    for cache in caches:
        cache.release()
    assert model.pool.used == 0
    return wrong


def same(got, right, far):
    return bool((got - right).abs().max() <= far * right.abs().max())


def differ(model, ids, tree, got, base, far=0.0):
    paths = [[tree.token[i] for i in tree.path(node)] for node in range(base, len(tree))]
    rows = zip(got, paths, strict=True)
    return sum(not same(row, of_path(model, [*ids, *path]), far) for row, path in rows)


@every_kind_and_set
def test_nodes_have_the_bits_of_their_paths(kind, isa, native):
    native(isa)
    model = made(kind)
    assert isa in model.describe()
    assert wrong_rows(model, steps=3 if isa == SETS[0] else 2) == 0


@every_kind_and_set
def test_a_prompt_has_the_same_bits_however_it_is_cut(kind, isa, native):
    """Token by token, states are made one step after the other; else for many tokens at once."""
    native(isa)
    model, generator = made(kind), torch.Generator().manual_seed(3)
    ids = IDS[: 3 * PAGE - 10]
    right = of_path(model, [*ids, 5])
    cuts = [torch.randperm(len(ids) - 1, generator=generator)[:count] + 1 for count in (2, 9, 40)]
    for cut in [*(sorted(one.tolist()) for one in cuts), range(1, len(ids))]:
        model.pool.snapshots = not model.pool.snapshots
        cache = read(model, ids, tuple(cut))
        (passed,) = model.forward(Batch([Chain(cache, [5])]))
        assert torch.equal(passed.logits[0], right)
        cache.release()


@pytest.mark.parametrize(("kind", "weights"), spread(list(KINDS), ["float32", "int8", "int4"]))
def test_nodes_have_the_bits_of_their_paths_in_every_format(kind, weights):
    model = made(kind, weights)
    model.pool.snapshots = True
    assert wrong_rows(model, 1) == 0


class Siblings:
    """A tree whose nodes take their older siblings for their parents."""

    def __init__(self, tree):
        self.parent = list(tree.parent)
        for node, parent in enumerate(tree.parent):
            older = [i for i in range(1, node) if tree.parent[i] == parent]
            self.parent[node] = older[-1] if older else parent

    def __len__(self):
        return len(self.parent)


TREE, FOLD = NativeStates.tree, NativeStates._fold
MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "the state of a sibling": ("tree", lambda self, tree, base: TREE(self, Siblings(tree), base)),
    "a state committed twice": ("_fold", lambda self, s, p, t: FOLD(self, s, [*p, p[-1]], t)),
    "a state without the last token": ("_fold", lambda self, s, p, t: FOLD(self, s, p[:-1], t)),
    "a state that is not committed": ("_fold", lambda self, s, p, t: FOLD(self, s, [], t)),
}


@pytest.mark.parametrize(("kind", "mistake"), spread(list(KINDS), list(MISTAKES)))
def test_a_mistake_is_seen(kind, mistake, monkeypatch):
    model, (name, wrong) = made(kind), MISTAKES[mistake]
    monkeypatch.setattr(NativeStates, name, wrong)
    assert wrong_rows(model) > 3


@every_kind
def test_a_pass_that_fails_changes_nothing(kind, monkeypatch):
    model, generator = made(kind), torch.Generator().manual_seed(0)
    cache = read(model, IDS[:70])
    tree, other = (random_tree(generator, 8) for _ in range(2))
    for part in (Draft(cache, tree), Chain(cache, IDS[:30])):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt(patch, model.pool.kernels, "run", 1)
            model.forward(Batch([part]))
    (passed,) = model.forward(Batch([Draft(cache, other)]))
    assert differ(model, IDS[:70], other, passed.logits, 0) == 0


# by the kernels, and by PyTorch's operators up to rounding
kinds_and_errors = pytest.mark.parametrize(
    ("kind", "far"),
    few([(kind, far) for kind in KINDS for far in (0.0, 1e-4)], [("qwen3_5", 0.0), ("lfm2", 1e-4)]),
)


def either(kind, far):
    if not far:
        return made(kind)
    return make_model(tiny("", torch.float32, config=KINDS[kind]), native=False)


@kinds_and_errors
def test_forks_go_their_own_ways(kind, far):
    model = either(kind, far)
    cache, ways = read(model, IDS[:70]), ([5, 6, 7], [8, 9])
    forks = [cache.fork() for _ in ways]
    for fork, way in zip(forks, ways, strict=True):
        model.forward(Batch([Chain(fork, way)]))
        fork.commit(range(len(way)))
    for fork, way in zip([*forks, cache], [*ways, []], strict=True):
        (passed,) = model.forward(Batch([Chain(fork, [4])]))
        assert same(passed.logits[0], of_path(model, [*IDS[:70], *way, 4]), far)
        fork.release()
    assert model.pool.used == 0


@kinds_and_errors
def test_what_cannot_be_committed_is_refused(kind, far):
    model = either(kind, far)
    cache = read(model, IDS[:10])
    model.forward(Batch([Chain(cache, IDS[:5])]))
    refuses("commit all of them", cache.commit, range(3), error=ValueError)
    cache.commit(range(5))
    refuses("commit all of them", cache.commit, range(5), error=ValueError)  # nothing has run since
    refuses("only to 0", cache.truncate, 3, error=ValueError)
    cache.truncate(0)
    (passed,) = model.forward(Batch([Chain(cache, IDS[:3])]))
    assert same(passed.logits[0], of_path(model, IDS[:3]), far)


@pytest.mark.parametrize(("kind", "weights", "sampling"), spread(list(KINDS), FORMATS, SAMPLING))
def test_answers_do_not_depend_on_drafts_neighbours_or_the_cache(kind, weights, sampling):
    model = made(kind, weights, chunk=PAGE + 32)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
    # of several pages
    right = conversation(model, params, [*IDS[:100], *IDS[:40]], [IDS[5:70], IDS[9:12]])
    # which has recurrent layers, too
    drafter = LMDrafter(make_model(tiny("", torch.bfloat16, seed=1, config=KINDS[kind])), VOCAB)
    last = drafts_change_nothing(model, methods_over(drafter), params, right)
    # the second turn began behind the whole pages of the first one's prompt and answer
    assert last.statistics.cached_tokens > len(right[0][0])


@every_kind
def test_snapshots_are_counted_bounded_and_freed(kind, monkeypatch):
    monkeypatch.setattr(prefix_cache, "SNAPSHOTS", 3)
    model = made(kind, chunk=PAGE)
    engine, params = Engine(model), SamplingParams(max_tokens=3, ignore_eos=True)
    for begin in range(4):
        answer(model, NoDraft(), params, IDS[begin : begin + 3 * PAGE + 5], engine=engine)
    prefixes, pool = engine.prefixes, model.pool
    assert pool.used == 4 * 3 + 3 * pool.state_pages  # three snapshots
    assert prefixes.evictable_pages() == pool.used
    again = answer(model, NoDraft(), params, IDS[3 : 3 + 3 * PAGE + 5], engine=engine)
    assert again.statistics.cached_tokens == 3 * PAGE
    prefixes.clear()
    assert pool.used == 0


@every_kind
def test_a_pool_that_is_short_preempts_and_changes_no_answer(kind):
    model, params = made(kind, chunk=PAGE), SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [IDS[begin : begin + 90] for begin in range(4)]
    method, alone = LogitSpec(), Engine(model, share=False)
    right = [answer(model, method, params, p, engine=alone).output.token_ids for p in prompts]
    engine = Engine(model)
    model.pool.limit = 2 * (3 + model.pool.most_state_pages)
    states = [engine.add(request(model, method, params, prompt, budget=8)) for prompt in prompts]
    while any(not state.over for state in states):
        engine.step()
        assert model.pool.used <= model.pool.limit
    assert [state.output.token_ids for state in states] == right
