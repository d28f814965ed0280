"""Bit-identity of the native kernels: what a row gives depends on what it sees alone. On every
instruction set that the machine runs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import reference
from cases import few, spread
from kernels import (
    SETS,
    best_set,
    every_set,
    linear,
    load,
    number,
    relocated,
    rows_that_depend_on_others,
    write,
)
from models import CONFIGS, VOCAB, tiny
from quickbeam.models.native import library
from quickbeam.models.native.operands import KVShape, Rows
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import Packed
from quickbeam.models.pages import PagedStore, PagePool
from quickbeam.models.target import Target
from quickbeam.tree import TokenTree
from test_exact import one_at_a_time, rows_that_differ

pytestmark = pytest.mark.usefixtures("threads")
LAYOUTS = list(CONFIGS)
WIDEST = 128


# --- products ---


def product(kernels, inputs, outputs, epilogue):
    """`[n, inputs]` bfloat16 to `[n, outputs]` float32."""
    gated = epilogue == library.GATED
    weights = [number(outputs, inputs, seed=i) for i in range(1, 2 + gated)]
    bias = number(outputs * (1 + gated), like=torch.float32, seed=3)
    packed = Packed(kernels, weights, bias, gated=gated)
    return lambda x: linear(kernels, packed, x, epilogue)


@every_set
@pytest.mark.parametrize("epilogue", [library.STORE, library.GATED])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    # the last: more than is kept of the rows at once where they are widened
    [(34, 40), (64, 100), (96, 16), (160, 217), (5002, 17)],
)
def test_rows_of_a_product_do_not_depend_on_others(isa, inputs, outputs, epilogue):
    run = product(load(isa), inputs, outputs, epilogue)
    assert rows_that_depend_on_others(run, number(WIDEST, inputs)) == 0


@every_set
@pytest.mark.parametrize("count", [2, 3])
def test_products_and_norms_do_not_depend_on_threads(isa, count, threads):
    one, x = product(load(isa), 96, 217, library.STORE), number(40, 96)
    wide = product(load(isa), 96, 50, library.GATED)
    threads(1)
    alone = one(x), wide(x), one(x[:1])
    threads(count)
    assert all(map(torch.equal, (one(x), wide(x), one(x[:1])), alone))


@best_set
def test_a_product_that_depends_on_other_rows_is_seen(isa):
    right, every = product(load(isa), 64, 40, library.STORE), number(WIDEST, 64)

    def touched(x):
        return right(x) + 2.0**-20 * x.float().sum(0).mean() * (len(x) > 16)

    for wrong in (touched, lambda x: right(x.roll(1, 0))):
        assert rows_that_depend_on_others(wrong, every) > 1000


# --- attention ---


@dataclass(frozen=True)
class Tokens:
    """What a layer makes of n tokens, a row each: `[n, heads or kv_heads, dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def __getitem__(self, rows):
        return Tokens(self.query[rows], self.key[rows], self.value[rows])

    def __add__(self, more):
        return Tokens(
            torch.cat([self.query, more.query]),
            torch.cat([self.key, more.key]),
            torch.cat([self.value, more.value]),
        )


class Part(NamedTuple):
    """Rows of one sequence in a batch."""

    store: PagedStore
    tokens: Tokens
    orders: Sequence[int]
    prefix: Sequence[int]
    paths: Sequence[Sequence[int]]


def tokens_of(n, heads, shape, seed):
    dims = (
        (heads, shape.key_dim),
        (shape.kv_heads, shape.key_dim),
        (shape.kv_heads, shape.value_dim),
    )
    return Tokens(*(number(n, *dim, seed=3 * seed + i) for i, dim in enumerate(dims)))


def chain(store, tokens):
    """Tokens behind the committed ones, each seeing all before it."""
    start, n = store.length, len(tokens.query)
    store.reserve(start + n)
    return Part(store, tokens, range(start, start + n), range(start + 1, start + n + 1), [[]] * n)


def forward(kernels, parts, **variations):
    """Keys and values to their pages, then attention of all parts in one call; `[n, heads,
    value_dim]` of each."""
    shape, (n, heads, dim) = (
        parts[0].store.shapes[0],
        torch.cat([part.tokens.query for part in parts]).shape,
    )
    program = Program(kernels)
    names = program.given("sorted", 0), program.given("out", 0)
    program.attend(*names, heads, shape, 0, dim**-0.5, **variations)
    query, key, value = (
        torch.cat([getattr(part.tokens, name) for part in parts])
        for name in ("query", "key", "value")
    )
    out = torch.zeros(n, heads, shape.value_dim, dtype=torch.bfloat16)
    orders, prefix, paths = (
        [each for part in parts for each in getattr(part, name)]
        for name in ("orders", "prefix", "paths")
    )
    spans = [(len(part.orders), part.store.table) for part in parts]
    rows = Rows([0] * n, [0] * n, orders, prefix, paths if any(paths) else (), spans)
    write(kernels, shape, key.transpose(0, 1), value.transpose(0, 1), rows)
    program.run(rows, {"sorted": reference.sort_queries(query, shape.kv_heads), "out": out})
    return list(out.split([len(part.orders) for part in parts]))


def scattered(rng, store, tokens, noise):
    """A tree on whose deepest path `tokens` stand, among random siblings and nephews; the nodes of
    that path."""
    start, right, paths = store.length, list[int](), list[list[int]]()
    left = len(noise.query)
    picks: list[tuple[bool, int]] = []  # (one of the tokens, which)
    for i in range(len(tokens.query)):
        while i and left and rng.random() < 0.6:
            left -= 1
            paths.append([*paths[rng.randrange(len(paths))], start + len(paths)])
            picks.append((False, left))
        paths.append([*(paths[right[-1]] if right else ()), start + len(paths)])
        right.append(len(paths) - 1)
        picks.append((True, i))
    while left and rng.random() < 0.9:
        left -= 1
        paths.append([*paths[rng.randrange(len(paths))], start + len(paths)])
        picks.append((False, left))
    n = len(paths)
    store.reserve(start + n)
    at = [i if mine else len(tokens.query) + i for mine, i in picks]
    return Part(store, (tokens + noise)[at], range(start, start + n), [start] * n, paths), right


def rows_that_attend_otherwise(
    kernels, heads, shape, length, seed, twist=lambda part: part, **variations
):
    """Commit 40 tokens behind `length` others one by one; then scattered over trees, with other
    sequences in the batch, in pages that move. Count rows with other bits."""
    rng, more, pool = random.Random(seed), 40, PagePool([shape], kernels)
    tokens, wrong = tokens_of(length + more, heads, shape, seed), 0

    def begun():
        store = pool.new()
        if length:
            forward(kernels, [chain(store, tokens[:length])], **variations)
        store.length = length
        return store

    store, alone = begun(), list[torch.Tensor]()
    for i in range(length, length + more):
        alone += forward(kernels, [chain(store, tokens[i : i + 1])], **variations)
        store.length += 1
    expected = torch.cat(alone)

    together = begun()
    wrong += int(
        (forward(kernels, [chain(together, tokens[length:])], **variations)[0] != expected)
        .flatten(1)
        .any(1)
        .sum()
    )

    store, done = begun(), 0
    while done < more:
        step = min(rng.randint(1, 9), more - done)
        noise = tokens_of(rng.choice([1, 4, 30, 100]), heads, shape, rng.randrange(1 << 20))
        store = relocated(store, rng.randrange(1 << 20))
        part, path = scattered(rng, store, tokens[length + done : length + done + step], noise)
        batch, place = [twist(part)], 0
        for front in (True, False):  # other sequences before and after
            for _ in range(rng.randrange(3)):
                other = pool.new()
                other.length = rng.randrange(150)
                rows = chain(
                    other, tokens_of(rng.randint(1, 20), heads, shape, rng.randrange(1 << 20))
                )
                batch.insert(0 if front else len(batch), rows)
                place += front
        got = forward(kernels, batch, **variations)[place][path]
        wrong += int((got != expected[done : done + step]).flatten(1).any(1).sum())
        store.commit(path)
        done += step
    return wrong


SHAPES = {
    "grouped": (8, KVShape(2, 64, 64)),
    "odd": (9, KVShape(3, 6, 20)),
    "single": (4, KVShape(4, 16, 33)),
    "tiles": (6, KVShape(1, 32, 32)),
}


@every_set
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_does_not_depend_on_the_tree_the_batch_and_the_pages(isa, shape, window):
    heads, kept = SHAPES[shape]
    for seed, length in enumerate((0, 1, 63, 130, 601)):
        assert rows_that_attend_otherwise(load(isa), heads, kept, length, seed, window=window) == 0


@every_set
def test_variations_of_attention_keep_the_bits(isa):
    heads, kept = SHAPES["grouped"]
    sinks = number(heads, like=torch.float32)
    for variations in (
        {"softcap": 20.0},
        {"sinks": sinks},
        {"softcap": 5.0, "window": 7, "sinks": sinks},
    ):
        assert rows_that_attend_otherwise(load(isa), heads, kept, 90, 1, **variations) == 0


@every_set
@pytest.mark.parametrize("count", [2, 3])
def test_attention_does_not_depend_on_threads(isa, count, threads):
    kernels, (heads, shape) = load(isa), SHAPES["grouped"]
    store, tokens, outs = PagePool([shape], kernels).new(), tokens_of(300, heads, shape, 0), []
    for used in (1, count):
        threads(used)
        store.length = 0
        first = forward(kernels, [chain(store, tokens[:250])], window=100)[0]
        store.length = 250
        part, _ = scattered(random.Random(0), store, tokens[250:], tokens_of(60, heads, shape, 1))
        outs.append(
            [first, *forward(kernels, [part]), *forward(kernels, [chain(store, tokens[250:251])])]
        )
    assert all(map(torch.equal, *outs))
    assert rows_that_attend_otherwise(kernels, heads, shape, 70, 2) == 0


@every_set
def test_attention_that_depends_on_the_tree_is_seen(isa):
    """Paths in another order, a parent left out, and a sibling seen."""
    heads, kept = SHAPES["grouped"]

    def paths_by(change):
        return lambda part: part._replace(paths=[change(list(path)) for path in part.paths])

    swapped = paths_by(lambda path: [path[1], path[0], *path[2:]] if len(path) > 2 else path)
    shorter = paths_by(lambda path: path[1:] if len(path) > 2 else path)
    wider = paths_by(
        lambda path: (
            path
            if path[-1] - path[0] < len(path)
            else list(range(path[-1] - len(path) + 1, path[-1] + 1))
        )
    )
    for twist in (swapped, shorter, wider):
        assert rows_that_attend_otherwise(load(isa), heads, kept, 63, 0, twist) > 5


# --- whole models ---


def text(n, seed=0):
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@every_set
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tree_gives_the_bits_of_one_token_at_a_time(isa, name, native):
    native(isa)
    target = Target(tiny(name, torch.bfloat16))
    assert isinstance(target.store, PagedStore) and target.store.kernels.name == isa
    ids = text(78)
    prompt, tokens = ids[:52], ids[52:]  # across the end of a page
    expected = one_at_a_time(target, prompt, tokens)
    assert rows_that_differ(target, prompt, tokens, expected, 0) == 0


@pytest.mark.long
@every_set
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_trees_give_the_bits_of_one_token_at_a_time(isa, name, wide, native):
    native(isa)
    target = Target(tiny(name, torch.bfloat16, wide=wide))
    ids = text(300, 1)
    for begin in (1, 100, 200):
        prompt, tokens = ids[:begin], ids[begin : begin + 80]
        expected = one_at_a_time(target, prompt, tokens)
        wrong = [rows_that_differ(target, prompt, tokens, expected, seed) for seed in range(4)]
        assert wrong == [0] * 4


@best_set
@pytest.mark.parametrize("name", ["llama", "gemma2-softcap-window"])
def test_trees_whose_paths_are_mixed_up_are_seen(isa, name, native, monkeypatch):
    native(isa)
    target, ids = Target(tiny(name, torch.bfloat16)), text(100)
    expected = one_at_a_time(target, ids[:60], ids[60:])
    init = Rows.__init__

    def mixed(self, tokens, positions, orders=(), prefix=(), paths=(), *rest):
        init(
            self,
            tokens,
            positions,
            orders,
            prefix,
            [[path[1], path[0], *path[2:]] if len(path) > 2 else path for path in paths],
            *rest,
        )

    monkeypatch.setattr(Rows, "__init__", mixed)
    assert (
        sum(rows_that_differ(target, ids[:60], ids[60:], expected, seed) for seed in range(2)) > 5
    )


def widest_tree(tokens, nodes, rng):
    """`tokens` on a path of a tree of `nodes` nodes, the others anywhere; and that path."""
    tree, path = TokenTree(tokens[0]), [0]
    while len(tree) < nodes:
        if len(path) < len(tokens) and (
            rng.random() < len(tokens) / nodes or nodes - len(tree) <= len(tokens) - len(path)
        ):
            if tree.child(path[-1], tokens[len(path)]) is None:
                path.append(tree.add(path[-1], tokens[len(path)], "text"))
            continue
        parent, token = rng.randrange(len(tree)), rng.randrange(VOCAB)
        on_path = parent == path[-1] and len(path) < len(tokens) and token == tokens[len(path)]
        if not on_path and tree.child(parent, token) is None:
            tree.add(parent, token, "noise")
    return tree, path


@pytest.mark.parametrize(
    ("isa", "name"), spread(SETS, ["llama", "qwen3", "mistral-window", "gemma3-window", "gpt2"])
)
def test_prompts_in_chunks_and_kept_prefixes_give_the_same_bits(isa, name, native):
    native(isa)
    ids, found = text(150), []
    for chunk in (512, 64, 37, 5):
        target = Target(tiny(name, torch.bfloat16), chunk=chunk)
        target.model.watch([1, 3])
        logits = target.prefill(ids)
        assert isinstance(target.store, PagedStore)
        kept = [
            tensor
            for layer in range(len(target.store.shapes))
            for tensor in target.store.read(layer)
        ]
        found.append([logits, target.take_hidden(), *kept])
        for keep in (64, 101, 149):
            target.prefill([*ids[:keep], *text(9, keep)], keep)
            assert torch.equal(target.prefill(ids, keep), logits)
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    kept,
                    [t for i in range(len(kept) // 2) for t in target.store.read(i)],
                    strict=True,
                )
            )
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@every_set
def test_a_model_does_not_depend_on_threads(isa, native, threads):
    native(isa)
    ids, found = text(100), []
    target = Target(tiny("llama", torch.bfloat16, wide=True))
    tree, _ = widest_tree(ids[90:], 40, random.Random(0))
    for count in (1, 2, 3):
        threads(count)
        target.reset()
        found.append([target.prefill(ids[:90]), target.verify(tree), torch.tensor(target.best)])
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
    assert torch.equal(found[0][2], reference.best(found[0][1]))


@pytest.mark.parametrize(
    ("isa", "length"),
    few([(isa, n) for isa in SETS for n in (1023, 1500, 2500, 4000)], [(SETS[0], 1500)]),
)
def test_long_contexts_give_the_same_bits(isa, length, native):
    native(isa)
    target, ids = Target(tiny("llama", torch.bfloat16)), text(length + 16)
    expected = one_at_a_time(target, ids[:length], ids[length:])
    assert rows_that_differ(target, ids[:length], ids[length:], expected, 0) == 0
