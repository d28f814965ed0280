"""From a `.gguf` file's metadata to a configuration as transformers has it.

llama.cpp's `gguf-py/gguf/constants.py` names the keys. Only architectures in
`ARCHITECTURES` are read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quickbeam.errors import InvalidInput, first_line
from quickbeam.models.families.reading import NotDescribed, check_count
from quickbeam.models.weights.gguf.file import GgufFile
from quickbeam.models.weights.gguf.metadata import (
    Metadata,
    chosen,
    gemma4,
    has_window,
    layer_normed,
    plain,
    windows,
)

SIGMOID = 2  # of expert_gating_func


def _llama(m: Metadata) -> dict[str, Any]:
    """Mixtral with experts, Granite with its factors, and Mistral with a window in all layers."""
    fields = plain(m)
    if m.get("expert_count"):
        return fields | chosen(m) | {"model_type": "mixtral"}
    m.get("expert_used_count")
    factors = ("attention.scale", "embedding_scale", "residual_scale")
    if any(f"{m.name}.{one}" in m.file.metadata for one in factors):
        return fields | _factors(m, fields["head_dim"] ** -0.5)
    if not has_window(m):
        return fields | {"model_type": "llama"}
    near = windows(m, every=0)
    if "full_attention" in near["layer_types"]:
        raise m.refusal("attention.sliding_window_pattern", "leaves out layers")
    return fields | {"model_type": "mistral", "sliding_window": near["sliding_window"]}


def _factors(m: Metadata, scale: float) -> dict[str, Any]:
    """Return Granite's factors but that of logits. `scale`: attention's where no key says it."""
    return {
        "model_type": "granite",
        "embedding_multiplier": m.get("embedding_scale") or 1.0,
        "residual_multiplier": m.get("residual_scale") or 1.0,
        "attention_multiplier": m.get("attention.scale") or scale,
        "logits_scaling": 1.0,
    }


def _qwen2(m: Metadata) -> dict[str, Any]:
    fields = plain(m) | _some_windows(m) | {"model_type": "qwen2"}
    if not fields.pop("attention_bias"):
        raise NotDescribed(
            "its queries, keys and values have no bias, as its architecture has: take the model's "
            "folder instead"
        )
    return fields


def _some_windows(m: Metadata) -> dict[str, Any]:
    """Return the windows of the layers that a file names, if it names any."""
    return windows(m) | {"use_sliding_window": True} if has_window(m) else {}


# as llama.cpp has it
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _normed(m: Metadata, default: bool = True) -> dict[str, Any]:
    """Return whether the probabilities of the chosen experts are made to add up to 1."""
    return {"norm_topk_prob": bool(m.get("expert_weights_norm", default))}


def _qwen3_5(m: Metadata, tiled: bool = True) -> dict[str, Any]:
    """`tiled`: the heads of values are ordered otherwise than transformers has them."""
    heads, every = m["ssm.time_step_rank"], m.get("full_attention_interval", 4)
    layers = m["block_count"] - m.get("nextn_predict_layers", 0)
    kinds = ("full_attention", "linear_attention")
    return plain(m) | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": [kinds[(i + 1) % every != 0] for i in range(layers)],
        "linear_conv_kernel_dim": m["ssm.conv_kernel"],
        "linear_num_key_heads": m["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": m["ssm.state_size"],
        "linear_value_head_dim": m["ssm.inner_size"] // heads,
        "value_heads_tiled": tiled,
    }


def _qwen3_5_moe(m: Metadata) -> dict[str, Any]:
    return _qwen3_5(m) | chosen(m, "num_experts") | {"model_type": "qwen3_5_moe_text"}


def _qwen3_moe(m: Metadata) -> dict[str, Any]:
    return plain(m) | chosen(m) | _ALL_SPARSE | _normed(m) | {"model_type": "qwen3_moe"}


def _qwen3_next(m: Metadata) -> dict[str, Any]:
    fields = _qwen3_5(m, tiled=False) | chosen(m, "num_experts") | _ALL_SPARSE | _normed(m)
    return fields | {"model_type": "qwen3_next", "gates_apart": True}


def _granite(m: Metadata) -> dict[str, Any]:
    return plain(m) | _factors(m, m["attention.scale"]) | {"logits_scaling": m["logit_scale"]}


def _olmoe(m: Metadata) -> dict[str, Any]:
    return plain(m) | chosen(m, "num_experts") | {"model_type": "olmoe"} | _normed(m, False)


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    """What no key says is as published."""
    fields = plain(m) | windows(m, 2) | chosen(m)
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"] |= {"truncate": False}
    return fields | {
        "model_type": "gpt_oss",
        "intermediate_size": m["expert_feed_forward_length"],
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _lfm2(m: Metadata) -> dict[str, Any]:
    fields = plain(m)
    del fields["hidden_act"]
    heads = m.each("attention.head_count_kv")
    return fields | {
        "model_type": "lfm2",
        "norm_eps": fields.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": m["shortconv.l_cache"],
        "conv_bias": False,
    }


def _lfm2_moe(m: Metadata) -> dict[str, Any]:
    dense = m["leading_dense_block_count"]
    if (gating := m.get("expert_gating_func")) != SIGMOID:
        raise m.refusal("expert_gating_func", f"is {gating}")
    return _lfm2(m) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        **chosen(m, "num_experts"),
        **_normed(m),
        "routed_scaling_factor": 1.0,
        "use_expert_bias": m.has(f"blk.{dense}.exp_probs_b.bias"),
    }


def _mamba(m: Metadata) -> dict[str, Any]:
    heads = m["ssm.time_step_rank"]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": m["ssm.inner_size"] // heads,
        "mamba_n_groups": m["ssm.group_count"],
        "mamba_d_state": m["ssm.state_size"],
        "mamba_d_conv": m["ssm.conv_kernel"],
        "mamba_conv_bias": any(one.endswith("ssm_conv1d.bias") for one in m.file.tensors),
        "mamba_proj_bias": False,
        "time_step_limit": [0.0, math.inf],
    }


def _granite_hybrid(m: Metadata) -> dict[str, Any]:
    count = m.each("attention.head_count_kv")
    return _granite(m) | {
        **_mamba(m),
        "model_type": "granitemoehybrid",
        "layer_types": ["full_attention" if one else "linear_attention" for one in count],
        "position_embedding_type": "rope" if m.get("rope.scaling.finetuned") else None,
        "gates_apart": True,
        "num_local_experts": m.get("expert_count", 0),
        "num_experts_per_tok": m.get("expert_used_count", 0),
    }


def _falcon_h1(m: Metadata) -> dict[str, Any]:
    """The weights hold the model's factors."""
    factors = ["attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out"]
    return plain(m) | {
        **_mamba(m),
        **dict.fromkeys((f"{one}_multiplier" for one in factors), 1.0),
        "model_type": "falcon_h1",
        "mamba_d_ssm": m["ssm.inner_size"],
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        "projectors_bias": False,
        "mamba_rms_norm": m.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(m: Metadata) -> dict[str, Any]:
    """What no key says is as published."""
    kinds = ("mlp", "full_attention", "linear_attention")
    shared, widths = m.each("attention.head_count_kv"), m.each("feed_forward_length")
    by_layer = [1 if kv else 0 if inner else 2 for kv, inner in zip(shared, widths, strict=True)]
    fields, of = plain(m), _mamba(m)
    for name in ("hidden_act", "rope_parameters"):
        del fields[name]
    return fields | {
        "model_type": "nemotron_h",
        "layers_block_type": [kinds[one] for one in by_layer],
        "layer_norm_epsilon": fields.pop("rms_norm_eps"),
        "mamba_num_heads": of["mamba_n_heads"],
        "mamba_head_dim": of["mamba_d_head"],
        "n_groups": of["mamba_n_groups"],
        "ssm_state_size": of["mamba_d_state"],
        "conv_kernel": of["mamba_d_conv"],
        "use_conv_bias": of["mamba_conv_bias"],
        "use_bias": False,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "mlp_bias": any(one.endswith("ffn_up.bias") for one in m.file.tensors),
        "time_step_min": 0.001,
    }


def _smollm3(m: Metadata) -> dict[str, Any]:
    rotated = [int((i + 1) % 4 != 0) for i in range(m["block_count"])]  # as llama.cpp has it
    return plain(m) | {"model_type": "smollm3", "no_rope_layers": rotated}


def _phi3(m: Metadata) -> dict[str, Any]:
    window = m["attention.sliding_window"] if has_window(m) else None
    return plain(m) | {"model_type": "phi3", "sliding_window": window}


def _later_gemma(m: Metadata, model_type: str, largest: int, every: int) -> dict[str, Any]:
    fields = plain(m) | windows(m, every)
    # the largest model's attention is scaled by the width, as llama.cpp has it
    of_width = fields["hidden_size"] // fields["num_attention_heads"]
    scalar = of_width if m["block_count"] == largest else fields["head_dim"]
    if scale := m.get("attention.scale"):
        scalar = round(scale**-2, 3)
        scalar = int(scalar) if scalar.is_integer() else scale**-2  # as transformers has it
    return fields | {
        "model_type": model_type,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": m.get("attn_logit_softcapping"),
        "final_logit_softcapping": m.get("final_logit_softcapping"),
    }


def _gemma2(m: Metadata) -> dict[str, Any]:
    """Files from before there were keys for its softcaps have these."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    fields = _later_gemma(m, "gemma2", 46, 2)
    return fields | {name: m.get(name, cap) for name, cap in caps.items()}


def _gemma3(m: Metadata) -> dict[str, Any]:
    fields = _later_gemma(m, "gemma3_text", 62, 6)
    near = {"rope_theta": float(m.get("rope.freq_base_swa", 10000.0)), "rope_type": "default"}
    rope = {"full_attention": fields["rope_parameters"], "sliding_attention": near}
    return fields | {"rope_parameters": rope}


def _gpt2(m: Metadata) -> dict[str, Any]:
    """Its positions are a table, and no key of angles is read."""
    return {
        "architectures": [m.name],
        "model_type": "gpt2",
        "n_embd": m["embedding_length"],
        "n_inner": m.get("feed_forward_length"),
        "n_layer": m["block_count"],
        "n_head": m["attention.head_count"],
        "n_positions": m.context_length,
        "layer_norm_epsilon": float(m["attention.layer_norm_epsilon"]),
        "vocab_size": m.file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not m.has("output.weight"),
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _starcoder2(m: Metadata) -> dict[str, Any]:
    fields = layer_normed(m, "norm_epsilon") | {
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": m["attention.sliding_window"] if has_window(m) else None,
    }
    del fields["mlp_bias"]
    return fields | {"use_bias": fields.pop("attention_bias")}


def _stablelm(m: Metadata) -> dict[str, Any]:
    """Without norms of their own, feed-forwards stand beside the attention."""
    head_norms = m.has("blk.0.attn_q_norm.weight")
    fields = layer_normed(m, "layer_norm_eps") | {
        "model_type": "stablelm",
        "use_parallel_residual": not m.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": head_norms,
        "head_norms_stacked": head_norms,
    }
    del fields["head_dim"]  # follows from the width
    return fields | {"use_qkv_bias": fields.pop("attention_bias")}


def _nemotron(m: Metadata) -> dict[str, Any]:
    return layer_normed(m, "norm_eps") | {"model_type": "nemotron", "hidden_act": "relu2"}


def _qwen2_moe(m: Metadata) -> dict[str, Any]:
    fields = plain(m) | _some_windows(m) | chosen(m, "num_experts") | _ALL_SPARSE
    fields |= _normed(m, False) | {"model_type": "qwen2_moe"}
    return fields | {"qkv_bias": fields.pop("attention_bias")}


def _olmo2(m: Metadata) -> dict[str, Any]:
    if has_window(m):
        raise m.refusal("attention.sliding_window", f"is {m['attention.sliding_window']}")
    return plain(m) | {"model_type": "olmo2"}


# what makes the fields of a configuration, by llama.cpp's name of the architecture
ARCHITECTURES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "granite": _granite,
    "granitemoe": lambda m: _granite(m) | chosen(m) | {"model_type": "granitemoe"},
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": lambda m: plain(m) | _some_windows(m) | {"model_type": "qwen3"},
    "qwen3moe": _qwen3_moe,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "qwen3next": _qwen3_next,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "gpt2": _gpt2,
    "nemotron": _nemotron,
    "phi3": _phi3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "olmo2": _olmo2,
    "gemma": lambda m: plain(m) | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4,
}
# whose queries and keys have the two halves of a head alternate row by row
INTERLEAVED = {"llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "smollm3"}
# of which, for transformers, rows of experts' gates and of what they let through alternate
INTERLEAVED_EXPERTS = {"gpt-oss"}


def architecture_of(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """Return the name of a file's architecture, and a configuration's fields.

    Raises `NotDescribed` for another architecture, and `InvalidInput` for metadata that is missing,
    or that is not known and may change answers.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise NotDescribed(
            f"the architecture {name!r} of a .gguf file, which is not known here; known are "
            f"{', '.join(sorted(ARCHITECTURES))}: take the model's folder instead"
        )
    if "token_embd.weight" not in file.tensors:
        raise InvalidInput("its weights lack token_embd.weight: download it again")
    metadata = Metadata(file, name)
    check_count(metadata["block_count"], "layers")  # transformers would make them all
    try:
        fields = ARCHITECTURES[name](metadata)
        metadata.refuse_unknown()
    except InvalidInput:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInput(
            f"its metadata is of other kinds ({first_line(error)}): download it again"
        ) from error
    return name, fields
