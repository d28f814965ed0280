"""Models in `.gguf` files as they are: architectures, tokenizers, answers, and files that lie."""

import contextlib
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import GemmaTokenizer

import gguf_files
from cases import refuses
from gguf_files import TINY, WHOLE_BLOCKS, finish, in_blocks, metadata, model_of, say, write
from quickbeam import LLM, SamplingParams
from quickbeam.errors import InvalidInput
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.text.gguf_tokenizer import load_tokenizer
from quickbeam.models.weights.gguf import checkpoint as gguf_checkpoint
from quickbeam.models.weights.gguf import names
from quickbeam.models.weights.gguf.architecture import ARCHITECTURES, INTERLEAVED
from quickbeam.models.weights.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.weights.gguf.file import GgufFile
from streaming import alike, limits, on_disk
from target import Target

KERNELS = library.kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="needs the native kernels")
Q8, Q5 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0

IDS = [5, 17, 280, 3, 3, 99, 120, 7, 44, 200, 31, 8]
MIXED = {"attn_v": Q8, "ffn_gate": Q8, "ffn_up": Q5, "attn": Q5, "ffn_down": Q8, "token_embd": Q8}
EXPERTS = {"ffn_down_exps": Q8, "exps": Q5, "attn": Q8}
BLOCKS = {"llama": MIXED, "qwen3moe": EXPERTS, "qwen35moe": {"inp": None, "exps": Q8, "shexp": Q5}}


def logits(parameters) -> torch.Tensor:
    target, ends = (
        Target(NativeModel(parameters, parameters.stack, library.kernels())),
        range(1, len(IDS) + 1),
    )
    return torch.stack([target.prefill(IDS[:end], keep=end - 1) for end in ends])


def test_every_architecture_is_here():
    assert {name.split()[0] for name in TINY} == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", TINY)
def test_an_architecture_is_that_of_transformers(architecture, tmp_path):
    """Metadata and names by llama.cpp's package, logits by transformers."""
    model = model_of(architecture)
    assert distance(write(tmp_path / "tiny.gguf", architecture, model), model) < 2e-4


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((name, {}) for name in ("llama experts", "granitemoe", "granitehybrid experts")),
        *((name, {}) for name in ("olmoe", "lfm2", "gpt-oss", "falcon-h1")),
        ("qwen35", {"value_heads_tiled": False}),
        ("qwen35moe", {"value_heads_tiled": False}),
        ("qwen3next", {"value_heads_tiled": True}),
        ("qwen35", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("gemma4", {"sliding_window": 5}),
        ("nemotron_h", {"mlp_hidden_act": "silu"}),
        ("falcon-h1", {"mamba_norm_before_gate": True}),
        ("nemotron", {"hidden_act": "relu"}),
        ("gpt2", {"activation_function": "relu"}),
        ("starcoder2", {"sliding_window": 4}),
        ("qwen2moe", {"norm_topk_prob": True}),
        ("granitehybrid", {"position_embedding_type": "rope"}),
    ],
)
def test_a_wrong_order_of_rows_is_seen(architecture, changes, tmp_path, monkeypatch):
    """`changes`: of the configuration; none: queries and keys are turned, or aren't."""
    model, name = model_of(architecture), architecture.split()[0]
    file = write(tmp_path / "tiny.gguf", architecture, model)
    of = ARCHITECTURES[name]
    monkeypatch.setitem(ARCHITECTURES, name, lambda metadata: of(metadata) | changes)
    if not changes:
        monkeypatch.setattr(gguf_checkpoint, "INTERLEAVED", INTERLEAVED ^ {name})
    assert distance(file, model) > 2e-3


def test_swapped_names_are_seen(tmp_path, monkeypatch):
    model = model_of("gemma4 experts")
    file = write(tmp_path / "tiny.gguf", "gemma4 experts", model)
    one, other = "post_feedforward_layernorm_1.", "post_feedforward_layernorm_2."
    swapped = {one: "swapped.", other: one, "swapped.": other}
    monkeypatch.setattr(names, "RENAMED", names.RENAMED | swapped)
    assert distance(file, model) > 2e-3


@pytest.mark.parametrize("architecture", ["gemma3", "qwen35", "qwen3next", "nemotron"])
def test_norms_without_what_the_converter_adds_are_seen(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "plus_one", lambda model, name: False)
    model = model_of(architecture)
    file = write(tmp_path / "tiny.gguf", architecture, model)
    assert distance(file, model) > 2e-3


def distance(file, model) -> float:
    """How far a file's logits are from the model's, relative to the largest."""
    got = logits(GgufCheckpoint(file, torch.float32, KERNELS))
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    return float((got - wanted).abs().max() / wanted.abs().max())


def rounded(file) -> float:
    """How far logits are from those of the same weights in float32, relative to their norm."""
    exact = logits(GgufCheckpoint(file, torch.float32, KERNELS))
    return float((logits(GgufCheckpoint(file, None, KERNELS)) - exact).norm() / exact.norm())


def test_what_quantised_files_have_otherwise(tmp_path):
    """The gate of a shared expert without an axis, experts' gates and the rest in one tensor, and
    blocks that predict further tokens."""
    model = model_of("qwen35moe")

    def change(own, data):
        if "gate_inp_shexp" in own:
            return {own: data[0]}
        if "up_exps" in own:
            return {}
        if "gate_exps" in own:
            block = own.removesuffix("ffn_gate_exps.weight")
            layer = model.model.layers[int(block.split(".")[1])]
            both = layer.mlp.experts.gate_up_proj.detach().numpy()
            return {f"{block}ffn_gate_up_exps.weight": both}
        return {own: data}

    behind = {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    file = write(tmp_path / "x.gguf", "qwen35moe", model, change=change, behind=behind)
    assert distance(file, model) < 2e-4


def test_gates_of_gemma_4s_experts_may_lie_apart(tmp_path):
    def change(own, data):
        if "gate_up_exps" not in own:
            return {own: data}
        halves = zip(("gate", "up"), np.split(data, 2, 1), strict=True)
        return {own.replace("gate_up", part): half for part, half in halves}

    model = model_of("gemma4 experts")
    file = write(tmp_path / "x.gguf", "gemma4 experts", model, change=change)
    assert distance(file, model) < 2e-4


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file whose queries, keys and values, and gates and rest, are of several formats."""
    return write(tmp_path_factory.mktemp("mixed") / "m.gguf", "llama", model_of("llama"), MIXED)


def test_weights_of_several_formats_come_near_their_numbers(mixed):
    parameters = GgufCheckpoint(mixed, None, KERNELS)
    assert parameters("model.layers.0.self_attn.v_proj.weight").name == "q8_0"
    assert rounded(mixed) < 0.05


def resident(path) -> int:
    held, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ", 1)[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            held += int(line.split()[1])
    return held


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="Linux says what is resident")
def test_what_was_read_of_a_weight_does_not_stay_in_memory(mixed, tmp_path):
    path = shutil.copy(mixed, tmp_path / "own.gguf")
    checkpoint = GgufCheckpoint(path, None, KERNELS)
    name = checkpoint.stack.embedding
    whole = checkpoint.rows(name)
    copied = whole.data.clone()
    assert resident(path) > 0
    part = checkpoint.rows(name, 16)
    assert resident(path) == 0
    assert torch.equal(part.data, copied[16:]) and torch.equal(whole.data, copied)


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        ("qwen3moe", EXPERTS),
        ("lfm2", {"attn": Q8, "shortconv.in": Q5, "shortconv.out": Q8, "ffn": Q8}),
        ("lfm2moe", {"exps": Q5, "ffn_gate.": Q8}),
        ("gpt-oss", {"exps": gguf.GGMLQuantizationType.MXFP4, "attn_q": Q8}),
        ("llama experts", {"exps": Q8}),
        ("qwen35", {"attn": Q8, "ssm_out": Q5, "ssm_alpha": Q8, "ffn": Q8}),
        ("qwen3next", {"inp": None, "attn": Q5, "ssm_ba": Q8, "exps": Q8, "shexp": Q5}),
        ("gemma4", {"per_layer_token": Q8, "per_layer": None, "attn": Q8, "ffn": Q5, "proj": Q8}),
        ("gemma4 experts", {"inp": None, "attn": Q8, "exps": Q8}),
        ("nemotron_h", {"ssm_in": Q5, "ssm_out": Q8, "attn": Q8, "ffn": Q8}),
        ("falcon-h1", {"ssm_in": Q5, "ssm_out": Q8, "attn": Q8, "ffn": Q8}),
        ("gpt2", {"attn_qkv": Q8, "attn_output": Q5, "ffn_up": Q8, "token_embd": Q8}),
        ("starcoder2", {"attn": Q8, "ffn": Q5}),
        ("stablelm parallel", {"attn_v": Q5, "attn_output": Q8, "ffn": Q8}),
        ("nemotron", {"attn": Q8, "ffn": Q5, "output.": Q8}),
        ("qwen2moe", {"inp": None, "exps": Q8, "attn": Q8}),
        ("granitehybrid experts", {"ssm_in": Q8, "ssm_out": Q5, "exps": Q8, "shexp": Q5}),
    ],
)
def test_drafts_change_no_answer_of_experts_and_convolutions(architecture, kinds, tmp_path):
    file = write(tmp_path / "tiny.gguf", architecture, model_of(architecture), kinds)
    drafts_change_no_answer(file, "q8_0")


GRIDS = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_XS", *GRIDS, "TQ1_0", "TQ2_0"])
def test_drafts_change_no_answer_of_blocks_of_256_inputs(kind, tmp_path):
    """Of an embedding, attention and experts."""
    stored = gguf.GGMLQuantizationType[kind]
    kinds = {"inp": None, "token_embd": stored, "attn": stored, "exps": stored}
    model = model_of("qwen3moe", **WHOLE_BLOCKS)
    drafts_change_no_answer(write(tmp_path / "tiny.gguf", "qwen3moe", model, kinds), kind.lower())


@pytest.mark.parametrize("kind", [*GRIDS, "TQ1_0", "TQ2_0"])
def test_blocks_answer_as_the_packages_numbers_do(kind, tmp_path):
    """In float32, of a file in parts with the blocks and of one with the numbers as F32."""
    stored = gguf.GGMLQuantizationType[kind]
    kinds = {"token_embd": stored, "attn": stored, "exps": stored}
    model = model_of("qwen3moe", **WHOLE_BLOCKS)
    write(tmp_path / "blocks.gguf", "qwen3moe", model, kinds, split_max_tensors=10)
    (file,) = tmp_path.glob("blocks-00001-of-*.gguf")
    assert stored in {tensor.kind for tensor in GgufFile(file).tensors.values()}

    def numbers(own, data):
        wanted = any(part in own for part in kinds) and data.ndim > 1
        return {own: gguf.dequantize(in_blocks(data, stored), stored) if wanted else data}

    dense = write(tmp_path / "dense.gguf", "qwen3moe", model, change=numbers)
    got, wanted = (logits(GgufCheckpoint(path, torch.float32, KERNELS)) for path in (file, dense))
    assert torch.equal(got, wanted)


def drafts_change_no_answer(file, name):
    """`name`: a format that the line of statistics names."""
    assert rounded(file) < 0.3
    prompts = ["ab ab ab ab", "hello, hello", "x"]
    with LLM(str(file)) as llm:
        assert llm.kernels.startswith("native") and name in llm.kernels
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=1, ignore_eos=True)
            plain = [one.token_ids for one in llm.generate(prompts, params, method="ar")]
            for method in ("auto", "logitspec"):
                answers = llm.generate(prompts, params, method=method)
                assert [one.token_ids for one in answers] == plain, method


@pytest.mark.parametrize(("architecture", "kinds"), BLOCKS.items())
def test_blocks_read_from_disk_have_the_bits_of_memory(architecture, kinds, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    file = write(tmp_path / "tiny.gguf", architecture, model_of(architecture), kinds)
    checkpoint = GgufCheckpoint(file, None, KERNELS)
    every = limits(checkpoint)
    disk = on_disk(checkpoint, every[len(every) // 2])
    alike(Target(NativeModel(checkpoint, checkpoint.stack, library.kernels())), disk)
    assert disk.model.streamed.record()["streamed_bytes"] > 0
    disk.model.close()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(str(file)) as llm, LLM(str(file), memory=every[0]) as less:
        tokens = less.generate("ab ab ab ab", params, method="auto").token_ids
        assert tokens == llm.generate("ab ab ab ab", params, method="ar").token_ids
    assert not (tmp_path / "gguf").exists()


def test_text_becomes_the_files_tokens(mixed):
    tokenizer = load_tokenizer(GgufFile(mixed))
    ids = tokenizer.encode("a b<|im_end|>")
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == ["a", "Ġ", "b", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a b"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.special_tokens_map["bos_token"] == "<|endoftext|>"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi"


def sentence_piece(path, **changes):
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "b", "ab", "\u2581ab", "abab"]
    scores = [0.0] * 4 + [-9.0, -8.0, -7.0, -1.0, -2.0, -3.0]
    say(writer, tokenizer_model="llama", token_list=tokens, token_scores=scores)
    say(writer, token_types=[2, 3, 3, 6, *[1] * 6], unk_token_id=0, bos_token_id=1, **changes)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), dtype=np.float32))
    finish(writer)
    return path


def test_sentence_piece_joins_the_best_first(tmp_path):
    tokenizer = load_tokenizer(GgufFile(sentence_piece(tmp_path / "a.gguf")))
    assert tokenizer.encode("ab abab\n") == [1, 8, 8, 7, 3]
    assert tokenizer.decode([1, 8, 8, 7, 3], skip_special_tokens=True) == "ab abab\n"
    changes = {"add_bos_token": False, "add_space_prefix": False}
    plain = load_tokenizer(GgufFile(sentence_piece(tmp_path / "b.gguf", **changes)))
    assert plain.encode("abab") == [9]


def test_gemma_4_joins_what_its_file_lists(tmp_path):
    """As transformers does, not by the order of tokens."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\u2581", "a", "b", "c", "bc", "ab", "abc"]
    tokens += ["\u2581\u2581", "\u2581a", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = ["b c", "a b", "\u2581 \u2581", "a bc", "\u2581 a"]
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "gemma4")
    kinds = [3, 3, 3, 2, *[1] * 9, *[6] * 256]
    say(writer, tokenizer_model="gemma4", token_list=tokens, token_types=kinds, token_merges=merges)
    say(writer, pad_token_id=0, eos_token_id=1, bos_token_id=2, unk_token_id=3)
    say(writer, add_bos_token=True, add_space_prefix=False)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    finish(writer)
    tokenizer = load_tokenizer(GgufFile(tmp_path / "x.gguf"))
    pairs = [tuple(one.split()) for one in merges]
    wanted = GemmaTokenizer({one: i for i, one in enumerate(tokens)}, pairs)
    for text in ("abc ab  a", " a\n\nbc", "x y", ""):
        ids = tokenizer.encode(text)
        assert ids == [2, *wanted.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_what_is_not_known_is_named(tmp_path):
    file = write(tmp_path / "m.gguf", "llama", model_of("llama"), MIXED)
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 40)
    file.write_bytes(data)
    refuses(
        r"blk\.0\.attn_k\.weight is stored as NVFP4, .*read are .*Q3_K.*such as Q4_K_M",
        LLM,
        str(file),
    )
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    metadata(writer, model_of("llama"))
    writer.add_float32("llama.attention.new_factor", 2.0)
    writer.add_tensor("token_embd.weight", np.zeros((288, 64), dtype=np.float32))
    finish(writer)
    refuses(r"llama\.attention\.new_factor", GgufCheckpoint, tmp_path / "x.gguf", None, KERNELS)


def test_cut_and_changed_files_are_refused_and_nothing_else_happens(mixed, tmp_path):
    """Cut anywhere, and with any byte of its metadata changed: an error of ours, or a model."""
    data, random = mixed.read_bytes(), np.random.default_rng(0)
    file, end = tmp_path / "x.gguf", data.index(b"blk.0.ffn_up.weight")
    for size in [0, 3, 4, 20, *random.integers(24, len(data), 40)]:
        file.write_bytes(data[:size])
        refuses(r"x\.gguf", GgufFile, file)
    for at in random.integers(0, end, 300):
        changed = bytearray(data)
        changed[at : at + 8] = random.choice([0, 255, 127], 8).astype(np.uint8).tobytes()
        file.write_bytes(changed)
        with contextlib.suppress(InvalidInput, NotDescribed):
            GgufCheckpoint(file, None, KERNELS)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(4, 7, "version 7"), (8, 1 << 60, ""), (16, 1 << 62, ""), (24, 1 << 40, "")],
)
def test_counts_are_held_against_the_size(mixed, tmp_path, at, value, words):
    data = bytearray(mixed.read_bytes())
    data[at : at + (4 if at == 4 else 8)] = value.to_bytes(4 if at == 4 else 8, "little")
    (tmp_path / "x.gguf").write_bytes(data)
    refuses(f"no whole .gguf file.*{words}", GgufFile, tmp_path / "x.gguf")


@pytest.fixture
def read(monkeypatch):
    def set_up(change):
        whole = GgufFile.__init__

        def changed(self, path):
            whole(self, path)
            change(self)

        monkeypatch.setattr(GgufFile, "__init__", changed)

    return set_up


@pytest.mark.parametrize(
    ("architecture", "at", "kind", "shape"),
    [
        ("qwen2", "blk.1.attn_k.bias", 0, (1,)),
        ("qwen2", "blk.1.attn_k.bias", 8, (32,)),
        ("qwen2", "blk.1.ffn_norm.weight", 8, (64,)),
        ("gemma3", "blk.1.attn_q_norm.weight", 0, (2,)),
        ("qwen35", "blk.0.ssm_norm.weight", 0, (2,)),
        ("qwen35", "blk.0.ssm_conv1d.weight", 0, (112, 3)),
        ("granitehybrid", "blk.0.ssm_norm.weight", 0, (2, 2)),
        ("nemotron_h", "blk.0.ssm_d", 0, (2, 1)),
        ("gemma4", "per_layer_token_embd.weight", 0, (288, 32)),
        ("gemma3", "blk.1.post_ffw_norm.weight", 0, (63,)),
        ("qwen3moe", "blk.1.ffn_up_exps.weight", 0, (2, 96, 64)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(architecture, at, kind, shape, tmp_path, read):
    file = write(tmp_path / "tiny.gguf", architecture, model_of(architecture))

    def change(self):
        located = self._parts[at]._located(at, kind, shape, self.tensors[at].offset)
        self.tensors[at] = located

    read(change)
    with pytest.raises(ValueError):
        GgufCheckpoint(file, None, KERNELS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 1 << 31),
        ("llama.attention.layer_norm_rms_epsilon", ""),
        ("llama.attention.key_length", ["a"]),
        ("llama.rope.freq_base", float("inf")),
        ("tokenizer.ggml.pre", ["a"]),
        ("tokenizer.ggml.token_type", 5),
        ("tokenizer.ggml.add_bos_token", np.array([1, 2])),
    ],
)
def test_values_of_another_kind_are_refused(mixed, key, value, read):
    read(lambda self: self.metadata.update({key: value}))
    # transformers would read it otherwise, and make as many layers
    refused = InvalidInput if key == "llama.block_count" else (InvalidInput, NotDescribed)
    with pytest.raises(refused):
        GgufCheckpoint(mixed, None, KERNELS)
