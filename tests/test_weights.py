"""Products with weights of 8 and 4 bits: the kernels of every instruction set against plain integer
arithmetic, bit for bit."""

from functools import partial

import pytest
import torch

import quantised
from cases import refuses
from kernels import best_set, dependent_rows, every_set, linear, load, number
from quantised import quantise
from quickbeam.models.native import library
from quickbeam.models.native.quantised import INT4, INT8, Packed

WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 64]
SHAPES = [(64, 48), (32, 16), (34, 40), (96, 17), (160, 217), (2, 1), (290, 17), (576, 20)]
kinds = pytest.mark.parametrize("name", [INT8, INT4])


def uneven(outputs, inputs):
    """Weights of many sizes, with a row of zeros and one huge number."""
    sizes = torch.randint(-9, 3, (outputs, 1), generator=torch.Generator().manual_seed(2))
    weight = number(outputs, inputs, seed=1) * 2.0**sizes
    if outputs > 4:
        weight[3] = 0
        weight[4, inputs // 2] = 1e4
    return weight


def rows(n, inputs):
    """Rows of many sizes: one of zeros, one huge number, tiny ones, a row of equal ones."""
    x = number(n, inputs, seed=3)
    for row, change in enumerate((0.0, 1e30, 1e-35)):
        if n > row + 1:
            x[row + 1] *= change
    x[-1, 0] = 3e4
    if n > 8:
        x[5], x[6] = 1.0, x[6].abs()
    return x


@every_set
@kinds
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_weights_and_products_are_those_of_the_reference(isa, name, inputs, outputs):
    kernels, weight = load(isa), uneven(outputs, inputs)
    packed, wanted = Packed(kernels, [weight], name=name), quantise(weight, name)
    assert torch.equal(packed.dense(), wanted.dense[:, :inputs])
    assert torch.equal(packed.rows(), wanted.dense[:, :inputs].bfloat16())
    for n in WIDTHS:
        x = rows(n, inputs)
        assert torch.equal(linear(kernels, packed, x), quantised.product(x, wanted)), n


@every_set
@kinds
@pytest.mark.parametrize("epilogue", [library.STORE, library.GATED])
def test_rows_do_not_depend_on_others_or_threads(isa, name, epilogue, threads):
    weights = [uneven(217, 96)] + [number(217, 96, seed=4)] * (epilogue == library.GATED)
    bias = number(217 * len(weights), like=torch.float32, seed=5)
    packed = Packed(load(isa), weights, bias, name=name, gated=epilogue == library.GATED)
    product = partial(linear, load(isa), packed, epilogue=epilogue)
    assert dependent_rows(product, rows(64, 96)) == 0
    x = rows(40, 96)
    threads(1)
    alone = product(x)
    threads(3)
    assert torch.equal(product(x), alone)
    x = number(9, 96, seed=6)
    both = zip(weights, bias.view(-1, 217), strict=True)
    right, *up = (quantised.product(x, quantise(one, name)) + part for one, part in both)
    if up:
        right = torch.nn.functional.silu(right) * up[0]
        torch.testing.assert_close(product(x), right, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(product(x), right)


def test_one_scale_for_all_rows_is_seen():
    """The usual way, a scale a call, makes a row depend on its neighbours."""
    weight = quantise(uneven(40, 64), INT8)

    def mistaken(x):
        scale = x.float().abs().max() / 127
        return (x.float() / scale).round() @ weight.dense.T * scale

    assert dependent_rows(mistaken, rows(64, 64)) > 1000
    assert dependent_rows(lambda x: quantised.product(x, weight), rows(64, 64)) == 0


@every_set
@kinds
def test_the_largest_sums_do_not_saturate(isa, name):
    weight = torch.ones(32, 4096, dtype=torch.bfloat16)
    weight[16:] = -1
    weight[::2, ::32] = 0  # int4 has a span then
    x = torch.ones(9, 4096, dtype=torch.bfloat16)
    x[3], x[4, ::2], x[5, 1::2] = -1, -1, -1
    packed = Packed(load(isa), [weight], name=name)
    assert torch.equal(linear(load(isa), packed, x), quantised.product(x, quantise(weight, name)))


@pytest.mark.parametrize("signed", [False, True])
def test_weights_of_sixteen_levels_keep_them(signed):
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (40, 6, 32), generator=generator)
    levels[..., 0], levels[..., 1] = 0, 15
    step = torch.rand(40, 6, 1, generator=generator) * 0.01 + 0.001
    low = -step * (8 if signed else 15 * torch.rand(40, 6, 1, generator=generator))
    weight = levels * step.half().float() + low.half().float()
    got = quantise(weight.flatten(1).bfloat16(), INT4)
    assert torch.equal(got.values.long(), levels)
    torch.testing.assert_close(got.scales.float(), step[..., 0], rtol=4e-3, atol=0)


@best_set
@kinds
def test_weights_that_are_not_finite_are_refused(isa, name):
    for value in (torch.nan, torch.inf, -torch.inf):
        weight = number(40, 64)
        weight[39, 63] = value
        refuses(r"not finite .* leave weights out", quantise, weight, name)
        refuses(r"not finite .* leave weights out", Packed, load(isa), [weight], name=name)
