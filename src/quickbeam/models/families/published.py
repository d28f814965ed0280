"""What published configurations set and transformers' code for the family doesn't read.

By `model_type`: names of attributes, with the only value that may be ignored, or `ANY`.
"""

from __future__ import annotations

from typing import Any

ANY: Any = object()


def _any(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ANY)


TOKENS = ("_token_id", "_token_ids", "_token_index")  # how the names of special tokens end
COHERE = {"use_gated_activation": True, "use_parallel_block": True, "rotary_pct": 1.0} | _any(
    "cache_implementation layer_switch order_of_interleaved_layers position_embedding_type "
    "use_embedding_sharing use_parallel_embedding"
)
LFM2 = {"block_use_swiglu": True, "use_pos_enc": True} | _any(
    "block_dim block_ff_dim block_mlp_init_scale block_norm_eps block_out_init_scale "
    "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads"
)
QWEN3_5 = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": []} | _any(
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings"
)
STEPS = _any("time_step_floor time_step_limit time_step_max time_step_min time_step_rank")
IGNORED: dict[str, dict[str, Any]] = {
    "bamba": STEPS | _any("attn_rotary_emb"),
    "cohere": COHERE,
    "cohere2": COHERE,
    "deepseek_v2": _any("n_group topk_group"),
    "falcon_h1": STEPS | {"mamba_use_mlp": True} | _any("attn_layer_indices mlp_expansion_factor"),
    "gemma": _any("cache_implementation hidden_activation"),
    "gemma2": _any("cache_implementation hidden_act"),
    "gemma3_text": _any("cache_implementation"),
    "gemma4_text": _any("cache_implementation expert_intermediate_size"),
    "gpt2": _any("n_ctx task_specific_params"),
    "granite": _any("init_method"),
    "granitemoe": _any("init_method"),
    "granitemoehybrid": {"normalization_function": "rmsnorm"} | _any("init_method"),
    "hunyuan_v1_dense": {"norm_type": "rms", "num_experts": 1}
    | {"use_qk_norm": True, "use_rotary_pos_emb": True}
    | _any("anyres_pooling_size attention_head_dim cla_share_factor class_num dense_list pad_id")
    | _any("mask_init_id org_vocab_size pool_type text_end_id text_start_id"),
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "llama": _any("neftune_noise_alpha perceiver_config pixel_shuffle_factor"),
    "nemotron_h": {"use_mamba_kernels": True}
    | STEPS
    | _any("attention_head_dim hybrid_override_pattern num_query_groups rms_norm_eps"),
    "phi3": _any("full_attn_mod interpolate_factor"),
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": QWEN3_5,
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm"}
    | _any("attention_softmax_in_fp32 layer_norm_epsilon scale_attention_softmax_in_fp32"),
}


def ignored(kind: str, name: str, value: Any) -> bool:
    """Whether an attribute of that value changes nothing for models of that `model_type`."""
    accepted = IGNORED.get(kind, {}).get(name)
    return name.endswith(TOKENS) or accepted is ANY or (accepted is not None and accepted == value)
