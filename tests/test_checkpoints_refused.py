"""Folders that are no feature drafter, or another model's, are refused in words that name what is
wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints import (
    DRAFT,
    LLAMA,
    VOCAB,
    D,
    eagle1,
    eagle3,
    read,
    write,
)
from quickbeam.drafters.checkpoints import is_eagle
from quickbeam.errors import InvalidInput


@pytest.mark.parametrize("how", ["safetensors", "bin"])
def test_a_causal_language_model_is_no_drafter(tmp_path, how):
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    folder = write(
        tmp_path / "llama", LLAMA, {k: v.clone() for k, v in model.state_dict().items()}, how
    )
    assert not is_eagle(folder)
    with pytest.raises(InvalidInput, match=r"no known feature drafter.*known: EAGLE and EAGLE-2"):
        read(folder)


def test_what_is_no_folder_of_weights_is_no_drafter(tmp_path):
    assert not is_eagle(tmp_path / "nowhere")
    folder = write(tmp_path / "drafter", LLAMA, eagle1())
    (folder / "model.safetensors").write_bytes(b"broken")
    assert not is_eagle(folder)


def refuse(folder, config, state, match, **target):
    with pytest.raises(InvalidInput, match=match) as caught:
        read(write(folder, config, state), **target)
    assert str(caught.value).startswith(str(folder)) and str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layernorms": True}, "layernorms: True"),
        ({"logit_scale": 0.5}, "logit_scale: 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: False"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: sliding_attention"),
        ({"hidden_act": "quick_gelu"}, "unknown activation 'quick_gelu'; known: silu"),
        (
            {"rope_scaling": {"rope_type": "mystery", "factor": 2.0}},
            "no rotary angles.*mystery",
        ),
        (
            {"num_attention_heads": "four"},
            "num_attention_heads: .four.; want a whole number",
        ),
        (
            {"intermediate_size": 64},
            r"midlayer.mlp.gate_proj.weight has shape \[48, 32\], expected \[64, 32\]",
        ),
        ({"vocab_size": VOCAB + 1}, f"vocab_size is {VOCAB + 1}, the target has {VOCAB}"),
        (
            {"draft_vocab_size": DRAFT + 1},
            r"lm_head.weight has shape \[20, 32\], expected \[21, 32\]",
        ),
        ({"target_hidden_size": 64}, r"fc.weight has shape \[32, 96\], expected \[32, 192\]"),
        ({"fc_norm": True}, "lacks fc_norm.0.weight"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 6, 14]}, "the model has 1 to 12"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash'.*known: "),
        ({"speculators_model_type": "eagle3"}, "doesn't say norm_before_residual"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, change, match):
    refuse(tmp_path / "drafter", LLAMA | {"draft_vocab_size": DRAFT} | change, eagle3(), match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"norm.weight": None}, r"lacks norm.weight, of shape \[32\]"),
        ({"d2t": None}, "lacks d2t"),
        ({"lm_head.weight": None}, "lacks lm_head.weight"),
        (
            {"midlayer.self_attn.k_proj.weight": torch.zeros(16, 32)},
            r"k_proj.weight has shape \[16, 32\], expected \[16, 64\]",
        ),
        (
            {"midlayer.self_attn.q_norm.weight": torch.ones(8)},
            "no place for midlayer.self_attn.q_norm.weight",
        ),
        (
            {"midlayer.self_attn.o_proj.bias": torch.ones(32)},
            "no place for midlayer.self_attn.o_proj.bias",
        ),
        ({"d2t": torch.zeros(DRAFT + 1, dtype=torch.int64)}, r"d2t has shape \[21\]"),
        ({"d2t": torch.full((DRAFT,), VOCAB)}, f"leaves the target's {VOCAB} tokens"),
        ({"d2t": -torch.arange(DRAFT)}, "names one twice"),
        (
            {"embed_tokens.weight": torch.zeros(VOCAB - 1, D)},
            f"embedding has {VOCAB - 1} tokens, the target has {VOCAB}",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, match):
    state = {k: v for k, v in (eagle3() | change).items() if v is not None}
    refuse(tmp_path / "drafter", LLAMA | {"draft_vocab_size": DRAFT}, state, match)


def test_another_target_is_refused(tmp_path):
    refuse(
        tmp_path / "a",
        LLAMA,
        eagle1(),
        "reads hidden states 32 wide, the target's are 64",
        size=64,
    )
    refuse(
        tmp_path / "b",
        LLAMA | {"draft_vocab_size": DRAFT},
        eagle3(),
        "32 wide, the target 64, and it lacks its own",
        size=64,
    )
    state = eagle3() | {"embed_tokens.weight": torch.zeros(VOCAB, D)}
    refuse(
        tmp_path / "c",
        LLAMA | {"draft_vocab_size": DRAFT},
        state,
        "reads hidden states 32 wide, the target's are 64",
        size=64,
    )
    config = LLAMA | {"vocab_size": 10, "draft_vocab_size": DRAFT}
    refuse(tmp_path / "d", config, eagle3(), "draft_vocab_size is 20, the target has 12", vocab=12)


def test_a_broken_folder_is_refused(tmp_path):
    folder = tmp_path / "drafter"
    with pytest.raises(InvalidInput, match=r"config.json can't be read"):
        read(folder)
    write(folder, LLAMA, eagle1())
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(InvalidInput, match=r"can't be read as weights .*download it again"):
        read(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"has no weights: none of model.safetensors"):
        read(folder)
    # anything but tensors is not unpickled
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="can't be read as weights"):
        read(folder)
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidInput, match="no index of weights"):
        read(folder)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"fc.weight": "a.safetensors"}}'
    )
    with pytest.raises(InvalidInput, match=r"a.safetensors can't be read"):
        read(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(InvalidInput, match="holds no object"):
        read(folder)
