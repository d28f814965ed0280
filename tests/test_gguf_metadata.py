"""What a `.gguf` file's metadata says is applied, or refused by its key."""

import copy
import logging
import math

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cases import refuses
from gguf_files import model_of, write
from quickbeam import LLM, SamplingParams
from quickbeam.models.native import library
from quickbeam.models.text.gguf_tokenizer import load_tokenizer
from quickbeam.models.weights.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.weights.gguf.convert import convert
from quickbeam.models.weights.gguf.file import GgufFile
from test_gguf import distance

KERNELS = library.kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="needs the native kernels")
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
BETAS = {"beta_fast": 4.0, "beta_slow": 0.5}
OF_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 4096,
}
OF_BETAS = {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5}
WHOLE = 0.1 * math.log(4) + 1  # YaRN's factor of cosines and sines


def changed(architecture, **fields):
    """A tiny model with other fields of its configuration and the same weights."""
    model = model_of(architecture)
    config = copy.deepcopy(model.config)
    for name, value in fields.items():
        setattr(config, name, value)
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def scaled(architecture, **rope):
    return changed(architecture, rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (LINEAR, {"rope.scaling.factor": 4.0}),
        (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (LINEAR, {"rope.scale_linear": 4.0}),
        ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        (YARN, OF_YARN),
        (YARN | BETAS, OF_YARN | OF_BETAS),
        (YARN | {"attention_factor": 1.5 * WHOLE}, OF_YARN | {"rope.scaling.attn_factor": 1.5}),
        (LINEAR, OF_YARN | {"rope.scaling.yarn_ext_factor": 0.0}),
        (YARN, OF_YARN | {"rope.scaling.yarn_ext_factor": 1.0}),
        (YARN, {**OF_YARN, "rope.scaling.original_context_length": None, "context_length": 4096}),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_scaled_angles_are_those_of_transformers(architecture, rope, keys, cache, tmp_path):
    model = scaled(architecture, **rope)
    file = write(tmp_path / "x.gguf", architecture, model_of(architecture), keys=keys)
    assert distance(file, model) < 2e-4
    if "beta_fast" in rope:
        assert distance(file, scaled(architecture, **YARN)) > 1e-3, "the parameters matter"
    if rope["rope_type"] != "default":
        assert distance(file, model_of(architecture)) > 2e-3, "the scaling matters"


@pytest.mark.parametrize("keys", [{}, {"rope.scaling.factor": 4.0}, OF_YARN | OF_BETAS])
def test_factors_of_frequencies_come_beside_a_scaling(keys, cache, tmp_path):
    by = np.linspace(1, 8, 4).astype(np.float32)
    rope = {} if not keys else YARN | BETAS if len(keys) > 1 else LINEAR
    model = scaled("llama", **{"rope_type": "default"} | rope)
    model.model.rotary_emb.inv_freq /= torch.tensor(by)

    def change(own, data):
        extra = {"rope_freqs.weight": by} if own == "token_embd.weight" else {}
        return {own: data} | extra

    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys)
    assert distance(file, model) > 2e-3, "they matter"
    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys, change=change)
    checkpoint = GgufCheckpoint(file, None, KERNELS)
    assert checkpoint.config.max_position_embeddings == model.config.max_position_embeddings
    assert distance(file, model) < 2e-4


@pytest.mark.parametrize(
    ("architecture", "fields", "keys"),
    [
        ("qwen2", {}, {"attention.scale": 0.25, "logit_scale": 1.0, "rope.scaling.factor": 1.0}),
        ("qwen2", {}, {"attention.sliding_window": 1 << 20, "attention.causal": True}),
        ("gemma3", {"query_pre_attn_scalar": 4}, {"attention.scale": 0.5}),
        ("gemma3", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}),
        ("gemma2", {"attn_logit_softcapping": 0.1}, {"attn_logit_softcapping": 0.1}),
        ("starcoder2", {"sliding_window": 4}, {"attention.sliding_window": 4}),
        ("qwen2moe", {"norm_topk_prob": True}, {"expert_weights_norm": True}),
        ("nemotron", {}, {"attention.layer_norm_rms_epsilon": 0.01}),
        (
            "qwen3",
            {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2},
        ),
    ],
)
def test_what_a_family_knows_is_applied(architecture, fields, keys, cache, tmp_path):
    if "layer_types" in fields:
        fields = fields | {"layer_types": fields["layer_types"][:3], "use_sliding_window": True}
    model = changed(architecture, **fields)
    file = write(tmp_path / "x.gguf", architecture, model_of(architecture), keys=keys)
    assert distance(file, model) < 2e-4
    if fields:
        assert distance(file, model_of(architecture)) > 2e-3, "it matters"


def test_a_scale_of_llamas_attention_is_applied(tmp_path):
    model = model_of("llama")
    file = write(tmp_path / "x.gguf", "llama", model, keys={"attention.scale": 0.5})
    assert distance(file, model) > 2e-3, "it matters"
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5
    assert distance(file, model) < 2e-4


def test_a_window_of_llama_is_that_of_mistral(tmp_path):
    model, keys = model_of("llama"), {"attention.sliding_window": 4}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)

    def change(own, data):
        return {} if own.endswith("bias") else {own: data}

    fields = {**model.config.to_dict(), "sliding_window": 4, "model_type": "mistral"}
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    file = write(tmp_path / "x.gguf", "llama", model, keys=keys, change=change)
    assert distance(file, other) < 2e-4
    assert distance(file, model) > 2e-3, "it matters"
    keys["attention.sliding_window_pattern"] = 2
    file = write(tmp_path / "x.gguf", "llama", model, keys=keys, change=change)
    refuses(r"llama\.attention\.sliding_window_pattern leaves out layers", LLM, str(file))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 30.0),
        ("final_logit_softcapping", 30.0),
        ("attention.scale", 0.5),
        ("logit_scale", 2.0),
        ("embedding_scale", 2.0),
        ("attention.sliding_window", 4),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("rope.scaling.type", "su"),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.alpha", 1000.0),
        ("expert_weights_scale", 2.5),
        ("new_key", [0.0, 1.0]),
    ],
)
def test_what_is_not_known_is_refused_by_its_key(key, value, cache, tmp_path):
    """Neither run without it, nor given to transformers without it."""
    file = write(tmp_path / "x.gguf", "qwen2", model_of("qwen2"), keys={key: value})
    refuses(rf"qwen2\.{key}.*take the model's folder", LLM, str(file))


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("gpt2", "rope.freq_base", 10000.0),
        ("gpt2", "attention.head_count_kv", 2),
        ("gpt2", "attention.scale", 0.5),
        ("starcoder2", "logit_scale", 2.0),
        ("stablelm", "attention.sliding_window", 4),
        ("nemotron", "new_key", 1.0),
        ("qwen2moe", "expert_weights_scale", 2.5),
    ],
)
def test_each_architecture_refuses_what_it_does_not_know(architecture, key, value, tmp_path):
    file = write(tmp_path / "x.gguf", architecture, model_of(architecture), keys={key: value})
    refuses(rf"{architecture}\.{key}.*take the model's folder", LLM, str(file))


def test_neutral_values_are_no_reason_to_refuse(tmp_path):
    keys = {"new_key": [0.0, 0.0], "pooling_type": 3, "expert_weights_norm": True}
    keys |= {"vision.block_count": 27, "use_parallel_residual": True}
    keys |= {"rope.scaling.yarn_beta_fast": 8.0, "residual_scale": 1.0, "attention.clamp_kqv": 0.0}
    model = model_of("qwen2")
    assert distance(write(tmp_path / "x.gguf", "qwen2", model, keys=keys), model) < 2e-4


def test_a_part_of_a_head_turns(cache, tmp_path):
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    model = scaled("phi3", **rope)
    half = model.config.hidden_size // model.config.num_attention_heads // 2
    file = write(tmp_path / "x.gguf", "phi3", model_of("phi3"), keys={"rope.dimension_count": half})
    assert distance(file, model) < 2e-4
    file = write(tmp_path / "y.gguf", "qwen3", model_of("qwen3"), keys={"rope.dimension_count": 8})


@pytest.mark.parametrize("value", [0, None])
def test_a_context_that_is_not_said_is_unknown_and_not_unlimited(value, cache, tmp_path, caplog):
    keys = {"context_length": value}
    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys)
    with caplog.at_level(logging.WARNING), LLM(str(file)) as llm:
        assert llm.model.context_length == 2048
    assert "llama.context_length" in caplog.text
    keys["rope.scaling.original_context_length"] = 512
    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys)
    assert GgufCheckpoint(file, None, KERNELS).config.max_position_embeddings == 512


def test_how_texts_are_split_is_known_or_refused(cache, tmp_path, caplog):
    model = model_of("llama")
    file = write(tmp_path / "x.gguf", "llama", model, keys={"tokenizer.ggml.pre": "deepseek-v9"})
    said = r"'deepseek-v9' \(tokenizer\.ggml\.pre\).*known: .*qwen2"
    refuses(said, LLM, str(file))
    file = write(tmp_path / "y.gguf", "llama", model, keys={"tokenizer.ggml.pre": None})
    with caplog.at_level(logging.WARNING):
        load_tokenizer(GgufFile(file))
    assert "tokenizer.ggml.pre" in caplog.text and "GPT-2" in caplog.text
    file = write(file, "llama", model, keys={"tokenizer.ggml.suppress_tokens": [5, 6]})
    with caplog.at_level(logging.WARNING):
        load_tokenizer(GgufFile(file))
    assert "suppress_tokens is not heeded: these 2 tokens may be in an answer" in caplog.text
    unknown = {"tokenizer.ggml.normalizer.lowercase": True}
    file = write(tmp_path / "z.gguf", "llama", model, keys=unknown)
    refuses(r"tokenizer\.ggml\.normalizer\.lowercase", LLM, str(file))


@pytest.mark.parametrize("value", [-1, 4294967295])
def test_ids_of_no_token_are_left_out_with_a_word(value, cache, tmp_path, caplog):
    names = ("padding", "seperator", "bos", "eot", "fim_pad")
    keys = {f"tokenizer.ggml.{name}_token_id": value for name in names}
    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys)
    with caplog.at_level(logging.WARNING), LLM(str(file)) as llm:
        assert llm.tokenizer.special_tokens_map == {"eos_token": "<|im_end|>"}
        assert llm.eos_ids == {0, 2}
    for name in names:
        assert f"tokenizer.ggml.{name}_token_id is {value}, which is no token" in caplog.text
    keys = {"tokenizer.ggml.padding_token_id": 288}  # of vocabularies with a token more
    load_tokenizer(GgufFile(write(tmp_path / "y.gguf", "llama", model_of("llama"), keys=keys)))
    keys = {"tokenizer.ggml.eos_token_id": 288}
    file = write(tmp_path / "z.gguf", "llama", model_of("llama"), keys=keys)
    refuses("eos_token_id is 288 of 288 tokens", LLM, str(file))


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
DEFAULT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("keys", "alone", "with_tools"),
    [
        (
            {"tokenizer.chat_template.tool_use": "TOOLS {{ tools[0].function.name }}"},
            "x",
            "TOOLS f",
        ),
        ({"tokenizer.chat_template": [DEFAULT]}, "x", "x"),
        (
            {
                "tokenizer.chat_template": [DEFAULT, "b {{ tools[0].function.name }}"],
                "tokenizer.chat_templates": ["default", "tool_use"],
            },
            "x",
            "b f",
        ),
        ({"tokenizer.chat_template": [DEFAULT, "b"]}, "x", "x"),
    ],
)
def test_named_templates_are_used(keys, alone, with_tools, cache, tmp_path):
    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys)
    convert(file, tmp_path / "model")
    with LLM(str(file)) as llm, LLM(str(tmp_path / "model")) as folder:
        for one in (llm.tokenizer, folder.tokenizer):
            messages = [{"role": "user", "content": "x"}]
            assert one.apply_chat_template(messages, tokenize=False) == alone
            assert one.apply_chat_template(messages, tools=TOOLS, tokenize=False) == with_tools


def test_a_template_that_is_no_text_is_refused(tmp_path):
    keys = {"tokenizer.chat_template.tool_use": 7}
    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys)
    refuses("chat template 'tool_use' is no text, but 7", LLM, str(file))


def test_a_model_in_several_files_is_read_from_all_of_them(cache, tmp_path):
    model, whole = model_of("llama"), tmp_path / "whole.gguf"
    write(whole, "llama", model)
    write(tmp_path / "x.gguf", "llama", model, split_max_tensors=10)
    first, *others = sorted(tmp_path.glob("x-*-of-*.gguf"))
    assert len(others) > 2 and first.name.startswith("x-00001-of-")
    assert distance(first, model) < 2e-4
    with LLM(str(whole)) as one, LLM(str(first)) as several:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        answers = [llm.generate("ab ab", params) for llm in (one, several)]
        assert answers[0].token_ids == answers[1].token_ids
    refuses(rf"is part 2 of .*give {first.name}", LLM, str(others[0]))
    (tmp_path / "other.gguf").write_bytes(others[0].read_bytes())
    words = r"other\.gguf is part 2 of .* by its metadata: give the first one"
    refuses(words, LLM, str(tmp_path / "other.gguf"))
    content = others[1].read_bytes()
    others[1].unlink()
    refuses(f"beside it there is no {others[1].name}", LLM, str(first))
    others[1].write_bytes(content[:-40])
    refuses(rf"{others[1].name} is no whole \.gguf file", LLM, str(first))
    others[1].write_bytes(first.read_bytes())
    refuses("once more", LLM, str(first))
    first.rename(tmp_path / "renamed.gguf")
    refuses(
        "first of .* files of a model: give them their names", LLM, str(tmp_path / "renamed.gguf")
    )


def test_a_big_endian_file_says_so(tmp_path):
    file = tmp_path / "x.gguf"
    write(file, "llama", model_of("llama"), endianess=gguf.GGUFEndian.BIG)
    refuses(r"x\.gguf is big-endian.*gguf_convert_endian", LLM, str(file))


def test_layers_behind_those_of_the_metadata_are_left_out_with_a_word(tmp_path, caplog):
    def change(own, data):
        return {own: data} | ({own.replace("blk.2.", "blk.3."): data} if "blk.2." in own else {})

    file = write(tmp_path / "x.gguf", "llama", model_of("llama"), change=change)
    assert distance(file, model_of("llama")) < 2e-4
    assert "blk.3.attn_k.weight" in caplog.text and "behind the 3 layers" in caplog.text


def test_an_alignment_that_can_not_be_is_refused(tmp_path):
    for size in (0, 3):
        keys = {"general.alignment": size}
        file = write(tmp_path / "x.gguf", "llama", model_of("llama"), keys=keys)
        refuses(f"general.alignment is {size}, which is no power of 2", LLM, str(file))


def test_a_tensor_that_nobody_reads_is_refused(tmp_path):
    def with_tensor(name):
        def change(own, data):
            return {own: data} | ({name: data} if own == "blk.0.attn_norm.weight" else {})

        return write(tmp_path / "x.gguf", "llama", model_of("llama"), change=change)

    file = with_tensor("blk.0.attn_post_norm.weight")
    refuses(r"holds blk\.0\.attn_post_norm\.weight, which is not known", LLM, str(file))
    assert distance(with_tensor("v.blk.0.ln1.weight"), model_of("llama")) < 2e-4, "of images"
