"""The native kernels in float32: against their references, and a row's bits whatever else is in the
pass. On every instruction set that the machine runs."""

import random
from functools import partial

import pytest
import torch

import reference
from interpreter import ACTIVATIONS
from kernels import (
    chain_rows,
    every_set,
    linear,
    load,
    number,
    plain_rows,
    random_paths,
    rows_of,
    rows_that_depend_on_others,
)
from quickbeam.models.native import library
from quickbeam.models.native.operands import KVShape
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import Packed
from quickbeam.models.pages import PagePool

FLOAT = torch.float32


@every_set
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 5), (33, 40), (64, 100), (161, 217)])
def test_products_are_right_and_rows_do_not_depend_on_others(isa, inputs, outputs):
    kernels = load(isa)
    x, weight = number(128, inputs, like=FLOAT), number(outputs, inputs, like=FLOAT, seed=1)
    packed = Packed(kernels, [weight], name="float32")
    assert torch.equal(packed.rows(), weight)
    product = partial(linear, kernels, packed)
    assert (product(x) - reference.linear(x, weight)).abs().max() < 3e-7 * inputs + 2e-6
    assert rows_that_depend_on_others(product, x) == 0


@every_set
@pytest.mark.parametrize("activation", ACTIVATIONS)  # others are for experts and gates alone
@pytest.mark.parametrize("gated", [False, True])
def test_activations(isa, activation, gated):
    x, weights = number(5, 24, like=FLOAT) * 3, [number(40, 24, like=FLOAT, seed=i) for i in (1, 2)]
    packed = Packed(load(isa), weights[: 1 + gated], gated=gated, name="float32")
    epilogue = library.GATED if gated else library.ACTIVATE
    y = linear(load(isa), packed, x, epilogue, activation=activation)
    right = ACTIVATIONS[activation](reference.linear(x, weights[0]))
    if gated:
        right = right * reference.linear(x, weights[1])
    assert ((y - right).abs() <= 2e-6 * (1 + right.abs()) * (30 if gated else 3)).all()
    assert right.abs().max() > 5


@every_set
@pytest.mark.parametrize("add", [None, 0.5])
def test_layer_norms(isa, add):
    program, x, y = Program(load(isa)), number(7, 45, like=FLOAT) + 3, torch.ones(7, 45)
    weight, bias = number(45, like=FLOAT, seed=1), number(45, like=FLOAT, seed=2)
    named = program.given("x", 45, True), program.given("y", 45, True)
    program.norm(*named, weight, 1e-5, bias=bias, centred=True, add=add)
    program.run(plain_rows(7), {"x": x, "y": y})
    right = torch.nn.functional.layer_norm(x.double(), (45,), weight.double(), bias.double(), 1e-5)
    assert (y - (right if add is None else 1 + add * right)).abs().max() < 3e-6


def attend(kernels, store, qkv, rows, window):
    """HEADS without angles, then ATTEND."""
    shape, heads = store.pool.shapes[0], 4
    program, out = Program(kernels), torch.empty(len(qkv), heads * shape.value_dim)
    query = program.buffer(heads * shape.key_dim, True)
    program.heads(program.given("qkv", qkv.shape[1], True), query, heads, shape, 0, rotary=0)
    target = program.given("out", heads * shape.value_dim, True)
    program.attend(query, target, heads, shape, 0, 0.3, window)
    angles = torch.zeros(1, 1)
    program.run(rows, {"qkv": qkv.contiguous(), "out": out}, (angles, angles))
    return out


@every_set
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_a_trees_rows_have_the_bits_of_their_paths(isa, length, window):
    kernels, rng, dim, nodes = load(isa), random.Random(length), 24, 21
    shape = KVShape(2, dim, dim)
    pool = PagePool([shape], kernels, dtype=FLOAT)
    qkv = number(length + nodes, 8 * dim, like=FLOAT)
    _, paths = random_paths(rng, nodes, length)
    tree = pool.new()
    attend(kernels, tree, qkv[:length], chain_rows(tree, [0] * length), window)
    tree.length = length
    tree.reserve(length + nodes)
    orders, spans = range(length, length + nodes), [(nodes, tree.table)]
    rows = rows_of(spans, [0] * nodes, orders, [length] * nodes, paths)
    got = attend(kernels, tree, qkv[length:], rows, window)
    for node in (0, 1, nodes // 2, nodes - 1):
        path, one = paths[node], pool.new()
        for tokens in ([*range(length)], *([token] for token in path)):
            alone = attend(kernels, one, qkv[tokens], chain_rows(one, tokens), window)
            one.length += len(tokens)
        assert torch.equal(got[node], alone[-1]), node
        seen = torch.tensor([*range(length), *path])
        every = qkv[seen].view(len(seen), 8, dim).double()
        key, value = every[:, 4:6].repeat_interleave(2, 1), every[:, 6:].repeat_interleave(2, 1)
        score = torch.einsum("hd,thd->ht", every[-1, :4], key) * 0.3
        score[:, : max(0, len(seen) - (window or len(seen)))] = -torch.inf
        right = torch.einsum("ht,thd->hd", score.softmax(-1), value).flatten()
        assert (got[node] - right).abs().max() < 1e-5
