"""Names of a `.gguf` file's tensors, and of transformers' parameters.

llama.cpp's `gguf-py/gguf/constants.py` names the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quickbeam.mtp import MtpLayout

LAYER = "model.layers.{}."
# tensors of a layer, without `.weight` and `.bias`
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
FEED_FORWARD = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
OUTSIDE = {  # by transformers' names
    "model.embed_tokens": "token_embd",
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
ANGLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
LLAMA = ATTENTION | FEED_FORWARD


def experts(module: str, router: str = "gate") -> dict[str, str]:
    """Return names of experts that are in a module of the layer."""
    parts = {f"ffn_{one}_exps": f"{module}.experts.{one}_proj" for one in ("gate", "up", "down")}
    return {"ffn_norm": FEED_FORWARD["ffn_norm"], "ffn_gate_inp": f"{module}.{router}", **parts}


NORMS = {
    "post_attention_norm": AFTER["post_attention_norm"],
    "post_ffw_norm": AFTER["post_ffw_norm"],
}
LFM2 = ATTENTION | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
DELTA = NORMS | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_BESIDE = {"gate": "gate_proj", "up": "up_proj", "down": "output_linear"}  # with experts or without
OF_GRANITE_HYBRID = {
    f"ffn_{name}{kind}": f"shared_mlp.{own}"
    for name, own in _BESIDE.items()
    for kind in ("", "_shexp")
}
NEMOTRON_H = {
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    **{f"attn_{one}": f"mixer.{one}_proj" for one in "qkv"},
    **{f"ffn_{one}": f"mixer.{one}_proj" for one in ("up", "down")},
    **{name: own.replace("mamba.", "mixer.") for name, own in MAMBA.items()},
}
OF_FALCON_H1 = {
    "ffn_norm": "pre_ff_layernorm.weight",  # the file's name has none
    **{f"ffn_{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
}
SHARED = {
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
}
OF_GEMMA4 = AFTER | {
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    **{f"ffn_{one}_exps": f"experts.{one}_proj" for one in ("gate", "up", "gate_up", "down")},
}
OF_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
OF_LFM2_MOE = {"ffn_norm": "ffn_norm", "exp_probs_b.bias": "feed_forward.expert_bias"}


def is_behind(tensor: str, layers: int) -> bool:
    """Return whether a tensor is of a block behind so many layers: one that predicts what comes
    after the next token."""
    block = re.match(r"blk\.(\d{1,6})\.", tensor)
    return block is not None and int(block[1]) >= layers


def stored_names(layer: dict[str, str], layers: int, tensors: Iterable[str]) -> dict[str, str]:
    """Return the file's names of its `tensors` by transformers' names.

    `layer`: those of a layer, without `.weight` or `.bias` where transformers' name has them.
    """
    held = {name for one in tensors for name in (one, one.rpartition(".")[0])}
    found = {own: name for own, name in OUTSIDE.items() if name in held}
    for i in range(layers):
        found |= _of_layer(layer, i, i, held)
    return found


def mtp_names(
    layer: dict[str, str], block: int, tensors: Iterable[str], layout: MtpLayout
) -> dict[str, str]:
    """Return the same of an MTP head, which is a `block` behind the model's.

    Its layer has the names of the model's first, its other modules those of the `layout`.
    """
    held = {name for one in tensors for name in (one, one.rpartition(".")[0])}
    at, last = f"blk.{block}.nextn", f"blk.{block}.nextn.shared_head_norm"
    modules = {layout.fc: "eh_proj", layout.token_norm: "enorm", layout.hidden_norm: "hnorm"}
    found = {own: f"{at}.{name}" for own, name in modules.items()}
    found |= {layout.norm: last if last in held else "output_norm"}
    return stored_names(layer, 0, tensors) | found | _of_layer(layer, 0, block, held)


def _of_layer(layer: dict[str, str], number: int, block: int, held: set[str]) -> dict[str, str]:
    names = {f"blk.{block}.{name}": own for name, own in layer.items()}
    return {f"{LAYER.format(number)}{own}": name for name, own in names.items() if name in held}
