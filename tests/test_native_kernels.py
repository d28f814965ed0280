"""Every operation of the native kernels against its plain reference, on every instruction set that
the machine runs."""

import itertools
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels as helpers
import reference
from cases import examples, refuses
from kernels import best_set, dependent_rows, every_set, filled, linear, load, number
from quickbeam.models.native import library
from quickbeam.models.native.operands import KVShape, plain_rows
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BFLOAT16, INT4, INT8, Packed

NAN, INF = torch.nan, torch.inf
SINGLE, HALF = 2.0**-23, 2.0**-8  # twice the rounding of float32 and of bfloat16
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 64, 65, 100, 128]
INPUTS = [2, 4, 6, 30, 32, 34, 64, 66, 96, 128, 160, 254]
OUTPUTS = [1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 40, 48, 63, 100, 130, 257]
EPILOGUES = ("store", "add", "gated", "activate", "best")
cases = examples(40, derandomize=True)


def within(got, wanted, allowed):
    """Hold `got` to `wanted`, each number to its own tolerance."""
    assert got.shape == wanted.shape
    if got.dtype is torch.bfloat16:
        allowed = allowed + HALF * wanted.abs()
    wrong = ~((got.double() - wanted).abs() <= allowed)  # NaN is wrong
    if wrong.any():
        at = tuple(wrong.nonzero()[0])
        first = f"{int(wrong.sum())} wrong; at {[*map(int, at)]} {got[at]} for {wanted[at]}"
        raise AssertionError(f"{first}, ±{allowed[at]}")


class Framed:
    """Columns of a wider buffer, whose other numbers an operation must leave alone."""

    def __init__(self, inner, column, beyond, around):
        n, width = inner.shape
        self.around, self.column, self.width = around, column, width
        self.whole = torch.full((n + 1, column + width + beyond), around, dtype=inner.dtype)
        self.whole[:n, column : column + width] = inner

    @property
    def stride(self):
        return self.whole.shape[1]

    def read(self):
        """What is in the columns; fails where anything around them has changed."""
        inside = self.whole[:-1, self.column : self.column + self.width]
        inner = inside.clone()
        inside.fill_(self.around)
        around = torch.full_like(self.whole, self.around)
        assert torch.equal(self.whole.nan_to_num(7.0), around.nan_to_num(7.0))
        return inner


def sums_of(x, weight, bias):
    """Sums of the products' sizes: what the rounding of a product is proportional to."""
    return reference.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())


@every_set
@pytest.mark.parametrize("epilogue", EPILOGUES)
@cases
@given(
    n=st.sampled_from(WIDTHS),
    inputs=st.sampled_from(INPUTS),
    outputs=st.sampled_from(OUTPUTS),
    float32=st.booleans(),
    biased=st.booleans(),
    gathered=st.booleans(),
    of=st.sampled_from([0, 1, 16, 33]),
    column=st.sampled_from([0, 1, 16, 33]),
    seed=st.integers(0, 99),
)
def test_a_product_and_what_comes_after_it(
    isa, epilogue, n, inputs, outputs, float32, biased, gathered, of, column, seed
):
    kernels, what = load(isa), getattr(library, epilogue.upper())
    gated, float32 = epilogue == "gated", float32 or epilogue == "add"
    x = number(n, inputs, seed=seed)
    weights = [number(outputs, inputs, seed=seed + i) / inputs**0.5 for i in range(1, 2 + gated)]
    bias = number(outputs * len(weights), like=torch.float32, seed=seed + 3) if biased else None
    before = number(n, outputs, like=torch.float32 if float32 else torch.bfloat16, seed=seed + 4)
    source, target = Framed(x, of, 3, NAN), Framed(before, column, 5, 9.0)
    best = torch.full((n + 1,), 77)
    program = Program(kernels)
    place = program.external("best", 1)
    named = program.external("x", source.stride), program.external("y", target.stride, float32)
    places = dict(source_column=of, column=column, gathered=gathered)
    places["best"] = place if epilogue == "best" else None
    program.linear(Packed(kernels, weights, bias, gated=gated), *named, what, **places)
    # where rows were gathered, others there are count for nothing
    rows = plain_rows(n + 2, range(n)) if gathered else plain_rows(n)
    program.run(rows, {"x": source.whole, "y": target.whole, "best": best})
    got = target.read()
    halves = [None, None] if bias is None else bias.chunk(len(weights))
    rounding = (inputs + 4) * SINGLE
    allowed = rounding * sums_of(x, weights[0], halves[0])
    if gated:
        wanted = reference.gated(x, *weights, bias)
        up = reference.linear(x, weights[1], halves[1])
        gate = reference.activate(x, weights[0], halves[0])
        allowed = 1.1 * allowed * up.abs() + 4 * SINGLE * wanted.abs()
        allowed += rounding * sums_of(x, weights[1], halves[1]) * gate.abs()
    elif epilogue == "add":
        wanted = reference.add(before, x, weights[0], bias)
        allowed = allowed + SINGLE * (wanted.abs() + before.double().abs())
    elif epilogue == "activate":
        wanted = reference.activate(x, weights[0], bias)
        allowed = 1.1 * allowed + 8 * SINGLE * wanted.abs()
    else:
        wanted = reference.linear(x, weights[0], bias)
    within(got, wanted, allowed)
    if epilogue == "best":
        if float32:
            assert torch.equal(best[:n], reference.best(got))
        least = wanted.amax(1, True) - 2 * allowed.amax(1, True)
        assert bool((wanted.gather(1, best[:n, None]) >= least).all()) and best[n] == 77


@every_set
@pytest.mark.parametrize("inputs", [64, 66])
def test_a_wrong_product_is_seen(isa, inputs):
    kernels, x, weight = load(isa), number(5, inputs), number(40, inputs, seed=1)
    y = linear(kernels, weight, x)
    allowed = (inputs + 4) * SINGLE * sums_of(x, weight, None)
    within(y, reference.linear(x, weight), allowed)
    with pytest.raises(AssertionError, match="200 wrong"):
        within(y, reference.linear(x.roll(1, 0), weight), allowed)
    weight[39, inputs - 1] += 1
    refuses("5 wrong", within, y, reference.linear(x, weight), allowed, error=AssertionError)


@every_set
@pytest.mark.parametrize("name", [BFLOAT16, INT8, INT4])
@pytest.mark.parametrize("n", [1, 2, 9, 17, 40, 128])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 37), (34, 100)])
def test_what_is_not_finite_stays_in_its_row(isa, n, inputs, outputs, name):
    kernels, rng, x = load(isa), random.Random(n), number(n, inputs)
    weight = Packed(kernels, [number(outputs, inputs, seed=1)], name=name)
    bad = {row: rng.choice([NAN, INF, -INF]) for row in range(0, n, 3)}
    whole, best = helpers.largest(kernels, weight, x)
    assert torch.equal(best, reference.best(whole)) and bool((best >= 0).all())
    for row, value in bad.items():
        x[row, rng.randrange(inputs)] = value
    y, best = helpers.largest(kernels, weight, x)
    fine = [row for row in range(n) if row not in bad]
    assert torch.equal(y[fine], whole[fine]) and torch.equal(best, reference.best(y))
    assert not bool(y[list(bad)].isfinite().any()) and best[list(bad)].tolist() == [-1] * len(bad)


@every_set
@pytest.mark.parametrize("outputs", [5, 16, 40, 300])
def test_the_best_is_the_first_of_equal_ones_and_minus_one_where_logits_are_bad(isa, outputs):
    kernels, rng, inputs = load(isa), random.Random(outputs), 64
    logits = number(64, outputs)
    for row in range(40):  # two or three equal ones, some of them all equal
        for place in rng.sample(range(outputs), min(outputs, 3)) if row < 36 else range(outputs):
            logits[row, place] = 5.0 if row % 2 else -0.0
        if row % 2 == 0 and row < 36:
            logits[row] = -logits[row].abs()
    bad = {40: (NAN,), 41: (INF,), 42: (NAN, INF), 43: (-INF,), 44: (NAN, -INF)}
    for row, values in bad.items():
        for value in values:
            logits[row, rng.randrange(outputs)] = value
    logits[45], logits[46, outputs - 1], logits[47, 0] = -INF, NAN, NAN
    # A product with a row of the identity is a column of the weight; a bias brings in what is not
    # finite.
    one = torch.zeros(1, inputs, dtype=torch.bfloat16)
    one[0, 0] = 1
    for row, wanted in enumerate(logits.float()):
        finite = wanted.isfinite()
        weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16)
        weight[:, 0] = wanted.masked_fill(~finite, 0)
        bias = torch.zeros(outputs).masked_scatter_(~finite, wanted[~finite])
        y, best = helpers.largest(kernels, Packed(kernels, [weight], bias), one)
        assert torch.equal(y[0].nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert best.item() == reference.best(wanted[None]).item(), row
    assert reference.best(logits.float())[[40, 41, 42, 44, 45, 46, 47]].tolist() == [-1] * 7


@every_set
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_best_of_all_threads_is_the_first(isa, count, threads):
    x = torch.ones(6, 32, dtype=torch.bfloat16)
    weight = torch.ones(4000, 32, dtype=torch.bfloat16)
    weight[37::211] = 2.0
    x[4, 0], x[5, 0] = NAN, INF
    threads(count)
    for _ in range(20):  # a thread takes what another one has left, another time something else
        _, best = helpers.largest(load(isa), weight, x)
        assert best.tolist() == [37, 37, 37, 37, -1, -1]


@best_set
@pytest.mark.parametrize("count", [2, 3, 16])
def test_threads_that_take_from_one_another_do_each_piece_once(isa, count, threads):
    kernels, x = load(isa), torch.ones(1, 32, dtype=torch.bfloat16)
    packed, program = (
        Packed(kernels, [torch.ones(4000, 32, dtype=torch.bfloat16)]),
        Program(kernels),
    )
    named = program.external("x", 32), program.external("y", 4000, True)
    for _ in range(50):
        program.linear(packed, *named, library.ADD)
    threads(count)
    for _ in range(20):
        y = torch.zeros(1, 4000)
        program.run(plain_rows(1), {"x": x, "y": y})
        assert bool((y == 50 * 32).all())


@every_set
@cases
@given(
    n=st.sampled_from(WIDTHS),
    width=st.integers(1, 140),
    weighted=st.booleans(),
    floats=st.tuples(st.booleans(), st.booleans()),
    gather=st.booleans(),
    of=st.integers(0, 20),
    column=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_a_norm(isa, n, width, weighted, floats, gather, of, column, seed):
    kernels, rng = load(isa), random.Random(seed)
    of_input, of_output = ((torch.bfloat16, torch.float32)[wide] for wide in floats)
    x = number(n, width, like=of_input, seed=seed) * 10.0 ** rng.randint(-4, 4)
    weight = number(width, seed=seed + 1) if weighted else None
    wanted = [rng.randrange(n) for _ in range(rng.randint(1, 5))] if gather else range(n)
    source = Framed(x, of, 2, NAN)
    target = Framed(torch.zeros(len(wanted), width, dtype=of_output), column, 2, 9.0)
    program = Program(kernels)
    given_x = program.external("x", source.stride, floats[0])
    given_y = program.external("y", target.stride, floats[1])
    places = dict(width=width, source_column=of, column=column, gather=gather)
    program.norm(given_x, given_y, weight, 1e-5, **places)
    program.run(
        plain_rows(n, tuple(wanted) if gather else ()), {"x": source.whole, "y": target.whole}
    )
    right = reference.norm(x[list(wanted)], weight, 1e-5)
    within(target.read(), right, 16 * SINGLE * right.abs())


@every_set
def test_what_is_not_finite_stays_in_a_norms_row_and_shows_in_attention(isa):
    kernels, x, y = load(isa), number(4, 33, like=torch.float32), torch.empty(4, 33)
    x[1, 32], x[2, 3] = NAN, INF
    program = Program(kernels)
    program.norm(program.external("x", 33, True), program.external("y", 33, True), None, 1e-5)
    program.run(plain_rows(4), {"x": x, "y": y})
    assert bool(y[[0, 3]].isfinite().all()) and bool(y[1].isnan().all()) and bool(y[2, 3].isnan())
    keys, values, query = number(1, 70, 16), number(1, 70, 16, seed=1), number(1, 2, 16, seed=2)
    keys[0, 40, 3] = NAN
    got = helpers.attend(load(isa), [(1, filled(load(isa), keys, values))], query, [70], [[]], 0.2)
    assert bool(got.isnan().all())


HEADS = [(1, 1), (2, 1), (4, 2), (3, 3), (8, 2), (9, 1), (30, 1)]
DIMS = [(dim, dim) for dim in (2, 6, 8, 20, 64, 80, 128)]  # of keys and values
DIMS += [(24, 5), (2, 33), (32, 16), (96, 72), (64, 128)]


@every_set
@cases
@given(
    n=st.sampled_from(WIDTHS),
    heads=st.sampled_from(HEADS),
    dim=st.sampled_from([2, 6, 8, 20, 32, 64, 80, 128]),
    normed=st.booleans(),
    of=st.integers(0, 5),
    start=st.integers(0, 100),
    seed=st.integers(0, 99),
)
def test_heads_are_normed_turned_and_kept(isa, n, heads, dim, normed, of, start, seed):
    kernels, rng, (all_heads, kv_heads) = load(isa), random.Random(seed), heads
    n = max(n, 2)
    shape, first = KVShape(kv_heads, dim, dim), rng.randint(1, n - 1)
    x = number(n, (all_heads + 2 * kv_heads) * dim, like=torch.float32, seed=seed)
    angle = number(n + start, dim // 2, like=torch.float32, seed=seed + 1)
    positions = [rng.randrange(n + start) for _ in range(n)]
    pool = PagePool([shape, shape], kernels)
    stores = [pool.new() for _ in range(2)]
    orders = []
    for store, count in zip(stores, (first, n - first), strict=True):
        store.reserve(start + count + 3)
        orders += rng.sample(range(start + count + 3), count)
    norms = (number(dim, seed=seed + 2), number(dim, seed=seed + 3)) if normed else None
    source, layer = Framed(x, of, 2, NAN), rng.randrange(2)
    query = torch.empty(n * all_heads * dim, dtype=torch.bfloat16)
    program = Program(kernels)
    named = program.external("x", 0, True), program.external("query", 0)
    program.heads(*named, all_heads, shape, stores[0].pool.offsets[layer], norms, 1e-5)
    program.set(0, source_stride=source.stride, source_offset=of)
    spans = [(first, stores[0].table), (n - first, stores[1].table)]
    rows = helpers.rows_of(spans, positions, orders, [0] * n, [()] * n)
    turns = angle.cos(), angle.sin()
    program.run(rows, {"x": source.whole, "query": query}, turns)
    turned = [part[positions] for part in turns]
    right = reference.heads(x, all_heads, kv_heads, *turned, norms, 1e-5)
    rounding = 32 * SINGLE * max(8.0, float(right[0].abs().max()), float(right[1].abs().max()))
    sorted_queries = reference.sort_queries(right[0], kv_heads)
    allowed = torch.full(sorted_queries.shape, rounding)
    within(query.view(sorted_queries.shape), sorted_queries, allowed)
    rooms = [-(-(start + count + 3) // pool.page) * pool.page for count in (first, n - first)]
    both = list(zip(stores, rooms, strict=True))
    kept, other = ([helpers.read(one, i, room) for one, room in both] for i in (layer, 1 - layer))
    for row, order in enumerate(orders):
        key, value = kept[row >= first]
        within(key[:, order], right[1][row], torch.full((kv_heads, dim), rounding))
        assert torch.equal(value[:, order], right[2][row].to(torch.bfloat16))
        key[:, order], value[:, order] = 0, 0
    # nothing went elsewhere
    assert not any(tensor.any() for pair in [*kept, *other] for tensor in pair)


@every_set
@cases
@given(
    dims=st.sampled_from(DIMS),
    start=st.integers(0, 200),
    nodes=st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_committed_nodes_move_to_their_place(isa, dims, start, nodes, seed):
    kernels, rng = load(isa), random.Random(seed)
    keys = number(2, start + nodes, dims[0], seed=seed)
    values = number(2, start + nodes, dims[1], seed=seed + 1)
    store = helpers.relocated(filled(kernels, keys, values, start), seed)
    path = [0, *sorted(rng.sample(range(1, nodes), rng.randint(0, nodes - 1)))]
    store.commit(path)
    orders = [*range(start), *(start + node for node in path)]
    assert store.length == len(orders)
    key, value = helpers.read(store, 0)
    assert torch.equal(key, keys[:, orders]) and torch.equal(value, values[:, orders])


def attention_error(query, keys, values, seen, scaling, **variations):
    """What rounding allows: weights are rounded to bfloat16, scores are sums in float32."""
    spread = reference.attend(query, keys, values.abs(), seen, scaling, **variations)
    scores = (query.double().abs().amax((0, 1)) * keys.double().abs().amax((0, 1))).sum() * scaling
    longest = max(len(orders) for orders in seen)
    return (HALF + SINGLE * (longest + 8 + (query.shape[2] + 8) * float(scores))) * spread + 1e-30


@st.composite
def scenes(draw):
    """Sequences, each with tokens in front and a random tree behind."""
    heads, kv_heads = draw(st.sampled_from(HEADS))
    starts = st.sampled_from([0, 1, 2, 15, 16, 31, 63, 64, 65, 127, 128, 200, 333])
    sequence = st.tuples(starts, st.sampled_from([1, 2, 3, 8, 9, 17, 40]))
    sequences = draw(st.lists(sequence, min_size=1, max_size=3))
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "dims": draw(st.sampled_from(DIMS)),
        "sequences": sequences,
        "window": draw(st.sampled_from([None, None, 1, 2, 7, 64, 100])),
        "softcap": draw(st.sampled_from([None, None, 3.0, 50.0])),
        "sinks": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
        "loud": draw(st.sampled_from([1.0, 1.0, 8.0])),  # how far apart scores are
        "seed": draw(st.integers(0, 999)),
    }


@every_set
@examples(60, derandomize=True)
@given(scene=scenes())
def test_attention(isa, scene):
    kernels, rng, (dim, value_dim) = load(isa), random.Random(scene["seed"]), scene["dims"]
    scaling, seed = scene["loud"] * dim**-0.5, scene["seed"]
    sinks = number(scene["heads"], like=torch.float32, seed=seed) if scene["sinks"] else None
    variations = {"window": scene["window"], "softcap": scene["softcap"], "sinks": sinks}
    whole = {"bidirectional": scene["bidirectional"]}
    prefix, paths, stores, kept = list[int](), list[list[int]](), [], []
    for i, (start, nodes) in enumerate(scene["sequences"]):
        keys = number(scene["kv_heads"], start + nodes, dim, seed=seed + i)
        values = number(scene["kv_heads"], start + nodes, value_dim, seed=-seed - i)
        store = helpers.relocated(filled(kernels, keys, values, start), i)
        if rng.random() < 0.5 and not scene["bidirectional"]:
            prefix += [start] * nodes
            paths += helpers.random_paths(rng, nodes, start)[1]
        else:
            prefix += range(start + 1, start + nodes + 1)
            paths += [[]] * nodes
        stores.append((nodes, store))
        kept.append((keys, values))
    query = number(len(prefix), scene["heads"], dim, seed=seed + 7)
    got = helpers.attend(kernels, stores, query, prefix, paths, scaling, **variations, **whole)
    first, window = 0, scene["window"] or 10**6
    for (nodes, _), (keys, values) in zip(stores, kept, strict=True):
        mine = slice(first, first + nodes)
        seen = [reference.visible(*row) for row in zip(prefix[mine], paths[mine], strict=True)]
        if scene["bidirectional"]:  # windows begin where they do without that
            seen = [[*range(max(0, own - window), prefix[mine][-1])] for own in prefix[mine]]
            variations["window"] = None
        given = query[mine], keys, values, seen, scaling
        right = reference.attend(*given, **variations)
        within(got[mine], right, attention_error(*given, **variations))
        first += nodes


@every_set
def test_rows_of_an_image_see_none_behind_themselves_in_a_causal_layer(isa):
    kernels, rng, start, rows, nodes = load(isa), random.Random(0), 60, 20, 9
    stores = []
    for count in (rows, nodes):
        keys, values = number(2, 90, 8, seed=count), number(2, 90, 8, seed=-count)
        stores.append((count, filled(kernels, keys, values, start)))
    query = number(rows + nodes, 4, 8, seed=2)
    _, tree = helpers.random_paths(rng, nodes, start)
    paths, behind = [[]] * rows + tree, [start] * nodes
    slots = [*range(start, start + rows), *(path[-1] for path in tree)]

    def attended(prefix, **kind):
        prefix += behind
        return helpers.attend(kernels, stores, query, prefix, paths, 8**-0.5, slots, **kind)

    causal = attended([*range(start + 1, start + rows + 1)])
    assert torch.equal(attended([start + rows] * rows, causal=True), causal)
    assert not torch.equal(attended([start + rows] * rows), causal)


@every_set
def test_wrong_attention_is_seen(isa):
    kernels, keys, values = load(isa), number(2, 90, 8), number(2, 90, 8, seed=1)
    store, query, scaling = filled(kernels, keys, values, 70), number(1, 4, 8, seed=2), 8**-0.5
    got = helpers.attend(kernels, [(1, store)], query, [70], [[70, 72, 75]], scaling, window=60)
    for path, window in (([70, 72, 75], 60), ([70, 73, 75], 60), ([72, 75], 60), ([70, 72, 75], 0)):
        wrong = (path, window) != ([70, 72, 75], 60)
        seen = [reference.visible(70, path)]
        right = reference.attend(query, keys, values, seen, scaling, window=window)
        allowed = attention_error(query, keys, values, seen, scaling, window=window)
        with pytest.raises(AssertionError, match="wrong") if wrong else nullcontext():
            within(got, right, allowed)


@every_set
@pytest.mark.parametrize("value_dim", [8, 20])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_tokens_that_are_not_finite_reach_only_rows_that_see_them(isa, value_dim, bad):
    kernels, rng, start, nodes = load(isa), random.Random(0), 75, 40
    keys = number(2, 150, 32)
    values = number(2, 150, value_dim, seed=1)
    query = number(nodes, 4, 32, seed=2)
    _, paths = helpers.random_paths(rng, nodes, start)

    def attended():
        stores = [(nodes, filled(kernels, keys, values, start))]
        return helpers.attend(kernels, stores, query, [start] * nodes, paths, 0.2)

    whole = attended()
    hurt = {start + node for node in range(1, nodes, 4)}
    for order in [*hurt, *range(start + nodes, 150)]:
        keys[:, order, rng.randrange(32)] = bad
        values[:, order, rng.randrange(value_dim)] = bad
    got = attended()
    clean = [node for node in range(nodes) if not hurt & set(paths[node])]
    assert 4 < len(clean) < nodes - 4
    assert torch.equal(got[clean], whole[clean])
    query[3:11, 1, 5] = bad
    again = attended()
    others = [node for node in clean if not 3 <= node < 11]
    assert torch.equal(again[others], whole[others]) and bool(again[3:11, 1].isnan().all())
    assert torch.equal(again[clean][:, [0, 2, 3]], whole[clean][:, [0, 2, 3]])


@every_set
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 5), (33, 40), (64, 100), (161, 217)])
def test_products_are_right_and_rows_do_not_depend_on_others(isa, inputs, outputs):
    kernels = load(isa)
    x, weight = (number(n, inputs, like=torch.float32, seed=n) for n in (128, outputs))
    packed = Packed(kernels, [weight], name="float32")
    assert torch.equal(packed.rows(), weight)
    product = partial(linear, kernels, packed)
    assert (product(x) - reference.linear(x, weight)).abs().max() < 3e-7 * inputs + 2e-6
    assert dependent_rows(product, x) == 0


@every_set
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activations(isa, activation, gated):
    x = number(5, 24, like=torch.float32) * 3
    weights = [number(40, 24, like=torch.float32, seed=i) for i in (1, 2)]
    packed = Packed(load(isa), weights[: 1 + gated], gated=gated, name="float32")
    epilogue = library.GATED if gated else library.ACTIVATE
    y = linear(load(isa), packed, x, epilogue, activation=activation)
    right = reference.ACTIVATIONS[activation](reference.linear(x, weights[0]))
    if gated:
        right = right * reference.linear(x, weights[1])
    assert ((y - right).abs() <= 2e-6 * (1 + right.abs()) * (30 if gated else 3)).all()
    assert right.abs().max() > 5


@every_set
def test_xielu(isa):
    x, weight = (number(n, 24, like=torch.float32, seed=n) for n in (5, 40))
    packed = Packed(load(isa), [weight], name="float32")
    factors = {"scaling": 0.9, "softcap": 1.4}
    y = linear(load(isa), packed, x, library.ACTIVATE, activation="xielu", **factors)
    inner = reference.linear(x, weight)
    below = 1.4 * (torch.expm1(inner.clamp(max=0)) - inner.clamp(max=0))
    right = 0.9 * inner.clamp(min=0).square() + below + 0.5 * inner
    assert ((y - right).abs() <= 1e-5 * (1 + right.abs())).all()
    assert right.max() > 5 and right.min() < -0.1


@every_set
@pytest.mark.parametrize("add", [None, 0.5])
def test_layer_norms(isa, add):
    program, x, y = Program(load(isa)), number(7, 45, like=torch.float32) + 3, torch.ones(7, 45)
    weight, bias = number(45, like=torch.float32, seed=1), number(45, like=torch.float32, seed=2)
    named = program.external("x", 45, True), program.external("y", 45, True)
    program.norm(*named, weight, 1e-5, bias=bias, centred=True, add=add)
    program.run(plain_rows(7), {"x": x, "y": y})
    right = torch.nn.functional.layer_norm(x.double(), (45,), weight.double(), bias.double(), 1e-5)
    assert (y - (right if add is None else 1 + add * right)).abs().max() < 3e-6


@every_set
@pytest.mark.parametrize(("taps", "group", "add"), [(2, 5, False), (3, 1, True), (6, 20, True)])
def test_rows_of_a_block_are_convolved_with_those_before_them(isa, taps, group, add):
    kernels, (blocks, size, width) = load(isa), (3, 4, 20)
    x = number(blocks * size, width, like=torch.float32 if add else torch.bfloat16, seed=1)
    base, own = number(taps, width, like=torch.float32), 2 * taps * width // group
    shared = number(blocks * size, own, like=torch.float32, seed=2)
    found = number(blocks * size, width, like=x.dtype, seed=3)
    coefficients = shared[:, own // 2 :].unflatten(-1, (taps, -1)).repeat_interleave(group, -1)
    right = found.double() * add
    for row, behind in itertools.product(range(blocks * size), range(taps)):
        if behind <= row % size:
            by = (base[behind] + coefficients[row, behind]).double()
            right[row] += by * x[row - behind].double()
    program = Program(kernels)
    given = [program.external(*one) for one in (("x", width, add), ("y", width, add))]
    key = program.external("shared", own, True)
    program.convolve(*given, base, key, own // 2, group=group, block=size, add=add)
    program.run(plain_rows(blocks * size), {"x": x, "y": found, "shared": shared})
    within(found, right, 20 * SINGLE * right.abs() + 1e-5)
