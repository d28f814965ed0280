"""The native kernels of every instruction set that this machine runs, and single operations of
theirs on plain tensors."""

import random

import pytest
import torch

import reference
from quickbeam.models.cache.kv import Page
from quickbeam.models.native import build, library
from quickbeam.models.native.operands import KVShape, RowList, plain_rows
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import Packed

SETS = [name for name in [*build.SETS, *build.EMULATED] if build.runs(name)]
every_set = pytest.mark.parametrize("isa", SETS)
best_set = pytest.mark.parametrize("isa", SETS[:1])


def load(isa):
    """The kernels of an instruction set; the test is left out where they can't be compiled."""
    try:
        return library.load(isa)
    except build.CannotBuild as error:
        pytest.skip(str(error))


def number(*shape, like=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


def linear(kernels, packed, x, epilogue=library.STORE, **options):
    """`[n, outputs]` float32: the product of rows with packed weights."""
    return largest(kernels, packed, x, epilogue, **options)[0]


def largest(kernels, packed, x, epilogue=library.BEST, **options):
    """A product, and by row which of its numbers is the largest where `epilogue` finds it."""
    if isinstance(packed, torch.Tensor):
        packed = Packed(kernels, [packed])
    program, outputs = Program(kernels), packed.outputs // (1 + packed.gated)
    y, best = torch.full((len(x), outputs), torch.nan), torch.full((len(x),), 77)
    source = program.external("x", x.shape[1], x.dtype is torch.float32)
    target, place = program.external("y", outputs, True), program.external("best", 1)
    if epilogue == library.BEST:
        options["best"] = place
    program.linear(packed, source, target, epilogue, **options)
    program.run(plain_rows(len(x)), {"x": x.contiguous(), "y": y, "best": best})
    return y, best


def dependent_rows(run, x):
    """Run any rows of `x` side by side, in any order; count those with other bits than alone."""
    rng, wrong = random.Random(0), 0
    alone = torch.cat([run(x[i : i + 1]) for i in range(len(x))])
    for width in range(1, len(x) + 1):
        rows = rng.choices(range(len(x)), k=width)
        wrong += int((run(x[rows]) != alone[rows]).any(1).sum())
    return wrong


def chain_rows(store, tokens):
    rows = RowList()
    store.add_chain(rows, tokens, ())
    return rows


def rows_of(spans, positions, orders, prefix, paths):
    """Rows of several sequences: of each their number, and the address of its page table."""
    rows, first = RowList(), 0
    for count, table in spans:
        its = slice(first, first := first + count)
        rows.add(table, [0] * count, positions[its], orders[its], prefix[its], paths[its], ())
    return rows


def filled(kernels, keys, values, length=None):
    """A store of one layer: `keys` and `values` `[kv_heads, tokens, dim]`, `length` committed."""
    (kv_heads, tokens, dim), value_dim = keys.shape, values.shape[2]
    shape = KVShape(kv_heads, dim, value_dim)
    store = PagePool([shape], kernels).new()
    write(kernels, shape, keys, values, chain_rows(store, [0] * tokens))
    store.length = tokens if length is None else length
    return store


def read(store, layer, count=None):
    """Keys and values `[kv_heads, count, dim]` of the first `count` orders, or of all committed."""
    pool, count = store.pool, store.length if count is None else count
    shape = pool.shapes[layer]
    key = torch.empty(shape.kv_heads, count, shape.key_dim, dtype=pool.dtype)
    value = torch.empty(shape.kv_heads, count, shape.value_dim, dtype=pool.dtype)
    place, both = pool.layers[layer].ctypes.data, (key.data_ptr(), value.data_ptr())
    pool.kernels.read(store.table, place, count, *both, pool.dtype is torch.float32)
    return key, value


def write(kernels, shape, keys, values, rows):
    """Write `keys` and `values`, `[kv_heads, n, dim]`, to the pages of `rows`."""
    program, (heads, n, dim) = Program(kernels), keys.shape
    rest = torch.cat([keys, values], 2).transpose(0, 1).float().contiguous()
    query, small = torch.zeros(n, heads * dim), torch.zeros(1)
    rest_of = program.external("rest", rest[0].numel(), True)
    small_of = program.external("small", 0, True)
    both = program.external("query", heads * dim, True), program.external("sorted", 0)
    program.latent(*both, rest_of, small_of, 0, heads, shape, 0)
    given = {"query": query, "rest": rest, "small": small}
    program.run(rows, {**given, "sorted": query.to(torch.bfloat16)})


def relocated(store, seed=0):
    """A store with the same tokens in other memory, its pages in another order there."""
    pages, other = store.pages, store.pool.new()
    memory = torch.full((len(pages) + 1, len(pages[0].data) + 32), torch.nan, dtype=torch.bfloat16)
    places = random.Random(seed).sample(range(len(pages) + 1), len(pages))
    moved = [memory[at, 32:].copy_(page.data) for at, page in zip(places, pages, strict=True)]
    other.attach([[*map(Page, moved)]], store.length)
    other.pool.used += len(pages)
    return other


def attend(kernels, stores, query, prefix, paths, scaling, slots=None, **variations):
    """`[n, heads, value_dim]`: attention of `query` `[n, heads, key_dim]`, so many rows a store.

    `slots`: of the rows; None where each is the last that its row sees.
    """
    n, heads, _ = query.shape
    shape = stores[0][1].pool.shapes[0]
    program = Program(kernels)
    both = program.external("query", 0), program.external("out", heads * shape.value_dim)
    program.attend(*both, heads, shape, 0, scaling, **variations)
    out = torch.full((n, heads, shape.value_dim), torch.nan, dtype=torch.bfloat16)
    spans = [(count, store.table) for count, store in stores]
    if slots is None:
        slots = [path[-1] if path else seen - 1 for seen, path in zip(prefix, paths, strict=True)]
    rows = rows_of(spans, [0] * n, slots, prefix, paths)
    program.run(rows, {"query": reference.sort_queries(query, shape.kv_heads), "out": out})
    return out


def random_paths(rng, nodes, start):
    """Parents of a random tree behind `start` tokens; by node the orders from the root to it."""
    parents, paths = [-1], [[start]]
    for node in range(1, nodes):
        parent = rng.randrange(max(0, node - 12), node)
        parents.append(parent)
        paths.append([*paths[parent], start + node])
    return parents, paths
