"""Whole models with weights of 8 and 4 bits: the same answers by every method, alone and in a
batch, and what is kept on disk."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases import FULL, few, raising, refuses
from models import UNDESCRIBED, tiny
from quantised import quantise
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.models.families import describe
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BFLOAT16, INT4, INT8
from quickbeam.models.opening import make_model
from quickbeam.models.weights.packed_file import PackedFile
from quickbeam.models.weights.packing import PackedWeights
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.params import SamplingParams
from streaming import ids
from target import Target

pytestmark = pytest.mark.usefixtures("cache")
kinds = pytest.mark.parametrize("name", [INT8, INT4])
needs_kernels = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")


@kinds
@needs_kernels
def test_layers_have_the_bits_asked_for_and_the_head_8_at_least(name):
    model = tiny("llama", torch.bfloat16)
    down = model.model.layers[1].mlp.down_proj
    layer, head = (one.weight.detach().clone() for one in (down, model.lm_head))
    stack = describe(model)
    packed = PackedWeights(ModelParameters(model), stack, library.kernels(), name)
    packed.memory = torch.empty(packed.size, dtype=torch.uint8)
    for linear, weight, kind in (
        (stack.layers[1].feed_forward.down, layer, name),
        (stack.head, head, INT8),
    ):
        right = quantise(weight, kind).dense[:, : weight.shape[1]].bfloat16()
        assert torch.equal(packed(linear).rows(), right)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", few([INT8, INT4], []))
def test_the_built_in_model_answers_alike(name):
    llm, params = LLM(weights=name), SamplingParams(max_tokens=12)
    asked = [{"role": "user", "content": "Name three rivers."}]
    expected = llm.chat(asked, params, method="ar").token_ids
    for method in ("logitspec", "auto"):
        assert llm.chat(asked, params, method=method).token_ids == expected, method
    llm.close()


def logits(folder, name, stages):
    llm = LLM(str(folder), "ar", weights=name, progress=lambda stage, _: stages.append(stage))
    got = Target(llm.model).prefill(ids(20))
    llm.close()
    return got


@needs_kernels
@pytest.mark.parametrize("name", [BFLOAT16, INT8, INT4])
def test_kept_weights_give_the_same_bits(toy_folder, name, cache, monkeypatch):
    monkeypatch.setattr("quickbeam.models.compile.compiled_stack.SMALL", 0)
    stage = "packing weights" if name == BFLOAT16 else f"quantising to {name}"
    right, made = None, list[bool]()
    for _ in range(3):
        stages = list[str]()
        same = logits(toy_folder, name, stages)
        right = same if right is None else right
        assert torch.equal(same, right)
        made.append(stage in stages)
        (file,) = (cache / "weights").glob(f"*-{name}-*.safetensors")
        if len(made) == 2:
            file.write_bytes(file.read_bytes()[:100])  # what can't be read is made again
    assert made == [True, False, True]


def as_in_an_image(folder):
    """Give all files one time, as archives and image layers do."""
    for file in folder.iterdir():
        os.utime(file, ns=(1, 1))


@needs_kernels
def test_small_weights_are_packed_anew_and_others_as_they_change(toy_folder, cache, tmp_path):
    logits(toy_folder, BFLOAT16, stages := list[str]())
    assert not list((cache / "weights").glob("*.safetensors")) and "packing weights" not in stages
    folder, stages = Path(shutil.copytree(toy_folder, tmp_path / "model")), list[str]()
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder)
    as_in_an_image(folder)
    before = logits(folder, INT8, stages)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)
    as_in_an_image(folder)
    stages.clear()
    assert not torch.equal(logits(folder, INT8, stages), before)
    assert f"quantising to {INT8}" in stages
    assert len(list((cache / "weights").glob("*.safetensors"))) == 1


@needs_kernels
def test_a_full_disk_is_a_warning(toy_folder, cache, monkeypatch, caplog):
    monkeypatch.setattr(os, "fsync", raising(FULL))
    with caplog.at_level(logging.WARNING):
        logits(toy_folder, INT8, [])
    assert all(one in caplog.text for one in ("can't be kept", "No space left", "QUICKBEAM_CACHE"))
    assert [file.suffix for file in (cache / "weights").iterdir()] == [".lock"]


def test_weights_of_an_unknown_place_are_not_kept():
    file = PackedFile.for_checkpoint("somebody/model", None, INT8, None)
    file.write(3, lambda: [torch.zeros(3, dtype=torch.uint8)], "")
    assert file.path is None and file.read(3) is None
    of = [
        PackedFile.for_checkpoint("somebody/model", one, INT8, None).path
        for one in ("c0ffee", "c0ffed")
    ]
    assert of[0] != of[1]


def test_what_can_not_be_quantised_is_refused(toy_folder, monkeypatch):
    refuses("unknown weights 'int2'; known: bfloat16, int8, int4", LLM, toy_folder, weights="int2")
    with pytest.raises(InvalidInput, match="weights='int8' go with rows of bfloat16, not float32"):
        LLM(toy_folder, weights="int8", dtype="float32")
    with pytest.raises(InvalidInput, match="are for the CPU, the model is on meta"):
        make_model(tiny("llama", torch.bfloat16).to("meta"), weights=INT8)
    with pytest.raises(InvalidInput, match="describes jetmoe"):
        make_model(tiny("", torch.bfloat16, config=UNDESCRIBED), weights=INT4)
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    with pytest.raises(InvalidInput, match="weights='int8' need the native kernels: QUICKBEAM_K"):
        make_model(tiny("llama", torch.bfloat16), weights=INT8)
