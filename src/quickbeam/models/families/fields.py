"""What the fields of a configuration may hold, by name: nothing that a file says is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.stack import Matrices, Stack
from quickbeam.models.stack_tensors import experts

MOST = 4096  # of layers, heads and experts
MOST_PARTS = 1 << 18  # layers times heads, or experts
LARGEST, HUGE = 2**31 - 1, 1e30  # of sizes, and of other numbers


class Kind(NamedTuple):
    """`told`: what is accepted, in words. `holds(value)`: whether a value is."""

    told: str
    holds: Callable[[Any], bool]


def _whole(least: int, most: int) -> Kind:
    told = f"a whole number from {least} to {most}"
    return Kind(told, lambda value: type(value) is int and least <= value <= most)


def _number(least: float, told: str) -> Kind:
    return Kind(told, lambda value: type(value) in (int, float) and least <= value <= HUGE)


def _listed(of: Kind, count: int | None = None) -> Kind:
    def holds(value: Any) -> bool:
        listed = isinstance(value, list | tuple) and count in (None, len(value))
        return listed and all(of.holds(one) for one in value)

    return Kind(f"a list of {'' if count is None else count}, each {of.told}", holds)


def _either(first: Kind, second: Kind) -> Kind:
    told = f"{first.told}, or {second.told}"
    return Kind(told, lambda value: first.holds(value) or second.holds(value))


def _holds_rope(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(
        ROPE[name].holds(one) if name in ROPE else not isinstance(one, dict) or _holds_rope(one)
        for name, one in value.items()
        if one is not None or name == "rope_theta"
    )


COUNT, SIZE, INDEX = _whole(1, MOST), _whole(1, LARGEST), _whole(0, LARGEST)
MAYBE = _whole(0, MOST)
NUMBER, FROM_0 = _number(-HUGE, "a number"), _number(0, "a number from 0")
POSITIVE = _number(1e-30, "a number above 0")
LIMIT = Kind("a number, or infinity", lambda value: type(value) in (int, float) and value == value)
FLAG = Kind("true or false", lambda value: isinstance(value, bool) or value in (0, 1))
TEXT = Kind("a text", lambda value: isinstance(value, str))
FORMAT = Kind(
    "the name of a number format, such as bfloat16",
    lambda value: value == "auto" or isinstance(getattr(torch, str(value), None), torch.dtype),
)
ROPE = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "short_mscale"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim", "partial_rotary_factor"), FROM_0),
    **dict.fromkeys(("short_factor", "long_factor"), _listed(POSITIVE)),
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "llama_4_scaling_beta": FROM_0,
    "original_max_position_embeddings": SIZE,
    "truncate": FLAG,
}
ANGLES = Kind("an object of what `rope_type` needs, or one for each kind of layer", _holds_rope)


def _holds_layers(value: Any) -> bool:
    return isinstance(value, dict) and all(
        str(number).isdecimal() and isinstance(own, dict) and not any(map(_is_odd, own.items()))
        for number, own in value.items()
    )


def _is_odd(field: tuple[str, Any]) -> bool:
    kind, value = KINDS.get(field[0]), field[1]
    return kind is not None and value is not None and not kind.holds(value)


LAYERS = Kind("an object of fields for each layer, by its number", _holds_layers)
NAMES: dict[Kind, str] = {
    COUNT: "num_hidden_layers n_layer num_attention_heads n_head num_key_value_heads "
    "num_global_key_value_heads n_group topk_group "
    "moe_layer_interval decoder_sparse_step n_groups mamba_n_groups mamba_n_heads mamba_num_heads "
    "linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim mamba_d_conv conv_kernel "
    "conv_L_cache",
    MAYBE: "num_experts_per_tok top_k_experts moe_k num_experts num_local_experts n_routed_experts "
    "moe_num_experts moe_num_shared_experts n_shared_experts num_kv_shared_layers num_dense_layers "
    "first_k_dense_replace moe_layer_start_index num_nextn_predict_layers num_mtp_layers",
    SIZE: "hidden_size n_embd intermediate_size vocab_size max_position_embeddings n_positions "
    "head_dim global_head_dim moe_intermediate_size kv_lora_rank q_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
    "mamba_d_head mamba_d_state mamba_head_dim ssm_state_size original_max_position_embeddings",
    INDEX: "hidden_size_per_layer_input vocab_size_per_layer_input sliding_window",
    _whole(-1, LARGEST): "moe_layer_end_index",
    FROM_0: "rms_norm_eps norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon moe_norm_min "
    "router_jitter_noise time_step_min partial_rotary_factor",
    POSITIVE: "rope_theta rope_local_base_freq logits_scaling query_pre_attn_scalar "
    "final_logit_softcapping attn_logit_softcapping swiglu_limit",
    NUMBER: "attention_in_multiplier attention_out_multiplier attention_multiplier "
    "embedding_multiplier key_multiplier lm_head_multiplier logit_scale residual_multiplier "
    "routed_scaling_factor ssm_in_multiplier ssm_out_multiplier swiglu_alpha",
    FLAG: "attention_bias attention_k_eq_v attention_out_bias conv_bias enable_moe_block "
    "lm_head_bias mamba_conv_bias mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mlp_bias "
    "norm_topk_prob projectors_bias qk_layernorm qkv_bias rope_interleave "
    "scale_attn_by_inverse_layer_idx scale_attn_weights tie_word_embeddings use_bias "
    "use_conv_bias use_double_wide_mlp use_expert_bias use_parallel_residual use_qk_norm "
    "use_qkv_bias use_sandwich_norm use_sliding_window",
    TEXT: "activation_function hidden_act hidden_activation mlp_hidden_act model_type "
    "position_embedding_type topk_method",
    _listed(TEXT): "layer_types layers_block_type",
    _listed(INDEX): "attn_layer_indices mlp_only_layers",
    _listed(FLAG): "no_rope_layers",
    _listed(NUMBER, 2): "mlp_multipliers",
    _listed(NUMBER, 5): "ssm_multipliers",
    _listed(LIMIT, 2): "time_step_limit",
    _either(_whole(-1, LARGEST), _listed(INDEX)): "bos_token_id eos_token_id pad_token_id",
    FORMAT: "dtype torch_dtype",
    ANGLES: "rope_parameters rope_scaling",
    LAYERS: "per_layer_config",
}
KINDS = {name: kind for kind, all_names in NAMES.items() for name in all_names.split()}
# what is read before a family is, or beside it
LOADED = (
    *("model_type", "num_hidden_layers", "n_layer", "layer_types", "layers_block_type"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
    *("rope_parameters", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("num_nextn_predict_layers", "num_mtp_layers", "dtype", "torch_dtype"),
)
BY_LAYER = ("layer_types", "layers_block_type", "no_rope_layers")
# what may be null where a family asks for it
OPTIONAL = {
    *NAMES[FLAG].split(),
    *("attn_logit_softcapping", "final_logit_softcapping"),
    "hidden_size_per_layer_input",
}


def refuse(name: str, value: Any, accepted: str) -> InvalidInput:
    """Return the error for a field that holds something else than what is `accepted`."""
    held = "null" if value is None else repr(value)
    held = held if len(held) <= 80 else f"{held[:80]}…"
    return InvalidInput(
        f"its configuration has {name} = {held}, and {accepted} is accepted: download the model "
        "again, or correct it"
    )


def check_field(name: str, value: Any) -> None:
    """Raise `InvalidInput` for a value that the field can't have. None passes."""
    if _is_odd((name, value)):
        raise refuse(name, value, KINDS[name].told)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for fields that can't be, of those that any family's loading reads."""
    for name in LOADED:
        check_field(name, fields.get(name))
    layers = fields.get("num_hidden_layers") or fields.get("n_layer") or 1
    for name in (*NAMES[COUNT].split(), *NAMES[MAYBE].split()):
        count = fields.get(name)
        if name not in LOADED and type(count) is int and count * layers > MOST_PARTS:
            raise refuse(name, count, f"at most {MOST_PARTS // layers} in {layers} layers")


def refuse_odd_sizes(stack: Stack) -> None:
    """Raise `InvalidInput` for numbers of a layer that can't be together."""

    def must(holds: bool, told: str) -> None:
        if not holds:
            raise InvalidInput(f"its configuration has {told}, which can't be together")

    for of in stack.attentions:
        must(of.heads % of.kv_heads == 0, f"{of.heads} heads of queries, {of.kv_heads} of keys")
        must(of.window != 0, "a window of no tokens")
        even = 0 <= of.turned <= of.head_dim and of.turned % 2 == 0
        must(even, f"heads of {of.head_dim}, of which {of.turned} turn")
    for one in stack.recurrents:
        if isinstance(one, Matrices):
            each = one.heads % one.key_heads == one.heads % one.groups == 0
            must(each, f"{one.heads} heads in {one.key_heads} groups")
    for routing, count in ((of.routing, len(of.chosen)) for of in experts(stack)):
        own, rest = divmod(count, routing.groups)
        fits = not rest and routing.best_of_group <= own and routing.top_groups <= routing.groups
        fits = fits and 0 < routing.top <= routing.top_groups * own
        groups = f"{routing.top_groups} of {routing.groups} groups"
        must(fits, f"{routing.top} of {count} experts chosen in {groups}")
