"""From a .gguf file to a folder that transformers reads. `pytest tests/test_hub_convert.py`"""

from __future__ import annotations

from pathlib import Path

import pytest

from quickbeam.conversion import convert


def write_gguf(path: Path) -> None:
    """A llama of random weights and tied embeddings; its tokens are three specials, the byte
    alphabet and runs of line ends."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    dim, hidden, heads, tokens = (
        32,
        64,
        2,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĊĊ", "ĊĊĊ"],
    )
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(dim)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(dim // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ", "ĊĊ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}")
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), dim), "output_norm": (dim,)}
    block = {
        "attn_q": (dim, dim),
        "attn_k": (dim // heads, dim),
        "attn_v": (dim // heads, dim),
        "attn_output": (dim, dim),
    }
    block |= {
        "ffn_gate": (hidden, dim),
        "ffn_up": (hidden, dim),
        "ffn_down": (dim, hidden),
        "attn_norm": (dim,),
        "ffn_norm": (dim,),
    }
    for name, shape in {
        **shapes,
        **{f"blk.0.{part}": shape for part, shape in block.items()},
    }.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_convert_makes_a_plain_folder(tmp_path, capfd):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "model", ("<|im_end|>", "<|endoftext|>"))
    assert capfd.readouterr() == ("", "")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == [2, 0]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        == "a<|im_end|>"
    )
    ids = tokenizer("a\n\n12\n\nb")["input_ids"]
    # digits are split off first
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĊĊ", "1", "2", "Ċ", "Ċ", "b"]
    assert tokenizer.decode(ids) == "a\n\n12\n\nb"

    source = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="tiny.gguf",
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    with torch.no_grad():
        given = torch.tensor([ids])
        assert torch.equal(model(given).logits, source(given).logits)


def test_a_gguf_file_answers_as_its_converted_folder_does(tmp_path):
    from quickbeam import LLM, SamplingParams

    write_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "model", ("<|im_end|>", "<|endoftext|>"))
    file, folder = LLM(str(tmp_path / "tiny.gguf")), LLM(str(tmp_path / "model"))
    text = "a\n\n12\n\nb"
    assert file.tokenizer(text)["input_ids"] == folder.tokenizer(text)["input_ids"]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert (
        file.generate(text, params).token_ids
        == folder.generate(text, params, method="ar").token_ids
    )


@pytest.mark.slow
def test_the_real_model_ends_its_answers(smollm2):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer) == 49152
    given = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**given, max_new_tokens=60, do_sample=False)[
        0, given["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(answer)
    assert tokenizer.convert_ids_to_tokens(int(answer[-1])) == "<|im_end|>"
