"""Triton's products against plain ones: on CUDA where there is one, in Triton's interpreter (a
process of its own) otherwise."""

import os
import sys

import pytest
import torch

from quickbeam.models.native import library
from quickbeam.models.native.quantised import BlockRows
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.torch.network import Network
from quickbeam.models.torch.packed_weight import PackedProduct, PackedWeight, same_order
from quickbeam.models.weights.checkpoint import Checkpoint
from scripts import captured
from target import logits_of
from test_families import IDS
from test_prequantised import AT, KERNELS, write

triton = pytest.importorskip("triton")
fused = pytest.importorskip("quickbeam.models.torch.fused_product")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if CUDA else "cpu")
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or CUDA), reason="needs CUDA; see the test with the interpreter"
)
needs_library = pytest.mark.skipif(KERNELS is None, reason="needs the native kernels")
# Triton's interpreter multiplies no bfloat16
FORMATS = (torch.float32, torch.bfloat16 if CUDA else torch.float16)
SIZES = (1, 17, 20)
PACKED = ("awq", "awq-64", "gptq", "gptq-v2", "gptq-order", "packed", "packed-zero", "packed-order")


@pytest.fixture(autouse=True)
def products_of_the_interpreter(monkeypatch):
    """Its products add up every row in one order; BLAS may do so by the place in the tile."""

    def matmul(a, b, dtype):
        return (a.astype(dtype)[:, :, None] * b.astype(dtype)).sum(1)

    if INTERPRETED:
        monkeypatch.setattr("numpy.matmul", matmul)


@pytest.mark.skipif(INTERPRETED, reason="is in it already")
def test_all_of_this_holds_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    kept = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
    done = captured(command, env=kept | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_the_kernels_compile_for_a_gpu_without_one(capability, kind):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"x": f"*{kind}", "weight": f"*{kind}", "out": "*fp32", "n": "i32"}
    kinds |= {"values": "*u8", "zeros": "*u8", "scales": "*fp32"}
    sizes = {"INPUTS": 576, "OUTPUTS": 1000, "ROWS": fused.ROWS, "COLUMNS": 32}
    for kernel, own in (
        (fused.multiply_tile, {"DEPTH": fused.DEPTH}),
        (fused.multiply_packed_tile, {"GROUP": 32}),
        (fused.multiply_packed_tile, {"GROUP": 128, "INPUTS": 1280}),
    ):
        constants = {name: size for name, size in (sizes | own).items() if name in kernel.arg_names}
        types = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def random_rows(rows, inputs, dtype):
    generator = torch.Generator().manual_seed(rows + inputs)
    return torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype)


def plain(x, weight):
    return x.float() @ weight.float().T


@runs_kernels
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (100, 33), (192, 130)])
@torch.inference_mode()
def test_a_product_is_the_plain_one(inputs, outputs, dtype):
    weight, x = random_rows(outputs, inputs, dtype), random_rows(19, inputs, dtype)
    right = plain(x, weight)
    assert torch.allclose(fused.multiply(x, weight), right, rtol=1e-5, atol=1e-4)
    bias = random_rows(1, outputs, dtype)[0]
    got = fused.multiply(x, weight, bias)
    assert torch.allclose(got, right + bias.float(), rtol=1e-5, atol=1e-4)


def rows_differ(multiply, x):
    """How many passes of some rows give one of them other bits than the pass of all of them."""
    together = multiply(x)
    return sum(
        not torch.equal(multiply(x[first : first + size]), together[first : first + size])
        for size in SIZES
        for first in (0, (len(x) - size) // 2, len(x) - size)
    )


@runs_kernels
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others():
    """A wrong version is one whose tile follows the number of rows."""
    weight, x = random_rows(33, 192, torch.float32), random_rows(20, 192, torch.float32)
    assert rows_differ(lambda rows: fused.multiply(rows, weight), x) == 0

    def wrong(rows):
        out = torch.empty(len(rows), 33, device=DEVICE)
        size = max(16, int(triton.next_power_of_2(len(rows))))
        fused.multiply_tile[triton.cdiv(len(rows), size), 3](
            rows, weight, out, len(rows), 192, 33, ROWS=size, COLUMNS=16, DEPTH=512 // size
        )
        return out

    assert torch.allclose(wrong(x), plain(x, weight), rtol=1e-4, atol=1e-4)
    assert rows_differ(wrong, x) > 0


def test_tiles_follow_the_weight_alone():
    assert [fused.columns_of(outputs) for outputs in (48, 4096, 9000, 151936)] == [16, 32, 64, 64]


def read_packed(checkpoint, *names):
    return PackedWeight.of([checkpoint(name) for name in names])


@needs_library
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_weight_has_the_numbers_of_its_checkpoint(name, tmp_path):
    _, dense = write(tmp_path, name)
    checkpoint = Checkpoint(tmp_path, None, library.kernels())
    for one, numbers in dense.items():
        weight = read_packed(checkpoint, one)
        order = torch.arange(numbers.shape[1]) if weight.order is None else weight.order
        assert torch.equal(weight.dense(), numbers[:, order]), one
        assert weight.nbytes < numbers.numel() * 0.7 and weight.group in (32, 128)


@needs_library
def test_what_can_not_be_packed_together_is_widened(tmp_path):
    write(tmp_path, "gptq-order")
    checkpoint = Checkpoint(tmp_path, None, library.kernels())
    query, value = f"{AT}.weight", f"{AT.replace('q_proj', 'v_proj')}.weight"
    both = read_packed(checkpoint, query, query)
    assert both is not None and len(both.values) == 2 * len(checkpoint(query))
    assert read_packed(checkpoint, query, value) is None, "orders of their own"
    assert PackedWeight.of([checkpoint(query), torch.zeros(4, 128)]) is None
    assert not same_order(None, torch.arange(3)) and same_order(None, None)
    other = BlockRows(checkpoint(query).data, "w8g32")
    assert PackedWeight.of([other]) is None, "8 bits"


def networks(folder):
    """Models of a checkpoint: with weights that are widened, and packed."""
    checkpoint = Checkpoint(folder, None, library.kernels())
    models = [TorchModel(checkpoint, checkpoint.stack, DEVICE, sizes=()) for _ in range(2)]
    for model, packed in zip(models, (False, True), strict=True):
        model._network = Network(checkpoint, checkpoint.stack, DEVICE, FORMATS[1], packed)
    return models


@needs_library
@runs_kernels
@pytest.mark.parametrize("name", ["awq", "gptq-order"])
@torch.inference_mode()
def test_a_packed_model_is_the_widened_one(name, tmp_path):
    write(tmp_path, name)
    widened, packed = networks(tmp_path)
    kinds = [type(module) for module in packed._network.modules()]
    # queries, keys and values of one order, what attention gives, and feed-forwards
    assert kinds.count(PackedProduct) >= (4 if "order" in name else 8)
    assert packed._network.product_bytes < widened._network.product_bytes
    ids = IDS.tolist()
    got, right = logits_of(packed, ids), logits_of(widened, ids)
    assert float((got - right).norm() / right.norm()) < 0.03


@needs_library
@runs_kernels
@pytest.mark.parametrize("name", ["awq", "gptq"])
@pytest.mark.parametrize("dtype", FORMATS)
@torch.inference_mode()
def test_a_packed_product_is_the_plain_one_with_the_same_bits_in_any_pass(dtype, name, tmp_path):
    _, dense = write(tmp_path, name)
    one = f"{AT.replace('q_proj', 'o_proj')}.weight"
    weight, numbers = (
        read_packed(Checkpoint(tmp_path, None, library.kernels()), one).to(DEVICE),
        dense[one],
    )
    product = PackedProduct(weight, None, dtype)
    x = random_rows(20, numbers.shape[1], dtype)
    right = plain(x, numbers.to(DEVICE, dtype))
    assert torch.allclose(product(x), right, rtol=1e-4, atol=1e-3)
    assert rows_differ(product, x) == 0


@needs_library
def test_weights_are_packed_on_a_gpu_alone(tmp_path):
    """The head and experts are widened there, too: lookups and grouped products read them."""
    write(tmp_path, "awq")
    checkpoint = Checkpoint(tmp_path, None, library.kernels())
    for packed in (False, True):
        network = Network(checkpoint, checkpoint.stack, torch.device("cpu"), torch.bfloat16, packed)
        products = [module for module in network.modules() if isinstance(module, PackedProduct)]
        assert bool(products) == packed and not isinstance(network.head, PackedProduct)
    model = TorchModel(checkpoint, checkpoint.stack, torch.device("cpu"))
    assert not any(isinstance(module, PackedProduct) for module in model._network.modules())
