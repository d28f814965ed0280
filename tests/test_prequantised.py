"""Checkpoints whose weights are quantised already: AWQ, GPTQ, compressed-tensors and FP8.

The layouts are written here, as those who made them describe them; a weight's numbers are
`(q - zero) * scale`, and the model must be that of those numbers."""

import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, Qwen3MoeConfig

from answers import PROMPTS, conversation, drafts_change_nothing, same_as_plain
from cases import few, refuses, spread
from checkpoints import configure
from models import SIZES, tiny
from quickbeam.drafters.loading import load_drafter
from quickbeam.errors import InvalidInput
from quickbeam.hub import SELF
from quickbeam.hub.mtp import SINGLE
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.families import describe
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BlockRows, dense_rows
from quickbeam.models.weights.checkpoint import Checkpoint
from quickbeam.models.weights.prequantised import QuantisedTensor, QuantMethod
from quickbeam.models.weights.shapes import refuse_shared_experts
from quickbeam.models.weights.sources import dense, source_of
from quickbeam.models.weights.tensor_files import TensorFiles
from quickbeam.params import SamplingParams
from streaming import alike, limits, on_disk
from target import Target, logits_of
from test_families import IDS, made, methods

KERNELS = library.kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="needs the native kernels")
Tensors = dict[str, torch.Tensor]
NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]  # of AWQ: the column that each nibble of a word is of
AT = "model.layers.0.self_attn.q_proj"
THREE_GROUPS = {f"{AT}.qzeros": torch.ones(3, 16).int(), f"{AT}.scales": torch.ones(3, 128)}
ZEROS = torch.zeros(4, 12, dtype=torch.int32)  # of 3 bits


class Quantised(NamedTuple):
    """A weight `[outputs, inputs]`. `group`: of each input."""

    q: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor
    group: torch.Tensor

    @property
    def dense(self):
        zero = 0 if self.q.is_floating_point() else self.zero.float()[:, self.group]
        return (self.q.float() - zero) * self.scale.float()[:, self.group]


def words(rows, bits, order=None):
    """Whole numbers `[n, m]` in int32 words `[n, m * bits / 32]`, low bits first."""
    each = 32 // bits
    apart = rows.numpy().astype(np.uint64).reshape(len(rows), -1, each)[..., order or range(each)]
    joined = (apart << (np.arange(each, dtype=np.uint64) * np.uint64(bits))).sum(-1)
    return torch.from_numpy(joined.astype(np.uint32).view(np.int32))


def awq(w):
    tensors = {"qweight": words(w.q.T, 4, NIBBLES), "qzeros": words(w.zero.T, 4, NIBBLES)}
    return tensors | {"scales": w.scale.T.half()}


def gptq(w, bits=4, less=1):
    tensors = {"qweight": words(w.q, bits).T, "qzeros": words(w.zero.T - less, bits)}
    tensors |= {"scales": w.scale.T.half(), "g_idx": w.group.int()}
    return tensors | {"bias": torch.zeros(len(w.q)).half()}


def packed(w, bits=4, symmetric=True):
    tensors = {"weight_packed": words(w.q, bits), "weight_scale": w.scale.bfloat16()}
    tensors["weight_shape"] = torch.tensor(w.q.shape)
    if not symmetric:
        tensors["weight_zero_point"] = words(w.zero.T, bits).T
    if not torch.equal(w.group, w.group.sort().values):
        tensors["weight_g_idx"] = w.group.int()
    return tensors


def whole(w, suffix="weight_scale"):
    if w.q.is_floating_point():
        return {"weight": w.q, suffix: w.scale, "input_scale": torch.tensor(1.5)}
    q, zero = ((one.int() - 128).to(torch.int8) for one in (w.q, w.zero))
    tensors = {"weight": q, "weight_scale": w.scale.bfloat16()}
    return tensors | ({"weight_zero_point": zero} if zero.any() else {})


def by_blocks(w):
    return whole(w._replace(scale=w.scale[::128]), "weight_scale_inv")


def one_scale(w, suffix="weight_scale"):
    return whole(w._replace(scale=w.scale[0, 0]), suffix)


def apart(w):
    """As `packed`, with zero points as int8, `[outputs, groups]`, as earlier versions have them."""
    return packed(w, 4, False) | {"weight_zero_point": (w.zero - 8).to(torch.int8)}


class Case(NamedTuple):
    """How weights are stored, and what the configuration says of it."""

    config: dict[str, Any]
    store: Callable[[Quantised], Tensors]
    format: str
    bits: int = 4
    group: int | None = 32
    symmetric: bool = False
    ordered: bool = False
    tall: int = 1  # outputs that share a scale; 0: all of them, and all inputs
    inner: int = 256


def compressed(format, group=None, **more):
    weights = {"num_bits": 4, "group_size": group, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
gptq_8 = partial(gptq, bits=8)
PACK, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
CASES = {
    "awq": Case(AWQ | {"group_size": 128}, awq, "w4g128", group=128),
    "awq-64": Case(AWQ | {"group_size": 64}, awq, "w4g32", group=64, inner=192),
    "gptq": Case(GPTQ, gptq, "w4g32"),
    "gptq-v2": Case(GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, less=0), "w4g32"),
    "gptq-8": Case(GPTQ | {"bits": 8}, gptq_8, "w8g32", 8),
    "gptq-8-one": Case(GPTQ | {"bits": 8, "group_size": -1}, gptq_8, "w8g128", 8, None),
    "gptq-order": Case(GPTQ | {"desc_act": True}, gptq, "w4g32", ordered=True),
    "packed": Case(compressed(PACK, 128), packed, "w4g128", group=128, symmetric=True),
    "packed-zero": Case(compressed(PACK, 32), lambda w: packed(w, 4, False), "w4g32"),
    "packed-apart": Case(compressed(PACK, 32), apart, "w4g32"),
    "packed-8": Case(
        compressed(PACK, num_bits=8), lambda w: packed(w, 8), "w8g128", 8, None, symmetric=True
    ),
    "packed-order": Case(
        compressed(PACK, 32, actorder="group"), packed, "w4g32", symmetric=True, ordered=True
    ),
    "int8": Case(compressed(INT, num_bits=8), whole, "w8g128", 8, None, symmetric=True),
    "int8-zero": Case(compressed(INT, num_bits=8), whole, "w8g128", 8, None),
    "float8": Case(compressed(FLOAT, num_bits=8), whole, "fp8g128", 0, None),
    "float8-one": Case(compressed(FLOAT, num_bits=8), one_scale, "fp8g128", 0, None, tall=0),
    "fp8": Case(BLOCKS, by_blocks, "fp8g128", 0, 128, tall=128),
    "fp8-uneven": Case(BLOCKS, by_blocks, "fp8g128", 0, 128, tall=128, inner=320),
    "fp8-one": Case(FP8, lambda w: one_scale(w, "weight_scale_inv"), "fp8g128", 0, None, tall=0),
}


def quantised(outputs, inputs, case, random):
    group = case.group or inputs
    groups = -(-inputs // group)
    of = torch.arange(inputs) // group
    if case.ordered:
        of = of[torch.randperm(inputs, generator=random)]
    scale = torch.rand(outputs, groups, generator=random) + 0.2
    scale = scale[:1].expand_as(scale) if case.tall == 0 else scale[:: case.tall]
    scale = scale.repeat_interleave(max(1, case.tall), 0)[:outputs] * 0.3
    if case.bits == 0:
        q = torch.randn(outputs, inputs, generator=random).mul(0.3).to(torch.float8_e4m3fn)
        return Quantised(q, torch.zeros(outputs, groups), scale, of)
    most = 1 << case.bits
    q = torch.randint(0, most, (outputs, inputs), generator=random, dtype=torch.uint8)
    zero = torch.full((outputs, groups), most // 2)
    if not case.symmetric:
        zero = torch.randint(most // 4, most * 3 // 4, zero.shape, generator=random)
    scale = (scale / most).bfloat16().float()  # exact in half precision too
    return Quantised(q, zero.to(torch.uint8), scale, of)


def model_of(case, moe=False):
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": case.inner, "num_hidden_layers": 2}
    if not moe:
        return tiny("", config=LlamaConfig(**sizes))
    more = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=case.inner // 2)
    return tiny("", config=Qwen3MoeConfig(**sizes, **more, head_dim=32))


def write(folder, name, moe=False):
    """A checkpoint; returns the model of the numbers that it holds, and its quantised weights."""
    case, random = CASES[name], torch.Generator().manual_seed(1)
    model = model_of(case, moe)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(len(parameter), generator=random) / 10
    model.save_pretrained(folder)
    stored, dense = Tensors(), Tensors()
    orders = dict[tuple[str, int], torch.Tensor]()
    for one, tensor in load_file(folder / SINGLE).items():
        if not re.search(r"_proj\.weight$", one):
            stored[one] = tensor.half()
            continue
        w = quantised(*tensor.shape, case, random)
        # inputs of q_proj and k_proj have one order, others orders of their own
        at = (one.rpartition("self_attn.")[0], "q_proj" in one or "k_proj" in one)
        if case.ordered and at[1]:
            w = w._replace(group=orders.setdefault(at, w.group))
        module = one.removesuffix("weight")
        stored |= {f"{module}{part}": t.contiguous() for part, t in case.store(w).items()}
        dense[one] = w.dense
    save_file(stored, folder / SINGLE)
    configure(folder, dtype="float16", quantization_config=case.config)
    return loaded(model, stored | dense), dense


def loaded(model, tensors):
    state = {name: tensors[name].float() for name in model.state_dict() if name in tensors}
    for name, parameter in model.state_dict().items():
        at, _, what = name.rpartition(".")
        if not at.endswith(".experts"):
            continue
        parts = ("gate_proj", "up_proj") if what == "gate_up_proj" else ("down_proj",)
        apart = [[tensors[f"{at}.{i}.{p}.weight"] for p in parts] for i in range(len(parameter))]
        state[name] = torch.stack([torch.cat(one) for one in apart])
    model.load_state_dict(state)
    return model


def logits(checkpoint, model=None):
    return logits_of(
        model or NativeModel(checkpoint, checkpoint.stack, library.kernels()), IDS.tolist()
    )


@torch.no_grad()
def right(model):
    return model(IDS[None]).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_has_its_own_numbers(name, tmp_path):
    model, dense = write(tmp_path, name)
    whole = Checkpoint(tmp_path, torch.float32)  # without kernels: widened
    blocks = Checkpoint(tmp_path, None, library.kernels())
    assert blocks.dtype is torch.bfloat16 and blocks.quantised
    for one, numbers in dense.items():
        rows = blocks(one)
        shared = CASES[name].format
        if numbers.shape[1] % 128:
            shared = shared.replace("g128", "g32")
        assert isinstance(rows, BlockRows) and rows.name == shared
        assert blocks.like(one).shape == rows.shape == list(numbers.shape)
        assert torch.equal(dense_rows(KERNELS, rows), numbers), one
        assert torch.equal(dense_rows(KERNELS, blocks.rows(one, 5, 40)), numbers[5:40]), one
        assert torch.equal(whole(one), numbers), one
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(blocks(norm).float(), model.get_parameter(norm))
    wanted = right(model)
    torch.testing.assert_close(logits(whole), wanted, rtol=1e-3, atol=1e-3)
    assert error(logits(blocks), wanted) < 0.05


def test_an_older_configuration_is_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    for name in ("awq", "gptq", "packed", "fp8"):
        write(tmp_path, name)
        fields = json.loads((tmp_path / "config.json").read_text())
        fields["torch_dtype"] = fields.pop("dtype")
        fields["transformers_version"] = "4.46.1"
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert (
            Checkpoint(tmp_path, None, library.kernels())(f"{AT}.weight").name == CASES[name].format
        )


def change_file(folder, change):
    stored = load_file(folder / SINGLE)
    change(stored)
    save_file(stored, folder / SINGLE)


def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ["fp8", "fp8-one"])
def test_float8_is_read_as_transformers_reads_it(name, tmp_path):
    write(tmp_path, name)
    checkpoint = Checkpoint(tmp_path, torch.float32, library.kernels())
    block = CASES[name].config.get("weight_block_size")
    how: Any = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    of = {"dtype": torch.float32, "quantization_config": how}
    for one, parameter in AutoModelForCausalLM.from_pretrained(tmp_path, **of).named_parameters():
        assert torch.equal(checkpoint(one), parameter), one


def test_float8_without_scales_has_its_own_numbers_and_one_scale_that_lacks_is_named(
    tmp_path, caplog
):
    write(tmp_path, "fp8")
    change_file(tmp_path, lambda s: s.pop(f"{AT}.weight_scale_inv"))
    words = f"{AT}.weight has float8 numbers and no scale, which others have"
    refuses(words, Checkpoint, tmp_path, None)
    stored = load_file(tmp_path / SINGLE)
    plain = {name: one for name, one in stored.items() if not name.endswith("_scale_inv")}
    save_file(plain, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path, None, library.kernels())
    assert torch.equal(checkpoint(f"{AT}.weight"), stored[f"{AT}.weight"].bfloat16())
    assert "become bfloat16" in caplog.text


@pytest.mark.parametrize(("inputs", "width"), [(128 * 128, None), (256, 64)])
def test_float8_with_as_many_blocks_as_outputs_and_beside_experts(inputs, width, tmp_path):
    """`width`: of experts' inputs, by which stored weights may be transposed."""
    weight = quantised(128, inputs, CASES["fp8"], torch.Generator().manual_seed(1))
    save_file({f"m.{part}": of for part, of in by_blocks(weight).items()}, tmp_path / SINGLE)
    files = TensorFiles(tmp_path)
    stored = source_of(
        "m.weight", {name: name for name in files.names}, files, QuantMethod("fp8"), width
    )
    assert isinstance(stored, QuantisedTensor)
    assert torch.equal(dense(stored.rows(files, 0, 128), stored), weight.dense)


@pytest.mark.parametrize(
    ("name", "temperature"),
    spread(["awq", "gptq-order", "packed-zero", "int8", "fp8-uneven"], [0.0, 0.8]),
)
def test_drafts_change_no_answer(name, temperature, tmp_path):
    write(tmp_path, name)
    checkpoint = Checkpoint(tmp_path, None, library.kernels())
    model = NativeModel(checkpoint, checkpoint.stack, library.kernels())
    assert CASES[name].format in model.describe()
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=5, ignore_eos=True)
    plain = conversation(model, params, IDS.tolist(), [[]])
    drafts_change_nothing(model, methods(torch.bfloat16), params, plain)


@pytest.mark.parametrize("name", few(("fp8", "float8", "gptq-8", "int8"), ["fp8"]))
def test_8_bits_draft_for_themselves_in_4(name, tmp_path):
    write(tmp_path, name)
    checkpoint = Checkpoint(tmp_path, None, KERNELS)
    target = NativeModel(checkpoint, checkpoint.stack, KERNELS)
    drafter = load_drafter(SELF, target, SimpleNamespace(get_vocab=dict))
    assert not drafter.model._compiled.block_formats
    same_as_plain(target, drafter, PROMPTS[:2])


def check_experts(folder, model, dense):
    """Return the blocks of one expert, after values and logits were compared with `dense`."""
    whole = Checkpoint(folder, torch.float32)  # without kernels: widened
    blocks = Checkpoint(folder, None, library.kernels())
    at = "model.layers.1.mlp.experts"
    rows = blocks.rows(f"{at}.gate_up_proj", 2, 3)
    wanted = torch.cat([dense[f"{at}.2.{one}_proj.weight"] for one in ("gate", "up")])
    assert torch.equal(dense_rows(KERNELS, rows)[0], wanted)
    torch.testing.assert_close(logits(whole), right(model), rtol=1e-3, atol=1e-3)
    assert error(logits(blocks), right(model)) < 0.2  # where a near choice of experts may change
    return rows


@pytest.mark.parametrize("name", ["fp8", "fp8-uneven"])
def test_stacked_experts_in_float8(name, tmp_path):
    """With `gate_up_proj_scale_inv` and `down_proj_scale_inv`, as transformers' `FP8Experts`."""
    model, dense = write(tmp_path, name, moe=True)
    stored = load_file(tmp_path / SINGLE)
    random = torch.Generator().manual_seed(2)
    for at in {one.rpartition(".experts.")[0] for one in stored if ".experts." in one}:
        for what, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            made = []
            for number in range(4):
                for part in parts:
                    for kind in ("weight", "weight_scale_inv"):
                        del stored[f"{at}.experts.{number}.{part}_proj.{kind}"]
                shape = model.state_dict()[f"{at}.experts.{what}"].shape[1:]
                w = quantised(*shape, CASES[name], random)
                made.append(CASES[name].store(w))
                for part, rows in zip(parts, w.dense.chunk(len(parts)), strict=True):
                    dense[f"{at}.experts.{number}.{part}_proj.weight"] = rows
            for kind, name_of in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                whole = [one[kind].view(torch.uint8) if not name_of else one[kind] for one in made]
                all_of = torch.stack(whole)
                kept = all_of if name_of else all_of.view(torch.float8_e4m3fn)
                stored[f"{at}.experts.{what}{name_of}"] = kept
    save_file(stored, tmp_path / SINGLE)
    model = loaded(model, {k: v for k, v in stored.items() if ".experts." not in k} | dense)
    check_experts(tmp_path, model, dense)
    scales = "model.layers.1.mlp.experts.down_proj_scale_inv"
    stored[scales] = stored[scales][:, :, :0].contiguous()
    save_file(stored, tmp_path / SINGLE)
    refuses("down_proj_scale_inv", Checkpoint, tmp_path, None)


@pytest.mark.parametrize("name", ["awq", "packed", "fp8", "fp8-uneven"])
def test_experts_are_read_one_by_one(name, tmp_path):
    model, dense = write(tmp_path, name, moe=True)
    assert check_experts(tmp_path, model, dense).name == CASES[name].format


@pytest.mark.parametrize(
    ("name", "moe"), [("awq", False), ("gptq-order", False), ("fp8-uneven", False), ("awq", True)]
)
def test_what_is_read_from_disk_has_the_bits_of_memory(name, moe, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    write(tmp_path, name, moe)
    checkpoint = Checkpoint(tmp_path, None, library.kernels())
    every = limits(checkpoint)
    disk = on_disk(checkpoint, every[len(every) // 2])
    alike(Target(NativeModel(checkpoint, checkpoint.stack, library.kernels())), disk, (1, 17))
    assert disk.model.streamed is not None and disk.model.streamed.record()["streamed_bytes"] > 0
    disk.model.close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_only_what_is_not_quantised_is(weights, tmp_path):
    write(tmp_path, "awq")
    checkpoint = Checkpoint(tmp_path, None, library.kernels())
    model = NativeModel(checkpoint, checkpoint.stack, library.kernels(), weights=weights)
    assert "w4g128" in model.describe() and weights in model.describe()
    assert model.head.packed.name == "int8"
    assert 0 < error(logits(checkpoint, model), logits(checkpoint)) < 0.03


@pytest.mark.parametrize(
    ("gates", "rest", "words"),
    [
        (("w4g32", None), ("w8g32", None), "shared expert is of w4g32 and w8g32"),
        (("w4g32", torch.arange(32)),) * 2 + ("activation order",),
    ],
)
def test_shared_experts_that_no_operation_reads_are_refused(gates, rest, words):
    def like(name):
        kind, order = gates if "gate_proj" in name else rest
        return BlockRows(torch.empty(1, 1), kind, order)

    with pytest.raises(NotDescribed, match=words):
        refuse_shared_experts(describe(made("qwen2_moe")), like)


REFUSED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes"},
    "awq (gemv)": {"quant_method": "awq", "version": "gemv"},
    "gptq (marlin)": {"quant_method": "gptq", "checkpoint_format": "marlin"},
    "compressed-tensors (nvfp4-pack-quantized)": compressed("nvfp4-pack-quantized"),
    "compressed-tensors (sparse-24-bitmask)": compressed(PACK)
    | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "compressed-tensors (transform_config)": compressed(PACK) | {"transform_config": {"R1": {}}},
    "fp8 (e5m2)": FP8 | {"fmt": "e5m2"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_methods_are_named(name, tmp_path):
    write(tmp_path, "awq")
    configure(tmp_path, quantization_config=REFUSED[name])
    words = re.escape(f"quantised by {name}; read are AWQ")
    refuses(words + ".*unquantised", Checkpoint, tmp_path, None, error=NotDescribed)


def test_what_does_not_fit_is_refused(tmp_path):
    for change, error, words in (
        (lambda s: s.pop(f"{AT}.scales"), InvalidInput, "lack .*q_proj.weight.*q_proj.g_idx"),
        (lambda s: s.update({f"{AT}.scales": torch.ones(3, 128)}), InvalidInput, "fit together"),
        (lambda s: s[f"{AT}.g_idx"].fill_(2), InvalidInput, "no order of 128 inputs"),
        (lambda s: s[f"{AT}.scales"].fill_(torch.inf), InvalidInput, "not finite"),
        (lambda s: s[f"{AT}.bias"].fill_(1), NotDescribed, "q_proj.bias"),
        (lambda s: s.update({f"{AT}.qweight": s[f"{AT}.qweight"].char()}), NotDescribed, "type I8"),
        (lambda s: s.update(THREE_GROUPS), InvalidInput, "128 inputs in 3 groups"),
        (lambda s: s.update({f"{AT}.qzeros": ZEROS}), NotDescribed, "3 bits a weight"),
        (lambda s: s.update({f"{AT}.qzeros": ZEROS}), NotDescribed, "3 bits a weight"),
    ):
        write(tmp_path, "gptq")
        change_file(tmp_path, change)
        with pytest.raises(error, match=words):
            Checkpoint(tmp_path, None, library.kernels())(f"{AT}.weight")


def test_fields_of_another_kind_are_refused(tmp_path):
    write(tmp_path, "packed")
    for config in (
        [GPTQ],
        FP8 | {"weight_block_size": [0, 128]},
        compressed(PACK) | {"config_groups": "all"},
        compressed(PACK) | {"sparsity_config": [2]},
    ):
        configure(tmp_path, quantization_config=config)
        refuses(r"quantization_config can't be read .* again", Checkpoint, tmp_path, None)


def expert(s, number, part, rows, bits):
    at = f"model.layers.1.mlp.experts.{number}.{part}_proj."
    case = CASES["packed" if bits == 4 else "packed-8"]
    w = quantised(rows, 128, case, torch.Generator().manual_seed(1))
    for name in [name for name in s if name.startswith(at)]:
        del s[name]
    s.update({f"{at}{name}": tensor for name, tensor in packed(w, bits).items()})


def narrow(s):
    for i, part in itertools.product(range(4), ("gate", "up")):
        expert(s, i, part, 64, 4)


def without_third(s):
    for name in [name for name in s if "layers.1.mlp.experts.3." in name]:
        del s[name]


def test_experts_that_are_not_alike_are_refused(tmp_path):
    for change, fields, error, words in (
        (lambda s: expert(s, 1, "up", 128, 8), {}, NotDescribed, "several kinds"),
        (lambda s: expert(s, 1, "up", 64, 4), {}, NotDescribed, "several kinds"),
        (narrow, {}, InvalidInput, "down_proj reads 128 numbers of an expert, and .* gives 64"),
        (without_third, {}, InvalidInput, "3, 128, 128], expected .4, 128, 128]"),
        (lambda s: None, {"num_experts_per_tok": 9}, InvalidInput, "9 of 4 experts"),
    ):
        write(tmp_path, "packed", moe=True)
        change_file(tmp_path, change)
        configure(tmp_path, **fields)
        refuses(words, Checkpoint, tmp_path, None, error=error)
