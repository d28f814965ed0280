"""Models that the torch back end reads: from the same files, by the same reader as the kernels'."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from cases import few, refuses
from checkpoints import rewrite
from gguf_files import TINY, WHOLE_BLOCKS, model_of, write
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native import library
from quickbeam.models.opening import open_model
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.weights.checkpoint import Checkpoint
from quickbeam.models.weights.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.weights.parameters import names, norms
from streaming import saved
from target import logits_of
from test_prequantised import AT, CASES
from test_prequantised import write as write_quantised

CPU = torch.device("cpu")
IDS = [5, 17, 80, 3, 3, 9, 12, 7, 44, 20, 31, 8]


def off(got, right):
    return float((got.float() - right.float()).abs().max() / right.float().abs().max())


@pytest.mark.parametrize(("dtype", "far"), [("float16", 5e-3), ("float32", 2e-5)])
@torch.inference_mode()
def test_a_folder_without_kernels_or_in_half_precision(dtype, far, toy_folder, tmp_path, native):
    native("eager")
    folder, kind = saved("qwen3", tmp_path, toy_folder), getattr(torch, dtype)
    loaded = open_model(folder, kind, CPU)
    assert isinstance(loaded.model, TorchModel) and loaded.model.dtype is kind
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert off(logits_of(loaded.model, IDS), plain(torch.tensor([IDS])).logits[0]) < far
    refuses("need the native kernels", open_model, folder, torch.bfloat16, CPU, weights="int8")


@torch.inference_mode()
def test_half_precision_needs_no_environment(toy_folder, tmp_path):
    folder = saved("llama", tmp_path, toy_folder)
    assert isinstance(open_model(folder, torch.float16, CPU).model, TorchModel)


@pytest.mark.parametrize("architecture", few(TINY, ["llama", "qwen35moe", "gpt-oss", "gemma4"]))
@torch.inference_mode()
def test_a_gguf_file_needs_no_kernels(architecture, tmp_path, native):
    native("eager")
    model = model_of(architecture)
    file = write(tmp_path / "tiny.gguf", architecture, model)
    loaded = open_model(str(file), torch.float32, CPU)
    assert isinstance(loaded.model, TorchModel) and loaded.eos_ids == {0, 2}
    assert off(logits_of(loaded.model, IDS), model(torch.tensor([IDS])).logits[0]) < 2e-4


BLOCKS = {
    "llama": {"attn": "Q5_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_1", "ffn_down": "Q8_0"},
    "gpt2": {"attn": "Q8_0", "ffn": "Q5_1", "token_embd": "Q8_0"},
    "gpt-oss": {"exps": "MXFP4", "attn_q": "Q8_0"},
    "qwen2moe": {"inp": None, "exps": "Q8_0", "shexp": "Q5_0"},
    "qwen3moe": {
        "inp": None,
        "attn_q.": "IQ2_XXS",
        "attn_k.": "IQ3_S",
        "attn_v": "TQ1_0",
        "attn": "Q3_K",
        "down_exps": "IQ1_M",
        "exps": "IQ4_XS",
        "token_embd": "Q2_K",
    },
    "stablelm parallel": {"norm": None, "attn": "Q8_0", "ffn": "Q5_0"},
}


@pytest.mark.skipif(library.kernels() is None, reason="needs the native kernels")
@pytest.mark.parametrize("architecture", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_the_same_numbers_without_kernels(architecture, dtype, tmp_path):
    """Those that the kernels' blocks have in float32, rounded once."""
    kinds = {
        part: kind and GGMLQuantizationType[kind] for part, kind in BLOCKS[architecture].items()
    }
    model = model_of(architecture, **(WHOLE_BLOCKS if architecture == "qwen3moe" else {}))
    file = write(tmp_path / "x.gguf", architecture, model, kinds)
    exact = GgufCheckpoint(file, torch.float32, library.kernels())
    widened = GgufCheckpoint(file, dtype, None)
    for name in names(exact.stack):
        got, wanted = widened(name), exact(name)
        assert got.shape == wanted.shape and list(got.shape) == widened.shape(name)
        assert torch.equal(got, wanted.to(got.dtype)), name
        assert got.dtype is (dtype if got.dim() > 1 else torch.float32)
    for name in (name for norm in norms(exact.stack) for name in norm.weights):
        assert widened(name).dtype is torch.float32, "norms are not rounded"


@pytest.mark.skipif(library.kernels() is None, reason="needs the native kernels")
def test_blocks_that_kernels_do_not_read_together_are_widened(tmp_path, caplog):
    q8, q5 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0
    for part in ("gate_exps", "gate_shexp"):
        kinds = {"inp": None, part: q5, "exps": q8, "shexp": q8}
        file = write(tmp_path / f"{part}.gguf", "qwen2moe", model_of("qwen2moe"), kinds)
        with caplog.at_level(logging.INFO):
            mixed = open_model(str(file), None, CPU).model
        assert "is widened: " in caplog.text and "q5_0 and q8_0" in caplog.text.lower()
        caplog.clear()
        exact = GgufCheckpoint(file, torch.float32, library.kernels())
        right = logits_of(TorchModel(exact, exact.stack, CPU), IDS)
        assert isinstance(mixed, NativeModel) and off(logits_of(mixed, IDS), right) < 0.05


@pytest.mark.parametrize(
    "name", few(CASES, ["awq", "gptq-order", "packed-zero", "int8-zero", "fp8"])
)
@torch.inference_mode()
def test_a_checkpoint_in_few_bits_needs_no_kernels(name, toy_folder, tmp_path, native):
    """Its numbers are widened as it is read."""
    native("eager")
    moe = name in ("awq", "fp8")
    model, numbers = write_quantised(tmp_path, name, moe)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(toy_folder) / file, tmp_path)
    checkpoint = Checkpoint(tmp_path, torch.float32, library.kernels())
    for one, wanted in numbers.items():
        if not moe or ".experts." not in one:
            assert torch.equal(checkpoint(one), wanted), one
            assert torch.equal(checkpoint.rows(one, 5, 40), wanted[5:40]), one
    right = model(torch.tensor([IDS])).logits[0]
    for dtype, far in ((torch.float32, 1e-3), (None, 0.1)):
        loaded = open_model(str(tmp_path), dtype, CPU).model
        assert isinstance(loaded, TorchModel) and loaded.dtype is (dtype or torch.bfloat16)
        error = (logits_of(loaded, IDS) - right).norm() / right.norm()
        assert error < (far if not moe or dtype else 0.3)  # where a near choice of experts changes


def test_few_bits_that_are_not_finite_are_named_without_kernels(tmp_path, native):
    native("eager")
    write_quantised(tmp_path, "gptq")
    rewrite(tmp_path, {f"{AT}.scales": torch.full((4, 128), torch.inf)})
    refuses(
        "q_proj.qweight has numbers that are not finite",
        Checkpoint(tmp_path, None, library.kernels()),
        f"{AT}.weight",
    )


@pytest.mark.parametrize("kernels", [True, False])
def test_a_gguf_file_of_another_architecture_is_refused(kernels, tmp_path, native):
    if not kernels:
        native("eager")
    file = write(tmp_path / "x.gguf", "qwen2", model_of("qwen2"))
    data = file.read_bytes().replace(b"qwen2", b"qwen9")
    file.write_bytes(data)
    said = "architecture 'qwen9'.* not known here; known are .*qwen2, .*take the model's folder"
    refuses(said, open_model, str(file), None, CPU)


@pytest.mark.skipif(library.kernels() is None, reason="needs the native kernels")
@torch.inference_mode()
def test_weights_in_few_bits_are_widened(tmp_path):
    model, q8 = model_of("llama"), GGMLQuantizationType.Q8_0
    blocks = {"attn": q8, "ffn": q8, "token_embd": q8}
    file = write(tmp_path / "tiny.gguf", "llama", model, blocks)
    kernels = library.kernels()
    exact = GgufCheckpoint(file, torch.float32, kernels)
    right = logits_of(TorchModel(exact, exact.stack, CPU), IDS)
    in_blocks = GgufCheckpoint(file, torch.bfloat16, kernels)
    assert off(logits_of(TorchModel(in_blocks, in_blocks.stack, CPU), IDS), right) < 0.05
