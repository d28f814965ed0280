"""Models in `.gguf` files as they are: architectures, tokenizers, answers, and files that lie.

pytest tests/test_gguf.py
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from models import CONFIGS, SIZES, tiny
from quickbeam import LLM, SamplingParams
from quickbeam.errors import InvalidInput
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.architecture import ARCHITECTURES
from quickbeam.models.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.gguf.file import GgufFile
from quickbeam.models.gguf.tokenizer import load_tokenizer
from quickbeam.models.native import library
from quickbeam.models.native_model import NativeModel
from quickbeam.models.target import Target
from streaming import alike, limits_of, of_disk

KERNELS = library.kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="needs the native kernels")

WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 288}
TINY = {
    "llama": CONFIGS["llama-multi-head"],
    "qwen2": CONFIGS["qwen2"],
    "qwen3": CONFIGS["qwen3"],
    "qwen3moe": Qwen3MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        head_dim=16,
        norm_topk_prob=True,
    ),
    "phi3": CONFIGS["phi3"],
    "olmo2": CONFIGS["olmo2"],
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma2": CONFIGS["gemma2-softcap-window"],
    "gemma3": CONFIGS["gemma3-window"],
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "smollm3": SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}),
    "llama experts": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "granitemoe": GraniteMoeConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.0,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2),
    "gpt-oss": GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "lfm2": Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
    "lfm2moe": Lfm2MoeConfig(
        **SIZES,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
Q8, Q5 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0


def model_of(architecture: str) -> PreTrainedModel:
    config = copy.deepcopy(TINY[architecture])
    for name, value in WIDE.items():
        setattr(config, name, value)
    if getattr(config, "query_pre_attn_scalar", None):
        config.query_pre_attn_scalar = config.head_dim = 16
    if architecture == "granite":
        config.tie_word_embeddings = True
    model = tiny("", config=config, seed=3)
    with torch.no_grad():
        for name, bias in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("_bias", ".bias", "sinks")):
                bias.copy_(torch.randn_like(bias) * 0.3)
    return model


def metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """What llama.cpp's converter writes of a configuration."""
    c, name = model.config, writer.arch
    heads = c.num_attention_heads
    dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(heads)
    kinds = getattr(c, "layer_types", None) or []
    some = [c.num_key_value_heads * (kind != "conv") for kind in kinds]
    writer.add_head_count_kv(some if "conv" in kinds else c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(getattr(c, "rms_norm_eps", None) or c.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_rope_dimension_count(dim)
    writer.add_key_length(dim)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(c.sliding_window)
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(c, cap, None):
                writer.add_float32(f"{name}.{cap}", getattr(c, cap))
    if count := getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None):
        writer.add_expert_count(count)
        writer.add_expert_used_count(c.num_experts_per_tok)
        inner = getattr(c, "moe_intermediate_size", c.intermediate_size)
        writer.add_expert_feed_forward_length(inner)
    if name.startswith("lfm2"):
        writer.add_shortconv_l_cache(c.conv_L_cache)
    if name == "lfm2moe":
        writer.add_leading_dense_block_count(c.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name.startswith("granite"):
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_logit_scale(c.logits_scaling)


def tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = [*TOKENS, *(f"<{i}>" for i in range(288 - len(TOKENS)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3) + [5] * (288 - len(TOKENS)))
    writer.add_token_merges(["a b", "Ġ t"][:0])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to queries and keys of Llama's layout."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


# names that llama.cpp's package doesn't know, as transformers has them since its version 5
NAMES = {
    "block_sparse_moe.": "mlp.",
    "feed_forward.experts": "mlp.experts",
    "mlp.router": "mlp.gate",
    "expert_bias": "expert_bias.bias",
    "sinks": "sinks.weight",
    "_proj_bias": "_proj.bias",
}


def apart(state, woven: bool):
    """All tensors as the converter has them. `woven`: as of `Architecture`."""
    for name, tensor in state.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "conv.conv" in name:
            tensor = tensor.squeeze(1)
        if ".experts." not in name:
            yield name, tensor
            continue
        whole = name if name.endswith(".bias") else f"{name}.weight"
        if woven and tensor.dim() == 3:
            tensor = tensor.transpose(1, 2)
        if "gate_up_proj" not in name:
            yield whole, tensor
            continue
        halves = (tensor[:, ::2], tensor[:, 1::2]) if woven else tensor.chunk(2, 1)
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield whole.replace("gate_up", part), half


def write(path, architecture: str, model: PreTrainedModel, kinds=None):
    """A file of the model. `kinds`: formats of weights by a part of their name, F32 without."""
    architecture = architecture.split()[0]
    writer, c = gguf.GGUFWriter(str(path), architecture), model.config
    metadata(writer, model)
    tokenizer(writer)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, c.num_hidden_layers)
    for name, tensor in apart(model.state_dict(), ARCHITECTURES[architecture].woven):
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        own, data = names.get_name(name, (".weight", ".bias")), tensor.float().numpy()
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
        of = name.split(".")[-2]
        if ARCHITECTURES[architecture].turned and of in heads:
            data = turned(data, heads[of])
        if ARCHITECTURES[architecture].plus_one and "norm" in of:
            data = data + 1
        stored = next((k for part, k in (kinds or {}).items() if part in own), None)
        if stored is None or data.ndim < 2 or own.endswith(".bias"):
            writer.add_tensor(own, data)
        else:
            writer.add_tensor(own, gguf.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(parameters, ids: list[int]) -> torch.Tensor:
    target, rows = Target(NativeModel(parameters, parameters.stack)), []
    for end in range(1, len(ids) + 1):
        rows.append(target.prefill(ids[:end], keep=end - 1))
    return torch.stack(rows)


def test_every_architecture_is_here():
    assert {name.split()[0] for name in TINY} == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", TINY)
def test_an_architecture_is_that_of_transformers(architecture, tmp_path):
    """Metadata and names by llama.cpp's package, logits by transformers."""
    model = model_of(architecture)
    file = write(tmp_path / "tiny.gguf", architecture, model)
    ids = [5, 17, 280, 3, 3, 99, 120, 7, 44, 200, 31, 8]
    found = logits(GgufCheckpoint(file, torch.float32, KERNELS), ids)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4 * float(wanted.abs().max()))


SWAPPED = {"ffn_gate_exps": "mlp.experts.up_proj", "ffn_up_exps": "mlp.experts.gate_proj"}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama experts", {"turned": False}),
        ("granitemoe", {"turned": False}),
        ("olmoe", {"turned": True}),
        ("lfm2", {"turned": True}),
        ("gpt-oss", {"turned": True}),
        ("gpt-oss", {"layer": ARCHITECTURES["gpt-oss"].layer | SWAPPED}),
    ],
)
def test_a_wrong_order_of_rows_is_seen(architecture, changes, tmp_path, monkeypatch):
    model, ids = model_of(architecture), [5, 17, 280, 3, 3, 99, 120, 7]
    file, name = write(tmp_path / "tiny.gguf", architecture, model), architecture.split()[0]
    monkeypatch.setitem(ARCHITECTURES, name, replace(ARCHITECTURES[name], **changes))
    found = logits(GgufCheckpoint(file, torch.float32, KERNELS), ids)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    assert float((found - wanted).abs().max() / wanted.abs().max()) > 2e-3


MIXED = {"attn_v": Q8, "ffn_gate": Q8, "ffn_up": Q5, "attn": Q5, "ffn_down": Q8, "token_embd": Q8}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file whose queries, keys and values, and gates and rest, are of several formats."""
    return write(tmp_path_factory.mktemp("mixed") / "m.gguf", "llama", model_of("llama"), MIXED)


def test_weights_of_several_formats_come_near_their_numbers(mixed):
    ids = [5, 17, 280, 3, 3, 99, 120, 7]
    parameters = GgufCheckpoint(mixed, None, KERNELS)
    assert parameters("model.layers.0.self_attn.v_proj.weight").name == "q8_0"
    exact = logits(GgufCheckpoint(mixed, torch.float32, KERNELS), ids)
    found = logits(parameters, ids)
    assert float((found - exact).norm() / exact.norm()) < 0.05


def resident(path) -> int:
    """How many kB of a mapped file this process holds in memory."""
    held, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ", 1)[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            held += int(line.split()[1])
    return held


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="Linux says what is resident")
def test_what_was_read_of_a_weight_does_not_stay_in_memory(mixed, tmp_path):
    path = shutil.copy(mixed, tmp_path / "own.gguf")
    checkpoint = GgufCheckpoint(path, None, KERNELS)
    name = checkpoint.stack.embedding
    whole = checkpoint.rows(name)
    copied = whole.data.clone()
    assert resident(path) > 0
    part = checkpoint.rows(name, 16)
    assert resident(path) == 0
    assert torch.equal(part.data, copied[16:]) and torch.equal(whole.data, copied)


EXPERTS = {"ffn_down_exps": Q8, "exps": Q5, "attn": Q8}


def test_experts_of_two_formats(tmp_path, monkeypatch):
    """Answers with drafts and without, in memory and from disk; the last weights' own format."""
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    file, ids = tmp_path / "moe.gguf", [5, 17, 280, 3, 3, 99, 120, 7]
    write(file, "qwen3moe", model_of("qwen3moe"), EXPERTS)
    parameters = GgufCheckpoint(file, None, KERNELS)
    at = "model.layers.1.mlp.experts"
    assert parameters.like(f"{at}.gate_up_proj").name == "q5_0"
    assert parameters.rows(f"{at}.gate_up_proj", 1, 3).shape == [2, 192, 64]
    assert parameters.rows(f"{at}.down_proj", 1, 2).name == "q8_0"
    exact = logits(GgufCheckpoint(file, torch.float32, KERNELS), ids)
    found = logits(parameters, ids)
    assert float((found - exact).norm() / exact.norm()) < 0.1
    model = NativeModel(parameters, parameters.stack)
    every = limits_of(parameters)
    disk = of_disk(parameters, every[len(every) // 2])
    alike(Target(model), disk, (1, 17))
    disk.model.close()
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=2, ignore_eos=True)
    with LLM(str(file)) as llm:
        plain = llm.generate("ab ab ab ab", params, method="ar").token_ids
        assert llm.generate("ab ab ab ab", params, method="auto").token_ids == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_answer(mixed, temperature):
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=1, ignore_eos=True)
    prompts = ["ab ab ab ab", "hello, hello", "x"]
    with LLM(str(mixed)) as llm, LLM(str(mixed), drafter=str(mixed)) as drafting:
        assert "q8_0" in llm.kernels and "q5_0" in llm.kernels
        plain = [one.token_ids for one in llm.generate(prompts, params, method="ar")]
        for own, method in ((llm, "auto"), (llm, "logitspec"), (drafting, "dyspec")):
            found = own.generate(prompts, params, method=method)
            assert [one.token_ids for one in found] == plain, method


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        ("lfm2", {"attn": Q8, "shortconv.in": Q5, "shortconv.out": Q8, "ffn": Q8}),
        ("lfm2moe", {"exps": Q5, "ffn_gate.": Q8}),
        ("gpt-oss", {"exps": gguf.GGMLQuantizationType.MXFP4, "attn_q": Q8}),
        ("llama experts", {"exps": Q8}),
    ],
)
def test_drafts_change_no_answer_of_experts_and_convolutions(architecture, kinds, tmp_path):
    model, ids = model_of(architecture), [5, 17, 280, 3, 3, 99, 120, 7]
    file = write(tmp_path / "tiny.gguf", architecture, model, kinds)
    parameters = GgufCheckpoint(file, None, KERNELS)
    exact = logits(GgufCheckpoint(file, torch.float32, KERNELS), ids)
    assert float((logits(parameters, ids) - exact).norm() / exact.norm()) < 0.1
    prompts = ["ab ab ab ab", "hello, hello", "x"]
    with LLM(str(file)) as llm:
        assert llm.kernels.startswith("native") and "q8_0" in llm.kernels
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=1, ignore_eos=True)
            plain = [one.token_ids for one in llm.generate(prompts, params, method="ar")]
            for method in ("auto", "logitspec"):
                found = llm.generate(prompts, params, method=method)
                assert [one.token_ids for one in found] == plain, method


def test_blocks_read_from_disk_have_the_bits_of_memory(mixed, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    checkpoint = GgufCheckpoint(mixed, None, KERNELS)
    every = limits_of(checkpoint)
    disk = of_disk(checkpoint, every[len(every) // 2])
    alike(Target(NativeModel(checkpoint, checkpoint.stack)), disk)
    assert disk.model.streamed.record()["streamed_bytes"] > 0
    disk.model.close()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(str(mixed)) as llm, LLM(str(mixed), memory=every[0]) as less:
        found = less.generate("ab ab ab ab", params, method="auto").token_ids
        assert found == llm.generate("ab ab ab ab", params, method="ar").token_ids
    assert not (tmp_path / "gguf").exists()


def test_text_becomes_the_files_tokens(mixed):
    found = load_tokenizer(GgufFile(mixed))
    ids = found.encode("a b<|im_end|>")
    assert [found.convert_ids_to_tokens(i) for i in ids] == ["a", "Ġ", "b", "<|im_end|>"]
    assert found.decode(ids, skip_special_tokens=True) == "a b"
    assert found.eos_token_id == 2 and found.special_tokens_map["bos_token"] == "<|endoftext|>"
    messages = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(messages, tokenize=False) == "hi"


def sentence_piece(path, **changes):
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "b", "ab", "\u2581ab", "abab"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 4 + [-9.0, -8.0, -7.0, -1.0, -2.0, -3.0])
    writer.add_token_types([2, 3, 3, 6, *[1] * 6])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    for name, value in changes.items():
        getattr(writer, name)(value)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentence_piece_joins_the_best_first(tmp_path):
    found = load_tokenizer(GgufFile(sentence_piece(tmp_path / "a.gguf")))
    assert found.encode("ab abab\n") == [1, 8, 8, 7, 3]
    assert found.decode([1, 8, 8, 7, 3], skip_special_tokens=True) == "ab abab\n"
    changes = {"add_add_bos_token": False, "add_add_space_prefix": False}
    plain = load_tokenizer(GgufFile(sentence_piece(tmp_path / "b.gguf", **changes)))
    assert plain.encode("abab") == [9]


# --- files that are not whole ---


def test_other_formats_are_named(tmp_path):
    file = write(tmp_path / "m.gguf", "llama", model_of("llama"), MIXED)
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 10)
    file.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"blk\.0\.attn_k\.weight is stored as Q2_K.*Q4_K_M"):
        LLM(str(file))


def test_cut_and_changed_files_are_refused_and_nothing_else_happens(mixed, tmp_path):
    """Cut anywhere, and with any byte of its metadata changed: an error of ours, or a model."""
    data, random = mixed.read_bytes(), np.random.default_rng(0)
    file, end = tmp_path / "x.gguf", data.index(b"blk.0.ffn_up.weight")
    for size in [0, 3, 4, 20, *random.integers(24, len(data), 40)]:
        file.write_bytes(data[:size])
        with pytest.raises(InvalidInput, match=r"x\.gguf"):
            GgufFile(file)
    for at in random.integers(0, end, 300):
        changed = bytearray(data)
        changed[at : at + 8] = random.choice([0, 255, 127], 8).astype(np.uint8).tobytes()
        file.write_bytes(changed)
        with contextlib.suppress(InvalidInput, NotDescribed):
            GgufCheckpoint(file, None, KERNELS)


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [(4, 7, "version 7"), (8, 1 << 60, "entries"), (16, 1 << 62, "entries"), (24, 1 << 40, "")],
)
def test_counts_are_held_against_the_size(mixed, tmp_path, at, value, told):
    data = bytearray(mixed.read_bytes())
    data[at : at + (4 if at == 4 else 8)] = value.to_bytes(4 if at == 4 else 8, "little")
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(InvalidInput, match=f"no whole .gguf file.*{told}"):
        GgufFile(tmp_path / "x.gguf")


def test_metadata_that_is_not_known_is_not_ignored(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    model = model_of("llama")
    metadata(writer, model)
    writer.add_float32("llama.attention.new_factor", 2.0)
    writer.add_tensor("token_embd.weight", np.zeros((288, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(NotDescribed, match=r"llama\.attention\.new_factor"):
        GgufCheckpoint(tmp_path / "x.gguf", None, KERNELS)


@pytest.mark.parametrize(
    ("architecture", "at", "kind", "shape"),
    [
        ("qwen2", "blk.1.attn_k.bias", 0, (1,)),
        ("qwen2", "blk.1.attn_k.bias", 8, (32,)),
        ("qwen2", "blk.1.ffn_norm.weight", 8, (64,)),
        ("gemma3", "blk.1.attn_q_norm.weight", 0, (2,)),
        ("gemma3", "blk.1.post_ffw_norm.weight", 0, (63,)),
        ("qwen3moe", "blk.1.ffn_up_exps.weight", 0, (2, 96, 64)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(architecture, at, kind, shape, tmp_path, monkeypatch):
    file = write(tmp_path / "tiny.gguf", architecture, model_of(architecture))
    whole = GgufFile.__init__

    def changed(self, path):
        whole(self, path)
        self.tensors[at] = self._placed(at, kind, shape, self.tensors[at].offset)

    monkeypatch.setattr(GgufFile, "__init__", changed)
    with pytest.raises(InvalidInput):
        GgufCheckpoint(file, None, KERNELS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 1 << 31),
        ("llama.attention.layer_norm_rms_epsilon", ""),
        ("llama.attention.key_length", ["a"]),
        ("llama.rope.freq_base", float("inf")),
        ("tokenizer.ggml.pre", ["a"]),
        ("tokenizer.ggml.token_type", 5),
        ("tokenizer.ggml.add_bos_token", np.array([1, 2])),
    ],
)
def test_values_of_another_kind_are_refused(mixed, key, value, monkeypatch):
    whole = GgufFile.__init__

    def changed(self, path):
        whole(self, path)
        self.metadata[key] = value

    monkeypatch.setattr(GgufFile, "__init__", changed)
    with pytest.raises((InvalidInput, NotDescribed)):
        GgufCheckpoint(mixed, None, KERNELS)
