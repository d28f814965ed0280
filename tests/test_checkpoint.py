"""A folder as data: the architecture, weights and tokenizer that transformers reads from it."""

import copy
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssForCausalLM,
    LlamaConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from answers import conversation, drafts_change_nothing
from cases import refuses
from checkpoints import LLAMA3, configure, rewrite
from quickbeam import LLM
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.hub.mtp import index_of
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.families import FAMILIES, describe, stack_of
from quickbeam.models.families.reading import ATTRIBUTES, NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native.quantised import dense_rows
from quickbeam.models.rotary import Angles, frequencies, limit_context
from quickbeam.models.text.tokenizer import Tokenizer, load_tokenizer
from quickbeam.models.weights.checkpoint import Checkpoint, read_config
from quickbeam.models.weights.parameters import names
from quickbeam.models.weights.tensor_files import TensorFiles
from quickbeam.params import SamplingParams
from scripts import cli
from target import logits_of
from test_families import CONFIGS, IDS, made, methods


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_says_what_the_model_in_it_is(name, tmp_path):
    model = made(name)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, torch.float32, library.kernels())
    assert checkpoint.stack == describe(model)
    for one, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(checkpoint(one), parameter), one
        last = len(parameter)
        assert torch.equal(checkpoint.rows(one, last - 1, last), parameter[-1:])
    assert checkpoint.config.num_hidden_layers == model.config.num_hidden_layers
    assert checkpoint.config.hidden_size == model.config.hidden_size


def test_vectors_of_another_size_are_refused(tmp_path):
    for name, vector in (
        ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("gemma2", "model.layers.0.post_feedforward_layernorm.weight"),
    ):
        made(name).save_pretrained(tmp_path)
        rewrite(tmp_path, {vector: torch.ones(5)})
        refuses(rf"{vector} has shape \[5\]", Checkpoint, tmp_path, None)


def test_a_model_without_its_head_and_with_tensors_of_another_type(tmp_path):
    model = made("llama", torch.float16)
    model.model.save_pretrained(tmp_path)
    configure(tmp_path, tie_word_embeddings=True)
    checkpoint = Checkpoint(tmp_path, torch.bfloat16, library.kernels())
    rows = model.model.embed_tokens.weight.bfloat16()
    assert torch.equal(checkpoint("model.embed_tokens.weight"), rows)
    assert torch.equal(checkpoint("lm_head.weight"), rows)


def test_a_tied_model_may_be_stored_with_its_head_alone(tmp_path):
    model = made("llama", torch.bfloat16)
    model.save_pretrained(tmp_path)
    configure(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, {"model.embed_tokens.weight": None})
    checkpoint = Checkpoint(tmp_path, torch.bfloat16, library.kernels())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(checkpoint(name), model.lm_head.weight)


def test_a_configuration_of_another_version_is_filled_in_once(tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    sizes = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
    fields = sizes | {"transformers_version": "4.43.0", "rope_theta": 500000.0}
    fields["rope_scaling"] = LLAMA3
    (tmp_path / "config.json").write_text(json.dumps(fields))
    right = stack_of(LlamaConfig.from_pretrained(tmp_path), torch.bfloat16)
    read_config(tmp_path)
    (kept,) = (tmp_path / "cache" / "configs").iterdir()
    kept.write_text("")  # as a power cut may leave it
    first = read_config(tmp_path)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    for config in (first, read_config(tmp_path)):
        assert stack_of(config, torch.bfloat16) == right
        assert config.rope_parameters["rope_theta"] == 500000.0 and not config.mlp_bias
    (tmp_path / "config.json").write_text("{")
    refuses(r"config\.json can't be read", read_config, tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("name", "changes", "gone"),
    [
        ("qwen3", {"rope_scaling": YARN}, "none"),
        ("phi", {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}}, "none"),
        ("llama", {"rope_parameters": PARTIAL}, "tie_word_embeddings"),
        ("qwen2", {"max_window_layers": 1}, "layer_types"),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 6}, "none"),
        ("hunyuan", {"rope_parameters": ALPHA}, "none"),
    ],
)
@torch.inference_mode()
def test_edited_configurations_are_read_as_transformers_reads_them(
    name, changes, gone, tmp_path, cache
):
    made(name).save_pretrained(tmp_path)
    configure(tmp_path, **changes)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop(gone, None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    how: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    right = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **how)
    checkpoint = Checkpoint(tmp_path, torch.float32, library.kernels())
    ours = logits_of(NativeModel(checkpoint, checkpoint.stack, library.kernels()), IDS.tolist())
    theirs = right(IDS[None]).logits[0]
    assert (ours - theirs).abs().max() < 5e-4 * theirs.abs().max()


def test_what_a_family_does_not_describe_is_refused(tmp_path, cache):
    for name, changes, words in (
        ("llama", {"sliding_window": 6}, "a window of 6 without layer_types"),
        ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}, "attention_bias without"),
    ):
        made(name).save_pretrained(tmp_path)
        configure(tmp_path, **changes)
        refuses(words, Checkpoint, tmp_path, torch.float32, error=NotDescribed)


def test_one_file_comes_before_an_index_of_earlier_ones(tmp_path):
    made("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    model = made("llama")
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", {"format": "pt"})
    rewrite(tmp_path, {HEAD: torch.zeros_like(model.lm_head.weight)})
    assert not Checkpoint(tmp_path, torch.float32, library.kernels())(HEAD).any()
    # an index that lists it counts: of a file beside it, as MTP heads come
    both = {"weight_map": dict.fromkeys(model.state_dict(), "model.safetensors")}
    both["weight_map"]["mtp.fc.weight"] = "model_mtp.safetensors"
    save_file({"mtp.fc.weight": torch.ones(2)}, tmp_path / "model_mtp.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(both))
    assert "mtp.fc.weight" in TensorFiles(tmp_path).names and "mtp.fc.weight" in index_of(tmp_path)
    index.unlink()
    assert "mtp.fc.weight" not in TensorFiles(tmp_path).names and index_of(tmp_path) is None


def test_a_file_that_ends_too_early_is_named(tmp_path):
    made("llama").save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, torch.float32, library.kernels())
    os.truncate(tmp_path / "model.safetensors", 5000)
    refuses(r"model\.safetensors: .* ends too early", checkpoint, HEAD, error=QuickbeamError)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    refuses(r"model\.safetensors can't be read", Checkpoint, tmp_path, torch.float32)


@pytest.mark.parametrize("isa", [None, "eager"])
def test_blocks_of_mxfp4_are_read_as_transformers_reads_them(isa, tmp_path, native):
    if isa is not None:
        native(isa)
    config = copy.deepcopy(CONFIGS["gpt_oss"])
    config.intermediate_size = 64
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    right = dict[str, torch.Tensor]()
    for name, (rows, groups) in {"gate_up_proj": (128, 1), "down_proj": (32, 2)}.items():
        for i in range(3):
            at = f"model.layers.{i}.mlp.experts.{name}"
            blocks = torch.randint(0, 256, (5, rows, groups, 16), dtype=torch.uint8)
            scales = torch.randint(0, 256, (5, rows, groups), dtype=torch.uint8)
            stored |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
            del stored[at]
            right[at] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, tmp_path / "model.safetensors")
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    configure(tmp_path, quantization_config=quantised)
    exact, blocks = (
        Checkpoint(tmp_path, dtype, library.kernels()) for dtype in (torch.float32, torch.bfloat16)
    )
    kernels = library.kernels()
    for name, tensor in right.items():
        assert torch.equal(exact(name).bfloat16().nan_to_num(7.0), tensor.nan_to_num(7.0)), name
        part, whole = exact.rows(name, 3, 4), exact(name)[3:4]
        assert torch.equal(part.nan_to_num(7.0), whole.nan_to_num(7.0))
        assert exact.shape(name) == list(tensor.shape)
        assert kernels is None or blocks.like(name).shape == blocks(name).shape
    for name in right:  # finite ones, as weights are
        stored[f"{name}_scales"].clamp_(118, 126)
    save_file(stored, tmp_path / "model.safetensors")
    if kernels is None:
        return
    exact, blocks = (
        Checkpoint(tmp_path, dtype, library.kernels()) for dtype in (torch.float32, torch.bfloat16)
    )
    for name in right:
        assert torch.equal(dense_rows(kernels, blocks(name)), exact(name).transpose(1, 2)), name
    right, near = (
        logits_of(NativeModel(one, one.stack, library.kernels()), IDS.tolist())
        for one in (exact, blocks)
    )
    # rows have 8 bits before they meet the blocks, and some choose other experts by that
    assert (near - right).abs().median() < 0.1 * right.abs().median()
    model = NativeModel(blocks, blocks.stack, library.kernels())
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5)
    plain = conversation(model, params, IDS.tolist(), [[]])
    drafts_change_nothing(model, methods(torch.bfloat16), params, plain)


LINES = Path(__file__).with_name("published_configs.jsonl").read_text().splitlines()
PUBLISHED = {line["name"]: line["config"] for line in map(json.loads, LINES)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_published_are_described(name, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = read_config(tmp_path)
    limit_context(config)
    assert len(stack_of(config, torch.bfloat16).layers) == config.num_hidden_layers
    config.__dict__["odd_scaling"] = 2.0
    refuses("odd_scaling", stack_of, config, torch.bfloat16, error=NotDescribed)


def test_names_of_attributes_are_those_of_transformers():
    for kind in FAMILIES:
        assert ATTRIBUTES.get(kind, {}) == CONFIG_MAPPING[kind].attribute_map, kind


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
    made("deepseek_v3").save_pretrained(tmp_path)
    more = {"model.layers.3.eh_proj.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    rewrite(tmp_path, more)
    assert Checkpoint(tmp_path, torch.float32, library.kernels()).stack.layers
    assert "layers.3.eh_proj.weight, which" in caplog.text and "mtp.norm" not in caplog.text
    caplog.clear()
    configure(tmp_path, num_nextn_predict_layers=1)
    assert Checkpoint(tmp_path, torch.float32, library.kernels()).stack.layers
    assert not caplog.text


def logits_in(folder):
    checkpoint = Checkpoint(folder, None, library.kernels())
    return logits_of(NativeModel(checkpoint, checkpoint.stack, library.kernels()), IDS.tolist())


def language_part(name):
    return name if name.startswith("lm_head") else f"model.language_{name}"


LAYER = "model.layers.1."
TRAINERS = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "layers compiled": lambda name: name.replace(LAYER, f"{LAYER}_orig_mod."),
    "copied to several devices": lambda name: f"module.{name}",
    "copied and compiled": lambda name: f"module._orig_mod.{name}",
    "sharded": lambda name: name.replace(LAYER, f"{LAYER}_fsdp_wrapped_module."),
    "recomputed": lambda name: name.replace(LAYER, f"{LAYER}_checkpoint_wrapped_module."),
    "merged in place": lambda name: name.replace("q_proj.", "q_proj.base_layer."),
    "adapted": lambda name: "base_model.model." + name.replace("up_proj.", "up_proj.base_layer."),
    "a part": lambda name: f"language_model.{name}",
    "an inner part": language_part,
}


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
@pytest.mark.parametrize("name", TRAINERS)
def test_names_that_trainers_give_are_read(name, tmp_path, caplog):
    made("llama", torch.bfloat16).save_pretrained(tmp_path)
    right = logits_in(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {TRAINERS[name](one): tensor for one, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(logits_in(tmp_path), right) and not caplog.records


def test_names_that_can_not_be_mapped_are_said(tmp_path):
    made("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {f"_orig_mod.{HEAD}": tensors[HEAD]})
    refuses(f"hold .*{HEAD} and .*{HEAD}, which are one", Checkpoint, tmp_path, None)
    rewrite(tmp_path, {f"_orig_mod.{HEAD}": None, f"{HEAD[:-7]}.lora_A.default": torch.ones(2)})
    refuses(r"lm_head\.lora_A\.default, which is not merged", Checkpoint, tmp_path, None)
    odd = {one.replace("self_attn", "attention"): of for one, of in tensors.items()}
    save_file(odd, tmp_path / "model.safetensors", {"format": "pt"})
    words = r"lack model.*self_attn.* and its files hold model.*attention.*rename the tensors"
    refuses(words, LLM, str(tmp_path))


def test_shards_without_an_index_are_all_read(tmp_path):
    model = made("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32, library.kernels())
    for name, parameter in model.named_parameters():
        assert torch.equal(checkpoint(name), parameter)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    save_file({"x": torch.ones(1)}, tmp_path / "old-00001-of-00002.safetensors")
    refuses("shards of several sets", Checkpoint, tmp_path, None)
    (tmp_path / "old-00001-of-00002.safetensors").unlink()
    shards[1].unlink()
    words = f"lacks part 2 of {len(shards)} of model: download it again"
    refuses(words, Checkpoint, tmp_path, None)


def pickled(folder, count=1, legacy=False, renamed=lambda name: name):
    """Put the weights of a folder into `.bin` files, as trainers save them."""
    path = folder / "model.safetensors"
    tensors = {renamed(name): tensor for name, tensor in load_file(path).items()}
    path.unlink()
    names, files = sorted(tensors), ["pytorch_model.bin"]
    if count > 1:
        files = [f"pytorch_model-{i + 1:05}-of-{count:05}.bin" for i in range(count)]
        listed = {name: files[i % count] for i, name in enumerate(names)}
        index = json.dumps({"weight_map": listed})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    for i, file in enumerate(files):
        part = {name: tensors[name] for name in names[i::count]}
        torch.save(part, folder / file, _use_new_zipfile_serialization=not legacy)
    return files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("gpt2", {"count": 3}),
        ("mixtral", {"legacy": True}),
        ("llama", {"renamed": TRAINERS["copied and compiled"]}),
    ],
)
def test_pickles_are_read_as_safetensors_are(name, more, dtype, tmp_path):
    made(name).save_pretrained(tmp_path)
    right = Checkpoint(tmp_path, dtype, library.kernels())
    tensors = {one: right(one) for one in names(right.stack)}
    pickled(tmp_path, **more)
    checkpoint = Checkpoint(tmp_path, dtype, library.kernels())
    assert checkpoint.stack == right.stack
    for one, tensor in tensors.items():
        assert torch.equal(checkpoint(one), tensor) and checkpoint.shape(one) == [*tensor.shape]
        assert torch.equal(checkpoint.rows(one, 1, 3), tensor[1:3])
        assert torch.equal(checkpoint.mapped(one), tensor)


def test_parts_of_pickles_that_lack_are_named(tmp_path):
    made("llama").save_pretrained(tmp_path)
    files = pickled(tmp_path, count=3)
    (tmp_path / files[1]).unlink()
    refuses(f"{files[1]} can't be read .*download it again", Checkpoint, tmp_path, None)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    refuses("lacks part 2 of 3 of pytorch_model", Checkpoint, tmp_path, None)
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    refuses(r"has no weights: .* no pytorch_model\.bin; download", Checkpoint, tmp_path, None)


class Code:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_that_are_broken_or_hold_more_than_tensors_are_refused(tmp_path):
    made("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    pickled(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    for state, words in (
        (tensors | {"step": Code(tmp_path / "ran")}, "it is damaged, or holds more than tensors"),
        (tensors | {"step": 3}, "'step' is a int, and no tensor"),
        ([*tensors.values()], "it holds a list"),
    ):
        torch.save(state, path)
        refuses(rf"bin can't be read \({words}.*download it again", Checkpoint, tmp_path, None)
    assert not (tmp_path / "ran").exists()
    torch.save(tensors | {"lm_head.weight": torch.ones(3)}, path)
    refuses(r"lm_head\.weight has shape \[3\]", Checkpoint, tmp_path, None)
    whole = path.read_bytes()
    for data in (b"", b"version https://git-lfs.github.com\n", whole[:-2000], whole[:4] + bytes(9)):
        path.write_bytes(data)
        refuses("bin can't be read .*download it again", Checkpoint, tmp_path, None)


STRAYS = {
    "value head": {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": [1.0]},
    "scales of keys": {"model.layers.0.self_attn.k_scale": [2.0]},
    "layer": {"model.layers.3.self_attn.q_proj.weight": torch.ones(32, 32)},
    "bias of zeros": {"model.layers.0.self_attn.q_proj.bias": [0.0] * 32},
    "tokens": {"tokens": torch.ones(3, dtype=torch.uint32)},
}


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
@pytest.mark.parametrize("name", STRAYS)
def test_what_the_architecture_has_no_use_for_is_left_out_with_a_word(name, tmp_path, caplog):
    made("llama", torch.bfloat16).save_pretrained(tmp_path)
    right = logits_in(tmp_path)
    rewrite(tmp_path, {one: torch.as_tensor(of) for one, of in STRAYS[name].items()})
    assert torch.equal(logits_in(tmp_path), right)
    assert len(caplog.records) == (name != "bias of zeros")
    assert name == "bias of zeros" or min(STRAYS[name]) in caplog.text


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("every", [True, False])
def test_other_numbers_are_converted_with_a_word(dtype, every, tmp_path, caplog):
    made("llama", torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    chosen = sorted(tensors) if every else ["model.layers.0.mlp.up_proj.weight"]
    changed = {one: tensors[one].to(dtype) for one in chosen}
    rewrite(tmp_path, {one: tensor.bfloat16() for one, tensor in changed.items()})
    right = logits_in(tmp_path)
    rewrite(tmp_path, changed)
    if every and dtype.itemsize == 1:
        configure(tmp_path, dtype=str(dtype).removeprefix("torch."))
    assert torch.equal(logits_in(tmp_path), right)
    assert chosen[0] in caplog.text and "become bfloat16" in caplog.text


def test_weights_in_few_bits_are_never_read_as_plain_ones(tmp_path):
    made("llama", torch.bfloat16).save_pretrained(tmp_path)
    at = "model.layers.0.mlp.up_proj"
    for part in ("weight_scale", "weight_scale_inv", "scales", "biases", "weight.absmax"):
        rewrite(tmp_path, {f"{at}.{part}": torch.ones(3)})
        refuses(f"hold {at}.{part}.*no quantization_config", Checkpoint, tmp_path, None)
        rewrite(tmp_path, {f"{at}.{part}": None})
    for dtype in (torch.int8, torch.uint8):
        rewrite(tmp_path, {f"{at}.weight": torch.ones(48, 32, dtype=dtype)})
        words = f"hold {at}.weight as integers .*no quantization_config"
        refuses(words, Checkpoint, tmp_path, None)
    weight = {f"{at}.weight": None, f"{at}.qweight": torch.ones(3, dtype=torch.int32)}
    rewrite(tmp_path, weight)
    refuses(f"hold {at}.qweight.*no quantization_config", Checkpoint, tmp_path, None)
    for fields in ({}, {"quantization_config": {"group_size": 64, "bits": 4}}):
        configure(tmp_path, quantization={"group_size": 64, "bits": 4}, **fields)
        words = r"quantised by MLX \(4 bits, groups of 64\); read are AWQ.*unquantised weights"
        refuses(words, Checkpoint, tmp_path, None)


def test_what_is_stored_otherwise_is_refused(tmp_path):
    made("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for change, reason in [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by bitsandbytes"),
        ({"model_type": "rwkv"}, "no family"),
        ({"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, "'odd'; known: default"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        refuses(reason, Checkpoint, tmp_path, torch.float32, error=NotDescribed)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    rewrite(tmp_path, {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    refuses(r"q_proj\.bias", Checkpoint, tmp_path, torch.float32, error=NotDescribed)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 16.0},
    {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 20},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5},
    {"rope_type": "longrope", "short_factor": [1 + i / 10 for i in range(16)]},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_angles_are_those_of_transformers(rope):
    more = {"rope_theta": 50000.0, "original_max_position_embeddings": 1024}
    more |= {"factor": None, "long_factor": [2.0] * 16}
    sizes = dict(hidden_size=128, num_attention_heads=4, max_position_embeddings=8192)
    config = LlamaConfig(**sizes, rope_parameters=more | rope)
    theirs = LlamaRotaryEmbedding(config)
    limit_context(config)
    speeds, factor = frequencies(config.rope_parameters, 32)
    assert torch.equal(speeds, theirs.inv_freq) and factor == theirs.attention_scaling
    positions = torch.arange(300)
    ours, right = Angles(config.rope_parameters, 32), theirs(torch.empty(1), positions[None])
    for one, other in zip(ours.at(positions), right, strict=True):
        assert torch.equal(one, other[0, :, :16])


def test_angles_that_lack_a_parameter_say_so():
    with pytest.raises(InvalidInput, match=r"'llama3' lack 'factor'|'llama3' lack .*"):
        frequencies({"rope_type": "llama3", "rope_theta": 1e4}, 32)


TEXTS = [
    "",
    "Hello world",
    " a  b\n\n\tdef f(x): return x**2 # é ü 漢字 🦄",
    "e\u0301 o\u0308 \ufb01 \u2581 x \u200b\ufeff\r\n",
    "<|im_start|>user\nhi<|im_end|><bos>x<eos> <start_of_turn>user<|endoftext|>",
    "don't 12345 1,000.5",
    Path(__file__).read_text(encoding="utf-8"),
]
HI, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
REPLIED = {"role": "assistant", "content": "Yes ", "reasoning": "hm"}
HEAD = "lm_head.weight"
TURNS = [[HI], [SYSTEM, {**HI, "name": None}, REPLIED]]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REPLY: dict[str, Any] = {"add_generation_prompt": True}
WAYS = [REPLY, {}, {"continue_final_message": True}, {"tools": [TOOL], **REPLY}]


def same_tokenizers(folder):
    ours = load_tokenizer(folder, read_config(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, Tokenizer)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    for text in TEXTS:
        for special in (True, False):
            ids = ours(text, add_special_tokens=special)["input_ids"]
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                shown = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == shown
    for name in ("eos_token_id", "special_tokens_map", "all_special_tokens", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_added_vocab() == theirs.get_added_vocab() and len(ours) == len(theirs)
    some = [0, 5, len(ours) - 1, 10**7]
    assert ours.convert_ids_to_tokens(some) == theirs.convert_ids_to_tokens(some)
    for turns in TURNS if theirs.chat_template else []:
        for way in WAYS:
            text = theirs.apply_chat_template(turns, tokenize=False, **way)
            assert ours.apply_chat_template(turns, tokenize=False, **way) == text
            ids = theirs.apply_chat_template(turns, return_dict=False, **way)
            assert ours.apply_chat_template(turns, **way) == ids


TEMPLATE = """{%- for message in messages if message.role != 'tool' %}
  {%- generation %}[{{ message.role }}] {{ message.content | trim }}{% endgeneration %}
  {%- if message.thinking %}({{ message.thinking }}/{{ message.reasoning_content }}){% endif %}
  {%- if loop.last %}{% break %}{% endif %}
{% endfor -%}
{%- set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=eos_token) | tojson }}
{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}
{%- if name is defined %}{{ name }}{% endif %}
{%- if add_generation_prompt %}[reply]{% endif %}"""


@pytest.fixture
def toy(toy_folder, tmp_path):
    for path in Path(toy_folder).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_templates_are_rendered_as_transformers_renders_them(toy):
    ours, theirs = load_tokenizer(toy, read_config(toy)), AutoTokenizer.from_pretrained(toy)
    blocks = [{"role": "user", "content": [{"type": "text", "text": "<b>"}], "extra": (1, 2.5)}]
    for turns in (*TURNS, blocks):
        for way in (*WAYS[:2], WAYS[3], {"name": ("x", 1)}):
            text = theirs.apply_chat_template(turns, tokenize=False, **way)
            assert ours.apply_chat_template(turns, tokenize=False, **way) == text
    given = TURNS[1], {"tokenize": False, "continue_final_message": True}
    shown, right = (one.apply_chat_template(given[0], **given[1]) for one in (ours, theirs))
    assert shown == right


def test_templates_stay_in_their_sandbox(toy):
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
    ):
        (toy / "chat_template.jinja").write_text(template)
        outcomes = []
        both = load_tokenizer(toy, read_config(toy)), AutoTokenizer.from_pretrained(toy)
        for tokenizer in both:
            try:
                outcomes.append(tokenizer.apply_chat_template(TURNS[0], tokenize=False))
            except Exception as error:
                outcomes.append(type(error).__name__)
        assert outcomes[0] == outcomes[1]


def test_tokenizers_are_those_of_transformers_and_others_are_read_by_it(smollm2, toy):
    same_tokenizers(smollm2)
    fields = json.loads((toy / "tokenizer_config.json").read_text())
    changes = {"tokenizer_class": "BertTokenizer", "image_token": "<image>"}
    changes |= {"clean_up_tokenization_spaces": True, "extra_special_tokens": {"a": "b"}}
    changes["add_prefix_space"] = True
    for change in ({name: value} for name, value in changes.items()):
        (toy / "tokenizer_config.json").write_text(json.dumps(fields | change))
        try:
            tokenizer = load_tokenizer(toy, read_config(toy))
        except (ValueError, OSError, TypeError):
            continue
        assert not isinstance(tokenizer, Tokenizer)
    added = {"300": {"content": "<new>", "special": False}}
    added |= {"301": {"content": "<other>", "lstrip": True}}
    changes = {"added_tokens_decoder": added, "extra_special_tokens": ["<more>"]}
    for change in ({name: value} for name, value in changes.items()):
        (toy / "tokenizer_config.json").write_text(json.dumps(fields | change))
        same_tokenizers(toy)
    change = {"tokenizer_class": "Qwen2Tokenizer"}  # splits texts as it does, not as it is told
    (toy / "tokenizer_config.json").write_text(json.dumps(fields | change))
    ours, theirs = load_tokenizer(toy, read_config(toy)), AutoTokenizer.from_pretrained(toy)
    for text in (*TEXTS, "a  b\n\n<y>\n 12"):
        assert isinstance(ours, Tokenizer) and ours.encode(text) == theirs.encode(text)
    pieces = [
        one.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a1  b") for one in (ours, theirs)
    ]
    assert pieces[0] == pieces[1]


def test_other_threads_run_while_a_long_text_becomes_tokens(smollm2):
    tokenizer = load_tokenizer(smollm2, read_config(smollm2))
    ticks, over = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    tokenizer.encode("1234567890" * 40_000)
    over.set()
    thread.join()
    assert ticks > 20


ALONE = """
import sys
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
llm = LLM(sys.argv[1], "ar")
answer = llm.chat([{"role": "user", "content": "abc"}], SamplingParams(max_tokens=2))
assert llm.model.exact and len(answer.token_ids) > 0
left = {"transformers", "torch._dynamo", "scipy", "sympy"} & sys.modules.keys()
assert not left, left
"""


def test_an_answer_needs_no_transformers(toy, toy_folder):
    weights = Path(toy_folder) / "model.safetensors"
    (toy / "model.safetensors").write_bytes(weights.read_bytes())
    subprocess.run([sys.executable, "-c", ALONE, str(toy)], check=True)


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
def test_fields_that_do_not_fit_are_named(tmp_path):
    for name, changes, words in (
        ("gemma3", {"num_hidden_layers": "3"}, "can't be read"),
        ("gemma3", {"num_key_value_heads": 3}, "4 heads of queries, 3 of keys"),
        ("gemma3", {"layer_types": ["full_attention"]}, "can't be read"),
        ("gemma3", {"num_hidden_layers": 10**9}, "can't be read"),
        ("qwen3_moe", {"num_experts": 10**9}, "can't be read"),
        ("qwen3_moe", {"num_experts_per_tok": 2.0}, r"2\.0 of 7 experts"),
        ("llama", {"model_type": ["llama"]}, r"the model_type \['llama'\]"),
        ("llama", {"rms_norm_eps": "x"}, "can't be read"),
        ("llama", {"rope_parameters": "x"}, "can't be read"),
        ("llama", {"max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
        ("gemma3", {"hidden_size": [32]}, "can't be read"),
        ("glm4_moe", {"n_group": 3}, "3 of 8 experts selected in 2 of 3 groups"),
        ("gpt2", {"n_positions": 1024}, "wpe.weight has shape"),
        ("bamba", {"mamba_d_conv": 3}, "conv1d.weight.* has shape"),
        ("qwen3_next", {"linear_num_value_heads": 6}, "has shape"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
    ):
        made(name).save_pretrained(tmp_path)
        configure(tmp_path, **changes)
        refuses(words, LLM, str(tmp_path))
        shown = cli("generate", "hi", "--model", str(tmp_path))
        assert shown.exit_code == 2 and re.search(words, " ".join(shown.output.split()))
