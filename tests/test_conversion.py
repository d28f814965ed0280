"""From a `.gguf` file to what transformers reads: a folder, or a model in memory."""

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import few, refuses
from gguf_files import TINY, model_of, turned, write
from quickbeam import LLM
from quickbeam.cache import is_complete
from quickbeam.conversion import convert
from quickbeam.models.loading import load_model

CPU = torch.device("cpu")
ENDS = ("<|im_end|>", "<|endoftext|>")
IDS = torch.tensor([[5, 17, 80, 3, 3, 9, 12, 7, 44, 20, 31, 8]])
# whose files have tensors otherwise than transformers
OTHERWISE = ("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "stablelm parallel")


@pytest.fixture
def file(cache, tmp_path):
    model = model_of("llama")
    model.config.tie_word_embeddings = True
    return write(tmp_path / "tiny.gguf", "llama", model, pre="smollm")


def test_a_plain_folder_is_made_whose_tokens_are_the_files(file, tmp_path, capfd):
    convert(file, tmp_path / "model", ENDS)
    assert capfd.readouterr() == ("", "") and is_complete(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    ids = tokenizer("a\n\n12\n\nb")["input_ids"]
    # digits are split off first
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĊĊ", "1", "2", "Ċ", "Ċ", "b"]
    assert tokenizer.decode(ids) == "a\n\n12\n\nb"
    weights, wanted = model.state_dict(), model_of("llama").bfloat16().state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
    text = "a\n\n12\n\nb"
    with LLM(str(file)) as ours, LLM(str(tmp_path / "model")) as folder:
        assert ours.tokenizer(text)["input_ids"] == folder.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_a_folders_numbers_are_those_of_the_blocks(kind, tmp_path):
    """Rounded once to bfloat16."""
    model, kind = model_of("llama"), gguf.GGMLQuantizationType[kind]
    file = write(tmp_path / "x.gguf", "llama", model, {"attn": kind, "ffn": kind})
    convert(file, tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in written, "it is the embedding"
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if "_proj.weight" not in name:
            continue
        rows, count = tensor.numpy(), heads.get(name.split(".")[-2])
        stored = rows if count is None else turned(rows, count)
        wanted = torch.from_numpy(gguf.dequantize(gguf.quantize(stored, kind), kind)).bfloat16()
        got = written[name].float().numpy()
        got = torch.from_numpy(got if count is None else turned(got, count)).bfloat16()
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("architecture", few(TINY, ["llama", "gpt2", "gpt-oss", *OTHERWISE]))
def test_a_file_is_a_model_of_transformers(architecture, tmp_path):
    model = model_of(architecture)
    file = str(write(tmp_path / "x.gguf", architecture, model))
    if architecture.removesuffix(" experts") in OTHERWISE:
        refuses("otherwise than the file.*folder", load_model, file, torch.float32, CPU)
        return
    loaded, tokenizer = load_model(file, torch.float32, CPU)
    with torch.no_grad():
        got, wanted = loaded(IDS).logits, model(IDS).logits
    assert (got - wanted).abs().max() < 2e-4 * wanted.abs().max()
    assert tokenizer("a b")["input_ids"] and loaded.config.eos_token_id == 2


def test_what_is_no_file_of_a_known_model_is_refused(file, tmp_path):
    refuses("no such model", load_model, str(tmp_path / "none.gguf"), None, CPU)
    refuses("has revisions", load_model, str(file), None, CPU, revision="v1")
    refuses("device_map is not for", load_model, str(file), None, CPU, device_map="cpu")
    for data in (b"GGUF without what follows it" * 2, file.read_bytes()[:-2000]):
        (tmp_path / "bad.gguf").write_bytes(data)
        refuses(r"can't load .*bad\.gguf", load_model, str(tmp_path / "bad.gguf"), None, CPU)
