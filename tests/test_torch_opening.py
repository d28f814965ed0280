"""Models that the torch back end reads: from the same files, by the same reader as the kernels'."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases import few, raising, refuses
from gguf_files import TINY, model_of, write
from quickbeam.models import opening
from quickbeam.models.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.native import library
from quickbeam.models.opening import open_model
from quickbeam.models.torch.model import TorchModel
from streaming import saved
from target import logits_of

CPU = torch.device("cpu")
IDS = [5, 17, 80, 3, 3, 9, 12, 7, 44, 20, 31, 8]


def off(got, right):
    return float((got.float() - right.float()).abs().max() / right.float().abs().max())


@pytest.fixture
def read_by_us(monkeypatch):
    monkeypatch.setattr(opening, "_by_transformers", raising(AssertionError("transformers")))


@pytest.mark.parametrize(("dtype", "far"), [("float16", 5e-3), ("float32", 2e-5)])
@torch.inference_mode()
def test_a_folder_without_kernels_or_in_half_precision(
    dtype, far, toy_folder, tmp_path, native, read_by_us
):
    native("eager")
    folder, kind = saved("qwen3", tmp_path, toy_folder), getattr(torch, dtype)
    loaded = open_model(folder, kind, CPU)
    assert isinstance(loaded.model, TorchModel) and loaded.model.dtype is kind
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert off(logits_of(loaded.model, IDS), plain(torch.tensor([IDS])).logits[0]) < far
    refuses("need the native kernels", open_model, folder, torch.bfloat16, CPU, weights="int8")


@torch.inference_mode()
def test_half_precision_needs_no_environment(toy_folder, tmp_path, read_by_us):
    folder = saved("llama", tmp_path, toy_folder)
    assert isinstance(open_model(folder, torch.float16, CPU).model, TorchModel)


@pytest.mark.skipif(library.kernels() is None, reason="needs the native kernels")
@pytest.mark.parametrize("architecture", few(TINY, ["llama", "qwen35moe", "gpt-oss", "gemma4"]))
@torch.inference_mode()
def test_a_gguf_file_has_the_logits_of_transformers(architecture, tmp_path):
    model = model_of(architecture)
    file = write(tmp_path / "tiny.gguf", architecture, model)
    checkpoint = GgufCheckpoint(file, torch.float32, library.kernels())
    ours = TorchModel(checkpoint, checkpoint.stack, CPU)
    assert off(logits_of(ours, IDS), model(torch.tensor([IDS])).logits[0]) < 2e-4


@pytest.mark.skipif(library.kernels() is None, reason="needs the native kernels")
@torch.inference_mode()
def test_weights_in_few_bits_are_widened(tmp_path, read_by_us):
    import gguf

    model, q8 = model_of("llama"), gguf.GGMLQuantizationType.Q8_0
    blocks = {"attn": q8, "ffn": q8, "token_embd": q8}
    file = write(tmp_path / "tiny.gguf", "llama", model, blocks)
    kernels = library.kernels()
    exact = GgufCheckpoint(file, torch.float32, kernels)
    right = logits_of(TorchModel(exact, exact.stack, CPU), IDS)
    in_blocks = GgufCheckpoint(file, torch.bfloat16, kernels)
    assert off(logits_of(TorchModel(in_blocks, in_blocks.stack, CPU), IDS), right) < 0.05
