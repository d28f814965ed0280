"""Whole models with weights of 8 and 4 bits: the same answers by every method, alone and in a
batch, and what is kept on disk.

pytest tests/test_weights_models.py
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    Gemma3Config,
    Gemma3TextConfig,
    PhimoeConfig,
    PreTrainedConfig,
)

from models import SIZES, tiny
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.models import weight_file
from quickbeam.models.linear import NativeLinear
from quickbeam.models.model import Model
from quickbeam.models.native import build, library
from quickbeam.models.native.quantised import INT4, INT8, QuantisedPacked
from quickbeam.models.quantised import QuantisedLinear, quantise
from quickbeam.models.target import Target
from quickbeam.models.weight_file import WeightFile
from quickbeam.params import SamplingParams
from test_exact import one_at_a_time, rows_that_differ

kinds = pytest.mark.parametrize("name", [INT8, INT4])
needs_kernels = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
PROMPTS = ["abcabcabcab", "one two one two one", "x = f(x) + f(x)"]
METHODS = ["ar", "pld", "logitspec"]


@pytest.fixture(autouse=True)
def cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A cache folder of the test's own, with the kernels that are compiled already."""
    from quickbeam.hub import cache_folder

    folder = tmp_path_factory.mktemp("cache")
    for file in ("kernels", "smollm2-135m"):
        if (cache_folder() / file).exists():
            os.symlink(cache_folder() / file, folder / file)
    monkeypatch.setenv("QUICKBEAM_CACHE", str(folder))
    yield folder


def ids(count: int) -> list[int]:
    return [(7 * i + 3) % 97 for i in range(count)]


@kinds
@pytest.mark.parametrize("way", [pytest.param("native", marks=needs_kernels), "eager"])
def test_methods_batches_and_seeds_give_the_same_answers(
    toy_folder: str, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICKBEAM_KERNELS", way)
    llm = LLM(toy_folder, "ar", weights=name)
    assert llm.kernels.endswith(f", {name})") and llm.kernels.startswith(
        "native (" if way == "native" else "PyTorch's"
    )
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True),
    ):
        alone = [llm.generate(prompt, params, method="ar").token_ids for prompt in PROMPTS]
        for method in METHODS[1:]:
            llm.reset()
            assert [
                llm.generate(prompt, params, method=method).token_ids for prompt in PROMPTS
            ] == alone, method
        if way == "native":
            llm.reset()
            assert [
                found.token_ids
                for found in llm.generate(PROMPTS, params, method="logitspec", progress=False)
            ] == alone
    llm.close()


@kinds
@needs_kernels
@pytest.mark.parametrize("layout", ["llama", "qwen3", "gpt2"])
def test_trees_have_the_bits_of_one_token_at_a_time(name: str, layout: str) -> None:
    target = Target(Model(tiny(layout, torch.bfloat16), exact=True, weights=name))
    prompt, tokens = ids(70)[:58], ids(70)[58:]
    expected = one_at_a_time(target, prompt, tokens)
    assert rows_that_differ(target, prompt, tokens, expected, 0) == 0


@kinds
@needs_kernels
def test_other_weights_give_other_logits_and_near_ones(name: str) -> None:
    plain, other = (
        Target(Model(tiny("llama", torch.bfloat16), weights=kind)) for kind in ("bfloat16", name)
    )
    a, b = plain.prefill(ids(40)), other.prefill(ids(40))
    error = float((a - b).norm() / a.norm())
    assert 0 < error < (0.05 if name == INT8 else 0.5)


@kinds
@needs_kernels
def test_every_layer_and_the_head_are_quantised(name: str) -> None:
    model = tiny("gpt2", torch.bfloat16)
    head = model.get_output_embeddings()
    weight = head.weight.detach().clone()
    found = Model(model, weights=name)
    packed = [module.packed for module in model.modules() if isinstance(module, NativeLinear)]
    assert len(packed) == 3 * 4 + 1 and all(isinstance(one, QuantisedPacked) for one in packed)
    # the head has 8 bits at least
    assert torch.equal(found.head.packed.rows(), quantise(weight, INT8).dense[:, :32].bfloat16())
    assert not any(type(module) is nn.Linear for module in model.modules())


def test_without_kernels_the_plain_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    for fast in (True, False):
        model = tiny("llama", torch.bfloat16)
        found = Model(model, fast=fast, weights=INT8)
        assert sum(isinstance(module, QuantisedLinear) for module in model.modules()) == 3 * 7 + 1
        assert Target(found).prefill(ids(9)).isfinite().all()


@needs_kernels
@pytest.mark.slow
@kinds
def test_the_embedded_model_answers_alike(name: str) -> None:
    llm, params = LLM(weights=name), SamplingParams(max_tokens=12)
    asked = [{"role": "user", "content": "Name three rivers."}]
    expected = llm.chat(asked, params, method="ar").token_ids
    for method in ("logitspec", "auto"):
        assert llm.chat(asked, params, method=method).token_ids == expected, method
    llm.close()


# --- what is kept ---


def logits(folder: str | Path, name: str, told: list[str]) -> torch.Tensor:
    llm = LLM(str(folder), "ar", weights=name, progress=lambda stage, fraction: told.append(stage))
    found = Target(llm.model).prefill(ids(20))
    llm.close()
    return found


@kinds
@needs_kernels
def test_kept_weights_give_the_same_bits(toy_folder: str, name: str, cache: Path) -> None:
    first, second = list[str](), list[str]()
    a, b = logits(toy_folder, name, first), logits(toy_folder, name, second)
    assert (
        torch.equal(a, b)
        and f"quantising to {name}" in first
        and f"quantising to {name}" not in second
    )
    (file,) = (cache / "weights").glob("*.safetensors")
    assert name in file.name
    older = file.with_name(f"{file.stem.rpartition('-')[0]}-older.safetensors")
    older.touch()
    left = file.with_name(f".{file.name}.1.tmp")
    left.write_bytes(b"of a process that was killed")
    file.write_bytes(file.read_bytes()[:100])  # what can't be read is made again
    third = list[str]()
    assert torch.equal(logits(toy_folder, name, third), a) and f"quantising to {name}" in third
    assert file.is_file() and not older.exists()  # of an earlier layout
    assert not left.exists()


@needs_kernels
def test_a_checkpoint_that_changes_is_quantised_again(
    toy_folder: str, tmp_path: Path, cache: Path
) -> None:
    folder, told = Path(shutil.copytree(toy_folder, tmp_path / "model")), list[str]()
    before = logits(folder, INT8, told)
    model = LLM(str(folder), "ar", dtype="float32", fast=False).model._model
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)
    told.clear()
    assert not torch.equal(logits(folder, INT8, told), before) and f"quantising to {INT8}" in told
    assert len(list((cache / "weights").glob("*.safetensors"))) == 2


@needs_kernels
def test_a_full_disk_is_a_warning(
    toy_folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_file, "save_file", full)
    with caplog.at_level(logging.WARNING):
        logits(toy_folder, INT8, [])
    assert (
        "can't be kept" in caplog.text
        and "No space left" in caplog.text
        and "QUICKBEAM_CACHE" in caplog.text
    )
    assert [file.suffix for file in (cache / "weights").iterdir()] == [".lock"]


def test_weights_of_an_unknown_place_and_of_adapters_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for place in ("somebody/model", str(tmp_path)):
        file = WeightFile.of(place, None, INT8, None)
        file.write(torch.zeros(3, dtype=torch.uint8))
        assert file.path is None and file.read(3) is None
    assert (
        WeightFile.of("somebody/model", "c0ffee", INT8, None).path
        != WeightFile.of("somebody/model", "c0ffed", INT8, None).path
    )


def test_kept_weights_are_of_what_the_code_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in weight_file.LAYOUT:
        shutil.copy(build.HERE / name, tmp_path)
    monkeypatch.setattr(build, "HERE", tmp_path)

    def path() -> Path | None:
        return WeightFile.of("somebody/model", "c0ffee", INT8, None).path

    first, source = path(), tmp_path / "quantised.py"
    assert path() == first
    source.write_text(source.read_text() + "ROUNDED = True\n")
    assert path() != first


# --- what is refused ---


def test_what_can_not_be_quantised_is_refused(toy_folder: str) -> None:
    with pytest.raises(InvalidInput, match="unknown weights 'int2'; known: bfloat16, int8, int4"):
        LLM(toy_folder, weights="int2")
    with pytest.raises(InvalidInput, match="weights='int8' go with rows of bfloat16, not float32"):
        LLM(toy_folder, weights="int8", dtype="float32")
    with pytest.raises(InvalidInput, match="are for the CPU, the model is on meta"):
        Model(tiny("llama", torch.bfloat16).to("meta"), weights=INT8)
    with pytest.raises(InvalidInput, match="several experts"):
        Model(tiny("gpt-oss-sinks", torch.bfloat16), weights=INT4)
    routed = PhimoeConfig(**SIZES, num_local_experts=4)
    with pytest.raises(InvalidInput, match=r"PhimoeExperts holds .*several experts"):
        Model(tiny("", torch.bfloat16, config=routed), weights=INT8)


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**{k: v for k, v in SIZES.items() if "key_value" not in k}, is_decoder=True),
        Gemma3Config(
            text_config=Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=6).to_dict(),
            vision_config=dict(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                image_size=28,
                patch_size=14,
            ),
            mm_tokens_per_image=4,
            image_token_index=90,
            boi_token_index=91,
            eoi_token_index=92,
        ),
    ],
    ids=["bert", "gemma3"],
)
def test_tables_of_whole_numbers_are_no_quantised_weights(config: PreTrainedConfig) -> None:
    target = Target(Model(tiny("", torch.bfloat16, config=config), weights=INT8))
    assert target.prefill(ids(20)).isfinite().all()


def test_weights_that_others_quantised_are_refused() -> None:
    class Linear4bit(nn.Linear):
        """As bitsandbytes' and others'."""

    model = tiny("llama", torch.bfloat16)
    model.model.layers[0].set_submodule("mlp.up_proj", Linear4bit(32, 48, dtype=torch.bfloat16))
    with pytest.raises(
        InvalidInput,
        match=r"own weights are quantised or adapted \(Linear4bit\); .*unquantised weights",
    ):
        Model(model, weights=INT8)
    model, packed = tiny("llama", torch.bfloat16), nn.Module()
    packed.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    model.model.layers[0].set_submodule("mlp.up_proj", packed)
    with pytest.raises(InvalidInput, match="own weights are quantised"):
        Model(model, weights=INT8)


@needs_kernels
def test_not_finite_rows_are_an_error(toy_folder: str) -> None:
    llm = LLM(toy_folder, "ar", weights=INT8)
    with torch.no_grad():
        llm.model.embedding.weight[ord("a")] = torch.nan
    plain = LLM(toy_folder, "ar")
    with torch.no_grad():
        plain.model.embedding.weight[ord("a")] = torch.nan
    errors = []
    for one in (llm, plain):
        with pytest.raises(Exception, match=r".") as caught:
            one.generate([ord("a")] * 5, SamplingParams(max_tokens=4))
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
