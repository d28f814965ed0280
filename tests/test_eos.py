"""The tokens that end an answer are the same from a folder, a `.gguf` file and its conversion."""

import json
from types import SimpleNamespace

import gguf
import pytest
from tokenizers import AddedToken

from gguf_files import model_of, write
from quickbeam import LLM, SamplingParams
from quickbeam.models.native import library
from quickbeam.models.text.eos import KNOWN_ENDS, eos_ids, known_eos_ids
from quickbeam.models.weights.gguf.convert import convert

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="needs the native kernels")
CONTROL = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>", "<|mine|>", "<tool>")


def tokenizer(*added, template=None):
    tokens = {i: one if isinstance(one, AddedToken) else AddedToken(one) for i, one in added}
    return SimpleNamespace(chat_template=template, added_tokens_decoder=tokens)


def test_special_tokens_of_known_texts_end_an_answer():
    assert known_eos_ids(tokenizer(*enumerate(["<|im_end|>", "<|fim_prefix|>", "<x>"]))) == {0}
    special = [(i, AddedToken(text, special=True)) for i, text in enumerate(sorted(KNOWN_ENDS))]
    inner = {"<|end|>", "</s>"}
    ends = {i for i, token in special if token.content not in inner}
    assert known_eos_ids(tokenizer(*special)) == ends
    assert known_eos_ids(tokenizer((3, AddedToken("</s>", special=True)))) == {3}
    assert not known_eos_ids(tokenizer((3, "</s>"), (4, "<reponame>"))), "text, as Gemma has it"
    assert known_eos_ids(tokenizer((3, "<end_of_turn>"), template="x<end_of_turn>")) == {3}
    named = {"default": "", "tool_use": "<end_of_turn>"}
    assert known_eos_ids(tokenizer((3, "<end_of_turn>"), template=named)) == {3}
    assert known_eos_ids(tokenizer((0, "<|end|>"), (1, "<|return|>"))) == {0, 1}
    assert known_eos_ids(tokenizer((0, "<|end|>"), (1, "<|return|>"), (2, "<|call|>"))) == {1, 2}
    assert not known_eos_ids(SimpleNamespace())


def test_ids_that_are_no_token_are_left_out(caplog):
    assert eos_ids({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, None) == {3, 4, 5}
    assert not caplog.text
    assert eos_ids({"eos_token_id": [3, -1]}, {"eos_token_id": "x"}) == {3}
    assert "-1" in caplog.text and "'x'" in caplog.text


def ids_of(*texts):
    known = {text: 258 + 3 + i for i, text in enumerate(CONTROL)}
    return {0, 2} | {known[text] for text in texts}


@pytest.fixture(scope="module")
def model():
    return model_of("qwen2")


@pytest.mark.parametrize(
    ("keys", "also"),
    [
        ({}, ()),
        ({"tokenizer.ggml.eos_token_id": 0}, ()),
        ({"tokenizer.ggml.eos_token_id": None}, ()),
        ({"tokenizer.ggml.eos_token_id": [2, 265]}, ("<|mine|>",)),
        ({"tokenizer.ggml.eos_token_ids": [265, 2]}, ("<|mine|>",)),
        ({"tokenizer.ggml.eot_token_id": 265}, ("<|mine|>",)),
        ({"tokenizer.ggml.eom_token_id": 265, "tokenizer.ggml.fim_sep_token_id": 266}, CONTROL[4:]),
    ],
)
def test_a_model_ends_alike_from_a_file_a_folder_and_its_conversion(
    keys, also, model, cache, tmp_path
):
    file = write(tmp_path / "x.gguf", "qwen2", model, keys=keys, control=CONTROL)
    wanted = ids_of("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", *also)
    folder = tmp_path / "model"
    convert(file, folder)
    written = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert set(written["eos_token_id"]) == wanted
    with LLM(str(file)) as llm, LLM(str(folder)) as converted:
        assert llm.eos_ids == wanted
        assert converted.eos_ids == wanted


@pytest.mark.parametrize(
    ("of_generation", "of_config", "also"),
    [
        (None, 2, ()),
        (None, None, ()),
        ([2, 0], 2, ()),
        ([265, 2], 0, ("<|mine|>",)),
        (2, [265], ("<|mine|>",)),
    ],
)
@pytest.mark.parametrize("torch_back_end", [False, True])
def test_a_folder_names_them_in_any_of_its_files(
    of_generation, of_config, also, torch_back_end, model, cache, tmp_path, monkeypatch
):
    file = write(tmp_path / "x.gguf", "qwen2", model, control=CONTROL)
    folder = tmp_path / "model"
    convert(file, folder)
    (folder / "generation_config.json").unlink()
    if of_generation is not None:
        content = json.dumps({"eos_token_id": of_generation})
        (folder / "generation_config.json").write_text(content, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["eos_token_id"] = of_config
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if torch_back_end:
        monkeypatch.setattr(library, "kernels", lambda *_: None)
    with LLM(str(folder)) as llm:
        assert llm.eos_ids == ids_of("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", *also)


@pytest.mark.parametrize("method", ["ar", "auto"])
def test_an_answer_ends_at_each_of_them(method, model, cache, tmp_path):
    file = write(tmp_path / "x.gguf", "qwen2", model, control=CONTROL)
    with LLM(str(file)) as llm:
        for token in (0, 2, 261, 262, 263):
            params = SamplingParams(max_tokens=8, logit_bias={token: 100.0})
            answer = llm.generate("ab ab", params, method=method)
            assert answer.finish_reason == "stop" and answer.token_ids == [token]
        params = SamplingParams(max_tokens=8, logit_bias={264: 100.0})
        assert llm.generate("ab ab", params, method=method).token_ids == [264] * 8


def test_tokens_that_are_no_special_ones_end_nothing(model, tmp_path):
    file, texts = (
        tmp_path / "x.gguf",
        ("</s>", "<eos>", "<reponame>", "<PAD>", "[PAD]", "<fim_pad>"),
    )
    kinds = [3] * 3 + [1] * 258 + [gguf.TokenType.USER_DEFINED.value] * 6 + [5] * 21
    keys = {"tokenizer.ggml.token_type": kinds}
    write(file, "qwen2", model, keys=keys, control=texts)
    with LLM(str(file)) as llm:
        assert llm.eos_ids == {0, 2}
