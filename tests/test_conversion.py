"""From a `.gguf` file to a folder that transformers reads, made once in the cache."""

import os

import pytest
import torch

from gguf_files import finish, say
from quickbeam import LLM, hub
from quickbeam.cache import is_complete
from quickbeam.conversion import Reader, convert, read_once
from quickbeam.errors import InvalidInput

ENDS = ("<|im_end|>", "<|endoftext|>")


def write_gguf(path):
    """A llama of random weights and tied embeddings; its tokens are three specials, the byte
    alphabet and runs of line ends."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    dim, hidden, heads = 32, 64, 2
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(ByteLevel.alphabet()), "ĊĊ", "ĊĊĊ"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    sizes = dict(context_length=128, embedding_length=dim, block_count=1, vocab_size=len(tokens))
    sizes |= dict(feed_forward_length=hidden, head_count=heads, head_count_kv=1)
    sizes |= dict(layer_norm_rms_eps=1e-5, rope_freq_base=1e4, rope_dimension_count=dim // heads)
    about = dict(tokenizer_model="gpt2", tokenizer_pre="smollm", unk_token_id=0, pad_token_id=2)
    say(writer, **sizes, **about, bos_token_id=1, eos_token_id=2)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ", "ĊĊ Ċ"])
    writer.add_chat_template("{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}")
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), dim), "output_norm": (dim,)}
    block = {"attn_q": (dim, dim), "attn_k": (dim // heads, dim), "attn_v": (dim // heads, dim)}
    block |= {"attn_output": (dim, dim), "ffn_gate": (hidden, dim), "ffn_up": (hidden, dim)}
    block |= {"ffn_down": (dim, hidden), "attn_norm": (dim,), "ffn_norm": (dim,)}
    shapes |= {f"blk.0.{part}": shape for part, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32))
    finish(writer)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_plain_folder_is_made(file, tmp_path, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    convert(file, tmp_path / "model", ENDS)
    assert capfd.readouterr() == ("", "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == [2, 0]
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "a<|im_end|>"
    ids = tokenizer("a\n\n12\n\nb")["input_ids"]
    # digits are split off first
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĊĊ", "1", "2", "Ċ", "Ċ", "b"]
    assert tokenizer.decode(ids) == "a\n\n12\n\nb"
    dequantised = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    source = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", **dequantised)
    with torch.no_grad():
        given = torch.tensor([ids])
        assert torch.equal(model(given).logits, source(given).logits)


def test_a_file_has_the_tokens_of_its_folder(file, tmp_path):
    convert(file, tmp_path / "model", ENDS)
    text = "a\n\n12\n\nb"
    with LLM(str(file)) as ours, LLM(str(tmp_path / "model")) as folder:
        assert ours.tokenizer(text)["input_ids"] == folder.tokenizer(text)["input_ids"]


def test_it_is_converted_once_and_again_when_it_changes(file):
    told = list[tuple[str, float | None]]()

    def hear(stage, fraction):
        told.append((stage, fraction))

    folder = hub.converted(file, hear)
    assert hub.resolve(str(file)) == str(file) and is_complete(folder)
    assert {stage for stage, _ in told} == {"converting tiny.gguf, once"}
    told.clear()
    assert hub.converted(file, hear) == folder and not told
    os.utime(file, ns=(1, 1))
    other = hub.converted(file, hear)
    assert other != folder and told
    assert not list(folder.parent.glob(".*.tmp"))


def test_a_file_that_is_none_is_refused(tmp_path, file):
    with pytest.raises(InvalidInput, match=r"no such file: .*none\.gguf"):
        hub.converted(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(
        b"GGUF is not what follows, but it is long enough for a header"
    )
    with pytest.raises(InvalidInput, match=r"can't load .*bad\.gguf"):
        hub.converted(tmp_path / "bad.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(InvalidInput, match=r"can't load .*cut\.gguf"):
        hub.converted(cut)
    assert list((tmp_path / "cache" / "gguf").glob("*/")) == []


def test_the_library_is_left_as_it_was(file):
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with pytest.raises(RuntimeError), read_once():
        assert gguf.GGUFReader is not before[0]
        assert gguf.GGUFReader(file) is gguf.GGUFReader(str(file)), "it is read once"
        raise RuntimeError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    ours, theirs = Reader(file), gguf.GGUFReader(file)
    contents = [
        {name: field.contents() for name, field in one.fields.items() if name[:5] != "GGUF."}
        for one in (ours, theirs)
    ]
    assert contents[0] == contents[1]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.name == other.name and (mine.data == other.data).all()
