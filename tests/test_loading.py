"""What is loaded is the whole model as transformers computes it, or is refused in words."""

import copy
import importlib.metadata
import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from cases import few, refuses
from checkpoints import configure, rewrite
from models import CONFIGS, spread_out, table, tiny
from quickbeam.errors import InvalidInput
from quickbeam.llm import LLM
from quickbeam.models.families import describe
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.opening import make_model, open_checkpoint
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.transformers_class import load_model
from quickbeam.models.weights.formats import wanted_dtype
from quickbeam.params import SamplingParams
from test_prequantised import write as write_quantised

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
def test_plain_modules_and_classes_of_transformers_alone_are_taken(part):
    """A linear as peft's and the quantised ones computes more than its weight says."""
    model = tiny("llama")
    assert describe(model)
    if part == "class":
        foreign = {"__module__": "came_with_the_model"}
        model.__class__ = type("LlamaForCausalLM", (type(model),), foreign)
    else:
        plain = model.model.get_submodule(part)
        plain.__class__ = type("Adapted", (type(plain),), {})
    words = "comes with Python code of its own, which is not run" if part == "class" else "Adapted"
    refuses(words, make_model, model, error=NotDescribed)


def quantised(model, package, changed):
    """The model as a library that quantises leaves it: `changed` puts its tensors into a layer."""
    plain = model.model.layers[0].mlp.down_proj
    plain.__class__ = type("Linear4bit", (type(plain),), {"__module__": f"{package}.nn.modules"})
    changed(plain)
    return model


@pytest.mark.parametrize(
    ("package", "config", "name"),
    [
        ("bitsandbytes", BitsAndBytesConfig(load_in_4bit=True), "bitsandbytes"),
        ("bitsandbytes", {"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ("bitsandbytes", None, "bitsandbytes"),
        ("hqq", {"quant_method": "hqq"}, "hqq"),
        ("hqq", None, "hqq"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_model_that_transformers_quantised_is_refused_by_name(package, config, name, packed):
    def changed(module):
        if packed:
            del module.weight
            module.W_q = torch.nn.Parameter(torch.ones(3))

    model = quantised(tiny("llama"), package, changed)
    if config is not None:
        model.config.quantization_config = config
    words = rf"LlamaForCausalLM are quantised \({name}\).*take the unquantised.*AWQ.*\.gguf"
    refuses(words, make_model, model)


def test_weights_that_were_widened_are_plain():
    """As of transformers' `dequantize`, which leaves the configuration's field."""
    model = tiny("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    assert describe(model)


def test_an_odd_number_of_inputs_is_left_to_pytorch(caplog):
    config = copy.deepcopy(CONFIGS["llama"])
    config.intermediate_size = 47
    with caplog.at_level("INFO", "quickbeam"):
        model = make_model(tiny("", torch.bfloat16, config=config))
    assert isinstance(model, TorchModel) and not model.exact
    assert re.search(r"finds them \(.*down_proj\.weight has an odd", caplog.text)


@pytest.mark.parametrize("kernels", ["eager", None])
def test_what_the_kernels_do_not_run_is_said_to_be_not_promised(folder, caplog, native, kernels):
    write(folder)
    if kernels is not None:
        native(kernels)
    with caplog.at_level("INFO", "quickbeam"), LLM(str(folder)) as llm:
        answer = llm.generate([3, 1, 4], SamplingParams(max_tokens=4))
        logged = "promise" in caplog.text
        assert answer.statistics.exact == llm.model.exact == (not logged)
        assert answer.to_json()["exact"] is llm.model.exact
    if kernels is not None:
        assert logged and "QUICKBEAM_KERNELS" in llm.kernels


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


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quanto", "eetq"])
def test_a_checkpoint_that_is_quantised_otherwise_is_refused_by_name(method, folder):
    write(folder)
    configure(folder, quantization_config={"quant_method": method})
    words = rf"quantised by {method}; read are AWQ.*\.gguf file, or the unquantised"
    refuses(words, LLM, str(folder))
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


def test_code_of_a_model_never_runs(with_code, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # the lines of a chat are no consent
    words = (
        r"no family describes OddForCausalLM \(model_type 'odd'\), and Python code that comes with "
        r"a model is not run; the nearest by name and fields is '.*docs/extending/architectures\.md"
    )
    for opened in (LLM, load):
        refuses(words, opened, str(with_code))
    configure(with_code, model_type="llama", architectures=["OddForCausalLM"])
    assert type(load(with_code)).__name__ == "LlamaForCausalLM"
    with LLM(str(with_code)) as llm:
        assert llm.generate([3, 1, 4], SamplingParams(max_tokens=2)).token_ids
    assert not (tmp_path / "ran").exists()


def test_the_number_format_is_the_checkpoints_own_and_revisions_the_hubs(folder, monkeypatch):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    assert load(folder, wanted_dtype("auto")).dtype is torch.float16
    assert load(folder, wanted_dtype("float32")).dtype is torch.float32
    refuses(r"unknown dtype 'int8'; known: .*bfloat16", wanted_dtype, "int8")
    for own in ({"dtype": None}, {"dtype": None, "torch_dtype": None}):  # as of older checkpoints
        configure(folder, **own)
        assert open_checkpoint(str(folder), None).dtype is torch.float16
    configure(folder, dtype="int8")
    refuses("names numbers of type int8: give dtype", open_checkpoint, str(folder), None)
    refuses(r"revision 'v1'.*on this machine", LLM, str(folder), revision="v1")
    seen: dict[str, Any] = {}

    def stop(name, **options):
        seen.update(options, name=name)
        raise OSError("not cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", stop)
    refuses("not cached", open_checkpoint, "organisation/model", None, revision="v1")
    assert seen["name"] == "organisation/model" and seen["revision"] == "v1"


def test_pickles_of_the_hub_are_fetched_where_there_is_nothing_else(folder, monkeypatch):
    write(folder)
    weights, asked = folder / "model.safetensors", []

    def download(name, *, allow_patterns, **options):
        asked.append("*.bin" in allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    open_checkpoint("organisation/model", None)
    assert asked == [False]
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    open_checkpoint("organisation/model", None)
    assert asked == [False, False, True]


def test_what_is_no_described_causal_language_model_is_named(tmp_path):
    bloom = transformers.BloomConfig(architectures=["BloomForCausalLM"])
    page = r"docs/extending/architectures\.md says how to describe one"
    for config, reason in (
        (
            transformers.Gemma3nConfig(architectures=["Gemma3nForConditionalGeneration"]),
            r"Gemma3nForConditionalGeneration reads more than text \(audio_config, text_config, "
            r"vision_config\): take a checkpoint of its language model alone \(gemma3n_text\)",
        ),
        (transformers.ViTConfig(), "vit doesn't continue a text from left to right"),
        (transformers.T5Config(), "t5 is an encoder-decoder"),
        (bloom, rf"describes BloomForCausalLM \(model_type 'bloom'\); the nearest .*', and {page}"),
        (transformers.LlavaConfig(text_config=bloom), rf"model_type 'bloom'.*{page}"),
        (transformers.JambaConfig(), "model_type 'jamba'.* is 'bamba', and"),
        (transformers.DiffLlamaConfig(), "model_type 'diffllama'.* is 'llama', and"),
        (transformers.Olmo3Config(), "no weights"),
    ):
        config.save_pretrained(tmp_path)
        refuses(f"can't load .*: .*{reason}", load, tmp_path)
        refuses(f"can't load .*: .*{reason}", LLM, str(tmp_path))


FAMILIES = table("families")
OFTEN = ["gpt2", "mixtral", "gemma3", "deepseek_v3", "qwen3_5", "gpt_oss"]


@pytest.mark.parametrize("name", few(FAMILIES, OFTEN))
def test_training_and_peers_are_given_transformers_model_with_our_weights(name, folder):
    plain = spread_out(tiny("", config=FAMILIES[name]), 1, vectors=0.1)
    plain.save_pretrained(folder)
    loaded = load(folder)
    assert type(loaded) is type(plain)
    for one, parameter in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[one], parameter), one
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_training_and_peers_read_what_answers_do(folder):
    """`.bin` files, and weights in few bits in the number format that is asked for."""
    write(folder)
    right = load(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(load(folder).lm_head.weight, right.lm_head.weight)
    (folder / "pytorch_model.bin").unlink()
    _, numbers = write_quantised(folder, "gptq-order")
    name = "model.layers.0.self_attn.q_proj.weight"
    loaded = load(folder, torch.bfloat16)
    assert torch.equal(loaded.get_parameter(name), numbers[name].bfloat16())


REFUSED = table("refused")


@pytest.mark.parametrize("name", REFUSED)
def test_models_of_other_kinds_are_refused(name):
    words = "use_bidirectional_attention|no family describes .* the nearest"
    refuses(words, make_model, tiny("", config=REFUSED[name]), error=NotDescribed)


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
        refuses("can't be read.*download it again", LLM, str(folder))


def test_a_tokenizer_that_is_broken_or_missing_is_named(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    refuses(r"its tokenizer can't be read .*: download it again", LLM, str(folder))
    (folder / "tokenizer.json").unlink()
    refuses(r"it has no tokenizer\.json: download it again", LLM, str(folder))


def missing(package):
    raise importlib.metadata.PackageNotFoundError(package)


def test_a_tokenizer_that_needs_a_library_to_be_converted_says_which(folder, monkeypatch):
    monkeypatch.setattr("quickbeam.models.text.tokenizer.version", missing)
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
