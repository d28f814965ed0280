"""Helpers that the families' files share: a configuration that notes what is read, and parts of a
`Stack` that many families have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    Linear,
    Norm,
    Rotary,
    Routing,
    Stack,
    Tensor,
)

# What published configurations set and transformers' code for the family doesn't read: by
# `model_type`, names of attributes, with the only value that may be ignored, or `ANY`.
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


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
# What a configuration may set without changing what the model computes: for training, for
# generation, and for other programs. Who reads the weights heeds `quantization_config`.
_HARMLESS = """
    architectures attention_dropout attn_pdrop auto_map chunk_size_feed_forward
    classifier_dropout dtype embd_pdrop embedding_dropout hidden_dropout hidden_size id2label
    initializer_range input_jitter_noise intermediate_size is_encoder_decoder is_llama_config
    label2id max_position_embeddings max_window_layers model_type moe_intermediate_size
    n_positions num_nextn_predict_layers original_max_position_embeddings output_attentions
    output_hidden_states output_router_logits pretraining_tp problem_type quantization_config
    resid_pdrop residual_dropout return_dict router_aux_loss_coef
    shared_expert_intermediate_size tie_word_embeddings torch_dtype transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_cache vocab_size
"""
HARMLESS = set(_HARMLESS.split())
EXPERTS_HERE = ("gpt_oss", "mixtral", "qwen3_moe", "qwen3_vl_moe_text")
# other names of attributes, by the configuration's model_type, as transformers has them
ATTRIBUTES: dict[str, dict[str, str]] = {
    "bamba": {"layer_types": "layers_block_type"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "falcon_h1": {"layer_types": "layers_block_type"},
    "glm4_moe": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "lfm3": {"rms_norm_eps": "norm_eps"},
    "nemotron_h": {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    **{kind: {"num_experts": "num_local_experts"} for kind in EXPERTS_HERE},
}


class NotDescribed(Exception):
    """No family's file describes this model. The message says why."""


class Config:
    """A configuration that notes which attributes a family reads.

    `number_format`: the model's.
    """

    def __init__(self, config: Any, number_format: torch.dtype) -> None:
        self._config, self._read, self.number_format = config, set[str](), number_format

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._config, name):
            raise NotDescribed(f"its configuration has no {name}")
        return self.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or `default` where it is missing or None."""
        self._read.add(self._config.attribute_map.get(name, name))
        found = getattr(self._config, name, None)
        return default if found is None else found

    def must(self, name: str, *accepted: Any) -> None:
        """Raise `NotDescribed` for an attribute with another value than `accepted` and None."""
        if (found := self.get(name)) is not None and found not in accepted:
            raise NotDescribed(f"{name}={found!r}")

    def layer(self, i: int) -> Config:
        """Return the configuration of layer `i`, for a model whose layers may have their own."""
        fields = self._config.to_dict()
        each = {int(number): own for number, own in (fields.get("per_layer_config") or {}).items()}
        names = SimpleNamespace(attribute_map={}, **fields | each.get(i, {}))
        found = Config(names, self.number_format)
        self._read.add("per_layer_config")
        found._read = self._read
        return found

    def refuse_unknown(self) -> None:
        """Raise `NotDescribed` naming attributes that are set and that the family didn't read."""
        kind = getattr(self._config, "model_type", "")
        unknown = [
            name
            for name, value in self._config.to_dict().items()
            if name not in self._read | HARMLESS
            and not name.startswith("_")  # transformers' own notes
            and not ignored(kind, name, value)
            and value not in (None, False, 0, "", [], {}, ())
        ]
        if unknown:
            raise NotDescribed(f"its configuration sets {', '.join(sorted(unknown))}")


def tensors(*modules: str, bias: bool = False, transposed: bool = False) -> Linear:
    """Return the stacked weights, and biases, of modules."""
    return Linear(
        tuple(Tensor(f"{name}.weight", transposed=transposed) for name in modules),
        tuple(Tensor(f"{name}.bias") for name in modules) if bias else (),
    )


def halves(module: str) -> Linear:
    """Return the two halves of one module's weight, the first as gates."""
    return Linear((Tensor(f"{module}.weight", 0, 2), Tensor(f"{module}.weight", 1, 2)))


def rms(c: Config, module: str, plus_one: bool = False) -> Norm:
    return Norm((f"{module}.weight",), c.rms_norm_eps, plus_one=plus_one)


def layer_norm(module: str, epsilon: float, bias: bool = True) -> Norm:
    return Norm((f"{module}.weight",), epsilon, f"{module}.bias" if bias else None, centred=True)


def activation(name: str) -> str:
    """Return the kernels' name of transformers' activation. Raises `NotDescribed`."""
    if name not in ACTIVATIONS:
        raise NotDescribed(f"the activation {name}")
    return ACTIVATIONS[name]


def head_dim(c: Config) -> int:
    return int(c.get("head_dim") or c.hidden_size // c.num_attention_heads)


def window(c: Config, i: int) -> int | None:
    """Return the window of layer `i` by the configuration's `layer_types`."""
    kinds, size = c.get("layer_types"), c.get("sliding_window")
    if kinds is None or kinds[i] == "full_attention":
        return None
    if kinds[i] != "sliding_attention" or not size:
        raise NotDescribed(f"a layer of kind {kinds[i]} with a window of {size}")
    return int(size)


def turned(c: Config, dim: int, kind: str | None = None) -> int:
    """Return how many of a head's `dim` dimensions the rotary angles turn."""
    for name in ("partial_rotary_factor", "rope_theta", "rope_scaling", "rope_local_base_freq"):
        c.get(name)  # older names of what `rope_parameters` holds
    rope = c.rope_parameters if kind is None else c.rope_parameters.get(kind)
    if rope.get("rope_type") == "proportional":  # the rest turns by no angle
        return dim
    return int(dim * (rope.get("partial_rotary_factor") or 1))


def attention(
    c: Config, i: int, bias: bool = False, out_bias: bool | None = None, **changes: Any
) -> Attention:
    """Return the attention of layer `i`.

    `bias`: of queries, keys and values, and of what follows if `out_bias` is None. `changes`: other
    fields than those of Llama's, and `kind`: that of the layer, where angles go by it.
    """
    at, dim = f"model.layers.{i}.self_attn", changes.get("head_dim") or head_dim(c)
    kind = changes.pop("kind", None)
    for name in ("layer_types", "sliding_window"):  # what the window follows from, if at all
        c.get(name)
    told: dict[str, Any] = {
        "qkv": tensors(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", bias=bias),
        "out": tensors(f"{at}.o_proj", bias=bias if out_bias is None else out_bias),
        "heads": c.num_attention_heads,
        "kv_heads": c.get("num_key_value_heads", c.num_attention_heads),
        "head_dim": dim,
        "scaling": dim**-0.5,
        "window": window(c, i) if "window" not in changes else None,
        "rotary": Rotary(),
        "turned": turned(c, dim, kind) if changes.get("rotary", True) else 0,
    }
    return Attention(**(told | changes))


def head_norms(c: Config, i: int, names: tuple[str, str], plus_one: bool = False) -> Any:
    """Return RMS norms of queries and keys, by their names in the attention."""
    query, key = (rms(c, f"model.layers.{i}.self_attn.{name}", plus_one) for name in names)
    return query, key


def gated(
    c: Config, i: int, bias: bool = False, act: str | None = None, name: str = "mlp"
) -> FeedForward:
    """Return Llama's feed-forward of layer `i`. `name`: its module's in the layer."""
    at = f"model.layers.{i}.{name}"
    up = tensors(f"{at}.gate_proj", f"{at}.up_proj", bias=bias)
    return FeedForward(
        up, tensors(f"{at}.down_proj", bias=bias), activation(act or c.hidden_act), True
    )


def experts(
    c: Config,
    i: int,
    routing: Routing,
    count: int,
    name: str = "mlp",
    act: str | None = None,
    **more: Any,
) -> Experts:
    """Return the experts of layer `i`, whose weights are stacked: `[count, 2 * inner, d]`, gates
    first, and `[count, d, inner]`. `name`: the module that they are in, empty for the layer itself.
    `more`: other fields of `Experts`."""
    at = f"model.layers.{i}.{name}.experts" if name else f"model.layers.{i}.experts"

    def one(n: int) -> FeedForward:
        up = (Tensor(f"{at}.gate_up_proj", k, 2, expert=n) for k in (0, 1))
        down = Linear((Tensor(f"{at}.down_proj", expert=n),))
        return FeedForward(Linear(tuple(up)), down, activation(act or c.hidden_act), True)

    return Experts(routing, tuple(one(n) for n in range(count)), **more)


def plain(c: Config, up: str, down: str, bias: bool) -> FeedForward:
    """Return a feed-forward without a gate, by its modules' names."""
    first, last = tensors(up, bias=bias), tensors(down, bias=bias)
    return FeedForward(first, last, activation(c.hidden_act), False)


def before(
    c: Config, i: int, mixer: Attention, feed_forward: FeedForward | Experts, **more: Any
) -> Layer:
    """Return a layer with Llama's norms."""
    at = f"model.layers.{i}"
    return Layer(
        mixer,
        feed_forward,
        rms(c, f"{at}.input_layernorm"),
        rms(c, f"{at}.post_attention_layernorm"),
        **more,
    )


def decoder(c: Config, layer: Callable[[int], Layer], **changes: Any) -> Stack:
    """Return a stack with Llama's names. `changes`: other fields than those of Llama's."""
    told: dict[str, Any] = {
        "embedding": "model.embed_tokens.weight",
        "inside": "model.layers",
        "layers": tuple(layer(i) for i in range(c.num_hidden_layers)),
        "head": tensors("lm_head"),
    }
    if "norm" not in changes:
        told["norm"] = rms(c, "model.norm")
    return Stack(**(told | changes))
