"""Helpers that the families' files share: a configuration that notes what is read, and parts of a
`Stack` that many families have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    Linear,
    Norm,
    ParameterRows,
    Recurrent,
    Rotary,
    Routing,
    Stack,
)

TOKENS = ("_token_id", "_token_ids", "_token_index")  # how the names of special tokens end
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
    architectures attention_dropout attn_pdrop auto_map cache_implementation chunk_size_feed_forward
    classifier_dropout dtype embd_pdrop embedding_dropout hidden_dropout hidden_size id2label
    init_method initializer_range input_jitter_noise intermediate_size is_encoder_decoder
    is_llama_config label2id max_position_embeddings max_window_layers model_type
    moe_intermediate_size n_positions neftune_noise_alpha num_logits_to_keep
    num_nextn_predict_layers original_max_position_embeddings output_attentions
    output_hidden_states output_router_logits pretraining_tp problem_type quantization_config
    resid_pdrop residual_dropout return_dict router_aux_loss_coef shared_expert_intermediate_size
    tie_word_embeddings tokenizer_class torch_dtype transformers.js_config transformers_version
    unsloth_fixed unsloth_version use_cache vocab_size
"""
HARMLESS = set(_HARMLESS.split())
EXPERTS_HERE = ("gpt_oss", "minimax_m2", "mixtral", "qwen3_moe", "qwen3_vl_moe_text")
# other names of attributes, by the configuration's model_type, as transformers has them
_DEEPSEEK = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_GPT2 = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_BAMBA = {"layer_types": "layers_block_type"}
ATTRIBUTES: dict[str, dict[str, str]] = {
    "bamba": _BAMBA,
    "codegen": _GPT2,
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": _DEEPSEEK,
    "dots1": {"num_local_experts": "n_routed_experts"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "exaone": {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
    },
    "falcon_h1": _BAMBA,
    "flex_olmo": {"num_local_experts": "num_experts"},
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": {"head_dim": "qk_rope_head_dim", "num_local_experts": "n_routed_experts"},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "gptj": _GPT2,
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "hunyuan_v1_moe": {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    "internlm3": {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
    "lfm3": {"rms_norm_eps": "norm_eps"},
    "mellum": {"num_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    "nemotron_h": _BAMBA | {"num_local_experts": "n_routed_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "sarvam_mla": _DEEPSEEK
    | {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    "solar_open": {"num_local_experts": "n_routed_experts"},
    **{kind: {"num_experts": "num_local_experts"} for kind in EXPERTS_HERE},
}
# model types whose layers heed `partial_rotary_factor`; transformers' code for others doesn't
PARTIAL = {
    *("bamba", "glm", "glm4", "glm4_moe", "glm4v_text", "gpt_neox", "mellum", "minimax_m2"),
    *("nemotron", "persimmon", "phi", "phi3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("solar_open", "stablelm"),
}
PAGE = "docs/extending/architectures.md"  # how a family is described
MOST = 4096  # layers, or experts of a layer, that a configuration is believed to name
# Norms of a layer by their modules' names: before its mixer and its feed-forward, and after them.
Names = tuple[str | None, ...]
BEFORE: Names = ("input_layernorm", "post_attention_layernorm")
AFTER: Names = (None, None, "post_attention_layernorm", "post_feedforward_layernorm")
AROUND: Names = ("input_layernorm", "pre_feedforward_layernorm", *AFTER[2:])


class NotDescribed(InvalidInput):
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
        self.ignore(name)
        value = getattr(self._config, name, None)
        return default if value is None else value

    def ignore(self, names: str, **only: Any) -> None:
        """Accept attributes that change nothing in the family's models, by their `names`.

        They follow from others, or transformers' code for the family doesn't read them. `only`:
        those that may have one value.
        """
        same = [name for name, one in only.items() if getattr(self._config, name, None) == one]
        other_names = self._config.attribute_map
        self._read.update(other_names.get(name, name) for name in (*names.split(), *same))

    def must(self, name: str, *accepted: Any) -> None:
        """Raise `NotDescribed` for an attribute with another value than `accepted` and None."""
        if (value := self.get(name)) is not None and value not in accepted:
            raise NotDescribed(f"{name}={value!r}")

    def layer(self, i: int) -> Config:
        """Return the configuration of layer `i`, for a model whose layers may have their own."""
        fields = self._config.to_dict()
        each = {int(number): own for number, own in (fields.get("per_layer_config") or {}).items()}
        names = SimpleNamespace(attribute_map={}, **fields | each.get(i, {}))
        config = Config(names, self.number_format)
        self._read.add("per_layer_config")
        config._read = self._read
        return config

    def refuse_unknown(self) -> None:
        """Raise `NotDescribed` naming attributes that are set and that the family didn't read."""
        unknown = [
            name
            for name, value in self._config.to_dict().items()
            if name not in self._read | HARMLESS
            and not name.startswith("_")  # transformers' own notes
            and not name.endswith(TOKENS)
            and value not in (None, False, 0, "", [], {}, ())
        ]
        if unknown:
            raise NotDescribed(f"its configuration sets {', '.join(sorted(unknown))}")


def check_count(count: Any, what: str) -> None:
    """Raise `InvalidInput` for a number of layers or experts that no model has."""
    if type(count) is not int or not 0 < count <= MOST:
        raise InvalidInput(
            f"its configuration can't be read ({str(count)[:80]} {what}; 1 to {MOST} are "
            "accepted): download it again"
        )


def tensors(*modules: str, bias: bool = False, transposed: bool = False) -> Linear:
    """Return the stacked weights, and biases, of modules."""
    return Linear(
        tuple(ParameterRows(f"{name}.weight", transposed=transposed) for name in modules),
        tuple(ParameterRows(f"{name}.bias") for name in modules) if bias else (),
    )


def halves(module: str) -> Linear:
    """Return the two halves of one module's weight, the first as gates."""
    return Linear(
        (ParameterRows(f"{module}.weight", 0, 2), ParameterRows(f"{module}.weight", 1, 2))
    )


def rms(c: Config, module: str, plus_one: bool = False) -> Norm:
    return Norm((f"{module}.weight",), float(c.rms_norm_eps), plus_one=plus_one)


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
    if kinds is None and size:
        raise NotDescribed(f"a window of {size} without layer_types")
    if kinds is None or kinds[i] == "full_attention":
        return None
    if kinds[i] != "sliding_attention" or not size:
        raise NotDescribed(f"a layer of kind {kinds[i]} with a window of {size}")
    return int(size)


def rotary_dim(c: Config, dim: int, kind: str | None = None) -> int:
    """Return how many of a head's `dim` dimensions the rotary angles turn."""
    # older names of what `rope_parameters` holds
    c.ignore("partial_rotary_factor rope_theta rope_scaling rope_local_base_freq")
    rope = c.rope_parameters if kind is None else c.rope_parameters.get(kind)
    if rope.get("rope_type") == "proportional":  # the rest turns by no angle
        return dim
    if own := rope.get("rotary_dim"):  # of a .gguf file
        return int(own)
    share = rope.get("partial_rotary_factor") if c.get("model_type") in PARTIAL else None
    return int(dim * (share or 1))


def attention(
    c: Config, i: int, bias: bool = False, out_bias: bool | None = None, **changes: Any
) -> Attention:
    """Return the attention of layer `i`.

    `bias`: of queries, keys and values, and of what follows if `out_bias` is None. `changes`: other
    fields than those of Llama's, and `kind`: that of the layer, where angles go by it.
    """
    at, dim = f"model.layers.{i}.self_attn", changes.get("head_dim") or head_dim(c)
    kind = changes.pop("kind", None)
    c.ignore("layer_types sliding_window")  # what the window follows from, if at all
    fields: dict[str, Any] = {
        "qkv": tensors(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", bias=bias),
        "out": tensors(f"{at}.o_proj", bias=bias if out_bias is None else out_bias),
        "heads": c.num_attention_heads,
        "kv_heads": c.get("num_key_value_heads", c.num_attention_heads),
        "head_dim": dim,
        "scaling": dim**-0.5,
        "window": window(c, i) if "window" not in changes else None,
        "rotary": Rotary(),
        "rotary_dim": rotary_dim(c, dim, kind) if changes.get("rotary", True) else 0,
    }
    return Attention(**(fields | changes))


def head_norms(
    c: Config, i: int, names: tuple[str, str] = ("q_norm", "k_norm"), plus_one: bool = False
) -> Any:
    """Return RMS norms of queries and keys, by their names in the attention."""
    query, key = (rms(c, f"model.layers.{i}.self_attn.{name}", plus_one) for name in names)
    return query, key


def gated(
    c: Config,
    i: int,
    bias: bool = False,
    act: str | None = None,
    name: str = "mlp",
    fused: bool = False,
) -> FeedForward:
    """Return Llama's feed-forward of layer `i`.

    `name`: its module's in the layer. `fused`: the gates and the rest are one weight.
    """
    at = f"model.layers.{i}.{name}"
    up = tensors(f"{at}.gate_proj", f"{at}.up_proj", bias=bias)
    if fused:
        up = halves(f"{at}.gate_up_proj")
    down = tensors(f"{at}.down_proj", bias=bias)
    return FeedForward(up, down, activation(act or c.hidden_act), True)


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
    check_count(count, "experts")
    at = f"model.layers.{i}.{name}.experts" if name else f"model.layers.{i}.experts"

    def one(n: int) -> FeedForward:
        up = (ParameterRows(f"{at}.gate_up_proj", k, 2, expert=n) for k in (0, 1))
        down = Linear((ParameterRows(f"{at}.down_proj", expert=n),))
        return FeedForward(Linear(tuple(up)), down, activation(act or c.hidden_act), True)

    return Experts(routing, tuple(one(n) for n in range(count)), **more)


def plain(c: Config, up: str, down: str, bias: bool) -> FeedForward:
    """Return a feed-forward without a gate, by its modules' names."""
    first, last = tensors(up, bias=bias), tensors(down, bias=bias)
    return FeedForward(first, last, activation(c.hidden_act), False)


def layer_of(
    c: Config,
    i: int,
    mixer: Attention | Recurrent | None,
    feed_forward: FeedForward | Experts | None,
    names: Names = BEFORE,
    norm: Callable[[str], Norm] | None = None,
    inside: str = "model.layers",
    **more: Any,
) -> Layer:
    """Return layer `i` of the list `inside`.

    `norm`: makes a norm of its module's name; RMS norms where it is None. `more`: other fields of
    `Layer`.
    """
    make = norm or (lambda name: rms(c, name))
    norms: list[Any] = [name and make(f"{inside}.{i}.{name}") for name in names]
    if isinstance(mixer, Recurrent):
        return Layer(None, feed_forward, *norms, **more | {"recurrent": mixer})
    return Layer(mixer, feed_forward, *norms, **more)


def decoder(c: Config, layer: Callable[[int], Layer], **changes: Any) -> Stack:
    """Return a stack with Llama's names. `changes`: other fields than those of Llama's."""
    fields: dict[str, Any] = {
        "embedding": "model.embed_tokens.weight",
        "inside": "model.layers",
        "layers": tuple(layer(i) for i in range(c.num_hidden_layers)),
        "head": tensors("lm_head"),
    }
    if "norm" not in changes:
        fields["norm"] = rms(c, "model.norm")
    return Stack(**(fields | changes))
