"""What is loaded is the whole model as transformers computes it, or is refused in words."""

import importlib.metadata
import importlib.util
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cases import refuses
from checkpoints import configure, rewrite
from models import spread_out, tiny
from quickbeam.drafters import loading as drafters
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.models import loading
from quickbeam.models.families import FAMILIES
from quickbeam.models.formats import wanted_dtype
from quickbeam.models.loading import load_model
from quickbeam.models.native_model import why_not_native
from quickbeam.params import SamplingParams

CPU = torch.device("cpu")
CONTEXT = 48
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0]}
LONGROPE["original_max_position_embeddings"] = CONTEXT
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LINEARS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"]


def load(folder, dtype=torch.float32, **options):
    return load_model(str(folder), dtype, CPU, **options)[0]


@pytest.fixture
def folder(toy_folder, tmp_path):
    """The toy's tokenizer and configuration; `write` gives it weights."""
    return Path(shutil.copytree(toy_folder, tmp_path / "model"))


def write(folder, **fields):
    """Change the configuration, and give the folder random weights for it."""
    configure(folder, **fields)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder)
    model = spread_out(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("rope", "length"), [(LONGROPE, 4 * CONTEXT), (LONGROPE, CONTEXT), (DYNAMIC, CONTEXT)]
)
def test_angles_that_follow_the_length_are_those_of_transformers(folder, rope, length):
    write(folder, rope_parameters=rope, max_position_embeddings=length)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = dict(do_sample=False, repetition_penalty=1.0, eos_token_id=None)
    rows = model.generate(torch.tensor([prompt]), max_new_tokens=CONTEXT - len(prompt), **options)
    expected = rows[0, len(prompt) :].tolist()
    llm = LLM(str(folder), "pld", dtype="float32")
    params = SamplingParams(max_tokens=CONTEXT - len(prompt), ignore_eos=True)
    for _ in range(2):  # what ran at the end of the context may not show in the next answer
        assert llm.generate(prompt, params).token_ids == expected
    with pytest.raises(InvalidInput, match=f"context of {CONTEXT}"):
        llm.generate(prompt, SamplingParams(max_tokens=CONTEXT - len(prompt) + 1))


@pytest.mark.parametrize("part", ["class", "embed_tokens", *(f"layers.1.{one}" for one in LINEARS)])
def test_the_kernels_take_plain_modules_and_classes_of_transformers_only(part):
    """A linear as peft's and the quantised ones computes more than its weight says."""
    model = tiny("llama")
    assert not why_not_native(model)
    if part == "class":
        foreign = {"__module__": "came_with_the_model"}
        model.__class__ = type("LlamaForCausalLM", (type(model),), foreign)
    else:
        plain = model.model.get_submodule(part)
        plain.__class__ = type("Adapted", (type(plain),), {})
    assert why_not_native(model)


def test_what_the_kernels_do_not_run_is_said_to_be_not_promised(
    folder, tmp_path, caplog, monkeypatch
):
    monkeypatch.delitem(FAMILIES, "helium")  # whose tensors are Llama's
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    write(folder, model_type="helium", architectures=["HeliumForCausalLM"])
    with caplog.at_level("INFO", "quickbeam"), LLM(str(folder)) as llm:
        answer = llm.generate([3, 1, 4], SamplingParams(max_tokens=4))
    assert not answer.statistics.exact and answer.to_json()["exact"] is False
    (line,) = [record.message for record in caplog.records if "promise" in record.message]
    assert "HeliumForCausalLM" in line and "HeliumForCausalLM" in llm.kernels
    caplog.clear()
    with caplog.at_level("INFO", "quickbeam"), LLM(str(write(plain))) as llm:
        answer = llm.generate([3, 1, 4], SamplingParams(max_tokens=4))
        logged = "promise" in caplog.text
        assert answer.statistics.exact == llm.model.exact == (not logged)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_read_from_stacked_and_from_single_tensors(folder, stacked):
    config = AutoConfig.from_pretrained(folder).to_dict() | {"num_local_experts": 3}
    plain = tiny("", config=transformers.MixtralConfig(**{**config, "model_type": "mixtral"}))
    plain.save_pretrained(folder)
    assert any("experts.2." in name for name in load_file(folder / "model.safetensors"))
    if stacked:
        stored = {name: tensor.contiguous() for name, tensor in plain.state_dict().items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    ids = [3, 1, 4, 1, 5]
    with LLM(str(folder), dtype="float32") as llm:
        answer = llm.generate(ids, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert llm.model.exact
    for _ in range(4):
        ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer.token_ids == ids[5:]


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes reads them"
)
def test_quantised_weights_without_their_library_are_refused(folder):
    configure(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    words = r"\(bitsandbytes\).*missing here: .*pip install -U bitsandbytes.*unquantised"
    refuses(words, load, folder)


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch):
    """A model that comes with Python code, which leaves `ran` beside the folder when it runs."""
    places = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(places, str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = f"""
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({str(tmp_path / "ran")!r}).touch()
class OddConfig(LlamaConfig):
    model_type = "odd"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""
    (folder / "odd.py").write_text(code)
    places = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    configure(folder, model_type="odd", architectures=["OddForCausalLM"], auto_map=places)
    return folder


def test_code_of_a_model_runs_only_where_that_is_asked_for(with_code, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # the lines of a chat are no consent
    with pytest.raises(InvalidInput, match="--trust-remote-code") as caught:
        load(with_code)
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()
    model = load(with_code, trust_remote_code=True)
    assert type(model).__name__ == "OddForCausalLM" and (tmp_path / "ran").exists()


def test_a_drafter_is_trusted_where_that_is_asked_for(monkeypatch, tmp_path):
    seen = []

    def stand_in(*arguments, **options):
        seen.append(options["trust_remote_code"])
        raise InvalidInput("enough")

    monkeypatch.setattr(drafters, "open_model", stand_in)
    known = {"dtype": torch.float32, "device": CPU, "streamed": None, "weights": "bfloat16"}
    target: Any = type("Target", (), known)
    for options in ({}, {"trust_remote_code": True}):
        refuses("enough", drafters.load_drafter, str(tmp_path), target, None, **options)
    assert seen == [False, True]


def test_the_number_format_is_the_checkpoints_own_and_revisions_the_hubs(folder, monkeypatch):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    assert load(folder, wanted_dtype("auto")).dtype is torch.float16
    assert load(folder, wanted_dtype("float32")).dtype is torch.float32
    refuses(r"unknown dtype 'int8'; known: .*bfloat16", wanted_dtype, "int8")
    assert load(folder, device_map="cpu").device == CPU
    with pytest.raises(InvalidInput, match=r"device_map spreads it over cpu, disk: .*one device"):
        load(folder, device_map={"model": "cpu", "lm_head": "disk"}, dtype=torch.float32)
    refuses(r"revision 'v1'.*on this machine", load, folder, revision="v1")
    seen: dict[str, Any] = {}

    def stop(name, **options):
        seen.update(options)
        raise OSError("not cached")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", stop)
    refuses("not cached", load_model, "organisation/model", None, CPU, revision="v1")
    assert seen == {"revision": "v1", "trust_remote_code": False}


def test_what_is_no_causal_language_model_is_named(tmp_path):
    for config, reason in (
        (
            transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"]),
            r"LlavaForConditionalGeneration reads more than text \(text_config, vision_config\): "
            r"its language part runs in the native kernels, .* alone \(llama\)",
        ),
        (transformers.Qwen2VLConfig(), r"Qwen2VLConfig reads more than text .*\(qwen2_vl_text\)"),
        (transformers.ViTConfig(), "ViTConfig doesn't continue a text from left to right"),
        (transformers.T5Config(), "T5Config is an encoder-decoder"),
    ):
        config.save_pretrained(tmp_path)
        refuses(f"can't load .*: {reason}", load, tmp_path)


def test_a_checkpoint_that_lacks_weights_or_has_other_shapes_is_refused(folder):
    write(folder, tie_word_embeddings=False)
    rewrite(folder, {"lm_head.weight": None})
    words = r"lack lm_head.weight: download it again.*tie_word_embeddings: true"
    refuses(words, load, folder)
    configure(folder, tie_word_embeddings=True)
    assert load(folder).lm_head.weight is not None
    gone = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"]
    rewrite(folder, dict.fromkeys([*gone, "model.norm.weight"]))
    words = rf"can't load '{folder}'.* lack {gone[1]}.* and 1 more[^\n]*$"
    refuses(words, load, folder)
    write(folder)
    rewrite(folder, {"model.norm.weight": torch.ones(3)})
    words = r"model.norm.weight has shape \[3\], expected \[32\] by config.json"
    refuses(words, load, folder)


def test_what_is_no_file_of_weights_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"broken")
    refuses("can't load", load, folder)
    # as Git leaves it without its extension for large files
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refuses(r"model\.safetensors can't be read", LLM, str(folder))
    shape = b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}'
    two = b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "b": '
    two += b'{"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}}'
    for header, words in ((shape, "'a' of shape"), (two, "'a' and 'b' lie in the same place")):
        data = len(header).to_bytes(8, "little") + header + bytes(16)
        (folder / "model.safetensors").write_bytes(data)
        refuses(words, LLM, str(folder))
    (folder / "model.safetensors").unlink()
    for broken in (b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04" + bytes(96)):
        (folder / "pytorch_model.bin").write_bytes(broken)
        refuses("its weights can't be read.*download it again", LLM, str(folder))


def test_a_tokenizer_that_is_broken_or_missing_is_named(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    refuses(r"its tokenizer can't be read .*: download it again", LLM, str(folder))
    (folder / "tokenizer.json").unlink()
    refuses(r"it has no tokenizer\.json: download it again", LLM, str(folder))


def missing(package):
    raise importlib.metadata.PackageNotFoundError(package)


def test_a_tokenizer_that_needs_a_library_to_be_converted_says_which(folder, monkeypatch):
    monkeypatch.setattr("quickbeam.models.tokenizer.version", missing)
    (folder / "tokenizer.json").unlink()
    for content, words in (
        (b"\n\x0e\n\x05<unk>", "pip install sentencepiece protobuf"),
        (b"IQ== 0\n", "pip install tiktoken"),
    ):
        (folder / "tokenizer.model").write_bytes(content)
        refuses(f"tokenizer.model and no tokenizer.json.*{words}", LLM, str(folder))
        refuses(f"tokenizer.model and no tokenizer.json.*{words}", load, folder)


def test_a_tokenizer_of_sentencepiece_is_converted(folder):
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    text = folder / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    sizes = {"vocab_size": 60, "model_type": "bpe", "hard_vocab_limit": False}
    place = {"input": str(text), "model_prefix": str(folder / "tokenizer")}
    sentencepiece.SentencePieceTrainer.train(**place, **sizes)
    (folder / "tokenizer.json").unlink()
    configure(folder, tokenizer_class="LlamaTokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    with LLM(str(folder)) as llm:
        ids = llm.tokenizer("the lazy fox", add_special_tokens=False)["input_ids"]
        assert ids == theirs.encode("the lazy fox") and llm.model.exact
