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
    INSTEAD,
    LAYER_KINDS,
    Metadata,
    expert_fields,
    has_window,
    layer_normed,
    scaling_of,
    single,
    usual_fields,
    window_fields,
)
from quickbeam.models.weights.gguf.names import ANGLES

SIGMOID = 2  # of expert_gating_func
SHARED_LAYERS = "attention.shared_kv_layers"


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Mixtral with experts, Granite with its factors, and Mistral with a window in all layers."""
    fields = usual_fields(metadata, "llama")
    if metadata.get("expert_count"):
        return fields | expert_fields(metadata) | {"model_type": "mixtral"}
    metadata.note("expert_used_count")
    factors = ("attention.scale", "embedding_scale", "residual_scale")
    if any(f"{metadata.name}.{factor}" in metadata.file.metadata for factor in factors):
        usual_scale = fields["head_dim"] ** -0.5
        return fields | _factors(metadata, usual_scale) | {"model_type": "granite"}
    if not has_window(metadata):
        return fields
    window = window_fields(metadata, every=0)
    if "full_attention" in window["layer_types"]:
        raise metadata.refusal("attention.sliding_window_pattern", "leaves out layers")
    return fields | {"model_type": "mistral", "sliding_window": window["sliding_window"]}


def _factors(metadata: Metadata, scale: float) -> dict[str, Any]:
    """Return Granite's factors but that of logits. `scale`: attention's where no key says it."""
    return {
        "embedding_multiplier": metadata.get("embedding_scale") or 1.0,
        "residual_multiplier": metadata.get("residual_scale") or 1.0,
        "attention_multiplier": metadata.get("attention.scale") or scale,
        "logits_scaling": 1.0,
    }


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    fields = usual_fields(metadata, "qwen2") | _some_windows(metadata)
    if not fields.pop("attention_bias"):
        raise NotDescribed(
            "its queries, keys and values have no bias, as its architecture has: take the model's "
            "folder instead"
        )
    return fields


def _some_windows(metadata: Metadata) -> dict[str, Any]:
    """Return the windows of the layers that a file names, if it names any."""
    return window_fields(metadata) | {"use_sliding_window": True} if has_window(metadata) else {}


# as llama.cpp has it
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _renormalised(metadata: Metadata, default: bool = True) -> dict[str, Any]:
    """Return whether the probabilities of the active experts are made to add up to 1."""
    return {"norm_topk_prob": bool(metadata.get("expert_weights_norm", default))}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return usual_fields(metadata, "qwen3") | _some_windows(metadata)


def _qwen3_5(
    metadata: Metadata, model_type: str = "qwen3_5_text", tiled: bool = True
) -> dict[str, Any]:
    """`tiled`: the heads of values stand in another sequence than in transformers."""
    heads, every = metadata["ssm.time_step_rank"], metadata.get("full_attention_interval", 4)
    layers = metadata["block_count"] - metadata.get("nextn_predict_layers", 0)
    kinds = ("full_attention", "linear_attention")
    return usual_fields(metadata, model_type) | {
        "num_hidden_layers": layers,
        "layer_types": [kinds[(i + 1) % every != 0] for i in range(layers)],
        "linear_conv_kernel_dim": metadata["ssm.conv_kernel"],
        "linear_num_key_heads": metadata["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata["ssm.state_size"],
        "linear_value_head_dim": metadata["ssm.inner_size"] // heads,
        "value_heads_tiled": tiled,
    }


def _qwen3_5_moe(metadata: Metadata) -> dict[str, Any]:
    return _qwen3_5(metadata, "qwen3_5_moe_text") | expert_fields(metadata, "num_experts")


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    fields = usual_fields(metadata, "qwen3_moe") | expert_fields(metadata)
    return fields | _ALL_SPARSE | _renormalised(metadata)


def _qwen3_next(metadata: Metadata) -> dict[str, Any]:
    fields = _qwen3_5(metadata, "qwen3_next", tiled=False) | {"gates_apart": True}
    fields |= expert_fields(metadata, "num_experts")
    return fields | _ALL_SPARSE | _renormalised(metadata)


def _granite(metadata: Metadata, model_type: str = "granite") -> dict[str, Any]:
    fields = usual_fields(metadata, model_type)
    fields |= _factors(metadata, metadata["attention.scale"])
    return fields | {"logits_scaling": metadata["logit_scale"]}


def _granite_moe(metadata: Metadata) -> dict[str, Any]:
    return _granite(metadata, "granitemoe") | expert_fields(metadata)


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    fields = usual_fields(metadata, "olmoe") | expert_fields(metadata, "num_experts")
    return fields | _renormalised(metadata, default=False)


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of GPT-OSS. Those that no key holds are as OpenAI published them."""
    fields = usual_fields(metadata, "gpt_oss")
    fields |= window_fields(metadata, every=2) | expert_fields(metadata)
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"] |= {"truncate": False}
    return fields | {
        "intermediate_size": metadata["expert_feed_forward_length"],
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _lfm2(metadata: Metadata, model_type: str = "lfm2") -> dict[str, Any]:
    fields = usual_fields(metadata, model_type)
    del fields["hidden_act"]
    heads = metadata.by_layer("attention.head_count_kv")
    return fields | {
        "norm_eps": fields.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata["shortconv.l_cache"],
        "conv_bias": False,
    }


def _lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    dense = metadata["leading_dense_block_count"]
    gating = metadata.get("expert_gating_func")
    if gating != SIGMOID:
        raise metadata.refusal("expert_gating_func", f"is {gating}")
    fields = _lfm2(metadata, "lfm2_moe") | expert_fields(metadata, "num_experts")
    return fields | {
        **_renormalised(metadata),
        "num_dense_layers": dense,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": metadata.has(f"blk.{dense}.exp_probs_b.bias"),
    }


def _some_tensor(metadata: Metadata, ending: str) -> bool:
    return any(name.endswith(ending) for name in metadata.file.tensors)


def _mamba(metadata: Metadata) -> dict[str, Any]:
    heads = metadata["ssm.time_step_rank"]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": metadata["ssm.inner_size"] // heads,
        "mamba_n_groups": metadata["ssm.group_count"],
        "mamba_d_state": metadata["ssm.state_size"],
        "mamba_d_conv": metadata["ssm.conv_kernel"],
        "mamba_conv_bias": _some_tensor(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": False,
        "time_step_limit": [0.0, math.inf],
    }


def _granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    kv_heads = metadata.by_layer("attention.head_count_kv")
    return _granite(metadata, "granitemoehybrid") | {
        **_mamba(metadata),
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else None,
        "gates_apart": True,
        "num_local_experts": metadata.get("expert_count", 0),
        "num_experts_per_tok": metadata.get("expert_used_count", 0),
    }


def _falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """The weights hold the model's factors."""
    factors = ["attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out"]
    return usual_fields(metadata, "falcon_h1") | {
        **_mamba(metadata),
        **{f"{factor}_multiplier": 1.0 for factor in factors},
        "mamba_d_ssm": metadata["ssm.inner_size"],
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        "projectors_bias": False,
        "mamba_rms_norm": metadata.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Nemotron-H. Those that no key holds are as NVIDIA published them."""
    kv_heads = metadata.by_layer("attention.head_count_kv")
    widths = metadata.by_layer("feed_forward_length")
    kinds = []
    for count, width in zip(kv_heads, widths, strict=True):
        kinds.append("full_attention" if count else "mlp" if width else "linear_attention")
    fields, mamba = usual_fields(metadata, "nemotron_h"), _mamba(metadata)
    del fields["hidden_act"]
    del fields["rope_parameters"]
    return fields | {
        "layers_block_type": kinds,
        "layer_norm_epsilon": fields.pop("rms_norm_eps"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": False,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "mlp_bias": _some_tensor(metadata, "ffn_up.bias"),
        "time_step_min": 0.001,
    }


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    layers = range(metadata["block_count"])
    rotated = [int((i + 1) % 4 != 0) for i in layers]  # as llama.cpp has it
    return usual_fields(metadata, "smollm3") | {"no_rope_layers": rotated}


def _phi3(metadata: Metadata) -> dict[str, Any]:
    window = metadata["attention.sliding_window"] if has_window(metadata) else None
    return usual_fields(metadata, "phi3") | {"sliding_window": window}


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return usual_fields(metadata, "gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def _later_gemma(metadata: Metadata, model_type: str, largest: int, every: int) -> dict[str, Any]:
    """`largest`: how many layers the largest model has. `every`: as of `window_fields`."""
    fields = usual_fields(metadata, model_type) | window_fields(metadata, every)
    scalar = fields["head_dim"]
    if metadata["block_count"] == largest:  # scaled by the width, as llama.cpp has it
        scalar = fields["hidden_size"] // fields["num_attention_heads"]
    scale = metadata.get("attention.scale")
    if scale:
        scalar = round(scale**-2, 3)
        scalar = int(scalar) if scalar.is_integer() else scale**-2  # as transformers has it
    return fields | {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    """Softcaps are as published in older files, which have no keys for them."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    fields = _later_gemma(metadata, "gemma2", largest=46, every=2)
    return fields | {name: metadata.get(name, cap) for name, cap in caps.items()}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    fields = _later_gemma(metadata, "gemma3_text", largest=62, every=6)
    theta = float(metadata.get("rope.freq_base_swa", 10000.0))
    fields["rope_parameters"] = {
        "full_attention": fields["rope_parameters"],
        "sliding_attention": {"rope_theta": theta, "rope_type": "default"},
    }
    return fields


def gemma4_fields(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Gemma 4, or of its assistant's layers.

    Keys and values of full attention are the same where a layer of it has no tensor of values. An
    assistant has no such layer, but other numbers of heads.
    """
    windowed = [bool(flag) for flag in metadata.by_layer("attention.sliding_window_pattern")]
    widths, sharing = metadata.by_layer("feed_forward_length"), metadata.get(SHARED_LAYERS, 0)
    counts = list(zip(windowed, metadata.by_layer("attention.head_count_kv"), strict=True))
    kv_heads = single((count for local, count in counts if local), "numbers of heads")
    full_kv_heads = single((count for local, count in counts if not local), "numbers of heads")
    with_keys = len(windowed) - sharing
    full_layers = [i for i, local in enumerate(windowed) if not local and i < with_keys]
    values_are_keys = any(not metadata.has(f"blk.{i}.attn_v.weight") for i in full_layers)
    if with_keys == 0:
        values_are_keys = full_kv_heads != kv_heads
    head_dim, full_head_dim = metadata["attention.key_length_swa"], metadata["attention.key_length"]
    table = metadata.file.tensors.get("per_layer_token_embd.weight")
    rope = {
        "sliding_attention": _rotary_of_kind(metadata, "_swa", head_dim),
        "full_attention": _rotary_of_kind(metadata, "", full_head_dim) | _proportional(metadata),
    }
    fields = usual_fields(
        metadata,
        "gemma4_text",
        intermediate_size=widths[0],
        num_key_value_heads=kv_heads,
        rope_parameters=rope,
    )
    fields |= {
        "head_dim": head_dim,
        "global_head_dim": full_head_dim,
        "attention_k_eq_v": values_are_keys,
        "num_global_key_value_heads": full_kv_heads if values_are_keys else None,
        "layer_types": [LAYER_KINDS[flag] for flag in windowed],
        "sliding_window": metadata["attention.sliding_window"],
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "num_kv_shared_layers": sharing,
        "use_double_wide_mlp": len(set(widths)) > 1,
        "hidden_size_per_layer_input": metadata.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else 1,
        "enable_moe_block": bool(metadata.get("expert_count")),
    }
    if full_kv_heads != fields["num_key_value_heads"] and not values_are_keys:
        raise metadata.refusal("attention.head_count_kv", "differs from layer to layer")
    if fields["enable_moe_block"]:
        fields |= expert_fields(metadata, "num_experts")
        fields["top_k_experts"] = fields.pop("num_experts_per_tok")
    return fields


def _rotary_of_kind(metadata: Metadata, kind: str, head_dim: int) -> dict[str, Any]:
    """Return the rotary parameters of one kind of layers, whose heads are rotated in all of their
    dimensions. `kind`: how its keys end."""
    key = f"rope.dimension_count{kind}"
    rotary_dim = metadata.get(key, head_dim)
    if rotary_dim != head_dim:
        raise metadata.refusal(key, f"is {rotary_dim} of heads of {head_dim}")
    scaling = scaling_of(metadata)["rope_type"]
    if scaling != "default":
        raise metadata.refusal("rope.scaling.factor", f"makes angles {scaling}")
    return {"rope_theta": float(metadata[f"rope.freq_base{kind}"]), "rope_type": "default"}


def _proportional(metadata: Metadata) -> dict[str, Any]:
    """Return what says that only the first pairs of a head are rotated.

    In the file, the angles of the other pairs are divided by numbers that leave nothing of them.
    """
    if not metadata.has(ANGLES[0]):
        return {}
    divisors = metadata.values(ANGLES[0])
    rotated = divisors.count(1.0)
    if any(divisor < 1e20 for divisor in divisors[rotated:]):
        raise InvalidInput(f"the angles of {ANGLES[0]} are not known: {INSTEAD}")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    """Its positions are a table, and no key of angles is read."""
    return {
        "architectures": [metadata.name],
        "model_type": "gpt2",
        "n_embd": metadata["embedding_length"],
        "n_inner": metadata.get("feed_forward_length"),
        "n_layer": metadata["block_count"],
        "n_head": metadata["attention.head_count"],
        "n_positions": metadata.context_length,
        "layer_norm_epsilon": float(metadata["attention.layer_norm_epsilon"]),
        "vocab_size": metadata.file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not metadata.has("output.weight"),
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    fields = layer_normed(metadata, "starcoder2", "norm_epsilon") | {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": metadata["attention.sliding_window"] if has_window(metadata) else None,
    }
    del fields["mlp_bias"]
    return fields | {"use_bias": fields.pop("attention_bias")}


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    """Without norms of their own, feed-forwards stand beside the attention."""
    head_norms = metadata.has("blk.0.attn_q_norm.weight")
    fields = layer_normed(metadata, "stablelm", "layer_norm_eps") | {
        "use_parallel_residual": not metadata.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": head_norms,
        "head_norms_stacked": head_norms,
    }
    del fields["head_dim"]  # follows from the width
    return fields | {"use_qkv_bias": fields.pop("attention_bias")}


def _nemotron(metadata: Metadata) -> dict[str, Any]:
    return layer_normed(metadata, "nemotron", "norm_eps") | {"hidden_act": "relu2"}


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    fields = usual_fields(metadata, "qwen2_moe") | _some_windows(metadata)
    fields |= expert_fields(metadata, "num_experts") | _ALL_SPARSE
    fields |= _renormalised(metadata, default=False)
    return fields | {"qkv_bias": fields.pop("attention_bias")}


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    if has_window(metadata):
        raise metadata.refusal(
            "attention.sliding_window", f"is {metadata['attention.sliding_window']}"
        )
    return usual_fields(metadata, "olmo2")


# what makes the fields of a configuration, by llama.cpp's name of the architecture
ARCHITECTURES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
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
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4_fields,
}
# in whose files the two halves of a head of queries and keys alternate row by row
INTERLEAVED = {"llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "smollm3"}
# in whose parameters for transformers rows of experts' gates and of what they multiply alternate
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
