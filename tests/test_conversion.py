"""From a `.gguf` file to a folder that transformers reads, too."""

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import refuses
from gguf_files import model_of, turned, write
from quickbeam import LLM
from quickbeam.hub.cache import is_complete
from quickbeam.models.transformers_class import load_model
from quickbeam.models.weights.gguf.convert import convert

CPU = torch.device("cpu")
ENDS = ("<|im_end|>", "<|endoftext|>")


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


def test_peers_are_given_folders(file):
    words = "is a .gguf file, and the method hf reads a model's folder"
    refuses(words, load_model, str(file), torch.float32, CPU)
