"""From a `.gguf` file to a folder that transformers reads, made once in the cache."""

import os

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import refuses
from gguf_files import model_of, write
from quickbeam import LLM, hub
from quickbeam.cache import is_complete
from quickbeam.conversion import Reader, convert, read_once

ENDS = ("<|im_end|>", "<|endoftext|>")


@pytest.fixture
def file(cache, tmp_path):
    model = model_of("llama")
    model.config.tie_word_embeddings = True
    return write(tmp_path / "tiny.gguf", "llama", model, pre="smollm")


def test_a_plain_folder_is_made_whose_tokens_are_the_files(file, tmp_path, capfd):
    convert(file, tmp_path / "model", ENDS)
    assert capfd.readouterr() == ("", "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
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


def test_it_is_converted_once_or_refused(file, tmp_path):
    stages = list[tuple[str, float | None]]()

    def progress(stage, fraction):
        stages.append((stage, fraction))

    folder = hub.converted(file, progress)
    assert hub.resolve(str(file)) == str(file) and is_complete(folder)
    assert {stage for stage, _ in stages} == {"converting tiny.gguf, once"}
    stages.clear()
    assert hub.converted(file, progress) == folder and not stages
    os.utime(file, ns=(1, 1))
    other = hub.converted(file, progress)
    assert other != folder and stages
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))  # another file of the same size and time
    third = hub.converted(file, progress)
    assert third not in (folder, other)
    assert not list(folder.parent.glob(".*.tmp"))
    refuses(r"no such file: .*none\.gguf", hub.converted, tmp_path / "none.gguf")
    for data in (b"GGUF without what follows it" * 2, file.read_bytes()[:-2000]):
        (tmp_path / "bad.gguf").write_bytes(data)
        refuses(r"can't load .*bad\.gguf", hub.converted, tmp_path / "bad.gguf")
    assert set(folder.parent.glob("*/")) == {folder, other, third}


def test_the_library_is_left_as_it_was(file):
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
