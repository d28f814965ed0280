"""How the published layouts of block drafters are read, and what is refused."""

import json
import math
import random
from dataclasses import replace

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

import gguf_files
import test_language_parts as language_parts
from cases import refuses
from features import words
from models import SIZES, VOCAB, spread_out, tiny
from quickbeam import LLM
from quickbeam.drafters import folder
from quickbeam.drafters.block import BlockDrafter
from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_files import ROTATED, load_block
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.layouts import BLOCK, is_kind
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.drafters.vocabulary import make_shortlist
from quickbeam.errors import InvalidInput
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native import library
from quickbeam.models.opening import open_model
from quickbeam.models.weights.checkpoint import Checkpoint
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree
from test_block_drafter import DSPARK, KINDS, MASK, D, Toy

WEIGHTS = "model.safetensors"
LAYER_FIELDS = {*folder.SIZES.values(), "num_hidden_layers", "rms_norm_eps"}


@pytest.fixture(scope="module")
def toys():
    return {kind: Toy(config) for kind, config in KINDS.items()}


def read(folder):
    toy = tiny("llama", seed=3)
    modules = toy.get_input_embeddings(), toy.get_output_embeddings()
    return load_block(folder, TargetParts(3, D, VOCAB, *modules))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_comes_back_as_it_was_saved(toys, kind, tmp_path):
    toys[kind].network.save(tmp_path, torch.float32)
    assert is_kind(tmp_path, BLOCK)
    network = read(tmp_path)
    assert network.config == KINDS[kind]
    for name, tensor in toys[kind].network.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor)


def test_the_layout_of_dflash_is_read(toys, tmp_path):
    """Its options lie in `dflash_config`, and the anchor's row drafts nothing."""
    toys["dflash"].network.save(tmp_path, torch.float32)
    record = json.loads((tmp_path / "config.json").read_text())
    nested = {name: record.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    for name in ("sample_from_anchor", "markov_rank", "markov_head_type", "causal_head"):
        del record[name]
    record |= {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert is_kind(tmp_path, BLOCK) and read(tmp_path).config == KINDS["dflash"]
    for inside, field in (
        ({"projector_type": "dspark"}, {"from_anchor": True}),
        ({"shift_label": True}, {"from_anchor": True}),
        ({"projector_type": "dspark", "sample_from_anchor": False}, {}),
        ({"causal": True}, {"causal": True}),
        ({"block_size": record["block_size"]}, {}),
    ):
        again = record | {"dflash_config": nested | inside}
        (tmp_path / "config.json").write_text(json.dumps(again))
        assert read(tmp_path).config == replace(KINDS["dflash"], **field)
    del again["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(again))
    assert is_kind(tmp_path, BLOCK) and read(tmp_path).config == KINDS["dflash"]


def test_the_layout_of_speculators_is_read(toys, tmp_path):
    """A head for a part of the vocabulary, copies of the target's weights, and other names."""
    toys["own head"].network.save(tmp_path, torch.float32)
    record = json.loads((tmp_path / "config.json").read_text())
    state = load_file(tmp_path / WEIGHTS)
    layer = {name: record.pop(name) for name in [*record] if name in LAYER_FIELDS}
    for name in ("architectures", "sample_from_anchor", "causal_head", "target_layer_ids"):
        del record[name]
    record |= {"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [1, 2]}
    record |= {"sliding_window_non_causal": False, "transformer_layer_config": layer}

    def config(tensors, **changes):
        (tmp_path / "config.json").write_text(json.dumps(record | changes))
        save_file(tensors, tmp_path / WEIGHTS)
        assert is_kind(tmp_path, BLOCK)
        return read(tmp_path).config

    right, copies = KINDS["own head"], {"embed_tokens.weight": torch.ones(VOCAB, D)}
    copies |= {"t2d": torch.ones(VOCAB, dtype=torch.bool), "verifier_norm.weight": torch.ones(D)}
    assert config(state | copies) == right
    assert config(state, sample_from_anchor=False) == replace(right, from_anchor=False)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    windowed = {"transformer_layer_config": layer | windows}
    some = replace(right, windows=(6, None))
    assert config(state, **windowed) == replace(some, causal=None)
    assert config(state, **windowed, sliding_window_non_causal=True) == some
    proj = "confidence_head.proj.weight"
    config(state | {proj: state[proj][:, :D].contiguous()})  # the confidence is by the row alone
    assert torch.equal(read(tmp_path).state_dict()[proj][0, D:], torch.zeros(6))
    whole = {
        name: one for name, one in state.items() if name.startswith(("fc.", "l", "h", "norm."))
    }
    whole["lm_head.weight"] = torch.ones(VOCAB, D)  # a copy, too
    flash = {"speculators_model_type": "dflash", "draft_vocab_size": VOCAB, "markov_rank": 0}
    given = config(whole, **flash, enable_confidence_head=False)
    assert given == replace(KINDS["dflash"], aux_layers=(1, 2))
    refuses("more than once", config, state | {"d2t": -torch.arange(60)})
    refuses("lack d2t", config, {name: one for name, one in state.items() if name != "d2t"})


def test_the_layouts_of_dflash2_and_liquidai_are_read(toys, tmp_path):
    toys["dflash2"].network.save(tmp_path, torch.float32)
    record = json.loads((tmp_path / "config.json").read_text())
    names = ("mask_token_id", "target_layer_ids", "block_size", "selector_rank", "selector_top_k")
    nested = {one: record.pop(one) for one in (*names, "conv_kernel_size", "conv_group_size")}
    del record["sample_from_anchor"], record["causal_head"]
    record |= {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": nested}
    state = load_file(tmp_path / WEIGHTS)
    plain = {name.replace("codebook.weight", "codebook"): one for name, one in state.items()}
    save_file(plain, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert is_kind(tmp_path, BLOCK) and read(tmp_path).config == KINDS["dflash2"]
    toys["gemma"].network.save(tmp_path, torch.float32)
    record = json.loads((tmp_path / "config.json").read_text())
    angles = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    more = {"full_attention": angles, "sliding_attention": {"rope_theta": 1e4}}
    more = {"rope_parameters": more, "head_dim": 4, "num_key_value_heads": 1}
    more |= {
        "attention_k_eq_v": True,
        "model_type": "gemma4_text",
        "layer_types": ["full_attention"],
    }
    del record["input_embedding_scale"]
    (tmp_path / "config.json").write_text(json.dumps(record | more))
    right = replace(KINDS["gemma"], values_are_keys=True, rope={"rope_parameters": angles})
    assert BlockConfig.of(record | more, D, VOCAB) == right
    toys["dspark"].network.save(tmp_path, torch.float32)
    record = json.loads((tmp_path / "config.json").read_text())
    record |= {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    nested = {"dflash_config": {one: record.pop(one) for one in names[:2]}}
    for name in ("sample_from_anchor", "causal_head"):
        del record[name]
    (tmp_path / "config.json").write_text(json.dumps(record | nested))
    torch.save(
        {"mask_token_id": MASK, "embedding": torch.arange(D)}, tmp_path / "mask_embedding.pt"
    )
    given = read(tmp_path)
    assert given.config.own_mask and given.mask_embedding.tolist() == [*range(D)]
    (tmp_path / "mask_embedding.pt").write_bytes(b"no")
    refuses("can't be used", read, tmp_path)
    (tmp_path / "mask_embedding.pt").unlink()
    state = toys["dspark"].network.state_dict()
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of a head's dimensions, in turn
    turned = {name: one for name, one in state.items() if name.endswith(ROTATED)}
    for name, one in turned.items():
        turned[name] = one.unflatten(0, (-1, 8))[:, order].flatten(0, 1)
    assert len(turned) == 8
    save_file(state | turned, tmp_path / WEIGHTS)
    assert read(tmp_path).config == DSPARK
    for name, one in read(tmp_path).state_dict().items():
        assert torch.equal(one, state[name])


def test_muse_glimmers_assistant_is_transformers(tmp_path):
    whole = language_parts.made("muse_glimmer")
    whole.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, torch.float32)
    target = NativeModel(checkpoint, checkpoint.stack, library.kernels())
    sizes = {name: value for name, value in SIZES.items() if not name.endswith("_id")}
    sizes |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    own = dict(target_layer_ids=[0, 1], block_size=4, mask_token_id=MASK, sliding_window=4)
    theirs = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**sizes, **own, head_dim=8))
    spread_out(theirs, 6, 0.3).save_pretrained(tmp_path / "drafter")
    network = load_block(tmp_path / "drafter", TargetParts.of(target))
    toy = Toy.__new__(Toy)
    toy.target = target
    toy.drafter = BlockDrafter(network, target, library.kernels(), within=math.inf)
    ids = words(random.Random(0), 20)
    with torch.no_grad():
        states = whole(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        block = torch.tensor([[ids[-1], *[MASK] * 3]])
        rows = F.embedding(block, whole.get_input_embeddings().weight)
        cache = DFlashCache(config=theirs.config)
        cache.set_previous_accepted_tokens(len(ids) - 1)
        hidden = theirs(rows, torch.cat(states[1:3], -1), cache=cache).last_hidden_state[0, 1:]
        right = whole.get_output_embeddings()(hidden).softmax(-1)
    tree = TokenTree(ids[-1])
    nodes = [0, tree.add(0, 5, "any"), tree.add(1, 6, "any")]
    given = toy.drafter.answer([toy.begin(ids[:-1], ids[-1]).request(tree, nodes)])[0].dense()
    assert (given - right).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["confident", "wide windows", "scaled", "dflash2"])
def test_a_gguf_file_holds_the_folders_network(toys, kind, tmp_path):
    given = toys[kind].network
    path = gguf_files.block_drafter(tmp_path / "d.gguf", given)
    assert is_kind(path, BLOCK) and not is_kind(tmp_path / "none.gguf", BLOCK)
    network = read(path)
    exact = {"rope": network.config.rope, "eps": network.config.eps}
    assert network.config == replace(KINDS[kind], **exact)
    for name, tensor in given.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor.bfloat16())


def test_a_gguf_file_that_can_not_be_is_refused(toys, tmp_path, monkeypatch):
    path, given = tmp_path / "d.gguf", toys["wide windows"].network
    for name, value, why in (
        ("dflash.rope.dimension_count", 4, "heads of 8, of which 4 turn"),
        ("dflash.attention.sliding_window_pattern", [1, 1], "does not say of which layers"),
        ("dflash.other", 3, "its metadata sets dflash.other"),
        ("tokenizer.ggml.mask_token_id", VOCAB, f"mask_token_id is {VOCAB}"),
    ):
        finish = gguf_files.finish

        def changed(writer, name=name, value=value, finish=finish):
            for fields in writer.kv_data:
                fields.pop(name, None)
            add = writer.add_array if isinstance(value, list) else writer.add_uint32
            add(name, value)
            finish(writer)

        with monkeypatch.context() as patch:
            patch.setattr(gguf_files, "finish", changed)
            gguf_files.block_drafter(path, given)
        refuses(f"d.gguf.*{why}", read, path)
    whole = gguf_files.block_drafter(path, given).read_bytes()
    path.write_bytes(whole[:2000])
    refuses("d.gguf", is_kind, path, BLOCK)


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
def test_a_gguf_drafter_drafts_for_a_gguf_target(tmp_path):
    """Whose embedding is in blocks; the kernels run both."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    model = gguf_files.write(tmp_path / "m.gguf", "llama", gguf_files.model_of("llama"), {"": q8})
    sizes = {"hidden_size": 64, "target_size": 64, "vocab_size": 288, "mask_token": 287}
    torch.manual_seed(0)
    network = spread_out(BlockNetwork(replace(KINDS["confident"], **sizes)), 4, 0.3)
    file = gguf_files.block_drafter(tmp_path / "d.gguf", network, q8)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(str(model), "dyspec", drafter=str(file), budget=6) as llm:
        given = llm.generate(["abc"], params)[0]
        assert given.token_ids == llm.generate(["abc"], params, method="ar")[0].token_ids
        assert given.statistics.sources["drafter"].drafted
    toy, probs, ids = Toy.__new__(Toy), [], words(random.Random(0), 20)
    toy.target = open_model(str(model), None, torch.device("cpu")).model
    for kind, kernels in ((NativePasses, library.kernels()), (TorchPasses, None)):
        loaded = load_block(file, TargetParts.of(toy.target))
        toy.drafter = BlockDrafter(loaded, toy.target, kernels, within=math.inf)
        assert isinstance(toy.drafter.passes, kind)
        probs.append(toy.begin(ids[:-1], ids[-1]).distributions(TokenTree(ids[-1]), [0]))
    assert (probs[0] - probs[1]).abs().max() < probs[1].max() / 20


def test_windows_are_read_as_other_engines_read_them(toys, tmp_path):
    toys["dflash"].network.save(tmp_path, torch.float32)
    record, near, far = json.loads((tmp_path / "config.json").read_text()), "sliding", "full"
    used, flash = "use_sliding_window", "dflash_config"
    del record["causal_head"]
    for kinds, change, windows, ordered in (
        ([near, far], {used: True}, (6, None), [True, False]),
        ([near, near], {}, (6, 6), [True, True]),
        ([near, far], {"is_causal": False, flash: {"causal": True}}, (6, None), [False, False]),
        ([near, far], {used: False, flash: {"swa_window_size": 5}}, (5, None), [True, False]),
        ([far, near], {flash: {"causal": True}}, (None, 6), [True, True]),
        ([far, far], {used: True}, (), [False, False]),
        ([far, far], {flash: {"use_swa": True}}, (6, 6), [False, False]),
        ([], {flash: {"use_swa": True, "swa_window_size": 5}}, (5, 5), [False, False]),
    ):
        named = {"layer_types": [f"{kind}_attention" for kind in kinds], "sliding_window": 6}
        (tmp_path / "config.json").write_text(json.dumps(record | named | change))
        config = read(tmp_path).config
        assert config.windows == windows and [config.attention(i)[1] for i in (0, 1)] == ordered


def test_what_does_not_fit_is_refused(toys, tmp_path):
    toys["dspark"].network.save(tmp_path)
    path = tmp_path / "config.json"
    record = json.loads(path.read_text())
    both = {"layer_types": ["sliding_attention"] * 2}
    short = {"layer_types": ["sliding_attention"], "sliding_window": 6}
    for change, match in (
        ({"markov_head_type": "rnn"}, "markov_head_type: 'rnn'; known: vanilla"),
        (short, r"\['sliding_attention'\] for 2 layers, sliding_window 6"),
        (both, "sliding_window None"),
        (both | {"sliding_window": 0}, "sliding_window 0"),
        (both | {"sliding_window": 6, "use_sliding_window": False}, "use_sliding_window False"),
        (both | {"sliding_window": 3, "is_causal": False}, "3 is shorter than its block of 4"),
        ({"use_sliding_window": True, "sliding_window": 6}, r"layer_types \[\] for 2 layers"),
        ({"layer_types": ["sliding_attention", "other"], "sliding_window": 6}, "'other'"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 10.0}}}, "by kind of layer"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"projector_type": "domino"}, "projector_type: 'domino'; known: dflash, dflash2, dspark"),
        ({"mask_token_id": None}, "mask_token_id: None; must be a whole number of at least 0"),
        ({"block_size": 10**9}, "block_size: 1000000000; must be a whole number from 1 to 1024"),
        ({"block_size": 4.7}, "block_size: 4.7"),
        ({"selector_top_k": -3}, "selector_top_k: -3"),
        ({"selector_top_k": 3}, "selector_rank: 0; must be a whole number of at least 1"),
        ({"conv_kernel_size": 2, "conv_group_size": 3}, "conv_group_size: 3; must divide"),
        ({"output_multiplier": -1.0}, "output_multiplier: -1.0; must be a positive number"),
        ({"output_multiplier": 0}, "output_multiplier: 0; must be a positive number"),
        ({"final_logit_softcapping": float("nan")}, "final_logit_softcapping: nan"),
        ({"target_layer_ids": "01"}, "target_layer_ids: '01'; must be numbers"),
        ({"draft_vocab_size": 5, "selector_top_k": 3, "selector_rank": 2}, "selector and a head"),
        ({"num_key_value_heads": 8}, "sizes that can't be together: .* are 32, 48, 4, 8, 8"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: 'gelu_pytorch_tanh'; known: silu"),
        ({"mask_token_id": VOCAB}, f"mask_token_id is {VOCAB}"),
        ({"target_layer_ids": [0, 9]}, "the model has 1 to 3"),
        ({"hidden_size": 64}, "64 wide, the target's are 32"),
        ({"markov_rank": 5}, r"markov_w1.weight .and 1 more. has shape"),
        ({"num_hidden_layers": 3}, "lack layers.2"),
        ({"num_hidden_layers": 1}, "no place for layers.1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"block_size": 1, "sample_from_anchor": False}, "drafts nothing"),
    ):
        path.write_text(json.dumps(record | change))
        refuses(f"^{tmp_path}.*{match}", read, tmp_path)
    with pytest.raises(InvalidInput, match=r"--vocab router: .* takes no router"):
        make_shortlist(toys["dspark"].drafter, toys["dspark"].target, "router", None, None)
