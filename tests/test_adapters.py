"""Adapters: a folder of LoRA's is the model that peft makes of it, in the native kernels."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cases import refuses
from checkpoints import configure, rewrite
from models import spread_out
from quickbeam import LLM
from quickbeam.models.native import library
from quickbeam.models.opening import open_checkpoint
from quickbeam.models.transformers_class import load_model
from quickbeam.models.weights.adapters import CONFIG, WEIGHTS, adapter_in
from quickbeam.models.weights.digest import digest_of
from quickbeam.models.weights.packed_file import PackedFile
from quickbeam.params import SamplingParams
from test_families import made

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SIZES = {Q: (32, 32), DOWN: (32, 48)}
pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")


@pytest.fixture
def save(tmp_path, toy_folder):
    """Saves a model of a layout with a tokenizer, and returns its folder."""

    def saved(layout):
        made(layout).save_pretrained(tmp_path / "base")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(toy_folder) / name, tmp_path / "base")
        return tmp_path / "base"

    return saved


@pytest.fixture
def base(save):
    return save("llama")


def matrices(rank=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in SIZES.items():
        at = f"base_model.model.{module}"
        tensors[f"{at}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    return tensors


def write(folder, base, tensors=None, **fields):
    """An adapter as peft saves it."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8}
    (folder / CONFIG).write_text(json.dumps(config | fields))
    save_file(matrices() if tensors is None else tensors, folder / WEIGHTS)
    return folder


def opened(folder, dtype=torch.float32):
    return open_checkpoint(str(folder), dtype)


def by_transformers(folder, dtype=torch.float32):
    return load_model(str(folder), dtype, CPU)[0]


def same_model(folder, right, dtype=torch.float32, **close):
    """The native reader and the loader by transformers give the parameters of a model."""
    ours, theirs = opened(folder, dtype), dict(by_transformers(folder, dtype).named_parameters())
    for name, parameter in right.named_parameters():
        assert torch.equal(ours(name), theirs[name]), name
        torch.testing.assert_close(ours(name), parameter.to(dtype), **close)
        assert torch.equal(ours.rows(name, 1, 3), ours(name)[1:3])
        assert torch.equal(ours.mapped(name), ours(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"q_proj": 2}, "rank_pattern": {"q_proj": 4}}, (0.5, 2.0)),
        ({"alpha_pattern": {r"layers\.0\..*": 1}, "use_rslora": True}, (4.0, 0.5)),
    ],
)
def test_scaled_products_are_added_in_float32(base, tmp_path, fields, scales, dtype):
    folder = write(tmp_path / "adapter", base, **fields)
    right = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    parameters, tensors = dict(right.named_parameters()), matrices()
    for module, scale in zip(SIZES, scales, strict=True):
        a, b = (tensors[f"base_model.model.{module}.lora_{one}.weight"] for one in "AB")
        weight = parameters[f"{module}.weight"]
        weight.data = (weight.float() + scale * (b @ a)).to(dtype)
    same_model(folder, right, dtype, rtol=0, atol=0)


def test_whole_parameters_biases_and_new_tokens_come_from_the_adapter(save, tmp_path):
    configure(save("qwen2"), tie_word_embeddings=False)
    right = made("qwen2")
    right.resize_token_embeddings(100)
    spread_out(right, 1, vectors=1.0)
    parameters = dict(right.named_parameters())
    whole = {
        "lm_head.weight": "lm_head.weight",
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.norm.weight": "model.norm.weight",
        "model.layers.0.self_attn.k_proj.bias": "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.q_proj.base_layer.bias": "model.layers.0.self_attn.q_proj.bias",
    }
    tensors = {f"base_model.model.{name}": parameters[own] for name, own in whole.items()}
    folder = write(tmp_path / "adapter", tmp_path / "base", tensors, bias="all")
    ours = opened(folder)
    theirs = dict(by_transformers(folder).named_parameters())
    for own in whole.values():
        assert torch.equal(ours(own), parameters[own]) and torch.equal(theirs[own], parameters[own])
    assert ours.config.vocab_size == 100 and ours.shape("lm_head.weight") == [100, 32]
    del tensors["base_model.model.lm_head.weight"]
    write(folder, tmp_path / "base", tensors)
    for load in (opened, by_transformers):
        refuses(r"lm_head|lora|weight.* shape", load, folder)


def test_a_tied_head_stays_as_it_is(base, tmp_path):
    configure(base, tie_word_embeddings=True)
    rewrite(base, {"lm_head.weight": None})
    at = "base_model.model.model.embed_tokens.lora_embedding"
    tensors = {f"{at}_A": torch.randn(4, 97), f"{at}_B": torch.randn(32, 4)}
    folder = write(tmp_path / "adapter", base, tensors)
    before = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    added = before + 2 * (tensors[f"{at}_B"] @ tensors[f"{at}_A"]).t()
    ours, theirs = opened(folder), by_transformers(folder)
    assert torch.equal(ours("lm_head.weight"), before)
    assert torch.equal(theirs.get_output_embeddings().weight, before)
    assert torch.equal(ours("model.embed_tokens.weight"), added)
    assert torch.equal(theirs.get_input_embeddings().weight, added)


CASES = {
    "plain": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "rank-stabilised": ("llama", {"target_modules": ["q_proj"], "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {r"layers\.1\..*down_proj": 2, "q_proj": 3},
            "alpha_pattern": {"down_proj": 5, r"^model\.layers\.0\.self_attn\.q_proj": 7},
        },
    ),
    "saved modules": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "head and embedding": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "biases": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "own biases": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_adapters_are_merged_as_peft_merges_them(name, dtype, save, tmp_path):
    peft = pytest.importorskip("peft")
    layout, fields = CASES[name]
    base = AutoModelForCausalLM.from_pretrained(save(layout), dtype=dtype)
    settings = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **fields, init_lora_weights=False)
    adapted = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    # peft rounds what it adds to bfloat16 before, and so rounds twice
    close = (
        {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    same_model(tmp_path / "adapter", merged, dtype, **close)


ODD = {
    "DoRA": ({"use_dora": True}, {}),
    "'IA3'": ({"peft_type": "IA3"}, {}),
    "init_lora_weights 'pissa'": ({"init_lora_weights": "pissa"}, {}),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 3]]}, {}),
    "something_new": ({"something_new": True}, {}),
    "lora_magnitude_vector": ({}, {"base_model.model.model.norm.lora_magnitude_vector": (32,)}),
    "no matrices A and B of model.layers.2.x": ({}, {"model.layers.2.x.lora_A.weight": (4, 4)}),
    "model.layers.7.mlp.up_proj.weight, which .*base doesn't have": (
        {},
        {"base_model.model.model.layers.7.mlp.up_proj.weight": (4, 4)},
    ),
    "can't be read": ({"lora_alpha": "many"}, {}),
    "names no model": ({"base_model_name_or_path": None}, {}),
    "for /no/such, which is not here .*download /no/such": (
        {"base_model_name_or_path": "/no/such"},
        {},
    ),
}


@pytest.mark.parametrize("words", ODD)
def test_others_are_refused_by_name(words, base, tmp_path):
    fields, shapes = ODD[words]
    tensors = matrices() | {name: torch.ones(shape) for name, shape in shapes.items()}
    folder = write(tmp_path / "adapter", base, tensors, **fields)
    for load in (opened, by_transformers):
        refuses(words, load, folder)


def test_shapes_of_another_model_and_weights_in_few_bits_are_refused(base, tmp_path):
    tensors = {name: torch.randn(4, 4) for name in matrices()}
    for load in (opened, by_transformers):
        refuses(r"shape \[4, 4\]", load, write(tmp_path / "adapter", base, tensors))
    for rank in (0, 3):
        other = matrices() | {
            f"base_model.model.{Q}.lora_A.weight": torch.randn(rank, SIZES[Q][1]),
        }
        words = rf"matrices B and A of {Q} have shapes \[32, 4\] and \[{rank}, 32\]"
        for load in (opened, by_transformers):
            refuses(words, load, write(tmp_path / "adapter", base, other))
    for load in (opened, by_transformers):
        refuses("holds no tensors", load, write(tmp_path / "adapter", base, {}))
    (tmp_path / "adapter" / WEIGHTS).unlink()
    refuses("no adapter_model.safetensors", opened, tmp_path / "adapter")


@pytest.mark.parametrize("stored", ["safetensors", "bin"])
def test_a_whole_model_beside_an_adapter_runs_as_it_is(base, stored, caplog):
    right = AutoModelForCausalLM.from_pretrained(base)
    write(base, "somebody/model")
    if stored == "bin":
        torch.save(right.state_dict(), base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
    assert adapter_in(base) is None
    assert len(caplog.records) == 1 and "runs as it is" in caplog.text
    weight = right.get_parameter(f"{Q}.weight")
    assert torch.equal(by_transformers(base).get_parameter(f"{Q}.weight"), weight)
    if stored == "safetensors":
        assert torch.equal(opened(base)(f"{Q}.weight"), weight)


def test_an_adapter_for_the_model_beside_it_is_merged(base):
    before = load_file(base / "model.safetensors")[f"{Q}.weight"]
    write(base, base)
    ours = opened(base)(f"{Q}.weight")
    assert not torch.equal(ours, before)
    assert torch.equal(by_transformers(base).get_parameter(f"{Q}.weight"), ours)


@pytest.fixture
def answering(toy_folder, tmp_path):
    """A toy with a tokenizer as the base, an adapter for it, and the two as one model."""
    base = Path(shutil.copytree(toy_folder, tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(base)
    module = "model.layers.0.self_attn.q_proj"
    inputs = model.get_parameter(f"{module}.weight").shape[1]
    a, b = torch.randn(4, inputs), torch.randn(inputs, 4)
    at = f"base_model.model.{module}"
    tensors = {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
    adapter = write(tmp_path / "adapter", base, tensors)
    whole = Path(shutil.copytree(base, tmp_path / "whole"))
    weight = model.get_parameter(f"{module}.weight")
    weight.data = (weight.float() + 2 * (b @ a)).to(weight.dtype)
    model.save_pretrained(whole)
    return adapter, base, whole


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "int8"}, {"memory": 60_000}, {"memory": 60_000, "weights": "int8"}],
    ids=["memory", "int8", "disk", "int8 on disk"],
)
def test_answers_are_those_of_the_merged_model(answering, options, cache):
    adapter, _, whole = answering
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1)
    answers = []
    for folder in (adapter, whole):
        with LLM(str(folder), **options) as llm:
            assert llm.model.exact
            answers.append(llm.generate("hello", params).token_ids)
    assert answers[0] == answers[1]


def test_what_is_kept_of_an_adapter_is_of_its_base_as_well(answering):
    adapter, base, _ = answering

    def kept():
        file = PackedFile.for_checkpoint(str(adapter), None, "int8", None, base=base)
        return file.path, digest_of(str(adapter))

    before = kept()
    assert kept() == before
    file = base / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    after = kept()
    assert before[0] != after[0] and before[1] != after[1]
