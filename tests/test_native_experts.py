"""Experts on the native kernels: what each row gets, and that it gets it whatever the other rows
chose. On every instruction set that the machine runs."""

import functools
from dataclasses import replace

import pytest
import torch

from cases import few
from kernels import SETS, best_set, dependent_rows, every_set, load, number, plain_rows
from models import tiny
from quickbeam.models.compile.compiler import SmallParameters, StackCompiler
from quickbeam.models.compile.experts import add_experts, scoring
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import FLOAT32, Packer
from quickbeam.models.opening import make_model
from quickbeam.models.rotary import AngleTable
from quickbeam.models.stack import Experts, FeedForward, Linear, Norm, ParameterRows, Routing, Stack
from quickbeam.models.torch.feed_forward import Router
from quickbeam.models.torch.parts import Reader
from quickbeam.models.weights.parameters import rows_of
from target import Target
from test_families import CONFIGS
from test_native_bits import text, wrong_rows

pytestmark = pytest.mark.usefixtures("threads")
MODELS = ("qwen2_moe", "deepseek_v3", "gemma4-experts")  # shared, latent, beside
INPUTS, INNER, COUNT, ROWS = 64, 24, 12, 40
FORMATS = ("float32", "bfloat16", "int8", "int4")
RULE = Routing(Linear((ParameterRows("router"),)), 3, renormalised=True)


def parameters():
    """Weights large enough that experts and their weights matter."""
    shapes = {
        "router": (COUNT, INPUTS),
        "gate_up": (COUNT, 2 * INNER, INPUTS),
        "gate_up_bias": (COUNT, 2 * INNER),
        "down": (COUNT, INPUTS, INNER),
        "down_bias": (COUNT, INPUTS),
        "shared_gate": (40, INPUTS),
        "shared_up": (40, INPUTS),
        "shared_down": (INPUTS, 40),
        "scale": (1, INPUTS),
    }
    made = {name: number(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {name: (one * (0.2 if one.dim() > 1 else 0.5)).float() for name, one in made.items()}


def router(routing):
    reader = Reader(parameters().__getitem__, torch.device("cpu"), torch.float32)
    return Router(routing, reader)


def one(i, activation):
    names = ("gate_up", "gate_up_bias")
    up, bias = (tuple(ParameterRows(name, k, 2, expert=i) for k in (0, 1)) for name in names)
    down = Linear((ParameterRows("down", expert=i),), (ParameterRows("down_bias", expert=i),))
    return FeedForward(Linear(up, bias), down, activation, True, limit=1.5, slope=1.7)


def experts(activation="silu"):
    chosen = tuple(one(i, activation) for i in range(COUNT))
    up = Linear((ParameterRows("shared_gate"), ParameterRows("shared_up")))
    beside = FeedForward(up, Linear((ParameterRows("shared_down"),)), activation, True, 1.5, 1.7)
    return Experts(RULE, chosen, beside, Linear((ParameterRows("scale"),)))


def by_kernels(isa, of, name):
    """`[n, INPUTS]` to `[n, INPUTS]` float32."""
    kernels, numbers, wide = load(isa), parameters(), name == "float32"
    pack = Packer(kernels, name)

    @functools.cache
    def place(linear):
        weights = [rows_of(part, numbers[part.name]) for part in linear.weights]
        bias = [rows_of(part, numbers[part.name]) for part in linear.biases]
        return pack.pack(weights, torch.cat(bias) if bias else None, len(weights) == 2)

    program, dtype = Program(kernels), torch.float32 if wide else torch.bfloat16
    source, target = program.external("x", INPUTS, wide), program.external("y", INPUTS, True)
    stack = Stack("", "", (), Norm((), 0.0), scoring(of))
    read = SmallParameters(numbers.__getitem__, kernels, wide)
    pages, angles = PagePool([], kernels, None, dtype), AngleTable(None, stack)
    compiler = StackCompiler(program, stack, place, read, pages, angles, INPUTS, wide)
    add_experts(compiler, of, source, target)

    def run(x):
        y = torch.full((len(x), INPUTS), torch.nan)
        x = x.to(torch.float32 if wide else torch.bfloat16).contiguous()
        program.run(plain_rows(len(x)), {"x": x, "y": y})
        return y

    run.compiler = compiler  # keeps what the program reads
    return run


@best_set
@pytest.mark.parametrize("activation", ["silu", "clamped"])
def test_every_format_comes_near_what_float32_computes(isa, activation):
    of, x = experts(activation=activation), number(ROWS, INPUTS).float()
    right = by_kernels(isa, of, "float32")(x)
    for name, most in zip(FORMATS[1:], (0.02, 0.03, 0.3), strict=True):
        assert 0 < (by_kernels(isa, of, name)(x) - right).abs().max() / right.abs().max() < most


@every_set
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_what_others_chose(isa, name):
    assert dependent_rows(by_kernels(isa, experts(), name), number(ROWS, INPUTS)) == 0


@pytest.mark.parametrize(
    ("isa", "count"),
    few([(isa, count) for isa in SETS for count in (2, 3)], [(SETS[0], 2), (SETS[-1], 3)]),
)
def test_a_row_does_not_depend_on_threads(isa, count, threads):
    x = number(ROWS, INPUTS)
    for name in FORMATS:
        run = by_kernels(isa, experts(), name)
        threads(1)
        alone = run(x), run(x[:1])
        threads(count)
        assert all(map(torch.equal, (run(x), run(x[:1])), alone))


@best_set
def test_experts_summed_in_order_of_arrival_are_seen(isa):
    """The same products, added as the rows of a pass bring their experts up."""
    of = replace(experts(), shared=None, shared_gate=None)
    route = router(of.routing)
    first = replace(of.routing, top=1)
    alone = [replace(of, candidates=(feed,) * COUNT, routing=first) for feed in of.candidates]
    parts = [by_kernels(isa, one, FLOAT32) for one in alone]

    def run(x, by_number):
        # row by row, as PyTorch's products depend on the number of rows
        routes = [route(row) for row in x.float()[:, None]]
        weight, expert = (torch.cat(part) for part in zip(*routes, strict=True))
        order = sorted(set(expert.flatten().tolist())) if by_number else expert.flatten().tolist()
        total = torch.zeros(len(x), INPUTS)
        for number_of in dict.fromkeys(order):
            rows, place = torch.where(expert == number_of)
            total[rows] += weight[rows, place, None] * parts[number_of](x[rows])
        return total

    every = number(ROWS, INPUTS)
    assert dependent_rows(lambda x: run(x, by_number=False), every) > 100
    assert dependent_rows(lambda x: run(x, by_number=True), every) == 0


@best_set
def test_experts_read_are_counted_and_a_row_that_is_not_finite_spoils_no_other(isa):
    run, x, of = by_kernels(isa, experts(), "float32"), number(ROWS, INPUTS).float(), experts()
    for rows in (1, 3, ROWS):
        run(x[:rows])
        _, expert = router(of.routing)(x[:rows])
        (struct,) = run.compiler.experts
        assert struct.read == len(expert.unique())
    x = number(8, INPUTS)
    run = by_kernels(isa, experts(), "bfloat16")
    right = run(x)
    x[3] = torch.nan
    got, others = run(x), [0, 1, 2, 4, 5, 6, 7]
    assert got[3].isnan().all() and torch.equal(got[others], right[others])


@pytest.mark.parametrize(
    ("isa", "weights", "name"),
    few(
        [(isa, weights, name) for isa in SETS for weights in FORMATS[1:] for name in MODELS],
        [(isa, FORMATS[1 + i % 3], name) for i, isa in enumerate(SETS) for name in MODELS],
    ),
)
def test_a_tree_gives_the_bits_of_one_token_at_a_time(isa, weights, name, native):
    native(isa)
    target = Target(make_model(tiny("", torch.bfloat16, config=CONFIGS[name]), weights=weights))
    assert wrong_rows(target, text(78), 52) == 0
