"""Models that read more than text: their language part on tiny random models of transformers, and
prompts that hold more than text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cases import few, refuses
from checkpoints import configure, rewrite
from models import SIZES, spread_out, table
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.families import FAMILIES
from quickbeam.models.native import library
from quickbeam.models.text.chat_template import for_template
from quickbeam.models.text.tokenizer import load_tokenizer
from quickbeam.models.weights.checkpoint import Checkpoint
from quickbeam.models.weights.sources import COMPOSITES
from quickbeam.params import SamplingParams
from target import logits_of as model_logits
from test_families import IDS, off

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

# small parts that read images and sound, by all the names that their configurations have
OTHER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "d_model", "embed_dim"), 16),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 1),
    **{"deepstack_visual_indexes": [], "fullatt_block_indexes": []},
    **{"image_size": 16, "patch_size": 8, "num_position_embeddings": 16, "head_dim": 8},
    **{"encoder_ffn_dim": 16, "out_hidden_size": 32, "output_dim": 16},
}

TEXT = table("texts", dict)


def made(kind):
    torch.manual_seed(0)
    own: Any = CONFIG_MAPPING[kind]()
    parts: dict[str, Any] = {}
    for name in ("vision_config", "audio_config"):
        if (fields := own.to_dict().get(name)) is not None:
            small = {one: value for one, value in OTHER.items() if one in fields}
            parts[name] = small | {"model_type": fields["model_type"]}
    text = TEXT.get(kind, SIZES) | {"model_type": own.get_text_config().model_type}
    config = CONFIG_MAPPING[kind](text_config=text, **parts)
    face = AutoModelForMultimodalLM if "audio_config" in parts else AutoModelForImageTextToText
    model = face.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return spread_out(model, vectors=0.3)


def logits_of(folder):
    checkpoint = Checkpoint(folder, torch.float32)
    return model_logits(NativeModel(checkpoint, checkpoint.stack, library.kernels()), IDS.tolist())


# `make test` leaves out those whose text and names are as another's
ALIKE = {
    *("exaone4_5", "got_ocr2", "idefics3", "lfm3_vl", "lighton_ocr", "llava_next"),
    *("llava_onevision", "ovis2", "qwen2_audio", "qwen2_vl", "video_llava", "vipllava", "voxtral"),
}


@pytest.mark.parametrize("kind", few(sorted(COMPOSITES), sorted(COMPOSITES - ALIKE)))
@torch.inference_mode()
def test_text_alone_is_answered_as_by_the_whole(kind, tmp_path):
    model = made(kind)
    right = model(input_ids=IDS[None], use_cache=False).logits[0]
    model.save_pretrained(tmp_path)
    assert off(logits_of(tmp_path), right) < 2e-5


def test_every_language_part_is_described():
    kinds = {CONFIG_MAPPING[kind]().get_text_config().model_type for kind in COMPOSITES}
    assert kinds <= FAMILIES.keys()
    assert {kind for kind in FAMILIES if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} <= kinds


# how published checkpoints name the language part and its head
NAMES = {
    "as transformers has it": ("model.language_model.", "lm_head."),
    "within a language model": ("language_model.model.", "language_model.lm_head."),
    "as of a text model": ("model.", "lm_head."),
    "as of another class": ("model.text_model.", "lm_head."),
    "twice a model": ("model.language_model.model.", "lm_head."),
}


@pytest.mark.parametrize("names", NAMES)
def test_names_of_published_checkpoints(names, tmp_path, caplog):
    made("qwen2_5_vl").save_pretrained(tmp_path)
    right = logits_of(tmp_path)
    layers, head = NAMES[names]
    renamed = {"visual.blocks.0.norm1.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3)}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.startswith("model."):
            renamed[layers + name.removeprefix("model.")] = tensor
        elif name.startswith("lm_head."):
            renamed[head + name.removeprefix("lm_head.")] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path), right)
    odd = {f"{layers}layers.0.self_attn.extra": torch.ones(3)}
    save_file(renamed | odd, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path), right)
    assert "layers.0.self_attn.extra, which" in caplog.text and "visual" not in caplog.text


def test_a_head_that_is_missing_is_the_embedding_where_the_whole_says_so(tmp_path):
    made("qwen2_5_vl").save_pretrained(tmp_path)
    rewrite(tmp_path, {"lm_head.weight": None})
    refuses(r"lm_head\.weight", Checkpoint, tmp_path, torch.float32)
    configure(tmp_path, tie_word_embeddings=True)
    checkpoint = Checkpoint(tmp_path, torch.float32)
    assert torch.equal(checkpoint("lm_head.weight"), checkpoint("model.embed_tokens.weight"))


def test_flat_and_old_configurations(tmp_path, monkeypatch):
    """As Qwen2.5-VL's, which names the text's fields beside its parts."""
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    made("qwen2_5_vl").save_pretrained(tmp_path)
    right = logits_of(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    fields |= {name: value for name, value in text.items() if name != "model_type"}
    fields["rope_theta"] = rope["rope_theta"]
    fields["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    fields["transformers_version"] = "4.41.2"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert torch.equal(logits_of(tmp_path), right)


def test_gemma_4_as_published(tmp_path):
    """Sizes of full layers by other names, and tensors that layers with others' keys don't need."""
    made("gemma4").save_pretrained(tmp_path)
    right = logits_of(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    own = fields["text_config"].pop("per_layer_config")
    (head_dim,) = {one["head_dim"] for one in own.values()}
    fields["text_config"] |= {"global_head_dim": head_dim, "num_global_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.language_model.layers.5.self_attn.k_proj.weight": torch.ones(32, 32)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path), right)
    checkpoint = Checkpoint(tmp_path, torch.float32)
    table = "model.embed_tokens_per_layer.weight"
    right, half = checkpoint(table), Checkpoint(tmp_path, torch.bfloat16)
    assert torch.equal(checkpoint.mapped(table), right)
    assert torch.equal(half.mapped(table), right.bfloat16())


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TEXT_PART = {"type": "text", "text": "abc"}
PARTS_ALONE = """{% for message in messages %}[{{ message.role }}]
{%- for part in message.content %}{% if part.type == 'text' %} {{ part.text }}{% endif %}
{%- endfor %}{% endfor %}[reply]"""
TEXTS_ALONE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


def test_content_is_given_as_the_template_takes_it():
    asked = [{"role": "user", "content": "abc"}]
    parts = [{"role": "user", "content": [TEXT_PART, TEXT_PART]}]
    assert for_template(PARTS_ALONE, asked) == [{"role": "user", "content": [TEXT_PART]}]
    assert for_template(PARTS_ALONE, parts) == parts
    assert for_template(TEXTS_ALONE, asked) == asked
    assert for_template(TEXTS_ALONE, parts) == [{"role": "user", "content": "abc\nabc"}]
    odd = [{"role": "user", "content": None}, {"role": "assistant", "tool_calls": []}]
    assert for_template(PARTS_ALONE, odd) == odd


@pytest.fixture
def folder(toy_folder, tmp_path):
    """A tiny model whose images are not read, with a template that takes parts alone."""
    for path in Path(toy_folder).glob("tokenizer*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    fields.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS_ALONE}))
    model = made("llava_onevision")
    vocab = json.loads((Path(toy_folder) / "config.json").read_text())["vocab_size"]
    model.resize_token_embeddings(vocab)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_chat_of_text_is_answered_and_an_image_refused(folder):
    llm = LLM(str(folder), "ar", dtype="float32")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert llm.model.exact
    answer = llm.chat([{"role": "user", "content": "abc"}], params)
    ids = load_tokenizer(folder, llm.model.config).encode("[user] abc[reply]", False)
    assert answer.token_ids == llm.generate(ids, params).token_ids
    parts = [{"role": "user", "content": [TEXT_PART]}]
    assert llm.chat(parts, params).token_ids == answer.token_ids
    with pytest.raises(InvalidInput, match=r"message 0 .*'image_url'.* transformers, vLLM"):
        llm.chat([{"role": "user", "content": [TEXT_PART, IMAGE]}], params)
