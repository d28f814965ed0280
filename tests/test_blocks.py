"""Blocks of files: the numbers that they stand for, bit for bit, and products with them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kernels import best_set, every_set, load, plain_rows
from quantised import ByEight, RowsByEight, put_halves, quantise_rows, random_blocks
from quickbeam.models.native import library
from quickbeam.models.native.library import FORMATS
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.program import Program
from quickbeam.models.native.quantised import BFLOAT16, BlockRows, Packed, Packer, dense_rows
from quickbeam.models.weights.gguf.file import READ

NAMES = [name for name, of in FORMATS.items() if of.inputs > 1]
FILES = [name for name in NAMES if FORMATS[name].file_type is not None]
kinds = pytest.mark.parametrize("name", NAMES)
# formats that quantise rows by eight groups
BY_EIGHT = [name for name in FILES if FORMATS[name].inputs == 256]
# bits a weight in memory, where these are more than in a file
PACKED_BITS = {"iq1_s": 3.375, "iq1_m": 3.625, "iq2_xxs": 3.375, "iq2_xs": 3.625, "iq2_s": 3.625}
PACKED_BITS |= {"iq3_xxs": 4.375, "iq3_s": 4.375, "tq1_0": 2.375, "tq2_0": 2.375}


def same_bits(got, wanted):
    return torch.equal(got.view(torch.int32), wanted.view(torch.int32))


def fits(name, inputs):
    return inputs % FORMATS[name].inputs == 0


def numbers_of(rows):
    """The numbers of checkpoints' blocks: a scale, a zero point, and values."""
    of = FORMATS[rows.name]
    data = rows.data.view(-1, of.bytes)
    scale, values = data[:, :4].contiguous().view(torch.float32), data[:, 5:]
    if rows.name.startswith("fp8"):
        numbers = data[:, 4:].contiguous().view(torch.float8_e4m3fn).float()
    else:
        if rows.name.startswith("w4"):
            halves = values.reshape(len(data), -1, 16)
            values = torch.cat([halves & 15, halves >> 4], 2).flatten(1)
        numbers = values.float() - data[:, 4:5].float()
    return (numbers * scale).view(len(rows), -1)


def by_package(rows):
    """The numbers as the package `gguf` has them, of checkpoints' blocks as described."""
    if rows.name not in FILES:
        return numbers_of(rows)
    kind = gguf.GGMLQuantizationType(FORMATS[rows.name].file_type)
    return torch.from_numpy(np.array(gguf.dequantize(rows.data.numpy(), kind)))


def run(isa, packed, outputs, x, **more):
    program = Program(load(isa))
    source, target = program.external("x", x.shape[1]), program.external("y", outputs, True)
    program.linear(packed, source, target, **more)  # type: ignore[arg-type]
    y = torch.zeros(len(x), outputs)
    program.run(plain_rows(len(x)), {"x": x.contiguous(), "y": y})
    return y


def numbers(n, inputs, seed=1):
    x = torch.randn(n, inputs, generator=torch.Generator().manual_seed(seed))
    x[:, ::7] *= 30
    return x.bfloat16()


def test_the_table_names_what_files_hold():
    for name in FILES:
        of = FORMATS[name]
        kind = gguf.GGMLQuantizationType(of.file_type)
        assert (of.inputs, of.bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert name == kind.name.lower() or (name, kind.name) == ("int4", "Q4_1")
        assert kind.name in READ
    page = (Path(__file__).parents[1] / "docs" / "weights.md").read_text(encoding="utf-8")
    for name, of in FORMATS.items():
        assert f"`{name}`" in page and f"{8 * of.bytes / of.inputs:g}" in page, name
        assert name not in PACKED_BITS or f"{PACKED_BITS[name]} in memory" in page, name


@every_set
@kinds
def test_blocks_stand_for_the_packages_numbers(isa, name):
    kernels, rows = load(isa), random_blocks(name, 37, 768)
    wanted = by_package(rows)
    packed = Packed(kernels, [rows], name=name)
    bits = PACKED_BITS.get(name, 1.06 * 8 * rows.data.nbytes / wanted.numel())
    assert 8 * packed.data.nbytes <= bits * 48 * 768
    assert same_bits(packed.dense(), wanted) and not packed.dense().eq(0).all()
    program = Program(kernels)
    program.embed(rows, program.external("x", 768, True), scale=2.0)
    x, tokens = torch.zeros(5, 768), [36, 0, 7, 7, 12]
    listed, zeros = RowList(), [0] * len(tokens)
    listed.add(0, tokens, zeros, zeros, zeros, [()] * len(tokens), ())
    program.run(listed, {"x": x})
    assert torch.equal(x, wanted[tokens] * 2)


@every_set
@pytest.mark.parametrize(
    ("name", "inputs"),
    # 288, 640: more groups than scales stand together for, and not a multiple
    [(name, inputs) for name in NAMES for inputs in (288, 512, 640) if fits(name, inputs)],
)
def test_products_are_near_and_the_same_at_every_width_and_set(isa, name, inputs):
    rows, x = random_blocks(name, 217, inputs), numbers(33, inputs)
    assert torch.equal(Packed(load(isa), [rows], name=name).dense(), by_package(rows))
    packed = Packed(load(isa), [rows], name=name)
    wide = run(isa, packed, 217, x)
    values, scales = quantise_rows(x)
    read = (values.double() * scales.double()[..., None]).flatten(1)
    if name in BY_EIGHT:
        read = RowsByEight.of(x).dense.double()
    if name.startswith("fp8"):  # which reads rows as they are
        read = x.double()
    wanted = read @ by_package(rows).double().T
    error = (wide.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 1e-5
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17):
        assert torch.equal(run(isa, packed, 217, x[:n]), wide[:n]), n
    if name.startswith("fp8"):  # whose sums are of fused operations, where there are any
        return
    assert torch.equal(run("plain", Packed(load("plain"), [rows], name=name), 217, x[:3]), wide[:3])


@every_set
@pytest.mark.parametrize("name", BY_EIGHT)
def test_rows_by_eight_groups_bit_for_bit(isa, name):
    """Groups of all sizes, and other lowest values and no finer groups, which must be seen."""
    rows, x = random_blocks(name, 50, 768, seed=4), numbers(11, 768, seed=5)
    for group in range(24):
        x[:, 32 * group : 32 * group + 32] *= 2.0 ** -((5 * group) % 11)
    x[2, 256:512], x[5, 300] = 0, torch.inf
    weight, y = ByEight.of(rows), run(isa, Packed(load(isa), [rows], name=name), 50, x)
    assert torch.equal(weight.dense, by_package(rows))
    assert y[5].isnan().all()
    assert torch.equal(y[:5], weight.product(x)[:5]) and torch.equal(y[6:], weight.product(x)[6:])
    if weight.lowest is not None:
        other = weight._replace(lowest_by=weight.lowest_by * 1.001)
        assert not torch.equal(y[:5], other.product(x)[:5])
    read = RowsByEight.of(x)
    assert set(read.raised[0].unique().tolist()) == {2.0**k for k in range(8)}
    assert (read.dense[0] - x[0].float()).abs().max() <= x[0].float().abs().max() / 253


@every_set
@kinds
def test_the_largest_sums_are_exact(isa, name):
    rows = random_blocks(name, 32, 512)
    rows.data.fill_(255)
    raw = rows.data.view(-1, FORMATS[name].bytes)
    put_halves(name, raw.numpy(), np.ones((len(raw), 2), np.float16))
    if name not in FILES:
        raw[:, :4] = torch.tensor([0, 0, 128, 63], dtype=torch.uint8)  # 1.0
        raw[1::2, 4] = 0  # of zero points; and the smallest values, the other way round
        raw[::2, 5:] = 0
        if name.startswith("fp8"):
            raw[:, 4:] = 126
    if name == "mxfp4":
        raw[:, 0] = 127
    if name == "iq4_xs":
        raw[::2, 2:], raw[:, 2:8] = 0, 0  # the lowest level, scales of -32
    if name == "q3_k":
        raw[::2, :96], raw[:, 96:108] = 0, 0  # values and scales both negative
    if name == "q6_k":
        raw[::2, :192], raw[:, 192:208] = 0, 128  # likewise
    x = torch.ones(6, 512, dtype=torch.bfloat16)
    x[3], x[4, ::2], x[5, 1::2] = -1, -1, -1
    packed = Packed(load(isa), [rows], name=name)
    wanted = x.double() @ by_package(rows).double().T
    torch.testing.assert_close(run(isa, packed, 32, x).double(), wanted, rtol=1e-5, atol=1e-2)


@best_set
def test_weights_of_several_formats_are_one_product(isa):
    kernels, x = load(isa), numbers(6, 512)
    parts = [
        random_blocks("q5_0", 40, 512),
        random_blocks("q6_k", 24, 512),
        random_blocks("q8_0", 24, 512),
    ]
    bias = torch.randn(88, generator=torch.Generator().manual_seed(2))
    pack = Packer(kernels, BFLOAT16)
    packed = pack.pack(parts, bias, memory=torch.zeros(pack.size(parts), dtype=torch.uint8))
    alone = [run(isa, pack.pack([part]), len(part), x) for part in parts]
    assert torch.equal(run(isa, packed, 88, x), torch.cat(alone, 1) + bias)
    dense = numbers(88, 512).mul(0.05)
    mixed = pack.pack([parts[0], dense[:48]])
    assert torch.equal(run(isa, mixed, 88, x)[:, :40], alone[0])
    exact = x.double() @ dense[:48].double().T
    torch.testing.assert_close(run(isa, mixed, 88, x)[:, 40:].double(), exact, rtol=1e-3, atol=1e-2)


@best_set
@pytest.mark.parametrize("names", [("q4_k", "q4_k"), ("q4_k", "q6_k")])
def test_gated_weights_of_one_and_of_two_formats(isa, names):
    kernels, x = load(isa), numbers(5, 512)
    weights = [random_blocks(name, 40, 512, seed) for seed, name in enumerate(names)]
    packed = Packer(kernels, BFLOAT16).pack(weights, gated=True)
    program = Program(kernels)
    source, target = program.external("x", 512), program.external("y", 40, True)
    program.linear(packed, source, target, library.GATED, activation="gelu_tanh", scaling=0.5)
    y = torch.zeros(5, 40)
    program.run(plain_rows(5), {"x": x, "y": y})
    gate, up = (run(isa, Packer(kernels, BFLOAT16).pack([one]), 40, x) for one in weights)
    wanted = torch.nn.functional.gelu(gate * 0.5, approximate="tanh") * up
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


@best_set
@kinds
def test_dense_rows_keep_further_dimensions(isa, name):
    rows = random_blocks(name, 12, 256)
    stacked = BlockRows(rows.data.view(3, 4, -1), name)
    assert stacked.shape == [3, 4, 256]
    assert torch.equal(dense_rows(load(isa), stacked), by_package(rows).view(3, 4, 256))


@every_set
@pytest.mark.parametrize("name", ["w4g32", "w8g128"])
def test_inputs_in_another_order(isa, name):
    kernels, rows, x = load(isa), random_blocks(name, 48, 256), numbers(5, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).int()
    ordered = BlockRows(rows.data, name, order)
    packed = Packed(kernels, [ordered], name=name)
    plain = Packed(kernels, [rows], name=name)
    assert torch.equal(run(isa, packed, 48, x), run(isa, plain, 48, x[:, order]))
    assert not torch.equal(run(isa, packed, 48, x), run(isa, plain, 48, x))
    back = torch.empty(48, 256)
    back[:, order.long()] = by_package(rows)
    assert torch.equal(packed.dense(), back) and torch.equal(dense_rows(kernels, ordered), back)
    pack = Packer(kernels, BFLOAT16)
    assert pack.have_one_layout([ordered, ordered]) and not pack.have_one_layout([ordered, rows])
    both = pack.pack([ordered, rows])
    apart = torch.cat([run(isa, packed, 48, x), run(isa, plain, 48, x)], 1)
    assert torch.equal(run(isa, both, 96, x), apart)
    program = Program(kernels)
    program.selected_blocks(packed, program.external("x", 256), program.external("y", 16, True))
    program.set(len(program.ops) - 1, target_stride=16)
    y = torch.zeros(5, 16)
    program.run(plain_rows(5), {"x": x, "y": y}, blocks=np.array([1]))
    assert torch.equal(y, run(isa, packed, 48, x)[:, 16:32])
